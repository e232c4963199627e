"""Look-up: right drafts, none where nothing repeats, no tenant's words for another, bounds."""

import random
import time
from pathlib import Path
from typing import Any

import pytest

from engine import factory
from engine.config.engine_config import EngineConfig
from engine.speculation import answers, lookup
from engine.speculation.answers import Answers
from engine.speculation.lookup import Lookup, LookupDrafts, LookupOptions
from engine.speculation.suffixes import Suffixes
from tests.engine.models.checkpoints import save_checkpoint
from tests.fakes import make_request, run

KEY = b"key"


def begin(
    text: list[int], prediction: list[int] | None = None, source: Lookup | None = None
) -> LookupDrafts:
    source = source or Lookup(LookupOptions())
    return source.begin(text, len(text), prediction or [], KEY)


def steps_of(drafts: LookupDrafts, answer: list[int], most: int = 7) -> tuple[int, int]:
    """Return the steps and draft tokens that an answer takes."""
    steps = rows = at = 0
    while at < len(answer):
        draft = drafts.propose(min(most, len(answer) - at - 1))
        right = 0
        while right < len(draft) and draft[right] == answer[at + right]:
            right += 1
        drafts.extend(answer[at : at + right + 1])
        at += right + 1
        steps += 1
        rows += len(draft)
    return steps, rows


def test_copies_of_the_prompt() -> None:
    """A text that repeats its prompt took a step for each token."""
    source = list(range(100, 400))
    steps, _ = steps_of(begin([*source, 1, 2]), source)
    assert steps < len(source) / 6


def test_edits_go_on_after_a_change() -> None:
    """A changed token in the middle ended the drafts, or each change cost several steps."""
    rng = random.Random(3)
    source = [rng.randrange(1000, 40_000) for _ in range(400)]
    answer = list(source)
    for place in range(20, 400, 40):
        answer[place] = 7
    steps, _ = steps_of(begin([*source, 1, 2]), answer)
    assert steps < len(source) / 3.5


def test_texts_without_repeats_have_no_drafts() -> None:
    """Rows for nothing: each draft of a text that never repeats is wrong."""
    drafts = begin(list(range(50)))
    assert steps_of(drafts, list(range(1000, 2000))) == (1000, 0)


def test_drafts_are_as_long_as_their_matches() -> None:
    """A chance match of one token drafted seven, a third more rows for no more tokens."""
    drafts = begin([1, 2, 3, 4, 5, 6, 7, 8, 9, 50, 3])
    assert drafts.propose(7) == [4]
    drafts.extend([4])
    assert drafts.propose(7) == [5, 6]
    drafts.extend([5, 6])
    assert drafts.propose(7) == [7, 8, 9, 50]
    assert drafts.propose(3) == [7, 8, 9]
    assert drafts.num_tokens == 14
    long = LookupOptions(factor=3.0)
    assert Lookup(long).begin([1, 2, 3, 4, 5, 1], 6, [], KEY).propose(7) == [2, 3, 4]
    least = LookupOptions(min_match=3)
    assert Lookup(least).begin([1, 2, 3, 4, 1, 2], 6, [], KEY).propose(7) == []
    assert Lookup(least).begin([1, 2, 3, 4, 1, 2, 3], 7, [], KEY).propose(7) == [4, 1, 2]


def test_the_likelier_of_equal_matches() -> None:
    """The last place was taken although three of four went on otherwise."""
    text = [1, 2, 30, 5, 1, 2, 30, 6, 1, 2, 30, 7, 1, 2, 40, 8, 1, 2]
    assert begin(text).propose(7)[0] == 30


def test_a_prediction_is_drafted_from_the_first_token() -> None:
    """The client's prediction was found only after two of its tokens had been sampled."""
    expected = list(range(200, 300))
    drafts = begin([1, 2, 3], expected)
    assert drafts.propose(7) == expected[:7]
    steps, _ = steps_of(begin([1, 2, 3], expected), expected)
    assert steps == 13
    changed = [*expected[:40], 7, 7, 7, *expected[43:]]
    assert steps_of(begin([1, 2, 3], expected), changed)[0] <= 20
    # A request that goes on elsewhere, in the middle of its answer.
    resumed = Lookup(LookupOptions()).begin([1, 2, 3, *expected[:30]], 3, expected, KEY)
    assert resumed.propose(7) == expected[30:37]


def test_answers_are_of_one_key_alone() -> None:
    """The speed of an answer told a tenant what another's answers were."""
    source = Lookup(LookupOptions())
    answer = list(range(500, 600))
    first = source.begin([1, 2, 3], 3, [], b"salt of one")
    assert steps_of(first, answer)[0] == 100
    first.end()
    assert steps_of(source.begin([1, 2, 3], 3, [], b"salt of two"), answer)[0] == 100
    assert steps_of(source.begin([1, 2, 3], 3, [], b"salt of one"), answer)[0] < 20
    alone = Lookup(LookupOptions(shared_tokens=0))
    earlier = alone.begin([1, 2, 3], 3, [], KEY)
    earlier.extend(answer)
    earlier.end()
    assert steps_of(alone.begin([1, 2, 3], 3, [], KEY), answer)[0] == 100


