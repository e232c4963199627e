"""Adapters through an engine process, with the fake core."""

import asyncio
import json
import shutil
from pathlib import Path
from zlib import crc32

import pytest

from engine import LLM, AsyncEngine, SamplingParams
from engine.config.engine_config import EngineConfig
from engine.errors import AdapterError, EngineDead
from engine.process.fake import FakeOptions


def make_folder(folder: Path, **fields: object) -> Path:
    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], **fields}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder


def answer(key: str) -> list[int]:
    """Return three tokens of the fake core after a prompt of one token. key: the adapter's.

    By chance one pair of keys in a thousand gives equal tokens.
    """
    options, shift = FakeOptions(), crc32(key.encode()) if key else 0
    span = options.vocab_size - options.first
    return [options.first + (position + shift) % span for position in (1, 2, 3)]


def test_blocking(tmp_path: Path) -> None:
    """Names, replacement, removal and errors, as LLM shows them."""
    folder = make_folder(tmp_path / "a")
    params = SamplingParams(max_tokens=3)
    with LLM("fake:", max_loras=1) as llm:
        info = llm.add_adapter("a", folder)
        assert (info.name, info.kind, info.rank, info.targets) == ("a", "lora", 8, ["q_proj"])
        plain, first = llm.generate([[5], [5]], params, adapter=["", "a"])
        assert plain.outputs[0].token_ids == answer("")
        assert first.outputs[0].token_ids == answer(f"a@{info.revision}")
        shutil.rmtree(folder)
        again = llm.add_adapter("a", make_folder(tmp_path / "a", r=16))
        assert again.revision != info.revision and again.rank == 16
        (second,) = llm.generate([5], params, adapter="a")
        assert second.outputs[0].token_ids == answer(f"a@{again.revision}")
        assert llm.stats().adapters == ["a"] and llm.stats().adapter_loads == 2
        assert llm.remove_adapter("a") == again
        (gone,) = llm.generate([5], params, adapter="a")
        assert gone.outputs[0].error.startswith("adapter_not_found: ")
        fields = {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 20}
        info = llm.add_adapter("keys", make_folder(tmp_path / "keys", **fields))
        assert (info.kind, info.rank, info.virtual_tokens) == ("prefix_tuning", 0, 20)
        for name, path, code in (
            ("a", tmp_path / "nowhere", "adapter_not_found"),
            ("..", folder, "invalid_model_name"),
            ("a/b", folder, "invalid_model_name"),
            ("b", make_folder(tmp_path / "b", use_dora=True), "adapter_invalid"),
        ):
            with pytest.raises(AdapterError) as caught:
                llm.add_adapter(name, path)
            assert caught.value.code == code
        with pytest.raises(AdapterError, match="no adapter"):
            llm.remove_adapter("b")


async def test_async(tmp_path: Path) -> None:
    """The same client on a loop; whoever waits for an answer learns that the engine has ended."""
    async with await AsyncEngine.start(EngineConfig(model="fake:", max_loras=1)) as engine:
        await engine.add_adapter("a", make_folder(tmp_path / "a"))
        out = await engine.start_request([5], SamplingParams(max_tokens=2), adapter="a")
        assert len(out.outputs[0].token_ids) == 2
        asked = asyncio.create_task(engine.add_adapter("b", tmp_path / "a"))
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EngineDead):
            await asked


def test_disabled(tmp_path: Path) -> None:
    """Without max_loras nothing is loaded in silence."""
    with LLM("fake:") as llm, pytest.raises(AdapterError) as caught:
        llm.add_adapter("a", make_folder(tmp_path / "a"))
    assert caught.value.code == "adapters_disabled"
