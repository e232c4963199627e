"""Drafters that are told the answer, and a controller that follows a list: for tests of
verification. A request's `prediction` is the answer."""

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import Any

import pytest
import torch

from engine.runner.model_runner import ModelRunner
from engine.runner.warm_up import capture_drafts
from engine.scheduling.core import EngineCore
from engine.scheduling.drafts.speculation import Speculation
from engine.scheduling.request import Request
from engine.speculation.computed import ComputedDrafter
from engine.speculation.lengths import DraftLengths, DraftRecord

KINDS = ("right", "wrong", "mixed")


class ToldDrafts:
    """The drafts of one request, made from its known answer.

    kind: whether drafts are right, wrong at once, or right for a number of tokens that depends on
        the position, then wrong.
    trusted: whether drafts that repeat the answer may be trusted as its text.
    """

    trusted = True

    def __init__(self, kind: str, text: Sequence[int], num_prompt: int, answer: Sequence[int]):
        self.kind = kind
        self.text = list(text)
        self.num_prompt = num_prompt
        self.answer = answer
        self.ended = False

    @property
    def num_tokens(self) -> int:
        return len(self.text)

    def extend(self, tokens: Sequence[int]) -> None:
        self.text += tokens

    def propose(self, most: int) -> list[int]:
        assert not self.ended and most > 0
        done = len(self.text) - self.num_prompt
        assert not self.trusted or self.text[self.num_prompt :] == list(self.answer[:done])
        right = {"right": most, "wrong": 0, "mixed": done * done % 5, "forced": 0}[self.kind]
        drafts = self.answer[done : done + most]
        return [token if i < right else (token + 1) % 50 for i, token in enumerate(drafts)]

    def end(self) -> None:
        assert not self.ended
        self.ended = True


class ToldDrafter:
    """A drafter whose drafts are made from known answers (`ToldDrafts`).

    answers: prompt -> its answer, for requests without a prediction.
    """

    def __init__(self, kind: str, answers: Mapping[tuple[int, ...], list[int]] | None = None):
        self.kind = kind
        self.answers = answers or {}
        self.trusted = True
        self.begun: list[ToldDrafts] = []

    def begin(
        self, token_ids: Sequence[int], num_prompt: int, prediction: Sequence[int], key: bytes
    ) -> ToldDrafts:
        answer = prediction or self.answers.get(tuple(token_ids[:num_prompt]), ())
        self.begun.append(ToldDrafts(self.kind, token_ids, num_prompt, answer))
        self.begun[-1].trusted = self.trusted
        return self.begun[-1]


class ListedLengths(DraftLengths):
    """A controller that takes the lengths of drafts from a list, which it repeats."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__()
        self._next = cycle(lengths)
        self._now = 0
        self.drafted = self.accepted = 0
        self.steps: list[tuple[int, int]] = []

    def begin_step(self, entries: int) -> int:
        self._now = next(self._next)
        return self._now

    def limit(self, record: DraftRecord) -> int:
        return self._now

    def worth(self, records: Sequence[DraftRecord], lengths: Sequence[int]) -> list[int]:
        return list(lengths)

    def observe_drafts(
        self, records: Sequence[DraftRecord], drafted: Sequence[int], accepted: Sequence[int]
    ) -> None:
        assert all(0 <= right <= count for right, count in zip(accepted, drafted, strict=True))
        self.drafted += sum(drafted)
        self.accepted += sum(accepted)

    def observe_step(self, entries: int, drafts: int, seconds: float) -> None:
        self.steps.append((entries, drafts))


def computed(lengths: Sequence[int] = (3,)) -> Speculation:
    """Return the speculation of drafts that the device computes, with lengths from a list."""
    return Speculation(ComputedDrafter(), ListedLengths(lengths))


def told(kind: str, lengths: Sequence[int] = (3,)) -> Speculation:
    return Speculation(ToldDrafter(kind), ListedLengths(lengths))


def use_chains(core: EngineCore) -> list[int]:
    """Let a core compute drafts as chains of graphs; return a list that gets each number of
    proposals.

    A graph is simulated by the function that it was captured from.
    """
    runner = core._runner
    assert isinstance(runner, ModelRunner)
    drafting = runner.drafting
    assert drafting is not None
    capture_drafts(runner, drafting, None, lambda launch: launch)
    graphs, counts = drafting.graphs, list[int]()
    assert graphs is not None
    graphs.launch_all()
    propose = graphs.propose

    def counted(table: Any, *others: Any) -> torch.Tensor | None:
        drafts = propose(table, *others)
        if drafts is not None:
            counts.append(table.shape[1])
        return drafts

    graphs.propose = counted  # type: ignore[method-assign]
    return counts


Watched = list[tuple[list[int], list[int]]]  # texts with the drafts that came after each


def watch_drafts(monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Return the list that the drafts of all requests are added to, with the texts before them."""
    seen: Watched = []
    receive = Speculation.receive

    def watched(
        self: Speculation,
        requests: Sequence[Request],
        counts: Sequence[int],
        read: Callable[[], Sequence[Sequence[int]]],
    ) -> None:
        for request, count, drafts in zip(requests, counts, read(), strict=True):
            seen.append((request.token_ids.copy(), [int(token) for token in drafts[:count]]))
        receive(self, requests, counts, read)

    monkeypatch.setattr(Speculation, "receive", watched)
    return seen


def count_equal(
    seen: Watched, drafts_after: Callable[[list[int], int], list[tuple[int, float]]]
) -> int:
    """Assert that drafts are the reference's, up to a near-tie in each; return how many were.

    drafts_after: (text, count) -> the reference's drafts, and by how much each logit leads.
    """
    compared = 0
    for text, drafts in seen:
        for draft, (right, lead) in zip(drafts, drafts_after(text, len(drafts)), strict=True):
            if lead < 1e-3:
                break
            assert draft == right, text
            compared += 1
    return compared
