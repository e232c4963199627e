"""disk_kv_bytes: what is on disk, and what an engine makes of it, up to the text."""

import errno
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import ConfigError
from engine.resolve import resolve
from engine.runner.caches import disk_files
from engine.runner.caches.block_file import PAGE, STATES, Key, SlotMemory, path_of, read_key
from engine.runner.caches.disk_files import DiskFiles
from engine.scheduling.core import EngineCore
from engine.scheduling.memory.worth import Worth
from tests.engine.test_host_kv import (
    LATENTS,
    PLAIN,
    RECURRENT,
    WINDOWS,
    config_of,
    conversations,
    core_of,
)

SLOTS, SIZE = 8, 8192
ODD = 1000  # bytes that O_DIRECT cannot read


def digest(number: int) -> bytes:
    return bytes([number]) * 16


class Opened:
    """The block files of a folder, opened with host slots of their own."""

    def __init__(self, folder: Path, size: int = SIZE, **options: Any) -> None:
        raw = np.zeros(SLOTS * size + PAGE, np.uint8)
        first = -raw.ctypes.data % PAGE
        self.slots = raw[first : first + SLOTS * size].reshape(SLOTS, size)
        flat = self.slots.reshape(-1)
        memory = SlotMemory(memoryview(flat), size, flat.ctypes.data)
        states = np.zeros((2, 12), np.uint8)
        self.states = states
        of_states = SlotMemory(memoryview(states.reshape(-1)), 12, states.ctypes.data)
        values = {"num_bytes": 1 << 20, "identity": ["model"]} | options
        self.files = DiskFiles(
            folder, values.pop("num_bytes"), values.pop("identity"), memory, of_states, 2, **values
        )

    def write(self, key: Key, slot: int, value: int) -> None:
        (self.states if key[0] == STATES else self.slots)[slot] = value
        self.files.write(key, slot)
        self.until(lambda: bool(self.files.written()))

    def read(self, key: Key, slot: int) -> bool:
        self.files.read(1, [(key, slot)])
        ended: list[Any] = []
        self.until(lambda: ended.extend(self.files.finished()) or bool(ended))
        ((_, failed),) = ended
        return not failed

    def until(self, condition: Any) -> None:
        until = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < until
            time.sleep(0.001)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Any]:
    every: list[Opened] = []

    def make(folder: Path = tmp_path / "kv", **options: Any) -> Opened:
        every.append(Opened(folder, **options))
        return every[-1]

    yield make
    for one in every:
        one.files.close()


def file_of(one: Opened, key: Key) -> Path:
    return path_of(one.files._own, key)


def test_the_last_write_wakes_the_engine(opened: Any) -> None:
    """Bug: an idle engine's counts lack the last files, or each file wakes the engine."""
    one, woken = opened(), list[bool]()
    one.files.wake = lambda: woken.append(one.files.has_news())
    with one.files._lock:  # so that all are queued before the first ends
        one.files._queued += 1
    for number in range(3):
        one.files.write((0, digest(number)), number)
    one.until(lambda: len(one.files._written) == 3)
    assert not woken and not one.files.has_news()
    with one.files._lock:
        one.files._queued -= 1
    one.files.write((0, digest(3)), 3)
    one.until(lambda: bool(woken))
    assert woken == [True] and len(one.files.written()) == 4
    assert not one.files.has_news()


