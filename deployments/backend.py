"""Backend: the interface by which the HTTP API has requests run.

`api/` imports nothing else of the serving layer but the adapter records in `deployments/adapters/`.
The router implements the interface over channels to engine replicas; tests use a fake backend.
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
    """Return the error of a request that arrives while the service is shutting down."""
    return Overloaded(DRAINING, code="draining", retry_after=5)


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The description of a model or an adapter under the name `id`, which requests use."""

    id: str
    max_model_len: int  # tokens of prompt and output, less an adapter's virtual tokens
    vocab_size: int  # width of the logits; token ids are smaller
    eos_token_ids: tuple[int, ...]
    created: int  # Unix seconds
    root: str = ""
    parent: str | None = None  # base model of an adapter
    seed: int | None = None  # EngineConfig.seed of the replicas
    fingerprint: str = ""  # hash of weights and server version; OpenAI's system_fingerprint
    pooling: Pooling | None = None  # how texts become embeddings; None: the model has no embeddings
    vector_size: int = 0  # elements of an embedding
    aliases: tuple[str, ...] = ()  # patterns of other names for the model; not used for adapters
    facts: ModelFacts = field(default_factory=ModelFacts, compare=False)
    # How images become pixels and tokens; None: the model takes text only.
    images: ImageProcessor | None = field(default=None, compare=False)
    images_off: bool = False  # whether a multimodal model takes no images by `engine.images: off`


@dataclass(slots=True)
class GenerationRequest:
    """A validated and tokenised prompt, of which n choices are generated with one seed."""

    # The client's id or a new one; used in logs and headers only, as it need not be unique.
    request_id: str
    model: str
    token_ids: list[int]
    params: SamplingParams
    seed: int  # the client's, one derived from EngineConfig.seed and the prompt, or a random one
    cache_salt: str = ""
    # The record has a fixed revision, so that another replica uses the same weights.
    adapter: AdapterRecord | None = None
    priority: int = 0
    deadline: float | None = None  # time.monotonic() seconds
    session: bytes = b""  # digest of the session that the client names; b"": none
    key: str = ""  # the tenant, by which waiting requests are shared fairly
    owner: str = ""  # digest of the API key; only its holder may ask for the request's outcome
    # Id under which replicas keep the output tokens for a while (StreamMemory); "": they do not.
    stream: str = ""
    # Of a resumed stream: the output tokens that each choice has already; None: it has ended.
    emitted: list[list[int] | None] = field(default_factory=list)
    # Weights (ModelIdentity) of the model that generated `emitted`; "" if unknown.
    weights: str = ""
    prediction: list[int] = field(default_factory=list)  # tokens expected in the output
    speculate: bool = True  # whether the engine may use drafts, which do not change the text
    images: list[Image] = field(default_factory=list)  # the prompt's images, in order
    verbatim: bool = False  # whether the client sent token ids; see EngineRequest
    trace: tuple[str, str] = ("", "")  # W3C's traceparent and tracestate headers, unchanged

    @property
    def adapter_key(self) -> str:
        """The adapter as "name@revision"; "" for the base model."""
        return "" if self.adapter is None else self.adapter.key


@dataclass(frozen=True, slots=True)
class RecalledChoice:
    """The output of a choice of a stream, as a replica remembers it.

    stream: `GenerationRequest.stream`. choice: index of the choice in its request.
    weights: identity of the replica's weights, as in ModelIdentity.
    """

    stream: str
    choice: int
    token_ids: list[int]
    finish: str  # as in a Delta; "" if the choice did not end at that replica
    stop_token: int | None
    weights: str


@dataclass(frozen=True, slots=True)
class Timing:
    """The parts of a request's timing that its client cannot measure.

    queue_s: seconds from arrival at the router to the first engine step, for the choice that waited
        longest.
    migrations: how often a choice moved to another replica after losing its own.
    replicas: names of the replicas that ran the request, in order.
    """

    queue_s: float = 0.0
    migrations: int = 0
    replicas: tuple[str, ...] = ()


class Generation(Protocol):
    """The running generation of the n choices of one prompt.

    A generation continues when its replica changes, and each choice ends exactly once.
    """

    async def next(self) -> list[tuple[int, Delta]]:
        """Wait for a delta, and return (index of the choice, delta) of all since the last call.

        Returns [] after the last choice has finished. Raises MantaError if the whole request fails.
        """
        ...

    def abort(self, choice: int | None = None) -> None:
        """Stop one choice, or all if `choice` is None, and free their resources.

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
    """The router's view of its replicas for /ready and /metrics, as of the last engine step."""

    replicas: dict[str, EngineStats] = field(default_factory=dict)
    in_flight: int = 0
    queued: int = 0  # number of choices that wait for room at a replica
    queued_tokens: int = 0  # prompt tokens and expected output tokens of these choices
    draining: bool = False  # whether the service is shutting down and refuses new requests


class AdapterDirectory(Protocol):
    """The adapters of all models; see `deployments.adapters.registry.Adapters`."""

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
        """Return pairs (base model's name, record) of all adapters."""
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

        An adapter's name has no revision here.
        """
        ...

    def tokenizer(self, model: str) -> Tokenizer: ...

    def admit(self, key: str, model: str) -> None:
        """Check that a new request with this key would be admitted now. Raises Overloaded.

        The API calls this method before it reads and parses the request.

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
        """Return the choices that the model's replicas remember of the given streams.

        streams: values of `GenerationRequest.stream`.
        enough: whether the choices so far suffice; then no further replica is waited for.
        """
        ...

    def state(self) -> BackendState: ...

    def ready(self) -> bool:
        """Whether at least one replica can take requests."""
        ...
