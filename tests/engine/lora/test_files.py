"""What an adapter's files may hold, and how each fault is told."""

import errno
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import AdapterError
from engine.lora.loader import AdapterLoader
from engine.lora.peft_config import CONFIG_FILE, WEIGHTS_FILE, check_name
from engine.lora.tiers.disk import DiskCache
from engine.lora.tiers.remote import fetched
from engine.lora.weights import LoraLayout, LoraReader
from tests.engine.lora.adapters import edit_tensors, save_adapter
from tests.engine.models.checkpoints import load_model, save_checkpoint

Q = "model__layers__0__self_attn__q_proj__lora_A__weight"
UP = "model__layers__1__mlp__up_proj__lora_B__weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoraReader, Path]:
    """Return a reader for a tiny model with ranks up to 16, and a good adapter of rank 8."""
    folder = tmp_path_factory.mktemp("model")
    theirs = save_checkpoint(folder / "base", "llama")
    save_adapter(theirs, folder / "good")
    layout = LoraLayout(linear.spec for linear in load_model(folder / "base").linears())
    return LoraReader(layout, torch.float32, max_rank=16), folder / "good"


@pytest.fixture
def folder(made: tuple[LoraReader, Path], tmp_path: Path) -> Path:
    """Return a copy of the good adapter, to be broken."""
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        (tmp_path / name).write_bytes((made[1] / name).read_bytes())
    return tmp_path


def configure(folder: Path, **fields: Any) -> None:
    path = folder / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def read(made: tuple[LoraReader, Path], folder: Path) -> Any:
    return made[0].read(folder, "")


def fails(made: tuple[LoraReader, Path], folder: Path, code: str, text: str) -> None:
    with pytest.raises(AdapterError) as caught:
        read(made, folder)
    assert caught.value.code == code and text in caught.value.message, caught.value.message


CONFIGS: dict[str, tuple[dict[str, Any], str, str]] = {
    "kind": ({"peft_type": "IA3"}, "adapter_invalid", "peft_type"),
    "task": ({"task_type": "SEQ_CLS"}, "adapter_invalid", "task_type"),
    "dora": ({"use_dora": True}, "adapter_invalid", "use_dora"),
    "bias": ({"bias": "all"}, "adapter_invalid", "bias"),
    "lora bias": ({"lora_bias": True}, "adapter_invalid", "lora_bias"),
    "saved modules": ({"modules_to_save": ["lm_head"]}, "adapter_invalid", "modules_to_save"),
    "head": ({"target_modules": ["q_proj", "lm_head"]}, "adapter_invalid", "lm_head"),
    "embeddings": ({"target_modules": ["embed_tokens"]}, "adapter_invalid", "embed_tokens"),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, "adapter_invalid", "init_lora_weights"),
    "rank type": ({"r": "8"}, "adapter_invalid", "r: '8'"),
    "rank zero": ({"r": 0}, "adapter_invalid", "r: 0"),
    "rank true": ({"r": True}, "adapter_invalid", "r: True"),
    "alpha": ({"lora_alpha": float("nan")}, "adapter_invalid", "lora_alpha"),
    "rslora": ({"use_rslora": "yes"}, "adapter_invalid", "use_rslora"),
    "pattern": ({"rank_pattern": {"(a+)+b": 4}}, "adapter_invalid", "rank_pattern"),
    "pattern rank": ({"rank_pattern": {"q_proj": 400}}, "adapter_incompatible", "400"),
    "rank over limit": ({"r": 32}, "adapter_incompatible", "max_lora_rank 16"),
    "rank of the file": ({"r": 4}, "adapter_incompatible", "rank 4"),
    "more than promised": ({"target_modules": ["q_proj"]}, "adapter_invalid", "target_modules"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations(name: str, made: tuple[LoraReader, Path], folder: Path) -> None:
    """What is not supported changes the answers if it is ignored."""
    fields, code, text = CONFIGS[name]
    configure(folder, **fields)
    fails(made, folder, code, text)


def test_tensors(made: tuple[LoraReader, Path], folder: Path) -> None:
    """Each fault is named; and an adapter as peft saves it is read, twice the same."""
    good = (folder / WEIGHTS_FILE).read_bytes()
    loaded = read(made, folder)
    assert loaded.digest == read(made, folder).digest and loaded.host_bytes
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({Q: torch.full((8, 32), torch.nan)}, "adapter_invalid", "NaN"),
        ({UP: torch.full((56, 8), torch.inf)}, "adapter_invalid", "infinity"),
        ({Q: torch.zeros(8, 31)}, "adapter_incompatible", "[8, 31]"),
        ({Q: torch.zeros(9, 32)}, "adapter_incompatible", "[9, 32]"),
        ({Q: None}, "adapter_invalid", "without the other"),
        ({Q: None, Q.replace("A", "B"): None}, "adapter_invalid", "missing"),
        ({Q.replace("layers__0", "layers__7"): torch.zeros(8, 32)}, "adapter_incompatible", "7"),
        ({"lm_head__lora_A__weight": torch.zeros(8, 32)}, "adapter_incompatible", "lm_head"),
        ({"model__norm__weight": torch.zeros(32)}, "adapter_invalid", "norm"),
        ({Q.replace("A__weight", "magnitude_vector"): torch.zeros(8)}, "adapter_invalid", "magni"),
    ]
    for changes, code, text in cases:
        (folder / WEIGHTS_FILE).write_bytes(good)
        edit_tensors(folder, **changes)
        fails(made, folder, code, text)


