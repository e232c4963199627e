"""Schedules: the right statistics, and the same bytes for the same seed."""

import json
import math
import statistics
from itertools import islice, pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.errors import ScenarioError
from loadtest.measure.records import RequestRecord
from loadtest.scenario import arrivals


def times(segments, cv, *, seed=1, duration=None, requests=None):
    rng = arrivals.rng_of(seed, "test")
    return arrivals.schedule(segments, cv, rng, duration=duration, requests=requests)


def gaps_of(found):
    return [b - a for a, b in pairwise(found)]


def test_constant_is_even_from_zero() -> None:
    """An off-by-one at the start makes 49 or 51 requests of 5/s over 10 s."""
    arrival_times = times(arrivals.constant(5), 0, duration=10)
    assert arrival_times == [pytest.approx(i / 5) for i in range(50)]


@pytest.mark.parametrize("cv", [0.3, 1.0, 2.5])
def test_rate_and_burstiness(cv: float) -> None:
    """Shape and scale of the gamma swapped: the mean is right and the bursts are not."""
    arrival_times = times(arrivals.constant(50), cv, requests=40_000)
    gaps = gaps_of(arrival_times)
    assert statistics.fmean(gaps) == pytest.approx(1 / 50, rel=0.06)
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(cv, rel=0.06)
    assert all(gap >= 0 for gap in gaps)


def test_poisson_counts() -> None:
    """A process with the right mean and the wrong variance, or with a memory."""
    arrival_times = times(arrivals.constant(20), 1, duration=5_000)
    counts = [0] * 5_000
    for t in arrival_times:
        counts[int(t)] += 1
    assert statistics.fmean(counts) == pytest.approx(20, rel=0.02)
    assert statistics.variance(counts) == pytest.approx(20, rel=0.1)
    short = [gap for gap in gaps_of(arrival_times) if gap > 0.05]
    assert statistics.fmean(short) - 0.05 == pytest.approx(0.05, rel=0.05)


def test_bursts_come_only_when_on() -> None:
    """Requests in the pause, or bursts that drift against the clock."""
    arrival_times = times(arrivals.bursts(100, 2, 8), 1, duration=1_000)
    assert all(t % 10 < 2 for t in arrival_times)
    assert len(arrival_times) == pytest.approx(100 * 2 * 100, rel=0.03)
    base = times(arrivals.bursts(100, 2, 8, 5), 1, duration=1_000)
    assert sum(t % 10 >= 2 for t in base) == pytest.approx(5 * 8 * 100, rel=0.06)


def test_ramp_rises_linearly() -> None:
    """A ramp in steps, or with its area wrong."""
    arrival_times = times(arrivals.ramp(0, 100, 100), 0, duration=100)
    assert len(arrival_times) == pytest.approx(5_000, abs=2)
    for end in (25, 50, 75):
        assert sum(t < end for t in arrival_times) == pytest.approx(end * end / 2, abs=2)
    down = times(arrivals.ramp(100, 10, 100), 1, duration=200)
    assert sum(t < 100 for t in down) == pytest.approx(5_500, rel=0.05)
    assert sum(t >= 100 for t in down) == pytest.approx(1_000, rel=0.12)


def test_steps_end() -> None:
    """The last step that goes on for ever."""
    arrival_times = times(arrivals.steps([10, 40, 20], 10), 0)
    assert [sum(a <= t < a + 10 for t in arrival_times) for a in (0, 10, 20)] == [100, 400, 200]
    assert max(arrival_times) < 30


@given(
    st.lists(
        st.tuples(st.floats(0.1, 50), st.floats(0, 100), st.floats(0, 100)), min_size=1, max_size=6
    ),
    st.sampled_from([0, 0.5, 1, 3]),
    st.integers(0, 2**32),
)
def test_any_shape_ascends_and_repeats(segments, cv, seed) -> None:
    """A segment without requests, or a falling one, sends time backwards or to NaN."""
    first = list(islice(arrivals.through(segments, arrivals.unit_gaps(cv, _rng(seed))), 500))
    again = list(islice(arrivals.through(segments, arrivals.unit_gaps(cv, _rng(seed))), 500))
    assert first == again
    end = sum(part[0] for part in segments)
    assert all(math.isfinite(t) and 0 <= t <= end + 1e-6 for t in first)
    assert first == sorted(first)


