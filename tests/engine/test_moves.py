"""kv_moves: KV blocks that an engine pulls from another one, from the socket to the text."""

import multiprocessing
import os
import secrets
import signal
import socket
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

from deployments.plan.memory import Hardware, plan
from engine.config.engine_config import EngineConfig
from engine.config.model_config import ModelConfig
from engine.errors import ConfigError
from engine.messages import Answer, KVSource
from engine.resolve import resolve
from engine.scheduling.core import EngineCore
from engine.scheduling.moves import source as source_module
from engine.scheduling.moves import wire
from engine.scheduling.moves.shared import OwnSlots
from tests.engine.test_host_kv import LATENTS, PLAIN, RECURRENT, WINDOWS, core_of
from tests.engine.test_memory import config_of
from tests.fakes import Output, collect, make_request

PROMPT = [(7 * at) % 190 for at in range(61)]
MOVES: dict[str, Any] = {"kv_moves": True, "num_blocks": 60}


def kv_source(core: EngineCore, shared: bool = True) -> KVSource:
    """Let a core serve its blocks, also by shared memory; return where."""
    core.serve_kv("127.0.0.1", 1)
    (answer,) = core.answers()
    assert isinstance(answer, Answer)
    port, secret, _ = answer.message.split()
    return KVSource("127.0.0.1", int(port), secret, shared)


