"""`manta verify`: what it prints and how it exits."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from deployments.cli.main import cli
from engine.errors import ConfigError
from tests.engine.models.checkpoints import save_checkpoint
from tests.engine.text.small_tokenizers import byte_level


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = byte_level()
    save_checkpoint(tmp_path, "qwen3", vocab_size=tokenizer.backend.get_vocab_size())
    tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def verify(*args: str | Path) -> tuple[int, str]:
    threads = torch.get_num_threads()
    try:
        done = CliRunner().invoke(cli, ["verify", *map(str, args), "--device", "cpu"])
    finally:
        torch.set_num_threads(threads)
    if isinstance(done.exception, ConfigError):
        raise done.exception
    return done.exit_code, done.stdout


@pytest.mark.slow
def test_verdict_and_exit_code(folder: Path) -> None:
    """A script that goes on with a model that differs, or that was compared with nothing."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"prompt": "the cat sat on the mat"}\n\n{"prompt": "dog"}\n')
    code, text = verify(folder, "--prompts", prompts, "--max-tokens", "2")
    assert code == 0 and "Verdict    agrees with transformers" in text, text
    few = (folder, "--prompts", prompts, "--max-tokens", "2", "--json")
    code, text = verify(*few, "--dtype", "bfloat16", "--max-kl", "0")
    report = json.loads(text)
    assert code == 1 and report["verdict"] == "differs" and report["problems"]
    code, text = verify(*few, "--reference", "none")
    assert code == 3 and json.loads(text)["no_reference"] == "it was not asked for"


@pytest.mark.parametrize("line", ["", "[1]", '{"text": "x"}', '{"prompt": ""}'])
def test_prompts_that_are_none(folder: Path, line: str) -> None:
    """A file of another format that is taken for prompts, or for none."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text(line)
    with pytest.raises(ConfigError, match=r"prompts\.jsonl"):
        verify(folder, "--prompts", prompts)
