"""Backend: the interface through which the HTTP API runs requests.

From the serving layer, `api/` imports only this module and the adapter records in
`deployments/adapters/`. The router implements the interface with channels to engine replicas; tests
use a fake backend.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from deployments.adapters.record_store import AdapterRecord
from deployments.checkpoints.facts import ModelFacts
from engine.errors import Overloaded
from engine.images.image import Image
from engine.images.processor import ImageProcessor
from engine.messages import Delta, EngineStats
from engine.pooling import Pooling
from engine.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer

DRAINING = "the service is about to stop"


def draining() -> Overloaded:
    """Return the error for a request that arrives while the service is shutting down."""
    return Overloaded(DRAINING, code="draining", retry_after=5)


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The description of a model or an adapter under the name `id`, which requests use."""

    id: str
    max_model_len: int  # tokens of prompt and output together, minus an adapter's virtual tokens
    vocab_size: int  # width of the logits; token ids are below it
    eos_token_ids: tuple[int, ...]
    created: int  # Unix seconds
    root: str = ""
    parent: str | None = None  # base model of an adapter
    seed: int | None = None  # EngineConfig.seed of the replicas
    fingerprint: str = ""  # hash of weights and server version; OpenAI's system_fingerprint
    pooling: Pooling | None = None  # how embeddings are computed; None: the model has no embeddings
    vector_size: int = 0  # number of elements of an embedding
    aliases: tuple[str, ...] = ()  # patterns of alternative names of the model; empty for adapters
    facts: ModelFacts = field(default_factory=ModelFacts, compare=False)
    # How images become pixels and tokens; None: the model takes text only.
    images: ImageProcessor | None = field(default=None, compare=False)
    # maximum embeddings of an image; 0: no replica has reported it
    image_tokens: int = 0
    images_off: bool = False  # whether `engine.images: off` is set for a multimodal model


@dataclass(slots=True)
class GenerationRequest:
    """A validated and tokenised prompt, for which n choices are generated with one seed."""

    # The client's request id, or a new one; used only in logs and headers, as it need not be
    # unique.
    request_id: str
    model: str
    token_ids: list[int]
    params: SamplingParams
    seed: int  # the client's, derived from EngineConfig.seed and the prompt, or random
    cache_salt: str = ""
    # The record has a fixed revision, so that all replicas use the same adapter weights.
    adapter: AdapterRecord | None = None
    priority: int = 0
    deadline: float | None = None  # time.monotonic() seconds
    session: bytes = b""  # digest of the client's session; b"": none
    key: str = ""  # the tenant for fair queueing
    owner: str = ""  # digest of the API key; only this key may query the request's state
    # Id under which replicas remember the output tokens for a while (StreamMemory); "": not
    # remembered.
    stream: str = ""
    # For a resumed stream: the output tokens that each choice already has; None: the choice has
    # ended.
    emitted: list[list[int] | None] = field(default_factory=list)
    # Identity of the weights (ModelIdentity) that generated `emitted`; "": unknown.
    weights: str = ""
    prediction: list[int] = field(default_factory=list)  # token ids expected in the output
    speculate: bool = True  # whether the engine may use speculative decoding
    images: list[Image] = field(default_factory=list)  # the prompt's images, in order
    verbatim: bool = False  # whether the client sent the prompt as token ids; see EngineRequest
    # Whether the output is read only once all choices have ended: `Generation.next` waits for that.
    whole: bool = False
    trace: tuple[str, str] = ("", "")  # W3C's traceparent and tracestate headers, unchanged

    @property
    def adapter_key(self) -> str:
        """The adapter as "name@revision"; "" for the base model."""
        return "" if self.adapter is None else self.adapter.key


@dataclass(frozen=True, slots=True)
class RecalledChoice:
    """The output of a stream's choice that a replica remembers.

    stream: `GenerationRequest.stream`. choice: index of the choice in its request.
    weights: identity of the replica's weights, as in ModelIdentity.
    """

    stream: str
    choice: int
    token_ids: list[int]
    finish: str  # as in Delta; "" if the choice did not end at that replica
    stop_token: int | None
    weights: str


