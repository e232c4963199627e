"""The choice of a replica: a pure function, so its rules are checked one by one."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.routing import Snapshot, StepModel, Work, route, score

WORK = Work(prompt_tokens=100, max_tokens=64)


def snapshot(replica: str = "a", **more) -> Snapshot:
    values = {
        "waiting_tokens": 0,
        "sequences": 0,
        "booked_tokens": 0,
        "booked_sequences": 0,
        "free_tokens": 10_000,
        "prompt_rate": 1000.0,
        "base_seconds": 0.002,
        "sequence_seconds": 0.01,
    }
    return Snapshot(replica=replica, **{**values, **more})


def choose(*snapshots: Snapshot, work: Work = WORK, avoid: str = "") -> Counter:
    return Counter(route(work, snapshots, Random(n), avoid=avoid) for n in range(200))


def test_equal_replicas_are_chosen_by_lot():
    """Every router sending to the first name in the list."""
    counts = choose(snapshot("a"), snapshot("b"))
    assert min(counts["a"], counts["b"]) > 60


def test_the_shorter_queue_wins_and_so_does_the_emptier_batch():
    """Round robin in disguise."""
    assert choose(snapshot("a", waiting_tokens=500), snapshot("b")) == {"b": 200}
    assert choose(snapshot("a", sequences=8), snapshot("b", sequences=2)) == {"b": 200}


def test_a_slow_replica_gets_work_only_when_the_fast_one_is_behind():
    """A CPU replica that is given half of the traffic because it is idle."""
    slow = snapshot("cpu", prompt_rate=300, sequence_seconds=0.05)
    assert choose(snapshot("gpu", prompt_rate=30_000), slow) == {"gpu": 200}
    behind = snapshot("gpu", prompt_rate=30_000, waiting_tokens=200_000)
    assert choose(behind, slow) == {"cpu": 200}


def test_what_was_just_sent_counts():
    """A burst between two frames that all goes to the same replica."""
    booked = snapshot("a", booked_tokens=400, booked_sequences=4)
    assert choose(booked, snapshot("b")) == {"b": 200}


def test_what_does_not_fit_waits_elsewhere():
    """A request sent to a replica whose KV is full, where it only throws another one out."""
    full = snapshot("a", free_tokens=50)
    assert choose(full, snapshot("b", waiting_tokens=3000)) == {"b": 200}
    assert choose(full) == {"a": 200}


@pytest.mark.parametrize(
    ("base", "each"), [(0.01, 0.0), (0.0, 0.01), (0.02, 0.003)], ids=["gpu", "cpu", "between"]
)
def test_a_step_model_finds_what_a_sequence_costs(base, each):
    """A model through the origin, by which the fuller of two GPUs always looks cheaper."""
    model, dice = StepModel(), Random(1)
    assert model.fit() == (0.0, 0.0)
    model.observe(4, base + 4 * each)
    assert sum(model.fit()) > 0
    for _ in range(300):
        n = dice.randrange(1, 9)
        model.observe(n, (base + n * each) * dice.uniform(0.95, 1.05))
    found_base, found_each = model.fit()
    assert abs(found_base + 4 * found_each - (base + 4 * each)) < 0.1 * (base + 4 * each)
    assert abs(found_each - each) < 0.001


def test_unavailable_and_avoided_replicas():
    """New requests at a draining replica; a retry at the replica that has just failed it."""
    gone = snapshot("a", available=False)
    assert choose(gone) == {None: 200}
    assert choose(gone, snapshot("b", waiting_tokens=9000)) == {"b": 200}
    assert choose(snapshot("a"), snapshot("b", waiting_tokens=9000), avoid="a") == {"b": 200}
    assert choose(snapshot("a"), avoid="a") == {"a": 200}


SNAPSHOTS = st.lists(
    st.builds(
        snapshot,
        st.sampled_from("abcdef"),
        waiting_tokens=st.integers(0, 10**6),
        sequences=st.integers(0, 2000),
        booked_tokens=st.integers(0, 10**6),
        booked_sequences=st.integers(0, 2000),
        free_tokens=st.integers(0, 10**7),
        prompt_rate=st.floats(1, 1e6),
        base_seconds=st.floats(0, 10),
        sequence_seconds=st.floats(0, 10),
        available=st.booleans(),
    ),
    unique_by=lambda one: one.replica,
)


@given(SNAPSHOTS, st.integers(1, 10**6), st.integers(0, 10**6), st.integers(1, 8))
def test_the_choice_is_available_and_about_the_best(snapshots, prompt, output, n):
    """A choice outside the list, a crash on extreme figures, or one far worse than another."""
    work = Work(prompt, output, n)
    chosen = route(work, snapshots, Random(0))
    available = {one.replica: score(work, one) for one in snapshots if one.available}
    if not available:
        assert chosen is None
        return
    full, seconds = available[chosen]
    best_full, best = min(available.values())
    assert full == best_full and seconds <= best * 1.06
