"""Batch work beside interactive requests in virtual time, with the real scheduler and router."""

from dataclasses import replace

from bench.simulate import beside


def test_rows_of_a_dataset_beside_interactive_requests() -> None:
    """Rows had the engine's slots, and their prompts filled its steps: of interactive requests at
    nine tenths of the load 54 of 480 were refused, and at three tenths the 99th percentile of first
    tokens was 2.8 times that without rows."""
    case = replace(beside.CASES["default"], seconds=100.0)
    rows = 3 * case.speed.max_num_seqs
    alone = beside.run(case, rows=rows)
    rate = 1.5  # about three tenths of what the engine answers
    without, both = beside.run(case, rate), beside.run(case, rate, rows=rows)
    used = both.row_tokens / alone.row_tokens / 0.7
    print(f"p99 {both.p99:.3f} s, without {without.p99:.3f} s, idle capacity used {used:.2f}")
    assert len(both.firsts) > 100 and both.refused == 0
    assert both.p99 <= 1.2 * without.p99
    assert used >= 0.65
