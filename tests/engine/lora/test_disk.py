"""The disk's tier: what came from an object store, shared by the engines of a machine."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config.engine_config import EngineConfig
from engine.errors import AdapterError, ConfigError
from engine.lora.loader import AdapterLoader
from engine.lora.peft_config import CONFIG_FILE, WEIGHTS_FILE
from engine.lora.tiers import disk as disk_module
from engine.lora.tiers.disk import DiskCache
from engine.lora.weights import LoraLayout, LoraReader
from tests.engine.lora.adapters import save_adapter
from tests.engine.models.checkpoints import load_model, save_checkpoint

SECONDS = 30  # that a test waits for what should come at once
A, B, C, D = ("a" * 32, "b" * 32, "c" * 32, "d" * 32)


def fill(cache: DiskCache, digest: str, size: int) -> None:
    with cache.open(digest) as entry:
        assert not entry.filled
        entry.reserve(size)
        (entry.folder / WEIGHTS_FILE).write_bytes(bytes(size))
        entry.keep(digest)


def names(cache: DiskCache) -> set[str]:
    return {path.name for path in cache.folder.iterdir()}


def test_the_one_used_longest_ago_goes(tmp_path: Path) -> None:
    """Bug: the disk fills up without end; or the one just used goes; or one in use."""
    cache = DiskCache(str(tmp_path), 30)
    for digest in (A, B, C):
        fill(cache, digest, 10)
    with cache.open(A) as entry:
        assert entry.filled
    fill(cache, D, 10)
    assert names(cache) == {A, C, D} and cache.num_bytes == 30
    with cache.open(C):
        fill(cache, B, 20)
        assert names(cache) == {C, B}
    assert cache.find(A) is None
    # what is being downloaded counts before it is there, and of a size that was not told afterwards
    with cache.open() as part:
        part.reserve(25)
        assert names(cache) == {part.folder.name} and cache.num_bytes == 25
    fill(cache, A, 10)
    with cache.open(D) as entry:
        entry.reserve(0)
        (entry.folder / WEIGHTS_FILE).write_bytes(bytes(25))
        entry.keep(D)
    assert names(cache) == {D}


def test_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: an adapter that never fits waits, or drives out all others first; one that has to wait
    for others does so for ever, or takes the room of what is in use."""
    monkeypatch.setattr(disk_module, "ROOM_SECONDS", 0.1)
    cache = DiskCache(str(tmp_path), 30)
    fill(cache, A, 20)
    with (
        cache.open(B) as entry,
        pytest.raises(AdapterError, match=r"31 bytes .*30.*disk_bytes") as e,
    ):
        entry.reserve(31)
    assert e.value.code == "adapter_incompatible" and names(cache) == {A}
    with cache.open(A), cache.open(B) as entry, pytest.raises(AdapterError, match="in use") as e:
        entry.reserve(11)
    assert e.value.code == "storage_full" and names(cache) == {A}
    with pytest.raises(AdapterError, match=r"kept in /proc/.*lora_disk_folder") as e:
        DiskCache("/proc").open()
    assert e.value.code == "storage_full"
    with pytest.raises(ConfigError, match="absolute"):
        EngineConfig(model="default", lora_disk_folder="adapters")


HOLD = """
import sys
from engine.lora.tiers.disk import DiskCache
cache = DiskCache(sys.argv[1], 30)
entries = [cache.open(digest) for digest in sys.argv[2:]]
entries[-1].reserve(10)
print("held", flush=True)
sys.stdin.read()
"""


def test_several_processes(tmp_path: Path) -> None:
    """Bug: one replica removes what another reads, or fetches what another is fetching; or what a
    killed one has left stays for ever."""
    cache = DiskCache(str(tmp_path), 30)
    fill(cache, A, 10)
    fill(cache, B, 10)
    command = [sys.executable, "-c", HOLD, str(tmp_path), A, D]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        fill(cache, C, 10)
        assert names(cache) > {A, C} and B not in names(cache) and cache.num_bytes == 30
        entries: list[Any] = []
        waits = threading.Thread(target=lambda: entries.append(cache.open(D)))
        waits.start()
        waits.join(0.2)
        assert waits.is_alive(), "the other process fetches it"
        other.kill()
        waits.join(SECONDS)
    assert not entries[0].filled and cache.num_bytes == 20
    entries[0].close()
    assert names(cache) == {A, C}


