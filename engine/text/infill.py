"""FillMarks: the control tokens of fill-in-the-middle (FIM) prompts."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.text.tokenizer import Tokenizer

# The control tokens before the first text, before the second text and before the answer, of
# Qwen2.5-Coder and CodeGemma, StarCoder and Granite, SantaCoder, CodeLlama (two spellings),
# DeepSeek-Coder, GLM-4 and Falcon-H1.
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<PRE>", "<SUF>", "<MID>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("<|prefix|>", "<|suffix|>", "<|middle|>"),
)
# The same for models whose prompts have the text after the gap first: Seed-Coder and Codestral.
# Codestral has no control token before the answer.
_SUFFIX_FIRST = (
    ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"),
    ("[PREFIX]", "[SUFFIX]", ""),
)
# Tokens that end a model's answer.
_ENDS = (
    *("<|endoftext|>", "<|fim_pad|>", "<fim_pad>", "<|file_sep|>", "<file_sep>", "<|repo_name|>"),
    *("▁<EOT>", "<EOT>", "<|file_separator|>"),
)
# The control tokens before the name of a repository and before the name of each file.
_REPOSITORY = (("<|repo_name|>", "<|file_sep|>"), ("<reponame>", "<file_sep>"))
_SNIPPET = "\n\n--- snippet ---\n\n"

Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Gap:
    """The texts around a gap.

    middle: the beginning of the answer.
    files: (name, text) of other files for the prompt.
    """

    prefix: str
    suffix: str
    middle: str = ""
    files: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True, slots=True)
class FillMarks:
    """The ids of a model's control tokens for fill-in-the-middle.

    prefix, suffix: the tokens that introduce the text before the gap, and the text after the gap.
    middle: the token before the answer; None if the model has none.
    suffix_first: whether the prompt has the text after the gap first.
    ends: tokens that end an answer.
    repository, file: the tokens before the name of a repository and of a file; None = none.
    """

    prefix: int
    suffix: int
    middle: int | None
    suffix_first: bool
    ends: tuple[int, ...]
    repository: int | None = None
    file: int | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "FillMarks | None":
        """Return the control tokens of a tokenizer; None for a model that has no such tokens."""
        if tokenizer not in _known:
            _known[tokenizer] = _find(tokenizer)
        return _known[tokenizer]

    def ids(self, tokenizer: Tokenizer, gap: Gap, limit: int, *, special: bool = True) -> list[int]:
        """Return the token ids of a fill-in-the-middle prompt.

        special: whether to add the special tokens that tokenizer.json adds, such as a BOS.
        Raises TooManyTokens for a text that surely has more than `limit` tokens.
        """

        def encode(text: str) -> list[int]:
            tokenizer.check_length(text, limit)
            return tokenizer.encode(text)

        tokenizer.check_length(gap.suffix, limit)
        before = [self.prefix, *encode(gap.prefix)]
        behind = [self.suffix, *tokenizer.encode_plain(gap.suffix)]
        ids = [*behind, *before] if self.suffix_first else [*before, *behind]
        if self.middle is not None:
            ids.append(self.middle)
        begin = tokenizer.encode("", add_special_tokens=special)[:1]
        head = begin if begin == [tokenizer.bos_token_id] else []
        middle = encode(gap.middle) if gap.middle else []
        return [*head, *self._files(gap, encode), *ids, *middle]

    def _files(self, gap: Gap, encode: Encode) -> list[int]:
        if not gap.files:
            return []
        if self.file is None or self.repository is None:
            return [token for _, text in gap.files for token in encode(_SNIPPET + text)]
        ids = [self.repository, *encode("myproject\n")]
        for name, text in (*gap.files, ("filename", "")):
            ids += [self.file, *encode(f"{name}\n{text}")]
        return ids


_known: "weakref.WeakKeyDictionary[Tokenizer, FillMarks | None]" = weakref.WeakKeyDictionary()


def _find(tokenizer: Tokenizer) -> FillMarks | None:
    for names in (*_MARKS, *_SUFFIX_FIRST):
        before, behind, middle = (tokenizer.token_id(name) for name in names)
        if before is None or behind is None or (names[2] and middle is None):
            continue
        ends = [token for text in _ENDS if (token := tokenizer.token_id(text)) is not None]
        for pair in _REPOSITORY:
            repository, file = (tokenizer.token_id(name) for name in pair)
            if repository is not None and file is not None:
                break
        else:
            repository = file = None
        first = names in _SUFFIX_FIRST
        return FillMarks(before, behind, middle, first, tuple(ends), repository, file)
    return None
