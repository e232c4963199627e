"""The comparison of servers can be cut off and taken up again, and tells what from what."""

from loadtest.versus_http import STREAMS, rows_of, whole_sides


def lines_of(side: str, rate: float, streams: tuple[int, ...] = tuple(STREAMS)) -> list[dict]:
    times = {"ttft_ms_p50": 10.0 * rate, "itl_ms_p99": rate}
    return [{"label": side, "ready_s": 1.0}] + [
        {"label": side, "concurrency": n, "out_tok_s": rate * n, **times} for n in streams
    ]


def test_a_side_that_was_cut_off_runs_again() -> None:
    """Half a side beside a whole one would be a run under different conditions."""
    lines = lines_of("manta", 2.0) + lines_of("vllm", 1.0, (1, 64))
    assert whole_sides(lines) == lines_of("manta", 2.0)


def test_rows_compare_the_same_load() -> None:
    """A ratio across loads, or upside down, would claim what was not measured."""
    lines = lines_of("offline", 2.5) + lines_of("manta", 2.0) + lines_of("vllm", 1.6)
    rows = {row["case"]: row for row in rows_of("m", lines, ["vllm"])}
    assert rows["m/64/engine"]["ratio"] == 0.8
    assert rows["m/256/vllm"]["ratio"] == 1.25
    assert (rows["m/256/vllm"]["ours"], rows["m/256/vllm"]["peer"]) == (512.0, 409.6)
    assert rows["m/1/vllm/ttft_ms_p50"]["ours"] == 20.0
