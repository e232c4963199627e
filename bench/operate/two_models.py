"""`two-models/path`: the CPU cost of a chunk in a router for two models, against one for one model.

tests/deployments/several_models/path_of_two.py measures it. Ratios are of the best rounds.
"""

from collections.abc import Iterator

from bench.report.result_file import Line
from tests.deployments.several_models.path_of_two import best, measure

STREAMS = 48  # streams per model
SECONDS = 2.0


def lines(rounds: int) -> Iterator[Line]:
    """Yield a line for each round, setup and metric."""
    for line in measure(STREAMS, SECONDS, rounds):
        yield {"case": "two-models/path", **line}


def rows(lines: list[Line]) -> list[Line]:
    rows = []
    for figure, case, unit in (
        ("calls", "two-models/path-calls", "calls"),
        ("us", "two-models/path", "us"),
    ):
        least = best(lines, figure)
        for way, name in (
            ("two", case),
            ("beside", f"{case}, the other idle"),
            ("again", f"{case}, another router of one"),
        ):
            ratio = round(least[way] / least["alone"], 3)
            row = {"ours": least[way], "peer": least["alone"], "unit": unit, "ratio": ratio}
            rows.append({"case": name, **row})
    return rows