def test_two_threads_fetch_once(tmp_path: Path) -> None:
    """Bug: whoever waited for a download begins another, because it is locked or has a new name."""
    cache = DiskCache(str(tmp_path))
    entry = cache.open(A)
    entries: list[Any] = []
    waits = threading.Thread(target=lambda: entries.append(cache.open(A)))
    waits.start()
    entry.keep(A)
    waits.join(SECONDS)
    assert entries[0].filled and entries[0].folder == entry.folder
    entry.close()
    entries[0].close()
    assert names(cache) == {A}


def test_folders_of_others(tmp_path: Path) -> None:
    """Bug: a link that another user laid where the cache is to be leads the files elsewhere; or
    what is no entry is removed with them."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    cache = DiskCache(str(tmp_path), 10)
    cache.folder.symlink_to(elsewhere)
    with pytest.raises(AdapterError):
        cache.open()
    cache.folder.unlink()
    fill(cache, A, 10)
    (cache.folder / "notes").mkdir()
    (cache.folder / B).symlink_to(elsewhere)
    with pytest.raises(AdapterError):
        cache.open(B)
    (cache.folder / B).unlink()
    fill(cache, C, 10)
    assert names(cache) == {"notes", C}
    with cache.open("../elsewhere") as entry:
        assert not entry.filled and entry.folder.parent == cache.folder


def test_through_the_loader(tmp_path: Path) -> None:
    """A replica, or one beside it, gets an adapter that is known from the disk, also when the store
    is gone or has other files by then; one that is added by hand is fetched; damage is healed."""
    fsspec = pytest.importorskip("fsspec")
    pytest.importorskip("peft")
    theirs = save_checkpoint(tmp_path / "base", "llama")
    layout = LoraLayout(linear.spec for linear in load_model(tmp_path / "base").linears())
    store = fsspec.filesystem("memory")
    url = "memory://disk/mine"

    def upload_adapter(seed: int) -> None:
        folder = save_adapter(theirs, tmp_path / str(seed), seed)
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            store.pipe(f"/disk/mine/{name}", (folder / name).read_bytes())

    def loader() -> AdapterLoader:
        reader = LoraReader(layout, torch.float32, max_rank=16)
        device: Any = None  # nothing is uploaded
        return AdapterLoader((reader, device), None, DiskCache(str(tmp_path), 1 << 20))

    upload_adapter(0)
    first = loader().read(url)
    upload_adapter(1)
    assert loader().read(url, first.digest).digest == first.digest
    assert loader().describe(url, first.digest).stamp == first.digest
    second = loader().read(url)
    assert second.digest != first.digest
    store.rm("/disk/mine", recursive=True)
    assert loader().read(url, first.digest).digest == first.digest
    with pytest.raises(AdapterError) as caught:
        loader().read(url)
    assert caught.value.code == "adapter_not_found"
    file = DiskCache(str(tmp_path)).folder / second.digest / WEIGHTS_FILE
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(AdapterError):
        loader().read(url, second.digest)
    assert not file.exists()
    upload_adapter(1)
    assert loader().read(url, second.digest).digest == second.digest and file.exists()
    os.truncate(file, 100)
    assert loader().read(url, second.digest).digest == second.digest
    small = LoraReader(layout, torch.float32, max_rank=4)
    with pytest.raises(AdapterError, match=rf"^{url}: rank 8 is over") as caught:
        AdapterLoader((small, None), None, DiskCache(str(tmp_path))).read(url)  # type: ignore[arg-type]
    tiny = AdapterLoader((small, None), None, DiskCache(str(tmp_path), 1000))  # type: ignore[arg-type]
    with pytest.raises(AdapterError, match=rf"^{url}: \d+ bytes .*lora_disk_bytes") as caught:
        tiny.read(url)
    assert caught.value.code == "adapter_incompatible"
