"""Tokens that tokenizer_config.json tells of otherwise than tokenizer.json are transformers'."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from engine.errors import ConfigError
from engine.text.tokenizer import Tokenizer
from tests.engine.text import small_tokenizers


def saved(folder: Path, settings: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    backend = small_tokenizers.byte_fallback().backend
    backend.add_tokens([AddedToken("cat", normalized=False)])
    (folder / "tokenizer.json").write_text(backend.to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def token(content: str, **flags: bool) -> dict[str, Any]:
    known = ("lstrip", "rstrip", "single_word", "normalized", "special")
    return {"content": content, **dict.fromkeys(known, False), **flags}


CAT = 274  # an added token that is not special
SETTINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a control token": {"added_tokens_decoder": {str(CAT): token("cat", special=True)}},
    "one that takes the spaces around it": {
        "added_tokens_decoder": {"2": token("</s>", special=True, lstrip=True, rstrip=True)}
    },
    "a whole word": {"added_tokens_decoder": {str(CAT): token("cat", single_word=True)}},
    "a word of the vocabulary": {"added_tokens_decoder": {"269": token("he")}},
    "an end in the vocabulary": {"eos_token": "▁cat"},
    "an end that is an added token": {"eos_token": "cat"},
    "an end with flags": {"eos_token": token("cat", rstrip=True) | {"__type": "AddedToken"}},
    "an end that is declared as plain": {
        "eos_token": "▁cat",
        "added_tokens_decoder": {"270": token("▁cat")},
    },
    "more": {
        "additional_special_tokens": ["he", token("▁the", special=True) | {"__type": "AddedToken"}]
    },
    "more by name": {"extra_special_tokens": {"image_token": "he"}},
    "a role of the model's": {"audio_token": "he"},
}
TEXT = "the cat </s> cats the  </s>he cat[I]"


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_tokens_are_those_of_transformers(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Command R+'s end of turn is a control token in tokenizer_config.json alone: it was shown to
    clients, and a message could end its own turn."""
    transformers = pytest.importorskip("transformers")
    folder = saved(tmp_path / "model", settings)
    ours = Tokenizer.load(folder)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    ids = ours.encode(TEXT)
    assert ids == theirs.encode(TEXT, add_special_tokens=False)
    everything = list(range(ours.vocab_size))
    for skip in (False, True):
        for some in (ids, everything[259:], everything[:3] + everything[259:]):
            assert ours.decode(some, skip_special_tokens=skip) == theirs.decode(
                some, skip_special_tokens=skip
            )
    special = {i for i, entry in theirs.added_tokens_decoder.items() if entry.special}
    assert ours.special_ids == special


def test_a_token_without_an_id_is_left_out(tmp_path: Path) -> None:
    """transformers gives it the next id, of which the model has no row."""
    plain = Tokenizer.load(saved(tmp_path / "plain", {}))
    settings = {"pad_token": "[PAD]", "added_tokens_decoder": {"300": token("<new>")}}
    ours = Tokenizer.load(saved(tmp_path / "more", settings))
    assert ours.vocab_size == plain.vocab_size
    assert ours.encode("[PAD]<new>") == plain.encode("[PAD]<new>")
    assert ours.backend is not plain.backend


@pytest.mark.parametrize(
    "settings",
    [
        {"added_tokens_decoder": ["cat"]},
        {"added_tokens_decoder": {"1": {"special": True}}},
        {"added_tokens_decoder": {"1": token("cat") | {"special": "yes"}}},
        {"additional_special_tokens": [1]},
        {"additional_special_tokens": 1},
    ],
    ids=str,
)
def test_broken_settings(tmp_path: Path, settings: dict[str, Any]) -> None:
    """An error that names the file, and no traceback of a library."""
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: its tokens cannot be read"):
        Tokenizer.load(saved(tmp_path / "model", settings))
