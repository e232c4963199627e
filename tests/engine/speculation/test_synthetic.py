"""Synthetic acceptance accepts as often as it says."""

import pytest

from engine.speculation.synthetic import SyntheticAcceptance


def test_rates_are_those_of_a_draft_after_accepted_ones() -> None:
    """Bug: a benchmark's acceptance is not the one that it states, or depends on the batch."""
    acceptance, positions = SyntheticAcceptance((0.75, 0.55, 0.4)), 20_000
    counts = acceptance.accepted((7, 0, position) for position in range(positions))
    shares = [sum(count >= least for count in counts) / positions for least in (1, 2, 3)]
    assert shares == pytest.approx([0.75, 0.4125, 0.165], abs=0.01)
    fewer = SyntheticAcceptance((0.75,)).accepted((7, 0, position) for position in range(99))
    assert fewer == [min(count, 1) for count in counts[:99]]
