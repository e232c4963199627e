"""Generated text is what it adds to the text of its prompt."""

from functools import cache

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from engine.sampling_params import SamplingParams
from engine.text.detokenizer import ChoiceDecoder
from engine.text.text_stream import TextStream
from engine.text.tokenizer import Tokenizer
from tests.engine.text import small_tokenizers


def metaspace() -> Tokenizer:
    """Return a tokenizer in the style of T5, whose decoder strips the first space."""
    words = ["<unk>", "</s>", "▁", "▁the", "▁cat", "s", "e", "▁▁"]
    vocab = [(word, -1.0 - i) for i, word in enumerate(words)]
    backend = tokenizers.Tokenizer(models.Unigram(vocab, 0, False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["</s>"])
    return Tokenizer(backend)


make = {
    "bytes": cache(small_tokenizers.byte_level),
    "fallback": cache(small_tokenizers.byte_fallback),
    "metaspace": cache(metaspace),
    "window": cache(small_tokenizers.word_piece),
}


def test_the_first_space_is_kept() -> None:
    """`Hello` and `▁world` make `Helloworld`."""
    tokenizer = make["fallback"]()
    the, cat = tokenizer.token_id("▁the"), tokenizer.token_id("▁cat")
    assert the is not None and cat is not None
    for params in (SamplingParams(), SamplingParams(stop=("###",))):
        decoder = ChoiceDecoder(tokenizer, params, prompt=[the])
        assert decoder.feed([cat]).text == " cat"
    decoder = ChoiceDecoder(tokenizer, SamplingParams(stop=(" cat",)), prompt=[the])
    assert decoder.feed([cat]).stop_reason == " cat"
    # Nothing of a text is before it: it has no first space.
    assert TextStream(tokenizer, prompt=[1, 1, 1]).feed([the]) == "the"
    assert TextStream(tokenizer, prompt=[the, 1, 1, 1, 1, 1, 1, 1]).feed([cat]) == " cat"


@settings(deadline=None, max_examples=400)
@given(
    st.sampled_from(sorted(make)),
    st.lists(st.integers(0, 420), max_size=20),
    st.lists(st.integers(0, 420), max_size=20),
    st.booleans(),
    st.integers(0, 20),
)
@example("fallback", [1, 259], [1, 259], True, 1)
def test_text_is_what_it_adds_to_the_prompts(
    kind: str, prompt: list[int], ids: list[int], skip: bool, cut: int
) -> None:
    """A first space that a decoder strips, in any text behind any prompt."""
    tokenizer = make[kind]()
    size = tokenizer.vocab_size
    prompt, ids = ([i % size for i in part] for part in (prompt, ids))
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    whole = tokenizer.decode(prompt + ids, skip_special_tokens=skip)

    def stream() -> TextStream:
        return TextStream(tokenizer, skip_special_tokens=skip, prompt=prompt)

    first, second = stream(), stream()
    text = first.feed(ids) + first.finish()
    assert text == second.feed(ids[:cut]) + second.feed(ids[cut:]) + second.finish()
    if whole.startswith(before):
        assert text == whole[len(before) :]
    else:  # a character begins in the prompt
        assert whole.endswith(text) and before.endswith("\ufffd")


@pytest.mark.parametrize("kind", ["bytes", "fallback"])
def test_a_character_that_begins_in_the_prompt(kind: str) -> None:
    """A character of which the prompt has the first bytes, lost or written as U+FFFD."""
    tokenizer = make[kind]()
    ids = tokenizer.encode("🦊")
    at = len(ids) - 1
    whole = TextStream(tokenizer, prompt=ids[:at])
    assert whole.feed(ids[at:]) == "🦊"
    broken = TextStream(tokenizer, prompt=ids[:at])
    assert broken.feed(tokenizer.encode("the")[-1:]).strip() in ("the", "e", "he")


def test_the_ids_that_a_text_writes() -> None:
    """Special tokens that an echo of ids leaves out."""
    tokenizer = make["fallback"]()
    ids = tokenizer.encode("the</s>cat", add_special_tokens=True)
    assert tokenizer.written("the</s>cat", ids) == (1, len(ids))
    assert tokenizer.written(tokenizer.decode([1, 1], skip_special_tokens=False), [1, 1]) == (0, 2)
