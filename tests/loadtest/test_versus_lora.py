"""The comparison with adapters can be cut off and taken up again, and says why a side failed."""

import sys
from typing import Any

import pytest

from loadtest.versus_lora import SideFailed, explain, rows_of, run_side, whole_runs


def run_of(side: str, count: int, base: float, kept: float, start: int = 0) -> list[dict[str, Any]]:
    key = {"side": side, "adapters": count, "start": start}
    runs = [("none", base), ("adapters", base * kept), ("none", base - 1), ("adapters", 1.0)]
    return [{**key, "config": {}}, *({**key, "run": r, "out_tok_s": v} for r, v in runs)]


def test_what_was_cut_off_runs_again() -> None:
    """Half a run beside whole ones would be a run under different conditions."""
    whole = run_of("manta", 16, 100.0, 0.9) + run_of("vllm", 16, 90.0, 0.5)
    cut = run_of("manta", 64, 100.0, 0.8, start=1)[:-1]
    loads = {"side": "loads", "adapters": 32, "start": 0, "quiet_p99_ms": 2.0}
    assert whole_runs([*whole, *cut, loads]) == whole


def test_rows_are_shares_of_the_same_side() -> None:
    """A share of the other's base, or of another number of adapters, would claim what was not
    measured."""
    lines = run_of("manta", 16, 100.0, 0.9) + run_of("vllm", 16, 90.0, 0.5)
    lines += run_of("manta", 64, 200.0, 0.75)
    for start, loading in enumerate((2.5, 2.1)):
        figures = {"quiet_p99_ms": 2.0, "loading_p99_ms": loading}
        lines.append({"side": "loads", "adapters": 32, "start": start, **figures})
    first, second, third = rows_of("m", lines)
    assert (first["case"], first["kept"], first["peer_kept"]) == ("m/16", 0.9, 0.5)
    assert first["ratio"] == 2.0
    assert (second["case"], second["kept"]) == ("m/64", 0.75) and "ratio" not in second
    assert (third["case"], third["ratio"]) == ("m/loads", 1.05)


def test_a_side_that_fails_says_why() -> None:
    """The words "see root cause above" alone, with the cause in a log that nobody keeps."""
    program = (
        "import sys\n"
        "print('{\"side\": 1}')\n"
        "print('(Core pid=1) ERROR [core.py:9] RuntimeError: no compiler', file=sys.stderr)\n"
        "print('x\\n' * 60, file=sys.stderr)\n"
        "raise ValueError('initialisation failed, see above')\n"
    )
    kept: list[Any] = []
    with pytest.raises(SideFailed) as caught:
        run_side([sys.executable, "-c", program], kept.append)
    text = str(caught.value)
    assert kept == [{"side": 1}] and "exit code 1" in text
    assert "cause: (Core pid=1) ERROR [core.py:9] RuntimeError: no compiler" in text
    assert text.endswith("ValueError: initialisation failed, see above\n")
    assert len(text.splitlines()) == 42
    assert explain([]).startswith("cause: no exception")