def _rng(seed):
    return arrivals.rng_of(seed, "any")


def test_seed_is_the_schedule() -> None:
    """A schedule that depends on the process, the platform or the hash seed."""
    arrival_times = times(arrivals.constant(10), 1, seed=7, requests=3)
    assert arrival_times == times(arrivals.constant(10), 1, seed=7, requests=3)
    assert arrival_times != times(arrivals.constant(10), 1, seed=8, requests=3)
    assert arrival_times == [0.048539, 0.219217, 0.554849]  # written down once


def test_mooncake_trace(tmp_path: Path) -> None:
    """Milliseconds taken for seconds, or shared blocks forgotten."""
    rows = [
        {"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]},
        {"timestamp": 1000, "input_length": 700, "output_length": 6, "hash_ids": [1, 3]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    arrival_times = arrivals.read_trace(path, speed=2)
    assert arrival_times == [(0.0, 700, 6, (1, 3)), (1.0, 600, 5, (1, 2))]


def test_azure_trace(tmp_path: Path) -> None:
    """Azure's seven-digit fractions are no ISO time; its CSV has the same columns."""
    stamps = ["2023-11-16 18:17:03.9799600", "2023-11-16 18:17:05.2299600"]
    path = tmp_path / "azure.jsonl"
    path.write_text(
        "\n".join(
            json.dumps({"TIMESTAMP": t, "ContextTokens": 10, "GeneratedTokens": 3}) for t in stamps
        )
    )
    assert [row.t for row in arrivals.read_trace(path)] == [0.0, pytest.approx(1.25)]
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(f"{t},10,3" for t in stamps)
    )
    assert [row[:3] for row in arrivals.read_trace(path)] == [(0, 10, 3), (1.25, 10, 3)]
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,10,3\n"
        "2024-05-10 00:00:01+00:00,10,3\n"
    )
    assert arrivals.read_trace(path)[1].t == pytest.approx(0.99007)


def test_trace_of_a_load_test(tmp_path: Path) -> None:
    """A recorded load that cannot be replayed, or one with its warm-up or cut answers."""
    records = [
        RequestRecord(
            index=number,
            phase="p",
            intended_s=10.0 + number,
            end_s=20.0,
            prompt_tokens=30 + number,
            output_tokens=5,
            output_tokens_expected=8 if number == 2 else None,
            warmup=number == 0,
        )
        for number in range(3)
    ]
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
    assert arrivals.read_trace(path) == [(0.0, 31, 5, ()), (1.0, 32, 8, ())]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "empty trace"),
        ("\n\n", "empty trace"),
        ("hello\n", ":1: neither a row"),
        ('{"timestamp": 0, "input_length": 1}', ":1: no output_length"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1}', ":1: input_length is 0"),
        ('{"timestamp": 0, "input_length": 1, "output_length": "x"}', ":1: output_length is 'x'"),
        ('{"timestamp": "x", "input_length": 1, "output_length": 1}', ":1: timestamp is 'x'"),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 1}', ":1: timestamp is nan"),
        (
            '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": "7"}',
            ":1: hash_ids must be a list",
        ),
        ('{"TIMESTAMP": "now", "ContextTokens": 1, "GeneratedTokens": 1}', ":1: TIMESTAMP is"),
        (
            '{"intended_s": 0, "prompt_tokens": 9, "output_tokens": 1}\n'
            '{"intended_s": 1, "output_tokens": 0}',
            ":2: no prompt_tokens",
        ),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1}\n{', ":2: not a JSON object"),
        ("a,b\n1,2", ":2: no TIMESTAMP"),
    ],
)
def test_bad_traces(tmp_path: Path, text: str, told: str) -> None:
    """A trace with a broken row is replayed without it, or ends in a traceback."""
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ScenarioError, match=told):
        arrivals.read_trace(path)
