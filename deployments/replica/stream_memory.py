"""StreamMemory: remembers the tokens of streams that run at a replica or ended there recently.

A client whose router or proxy has died reconnects with its stream's id, and the new router asks the
replicas for the tokens. So the stream continues where the client stopped, and mostly finds its
tokens in the prefix cache. Sampling them again could give other tokens than the client has. Only
streams with event ids are remembered, for KEEP_SECONDS after their end and up to KEEP_TOKENS in
all; the oldest are dropped first.
"""

from array import array
from collections import OrderedDict

from deployments.transport.channel import StreamRecord
from engine.messages import Delta, EngineRequest

KEEP_SECONDS = 180.0  # longer than a proxy, a router or a node takes to restart
KEEP_TOKENS = 8 * 2**20  # maximum number of remembered tokens of ended streams (32 MiB)
_OF_EACH = 128  # number of tokens that is added for the other memory of an ended stream


class _Kept:
    __slots__ = ("choice", "ended", "finish", "id", "stop_token", "stream", "tokens")

    def __init__(self, id: int, stream: str, choice: int, tokens: list[int]) -> None:
        self.id, self.stream, self.choice = id, stream, choice
        self.tokens = array("I", tokens)
        self.finish = ""
        self.stop_token: int | None = None
        self.ended = 0.0


class StreamMemory:
    """The tokens of running and recently ended streams, from which another router can resume them.

    Request ids are those of the engine; stream ids are those that routers use.
    """

    def __init__(self) -> None:
        self._live: dict[int, _Kept] = {}
        self._ended: OrderedDict[int, _Kept] = OrderedDict()  # ordered by the time of their end
        self._streams: dict[str, list[_Kept]] = {}
        self._tokens = 0  # tokens of ended streams

    def begin(self, request: EngineRequest, stream: str) -> None:
        emitted = request.token_ids[request.num_prompt_tokens :]
        record = _Kept(request.id, stream, request.choice, emitted)
        self._live[request.id] = record
        self._streams.setdefault(stream, []).append(record)

    def take_deltas(self, deltas: list[Delta], now: float) -> None:
        """Add a step's tokens to their streams. now: seconds of the clock that is also passed to
        `find`."""
        live = self._live
        if not live:
            return
        for delta in deltas:
            record = live.get(delta.id)
            if record is not None:
                record.tokens.extend(delta.token_ids)
                if delta.finish:
                    if delta.finish in ("stop", "length"):
                        record.finish, record.stop_token = delta.finish, delta.stop_token
                    self.end(delta.id, now)

    def end(self, id: int, now: float) -> None:
        """Record that a request has ended or was returned to its router, and drop old streams.

        Idempotent.
        """
        record = self._live.pop(id, None)
        if record is None:
            return
        record.ended = now
        self._ended[id] = record
        self._tokens += len(record.tokens) + _OF_EACH
        self._forget(now)

    def find(self, streams: list[str], now: float) -> list[StreamRecord]:
        self._forget(now)
        return [
            StreamRecord(
                record.stream,
                record.choice,
                record.tokens.tolist(),
                record.finish,
                record.stop_token,
            )
            for stream in streams
            for record in self._streams.get(stream, ())
        ]

    def _forget(self, now: float) -> None:
        ended = self._ended
        while ended:
            oldest = next(iter(ended.values()))
            if now - oldest.ended < KEEP_SECONDS and self._tokens <= KEEP_TOKENS:
                return
            del ended[oldest.id]
            self._tokens -= len(oldest.tokens) + _OF_EACH
            of_stream = self._streams[oldest.stream]
            of_stream.remove(oldest)
            if not of_stream:
                del self._streams[oldest.stream]
