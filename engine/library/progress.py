"""RequestProgress: a request's output, and how much of it was read. Not thread-safe.

Tokens are decoded in bulk when the text is read, except where a stop string must be found at once.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.batch import TokenLogprobs
from engine.library.outputs import CompletionOutput, RequestOutput, RequestStatus
from engine.messages import Delta

if TYPE_CHECKING:
    from engine.text.detokenizer import ChoiceDecoder


class _ChoiceState:
    """The state of a choice: its tokens, and how many of them were decoded and read.

    eager: whether to decode tokens when they arrive, to find stop strings, instead of when read.
    """

    __slots__ = ("_decoded", "_decoder", "_eager", "_read", "_stop_token", "_texts", "whole")

    def __init__(self, index: int, decoder: "ChoiceDecoder | None", eager: bool) -> None:
        self.whole = CompletionOutput(index)  # the whole output so far; only `all` sets its text
        self._decoder = decoder
        self._eager = eager
        self._texts: list[str] = []
        self._decoded = 0  # number of whole.token_ids decoded into _texts
        # number of whole.token_ids and of _texts that were read; (-1, -1) once the end was read
        self._read = (0, 0)
        self._stop_token: int | None = None

    @property
    def ended(self) -> bool:
        return self.whole.finish_reason is not None

    @property
    def has_news(self) -> bool:
        read = self._read[0]
        return read >= 0 and (self.ended or read < len(self.whole.token_ids))

    def push_delta(self, delta: Delta, version: str) -> bool:
        """Add a delta; return whether it ended the choice."""
        whole, tokens, logprobs = self.whole, delta.token_ids, delta.logprobs
        finish = delta.finish or None
        self._stop_token = delta.stop_token
        if self._eager:
            finish, count = self._decode(tokens, delta.finish)
            tokens = tokens[:count]
            logprobs = None if logprobs is None else logprobs[:count]
        whole.token_ids += tokens
        _add_version(whole.versions, version, len(tokens))
        if logprobs is not None:
            whole.logprobs = [*(whole.logprobs or ()), *logprobs]
        if finish is not None:
            whole.finish_reason = finish
            whole.error = delta.error
            whole.vector = delta.vector
            whole.routed_experts = None if delta.routed is None else delta.routed.array()
        return finish is not None

    def _decode(self, tokens: list[int], finish: str) -> tuple[str | None, int]:
        assert self._decoder is not None
        decoded = self._decoder.feed(tokens, finish, self._stop_token)
        self._texts.append(decoded.text)
        self.whole.stop_reason = decoded.stop_reason
        return decoded.finish_reason, decoded.num_tokens

    def _catch_up(self) -> None:
        """Decode the tokens that have arrived since the last call."""
        decoder, tokens = self._decoder, self.whole.token_ids
        if decoder is None or self._eager or decoder.finished:
            return
        self._decode(tokens[self._decoded :], self.whole.finish_reason or "")
        self._decoded = len(tokens)

    def take_output(self) -> CompletionOutput:
        """Return the output since the last call; has_news must be true."""
        self._catch_up()
        whole, (tokens, texts) = self.whole, self._read
        self._read = (-1, -1) if self.ended else (len(whole.token_ids), len(self._texts))
        return CompletionOutput(
            whole.index,
            "".join(self._texts[texts:]),
            whole.token_ids[tokens:],
            whole.finish_reason,
            whole.stop_reason,
            None if whole.logprobs is None else whole.logprobs[tokens:],
            whole.error,
            versions=_without_first(whole.versions, tokens),
            routed_experts=whole.routed_experts,
        )

    def all(self) -> CompletionOutput:
        self._catch_up()
        self.whole.text = "".join(self._texts)
        return self.whole


def _add_version(versions: list[tuple[str, int]], version: str, count: int) -> None:
    """Append `count` tokens with a version of the weights to `versions`, in place."""
    if not count:
        return
    if versions and versions[-1][0] == version:
        count += versions.pop()[1]
    versions.append((version, count))


def _without_first(versions: list[tuple[str, int]], skipped: int) -> list[tuple[str, int]]:
    """Return the weight versions of the tokens after the first `skipped` ones."""
    spans = []
    for version, count in versions:
        if count > skipped:
            spans.append((version, count - skipped))
        skipped = max(0, skipped - count)
    return spans


class RequestProgress:
    """The state of all choices of a request.

    running: the number of choices that have not ended.
    decoders: the decoder of each choice; None leaves its text "".
    eager: whether to decode each delta when it arrives.
    """

    def __init__(
        self,
        prompt: str | None,
        prompt_token_ids: list[int],
        decoders: "Sequence[ChoiceDecoder | None]",
        *,
        eager: bool,
    ) -> None:
        self._prompt = prompt
        self._prompt_token_ids = prompt_token_ids
        self._choices = [_ChoiceState(i, decoder, eager) for i, decoder in enumerate(decoders)]
        self.running = len(self._choices)
        self._cached: int | None = None
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._prompt_logprobs_read = 0

    def push_delta(self, index: int, delta: Delta, version: str = "") -> bool:
        """Add a delta of a choice; return whether a stop string ended the choice.

        The engine does not know of stop strings, so the caller must abort the choice.
        """
        choice = self._choices[index]
        if choice.ended:
            return False
        ended = choice.push_delta(delta, version)
        if delta.cached >= 0:
            self._cached = delta.cached
        if delta.prompt_logprobs is not None and index == 0:
            self._prompt_logprobs = [*(self._prompt_logprobs or ()), *delta.prompt_logprobs]
        self.running -= ended
        return ended and not delta.finish

    def open(self) -> list[int]:
        """Return the indices of the running choices."""
        return [choice.whole.index for choice in self._choices if not choice.ended]

    def status(self) -> RequestStatus:
        if self.running == 0:
            reasons = [choice.whole.finish_reason for choice in self._choices]
            stopped = "abort" in reasons or "error" in reasons
            return RequestStatus.INTERRUPTED if stopped else RequestStatus.FINISHED
        most = max(len(choice.whole.token_ids) for choice in self._choices)
        names = (RequestStatus.INIT, RequestStatus.CONTEXT_FINISHED, RequestStatus.GENERATING)
        return names[min(most, 2)]

    def take_output(self) -> RequestOutput | None:
        """Return the output since the last call; None if there is none."""
        outputs = [choice.take_output() for choice in self._choices if choice.has_news]
        if not outputs:
            return None
        scores = self._prompt_logprobs
        if scores is not None:
            read, self._prompt_logprobs_read = self._prompt_logprobs_read, len(scores)
            scores = scores[read:] or None
        return self._output(outputs, scores)

    def all(self) -> RequestOutput:
        return self._output([choice.all() for choice in self._choices], self._prompt_logprobs)

    def _output(
        self, outputs: list[CompletionOutput], scores: list[TokenLogprobs | None] | None
    ) -> RequestOutput:
        return RequestOutput(
            self._prompt,
            self._prompt_token_ids,
            outputs,
            self.running == 0,
            self._cached,
            scores,
        )