@pytest.mark.parametrize("size", [SIZE, ODD])
@pytest.mark.parametrize("key", [b"", b"k" * 32])
def test_a_restart_finds_what_was_there(opened: Any, size: int, key: bytes) -> None:
    """Bugs: bytes come back as another block's; files are open to others; a key is not used."""
    first = opened(size=size, key=key)
    assert first.files.read_rate > 0
    for number, name in enumerate([(0, digest(1)), (1, digest(1)), (STATES, digest(1))]):
        first.write(name, number % 2, 10 + number)
    path = file_of(first, (0, digest(1)))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert all(stat.S_IMODE(p.stat().st_mode) == 0o700 for p in (path.parent, path.parents[2]))
    assert (bytes([10]) * 64 in path.read_bytes()) == (not key)
    first.files.close()
    second = opened(size=size, key=key)
    for number, name in enumerate([(0, digest(1)), (1, digest(1)), (STATES, digest(1))]):
        assert second.files.has(name) and second.read(name, 1)
        assert ((second.states if name[0] == STATES else second.slots)[1] == 10 + number).all()
    assert not second.files.has((0, digest(2)))
    assert list((second.files.folder).glob("kv-*/tmp-*")) == []


@pytest.mark.parametrize("others", [{"identity": ["other"]}, {"key": b"o" * 32}, {"size": ODD}])
def test_others_find_nothing(opened: Any, others: dict[str, Any]) -> None:
    """Bug: a model gets the keys of other weights, or of another layout."""
    opened().write((0, digest(1)), 0, 7)
    assert not opened(**others).files.has((0, digest(1)))


@pytest.mark.parametrize("damage", ["short", "long", "flipped", "header", "renamed", "empty"])
@pytest.mark.parametrize("key", [b"", b"k" * 32])
def test_damaged_files_are_misses(opened: Any, damage: str, key: bytes) -> None:
    """Bug: a request gets the keys of a file that was cut, has rotted, or is of another block."""
    one = opened(key=key)
    one.write((0, digest(1)), 0, 7)
    one.write((0, digest(2)), 0, 8)
    path = file_of(one, (0, digest(1)))
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[PAGE + 77] ^= 1
    elif damage == "header":
        data[9] ^= 1
    elif damage == "renamed":
        data = bytearray(file_of(one, (0, digest(2))).read_bytes())
    path.write_bytes({"short": data[:-1], "long": data + b"x", "empty": b""}.get(damage, data))
    assert not one.read((0, digest(1)), 3)
    assert not path.exists() and not one.files.has((0, digest(1)))
    assert one.files.stats()["disk_kv_damaged"] == 1
    assert one.read((0, digest(2)), 3), "others are still read"


def test_the_oldest_files_make_room(opened: Any) -> None:
    """Bugs: the folder grows beyond its bytes; a file that was just used is deleted."""
    one = opened(num_bytes=5 * (SIZE + PAGE))
    for number in range(5):
        one.write((0, digest(number)), 0, number)
        os.utime(file_of(one, (0, digest(number))), (number, number))
    assert one.read((0, digest(0)), 1)  # which makes it young
    for number in range(5, 8):
        one.write((0, digest(number)), 0, number)
        used = sum(p.stat().st_size for p in one.files.folder.rglob("*.0"))
        assert used <= one.files.num_bytes
    assert one.files.has((0, digest(0))) and not one.files.has((0, digest(1)))
    assert one.files.stats()["disk_kv_evicted"] >= 3


def test_the_tail_of_a_prefix_goes_first(opened: Any) -> None:
    """Bug: of a conversation that was read the beginning is evicted, without which no later block
    is of use."""
    engine = opened(num_bytes=6 * (SIZE + PAGE))
    for number in range(6):
        engine.files.write((0, digest(number)), number, number)
    written: list[Any] = []
    engine.until(lambda: written.extend(engine.files.written()) or len(written) == 6)
    engine.files.read(1, [((0, digest(number)), number) for number in range(6)])
    engine.until(lambda: bool(engine.files.finished()))
    engine.write((0, digest(9)), 0, 9)
    assert engine.files.has((0, digest(0))) and not engine.files.has((0, digest(5)))