def test_broken_files(made: tuple[LoraReader, Path], folder: Path, tmp_path: Path) -> None:
    """Truncated, grown, pickled, missing, linked elsewhere: no bytes of them reach the model."""
    path = folder / WEIGHTS_FILE
    good = path.read_bytes()
    for data in (good[:-1], good + b"x", good[:20], b"", pickle.dumps({"a": 1}), b"\xff" * 64):
        path.write_bytes(data)
        fails(made, folder, "adapter_invalid", WEIGHTS_FILE)
    path.unlink()
    fails(made, folder, "adapter_not_found", "is missing")
    (folder / "adapter_model.bin").write_bytes(pickle.dumps({}))
    fails(made, folder, "adapter_invalid", "pickle")
    outside = tmp_path.parent / "outside.safetensors"
    outside.write_bytes(good)
    path.symlink_to(outside)
    fails(made, folder, "adapter_invalid", "link out of")
    path.unlink()
    os.mkfifo(path)
    fails(made, folder, "adapter_invalid", "not a regular file")
    path.unlink()
    path.write_bytes(good)
    for text in ("", "[]", "{", "[" * 100_000, "\0"):
        (folder / CONFIG_FILE).write_text(text)
        fails(made, folder, "adapter_invalid", CONFIG_FILE)
    (folder / CONFIG_FILE).unlink()
    fails(made, folder, "adapter_not_found", CONFIG_FILE)
    fails(made, folder / "nowhere", "adapter_not_found", "nowhere")


def test_another_base_model(
    made: tuple[LoraReader, Path], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Bug: an adapter trained for another model of equal shapes gives poor answers and nobody is
    told why; or one is refused, or warned of again and again, for a name that says the same."""
    device: Any = None  # nothing is uploaded
    loader = AdapterLoader((made[0], device), model="/models/Llama-3.1-8B-Instruct")
    same = ("", "meta-llama/Llama-3.1-8B-Instruct", "/home/me/llama-3.1-8b-instruct.Q4_K_M.gguf/")
    for base in (*same, "~/models--meta-llama--Llama-3.1-8B-Instruct/snapshots/0e9e39f249a1"):
        configure(folder, base_model_name_or_path=base)
        loader.read(str(folder))
    assert not caplog.records
    configure(folder, base_model_name_or_path="meta-llama/Llama-3.1-8B")
    for _ in range(2):
        loader.read(str(folder))
    (record,) = caplog.records
    said = record.getMessage()
    assert str(folder) in said and "'meta-llama/Llama-3.1-8B'" in said
    assert "'Llama-3.1-8B-Instruct'" in said
    edit_tensors(folder, **{Q: torch.zeros(8, 31)})
    with pytest.raises(AdapterError, match=r"\[8, 31\].*trained for 'meta-llama/Llama-3.1-8B'"):
        loader.read(str(folder))


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "...", "a/b", "a\\b", "../a", "/etc/passwd", "a\0", "a b", "a\n", "a@b", "a:b"],
)
def test_names(name: str) -> None:
    """Bug: a name that could leave the adapters' folder, or forge a log line."""
    with pytest.raises(AdapterError):
        check_name(name)
    for name in ("%2e%2e", "é", "a" * 129, "//host/share", "~", "$HOME"):
        with pytest.raises(AdapterError):
            check_name(name)
    check_name("A-good.name_1")


def test_object_store(folder: Path, tmp_path: Path) -> None:
    """An adapter at a URL; what is missing or cannot be kept has its own error."""
    fsspec = pytest.importorskip("fsspec")
    store = fsspec.filesystem("memory")
    disk = DiskCache(str(tmp_path / "disk"))
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        store.pipe(f"/adapters/a/{name}", (folder / name).read_bytes())
    with fetched("memory://adapters/a", entry := disk.open(), weights=True) as first:
        assert (entry.folder / WEIGHTS_FILE).read_bytes() == (folder / WEIGHTS_FILE).read_bytes()
    assert not entry.folder.exists()
    store.pipe(f"/adapters/a/{WEIGHTS_FILE}", b"other")
    with fetched("memory://adapters/a", entry := disk.open(), weights=False) as second:
        assert second != first and not (entry.folder / WEIGHTS_FILE).exists()
    for url, code in (
        ("memory://adapters/b", "adapter_not_found"),
        (f"file://{folder}", "adapter_not_found"),
        (f"simplecache::file://{folder}", "adapter_not_found"),
        ("nonsense://a", "adapter_invalid"),
    ):
        with pytest.raises(AdapterError) as caught, fetched(url, disk.open(), weights=True):
            pass
        assert caught.value.code == code
    assert disk.num_bytes == 0 and not list(disk.folder.iterdir())


def test_no_room_for_a_copy(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: another code than 503 for that adapter, or a part of its file stays on the disk."""
    fsspec = pytest.importorskip("fsspec")
    store = fsspec.filesystem("memory")
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        store.pipe(f"/adapters/full/{name}", (folder / name).read_bytes())
    places = []

    def full(self: Any, source: str, target: str, **options: Any) -> None:
        places.append(Path(target))
        Path(target).write_bytes(b"part")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(type(store), "get_file", full)
    with (
        pytest.raises(AdapterError) as caught,
        fetched("memory://adapters/full", DiskCache(str(tmp_path)).open(), weights=True),
    ):
        pass
    assert caught.value.code == "storage_full"
    assert places and not places[0].parent.exists()
