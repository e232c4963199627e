"""Tokenizer: converts text and chats to token ids, with only the Rust `tokenizers` library."""

import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import tokenizers
from tokenizers import pre_tokenizers

from engine.config.model_config import no_folder
from engine.errors import ConfigError, InvalidRequest
from engine.sampling_params import DEFAULTS, SamplingParams
from engine.structured.marks import is_mark
from engine.text.chat_template import ChatTemplate, map_strings
from engine.text.control_tokens import ControlTokens
from engine.text.declared_tokens import read_declared, read_settings
from engine.text.template_contents import check_shown
from engine.text.text_stream import Tables, TextStream

# In characters. The library's `encode` holds the GIL for its whole run, about a microsecond per
# character. `encode_batch_fast` releases it, and costs some 50 microseconds more.
LONG = 16_384

# A text with more characters than this for each token of its limit may exceed the limit. Its number
# of tokens is estimated in pieces before the whole text is encoded.
_CHARS_A_TOKEN = 4
_PIECE = 16_384  # characters of a piece


class TooManyTokens(InvalidRequest):
    """An error for a text that has more tokens than its limit.

    at_least: the number of the text's tokens, or a lower bound.
    """

    code = "context_length_exceeded"

    def __init__(self, at_least: int, limit: int) -> None:
        super().__init__(f"the text has at least {at_least} tokens, more than {limit}")
        self.at_least = at_least
        self.limit = limit