def test_two_engines_share_a_folder(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bugs: a replica never sees what another has written, or fails on what another evicted."""
    monkeypatch.setattr(disk_files, "_LOOK_SECONDS", 0.02)
    one, two = opened(), opened()
    one.write((0, digest(1)), 0, 7)
    two.until(lambda: two.files.has((0, digest(1))))
    assert two.read((0, digest(1)), 2) and (two.slots[2] == 7).all()
    two.files.forget([(0, digest(1))])
    one.until(lambda: not file_of(one, (0, digest(1))).exists())
    one.read((0, digest(1)), 2)
    one.until(lambda: not one.files.has((0, digest(1))))
    assert one.files.stats()["disk_kv_damaged"] == 0


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_refuses(
    opened: Any, monkeypatch: pytest.MonkeyPatch, error: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Bugs: a full disk ends the engine, is asked for each block, or keeps a slot for ever."""
    one = opened()

    def refuse(*args: Any) -> int:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "writev", refuse)
    one.write((0, digest(1)), 0, 7)
    assert os.strerror(error) in caplog.text and "nothing is written for 30 s" in caplog.text
    assert one.files.room() == 0 and one.files.stats()["disk_kv_dropped"] == 1
    assert not one.files.has((0, digest(1))) and not list(one.files.folder.rglob("tmp-*"))


def test_clear_leaves_others_alone(opened: Any) -> None:
    """Bugs: users' words outlive the engine; a replica that starts deletes what others read."""
    one = opened()
    one.write((0, digest(1)), 0, 7)
    two = opened(clear=True)
    assert two.files.has((0, digest(1))), "the first engine uses it"
    one.files.close()
    two.files.close()
    assert not list(two.files.folder.rglob("*.0"))


