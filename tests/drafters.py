"""Fakes for tests of draft verification: drafters that know the answer, which is the request's
`prediction`, and a controller of draft lengths that follows a list."""

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import Any

import pytest
import torch

from engine.runner.model_runner import ModelRunner
from engine.runner.warm_up import capture_drafts
from engine.scheduling.core import EngineCore
from engine.scheduling.drafts.speculation import Speculation
from engine.scheduling.drafts.verifications import Proposals
from engine.speculation.computed import ComputedDrafter
from engine.speculation.lengths import DraftLengths, DraftRecord

KINDS = ("right", "wrong", "mixed")


class ToldDrafts:
    """The drafts of one request, made from its known answer.

    kind: "right", "wrong" from the first token, or "mixed": right for a number of tokens that
        depends on the position, then wrong.
    trusted: whether to assert that the text so far is the beginning of the answer.
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
    """A controller of draft lengths that takes them from a list, over and over."""

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
    """Return a Speculation whose drafts the device computes, with draft lengths from a list."""
    return Speculation(ComputedDrafter(), ListedLengths(lengths))


def told(kind: str, lengths: Sequence[int] = (3,)) -> Speculation:
    return Speculation(ToldDrafter(kind), ListedLengths(lengths))


def use_chains(core: EngineCore) -> list[int]:
    """Let a core's drafter compute drafts by chains of CUDA graphs; return a list to which each
    chain's number of proposals is appended.

    A graph is simulated by the function that it was captured from."""
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


Watched = list[tuple[list[int], list[int]]]  # (text, drafts that continue it)


def watch_drafts(monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Return a list to which the drafts of all requests are appended, with the texts they
    continue."""
    seen: Watched = []
    receive = Proposals.receive

    def watched(self: Proposals, read: Callable[[], Sequence[Sequence[int]]]) -> None:
        for request, count, drafts in zip(self.requests, self.counts, read(), strict=False):
            seen.append((request.token_ids.copy(), [int(token) for token in drafts[:count]]))
        receive(self, read)

    monkeypatch.setattr(Proposals, "receive", watched)
    return seen


def count_equal(
    seen: Watched, drafts_after: Callable[[list[int], int], list[tuple[int, float]]]
) -> int:
    """Assert that each draft equals the reference's up to a near-tie; return the number of equal
    tokens.

    drafts_after: (text, count) -> the reference's drafts, each with the lead of its logit over the
        second largest."""
    compared = 0
    for text, drafts in seen:
        for draft, (right, lead) in zip(drafts, drafts_after(text, len(drafts)), strict=True):
            if lead < 1e-3:
                break
            assert draft == right, text
            compared += 1
    return compared
