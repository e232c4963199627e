"""Stragglers: the ranks that others wait for are named, in any layout, and logged in time."""

import logging
import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.parallel import rendezvous
from engine.parallel.rendezvous import Activations, Place
from engine.parallel.shared_memory import RankFailed
from tests.engine.process.test_process import wait_until

HANDED_ON = Activations(2, 4, 8, torch.float32)


@pytest.mark.parametrize(
    ("size", "stages", "absent"), [(3, 1, 2), (3, 3, 1), (4, 2, 1), (4, 2, 2), (4, 2, 3)]
)
def test_which_rank_is_late(size: int, stages: int, absent: int) -> None:
    """Bugs: the first rank of a stage is named for a neighbour that it waits for; the number is
    that in the stage; a rank that waits itself is named."""
    memory = os.memfd_create("ranks")
    places = [rendezvous._shared(rank, size, stages, memory, HANDED_ON) for rank in range(size)]
    os.close(memory)
    failed = []

    def step(place: Place) -> None:
        link: Any = place.link
        x = torch.ones(2, 8)
        try:
            if link is not None:
                link.begin()
                if not place.stage.first:
                    x = link.receive(2)
            place.group.all_reduce(x)
            if link is not None:
                link.send(x)
                if place.stage.first:
                    link.receive(2)
        except RankFailed as error:
            failed.append(error)

    threads = [
        threading.Thread(target=step, args=(place,), daemon=True)
        for rank, place in enumerate(places)
        if rank != absent
    ]
    for thread in threads:
        thread.start()
    assert wait_until(lambda: [rank for rank, _ in places[0].stragglers()] == [absent], 20.0)
    places[0].begin_round()
    for thread in threads:
        thread.join(20.0)
        assert not thread.is_alive()
    assert failed


def test_the_log_names_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Bugs: one that only works is named; one that is late is named each second, or never."""

    class Enough(Exception):
        pass

    seconds = iter([[(2, 7)], [(2, 8)], *[[(2, 9)]] * 8, []])

    def stragglers() -> list[tuple[int, int]]:
        for wait in seconds:
            return wait
        raise Enough

    monkeypatch.setattr(rendezvous, "time", SimpleNamespace(sleep=lambda seconds: None))
    with caplog.at_level(logging.WARNING, "manta.engine"), pytest.raises(Enough):
        rendezvous._log_stragglers(SimpleNamespace(stragglers=stragglers), 3)  # type: ignore[arg-type]
    assert [record.message for record in caplog.records] == ["rank 2 of 3 is late by 5 s"]
