"""Published tokenizers as read by transformers, the reference for ours, and random ids to compare.

The reference reads tokenizer.json and tokenizer_config.json as they are. It does not use
transformers' classes of Llama and Gemma, which replace the file's decoder and normalizer by others
than the model was trained with.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import pytest
from hypothesis import strategies as st

from engine.text.tokenizer import Tokenizer
from tests.published_tokenizers import NAMES, folder

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# One tokenizer of each kind, which loads within a second: byte-level with many control tokens,
# sentencepiece with and without a leading space.
QUICK = ("deepseek_v3", "llama2", "yi")
# Other tokenizers that load within a second; the remaining ones are tested nightly.
SLOW = ("chatglm3", "llama3_2", "mistral_nemo", "qwen3")


def each(rest: pytest.MarkDecorator) -> list[Any]:
    """Return the parameters of a test for each tokenizer. rest: the mark of tokenizers that are
    neither in QUICK nor in SLOW."""
    return [
        *QUICK,
        *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW),
        *(pytest.param(name, marks=rest) for name in NAMES if name not in (*QUICK, *SLOW)),
    ]


_PIECES = (" ", "  ", "\n", "\t", "\n\n", "the", " the", "'s", " .", " ,", "1", "é", "œ\u0301")
_WIDE = (
    "日本語",
    "🦊",
    "👩\u200d🔬",
    "한국어",
    "ไทย",
    "\u202e",
    "\ufeff",
    "\ufffd",
    "▁",
    "Ġ",
    "<0x0A>",
)
texts = st.lists(st.sampled_from(_PIECES + _WIDE) | st.text(max_size=4), max_size=8).map("".join)


def common(a: str, b: str) -> str:
    """Return the longest common beginning of two texts."""
    size = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))
    return a[: min(size, len(b))]


class Reference:
    """A published tokenizer as transformers reads it, beside ours."""

    def __init__(self, name: str) -> None:
        transformers = pytest.importorskip("transformers")
        place = folder(name)
        self.ours = Tokenizer.load(place)
        self.theirs = transformers.PreTrainedTokenizerFast.from_pretrained(place)
        entries = self.theirs.added_tokens_decoder
        self._special = {token for token, entry in entries.items() if entry.special}
        size = self.ours.vocab_size
        rows = enumerate(self.theirs.convert_ids_to_tokens(list(range(size))))
        self._byte_of = {
            token: int(row[3:5], 16)
            for token, row in rows
            if row is not None and len(row) == 6 and row[:3] == "<0x" and row[5] == ">"
        }
        self._id_of = {byte: token for token, byte in self._byte_of.items()}
        kinds = [st.integers(0, size - 1), texts.map(self._short)]
        # transformers adds tokens to ChatGLM 3 and InternLM 2 with ids beyond the vocabulary.
        added = sorted(token for token in entries if token < size)
        kinds += [st.sampled_from(sorted(part)) for part in (added, self._byte_of) if part]
        self.ids = st.lists(
            st.one_of(kinds).map(lambda item: item if isinstance(item, list) else [item]),
            max_size=8,
        ).map(lambda parts: list(chain.from_iterable(parts)))

    def _short(self, text: str) -> list[int]:
        """Return the ids of a text's beginning, which may end inside a character."""
        return self.ours.encode(text)[:6]

    def decode(self, ids: Sequence[int], skip: bool) -> str:
        """Return transformers' text of ids, with one U+FFFD for each byte that is part of no
        character.

        transformers itself also replaces adjacent valid bytes, even a line feed, which a stream has
        already sent.
        """
        whole: list[int] = []
        run = b""
        for token in ids:
            if token in self._byte_of:
                run += bytes([self._byte_of[token]])
            elif not (skip and token in self._special):
                whole += [*self._written(run), token]
                run = b""
        text: str = self.theirs.decode([*whole, *self._written(run)], skip_special_tokens=skip)
        return text

    def _written(self, run: bytes) -> list[int]:
        text = ""
        while run:
            for size in range(1, 5):
                try:
                    text += run[:size].decode()
                except UnicodeDecodeError:
                    continue
                break
            else:
                text, size = text + REPLACEMENT, 1
            run = run[size:]
        return [self._id_of[byte] for byte in text.encode()]

    def behind(self, prompt: Sequence[int], ids: Sequence[int], skip: bool) -> str:
        """Return the text of prompt + ids without the text of the prompt.

        If the prompt ends inside a character, its text ends with U+FFFD, where the whole text may
        differ. The result begins at the first difference.
        """
        before, whole = self.decode(prompt, skip), self.decode([*prompt, *ids], skip)
        shared = common(before, whole)
        assert not before[len(shared) :].strip(REPLACEMENT)
        return whole[len(shared) :]


@lru_cache(maxsize=2)  # tests of the same tokenizer are adjacent
def reference(name: str) -> Reference:
    return Reference(name)
