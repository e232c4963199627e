"""StreamReplay: resumes a stream after the tokens that its client has according to the event id
(event_ids.py). recall: gets these tokens from the replica that remembers them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from deployments.api.generation.call import GenerationCall
from deployments.api.http.errors import NO_RETRY, SERVER, ApiError
from deployments.api.stream.event_ids import (
    ENDED,
    FINISHED,
    OPENED,
    ChoiceProgress,
    EventIds,
    checksum,
)
from deployments.api.stream.merge import ChoiceOutput, failed
from deployments.backend import Backend, RecalledChoice
from engine.messages import Delta
from engine.text.detokenizer import Decoded


class Resumption(NamedTuple):
    """The point in a stream from which an answer is resumed.

    ids: the event ids of the stream; None: its events have no ids
    past: for a resumed stream, the choices that replicas remember
    """

    ids: EventIds | None = None
    past: Sequence[RecalledChoice | None] = ()


# The value for a new stream whose events have no ids.
WITHOUT_IDS = Resumption()


async def recall(
    call: GenerationCall, ids: EventIds, backend: Backend
) -> list[RecalledChoice | None]:
    """Return, for each choice, the tokens that the client has, as a replica remembers them.

    None means that no replica remembers the choice, or that no tokens are needed. All results are
    from replicas with the same weights.
    """
    n = call.common.params.n
    wanted = {
        (call.streams[i // n], i % n): i
        for i, shown in enumerate(ids.shown)
        if shown.tokens and shown.phase != FINISHED
    }

    def match(found: list[RecalledChoice]) -> dict[int, RecalledChoice]:
        return {
            wanted[past.stream, past.choice]: past
            for past in found
            if (past.stream, past.choice) in wanted
            and _begins_with(past.token_ids, ids.shown[wanted[past.stream, past.choice]])
        }

    if not wanted:
        return [None] * len(ids.shown)
    known = match(
        await backend.recall(
            call.card.id, call.streams, lambda found: len(match(found)) == len(wanted)
        )
    )
    weights = call.common.weights = next((past.weights for past in known.values()), "")
    return [
        past if (past := known.get(i)) is not None and past.weights == weights else None
        for i in range(len(ids.shown))
    ]


def _begins_with(token_ids: Sequence[int], shown: ChoiceProgress) -> bool:
    count = shown.tokens
    return len(token_ids) >= count and checksum(token_ids[:count]) == shown.check


class StreamReplay:
    """The resumption of an answer's choices after the tokens that the client has received.

    Tokens that a replica remembers are in `emitted`, by choice; the engine continues after them.
    Tokens that no replica remembers are generated again: `skip` drops them as they arrive, and
    checks that they are the same.
    """

    def __init__(
        self,
        call: GenerationCall,
        ids: EventIds,
        choices: list[ChoiceOutput],
        past: Sequence[RecalledChoice | None],
    ) -> None:
        self.emitted: list[list[int] | None] = []
        self.skipping: dict[int, int] = {}  # choice -> checksum of the tokens skipped so far
        self._call, self._ids = call, ids
        for index, shown in enumerate(ids.shown):
            self.emitted.append(self._bring(index, choices[index], shown, past[index]))
            if shown.tokens and self.emitted[-1] == []:
                self.skipping[index] = 0

    def _bring(
        self, index: int, choice: ChoiceOutput, shown: ChoiceProgress, past: RecalledChoice | None
    ) -> list[int] | None:
        """Feed a choice with the tokens that the client has; return the tokens after which the
        engine continues.

        Returns [] if the choice must be generated again from its prompt, None if it has ended.
        """
        if shown.phase == FINISHED:
            choice.finish_reason = choice.finish_reason or "told"
            choice.decoder.num_tokens = shown.tokens
            return None
        if past is None or not shown.tokens:
            return []
        tokens = past.token_ids[: shown.tokens]
        if shown.phase == OPENED:
            choice.bring(tokens)
            return tokens
        # The client has the choice's whole text, but perhaps not its finish_reason. The choice has
        # ended if these are all of its tokens, or if they end with a stop string.
        whole = len(past.token_ids) == shown.tokens and past.finish in ("stop", "length")
        if not (whole or self._stops(index, tokens)):
            return []
        delta = Delta(0, tokens, past.finish, past.stop_token) if whole else Delta(0, tokens)
        choice.feed(delta)
        return None

    def _stops(self, index: int, tokens: list[int]) -> bool:
        fresh = ChoiceOutput(self._call, index)
        return fresh.feed(Delta(0, tokens)).finish_reason is not None

    def skip(self, index: int, choice: ChoiceOutput, delta: Delta) -> tuple[Delta, Decoded]:
        """Return the part of a delta after the tokens to skip, for a choice in `skipping`, and its
        decoded text.

        Raises ApiError 409 stream_lost, and as `ChoiceOutput.feed`.
        """
        shown = self._ids.shown[index]
        num_shown = shown.tokens - choice.decoder.num_tokens
        head, new_ids = delta.token_ids[:num_shown], delta.token_ids[num_shown:]
        self.skipping[index] = checksum(head, self.skipping[index])
        reached = len(head) == num_shown
        # If the choice ended at the last token to skip, it ends now.
        ends = not new_ids and shown.phase == ENDED
        first = msgspec.structs.replace(delta, token_ids=head, logprobs=None, cached=-1)
        if not ends:
            first.finish, first.stop_token = "", None
        if delta.finish == "error":
            first.finish = delta.finish
        elif delta.finish == "abort" and not reached:
            raise failed(delta)
        ended = choice.feed(first).finish_reason
        if choice.parsed is not None:
            choice.parsed.forget_new()
        if reached:
            if self.skipping.pop(index) != shown.check or (ended is None) == (shown.phase == ENDED):
                raise _lost()
        elif ended is not None or delta.finish:
            raise _lost()
        nothing = Delta(delta.id, [], delta.finish)
        if ended is not None or not (new_ids or (reached and delta.finish)):
            return nothing, Decoded("", ended, choice.stop_reason, 0)
        logprobs = None if delta.logprobs is None else delta.logprobs[num_shown:]
        second = msgspec.structs.replace(
            delta, token_ids=new_ids, logprobs=logprobs, prompt_logprobs=None, cached=-1
        )
        return second, choice.feed(second)


def _lost() -> ApiError:
    """Return the error for a stream whose tokens no replica remembers, and whose regenerated tokens
    differ."""
    return ApiError(
        409,
        "stream_lost",
        "the stream cannot go on: no replica has its tokens any more, and they were computed "
        "otherwise this time",
        param="last-event-id",
        kind=SERVER,
        headers=NO_RETRY,
    )
