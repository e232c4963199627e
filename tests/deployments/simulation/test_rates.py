"""Files of rates, and the data sheet."""

import json
from pathlib import Path

import pytest

from deployments.simulation.rates import mean_context, read_rates
from engine.errors import ConfigError

STEPS = {"base_ms": 4.0, "sequence_ms": 0.05, "token_ms": 0.02}
SIZES = {"total_blocks": 100, "block_size": 16}


def live(*models: tuple[str, list[dict[str, object]]]) -> str:
    known = [{"model": model, "replicas": replicas} for model, replicas in models]
    return json.dumps({"routers": [{"router": "r", "models": known}]})


def test_a_live_view_is_a_file_of_rates(tmp_path: Path) -> None:
    """Milliseconds taken for seconds, another model's replicas, or those without a figure."""
    path = tmp_path / "live.json"
    twice = {**STEPS, "base_ms": 6.0}
    mine: list[dict[str, object]] = [
        {"name": "a", "pool": "engine-gpu", "steps": STEPS, "stats": SIZES},
        {"name": "b", "pool": "engine-gpu", "steps": twice, "stats": SIZES},
        {"name": "c", "pool": "engine-cpu", "steps": None, "stats": SIZES},
    ]
    path.write_text(live(("m", mine), ("other", [{**mine[0], "pool": "engine-cpu"}])))
    rates = read_rates(path, "m")
    assert set(rates) == {"gpu"} and rates["gpu"].kv_tokens == 1600
    assert rates["gpu"].cost == pytest.approx((0.005, 0.00005, 0.00002))
    path.write_text(live(("another name", mine)))  # the only one, so it is meant
    assert read_rates(path, "m") == rates
    path.write_text(live(("m", mine[2:])))
    with pytest.raises(ConfigError, match="no replica is measured"):
        read_rates(path, "m")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON; give the answer of GET /v1/live"),
        ("[]", "no pools"),
        ('{"cpu": {"base": 1, "sequence": 0}}', "cpu.token: Field required"),
        ('{"gpu": {"base": 1, "sequence": 0, "token": 1}, "cpu": 3}', "cpu: Input should be"),
        ('{"cpu": {"base": -1, "sequence": 0, "token": 1}}', "cpu.base: Input should be greater"),
        ('{"cpu": {"base": 1, "sequence": 0, "token": 1, "stpe": 1}}', "cpu.stpe: Extra"),
    ],
)
def test_bad_rates(tmp_path: Path, text: str, message: str) -> None:
    """A rate that is forgotten, and counts as infinite."""
    path = tmp_path / "rates.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_rates(path, "m")


def test_a_sequence_grows_while_it_is_decoded() -> None:
    """A context of the prompt alone, or one that long answers do not weigh in."""
    assert mean_context([(100, 20)]) == 110
    assert mean_context([(100, 20), (0, 180)]) == pytest.approx((20 * 110 + 180 * 90) / 200)
