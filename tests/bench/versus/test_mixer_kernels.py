"""Kernels beside others': rows without a GPU."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from bench.versus import mixer_kernels


def test_a_peer_that_fails_loses_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of the slower peer, a peer left out without a word, a result that nobody compares."""

    def ours() -> str:
        return "ours"

    def close() -> str:
        return "close"

    def far() -> str:
        return "far"

    def missing() -> Any:
        raise ImportError("no such package")

    def read(side: str, found: str) -> torch.Tensor:
        return torch.ones(4) * {"ours": 1.0, "close": 1.01, "far": 3.0}[found]

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    times = {ours: 8.0, close: 6.0, far: 9.0}
    monkeypatch.setattr(mixer_kernels, "time_us", lambda calls, repeats: times[calls[0]])
    peers = {"far": lambda: [far], "absent": missing, "close": lambda: [close]}
    lines = list(mixer_kernels.measured("a", mixer_kernels.Case([ours], peers, read)))
    assert lines[0] == {"case": "a", "side": "absent", "error": "ImportError: no such package"}
    assert [line["side"] for line in lines[1:-1]] == ["ours", "far", "close"]
    assert lines[-1]["against"] == "close" and lines[-1]["ratio"] == 0.75
    assert lines[-1]["differs"] == pytest.approx(0.01)
    some = mixer_kernels.Case([ours], peers, read, frozenset({"close"}))
    assert list(mixer_kernels.measured("a", some))[-1]["against"] == "far", "it does a part alone"
    alone = list(mixer_kernels.measured("b", mixer_kernels.Case([ours], {"x": missing}, read)))
    assert not any("ratio" in line for line in alone)
