"""Throughput of several replicas: what a run that was cut off leaves, and what becomes of it."""

from loadtest.scale_out import missing, rows_of, whole

LINES = [
    {"label": "start", "replicas_at_start": 1},
    {"label": "warm", "failed": 0},
    {"label": "1 replicas", "replicas": 1, "out_tok_s": 100.0},
    {"label": "grow", "to": 2, "first_answers_s": [9.0], "failed": []},
    {"label": "warm", "failed": 0},
    {"label": "2 replicas", "replicas": 2, "out_tok_s": 190.0},
    {"label": "grow", "to": 4, "first_answers_s": [8.0, 11.0], "failed": []},
]


def test_a_run_that_was_cut_off_goes_on() -> None:
    """A growth that counts although nothing was measured after it; a count that runs twice."""
    kept = whole(LINES)
    assert [line["label"] for line in kept] == [line["label"] for line in LINES[:-1]]
    assert missing([1, 2, 4], kept) == [4] and missing([1, 2], kept) == []


def test_rows_are_against_so_many_times_one() -> None:
    """A throughput against itself; the fastest of the new replicas instead of the slowest."""
    rows = {row["case"]: (row["ours"], row["peer"], row["ratio"]) for row in rows_of("m", LINES)}
    assert rows == {
        "m/2": (190.0, 200.0, 0.95),
        "m/2/first_answer": (9.0, 15.0, 0.6),
        "m/4/first_answer": (11.0, 15.0, 0.733),
    }