@pytest.fixture
def memory() -> Iterator[Path]:
    """Yield a path in memory (/dev/shm) for an engine's folder, which does not exist yet."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="manta-test-") as folder:
        yield Path(folder) / "kv"


def test_a_folder_in_memory_is_given_back(opened: Any, memory: Path) -> None:
    """Bugs: memory stays taken when the last engine has ended; what a killed engine, or another
    model, has left is never freed; a replica that ends takes the blocks of others along."""
    one, two = opened(memory), opened(memory)
    one.write((0, digest(1)), 0, 7)
    other = opened(memory, identity=["other"])
    other.write((0, digest(1)), 0, 8)
    two.until(lambda: two.files.has((0, digest(1))))
    one.files.close()
    assert two.read((0, digest(1)), 2) and (two.slots[2] == 7).all()
    (two.files._own / "tmp-1-1").write_bytes(b"half of a block")
    for killed in (two, other):
        os.close(killed.files._lock_file)  # as the kernel does
        killed.files._closing = True
    three = opened(memory)
    assert three.read((0, digest(1)), 3), "a successor finds what a killed engine has written"
    assert not other.files._own.exists() and not list(memory.rglob("tmp-*"))
    three.files.close()
    assert not list(memory.rglob("*.0"))


def test_a_prefix_is_looked_up(opened: Any, memory: Path) -> None:
    """Bug: what a neighbour has written since the last look is computed again."""
    one, two = opened(memory), opened(memory)
    two.files.close()  # so that no thread looks
    for number in (1, 2, 4):
        one.write((0, digest(number)), 0, 7)
    assert two.files.look_up(map(digest, range(1, 5)))
    assert [two.files.has((0, digest(number))) for number in range(1, 5)] == [
        True,
        True,
        False,
        False,
    ]
    assert not two.files.look_up([digest(3)])


def test_two_changes_at_one_time(opened: Any, memory: Path) -> None:
    """Bug: a file that came in the same tick of a clock as the last look is never seen."""
    one, two = opened(memory), opened(memory)
    two.files.close()
    one.write((0, digest(1)), 0, 7)
    folder, soon = file_of(one, (0, digest(1))).parent, time.time_ns() + 10**10
    os.utime(folder, ns=(soon, soon))
    two.files._look()
    one.write((1, digest(1)), 0, 7)
    os.utime(folder, ns=(soon, soon))
    two.files._look()
    assert two.files.has((1, digest(1)))


def test_memory_that_is_not_there(opened: Any, memory: Path) -> None:
    """Bug: the machine has no memory left when the pool is full."""
    with pytest.raises(ConfigError, match=r"disk_kv_bytes: .* has room for"):
        opened(memory, num_bytes=1 << 20, free_memory=1 << 19)


def test_a_look_brings_nothing_back_that_goes(opened: Any) -> None:
    """Bug: keys that may be wrong are found again by a look before their file is deleted."""
    one = opened()
    one.write((0, digest(1)), 0, 7)
    one.write((0, digest(2)), 0, 7)
    one.files.close()  # so that no thread takes the jobs
    jobs: list[Any] = []
    one.files._jobs = type("Held", (), {"put": staticmethod(jobs.append)})()
    one.files.forget([(0, digest(1))])
    one.files._seen.clear()
    one.files._look()
    assert not one.files.has((0, digest(1))) and one.files.has((0, digest(2)))
    one.files.clear()
    one.files._seen.clear()
    one.files._look()
    assert not one.files.has((0, digest(2)))
    for job in jobs:
        job()
    assert not list(one.files.folder.rglob("*.0"))


def test_new_weights_have_files_of_their_own(opened: Any) -> None:
    """Bug: after an update of the weights in two runs, one finds the files of the other."""
    one = opened()
    one.write((0, digest(1)), 0, 7)
    one.files.renew()
    assert not one.files.has((0, digest(1)))
    one.write((0, digest(1)), 0, 8)
    one.files.close()
    two = opened()
    assert two.read((0, digest(1)), 0) and (two.slots[0] == 7).all()


def test_refusals_name_the_key(tmp_path: Path) -> None:
    """Bug: the tier is silently off, others can read the folder, or a write fails much later."""
    for options, why in (
        ({"disk_kv_folder": "/x"}, "disk_kv_bytes: .*set host_kv_bytes too"),
        ({"host_kv_bytes": 1 << 24}, "disk_kv_folder must be an absolute path"),
    ):
        with pytest.raises(ConfigError, match=why):
            config_of(tmp_path, PLAIN, disk_kv_bytes=1 << 24, **options)
    for name, value in (("folder", "/x"), ("clear", True), ("key_file", "/x")):
        with pytest.raises(
            ConfigError, match=f"disk_kv_{name}: .* without disk_kv_bytes"
        ) as raised:
            config_of(tmp_path, PLAIN, **{f"disk_kv_{name}": value})
        assert raised.value.param == f"disk_kv_{name}"
    both: dict[str, Any] = {"host_kv_bytes": 1 << 24, "disk_kv_bytes": 1 << 24}
    config = config_of(tmp_path, PLAIN, **both, disk_kv_folder="/x", tensor_parallel=2)
    with pytest.raises(ConfigError, match="disk_kv_bytes: not with tensor_parallel"):
        resolve(config)
    open_folder = tmp_path / "open"
    open_folder.mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        Opened(open_folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"disk_kv_folder: .* cannot be used: Not a directory"):
        Opened(tmp_path / "file" / "kv")
    with pytest.raises(ConfigError, match=r"disk_kv_bytes: .* has room for"):
        Opened(tmp_path / "kv", num_bytes=1 << 60)
    key = tmp_path / "key"
    key.write_text("ab" * 32 + "\n")
    with pytest.raises(ConfigError, match="chmod 600"):
        read_key(str(key))
    key.chmod(0o600)
    assert read_key(str(key)) == b"\xab" * 32
    key.write_text("ab")
    with pytest.raises(ConfigError, match="no key of 32 bytes; make one with `openssl"):
        read_key(str(key))


WRITER = """
import mmap, sys, time
from pathlib import Path
from engine.runner.caches.block_file import SlotMemory
from engine.runner.caches.disk_files import DiskFiles
slots = mmap.mmap(-1, 8 << 20)
memory, states = SlotMemory(memoryview(slots), 1 << 20, 0), SlotMemory(memoryview(slots), 12, 0)
files = DiskFiles(Path(sys.argv[1]), 1 << 28, ["model"], memory, states, 2)
print("open", flush=True)
for number in range(10**6):
    memory.slot(number % 4)[:] = bytes([number % 251]) * (1 << 20)
    files.write((0, number.to_bytes(16, "big")), number % 4)
    while not files.written():
        time.sleep(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["disk", "memory"])
