"""The comparison with other load testers; the tools themselves are in no test environment."""

from bench.versus.tools import known_server, rows_of


def test_rows() -> None:
    """A disagreement hidden by one lucky round, or by a limit that is not the figure's."""
    lines = [
        {"side": "manta", "throughput": 100.0, "ttft": 50.0},
        {"side": "other", "throughput": 94.0, "ttft": 54.0},
        {"side": "manta", "throughput": 101.0, "ttft": 51.0},
        {"side": "other", "throughput": 95.0, "ttft": 54.0},
        {"side": "manta", "throughput": 90.0, "ttft": 70.0},
        {"side": "other", "throughput": 94.0, "ttft": 54.0},
    ]
    rows = {row["case"]: row for row in rows_of(lines)}
    assert rows["other/throughput"]["ours"] == 100 and rows["other/throughput"]["peer"] == 94
    assert not rows["other/throughput"]["agrees"] and rows["other/ttft"]["agrees"]


def test_known_server_starts_and_ends() -> None:
    """A server left behind by a comparison."""
    with known_server() as url:
        assert url.startswith("http://127.0.0.1:")
