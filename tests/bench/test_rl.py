"""bench.rl, on the CPU."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.rl import __main__ as rl
from bench.rl import updates
from tests.bench.test_memory_load import TINY

ENGINE = ["device=cpu", "dtype=float32", "num_threads=1", f"kv_cache_bytes={16 << 20}"]


def run(folder: Path, *cases: str, ways: tuple[str, ...] = ("running",)) -> list[dict[str, Any]]:
    (folder / "config.json").write_text(json.dumps({**TINY, "tie_word_embeddings": False}))
    rl.main([
        "--cases", *cases, "--model", str(folder), "--set", *ENGINE, "--out", str(folder / "out"),
        "--streams", "4", "--tokens", "64", "--updates", "1", "--requests", "2",
        "--seconds", "15", "--ways", *ways,
    ])  # fmt: skip
    (lines,) = (folder / "out").glob("rl-*.jsonl")
    (table,) = (folder / "out").glob("rl-*.json")
    assert all(row["unit"] for row in json.loads(table.read_text())["rows"])
    return [json.loads(line) for line in lines.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "ways"), [("same-device", updates.WAYS), ("broadcast", ("running",))]
)
def test_tokens_tell_their_version(tmp_path: Path, case: str, ways: tuple[str, ...]) -> None:
    """A way of updating that gives no tokens or wrong ones, or a part that is not timed."""
    lines = run(tmp_path, case, ways=ways)
    assert [line["way"] for line in lines] == ["first", *ways]
    for line in lines[1:]:
        assert line["tokens"] and not line["wrong"] and line["gap_s"] and line["gap_without_s"]
        assert 0 < line["replace_s"] <= line["finish_s"] + 0.01 < line["update_s"] + 0.01


@pytest.mark.slow
def test_a_wrong_version_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of other weights than those that are told count as right."""
    monkeypatch.setattr(updates, "token_of", lambda version, vocab: 5 + version)
    lines = run(tmp_path, "same-device")
    assert all(line["wrong"] > 0.9 * line["tokens"] for line in lines[1:])


@pytest.mark.slow
def test_exact(tmp_path: Path) -> None:
    """Nothing is scored, or one mode's throughput is missing."""
    lines = run(tmp_path, "mismatch", "throughput")
    compared = [line for line in lines if line["case"] == "mismatch"]
    assert [(line["largest"], line["tokens"]) for line in compared] == [(0.0, 128)] * 2
    rates = {line["side"] for line in lines if line.get("tok_s", 0) > 0}
    assert rates == {"default", "deterministic"}
