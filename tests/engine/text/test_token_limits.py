"""Lists of allowed and of bad tokens, in the step loop over a random model on the CPU."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config.engine_config import EngineConfig
from engine.errors import InvalidRequest
from engine.factory import build
from engine.sampling_params import SamplingParams
from engine.scheduling.core import EngineCore
from engine.structured.grammar import Grammar
from engine.structured.token_limits import TokenLimits
from engine.text.tokenizer import Tokenizer
from tests.engine.text.small_tokenizers import byte_level
from tests.engine.text.test_structured import make_core, request, run, save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), byte_level())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_level()


@pytest.fixture
def core(folder: Path) -> EngineCore:
    return make_core(folder)


def outputs(core: EngineCore, **fields: Any) -> list[list[int]]:
    """Return the tokens of six requests."""
    run_of = run(core, *(request(i, None, **{"max_tokens": 60, **fields}) for i in range(6)))
    return [run_of[i].tokens for i in range(6)]


ids = st.integers(0, 9)


@given(st.lists(ids), st.lists(st.lists(ids, min_size=1, max_size=4), max_size=6), st.lists(ids))
def test_a_mask_is_what_the_lists_say(
    allowed: list[int], bad: list[list[int]], output: list[int]
) -> None:
    """A bit of a word's other end, or a sequence that is forgotten behind a shorter one."""
    limits = TokenLimits(allowed, bad, 40)
    for token in output:
        limits.accept_token(token)
    mask = np.full(2, -1, np.int32)
    left = limits.limit(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:40]
    for token in range(40):
        text = [*output, token]
        ends = any(len(word) <= len(text) and text[-len(word) :] == word for word in bad)
        assert bits[token] == ((not allowed or token in allowed) and not ends)
    assert left == bool(mask.any())


def test_only_allowed_tokens_come(core: EngineCore, tokenizer: Tokenizer) -> None:
    """A limit that holds for the first token alone, or that end tokens pass."""
    allowed = [5, 40, 41, 77]
    for tokens in outputs(core, allowed_token_ids=allowed):
        assert len(tokens) == 60 and set(tokens) <= set(allowed)
    end = tokenizer.eos_token_ids[0]
    for tokens in outputs(core, allowed_token_ids=[5, end]):
        assert set(tokens) <= {5, end} and tokens[:-1].count(end) == 0


def test_a_bad_word_never_comes_and_others_do(core: EngineCore) -> None:
    """A word of two tokens that bans each of them, or comes over the border of two steps."""
    free = outputs(core, allowed_token_ids=[5, 6, 7], max_tokens=200)
    pairs = {pair for tokens in free for pair in itertools.pairwise(tokens)}
    assert len(pairs) == 9
    bad = [[5, 6], [7, 7]]
    for tokens in outputs(core, allowed_token_ids=[5, 6, 7], max_tokens=200, bad_words_ids=bad):
        own = set(itertools.pairwise(tokens))
        assert own == pairs - {(5, 6), (7, 7)}


def test_what_bans_nothing_changes_nothing(core: EngineCore, folder: Path) -> None:
    """Another text, other ends or other counts because a list is looked at."""
    never = [[3, 3, 3, 3, 3, 3]]
    for fields in ({}, {"min_tokens": 20}, {"ignore_eos": True}, {"stop_token_ids": [9, 10, 11]}):
        assert outputs(core, bad_words_ids=never, **fields) == outputs(core, **fields)


def test_a_resumed_output_is_remembered(core: EngineCore) -> None:
    """A bad word whose beginning was sampled by a replica that is gone."""
    fields = {"allowed_token_ids": [5, 6], "bad_words_ids": [[5, 6, 5]], "max_tokens": 40}
    whole = outputs(core, **fields)
    for cut in (1, 2, 17):
        resumed = run(core, *(request(i, None, output=whole[i][:cut], **fields) for i in range(6)))
        assert [whole[i][:cut] + resumed[i].tokens for i in range(6)] == whole


def test_lists_and_a_grammar(core: EngineCore, tokenizer: Tokenizer) -> None:
    """A list that holds only without a grammar, or an engine that ends where both leave nothing."""
    (a,), (b,) = (tokenizer.encode(text, add_special_tokens=False) for text in "ab")
    both = run(core, request(1, Grammar.regex("[ab]{9}"), bad_words_ids=[[a]]))[1]
    assert both.tokens[:9] == [b] * 9 and both.finish == "stop"
    none = run(core, request(2, Grammar.regex("a{9}"), bad_words_ids=[[a]]))[2]
    assert none.finish == "error" and "no_token_left" in none.deltas[-1].error
    assert len(run(core, request(3, None, max_tokens=5))[3].tokens) > 0


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"allowed_token_ids": [-1]}, "allowed_token_ids must be between"),
        ({"allowed_token_ids": "5"}, "allowed_token_ids must be a list of integers"),
        ({"bad_words_ids": [[]]}, "1 to 64 ids"),
        ({"bad_words_ids": [5]}, "bad_words_ids must be a list of lists of integers"),
        ({"bad_words_ids": [[5]] * 1025}, "at most 1024 sequences"),
    ],
)
def test_lists_are_checked(fields: dict[str, Any], words: str) -> None:
    """A list that fails in the engine, where others pay for it."""
    with pytest.raises(InvalidRequest, match=words):
        SamplingParams(**fields)


def test_ids_outside_the_vocabulary_are_refused() -> None:
    """An index error in the step loop."""
    for fields in ({"allowed_token_ids": [1, 40]}, {"bad_words_ids": [[1], [2, 40]]}):
        with pytest.raises(InvalidRequest) as caught:
            SamplingParams(**fields).check_vocabulary(40)
        assert caught.value.code == "token_out_of_range" and "40" in caught.value.message


@pytest.mark.gpu
def test_on_the_device(tmp_path: Path) -> None:
    """Masks of lists beside those of grammars and rows without either, in recorded passes."""
    folder = save_model(tmp_path, byte_level())
    values: dict[str, Any] = {"dtype": "bfloat16", "num_blocks": 512, "max_num_seqs": 32}
    core = build(EngineConfig(model=str(folder), device="cuda", **values))[0]
    lists: dict[str, Any] = {"allowed_token_ids": [5, 6, 7], "bad_words_ids": [[5, 6], [7, 7]]}
    limited = [request(i, None, max_tokens=100, **lists) for i in range(8)]
    grammatical = [request(i, Grammar.regex("[ab]{9}")) for i in range(8, 16)]
    plain = [request(i, None, max_tokens=50, ignore_eos=True) for i in range(16, 24)]
    outputs = run(core, *limited, *grammatical, *plain)
    for i in range(8):
        pairs = set(itertools.pairwise(outputs[i].tokens))
        assert len(outputs[i].tokens) == 100 and set(outputs[i].tokens) <= {5, 6, 7}
        assert not pairs & {(5, 6), (7, 7)}
    assert all(outputs[i].finish == "stop" for i in range(8, 16))
    assert all(len(outputs[i].tokens) == 50 for i in range(16, 24))
