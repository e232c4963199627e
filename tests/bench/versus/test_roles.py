"""The comparison of roles: which servers start, and what is compared."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.versus import roles as versus
from deployments.config.load import parse_config


def test_apart_is_held_against_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bugs: both sides have the same pools; the warm-up is a row; a line of another load counts; a
    load sends the prompts of an earlier one, which are in the cache."""
    started: list[dict[str, Any]] = []
    seeds: list[int] = []

    @contextmanager
    def server(side: str, model: str, path: str, text: str, values: Any) -> Iterator[float]:
        filled = text.format(model=model, port=8000, **values)
        data = yaml.safe_load(filled)
        parse_config(data, {}, check_files=False)
        started.append(data)
        yield 5.0

    def load(url: str, side: str, work: Any, **options: Any) -> dict[str, Any]:
        count, arrivals = options["count"], options["arrivals"]
        seeds.append(options.get("seed", 0))
        rate = {"constant": 10.0, "closed": 100.0}[arrivals["kind"]]
        slower = 0.5 if side == "apart" else 1.0
        figures = {"out_tok_s": rate * slower, "itl_ms_p99": 30.0 * slower, "ttft_ms_p50": 50.0}
        return {"ok": count, "failed": 0, "error": None, **figures}

    monkeypatch.setattr(versus, "server", server)
    monkeypatch.setattr(versus, "load", load)
    words = ["--model", "m", "--name", "m", "--rates", "2", "--streams", "8"]
    monkeypatch.setattr(sys, "argv", ["versus", *words, "--out", str(tmp_path)])
    versus.main()
    (table,) = tmp_path.glob("versus-roles-*.json")
    rows = json.loads(table.read_text())["rows"]
    assert {row["case"]: row["ratio"] for row in rows} == {
        "m/2/s/out_tok_s": 0.5,
        "m/2/s/itl_ms_p99": 0.5,
        "m/2/s/ttft_ms_p50": 1.0,
        "m/8 streams/out_tok_s": 0.5,
        "m/8 streams/itl_ms_p99": 0.5,
        "m/8 streams/ttft_ms_p50": 1.0,
    }
    assert [("pools" in config, config.get("replicas")) for config in started] == [
        (False, 2),
        (True, None),
    ]
    assert seeds == [0, 1, 2] * 2
