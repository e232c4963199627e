"""With every published tokenizer, text behind a prompt is transformers' text of both without that
of the prompt: in pieces, before stop strings, and at the offsets of its tokens."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError

from engine.errors import InvalidRequest
from engine.sampling_params import SamplingParams
from engine.text.detokenizer import ChoiceDecoder
from engine.text.text_stream import TextStream
from tests.engine.text.published_reference import (
    REPLACEMENT,
    Reference,
    common,
    each,
    reference,
    texts,
)


@pytest.fixture(scope="module", params=each(pytest.mark.nightly))
def known(request: pytest.FixtureRequest) -> Iterator[Reference]:
    yield reference(request.param)


@pytest.fixture(params=[40, pytest.param(500, marks=pytest.mark.nightly)], ids=["quick", "more"])
def tried(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return a function that tries a property with a number of examples."""

    def run(check: Callable[..., None], **strategies: Any) -> None:
        limits = settings(
            deadline=None,
            max_examples=request.param,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        )
        limits(given(**strategies)(check))()

    return run


def pieces(ids: list[int], cuts: list[int]) -> list[list[int]]:
    places = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[a:b] for a, b in pairwise(places)]


cuts = st.lists(st.integers(0, 50), max_size=5)


def test_ids_of_a_text(known: Reference, tried: Callable[..., None]) -> None:
    """Ids are transformers', with and without the tokens that the tokenizer adds."""

    def check(text: str, special: bool) -> None:
        ours = known.ours.encode(text, add_special_tokens=special)
        assert ours == known.theirs.encode(text, add_special_tokens=special)
        begin, end = known.ours.written(text, ours)
        assert known.ours.encode(text) == ours[begin:end]

    tried(check, text=texts, special=st.booleans())


def test_text_behind_a_prompt(known: Reference, tried: Callable[..., None]) -> None:
    """Whole, and in pieces whose sum it is. At each token, what has been shown is what the tokens
    so far make, but for a character that is not complete."""

    def check(prompt: list[int], ids: list[int], skip: bool, cuts: list[int]) -> None:
        expected = known.behind(prompt, ids, skip)
        assert known.ours.decode(ids, skip_special_tokens=skip, prompt=prompt) == expected
        stream = TextStream(known.ours, skip_special_tokens=skip, prompt=prompt)
        parts = pieces(ids, cuts)
        shown = "".join(map(stream.feed, parts))
        assert shown + stream.finish() == expected
        decoder = TextStream(known.ours, skip_special_tokens=skip, prompt=prompt)
        shown = ""
        for count, token in enumerate(ids, 1):
            shown += decoder.feed([token])
            so_far = known.behind(prompt, ids[:count], skip)
            assert so_far.startswith(shown)
            assert len(so_far) - len(shown) < 4 and not so_far[len(shown) :].strip(REPLACEMENT)

    tried(check, prompt=known.ids, ids=known.ids, skip=st.booleans(), cuts=cuts)


def test_stops_and_offsets(known: Reference, tried: Callable[..., None]) -> None:
    """The text ends before the stop string that is complete first, with the token that completes
    it. A token's offset is the length of what the tokens before it have shown."""

    def check(
        prompt: list[int], ids: list[int], skip: bool, cuts: list[int], ends: list[tuple[int, int]]
    ) -> None:
        expected = known.behind(prompt, ids, skip)
        shown = [0]  # characters, after so many tokens
        stream = TextStream(known.ours, skip_special_tokens=skip, prompt=prompt)
        for token in ids:
            shown.append(shown[-1] + len(stream.feed([token])))
        places = [(at % (len(expected) + 1), size) for at, size in ends]
        stops = tuple(dict.fromkeys(expected[at : at + size] for at, size in places)) or ("@@@",)
        stops = tuple(stop for stop in stops if stop)
        matches = [(at + len(s), at, s) for s in stops if (at := expected.find(s)) >= 0]
        end, start, stop = min(matches, default=(len(expected), len(expected), None))
        count = next((n for n, size in enumerate(shown) if stop and size >= end), len(ids))
        for offsets in (False, True):
            params = SamplingParams(skip_special_tokens=skip, stop=stops)
            decoder = ChoiceDecoder(known.ours, params, prompt=prompt, offsets=offsets)
            parts = [decoder.feed(part) for part in pieces(ids, cuts)]
            parts.append(decoder.feed([], "length"))
            assert "".join(part.text for part in parts) == expected[:start]
            assert decoder.num_tokens == count
            assert [part.stop_reason for part in parts if part.stop_reason] == [stop] * bool(stop)
            if offsets:
                assert [at for part in parts for at in part.offsets] == shown[:count]

    spans = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 4)), max_size=3)
    tried(check, prompt=known.ids, ids=known.ids, skip=st.booleans(), cuts=cuts, ends=spans)


def test_a_text_that_goes_on(known: Reference, tried: Callable[..., None]) -> None:
    """Of a text's tokens, the first ones as the prompt and the others as what is generated make the
    text again, where transformers does that too."""

    def check(text: str, cut: int) -> None:
        ids = known.ours.encode(text)
        prompt, rest = ids[: cut % (len(ids) + 1)], ids[cut % (len(ids) + 1) :]
        before = known.decode(prompt, False)
        behind = known.ours.decode(rest, skip_special_tokens=False, prompt=prompt)
        whole = known.theirs.decode(ids, skip_special_tokens=False)
        shared = common(before, whole)
        assert shared + behind == whole

    tried(check, text=texts, cut=st.integers(0, 50))


def test_ids_of_a_chat(known: Reference, tried: Callable[..., None]) -> None:
    """A chat's prompt is transformers', token by token, or both refuse the chat."""
    if known.ours.chat_template is None:
        pytest.skip("this tokenizer has no chat template")
    if len(known.theirs) > known.ours.vocab_size:
        pytest.skip("its tokenizer.json lacks tokens that the template writes")

    def check(said: list[str], system: bool, generation: bool) -> None:
        turns = zip(said, ("user", "assistant") * 2, strict=False)
        chat = [{"role": role, "content": text} for text, role in turns]
        if system:
            chat.insert(0, {"role": "system", "content": "Be kind."})
        options = {"add_generation_prompt": generation}
        try:
            ours = known.ours.encode_chat(chat, **options)
        except InvalidRequest:
            ours = None
        try:
            theirs = known.theirs.apply_chat_template(chat, return_dict=False, **options)
        except TemplateError:
            theirs = None
        assert ours == theirs

    said = st.lists(texts.filter(str.strip), min_size=1, max_size=4)
    tried(check, said=said, system=st.booleans(), generation=st.booleans())


def test_a_message_begins_no_turn(known: Reference) -> None:
    """A user who writes `<｜Assistant｜>` or `<|START_OF_TURN_TOKEN|>` speaks for the assistant:
    these tokens of DeepSeek and Cohere are not special ones."""
    template = known.ours.chat_template
    if template is None:
        pytest.skip("this tokenizer has no chat template")
    added = known.ours.backend.get_added_tokens_decoder()
    marks = {i: token.content for i, token in added.items() if token.special}
    source = "".join(template.sources.values())
    marks |= {i: t.content for i, t in added.items() if "|" in t.content and t.content in source}
    marks |= {i: t.content for i, t in added.items() if "｜" in t.content and t.content in source}

    def turns(text: str) -> list[int]:
        chat = [{"role": "user", "content": text}]
        return [token for token in known.ours.encode_chat(chat) if token in marks]

    plain = turns("a b")
    for mark in [*marks.values()][:60]:
        assert turns(f"a{mark}b") == plain, mark
