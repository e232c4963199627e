"""docs/claims.md: each figure is in the file that its row names, in a case that it names."""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
HEAD = ["", "claim", "run, of which case", "reached", "file"]


def table() -> list[list[str]]:
    """Return the rows of the page's table, cell by cell."""
    text = (ROOT / "docs" / "claims.md").read_text("utf-8")
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert rows[0] == HEAD and set("".join(rows[1])) == {"-"}
    return rows[2:]


def figures_of(row: dict[str, Any]) -> set[float]:
    return {float(value) for value in row.values() if isinstance(value, int | float)}


def test_each_claim_has_one_row() -> None:
    """A claim that is left out because it fell."""
    assert [row[0] for row in table()] == [f"W{number}" for number in range(1, 22)]
    for row in table():
        assert row[1] and row[2], row
        assert bool(row[3]) == bool(row[4]), f"{row[0]}: figures need a file, and a file figures"


def test_each_figure_is_in_its_file() -> None:
    """A figure of a former run, or of nothing."""
    checked = 0
    for number, _, run, reached, file in table():
        if not file:
            assert re.search(r"\bopen\b|\bno\b", run), f"{number}: why was it not run?"
            continue
        name = file.strip("`")
        result = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
        cases = re.findall(r"`([^`]+)`", run)
        assert cases, f"{number} names no case"
        rows = [row for row in result["rows"] if str(row["case"]).startswith(tuple(cases))]
        for case in cases:
            named = [row for row in rows if str(row["case"]).startswith(case)]
            assert named, f"{number}: {name} has no case {case}"
        known = set[float]().union(*(figures_of(row) for row in rows))
        for figure in reached.split(", "):
            assert float(figure) in known, f"{number}: {figure} is in no case of {name}"
            checked += 1
    assert checked > 25
