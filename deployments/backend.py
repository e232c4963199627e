"""Backend: the interface between the HTTP API (and the Python client) and what runs the requests.

Of what is behind it, `api/` knows this file, and the adapters' records in `deployments/adapters/`.
Tests drive it with a fake; the router implements it over channels to engine replicas.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from deployments.adapters.record_store import AdapterRecord
from deployments.checkpoints.facts import ModelFacts
from engine.errors import Overloaded
from engine.messages import Delta, EngineStats
from engine.pooling import Pooling
from engine.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer

DRAINING = "the service is about to stop"


def draining() -> Overloaded:
    """Return the error of a request that comes while the service stops."""
    return Overloaded(DRAINING, code="draining", retry_after=5)


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A name that requests may use for a model."""

    id: str
    max_model_len: int  # tokens, prompt and output; an adapter's virtual tokens are taken off
    vocab_size: int  # width of the logits; token ids are below it
    eos_token_ids: tuple[int, ...]
    created: int  # Unix seconds
    root: str = ""
    parent: str | None = None  # base model of an adapter
    seed: int | None = None  # EngineConfig's, of the replicas
    fingerprint: str = ""  # of weights and server: with a seed, what the same numbers depend on
    pooling: Pooling | None = None  # how texts become vectors; None: they do not
    vector_size: int = 0  # elements of a vector
    aliases: tuple[str, ...] = ()  # patterns of other names for it; an adapter's are not used
    facts: ModelFacts = field(default_factory=ModelFacts, compare=False)


@dataclass(slots=True)
class GenerationRequest:
    """A prompt, validated and tokenised. n choices of it are generated with one seed."""

    request_id: str  # the caller's or ours; for logs and headers only, never a key in a table
    model: str
    token_ids: list[int]
    params: SamplingParams
    seed: int  # resolved
    cache_salt: str = ""
    adapter: AdapterRecord | None = None  # as it was pinned: a move keeps the same weights
    priority: int = 0
    deadline: float | None = None  # time.monotonic() seconds
    key: str = ""  # the tenant: waiting requests are served in turn by key
    owner: str = ""  # digest of the API key, which alone may ask what became of the request
    stream: str = ""  # replicas keep its tokens under this name for a while; "": they do not
    # Of a resumed stream: the tokens that each choice begins with; None: the choice has ended.
    emitted: list[list[int] | None] = field(default_factory=list)
    weights: str = ""  # of the model that emitted these (ModelIdentity); "" if unknown
    trace: tuple[str, str] = ("", "")  # W3C's traceparent and tracestate, as they came

    @property
    def adapter_key(self) -> str:
        """The adapter as "name@revision"; "" is the model itself."""
        return "" if self.adapter is None else self.adapter.key


@dataclass(frozen=True, slots=True)
class RecalledChoice:
    """A choice as known to a replica that has or had it.

    weights: the weights of its model, as of ModelIdentity
    """

    stream: str
    choice: int
    token_ids: list[int]
    finish: str  # as in a Delta; "" if the choice did not end there
    stop_token: int | None
    weights: str


@dataclass(frozen=True, slots=True)
class Timing:
    """The part of a request's timing that its client cannot measure.

    queue_s: the seconds from arrival at the router to the first step in an engine, of the choice
        that waited longest
    migrations: how often a choice went on at another replica after losing its own
    replicas: the replicas where the request has been, in order
    """

    queue_s: float = 0.0
    migrations: int = 0
    replicas: tuple[str, ...] = ()


class Generation(Protocol):
    """The n choices of one prompt in flight.

    Survives a change of replica; ends exactly once for each choice.
    """

    async def next(self) -> list[tuple[int, Delta]]:
        """Wait for at least one (choice, delta); return all since the last call, in order.

        After the last choice has finished it returns []. Raises MantaError when the request as a
        whole cannot go on.
        """
        ...

    def abort(self, choice: int | None = None) -> None:
        """Stop one choice (its text met a stop string), or all, and free what they hold.

        Idempotent; legal after the end. An aborted choice may still deliver deltas; callers ignore
        them.
        """
        ...

    def timing(self) -> Timing:
        """Return the timing of the request so far."""
        ...


@dataclass(slots=True)
class BackendState:
    """The router's knowledge of its replicas, one step old, for /ready and /metrics."""

    replicas: dict[str, EngineStats] = field(default_factory=dict)
    in_flight: int = 0
    queued: int = 0  # choices that wait for room at a replica
    queued_tokens: int = 0  # work of the choices that wait
    draining: bool = False  # new requests are refused, for good


class AdapterDirectory(Protocol):
    """The adapters of all models; see `deployments.adapters.registry.Adapters`."""

    @property
    def records(self) -> Mapping[str, AdapterRecord]: ...

    async def refresh(self) -> None: ...

    async def pin(self, name: str) -> AdapterRecord: ...

    async def add(self, name: str, path: str = "", model: str = "") -> AdapterRecord:
        """Add an adapter. model: the base model's name; "" where it is in no doubt."""
        ...

    async def remove(self, name: str, model: str = "") -> AdapterRecord:
        """Remove an adapter. model: as of `add`."""
        ...

    def by_model(self) -> list[tuple[str, AdapterRecord]]:
        """Return all adapters, each with its base model's name."""
        ...


class Backend(Protocol):
    @property
    def adapters(self) -> AdapterDirectory: ...

    def models(self) -> Mapping[str, ModelCard]:
        """Return the model cards by the names that requests use.

        Adapters are there too, by their bare names.
        """
        ...

    def tokenizer(self, model: str) -> Tokenizer: ...

    def admit(self, key: str, model: str) -> None:
        """Check that a request of this key to this model would be admitted now. Raises Overloaded.

        Called before the work of reading a request.

        model: the name of the model; "" where it is not known
        """
        ...

    def generate(self, request: GenerationRequest) -> Generation:
        """Start a request. Never blocks.

        Raises MantaError (overloaded, no replica), at once or from next().
        """
        ...

    async def recall(
        self,
        model: str,
        streams: Sequence[str],
        enough: Callable[[list[RecalledChoice]], bool],
    ) -> list[RecalledChoice]:
        """Return what the model's replicas know of requests with these `stream` names.

        The answers are all until `enough` says so, or until no replica is left to ask.
        """
        ...

    def state(self) -> BackendState: ...

    def ready(self) -> bool:
        """Whether at least one replica can take requests."""
        ...
