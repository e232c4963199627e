"""The times between tokens while adapters load, against those while none does."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.lora_loads import gaps_beside, measure
from tests.deployments.fake_adapters import make_folder


class Stream:
    """A stream of 20 tokens, one each millisecond."""

    released = 0

    def __iter__(self) -> Iterator[Any]:
        for _ in range(20):
            time.sleep(0.001)
            yield SimpleNamespace(outputs=[SimpleNamespace(error="")])

    def release(self) -> None:
        Stream.released += 1


def test_streams_go_on_until_all_is_loaded() -> None:
    """Bug: the streams end before the loads do, or the loads fail after the first, and the times
    of what was left alone are told as those beside 32 loads."""
    started: list[Stream] = []
    several = threading.Event()

    def start_streams() -> list[Any]:
        started.extend(new := [Stream(), Stream()])
        if len(started) == 6:
            several.set()
        return new

    def load() -> None:
        assert several.wait(60)

    assert len(gaps_beside(start_streams, load)) >= 3  # of the first streams alone
    assert len(started) >= 6 and Stream.released == len(started)

    def fail() -> None:
        raise ValueError("no such adapter")

    with pytest.raises(ValueError, match="no such adapter"):
        gaps_beside(start_streams, fail)


def test_both_kinds_of_turns_take_as_long(tmp_path: Path) -> None:
    """Bug: quiet turns are shorter than those with loads, so that streams, and with them steps, are
    shorter too, and loads look worse than they are."""
    for number in range(4):
        make_folder(tmp_path / f"a{number}", r=8 + number)
    figures = measure(
        "fake:step_seconds=0.002,max_model_len=100000",
        {"max_loras": 2},
        [[1, 2, 3]] * 2,
        10_000,
        tmp_path,
        count=4,
        interval=0.1,
    )
    assert figures["loads"] > 4 and min(figures["gaps"].values()) > 20
    # Not the numbers of gaps: a neighbour's load spreads these.
    quiet, loading = figures["seconds"]["quiet"], figures["seconds"]["loading"]
    assert 0.8 < quiet / loading < 1.25 and loading >= 0.4