class Cores:
    """Several cores whose step loops run in turn, as those of processes would run side by side."""

    def __init__(self, *cores: EngineCore) -> None:
        self.cores = cores
        self._number = 100
        self.outputs: dict[int, Output] = {}

    def run(self, core: EngineCore, prompt: list[int], **fields: Any) -> list[int]:
        """Run a request at one core while all go on; return its output."""
        number = self.begin(core, prompt, **fields)
        self.until(lambda: number in self.outputs and bool(self.outputs[number].finish))
        output = self.outputs[number]
        assert output.finish != "error", output
        return output.tokens

    def begin(self, core: EngineCore, prompt: list[int], **fields: Any) -> int:
        self._number += 1
        fields = {"max_tokens": 6, "ignore_eos": True, "temperature": 0.0} | fields
        core.add_request(make_request(self._number, prompt, **fields))
        return self._number

    def until(self, condition: Any, seconds: float = 15.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it hangs"
            self.step()

    def step(self) -> None:
        busy = [core for core in self.cores if core.has_work()]
        for core in busy:
            collect(core.step(), self.outputs)
        if not busy:
            time.sleep(0.001)

    def settle(self) -> None:
        """Let all moves end; then nothing may be held."""
        for core in self.cores:
            moves = core._moves
            assert moves is not None
            moves.yield_blocks()
            slots, device_slots = moves.plan.slots, moves.plan.device_slots
            self.until(lambda: not (moves.holds or core.has_work()))  # noqa: B023
            self.until(lambda: len(moves._free) >= slots)  # noqa: B023, given back over a socket
            core.check_integrity()
            (pool,) = core.scheduler.memory.pools
            assert pool.num_free == pool.num_blocks
            assert sorted(moves._free) == list(range(slots))
            assert sorted(moves._free_on_device) == list(range(2 * slots, 2 * slots + device_slots))
            assert moves._puller._free.qsize() == moves.plan.slots


class FakeDevice:
    """Device memory of a core on the CPU, which is host memory, and the same opened by others."""

    exported: ClassVar[dict[bytes, "FakeDevice"]] = {}

    def __init__(self, num_bytes: int) -> None:
        self.pages = np.zeros(num_bytes, np.uint8)
        self.address: int = self.pages.ctypes.data
        self.handle = secrets.token_bytes(64)
        self.exported[self.handle] = self
        self.opened = 0

    def close(self) -> None:
        self.opened -= 1

    @classmethod
    def open(cls, handle: bytes, device: object) -> "FakeDevice":
        memory = cls.exported[handle]
        memory.opened += 1
        return memory


@pytest.fixture
def device_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each core four slots of device memory."""
    from engine.factory import block_copies

    def staging(device: object, block_bytes: int, num_blocks: int) -> Any:
        return block_copies._DeviceStaging(FakeDevice(4 * block_bytes), 4)  # type: ignore[arg-type]

    monkeypatch.setattr(FakeDevice, "exported", {})
    monkeypatch.setattr(block_copies, "_device_staging", staging)
    monkeypatch.setattr(block_copies, "OpenedMemory", FakeDevice.open)


def test_blocks_come_from_device_memory(tmp_path: Path, device_memory: None) -> None:
    """Bugs: fewer slots of device memory than blocks stop a move; a slot's number is taken for one
    of host memory; the text is another one; the memory stays open after the engine's end."""
    one, other, alone = (core_of(tmp_path, PLAIN, **MOVES) for _ in range(3))
    assert one._moves is not None and one._moves.plan.device_slots == 4
    cores = Cores(one, other)
    answer = cores.run(one, PROMPT)
    assert cores.run(other, PROMPT, source=kv_source(one)) == answer
    assert Cores(alone).run(alone, PROMPT) == answer
    stats = other.stats()
    assert (stats.moved_tokens, stats.shared_moves, stats.device_moves) == (60, 1, 1)
    # another prompt by the same memory, and one by host memory beside it
    texts = [[at % 190 for at in range(first, first + 60)] for first in (30, 77)]
    for text in texts:
        cores.run(one, text)
    source = kv_source(one)
    host = msgspec.structs.replace(source, device=False)
    pulls = [(texts[0], source), (texts[1], host)]
    numbers = [cores.begin(other, [*text, 1, 2], source=where) for text, where in pulls]
    cores.until(lambda: all(n in cores.outputs and cores.outputs[n].finish for n in numbers))
    stats = other.stats()
    assert (stats.moved_tokens, stats.shared_moves, stats.device_moves) == (180, 3, 2)
    cores.settle()
    (memory,) = [memory for memory in FakeDevice.exported.values() if memory.opened]
    assert memory.opened == 1
    own = other._moves
    assert own is not None and own._sharing is not None
    (slots,) = [slots for slots in own._puller._sources.values() if slots and slots.on_device]
    own._sharing.detach(slots.first)
    assert memory.opened == 0


def test_memory_of_a_gpu_out_of_reach(
    tmp_path: Path, device_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a GPU that cannot read the other one's memory computes the prefix, or fails."""
    from engine.factory import block_copies

    def refuse(handle: bytes, device: object) -> None:
        raise RuntimeError("peer access is not supported")

    monkeypatch.setattr(block_copies, "OpenedMemory", refuse)
    one, other = (core_of(tmp_path, PLAIN, **MOVES) for _ in range(2))
    cores = Cores(one, other)
    answer = cores.run(one, PROMPT)
    assert cores.run(other, PROMPT, source=kv_source(one)) == answer
    stats = other.stats()
    assert (stats.moved_tokens, stats.shared_moves, stats.device_moves) == (60, 1, 0)
    cores.settle()


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "tcp"])
@pytest.mark.parametrize(
    "changes, options",
    [
        (PLAIN, {}),
        pytest.param(PLAIN, {"kv_dtype": "int8"}, marks=pytest.mark.slow),
        pytest.param(WINDOWS, {"num_blocks": 90}, marks=pytest.mark.slow),
        pytest.param(LATENTS, {}, marks=pytest.mark.slow),
    ],
    ids=["plain", "quantised", "windows", "latents"],
)
def test_text_is_equal(
    changes: dict[str, Any], options: dict[str, Any], shared: bool, tmp_path: Path
) -> None:
    """Bugs: a moved block has the keys of another one; the prefix is computed all the same; a turn
    that goes on with moved blocks has another text."""
    one, other = (core_of(tmp_path, changes, **(MOVES | options)) for _ in range(2))
    alone = core_of(tmp_path, changes, **options)
    cores = Cores(one, other)
    answer = cores.run(one, PROMPT)
    longer = [*PROMPT, *answer, 5, 6]
    expected = Cores(alone)
    assert expected.run(alone, PROMPT) == answer
    text = expected.run(alone, longer, max_tokens=9)
    assert cores.run(other, longer, max_tokens=9, source=kv_source(one, shared)) == text
    stats = other.stats()
    assert stats.shared_moves == shared
    assert stats.moved_tokens >= 60 and stats.failed_moves == 0
    assert stats.prefix_hits >= 60 and stats.moved_bytes > 0 and stats.move_seconds > 0
    assert one.stats().sent_kv_bytes == stats.moved_bytes
    # what has come is an ordinary part of the prefix cache
    assert cores.run(other, longer, max_tokens=9) == text
    assert other.stats().moves == 1
    cores.settle()


