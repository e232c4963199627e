"""The measure of loading: what it makes is loaded, and calls of one case each make one table."""

import importlib.util
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import loading
from bench.report.result_file import Line


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    tiny = {"dense": loading._llama(128, 256, 256, 1, 2), "moe": loading.moe(0.01, layers=1)}
    for name, config in tiny.items():
        monkeypatch.setattr(loading, name, lambda gb, config=config: config)

    def run(*extra: str) -> dict[str, Line]:
        words = ["loading", "--device", "cpu", "--gb", "0.02", "--rounds", "1"]
        words += ["--folder", str(tmp_path), "--out", str(tmp_path / "out"), *extra]
        monkeypatch.setattr(sys, "argv", words)
        loading.main()
        (table,) = (tmp_path / "out").glob("*.json")
        return {row["case"]: row for row in json.loads(table.read_text())["rows"]}

    return run


def test_cases_in_calls_of_their_own(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A visit's second call throws away the first's rows; a start is timed with random weights and
    not with the files; gigabytes are left in the temporary folder."""
    read = []

    def fake(
        side: str, model: str, names: list[str], *rest: Any, load_format: str
    ) -> Iterator[Line]:
        read.append((side, names, load_format, bool(list(Path(model).glob("*.safetensors")))))
        yield {
            "side": side,
            "ready_s": {"manta": 3.0, "vllm": 10.0}[side] - len(read) / 4,
            "config": {},
        }

    monkeypatch.setattr(loading, "run_side", fake)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    first = call("--cases", "ready", "dense")
    assert read == [(side, [], "auto", True) for side in ("manta", "vllm", "manta", "vllm")]
    assert first["0.02gb-dense/ready"] == {
        "case": "0.02gb-dense/ready", "ours": 2.25, "peer": 9.0, "unit": "s", "ratio": 0.25
    }  # fmt: skip
    both = call("--cases", "moe", "--resume")
    assert len(both) == 3 and first.items() <= both.items()
    assert both["0.02gb-moe/copy_ratio"]["tensors"] > 384
    assert not list(tmp_path.glob("manta-loading-*"))


def test_without_a_peer(call: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A machine without vLLM measures nothing, or leaves the row out with no word."""
    if importlib.util.find_spec("vllm"):
        pytest.skip("vLLM is installed here")
    assert list(call("--cases", "ready", "dense")) == ["0.02gb-dense/copy_ratio"]
    assert "vLLM is not installed" in capsys.readouterr().out


def test_sizes(tmp_path: Path) -> None:
    """A row of sixteen gigabytes or ten thousand tensors is one of half as many."""
    counts = []
    for config in (loading.dense(16), loading.moe(16)):
        (tmp_path / "config.json").write_text(json.dumps(config))
        names = loading.tensors(tmp_path)
        assert 15e9 < sum(2 * math.prod(shape) for _, shape in names) < 17e9
        counts.append(len(names))
    assert counts[0] == 291  # llama-8b's
    assert 9_500 < counts[1] < 10_500
