"""The comparison of engines can be cut off and taken up again."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.report.result_file import Line
from bench.versus import engine as versus_engine
from bench.versus.engine import compare

NAMES = ["single", "uniform"]


def lines_of(run: int, side: str, rate: float, names: list[str] = NAMES) -> list[dict[str, Any]]:
    about = {"model": "m", "run": run, "side": side}
    first = {**about, "ready_s": 9.0 - run, "config": {"side": side}}
    speeds = {"out_tok_s": rate, "total_tok_s": 2 * rate}
    return [first, *({**about, "workload": name, **speeds} for name in names)]


def test_only_what_is_missing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run done twice, or cut off and taken for a whole one; raw lines lost; a best that is not
    the best of all runs."""
    ran = []

    def fake(side: str, model: str, names: list[str], *rest: object) -> Iterator[Line]:
        ran.append(side)
        for line in lines_of(1, side, 3.0 if side == "manta" else 1.5):
            yield {key: value for key, value in line.items() if key not in ("model", "run")}

    monkeypatch.setattr(versus_engine, "run_side", fake)
    compare({"m": "folder"}, NAMES, 1, tmp_path, [], resume=False)
    assert ran == ["manta", "vllm"]
    (raw,) = tmp_path.glob("*.jsonl")
    cut = raw.read_text().splitlines()[:-1]  # the last workload of vLLM
    raw.write_text("".join(line + "\n" for line in cut))
    ran.clear()
    compare({"m": "folder"}, NAMES, 2, tmp_path, [], resume=True)
    assert ran == ["vllm", "manta", "vllm"]
    (table,) = tmp_path.glob("*.json")
    rows = {row["case"]: row for row in json.loads(table.read_text())["rows"]}
    assert rows["m/uniform"] == {
        "case": "m/uniform", "ours": 3.0, "peer": 1.5, "unit": "tok/s", "ratio": 2.0
    }  # fmt: skip
    assert len(raw.read_text().splitlines()) == 4 * 3


def test_models_in_calls_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A visit's second model throws away the hour of the first, which has other workloads."""

    def fake(side: str, model: str, names: list[str], *rest: object) -> Iterator[Line]:
        for line in lines_of(0, side, 3.0 if side == "manta" else 1.5, names):
            yield {key: value for key, value in line.items() if key not in ("model", "run")}

    monkeypatch.setattr(versus_engine, "run_side", fake)
    compare({"small": "folder"}, ["single"], 1, tmp_path, [], resume=True)
    compare({"large": "folder"}, NAMES, 1, tmp_path, [], resume=True)
    (table,) = tmp_path.glob("*.json")
    assert [row["case"] for row in json.loads(table.read_text())["rows"]] == [
        "small/single", "small/ready", "large/single", "large/uniform", "large/ready"
    ]  # fmt: skip


def test_the_command_of_the_docs_prints_their_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the documented command left out prefill, which the table has and something is wanted
    of; also if it is taken up again."""

    def fake(side: str, model: str, names: list[str], *rest: object) -> Iterator[Line]:
        for line in lines_of(0, side, 3.0, names):
            yield {key: value for key, value in line.items() if key not in ("model", "run")}

    monkeypatch.setattr(versus_engine, "run_side", fake)
    docs = (Path(__file__).parents[3] / "docs/performance.md").read_text()
    command = re.search(r"python -m (bench.versus.engine --model LLAMA QWEN .*)", docs)
    assert command
    for words in (command[1].split(), [*command[1].split(), "--resume"]):
        monkeypatch.setattr("sys.argv", [*words, "--out", str(tmp_path)])
        versus_engine.main()
    (table,) = tmp_path.glob("*.json")
    columns = re.search(r"\| tokens/s \(ratio to vLLM\) \| (.*) \|", docs)
    assert columns
    cases = [row["case"] for row in json.loads(table.read_text())["rows"]]
    assert cases[:5] == [f"llama-8b/{name}" for name in columns[1].split(" | ")]
    assert cases[5:] == [
        f"qwen3-0.6b/{name}" for name in ("single", "uniform", "dialogue", "ready")
    ]


def test_the_command_pairs_labels_and_models(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command that cannot start its comparison, which only a GPU machine would find out."""
    asked: list[Any] = []
    line = ["versus_engine", "--model", "A", "B", "--name", "a", "b", "--runs", "1"]
    monkeypatch.setattr("sys.argv", [*line, "--workloads", "single", "--out", "/nonexistent/x"])
    monkeypatch.setattr(versus_engine, "compare", lambda *given: asked.append(given))
    versus_engine.main()
    where = (Path("/nonexistent/x"), [], False, None, "versus-engine")
    assert asked == [({"a": "A", "b": "B"}, ["single"], 1, *where)]
    monkeypatch.setattr("sys.argv", [*line[:4], "--name", "a"])
    with pytest.raises(SystemExit):
        versus_engine.main()
    assert "1 labels for 2 models" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["loadtest/versus_engine.py", "bench/versus/engine.py"])
def test_another_checkout_runs_its_own_code(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Bug: the older side imports the newer code, and a comparison of a thing with itself says that
    nothing became slower. Its commit is in the file's name, its lines bear the side's name."""
    before, model = tmp_path / "before", tmp_path / "model"
    for folder in ((before / place).parent, model):
        folder.mkdir(parents=True)
    for folder in (before / place).parents[: place.count("/")]:
        (folder / "__init__.py").touch()
    (before / place).write_text(
        "import json, pathlib, sys\n"
        f"at = pathlib.Path(__file__).parents[{place.count('/')}]\n"
        "config = {'argv': sys.argv[1:], 'at': str(at)}\n"
        "print(json.dumps({'side': 'manta', 'ready_s': 4.0, 'config': config}))\n"
        "print(json.dumps({'side': 'manta', 'workload': 'single', 'out_tok_s': 2.0}))\n"
    )
    real = versus_engine.run_side

    def run_side(side: str, *rest: Any) -> Iterator[Line]:
        if side == versus_engine.BEFORE:
            yield from real(side, *rest)
        else:
            yield {"side": side, "ready_s": 2.0, "config": {}}
            yield {"side": side, "workload": "single", "out_tok_s": 3.0}

    monkeypatch.setattr(versus_engine, "run_side", run_side)
    compare({"m": str(model)}, ["single"], 1, tmp_path, [], False, before)
    (table,) = tmp_path.glob("before-after-*.json")
    document = json.loads(table.read_text())
    assert [row["ratio"] for row in document["rows"]] == [1.5, 0.5]
    peer = document["config"]["peers"][versus_engine.BEFORE]
    assert peer["at"] == str(before) and peer["argv"][:2] == ["--side", "manta"]