def test_answers_are_bounded_and_age() -> None:
    """A table that grows with each answer, until the replica has no memory; one tenant's answers
    that push out all others'."""
    now = 0.0
    table = Answers(4000, clock=lambda: now)
    table.add(b"small", [1, 2, 3, 4])
    for number in range(200):
        table.add(b"large", list(range(100 * number, 100 * number + 100)))
        assert table.num_tokens <= 4000
    assert table.find(b"small") is not None
    large = table.find(b"large")
    assert large is not None and len(large.tokens) <= 1000
    assert large.longest([19_950, 19_951], 1, 9, 9)[0] == 2, "the newest are kept"
    for number in range(200):
        table.add(b"key %d" % number, list(range(100)))
    assert table.num_tokens <= 4000 and table.find(b"small") is None
    now = answers._AGE + 1
    assert table.find(b"key 199") is None


def test_long_texts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of 100,000 tokens held up a step, or took memory without a bound."""
    monkeypatch.setattr(lookup, "_WINDOW", 64)
    monkeypatch.setattr(lookup, "_PIECE", 16)
    source = Lookup(LookupOptions(text_tokens=100, shared_tokens=0))
    text = [*range(1000), *range(900, 910)]
    drafts = source.begin(text, len(text), [], KEY)
    assert drafts.num_tokens == len(text)
    pieces = [drafts.propose(7) for _ in range(5)]
    assert pieces[0] == [] and pieces[-1] == [] and source.room == 100 - 64
    drafts.extend(range(960, 990))
    drafts.propose(7)
    assert drafts.num_tokens == len(text) + 30
    other = source.begin(text, len(text), [], KEY)
    for _ in range(9):
        other.propose(7)
        assert source.room >= 0
    drafts.extend(range(2000, 2200))
    drafts.propose(7)
    assert drafts.num_tokens == len(text) + 230
    drafts.end()
    other.end()
    assert source.room == 100


@pytest.mark.parametrize("seed", range(3))
def test_matches_are_those_of_a_search(seed: int) -> None:
    """Random texts of few tokens: the longest match is that of comparing every place."""
    rng = random.Random(seed)
    tokens = [rng.randrange(4) for _ in range(200)]
    table = Suffixes(tokens)
    for end in range(1, 200, 7):
        table.index(end)
        text = [rng.randrange(4) for _ in range(12)]

        def length_at(place: int, text: list[int] = text) -> int:
            length = 0
            while length < min(place, 12) and tokens[place - 1 - length] == text[-1 - length]:
                length += 1
            return length

        best = max((length_at(place) for place in range(1, end)), default=0)
        length, places = table.longest(text, 1, 12, 10_000)
        if best >= 2:
            assert length == best
            assert places == [p for p in range(end - 1, 0, -1) if length_at(p) == best]
        else:
            assert length <= 1


@pytest.mark.timed
def test_cost_of_a_token_without_repeats() -> None:
    """Look-up that costs a share of each step where it gives nothing: 256 streams have 10 ms."""
    text = list(range(20_000))
    seconds = []
    for _ in range(5):
        drafts = begin(text[:100])
        drafts.propose(7)
        began = time.perf_counter()
        for token in text[100:]:
            drafts.extend((token,))
            drafts.propose(7)
        seconds.append((time.perf_counter() - began) / (len(text) - 100))
    assert min(seconds) < 4e-6  # measured: 1.1 us


def test_looks_see_what_repeats() -> None:
    """Bugs: drafts rest for ever beside a text that copies; or a chance piece of a token ends the
    rest."""
    source = Lookup(LookupOptions())
    text = list(range(500, 600))
    assert source.repeats([*text, 7, 8, 520, 521, 522], KEY, 3)
    assert not source.repeats([*text, 7, 8, 520, 521, 523], KEY, 3)
    assert source.repeats([*text, 7, 8, 520, 521, 599, 522, 523], KEY, 2)
    assert not source.repeats(text, KEY, 3)
    # bytes 0, 1, 0, 0 | 0, 1, 0, 0 are found in the middle of 65536, 65536
    assert not source.repeats([65536, 65536, 65536, 3, 256, 256], KEY, 2)
    assert not source.repeats([5], KEY, 2)


def test_answers_that_never_drafted_are_known_later() -> None:
    """Bugs: while drafts rest no answer is remembered, so that repeated questions are not noticed;
    a look reads all of them at once."""
    source = Lookup(LookupOptions())
    for number in range(9):
        first = 1000 * number + 1000
        source.remember([1, 2, 3, *range(first, first + 50)], 3, KEY)
    assert source.answers.num_tokens == 9 * 53
    assert source.repeats([9, 9010, 9011, 9012], KEY, 3), "the newest answer is read first"
    assert not source.repeats([9, 1010, 1011, 1012], KEY, 3)
    assert not source.repeats([9, 9010, 9011, 9012], b"another key", 3)
    for _ in range(9):
        drafts = begin([9, 1010, 1011, 1012], source=source).propose(7)
    assert drafts == [1013, 1014, 1015]
    source.remember([1, 2, 3], 3, b"nothing")
    assert source.answers.find(b"nothing") is None


def test_a_built_engine_counts_its_drafts(tmp_path: Path) -> None:
    """Counts that go to an object which the start has replaced, so that metrics stay at zero."""
    save_checkpoint(tmp_path, "llama")
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_blocks": 64}
    core, _ = factory.build(EngineConfig(model=str(tmp_path), **options, speculation="auto"))
    fields: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
    tokens = run(core, [make_request(0, **fields)])[0].tokens
    request = make_request(1, make_request(0).token_ids, **fields)
    request.prediction = tokens
    assert run(core, [request])[1].tokens == tokens
    stats = core.stats()
    assert 0 < stats.accepted_by_position[0] <= stats.drafts
    assert sum(stats.accepted_by_position) <= stats.draft_tokens
