"""The pictures of the docs and the table of results."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from bench.report import plots


def test_table_and_pictures_are_of_the_files() -> None:
    """A figure in the docs whose file nobody finds, or a picture of an older result: after adding
    a result, run `python -m bench.report.plots`."""
    results = plots.read_results(plots.RESULTS)
    assert (plots.RESULTS / "README.md").read_text() == plots.table(results)
    assert plots.SPEEDS.read_text() == plots.speeds(results)
    for result in plots.newest(results):
        if result.rows:
            drawn = (plots.IMAGES / f"{result.name}.svg").read_text()
            assert drawn == plots.picture(result)


def test_every_result_says_where_it_comes_from() -> None:
    """A figure without a commit, a device or its raw lines."""
    for result in plots.read_results(plots.RESULTS):
        document = result.document
        assert document["commit"] and document["device"] and document["date"] == result.date
        assert result.made_by, "name what made it in plots.MADE_BY, or in its note"
        assert result.path.with_suffix(".jsonl").stat().st_size


@pytest.mark.parametrize(
    ("unit", "ours", "peer", "tone"),
    [("tok/s", 110, 100, "good"), ("tok/s", 90, 100, "bad"), ("s", 5, 20, "good"),
     ("ms", 20, 5, "bad"), ("tok/s", 100.2, 100, "soft")],
)  # fmt: skip
def test_colours(unit: str, ours: float, peer: float, tone: str, tmp_path: Path) -> None:
    """A latency drawn as if more were better; a case's name that breaks the SVG."""
    row = {"case": "m/<a & b>", "ours": ours, "peer": peer, "unit": unit}
    document = {"commit": "c" * 40, "device": "d", "date": "2026-01-02", "rows": [row]}
    (tmp_path / "http-2026-01-01.json").write_text(json.dumps({**document, "rows": []}))
    (tmp_path / "http-2026-01-02.json").write_text(json.dumps(document))
    (result,) = plots.newest(plots.read_results(tmp_path))
    root = ElementTree.fromstring(plots.picture(result))
    (ratio,) = [e for e in root.iter() if "ratio" in (e.get("class") or "")]
    assert (ratio.get("class") or "").split()[0] == tone
    assert any(e.text == "<a & b>" for e in root.iter())
