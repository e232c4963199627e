"""Incremental text is the text of all tokens, and stop strings cut exactly, wherever tokens begin
and end.
"""

import random
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling_params import SamplingParams
from engine.text.detokenizer import ChoiceDecoder
from engine.text.text_stream import TextStream
from engine.text.tokenizer import Tokenizer
from tests.engine.text import small_tokenizers

make = {
    "bytes": cache(small_tokenizers.byte_level),
    "fallback": cache(small_tokenizers.byte_fallback),
    "window": cache(small_tokenizers.word_piece),
}
kinds = st.sampled_from(["bytes", "fallback"])
texts = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"]), st.sampled_from(list(" \n▁thecat😀é\ufffd"))
    )
)


def split(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    return [ids[a:b] for a, b in pairwise(edges)]


@settings(deadline=None)
@given(kinds, texts, st.lists(st.integers(0, 40), max_size=8))
def test_stream_is_the_reference_decode(kind: str, text: str, cuts: list[int]) -> None:
    """A character lost, doubled or broken where its bytes are in two tokens or two calls."""
    tokenizer = make[kind]()
    ids = tokenizer.encode(text)
    stream = TextStream(tokenizer)
    got = "".join(stream.feed(part) for part in split(ids, cuts)) + stream.finish()
    assert got == tokenizer.backend.decode(ids) == tokenizer.decode(ids)


@settings(deadline=None)
@given(
    kinds, st.lists(st.integers(0, 420), max_size=30), st.lists(st.integers(0, 30)), st.booleans()
)
def test_any_ids_give_one_text_however_cut(
    kind: str, ids: list[int], cuts: list[int], skip: bool
) -> None:
    """Invalid UTF-8 or ids outside the vocabulary crash it, or a resumed stream differs from the
    first.
    """
    tokenizer = make[kind]()
    stream = TextStream(tokenizer, skip_special_tokens=skip)
    got = "".join(stream.feed(part) for part in split(ids, cuts)) + stream.finish()
    assert got == tokenizer.decode(ids, skip_special_tokens=skip)
    if kind == "bytes":
        assert got == tokenizer.backend.decode(ids, skip_special_tokens=skip)


def test_invalid_bytes_beside_valid_ones_keep_the_valid() -> None:
    """One stray byte turns the whole run of byte tokens into U+FFFD, or holds back newlines."""
    tokenizer = make["fallback"]()
    newline, stray = tokenizer.token_id("<0x0A>"), tokenizer.token_id("<0xFF>")
    assert newline is not None and stray is not None
    stream = TextStream(tokenizer)
    assert stream.feed([newline]) == "\n"
    assert stream.feed([stray, newline]) == "\ufffd\n"


def test_emoji_is_held_until_whole() -> None:
    """Half an emoji is sent as U+FFFD and cannot be taken back."""
    for kind in ("bytes", "fallback"):
        tokenizer = make[kind]()
        stream = TextStream(tokenizer)
        pieces = [stream.feed([token]) for token in tokenizer.encode("🦊🦊")]
        assert "".join(pieces) == "🦊🦊"
        assert "\ufffd" not in "".join(pieces)
        assert any(piece == "" for piece in pieces)


def test_unfinished_character_comes_out_at_the_end() -> None:
    """Bytes held back at the end of an answer vanish."""
    tokenizer = make["bytes"]()
    ids = tokenizer.encode("🦊")[:-1]
    decoder = ChoiceDecoder(tokenizer, SamplingParams())
    assert decoder.feed(ids).text == ""
    assert decoder.feed([], "length").text == tokenizer.backend.decode(ids)


def test_decoder_without_a_table_streams_too() -> None:
    """A WordPiece model loses its spaces when each token is decoded alone."""
    tokenizer = make["window"]()
    ids = tokenizer.encode("the cats sat, the cat sat!")
    stream = TextStream(tokenizer)
    got = "".join(stream.feed([token]) for token in ids) + stream.finish()
    assert got == tokenizer.backend.decode(ids)


@cache
def reference(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """Return the text up to a stop string, and that string, found character by character.

    The stop string that is complete first wins, then the longest.
    """
    for end in range(1, len(text) + 1):
        ends = [stop for stop in stops if text[:end].endswith(stop)]
        if ends:
            stop = max(ends, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=300, deadline=None)
@given(
    kinds,
    st.text(st.sampled_from("ab 😀é"), max_size=40),
    st.lists(st.text(st.sampled_from("ab 😀é"), min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.integers(0, 40), max_size=6),
    st.booleans(),
)
def test_stop_strings_cut_exactly(
    kind: str, text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    """A stop string over two tokens is missed, or some of it has been sent when it is seen."""
    tokenizer = make[kind]()
    ids = tokenizer.encode(text)
    params = SamplingParams(stop=tuple(stops), include_stop_str_in_output=include)
    decoder = ChoiceDecoder(tokenizer, params)
    got, count, reason = "", 0, None
    for part in split(ids, cuts):
        decoded = decoder.feed(part)
        got, count = got + decoded.text, count + decoded.num_tokens
        if decoded.finish_reason:
            assert decoded.finish_reason == "stop"
            reason = decoded.stop_reason
            break
    else:
        got += decoder.feed([], "length").text
    decoded_text = tokenizer.backend.decode(ids)
    assert (got, reason) == reference(decoded_text, tuple(stops), include)
    if reason is not None:  # the tokens kept are just enough to have the stop string
        assert reference(tokenizer.decode(ids[:count]), tuple(stops), include)[1] == reason
        before = TextStream(tokenizer).feed(ids[: count - 1])
        assert reference(before, tuple(stops), include)[1] is None
        assert count == decoder.num_tokens


def test_only_what_may_become_a_stop_is_held() -> None:
    """A stop string makes the stream stutter: text that cannot match waits for nothing."""
    tokenizer = make["bytes"]()
    decoder = ChoiceDecoder(tokenizer, SamplingParams(stop=("###",)))
    shown = [decoder.feed(tokenizer.encode(text)).text for text in ("a#", "b", "##", "c", "#", "#")]
    assert shown == ["a", "#b", "", "##c", "", ""]
    assert decoder.feed([], "length").text == "##"


def test_stop_string_below_min_tokens_is_text() -> None:
    """min_tokens does not hold for stop strings, or one that begins before it is missed after."""
    tokenizer = make["bytes"]()
    ids = [tokenizer.encode(char)[0] for char in "xyxyxy"]
    for cuts in ([], [1, 2, 3, 4, 5], [3]):
        decoder = ChoiceDecoder(tokenizer, SamplingParams(stop=("xy",), min_tokens=3))
        got, count = "", 0
        for part in split(ids, cuts):
            decoded = decoder.feed(part)
            got, count = got + decoded.text, count + decoded.num_tokens
        assert (got, count, decoder.finished) == ("xy", 4, True)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("skip", [False, True])
def test_end_token_is_counted_but_not_shown(include: bool, skip: bool) -> None:
    """`<|im_end|>` at the end of every answer, or usage that does not count it."""
    tokenizer = make["bytes"]()
    end = tokenizer.eos_token_ids[0]
    params = SamplingParams(
        include_stop_str_in_output=include, skip_special_tokens=skip, stop_token_ids=(260,)
    )
    decoded = ChoiceDecoder(tokenizer, params).feed([*tokenizer.encode("cat"), end], "stop", end)
    assert decoded.text == ("cat<|im_end|>" if include and not skip else "cat")
    assert decoded.num_tokens == len(tokenizer.encode("cat")) + 1
    assert decoded.stop_reason is None
    assert ChoiceDecoder(tokenizer, params).feed([5, 260], "stop", 260).stop_reason == 260


@settings(deadline=None)
@given(kinds, texts, st.lists(st.integers(0, 40), max_size=8))
def test_offsets_are_where_each_token_begins(kind: str, text: str, cuts: list[int]) -> None:
    """logprobs.text_offset points into the middle of another token's text."""
    tokenizer = make[kind]()
    ids = tokenizer.encode(text)
    decoder = ChoiceDecoder(tokenizer, SamplingParams(stop=("zzz",)), offsets=True)
    offsets: list[int] = []
    for part in split(ids, cuts):
        offsets += decoder.feed(part).offsets
    want = [len(TextStream(tokenizer).feed(ids[:i])) for i in range(len(ids))]
    assert offsets == want


def test_feeding_emitted_ids_at_once_resumes() -> None:
    """After a failover the held-back tail is lost or sent twice."""
    tokenizer = make["bytes"]()
    ids = tokenizer.encode("the cat 🦊 sat ## on ### the mat")
    params = SamplingParams(stop=("###",))
    for cut in range(len(ids)):
        whole, resumed = ChoiceDecoder(tokenizer, params), ChoiceDecoder(tokenizer, params)
        sent = "".join(whole.feed([token]).text for token in ids[:cut])
        assert resumed.feed(ids[:cut]).text == sent
        assert [resumed.feed([t]) for t in ids[cut:]] == [whole.feed([t]) for t in ids[cut:]]


def test_token_bytes_add_up() -> None:
    """The bytes in logprobs do not join to the text."""
    for kind in ("bytes", "fallback"):
        tokenizer = make[kind]()
        ids = tokenizer.encode("the 🦊 cat")
        text = b"".join(map(tokenizer.token_bytes, ids)).decode().removeprefix(" ")
        assert text == "the 🦊 cat"
    assert make["bytes"]().token_text(2) == "<|im_end|>"


def test_default_model_round_trip(default_model: object) -> None:
    """The real tokenizer has a token that the small ones have no like of."""
    tokenizer = Tokenizer.load(str(default_model))
    rng = random.Random(0)
    for _ in range(300):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(12)]
        stream = TextStream(tokenizer)
        got = "".join(stream.feed([token]) for token in ids) + stream.finish()
        assert got == tokenizer.backend.decode(ids)
