"""Tensors as SGLang's trainers serialise them, of whose pickles nothing is run."""

import base64
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from engine.errors import UpdateFailed
from engine.weights.transfers import handles
from engine.weights.transfers.handles import SerializedTensors
from engine.weights.transfers.transfer import WeightTransfer
from tests.deployments.api.trainers.slime import (
    METADATA,
    PER_RANK,
    REBUILD,
    bucket,
    encoded,
    serialized,
)

CPU = torch.device("cpu")


def tensors() -> list[tuple[str, Tensor]]:
    """Return tensors of several dtypes; some are views, and one ends at an odd byte."""
    torch.manual_seed(5)
    whole = torch.randn(6, 8)
    return [
        ("a.weight", whole.bfloat16()),
        ("rows", whole[2:4]),
        ("transposed", whole.t()),
        ("codes", torch.arange(7, dtype=torch.uint8)),
        ("parameter", torch.nn.Parameter(whole[:1].clone())),
        ("number", torch.tensor(2.5)),
        ("b.weight", whole.half()),
    ]


def equal(got: list[tuple[str, Tensor]]) -> bool:
    wanted = tensors()
    return [name for name, _ in got] == [name for name, _ in wanted] and all(
        ours.dtype == theirs.dtype and torch.equal(ours, theirs)
        for (_, ours), (_, theirs) in zip(got, wanted, strict=True)
    )


def by_value(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


@pytest.mark.parametrize(
    ("form", "load_format"),
    [
        (lambda: encoded(tensors()), ""),
        (lambda: encoded(dict(tensors())), ""),
        (lambda: by_value(tensors()), ""),
        (lambda: encoded([(n, PER_RANK([serialized(t), b""])) for n, t in tensors()]), ""),
        (lambda: encoded(bucket(tensors())), "flattened_bucket"),
        (lambda: by_value(bucket(tensors())), "flattened_bucket"),
    ],
    ids=["shared", "dictionary", "by value", "of a rank", "bucket", "bucket by value"],
)
def test_each_form_is_read(form: Any, load_format: str) -> None:
    """A view is read from its storage's beginning, or a misaligned tensor is refused."""
    sent = form()  # the trainer keeps the tensors until the answer
    of_two_ranks = [sent, form()]
    for entries in ([sent], of_two_ranks):  # of several ranks each has all tensors
        assert equal([*SerializedTensors(entries, load_format, CPU)])


class Runs:
    """An object whose pickle runs code."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def far(begin: int, end: int) -> Any:
    part = METADATA("a", torch.Size([4]), torch.float32, begin, end, 16)
    return {"flattened_tensor": torch.zeros(16, dtype=torch.uint8), "metadata": [part]}


def wrong(folder: Path) -> Iterator[tuple[Any, str, str]]:
    """Yield (a pickle in base64 or the value to serialise, the load_format, words of the error)."""
    yield Runs(folder), "", "posix.mkdir"
    yield [("a", Runs(folder))], "", "posix.mkdir"
    yield [("a", PER_RANK([pickle.dumps(Runs(folder))]))], "", "posix.mkdir"
    inner = pickle.dumps([("a", torch.zeros(2))]).replace(b"FloatStorage", b"FakeeStorage")
    yield base64.b64encode(inner).decode(), "", "cannot be opened"
    yield torch.zeros(2), "", "is not a list"
    yield "!", "", "cannot be read"
    yield base64.b64encode(b"\x80\x04").decode(), "", "cannot be read"
    yield [("a", 5)], "", "no tensor"
    yield [5], "", "no pairs"
    yield [("a", torch.zeros(2))], "flattened_bucket", "is not a flattened bucket"
    yield far(0, 16), "", "no pairs|no tensor"
    yield far(0, 12), "flattened_bucket", "tensor a"
    yield far(-4, 16), "flattened_bucket", "metadata"
    short = serialized([("a", torch.zeros(4))]).replace(b"K\x04\x85", b"K\x7f\x85")
    yield base64.b64encode(short).decode(), "", "cannot be opened"


def test_what_is_no_tensor_is_refused(tmp_path: Path) -> None:
    """A pickle runs code, or reads memory beside its tensors."""
    folder = tmp_path / "ran"
    for value, load_format, words in wrong(folder):
        sent = value if isinstance(value, str) else encoded(value)
        with pytest.raises(UpdateFailed, match=words):
            list(SerializedTensors([sent], load_format, CPU))
    assert not folder.exists()
    with pytest.raises(UpdateFailed, match="set_sharing_strategy"):
        list(SerializedTensors([encoded(tensors(), "file_descriptor")], "", CPU))


class Checkpoint:
    """A checkpoint of two tensors, whose head is the embedding."""

    def name_of(self, stored: str) -> str:
        return "" if stored == "head" else stored

    def names(self) -> set[str]:
        return {"a", "b"}


def test_an_update_ends_with_its_last_tensor() -> None:
    """Half a checkpoint is served, a late head begins an update of its own, or one is lost."""
    transfer = WeightTransfer(CPU, 0, checkpoint=Checkpoint())

    def collect(**sent: Tensor) -> str:
        return transfer.collect({"serialized_named_tensors": [encoded([*sent.items()])]})

    value = torch.ones(3)
    with pytest.raises(UpdateFailed, match="no update"):
        collect(a=value)
    for head in ({"head": value}, {}):
        transfer.start({})
        assert collect(b=value, **head) == "" and collect(**head) == ""
        folder = collect(a=2 * value)
        (file,) = Path(folder).glob("*.safetensors")
        stored = load_file(file)
        assert stored.keys() == {"a", "b"} and torch.equal(stored["a"], 2 * value)
    transfer.start({})
    with pytest.raises(UpdateFailed, match="unexpected tensor c"):
        collect(c=value)
    transfer.close()
    assert not Path(folder).exists()


class OnGpu:
    """A tensor of CUDA, as SGLang's reductions serialise it: with the UUID of its GPU."""

    def __init__(self, gpu: str | int, function: Any) -> None:
        self.gpu, self.function = gpu, function

    def __reduce__(self) -> Any:
        size = torch.Size([2])
        memory = (torch.storage.UntypedStorage, torch.float32, self.gpu, b"memory", 512, 0)
        return self.function, (torch.Tensor, size, (1,), 0, *memory, False, b"", 0, b"", False)


def test_the_entry_of_ones_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine opens the handles of another GPU, or those of its own on the wrong one."""

    def opened(*arguments: Any) -> Tensor:
        opens.append((arguments[6], arguments[7]))
        return torch.zeros(2)

    opens: list[Any] = []
    monkeypatch.setattr(handles, "rebuild_cuda_tensor", opened)
    device, own = torch.device("cuda", 3), SimpleNamespace(uuid="own")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: own)

    def sent(*gpus: str | int) -> list[str]:
        named = [(gpu, rebuild_cuda_tensor if gpu == 0 else REBUILD) for gpu in gpus]
        return [encoded([("a", OnGpu(gpu, function))]) for gpu, function in named]

    for gpus in (("other", "own"), ("own",), (0,)):
        ((name, _),) = SerializedTensors(sent(*gpus), "", device)
        assert name == "a" and opens.pop() == (3, b"memory")
    for gpus, words in (
        (("other",), "are on GPU other"),
        (("other", "third"), "got other, third"),
        ((0, 0), "got number 0"),
    ):
        with pytest.raises(UpdateFailed, match=words):
            list(SerializedTensors(sent(*gpus), "", device))
    with pytest.raises(UpdateFailed, match="runs on the CPU"):
        list(SerializedTensors(sent("own"), "", CPU))
    assert not opens