def test_kill_9_during_a_write(opened: Any, tmp_path: Path, memory: Path, where: str) -> None:
    """Bug: a replica that is killed leaves a torn file, which the next one reads."""
    folder = tmp_path / "kv" if where == "disk" else memory
    opened(folder).files.close()
    for round in range(3):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE
        )
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(0.05 + 0.03 * round)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
    engine = opened(folder, size=1 << 20, num_bytes=1 << 28, clear=False)
    names = list(engine.files.hashes(0))
    assert names
    for name in names:
        assert engine.read((0, name), 5), "a torn file has its name"
        assert (engine.slots[5] == int.from_bytes(name, "big") % 251).all()
    assert engine.files.stats()["disk_kv_damaged"] == 0


# ---- engines -----------------------------------------------------------------------------------


def scarce(folder: Path, changes: dict[str, Any], disk: Path, **options: Any) -> EngineCore:
    """Return an engine whose host memory is too small for the conversations as well."""
    return core_of(
        folder,
        changes,
        num_blocks=70 if changes is WINDOWS else 45,
        disk_kv_bytes=1 << 26,
        disk_kv_folder=str(disk),
        **{"host_kv_store": "all", **options},
    )


def files_of(core: EngineCore) -> DiskFiles:
    tier = core.scheduler.tier
    assert tier is not None and tier.disk is not None
    files = tier.disk.files
    assert isinstance(files, DiskFiles)
    return files


@pytest.mark.parametrize(
    "changes, options, host",
    [
        (PLAIN, {}, 1 << 19),
        pytest.param(PLAIN, {"kv_dtype": "int8"}, 1 << 18, marks=pytest.mark.slow),
        pytest.param(WINDOWS, {}, 1 << 19, marks=pytest.mark.slow),
        (LATENTS, {}, 1 << 18),
        pytest.param(RECURRENT, {"snapshot_bytes": 1 << 19}, 1 << 21, marks=pytest.mark.slow),
    ],
    ids=["plain", "quantised", "windows", "latents", "recurrent"],
)
def test_texts_are_equal(
    changes: dict[str, Any],
    options: dict[str, Any],
    host: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bugs: a block of a file has the keys of another block, layer or request; after a restart, of
    damaged files, or beside a second engine."""
    monkeypatch.setattr(Worth, "loading", lambda *_: True)
    monkeypatch.setattr(disk_files, "_LOOK_SECONDS", 0.05)
    length = 70 if changes is RECURRENT else 21  # no snapshot is taken below 64 tokens
    roomy = conversations(core_of(tmp_path, changes, **options), length)
    disk = tmp_path / "kv"
    first = scarce(tmp_path, changes, disk, host_kv_bytes=host, **options)
    assert conversations(first, length) == roomy
    stats = first.stats()
    assert stats.disk_kv_written_bytes > 0
    first.close()
    second = scarce(tmp_path, changes, disk, host_kv_bytes=host, **options)
    third = scarce(tmp_path, changes, disk, host_kv_bytes=host, **options)
    paths = sorted(disk.rglob("*.[0s]"))
    for path in paths[::40]:
        data = bytearray(path.read_bytes())
        data[-3] ^= 255
        path.write_bytes(data)
    for path in paths[1::40]:
        path.write_bytes(b"x")
    for core in (second, third):
        assert conversations(core, length) == roomy
        assert core.stats().disk_kv_read_tokens > 20
    assert second.stats().disk_kv_damaged + third.stats().disk_kv_damaged > 0
    second.close()
    third.close()
