"""RequestPreparation: prepares new requests before they are queued.

It checks each request. Then a grammar may have to be compiled, or blocks pulled from another
replica.
"""

from engine.errors import MantaError
from engine.lora.tiers.store import AdapterStore
from engine.messages import Delta, EngineRequest, KVSource
from engine.scheduling.moves.block_moves import BlockMoves
from engine.scheduling.request import Request, validate
from engine.scheduling.scheduler import Scheduler
from engine.structured.constraint import Constraint
from engine.structured.preparing import Grammars
from engine.structured.token_limits import TokenLimits


class RequestPreparation:
    """The requests that wait for a grammar or for another replica's blocks before they are queued.

    preparing: id -> waiting request.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        adapters: AdapterStore,
        grammars: Grammars,
        moves: BlockMoves | None,
        outbox: list[Delta],
    ) -> None:
        """Set up the preparation.

        outbox: gets the deltas of requests that end before they are queued.
        """
        self.preparing: dict[int, Request] = {}
        self._scheduler, self._adapters, self._grammars = scheduler, adapters, grammars
        self._moves, self._outbox = moves, outbox

    def add(self, message: EngineRequest, *, pulls: bool) -> None:
        """Check a request, and queue it now or later; a request that cannot run gets an error
        delta.

        pulls: whether blocks may be pulled from other replicas now.
        """
        try:
            if message.id in self._scheduler.requests or message.id in self.preparing:
                raise MantaError(f"request id {message.id} is in use", code="duplicate_id")
            adapter = self._adapters.find(message.adapter) if message.adapter else None
            virtual = 0 if adapter is None else adapter.info.virtual_tokens
            validate(message, self._scheduler.config, virtual)
        except MantaError as error:
            text = f"{error.code}: {error.message}"
            self._outbox.append(Delta(message.id, [], "error", error=text))
            return
        request = Request(message, self._scheduler.config, self._scheduler.next_arrival(), adapter)
        done = len(request.token_ids) >= request.limit
        if done and not (request.pooled or request.prompt_logprobs or request.routes):
            # No token is left to sample: the request was resumed after its last token, or
            # max_tokens is 0.
            self._outbox.append(Delta(message.id, [], "length", cached=0))
            return
        if message.source is not None and pulls and self._pull(request, message.source):
            self.preparing[request.id] = request
            return
        self._constrain(request)

    def _pull(self, request: Request, source: KVSource) -> bool:
        """Begin to pull a request's prefix from another replica; return whether the request waits.

        Nothing is pulled if the request cannot share blocks.
        """
        moves, scheduler = self._moves, self._scheduler
        if moves is None or not scheduler.shares(request):
            return False
        (pool,) = scheduler.memory.pools
        count = (len(request.token_ids) - 1) // self._scheduler.config.block_size
        return moves.pull(request, source, pool, pool.hash_prefix(request, count))

    def take_moves(self, moves: BlockMoves) -> None:
        """Poll the moves, and queue the requests whose pulls have ended, with or without
        success."""
        scheduler = self._scheduler
        (pool,) = scheduler.memory.pools
        for id in moves.poll(pool, scheduler.step, scheduler.done_step):
            request = self.preparing.pop(id, None)
            if request is not None:  # None if it was aborted meanwhile
                self._constrain(request)

    def _constrain(self, request: Request) -> None:
        """Queue a request, or begin to compile its grammar first."""
        params, output = request.params, request.token_ids[request.num_prompt :]
        vocab_size = self._scheduler.config.vocab_size
        limits: TokenLimits | None = None
        if params.allowed_token_ids or params.bad_words_ids:
            limits = TokenLimits(params.allowed_token_ids, params.bad_words_ids, vocab_size)
        if params.structured is not None:
            self.preparing[request.id] = request
            self._grammars.ask(
                request.id,
                params.structured,
                output,
                stop_ids=params.stop_token_ids,
                min_tokens=request.min_tokens,
                ignore_eos=params.ignore_eos,
                thinking=params.thinking,
                limits=limits,
            )
            return
        if limits is not None:
            request.constraint = Constraint.without_grammar(
                vocab_size, request.stop_ids, request.min_tokens, limits, output
            )
        self._scheduler.add_request(request)

    def take_prepared(self) -> None:
        """Queue requests whose grammars are compiled, and end requests whose grammars failed."""
        for id, prepared in self._grammars.poll():
            request = self.preparing.pop(id, None)
            if request is None:
                continue  # aborted meanwhile
            if not isinstance(prepared, Constraint):
                text = f"{prepared.code}: {prepared.message}"
                self._outbox.append(Delta(id, [], "error", error=text))
            elif prepared.complete:  # the request was resumed after its last token
                self._outbox.append(Delta(id, [], "stop", cached=0))
            else:
                request.constraint = prepared
                self._scheduler.add_request(request)
