"""Grammars: creates the constraints of new requests on other threads than the step loop's."""

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

from engine.errors import InvalidRequest, MantaError
from engine.structured.compiler import Compiler, Vocabulary
from engine.structured.constraint import Constraint
from engine.structured.grammar import Grammar
from engine.structured.thinking import ThinkingBudget
from engine.structured.token_limits import TokenLimits

logger = logging.getLogger("manta.engine")

_THREADS = 2  # number of threads; more than one, so that a slow grammar does not delay others

Prepared = tuple[int, Constraint | MantaError]


class Grammars:
    """The creator of constraints: call `ask`, then `poll`, both on the step loop's thread.

    vocabulary: the model's vocabulary, or the error with which every request is refused.
    """

    def __init__(self, vocabulary: Vocabulary | InvalidRequest) -> None:
        self._refusal = vocabulary if isinstance(vocabulary, InvalidRequest) else None
        self._compiler = None if isinstance(vocabulary, InvalidRequest) else Compiler(vocabulary)
        self._executor = ThreadPoolExecutor(_THREADS, "grammars")
        self._done: SimpleQueue[Prepared] = SimpleQueue()
        self._wake: Callable[[], None] = lambda: None

    def on_ready(self, wake: Callable[[], None]) -> None:
        """Set the function to call, from any thread, when `poll` has a result."""
        self._wake = wake

    def has_news(self) -> bool:
        return not self._done.empty()

    def ask(
        self,
        id: int,
        grammar: Grammar,
        output: Sequence[int],
        *,
        stop_ids: Iterable[int] = (),
        min_tokens: int = 0,
        ignore_eos: bool = False,
        thinking: ThinkingBudget | None = None,
        limits: TokenLimits | None = None,
    ) -> None:
        """Begin to create the constraint of request `id`, which `poll` returns later.

        output: the request's tokens that were already sampled.
        stop_ids, min_tokens, ignore_eos, thinking, limits: see `Constraint`.
        """

        def make() -> Constraint:
            if self._refusal is not None:
                refusal = self._refusal
                raise InvalidRequest(refusal.message, param=refusal.param, code=refusal.code)
            assert self._compiler is not None
            matcher, use = self._compiler.matcher(grammar)
            vocabulary = self._compiler.vocabulary
            constraint = Constraint(
                matcher, vocabulary, stop_ids, min_tokens, ignore_eos, thinking, use, limits
            )
            if not constraint.resume(output):
                raise MantaError("the output so far does not fit the grammar")
            return constraint

        self._executor.submit(self._prepare, id, make)

    def _prepare(self, id: int, make: Callable[[], Constraint]) -> None:
        prepared: Constraint | MantaError
        try:
            prepared = make()
        except MantaError as error:
            prepared = error
        except Exception as error:
            logger.exception("a grammar could not be compiled")
            prepared = MantaError(f"the grammar could not be compiled: {type(error).__name__}")
        self._done.put((id, prepared))
        self._wake()

    def poll(self) -> list[Prepared]:
        """Return the constraints that were created, or failed, since the last call."""
        results = []
        while not self._done.empty():
            results.append(self._done.get())
        return results
