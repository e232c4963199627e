"""Weights that a trainer sends to an engine: broadcasts, shared memory and CUDA IPC handles."""

import base64
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from engine import LLM, SharedWeights, WeightSender
from engine.errors import ConfigError, UpdateFailed
from engine.weights import staging
from engine.weights.transfers import transfer as transfer_module
from engine.weights.transfers.handles import (
    from_plain,
    plain_handle,
    read_handles,
    rebuild_arguments,
)
from engine.weights.transfers.nccl import pickled_id, read_id
from engine.weights.transfers.transfer import UpdateInfo, WeightTransfer
from tests.engine.library.trainers import PROMPT, Trainer, answer, folders, greedy


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


UUID = "GPU-00000000-0000-0000-0000-000000000000"


def joined(llm: LLM, **options: Any) -> WeightSender:
    """Return a trainer in this process, whose group the engine has joined."""
    sender = WeightSender("127.0.0.1", free_port(), 1, "cpu", seconds=20, **options)
    llm.init_weight_transfer(sender.init_info)
    return sender


def sent(sender: WeightSender, tensors: list[tuple[str, Tensor]]) -> threading.Thread:
    """Return a running thread that broadcasts the tensors."""
    thread = threading.Thread(target=sender.send, args=(tensors,), daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("packed", [False, True])
def test_broadcasts_go_on_beside_requests(llm: LLM, trainer: Trainer, packed: bool) -> None:
    """A tensor comes under another's name, or steps wait while tensors are sent."""
    sender = joined(llm, packed=packed, buffer_bytes=20_000)
    handle = llm.start_request(PROMPT, greedy(3000))
    tensors, version = trainer.train(), f"packed {packed}"
    llm.start_weight_update()
    for part in (tensors[:5], tensors[5:]):
        before = llm.stats().output_tokens
        started = threading.Event()

        def late(part: list[tuple[str, Tensor]] = part, begin: threading.Event = started) -> None:
            begin.wait()
            sender.send(part)

        thread = threading.Thread(target=late)
        thread.start()
        threading.Timer(0.2, started.set).start()
        llm.update_weights(sender.update_info(part))
        thread.join()
        assert llm.stats().output_tokens > before + 2
    llm.finish_weight_update(version=version)
    handle.stop()
    assert [name for name, _ in handle.sync(10).outputs[0].versions][-1] == version
    assert answer(llm).token_ids == trainer.says(PROMPT, 8)
    thread = sent(sender, tensors := trainer.train())
    llm.update_weights(sender.update_info(tensors))  # a whole update in one message
    thread.join()
    assert answer(llm).token_ids == trainer.says(PROMPT, 8)
    sender.close()


def test_packing_that_the_beginning_names(llm: LLM, trainer: Trainer) -> None:
    """A trainer of a newer vLLM packs tensors, and tells so when it opens the group alone."""
    named = {"packed": True, "packed_buffer_size_bytes": 20_000}
    sender = WeightSender("127.0.0.1", free_port(), 1, "cpu", buffer_bytes=20_000)
    llm.init_weight_transfer(sender.init_info | named)
    thread = sent(sender, tensors := trainer.train())
    info = sender.update_info(tensors)
    llm.update_weights({key: value for key, value in info.items() if key not in named})
    thread.join()
    assert answer(llm).token_ids == trainer.says(PROMPT, 8)
    sender.close()


def test_shared_memory(llm: LLM, trainer: Trainer) -> None:
    """Tensors that lie behind one another in a segment are read from the wrong place."""
    llm.init_weight_transfer({})
    tensors = trainer.train()
    with SharedWeights(tensors) as shared:
        info = shared.update_info
        llm.update_weights(info, version="shared")
        assert answer(llm).token_ids == trainer.says(PROMPT, 8)
        assert answer(llm).versions == [("shared", 8)]
        name, size = info["ipc_handles"][0]["cpu"]["name"], sum(t.nbytes for _, t in tensors)
        for place, message in (
            ({"name": "../etc/passwd"}, "no segment"),
            ({"name": "manta-none"}, "No such file"),
            ({"name": name, "offset": size}, "shared memory"),
        ):
            with pytest.raises(UpdateFailed, match=message):
                llm.update_weights({**info, "ipc_handles": [{"cpu": place}] * len(tensors)})
    with pytest.raises(UpdateFailed, match="No such file"):
        llm.update_weights(info)


def test_what_is_wrong_changes_nothing(llm: LLM, trainer: Trainer) -> None:
    """A wrong name, shape or dtype changes weights, or the next update fails after it."""
    sender = joined(llm, packed=False)
    wanted, version = answer(llm).token_ids, llm.stats().weights_version
    before = folders()
    tensors = list(trainer.model.state_dict().items())
    name, tensor = tensors[1]
    for wrong, message in (
        ([*tensors, ("extra", tensor)], "unexpected tensor extra"),
        ([tensors[0], (name, tensor[1:]), *tensors[2:]], f"{name} has shape"),
        ([tensors[0], (name, tensor.to(torch.int8)), *tensors[2:]], "dtype"),
        (tensors[:-3], "is missing"),
        ([tensors[0], (name, tensor * torch.nan), *tensors[2:]], "NaN or infinity"),
    ):
        thread = sent(sender, wrong)
        with pytest.raises(UpdateFailed, match=message):
            llm.update_weights(sender.update_info(wrong))
        thread.join()
    info = sender.update_info(tensors)
    for change, message in (
        ({"shapes": info["shapes"][1:]}, "shapes has"),
        ({"dtype_names": ["complex64"] * len(tensors)}, "'complex64' is no dtype"),
        ({"names": 5}, "Expected `array`"),
        ({"ipc_handles": [{}] * len(tensors)}, "the key"),
        ({"ipc_handles_pickled": "!"}, "cannot be read"),
    ):
        with pytest.raises(UpdateFailed, match=message):
            llm.update_weights({**info, **change})
    with pytest.raises(UpdateFailed, match="master_address"):
        llm.init_weight_transfer({"master_port": 1})
    with pytest.raises(UpdateFailed, match="init_weight_transfer_engine first"):
        llm.update_weights(info)
    with pytest.raises(UpdateFailed, match="no update of the weights was started"):
        llm.finish_weight_update()
    assert answer(llm).token_ids == wanted and llm.stats().weights_version == version
    assert folders() == before
    sender.close()


def test_two_trainers_at_once(llm: LLM, trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors of one trainer complete the update of another, and both half updates serve."""
    sender, tensors = joined(llm), trainer.train()
    llm.start_weight_update()
    for part in (tensors[:5], tensors[5:]):
        with pytest.raises(UpdateFailed, match="goes on") as refused:
            llm.start_weight_update()
        assert refused.value.code == "update_in_progress"
        thread = sent(sender, part)
        llm.update_weights(sender.update_info(part))
        thread.join()
    llm.finish_weight_update(version="the first trainer's")
    assert answer(llm).versions == [("the first trainer's", 8)]
    assert answer(llm).token_ids == trainer.says(PROMPT, 8)
    sender.close()
    llm.start_weight_update()
    llm.init_weight_transfer({})  # a trainer that starts again
    llm.start_weight_update()
    with pytest.raises(UpdateFailed, match="no tensor"):
        llm.finish_weight_update()
    monkeypatch.setattr(transfer_module, "ABANDONED_SECONDS", 0.1)
    transfer = WeightTransfer(torch.device("cpu"), 0)
    transfer.start({})
    time.sleep(0.2)
    transfer.start({})
    transfer.close()


DYING = """
import os, sys, torch
from engine import WeightSender
sender = WeightSender("127.0.0.1", int(sys.argv[1]), 1, sys.argv[2], packed=False)
sender.send([("a", torch.zeros(1000))] * 3)
os.kill(os.getpid(), 9)
"""


def dies_in_the_middle(llm: LLM, device: str) -> None:
    """Kill a trainer in a process of its own after some of its tensors have come."""
    port = free_port()
    process = subprocess.Popen([sys.executable, "-c", DYING, str(port), device])
    llm.init_weight_transfer(
        {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    )
    names = [f"a{index}" for index in range(6)]
    info = {"names": names, "dtype_names": ["float32"] * 6, "shapes": [[1000]] * 6}
    began = time.monotonic()
    llm.start_weight_update()
    with pytest.raises(UpdateFailed, match="trainer"):
        llm.update_weights(info)
    assert process.wait(10) == -signal.SIGKILL and time.monotonic() - began < 30


def test_a_trainer_that_dies_in_the_middle(llm: LLM, trainer: Trainer) -> None:
    """The engine waits for a dead trainer for ever, or serves half of its weights."""
    wanted, version = answer(llm).token_ids, llm.stats().weights_version
    dies_in_the_middle(llm, "cpu")
    assert answer(llm).token_ids == wanted and llm.stats().weights_version == version
    sender = joined(llm)
    thread = sent(sender, tensors := trainer.train())
    llm.update_weights(sender.update_info(tensors))
    thread.join()
    assert answer(llm).token_ids == trainer.says(PROMPT, 8), "a new trainer takes over"


def test_no_trainer_is_there() -> None:
    """An engine waits for hours for a trainer that was given another port."""
    transfer = WeightTransfer(torch.device("cpu"), 0, seconds=0.5)
    info = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1}
    with pytest.raises(UpdateFailed, match="connection to the trainer"):
        transfer.init({**info, "world_size": 2})


def test_folders_of_killed_engines_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kill in the middle of a transfer leaves a model in shared memory."""
    monkeypatch.setattr(staging, "temporary_folders", lambda: [tmp_path])
    code = (
        "import os, pathlib; from engine.weights import staging;"
        f"staging.temporary_folders = lambda: [pathlib.Path({str(tmp_path)!r})];"
        "staging.WeightStage(); os._exit(1)"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    (left,) = tmp_path.iterdir()
    mine = staging.WeightStage()
    assert left.exists(), "its owner may be about to lock it"
    os.utime(left / "owner.lock", (0, 0))
    os.utime(mine.folder / "owner.lock", (0, 0))
    other = staging.WeightStage()
    assert {*tmp_path.iterdir()} == {mine.folder, other.folder}
    mine.discard()
    other.discard()


class Slow:
    """A writer of files that waits for an event."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self._save = staging.save_file
        monkeypatch.setattr(staging, "save_file", self)

    def __call__(self, tensors: dict[str, Tensor], file: Path) -> None:
        self.begun.set()
        assert self.go.wait(20)
        self._save(tensors, file)


def taken(trainer: Trainer, free_bytes: int) -> tuple[WeightTransfer, Path, dict[str, Any]]:
    """Return a complete update with this much free memory, its folder, and its tensors."""
    held: dict[str, Any] = {}
    transfer = WeightTransfer(
        torch.device("cpu"), 1000, hold=held.__setitem__, free_bytes=lambda: free_bytes
    )
    raws = [tensor.reshape(-1).view(torch.uint8) for _, tensor in trainer.train()]
    segment = SharedMemory(create=True, size=sum(raw.numel() for raw in raws))
    try:
        segment.buf[: segment.size] = torch.cat(raws).numpy().tobytes()[: segment.size]
        offsets = [sum(raw.numel() for raw in raws[:at]) for at in range(len(raws))]
        tensors = list(trainer.model.state_dict().items())
        info = {
            "names": [name for name, _ in tensors],
            "dtype_names": ["float32"] * len(tensors),
            "shapes": [list(tensor.shape) for _, tensor in tensors],
            "ipc_handles": [{"cpu": {"name": segment.name, "offset": at}} for at in offsets],
        }
        return transfer, Path(transfer.update(info)), held
    finally:
        segment.close()
        segment.unlink()


def equals(trainer: Trainer, tensors: dict[str, Tensor]) -> bool:
    wanted = trainer.model.state_dict()
    return tensors.keys() == wanted.keys() and all(
        torch.equal(tensors[name], tensor) for name, tensor in wanted.items()
    )


def test_held_tensors_are_written_afterwards(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update waits for its files or shares the host with their writer, a replica that joins
    reads half of them, or the tensors stay in memory for ever."""
    slow = Slow(monkeypatch)
    transfer, folder, held = taken(trainer, 2000)
    assert equals(trainer, held[str(folder)]), "at once"
    assert not slow.begun.wait(0.2), "the engine has them not yet"
    with pytest.raises(ConfigError, match="send them again"):
        staging.wait_until_written(folder, 0.2)
    transfer.in_place(str(folder))
    slow.go.set()
    staging.wait_until_written(folder, 20)
    assert equals(trainer, load_file(folder / "model-00001.safetensors"))
    deadline = time.monotonic() + 20
    while held[str(folder)] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not held[str(folder)]
    transfer.close()
    assert not folder.exists()


def test_an_update_that_is_dropped_while_it_is_written(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of a dropped update stay in shared memory."""
    slow = Slow(monkeypatch)
    transfer, folder, held = taken(trainer, 2000)
    threading.Timer(0.2, slow.go.set).start()
    transfer.drop({})
    assert not folder.exists() and not held[str(folder)]


def test_files_that_cannot_be_written(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that joins waits for files that nobody writes."""

    def full(tensors: dict[str, Tensor], file: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(staging, "save_file", full)
    transfer, folder, held = taken(trainer, 2000)
    assert held[str(folder)], "this engine can go on"
    transfer.in_place(str(folder))
    with pytest.raises(ConfigError, match=r"No space left.*make /dev/shm larger"):
        while True:
            staging.wait_until_written(folder, 20)
    transfer.close()


def test_without_memory_files_are_written_first(trainer: Trainer) -> None:
    """Tensors are held where the trainer or the layers being replaced need the memory."""
    transfer, folder, held = taken(trainer, 1999)
    assert not held and equals(trainer, load_file(folder / "model-00001.safetensors"))
    transfer.close()


# -- what comes as a pickle


def arguments(**changes: Any) -> tuple[Any, ...]:
    """Make what torch's `reduce_tensor` gives for a tensor on CUDA."""
    fields: dict[str, Any] = {
        "cls": torch.Tensor, "size": torch.Size([3, 4]), "stride": (4, 1), "offset": 0,
        "storage": torch.storage.TypedStorage, "dtype": torch.bfloat16, "device": 5,
        "handle": b"h" * 66, "bytes": 1024, "at": 512, "grad": False, "counter": b"c" * 64,
        "counter_at": 0, "event": b"e" * 64, "sync": True,
    }  # fmt: skip
    return tuple((fields | changes).values())


def encoded(value: Any, protocol: int = pickle.DEFAULT_PROTOCOL) -> str:
    return base64.b64encode(pickle.dumps(value, protocol)).decode()


@pytest.mark.parametrize("protocol", [3, 4, 5])
@pytest.mark.parametrize("with_function", [False, True])
def test_handles_of_torch_are_read(protocol: int, with_function: bool) -> None:
    """The handles of a trainer cannot be opened, or are opened on its GPU's number."""
    parameter = arguments(cls=torch.nn.Parameter, dtype=torch.float32, grad=True)
    handles = [arguments(), parameter]
    shown = [(rebuild_cuda_tensor, handle) if with_function else handle for handle in handles]
    (first, second) = read_handles(encoded([{UUID: handle} for handle in shown], protocol))
    device = torch.device("cuda", 0)
    assert rebuild_arguments(first[UUID], device) == arguments(device=0)
    assert rebuild_arguments(second[UUID], device) == arguments(device=0, dtype=torch.float32)
    assert len(read_handles(encoded({UUID: shown[0]}))) == 1, "of a buffer"


def test_handles_as_plain_data() -> None:
    """The handles of a trainer in the same program cannot be opened, or come back as others."""
    handles = {UUID: plain_handle((rebuild_cuda_tensor, arguments()))}
    names: dict[str, Any] = {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[3, 4]]}
    sent = msgspec.msgpack.encode({**names, "cuda_handles": [handles]})
    (received,) = msgspec.msgpack.decode(sent, type=UpdateInfo).cuda_handles or ()
    handle = from_plain(received[UUID])
    device = torch.device("cuda", 0)
    assert rebuild_arguments(handle, device) == arguments(device=0)
    with pytest.raises(UpdateFailed, match="none of torch"):
        rebuild_arguments(from_plain(received[UUID][:-1]), device)


def test_handles_are_opened_and_compared_before_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor's memory is closed, which waits for the device, before the next one is opened;
    or a wrong tensor is found when others are staged."""
    opened: list[weakref.ref[Tensor]] = []
    staged: list[int] = []

    def opening(handle: Any, device: torch.device) -> Tensor:
        tensor = torch.ones(3, 4, dtype=torch.bfloat16)
        opened.append(weakref.ref(tensor))
        return tensor

    def adding(stage: Any, name: str, tensor: Tensor) -> None:
        staged.append(sum(entry() is not None for entry in opened))

    monkeypatch.setattr(transfer_module, "open_handle", opening)
    monkeypatch.setattr(staging.WeightStage, "add", adding)
    handles = [{UUID: plain_handle((rebuild_cuda_tensor, arguments()))}] * 3
    info: dict[str, Any] = {
        "names": [*"abc"], "dtype_names": ["bfloat16"] * 3, "shapes": [[3, 4]] * 3,
        "cuda_handles": handles,
    }  # fmt: skip
    transfer = WeightTransfer(torch.device("cpu"), 0)
    transfer.start({})
    transfer.update(info)
    assert staged == [3, 3, 3] and not any(entry() is not None for entry in opened)
    staged.clear()
    with pytest.raises(UpdateFailed, match="tensor c has shape"):
        transfer.update(info | {"shapes": [[3, 4], [3, 4], [4, 3]]})
    assert not staged
    transfer.close()


def test_sizes_in_elements() -> None:
    """The tensors of SkyRL's buffers are cut at wrong places."""
    names: dict[str, Any] = {"names": ["a", "b"], "dtype_names": ["bfloat16", "bfloat16"]}
    info = UpdateInfo(**names, shapes=[[2, 3], [4]], sizes=[6, 4])
    assert len(info.headers()) == 2 and info.tensor_sizes == [12, 8]
    for sizes in ([6, 5], [6]):
        with pytest.raises(UpdateFailed, match="sizes"):
            UpdateInfo(**names, shapes=[[2, 3], [4]], sizes=sizes).headers()


class Evil:
    def __init__(self, function: Any, *args: Any) -> None:
        self._how = function, args

    def __reduce__(self) -> Any:
        return self._how


def test_no_pickle_is_run(tmp_path: Path) -> None:
    """A body of an admin route runs code in the engine."""
    place = tmp_path / "ran"
    for evil in (
        Evil(os.system, f"touch {place}"),
        Evil(open, str(place), "w"),
        Evil(getattr, "", "join"),
        Evil(rebuild_cuda_tensor, *arguments()),
        {UUID: Evil(torch.Size, (Evil(os.system, f"touch {place}"),))},
        object(),
        ["no dictionary"],
        {1: torch.load},
        5,
    ):
        for protocol in range(6):
            with pytest.raises(UpdateFailed):
                read_handles(encoded([evil], protocol))
    for damaged in ("", "gAQ=", encoded([{}])[:-4], base64.b64encode(b"\x80\x04h\x07.").decode()):
        with pytest.raises(UpdateFailed):
            read_handles(damaged)
    assert not place.exists()
    for change in (
        {"dtype": torch.Tensor},
        {"size": 5},
        {"handle": "h"},
        {"storage": torch.Tensor},
    ):
        (handle,) = read_handles(encoded([{UUID: arguments(**change)}]))
        with pytest.raises(UpdateFailed, match="none of torch"):
            rebuild_arguments(handle[UUID], torch.device("cuda", 0))


def test_the_id_of_a_group_is_read_as_data() -> None:
    """A trainer's store runs code in the engine, or vLLM's id is not found in it."""
    import ctypes

    class UniqueId(ctypes.Structure):
        _fields_ = (("internal", ctypes.c_byte * 128),)

    unique = bytes(range(128))
    assert pickle.loads(pickled_id(unique)) == unique == read_id(pickled_id(unique))
    globals()["UniqueId"] = UniqueId
    UniqueId.__module__, UniqueId.__qualname__ = __name__, "UniqueId"
    assert read_id(pickle.dumps(UniqueId.from_buffer_copy(unique))) == unique
    for wrong in (b"", b"junk", pickle.dumps(b"short")):
        with pytest.raises(UpdateFailed, match="128 bytes"):
            read_id(wrong)


# -- on GPUs

CUDA: dict[str, Any] = {
    "dtype": "bfloat16", "device": "cuda", "max_num_seqs": 4, "num_blocks": 256,
}  # fmt: skip


def on_cuda(trainer: Trainer, device: str) -> list[tuple[str, Tensor]]:
    return [(name, tensor.to(device, torch.bfloat16)) for name, tensor in trainer.train()]


def same_as_from_a_folder(llm: LLM, trainer: Trainer, folder: Path) -> None:
    """Assert that the weights in place give the same tokens as those of the trainer's files."""
    said = answer(llm).token_ids
    trainer.model.save_pretrained(folder)
    llm.update_weights(folder)
    assert answer(llm).token_ids == said


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["one by one", "packed", "plain"])
def test_cuda_ipc(tmp_path: Path, form: str) -> None:
    """A handle shows other bytes than the trainer's, or the mapping is closed too early."""
    trainer = Trainer(tmp_path / "model")
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    with LLM(tmp_path / "model", max_model_len=256, **CUDA) as llm:
        llm.init_weight_transfer({})
        for turn in range(3):
            old = answer(llm).token_ids
            tensors = on_cuda(trainer, "cuda")
            raws = [tensor.contiguous().reshape(-1).view(torch.uint8) for _, tensor in tensors]
            buffer = torch.cat(raws)
            torch.cuda.synchronize()
            info: dict[str, Any] = {
                "names": [name for name, _ in tensors],
                "dtype_names": ["bfloat16"] * len(tensors),
                "shapes": [list(tensor.shape) for _, tensor in tensors],
            }
            handles: Any = [{uuid: reduce_tensor(tensor)} for _, tensor in tensors]
            if form == "packed":
                handles = {uuid: reduce_tensor(buffer)[1]}
                info["tensor_sizes"] = [raw.numel() for raw in raws]
            if form == "plain":
                info["cuda_handles"] = [{uuid: plain_handle(place[uuid])} for place in handles]
            else:
                info["ipc_handles_pickled"] = encoded(handles)
            llm.update_weights(info, version=f"turn {turn}")
            assert answer(llm).versions == [(f"turn {turn}", 8)]
            assert answer(llm).token_ids != old
            same_as_from_a_folder(llm, trainer, tmp_path / f"turn {turn}")
        elsewhere = encoded([{UUID: arguments()}] * len(tensors))
        info.pop("tensor_sizes", None)
        with pytest.raises(UpdateFailed, match="no handle is of this engine's GPU"):
            llm.update_weights({**info, "ipc_handles_pickled": elsewhere})


@pytest.mark.gpu
@pytest.mark.two_gpus
@pytest.mark.parametrize("packed", [False, True])
def test_nccl(tmp_path: Path, packed: bool) -> None:
    """A broadcast never ends, or gives one tensor's bytes to another."""
    trainer = Trainer(tmp_path / "model")
    with LLM(tmp_path / "model", max_model_len=256, **CUDA) as llm:  # takes the first GPU
        sender = WeightSender("127.0.0.1", free_port(), 1, "cuda:1", packed=packed)
        llm.init_weight_transfer(sender.init_info)
        for turn in range(3):
            tensors = on_cuda(trainer, "cuda:1")
            thread = sent(sender, tensors)
            llm.update_weights(sender.update_info(tensors), version=f"turn {turn}")
            thread.join()
            assert answer(llm).versions == [(f"turn {turn}", 8)]
            same_as_from_a_folder(llm, trainer, tmp_path / f"turn {turn}")
        said = answer(llm).token_ids
        dies_in_the_middle(llm, "cuda:1")
        assert answer(llm).token_ids == said
