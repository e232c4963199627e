"""Ablations: lengths, the device that keeps the time, what each technique gains."""

import json
from pathlib import Path

import pytest

from bench.ablations import measured, simulated
from bench.ablations.__main__ import write
from bench.ablations.ablation_row import TECHNIQUES, AblationRow, table
from bench.ablations.lengths import batches, sharegpt, widely_different

RESULTS = Path(__file__).parents[2] / "bench/results"
NOTES = RESULTS.parent / "notes/ablations.md"


def test_lengths_have_the_workloads_means() -> None:
    """Ratios would be of another workload."""
    sizes = sharegpt(4000)
    for at, mean in ((0, 114), (1, 322)):
        assert abs(sum(size[at] for size in sizes) / len(sizes) - mean) < 0.05 * mean
    long = sum(output > 64 for _, output in widely_different(1000))
    assert 250 < long < 350
    sizes = [(1, 9), (5, 2), (3, 3)]
    assert batches(sizes, 2) == [[(5, 9), (5, 9)], [(3, 3)]]
    assert batches(sizes, 2, fill_prompts=False) == [[(1, 9), (5, 9)], [(3, 3)]]


def test_time_is_that_of_bytes_and_arithmetic() -> None:
    """A step of nothing but one token that costs something else than its weights and keys."""
    device = simulated.SimulatedDevice(1e9, 1000.0, 5e8, 1e12, 1e14, overhead=0.5)
    out = simulated.serve([(10, 3)], device, 100)
    assert out.steps == 3 and out.preemptions == 0
    keys = (10 + 11 + 12) * 1000 / 1e12
    assert out.seconds == pytest.approx(3 * (0.5 + 1e9 / 1e12) + keys)


def test_split_batches_collapse_when_adapters_take_turns() -> None:
    """Adapters that never load, so that both policies run nothing at all."""
    blocks, turns = (row.ratio for row in simulated.multi_adapter_batches(0.25))
    assert blocks < 4 < 15 < turns


@pytest.mark.slow
def test_what_each_feature_gives() -> None:
    """A policy that lost what it is for: peak against sum, tokens against slots, continuous
    against static; and nobody is preempted by a careful policy."""
    rows = {row.case: row for row in simulated.admission(0.3)}
    ratio = {case.split(" / ")[1].split(" ")[0]: row.ratio for case, row in rows.items()}
    assert ratio["sum"] > 1.2 and ratio["reserved"] > 1.2
    assert all(row.note.split("preempted ")[1].startswith("0") for row in rows.values())
    slots, *_ = simulated.paged_kv_and_admission(0.1)
    assert slots.ratio > 1.5
    assert all(row.ratio > 1.5 for row in simulated.continuous_batching(0.1))
    assert all(row.ratio > 1.8 for row in simulated.ragged_prefill(0.2))


def test_table() -> None:
    """A row without a claim, or one that hides how it was found."""
    rows = [
        AblationRow.of("admission a / b", 30.0, 20.0, "req/s", claimed=None, how="simulated"),
        AblationRow.of("fusion c / d", 1.0, 3.0, "tok/s", claimed=1.5, how="measured"),
    ]
    assert table(rows).splitlines()[2:] == [
        "| admission a / b (simulated) | 30 | 20 req/s | 1.5 |  |",
        "| fusion c / d (measured) | 1 | 3 tok/s | 0.333 | 1.5 |",
    ]
    assert simulated.WORKLOADS.keys() | measured.WORKLOADS.keys() == TECHNIQUES.keys()


def test_the_committed_file_is_read_by_technique() -> None:
    """A renamed technique orphans the committed figures, which the docs quote."""
    names = ("ablations-2026-11-21.json", "ablations-regions-2026-11-28.json")
    files = [json.loads((RESULTS / name).read_text())["rows"] for name in names]
    first, later = ([AblationRow(**line) for line in lines] for lines in files)
    assert {row.technique for row in first + later} == TECHNIQUES.keys()
    page = NOTES.read_text().replace(",", "")
    assert all(line.replace(",", "") in page for line in table(first).splitlines()[2:])


def test_some_workloads_can_be_run_again(tmp_path: Path) -> None:
    """A second command that throws away what the first one found, or has both twice."""
    old = [
        AblationRow.of(
            "continuous-batching a / b", 30.0, 20.0, "req/s", claimed=None, how="simulated"
        ),
        AblationRow.of("continuous-batching a / b", 1.0, 3.0, "tok/s", claimed=1.5, how="measured"),
        AblationRow.of(
            "paged-kv-under-load c / d", 1.0, 3.0, "tok/s", claimed=1.5, how="simulated"
        ),
    ]
    write(tmp_path, old, {})
    new = AblationRow.of(
        "continuous-batching a / b", 2.0, 1.0, "tok/s", claimed=1.5, how="measured"
    )
    assert write(tmp_path, [new], {}) == [old[2], old[0], new]
    (path,) = tmp_path.glob("ablations-*.json")
    assert len(json.loads(path.read_text())["rows"]) == 3
