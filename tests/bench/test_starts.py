"""The bench of first and later starts."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.operate import starts
from bench.report.result_file import Line


def test_each_side_has_an_empty_cache_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Bug: the side that runs first compiles the kernels of both, or the later start has none; or
    the worst round counts."""
    monkeypatch.setenv("TRITON_CACHE_DIR", "of the machine")
    caches: list[Path] = []

    def run_side(side: str, *_: Any) -> Iterator[Line]:
        cache = Path(os.environ["TRITON_CACHE_DIR"])
        first = not any(cache.iterdir())
        (cache / "kernel").touch()
        caches.append(cache)
        yield {"side": side, "ready_s": (10.0 if first else 5.0) + len(caches)}

    monkeypatch.setattr(starts, "run_side", run_side)
    lines = [
        line
        for side in (*starts.SIDES, *starts.SIDES)
        for line in starts.starts("model", side, tmp_path)
    ]
    assert len(set(caches)) == 4 and not any(cache.exists() for cache in caches)
    first, later = starts.rows("model", lines)
    assert first == {
        "case": "model/first start",
        "ours": 11,
        "peer": 13,
        "unit": "s",
        "ratio": 0.846,
    }
    assert (later["ours"], later["peer"]) == (7, 9)