@dataclass(frozen=True, slots=True)
class Timing:
    """The timing of a request that its client cannot measure.

    queue_s: seconds from arrival at the router to the first engine step, for the choice with the
        longest wait.
    migrations: number of moves of choices to another replica after losing theirs.
    replicas: names of the replicas that ran the request, in order.
    """

    queue_s: float = 0.0
    migrations: int = 0
    replicas: tuple[str, ...] = ()


class Generation(Protocol):
    """The interface of a running generation: the n choices of one prompt.

    A generation continues when its replica changes, and each choice ends exactly once.
    """

    async def next(self) -> list[tuple[int, Delta]]:
        """Wait until there is a delta, and return (index of the choice, delta) for all deltas since
        the last call.

        If the request is `whole`, this waits for the end of all choices, and merges each choice's
        deltas. Returns [] after the last choice has finished. Raises MantaError if the whole
        request fails.
        """
        ...

    def abort(self, choice: int | None = None) -> None:
        """Abort one choice, or all choices if `choice` is None, and free their resources.

        Idempotent, and allowed after the end. Callers must ignore deltas of an aborted choice.
        """
        ...

    def versions(self, choice: int) -> list[tuple[str, int]]:
        """Return (weights version, number of tokens) of each part of a choice's output, in order.

        choice: index of the choice.
        """
        ...

    def timing(self) -> Timing:
        """Return the timing of the request so far."""
        ...


@dataclass(slots=True)
class BackendState:
    """The router's view of its replicas, as of their last engine steps, for /ready and /metrics."""

    replicas: dict[str, EngineStats] = field(default_factory=dict)
    in_flight: int = 0
    queued: int = 0  # number of choices that wait for room at a replica
    queued_tokens: int = 0  # prompt tokens and expected output tokens of these choices
    draining: bool = False  # whether the service is shutting down and refuses new requests


class AdapterDirectory(Protocol):
    """The interface for the adapters of all models; see
    `deployments.adapters.registry.AdapterRegistry`."""

    @property
    def records(self) -> Mapping[str, AdapterRecord]: ...

    async def refresh(self) -> None: ...

    async def pin(self, name: str) -> AdapterRecord: ...

    async def add(self, name: str, path: str = "", model: str = "") -> AdapterRecord:
        """Add an adapter, and return its record. Raises MantaError.

        path: path or URL of the adapter's files.
        model: the base model's name; "" if only one model is served.
        """
        ...

    async def remove(self, name: str, model: str = "") -> AdapterRecord:
        """Remove an adapter, and return its record. Raises MantaError.

        model: the base model's name; "" if only one model is served.
        """
        ...

    def by_model(self) -> list[tuple[str, AdapterRecord]]:
        """Return (base model's name, record) for all adapters."""
        ...


class Backend(Protocol):
    @property
    def adapters(self) -> AdapterDirectory: ...

    @property
    def only(self) -> str:
        """The name of the only served model; "" if there are several."""
        ...

    def models(self) -> Mapping[str, ModelCard]:
        """Return the cards of models and adapters, by the names that requests use.

        Adapter names have no revision here.
        """
        ...

    def tokenizer(self, model: str) -> Tokenizer: ...

    def admit(self, key: str, priority: int, model: str) -> None:
        """Check that a new request of this key and priority would be admitted now.

        The API calls this method before it tokenises a request. Raises Overloaded.

        model: name of the model; "" if not yet known.
        """
        ...

    def generate(self, request: GenerationRequest) -> Generation:
        """Start a request without blocking.

        Raises MantaError (overloaded, no replica) here or later from `next`.
        """
        ...

    async def recall(
        self,
        model: str,
        streams: Sequence[str],
        enough: Callable[[list[RecalledChoice]], bool],
    ) -> list[RecalledChoice]:
        """Return the choices of the given streams that the model's replicas remember.

        streams: values of `GenerationRequest.stream`.
        enough: returns whether the choices so far suffice; if so, no further replica is waited for.
        """
        ...

    def state(self) -> BackendState: ...

    def ready(self) -> bool:
        """Whether at least one replica can take requests."""
        ...

    def starting(self) -> bool:
        """Whether no model has had a replica yet, nor gets one for the next request."""
        ...