class Tokenizer:
    """The tokenizer of one model, immutable after load and safe to share between threads.

    vocab_size: the number of ids, including added tokens (the logits may be wider).
    bos_token_id: the BOS token; None if the model has none.
    sampling_defaults: fields of SamplingParams that generation_config.json or the operator sets.
    eos_token_ids: ids that end an answer, from generation_config.json, config.json and the
        tokenizer.
    special_ids: ids of control tokens, which `decode` leaves out by default.
    mark_ids: ids of tokens that are allowed only where a grammar names them: control tokens, added
        tokens in angle brackets, and tokens that end an answer.
    chat_template: the chat template; None if the checkpoint has none.
    same: a loaded tokenizer with the same backend, whose tables are shared; None = there is none.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] = (),
        sampling_defaults: Mapping[str, Any] | None = None,
        chat_template: ChatTemplate | None = None,
        response_template: Any = None,
        same: "Tokenizer | None" = None,
    ) -> None:
        # Changed only if necessary, as the library refuses to change a backend that another thread
        # uses. A shared backend has both settings off already.
        if backend.truncation is not None:
            backend.no_truncation()
        if backend.padding is not None:
            backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        # the checkpoint's response_template; None = it has none
        self.response_template = response_template
        self.sampling_defaults = dict(sampling_defaults or {})
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self._longest: int = _longest(backend) if same is None else same._longest
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.bos_token_id = self.token_id(self.special_tokens.get("bos_token", ""))
        own_eos = self.token_id(self.special_tokens.get("eos_token", ""))
        ends = [*eos_token_ids, *([] if own_eos is None else [own_eos])]
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys(ends))
        self.mark_ids = frozenset(
            i for i, token in added.items() if is_mark(token.content, token.special)
        ).union(i for i in ends if backend.id_to_token(i) is not None)
        self.tables = Tables(self)  # tables of TextStream
        # The same model without added tokens, so that no text is encoded as an added token.
        self._plain = tokenizers.Tokenizer(backend.model)
        if backend.normalizer is not None:
            self._plain.normalizer = backend.normalizer
        splitter = _without_first_prefix(backend.pre_tokenizer)
        if splitter is not None:
            self._plain.pre_tokenizer = splitter

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        generation_config: str | Mapping[str, float] = "auto",
        chat_template: str | None = None,
    ) -> "Tokenizer":
        """Read tokenizer.json and the other files of its folder.

        Loaded tokenizers with the same tokenizer.json share the library's object.

        generation_config: the source of sampling defaults (EngineConfig.generation_config).
        chat_template: jinja source to use instead of the checkpoint's templates.
        Raises ConfigError if tokenizer.json is missing or a file is invalid.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not folder.is_dir():
            raise no_folder(folder)
        if not path.is_file():
            raise ConfigError(
                f"{folder} has no tokenizer.json; save the model with a fast tokenizer",
                param="model",
            )
        named, special, declared = read_declared(folder)
        content = path.read_bytes()
        digest = blake2b(b"%b%a" % (content, declared), digest_size=16).digest()
        same = _in_use.get(digest)
        try:
            backend = tokenizers.Tokenizer.from_buffer(content) if same is None else same.backend
        except Exception as error:  # the library raises no more specific class
            raise ConfigError(f"{path} cannot be read: {error}", param="model") from error
        if same is None:
            declared.add_to(backend)
        ends: list[int] = []
        for name in ("generation_config.json", "config.json"):
            value = read_settings(folder / name).get("eos_token_id")
            ends += value if isinstance(value, list) else [] if value is None else [value]
        tokenizer = cls(
            backend,
            special_tokens=special,
            eos_token_ids=ends,
            sampling_defaults=_sampling_defaults(folder, generation_config),
            chat_template=ChatTemplate.load(folder, special)
            if chat_template is None
            else ChatTemplate({"default": chat_template}, special),
            response_template=named.get("response_template")
            or read_settings(folder / "processor_config.json").get("response_template"),
            same=same,
        )
        _in_use[digest] = tokenizer
        return tokenizer

    def token_id(self, token: str) -> int | None:
        """Return the id of a token, written as in the vocabulary; None if there is none."""
        token_id: int | None = self.backend.token_to_id(token) if token else None
        return token_id

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = False,
        max_tokens: int | None = None,
        keep_end: bool = False,
    ) -> list[int]:
        """Encode a text, without holding the GIL for a long text.

        add_special_tokens: whether to add the tokens that tokenizer.json adds, such as a BOS.
        max_tokens: the limit to which a longer text is truncated, between its special tokens.
        keep_end: whether to truncate the text at its beginning instead of its end.
        """
        if max_tokens is None:
            return _encode(self.backend, text, add_special_tokens)
        most = (max_tokens + 1) * self._longest  # no token has more characters
        text = text[-most:] if keep_end else text[:most]
        ids = _encode(self.backend, text, add_special_tokens)
        if len(ids) <= max_tokens:
            return ids
        plain = _encode(self.backend, text, False) if add_special_tokens else ids
        special = len(ids) - len(plain)
        before = next(i for i in range(special + 1) if ids[i : i + len(plain)] == plain)
        room = max(0, max_tokens - special)
        inner = plain[len(plain) - room :] if keep_end else plain[:room]
        return ids[:before] + inner + ids[before + len(plain) :]

    def written(self, text: str, ids: Sequence[int]) -> tuple[int, int]:
        """Return the half-open range of the ids of a prompt that encode the prompt's text.

        Special tokens that were added, such as a BOS, are outside of the range, unless the text
        spells them.
        """
        everything = 0, len(ids)
        if not ids or (ids[0] not in self.special_ids and ids[-1] not in self.special_ids):
            return everything
        if text == self.decode(ids, skip_special_tokens=False):
            return everything
        plain = self.encode(text)
        added = len(ids) - len(plain)
        starts = (i for i in range(added + 1) if list(ids[i : i + len(plain)]) == plain)
        begin = next(starts, None)
        return everything if begin is None else (begin, begin + len(plain))

    def encode_pair(
        self,
        first: str,
        second: str,
        *,
        add_special_tokens: bool = True,
        max_tokens: int,
        keep_end: bool = False,
    ) -> tuple[list[int], list[int]]:
        """Encode two texts as tokenizer.json joins them.

        Returns the ids, and the indices of the second text's ids.

        max_tokens: the approximate limit, to which both texts are truncated at their ends.
        keep_end: whether to truncate the second text at its beginning instead.
        """
        most = (max_tokens + 1) * self._longest
        first, second = first[:most], second[-most:] if keep_end else second[:most]
        encoding = self.backend.encode(first, second, add_special_tokens=add_special_tokens)
        places = [place for place, part in enumerate(encoding.sequence_ids) if part == 1]
        return encoding.ids, places

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = False
    ) -> list[list[int]]:
        """Encode many texts, on all cores.

        add_special_tokens: as in `encode`.
        """
        encodings = self.backend.encode_batch_fast(
            list(texts), add_special_tokens=add_special_tokens
        )
        return [item.ids for item in encodings]

    def check_length(self, text: str, limit: int) -> None:
        """Refuse a text that certainly has more than `limit` tokens, without encoding the whole
        text.

        Most texts are so short that this needs no work. Others are encoded up to the limit.
        Raises TooManyTokens.
        """
        if len(text) <= _CHARS_A_TOKEN * limit:
            return
        # Pieces are encoded separately. A cut between pieces changes only nearby tokens: it splits
        # one, and merges within the same word may differ.
        slack = 2 * self._longest
        size = max(_PIECE, 32 * slack)
        at_least = 0
        for start in range(0, len(text), size):
            count = len(self.encode(text[start : start + size]))
            at_least += max(0, count - slack - count // 8)
            if at_least > limit:
                raise TooManyTokens(at_least, limit)

    def encode_plain(self, text: str) -> list[int]:
        """Encode a text in which control tokens are treated as plain characters."""
        ids = _encode(self._plain, text, add_special_tokens=False)
        if self._control.ids.isdisjoint(ids):
            return ids
        # In a vocabulary converted from sentencepiece's, merges may still produce a control token
        # from its characters.
        whole: list[int] = []
        for token in ids:
            written = self.token_text(token) if token in self._control.ids else ""
            # a token that the text does not spell stands for an unknown character
            letters = written if written in text else ""
            whole += [t.id for char in letters for t in self._plain.model.tokenize(char)] or [token]
        return whole

    @cached_property
    def _control(self) -> ControlTokens:
        return ControlTokens.of(self.backend.get_added_tokens_decoder(), self.chat_template)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        max_tokens: int | None = None,
        edit: Callable[[str], str] | None = None,
        **options: Any,
    ) -> list[int]:
        """Encode a chat; the ids equal those of transformers' ``apply_chat_template``.

        Control tokens typed inside a message or a tool are encoded as plain characters. So a
        message cannot end its turn or start another role with ``<|im_end|>``.

        max_tokens: the limit; a chat that certainly has more tokens is not encoded.
        options: as in `ChatTemplate.render`.
        edit: a function applied to the rendered text, in which typed control tokens are replaced by
            digits.
        Raises InvalidRequest if the model has no template, or the template refuses the messages;
        TooManyTokens.
        """
        typed: dict[str, str] = {}  # typed control token -> the digits that replace it
        nonce = f"{secrets.randbelow(10**24):024d}"  # digits survive every filter of a template

        def mark(match: re.Match[str]) -> str:
            return typed.setdefault(match.group(), f"{nonce}{len(typed):06d}")

        control = self._control

        def neutral(text: str) -> str:
            if len(text) <= _PIECE:
                return control.text.sub(mark, text)
            return _substitute(control.text, mark, text, control.reach)

        messages = map_strings(messages, neutral)
        if tools is not None:
            tools = map_strings(tools, neutral)
        for name, value in options.items():
            options[name] = map_strings(value, neutral)
        template = self.chat_template
        if template is None:
            raise InvalidRequest(
                "this model has no chat template; use completions with a prompt instead",
                param="messages",
                code="no_chat_template",
            )
        text = template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **options,
        )
        check_shown(text, messages, template.silent)
        if edit is not None:
            text = edit(text)
        if not typed:
            if max_tokens is not None:
                self.check_length(text, max_tokens)
            return self.encode(text)
        written = {mark: token for token, mark in typed.items()}
        if max_tokens is not None:
            marker = re.compile(nonce + r"\d{6}")
            self.check_length(marker.sub(lambda m: written[m.group()], text), max_tokens)
        return self._encode_marked(text, nonce, written)

    def _encode_marked(self, text: str, nonce: str, typed: Mapping[str, str]) -> list[int]:
        """Encode a rendered chat in which digits replace the control tokens that users typed.

        If the text between two of the template's control tokens has such digits, all of it is
        encoded by `encode_plain`.

        nonce: the common prefix of all such digits.
        typed: digits -> the typed control token.
        """
        marker = re.compile(nonce + r"\d{6}")
        ids: list[int] = []
        start = 0  # start of the text not encoded yet
        end = 0  # end of the last control token
        stops = [(m.start(), m.end()) for m in self._control.span.finditer(text)]
        for left, right in [*stops, (len(text), len(text))]:
            stretch = text[end:left]
            if nonce in stretch:
                ids += self.encode(text[start:end]) if end > start else []
                ids += self.encode_plain(marker.sub(lambda m: typed[m.group()], stretch))
                start = left
            end = right
        return ids + (self.encode(text[start:]) if start < len(text) else [])

    def decode(
        self,
        token_ids: Iterable[int],
        *,
        skip_special_tokens: bool = True,
        prompt: Sequence[int] = (),
    ) -> str:
        """Return the text of ids that follow a prompt; see `TextStream` for incremental
        decoding."""
        stream = TextStream(self, skip_special_tokens=skip_special_tokens, prompt=prompt)
        return stream.feed(list(token_ids)) + stream.finish()

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, special or not (for logprobs)."""
        return self.tables.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """Return the text of one token; incomplete characters become U+FFFD."""
        return self.tables.token_bytes(token_id).decode("utf-8", "replace")


# The loaded tokenizers, by the digest of tokenizer.json and of the tokens that other files declare.
# Models of a family often have the same file, and sharing saves reading it again, for which the
# library holds the GIL: 0.1 to 0.3 s for 50,000 to 150,000 tokens. During that time a router cannot
# serve its other models.
_in_use: WeakValueDictionary[bytes, Tokenizer] = WeakValueDictionary()


def _substitute(
    pattern: re.Pattern[str], change: Callable[[re.Match[str]], str], text: str, reach: int
) -> str:
    """Return ``pattern.sub(change, text)``, computed in slices so that other threads can run.

    One call would hold the interpreter lock for a tenth of a second on megabytes that nearly match.

    reach: the number of characters of the longest match.
    """
    pieces: list[str] = []
    at = 0
    for end in range(_PIECE, len(text) + _PIECE, _PIECE):
        # A match that begins before the end of the slice may continue beyond it.
        for match in pattern.finditer(text, at, end + reach):
            if match.start() >= end:
                break
            pieces += (text[at : match.start()], change(match))
            at = match.end()
        if at < end:
            pieces.append(text[at:end])
            at = end
    return "".join(pieces)


def _encode(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    if len(text) < LONG:
        encoding = backend.encode(text, add_special_tokens=add_special_tokens)
    else:
        (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    ids: list[int] = encoding.ids
    return ids


def _longest(backend: tokenizers.Tokenizer) -> int:
    """Return the number of characters of the longest token, as the vocabulary writes it.

    Other threads can run between tokens. A dict of the vocabulary would make the library hold the
    GIL, 0.03 s for 50,000 tokens.
    """
    longest = 1
    for token_id in range(backend.get_vocab_size(with_added_tokens=True)):
        token = backend.id_to_token(token_id)
        # a gap in the ids, so that some ids are larger than the vocabulary's size
        if token is None:
            return max(map(len, backend.get_vocab(with_added_tokens=True)))
        longest = max(longest, len(token))
    return longest


def _sampling_defaults(folder: Path, source: str | Mapping[str, float]) -> dict[str, Any]:
    """Return the default sampling parameters of requests, as fields of SamplingParams.

    source: "auto" for the values of generation_config.json, "none" for no values, or a mapping of
        the operator's values, which override those of generation_config.json.
    Raises ConfigError for values that SamplingParams refuses.
    """
    if source == "none":
        return {}
    own = {} if isinstance(source, str) else dict(source)
    path = folder / "generation_config.json"
    values = read_settings(path)
    if values.get("do_sample") is False:  # the file's other values then have no effect
        return {"temperature": 0.0, **own}
    defaults = {name: values[name] for name in DEFAULTS if values.get(name) is not None}
    try:
        SamplingParams(**defaults)
    except InvalidRequest as error:
        raise ConfigError(f"{path}: {error.message}", param="model") from None
    return {**defaults, **own}


def _without_first_prefix(splitter: Any) -> Any:
    """Return a pre-tokenizer without the option to add a space before the first word.

    A piece of a chat is not the start of a text.
    """
    if isinstance(splitter, pre_tokenizers.Metaspace) and splitter.prepend_scheme == "first":
        return pre_tokenizers.Metaspace(
            replacement=splitter.replacement, prepend_scheme="never", split=splitter.split
        )
    return splitter