@pytest.mark.slow
def test_several_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bugs: stripes mix up their blocks; fewer slots than blocks stop a move."""
    from engine.factory import block_copies
    from engine.scheduling.moves import puller

    monkeypatch.setattr(puller, "_STRIPE_BYTES", 1 << 10)
    monkeypatch.setattr(block_copies, "_STAGED_CPU", 1)
    one, other, alone = (core_of(tmp_path, PLAIN, **MOVES) for _ in range(3))
    assert one._moves is not None and one._moves.plan.slots == 4
    cores = Cores(one, other)
    cores.run(one, PROMPT)
    source = kv_source(one, shared=False)
    tokens = cores.run(other, PROMPT, source=source)
    assert tokens == Cores(alone).run(alone, PROMPT)
    assert other.stats().moved_tokens == 60
    # and both ways at once
    texts = [[at % 190 for at in range(first, first + 60)] for first in (30, 77)]
    cores.run(one, texts[0])
    cores.run(other, texts[1])
    back = kv_source(other, shared=False)
    numbers = [
        cores.begin(other, [*texts[0], 1, 2], source=source),
        cores.begin(one, [*texts[1], 1, 2], source=back),
    ]
    cores.until(lambda: all(n in cores.outputs and cores.outputs[n].finish for n in numbers))
    assert one.stats().moved_tokens == 60 and other.stats().moved_tokens == 120
    cores.settle()


@pytest.mark.slow
def test_others_share_nothing(tmp_path: Path) -> None:
    """Bug: a tenant gets the blocks of another one by way of a replica."""
    one, other = (core_of(tmp_path, PLAIN, **MOVES) for _ in range(2))
    cores = Cores(one, other)
    cores.run(one, PROMPT, cache_salt="tenant")
    cores.run(other, PROMPT, source=kv_source(one))
    stats = other.stats()
    assert (stats.moved_tokens, stats.failed_moves, stats.prefix_hits) == (0, 1, 0)
    cores.settle()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["weights", "dtype", "secret", "kept weights"])
def test_foreign_engines_are_refused(what: str, tmp_path: Path) -> None:
    """Bug: keys of other weights, or bytes of another layout, enter the prefix cache."""
    one = core_of(tmp_path, PLAIN, **MOVES)
    changes = {"weights": {"seed": 3}, "dtype": {"dtype": "bfloat16"}}.get(what, {})
    other = core_of(tmp_path, PLAIN, **(MOVES | changes))
    cores = Cores(one, other)
    cores.run(one, PROMPT)
    source = kv_source(one)
    if what == "secret":
        source = KVSource(source.host, source.port, "00" * 32)
    if what == "kept weights":
        assert one._moves is not None
        one._moves.weights_changed("1", 1)
    alone = core_of(tmp_path, PLAIN, **changes)
    assert cores.run(other, PROMPT, source=source) == Cores(alone).run(alone, PROMPT)
    stats = other.stats()
    assert (stats.moved_tokens, stats.failed_moves) == (0, 1)
    cores.settle()


def silent(listener: socket.socket, answer: bytes) -> None:
    sock, _ = listener.accept()
    sock.sendall(answer)
    threading.Event().wait(3)
    sock.close()


@pytest.mark.parametrize("what", ["nobody", "silence", "nonsense"])
def test_dead_source_is_a_miss(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a source that is dead, hangs or is something else fails the request, or stops it."""
    from engine.scheduling.moves import puller

    for module in (wire, puller):
        monkeypatch.setattr(module, "IDLE_SECONDS", 0.2)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    if what == "nobody":
        listener.close()
    else:
        answer = b"" if what == "silence" else b"HTTP/1.1 400 Bad Request\r\n" + b"x" * 100
        threading.Thread(target=silent, args=(listener, answer), daemon=True).start()
    core = core_of(tmp_path, PLAIN, **MOVES)
    alone = core_of(tmp_path, PLAIN)
    cores = Cores(core)
    began = time.monotonic()
    tokens = cores.run(core, PROMPT, source=KVSource("127.0.0.1", port, "00" * 32))
    assert tokens == Cores(alone).run(alone, PROMPT)
    assert core.stats().failed_moves == 1
    assert time.monotonic() - began < 5
    cores.settle()


