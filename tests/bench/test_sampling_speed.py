"""bench.sampling_speed, on the CPU."""

import json
from pathlib import Path

import pytest

from bench import sampling_speed
from tests.bench.test_memory_load import TINY


@pytest.mark.slow
def test_shares_of_greedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind of sampling that the table leaves out, or a share of another number of requests."""
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "max_position_embeddings": 256}))
    monkeypatch.setattr(sampling_speed, "PROMPT", 4)
    monkeypatch.setattr(sampling_speed, "OUTPUT", 4)
    fields = {"dtype": "float32", "device": "cpu", "max_model_len": 256, "num_blocks": 64}
    monkeypatch.setattr(sampling_speed, "CONFIG", sampling_speed.CONFIG | fields)
    measured = sampling_speed.measure(str(tmp_path), [1, 3], {})
    rows = sampling_speed.rows_of("tiny", measured)
    cases = {row["case"] for row in rows}
    assert cases == {f"tiny/{kind}/{n}" for kind in sampling_speed.KINDS for n in (1, 3)}
    greedy = {n: measured[f"greedy/{n}"] for n in (1, 3)}
    for row in rows:
        count = int(row["case"].rpartition("/")[2])
        assert row["ours"] > 0 and row["ratio"] == round(row["ours"] / greedy[count], 3)