@pytest.mark.parametrize("closed", [False, True], ids=["kept", "closed"])
def test_further_pulls_use_the_connection_of_the_first(
    closed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bugs: each pull connects anew; a pull over a connection that its source has closed meanwhile
    is a miss; an ask is read as the number of a slot; refusals keep connections."""
    from engine.factory import block_copies
    from engine.scheduling.moves import puller

    monkeypatch.setattr(block_copies, "_STAGED_CPU", 1)  # four slots: many numbers come back
    if closed:
        monkeypatch.setattr(source_module, "_KEPT_SECONDS", 0.05)
    one, other = (core_of(tmp_path, PLAIN, **MOVES) for _ in range(2))
    connects: list[Any] = []
    connect = puller.Puller._connect

    def counted(self: puller.Puller, pull: puller.Pull) -> wire.Peer:
        connects.append(pull)
        return connect(self, pull)

    monkeypatch.setattr(puller.Puller, "_connect", counted)
    cores = Cores(one, other)
    source = kv_source(one)
    moves = other._moves
    assert moves is not None
    for number in range(4):
        prompt = [(number + 3 * at) % 190 for at in range(61)]
        answer = cores.run(one, prompt)
        assert cores.run(other, prompt, source=source) == answer
        cores.until(lambda: not moves.holds)
        (slots,) = [slots for slots in moves._puller._sources.values() if slots]
        cores.until(lambda: slots.kept is not None and len(slots.kept) == 1)  # noqa: B023
        time.sleep(0.2 if closed else 0)
    assert len(connects) == (4 if closed else 1)
    stats = other.stats()
    assert (stats.moved_tokens, stats.shared_moves, stats.failed_moves) == (240, 4, 0)
    cores.run(other, [9] * 61, source=source)  # nobody has it
    assert other.stats().failed_moves == 1 and slots.kept == []
    other.close()
    assert slots.kept is None
    cores.settle()


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "tcp"])
def test_source_stops_in_the_middle(
    shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bugs: a part of a prefix is taken for the whole; a stuck peer holds blocks for ever."""
    from engine.factory import block_copies
    from engine.scheduling.moves import puller

    monkeypatch.setattr(block_copies, "_STAGED_CPU", 1)  # four slots
    for module in (wire, puller, source_module):
        monkeypatch.setattr(module, "IDLE_SECONDS", 0.3)
    one, other, alone = (core_of(tmp_path, PLAIN, **MOVES) for _ in range(3))
    cores = Cores(one, other)
    cores.run(one, PROMPT)
    number = cores.begin(other, PROMPT, source=kv_source(one, shared))
    only_other = Cores(other)
    cores.until(lambda: one.stats().sent_kv_bytes > 0)
    only_other.until(lambda: number in only_other.outputs and only_other.outputs[number].finish)
    assert only_other.outputs[number].tokens == Cores(alone).run(alone, PROMPT)
    assert other.stats().failed_moves == 1
    cores.settle()


@pytest.mark.parametrize("what", ["elsewhere", "foreign", "size", "none", "locked"])
def test_bytes_come_over_tcp_where_no_memory_is_shared(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Bugs: a source on another machine, whose process number another process has here, is read
    from this machine's memory; a machine without room for pinned memory moves nothing."""
    from engine.runner.caches import host_slots

    if what == "none":
        monkeypatch.delattr(os, "memfd_create")
    one, other, alone = (core_of(tmp_path, PLAIN, **MOVES) for _ in range(3))
    if what == "locked":

        def refuse(*_: Any) -> None:
            raise RuntimeError("it cannot be pinned")

        monkeypatch.setattr(host_slots, "pin", refuse)
    if what in ("elsewhere", "foreign", "size"):
        assert one._moves is not None and one._moves._sharing is not None
        own = one._moves._sharing.own
        place = own.place()
        stranger = OwnSlots(own.count, own.slot_bytes)  # of another key
        place = {
            "elsewhere": wire.Place(1 << 22, place.file, own.count, own.slot_bytes),
            "foreign": stranger.place(),
            "size": wire.Place(place.pid, place.file, own.count + 1, own.slot_bytes),
        }[what]
        monkeypatch.setattr(own, "place", lambda: place)
    cores = Cores(one, other)
    cores.run(one, PROMPT)
    assert cores.run(other, PROMPT, source=kv_source(one)) == Cores(alone).run(alone, PROMPT)
    stats = other.stats()
    assert (stats.moved_tokens, stats.failed_moves, stats.shared_moves) == (60, 0, 0)
    if what in ("none", "locked"):
        assert "over TCP" in caplog.text
    cores.settle()


def test_a_slot_that_was_taken_back_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: an engine that stood still reads another request's keys from slots that its source has
    filled again, and keeps them under the hashes of its own."""
    from engine.factory import block_copies

    monkeypatch.setattr(block_copies, "_STAGED_CPU", 1)  # four slots
    monkeypatch.setattr(source_module, "LENT_SECONDS", 0.3)
    one, other, third, alone = (core_of(tmp_path, PLAIN, **MOVES) for _ in range(4))
    assert one._moves is not None and other._moves is not None
    cores, two = Cores(one, other, third), Cores(one, third)
    cores.run(one, PROMPT)
    cores.run(one, PROMPT[::-1])
    source = kv_source(one)
    number = cores.begin(other, PROMPT, source=source)
    imported = other._moves._imports[number]
    two.until(lambda: imported.pull.borrowed is not None and imported.pull.borrowed.num_lent == 4)
    two.until(lambda: len(one._moves._free) == 4)  # type: ignore[union-attr]
    two.run(third, PROMPT[::-1], source=source)
    assert third.stats().shared_moves == 1
    cores.until(lambda: number in cores.outputs and bool(cores.outputs[number].finish))
    assert cores.outputs[number].tokens == Cores(alone).run(alone, PROMPT)
    stats = other.stats()
    assert (stats.moved_tokens, stats.failed_moves) == (0, 1)
    cores.settle()


def _other_process(
    folder: Path, pipe: Connection, source: KVSource | None, device: str = "cpu"
) -> None:
    """Serve the blocks of a prompt from four slots, or begin to pull them from `source` and stand
    still."""
    from engine.factory import block_copies

    block_copies._STAGED_CPU = 1
    core = core_of(folder, PLAIN, **MOVES, device=device)
    cores = Cores(core)
    if source is None:
        cores.run(core, PROMPT)
        pipe.send(msgspec.to_builtins(kv_source(core)))
        cores.until(lambda: False, 60)
    number = cores.begin(core, PROMPT, source=source)
    assert core._moves is not None
    pull = core._moves._imports[number].pull
    while pull.borrowed is None or not pull.borrowed.num_lent:
        time.sleep(0.01)
    pipe.send(None)
    time.sleep(60)


def _mapped() -> int:
    return sum("manta-kv" in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("who", ["source", "puller"])
def test_a_process_is_killed_while_the_other_reads_its_slots(
    who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bugs: the request is lost, or hangs; slots of a killed process are lost; its memory, or a
    file in /dev/shm, stays."""
    from engine.factory import block_copies

    files = set(Path("/dev/shm").glob("manta-kv*"))
    alone = core_of(tmp_path, PLAIN, **MOVES)
    monkeypatch.setattr(block_copies, "_STAGED_CPU", 1)
    core = core_of(tmp_path, PLAIN, **MOVES)
    assert core._moves is not None
    expected = Cores(alone).run(alone, PROMPT)
    cores, own = Cores(core), _mapped()
    source = None
    if who == "puller":
        cores.run(core, PROMPT)
        source = kv_source(core)
    context = multiprocessing.get_context("spawn")
    pipe, end = context.Pipe()
    process = context.Process(target=_other_process, args=(tmp_path, end, source), daemon=True)
    process.start()
    assert process.pid is not None
    try:
        if who == "source":
            assert pipe.poll(60)
            number = cores.begin(core, PROMPT, source=msgspec.convert(pipe.recv(), KVSource))
            pull = core._moves._imports[number].pull
            end_at = time.monotonic() + 10
            while pull.borrowed is None or pull.borrowed.num_lent < 4:
                assert time.monotonic() < end_at
                time.sleep(0.01)
            assert _mapped() == own + 1
            del pull  # it has the memory
        else:
            cores.until(lambda: pipe.poll(0), 60)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        if who == "source":
            cores.until(lambda: number in cores.outputs and bool(cores.outputs[number].finish))
            assert cores.outputs[number].tokens == expected
            assert core.stats().failed_moves == 1
            cores.until(lambda: _mapped() == own)
        cores.until(lambda: len(core._moves._free) == 4)  # type: ignore[union-attr]
        cores.settle()
    finally:
        process.kill()
        process.join()
    assert set(Path("/dev/shm").glob("manta-kv*")) <= files


@pytest.mark.gpu
@pytest.mark.parametrize("device", [True, False], ids=["device memory", "host memory"])
def test_blocks_of_another_process_on_a_gpu(device: bool, tmp_path: Path) -> None:
    """Bugs: a handle of device memory that another process cannot open; a copy that reads before
    the source's has ended; memory that stays open after the source was killed."""
    core = core_of(tmp_path, PLAIN, **MOVES, device="cuda")
    alone = core_of(tmp_path, PLAIN, **MOVES, device="cuda")
    expected = Cores(alone).run(alone, PROMPT)
    context = multiprocessing.get_context("spawn")
    pipe, end = context.Pipe()
    arguments = (tmp_path, end, None, "cuda")
    process = context.Process(target=_other_process, args=arguments, daemon=True)
    process.start()
    try:
        assert pipe.poll(120)
        source = msgspec.convert(pipe.recv(), KVSource)
        cores = Cores(core)
        source = msgspec.structs.replace(source, device=device)
        assert cores.run(core, PROMPT, source=source) == expected
        stats = core.stats()
        assert (stats.moved_tokens, stats.shared_moves, stats.device_moves) == (60, 1, device)
        process.kill()
        process.join()
        core.reset_prefix_cache()
        assert cores.run(core, PROMPT, source=source) == expected
        assert core.stats().failed_moves == 1
        assert core._moves is not None and core._moves._sharing is not None
        areas = core._moves.copies.blocks._areas  # type: ignore[attr-defined]
        cores.until(lambda: len(areas) == 1)
    finally:
        process.kill()
        process.join()


def test_abort_during_a_move(tmp_path: Path) -> None:
    """Bug: the end of a request that waits for blocks is lost, or its blocks are."""
    one, other = (core_of(tmp_path, PLAIN, **MOVES) for _ in range(2))
    cores = Cores(one, other)
    cores.run(one, PROMPT)
    number = cores.begin(other, PROMPT, source=kv_source(one))
    assert other.stats().waiting == 1
    other.abort([number])
    cores.until(lambda: number in cores.outputs)
    assert cores.outputs[number].finish == "abort"
    cores.settle()


@pytest.mark.slow
def test_kept_blocks(tmp_path: Path) -> None:
    """Bugs: blocks of a prompt for another replica are evicted before the other one has them; they
    are held for ever; they keep requests from running."""
    one, other = (core_of(tmp_path, PLAIN, **(MOVES | {"num_blocks": 64})) for _ in range(2))
    cores = Cores(one, other)
    first = cores.run(one, PROMPT, max_tokens=1, keep_seconds=20.0)
    (pool,) = one.scheduler.memory.pools
    assert pool.num_free == 64 - 15
    for number in range(3):  # would evict them
        cores.run(one, [number + 1] * 110)
    again = cores.run(other, [*PROMPT, *first], source=kv_source(one))
    assert other.stats().moved_tokens == 60 and len(again) == 6
    cores.until(lambda: pool.num_free == 64)  # the last slots are given back over a socket
    cores.run(one, PROMPT, max_tokens=1, keep_seconds=20.0)
    cores.run(one, [9] * 120, max_tokens=8)  # needs half of the memory
    numbers = [cores.begin(one, [n] * 100, max_tokens=20) for n in (11, 12)]
    cores.until(lambda: all(n in cores.outputs and cores.outputs[n].finish for n in numbers))
    cores.settle()


@pytest.mark.slow
def test_new_weights_end_moves(tmp_path: Path) -> None:
    """Bug: blocks that were on their way when the cache was emptied enter it all the same."""
    one, other = (core_of(tmp_path, PLAIN, **MOVES) for _ in range(2))
    cores = Cores(one, other)
    cores.run(one, PROMPT)
    number = cores.begin(other, PROMPT, source=kv_source(one))
    other.reset_prefix_cache()
    cores.until(lambda: number in cores.outputs and cores.outputs[number].finish)
    assert other.stats().moved_tokens == 0 and other.stats().prefix_hits == 0
    cores.settle()


def test_the_plan_counts_device_memory(tmp_path: Path) -> None:
    """Bug: memory that stages blocks for other GPUs is planned for the KV cache."""
    config = config_of(tmp_path, PLAIN, kv_moves=True)
    model = ModelConfig.from_folder(tmp_path)
    gpu, cpu = Hardware.gpu("h100"), Hardware("here", "cpu", 64 << 30)
    rows = dict(plan(model, config, gpu).memory.rows)
    assert rows["KV blocks for other GPUs"] == gpu.memory // 128
    assert "KV blocks for other GPUs" not in dict(plan(model, config, cpu).memory.rows)
    without = config_of(tmp_path, PLAIN)
    assert "KV blocks for other GPUs" not in dict(plan(model, without, gpu).memory.rows)


def test_refusals_name_the_key(tmp_path: Path) -> None:
    """Bug: moves are silently off, or fail at the first one."""
    for changes, options, why in (
        (PLAIN, {"prefix_caching": False}, "prefix_caching is off"),
        (PLAIN, {"tensor_parallel": 2}, "tensor_parallel"),
        (RECURRENT, {}, "recurrent states"),
    ):
        config = config_of(tmp_path, changes, **{"kv_moves": True, **options})
        assert isinstance(config, EngineConfig)
        with pytest.raises(ConfigError, match=f"kv_moves: .*{why}.*leave it out"):
            resolve(config)
