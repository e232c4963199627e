"""ApiOptions: the operator's settings for the HTTP API, and the services behind its routes."""

import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from deployments.api.batch_folder import BatchFolder
from deployments.api.caller import KeyRule
from deployments.api.key_limits import KeyLimits
from deployments.images.intake import ImageIntake

# (request id, id of the owner's key or None for all keys) -> one trace per prompt with this id
Explain = Callable[[str, str | None], Awaitable[list[dict[str, Any]]]]
# () -> the live view of each router.
Live = Callable[[], Awaitable[list[dict[str, Any]]]]


class Stop(Protocol):
    """A function that ends the running requests with an id, at all routers."""

    async def __call__(self, request_id: str, owner: str | None, partial: bool = False) -> int:
        """End the requests with this id at all routers, and return the number of prompts ended.

        owner: Caller.id of the caller, whose own requests alone are ended; None: any caller's.
        partial: whether an ended request is answered with its output so far instead of an error.
        """
        ...


class ModelChanges(Protocol):
    """The interface for the status and for changes of the models, on an endpoint of several
    models."""

    def status(self, model: str) -> str:
        """Return a model's status: ready, starting, or sleeping (the next request wakes it)."""
        ...

    async def trouble(self, model: str) -> dict[str, str]:
        """Return {"message": why a model does not start}; {} if no reason is known.

        The key "status" is "failed" after a failure, and missing while the model waits for
        resources.
        """
        ...

    async def put_model(self, name: str, section: Mapping[str, Any]) -> None:
        """Add a model, or change it. section: the keys of `models.NAME`. Raises ConfigError."""
        ...

    async def remove(self, name: str) -> None:
        """Remove a model from the endpoint. Raises MantaError (model_not_found)."""
        ...


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The engine settings that trainers read.

    model: the name that requests use. dtype: such as "bfloat16"; "": unknown.
    logprobs_mode: the default mode of requests. replicas: the number of replicas.
    tensor_parallel, pipeline_parallel: number of ranks per pipeline stage, and of stages, of a
        replica.
    """

    model: str
    max_model_len: int
    dtype: str
    logprobs_mode: str
    replicas: int
    tensor_parallel: int
    pipeline_parallel: int


class Training(Protocol):
    """The interface for a trainer's orders. model: the model's name; "": the only served model.

    version: name of the new weights; "": the next number. Methods raise MantaError.
    """

    async def update(self, model: str, folder: str, version: str) -> str:
        """Replace the weights at all replicas by a checkpoint, and return its version's name."""
        ...

    async def init_transfer(self, model: str, info: dict[str, Any]) -> None:
        """Make all replicas join a trainer's process group. info: vLLM's `init_info`."""
        ...

    async def start_update(self, model: str) -> None: ...

    async def take_tensors(self, model: str, info: dict[str, Any], version: str) -> str:
        """Pass tensors from a trainer to all replicas. info: vLLM's `update_info`.

        Without a preceding `start_update` the weights are replaced at once, and their version is
        returned. After `start_update` the return value is "".
        """
        ...

    async def finish_update(self, model: str, version: str) -> str:
        """Replace the weights by the tensors of the update; return the version's name."""
        ...

    async def begin_sent(self, model: str) -> None:
        """Begin an update by SGLang's routes, which `end_sent` ends."""
        ...

    async def take_sent(self, model: str, info: dict[str, Any], version: str) -> str:
        """Pass tensors of an update by SGLang's routes to all replicas. info: see `take_tensors`.

        Returns the version of the weights if these tensors complete the update; else "".
        """
        ...

    async def end_sent(self, model: str) -> str:
        """Replace the weights by the tensors that were sent; return the version, "" without any."""
        ...

    async def pause(self, model: str, mode: str) -> None: ...
    async def resume(self, model: str) -> None: ...

    async def sleep(self, model: str, level: int, tags: Sequence[str], mode: str) -> None:
        """Pause all replicas and free memory of their engines.

        level: as in `engine.LLM.sleep`; 0: only pause.
        tags: the kinds of memory to free; (): all.
        mode: mode of the pause, which decides what happens to running requests.
        """
        ...

    async def wake(self, model: str, tags: Sequence[str]) -> None: ...
    async def reset_prefix_cache(self, model: str) -> None: ...

    async def state(self, model: str) -> dict[str, Any]:
        """Return the state of the model and of each replica: weights version, pause, sleep, and
        whether weights were dropped."""
        ...

    async def engine(self, model: str) -> "EngineFacts":
        """Return the settings that the engines of all replicas share."""
        ...


@dataclass(frozen=True, slots=True)
class ApiOptions:
    """The operator's settings for the HTTP API, and the services behind its routes. strict: refuse
    unknown request fields instead of listing them in x-ignored-fields.

    api_keys: SHA-256 digests (32 bytes each) of the accepted keys; empty: no authentication. With
        keys, every route but /health and /ready needs one.
    admin_keys: digests of the keys that may also change what is served.
        Without them the admin routes are closed if api_keys are set, and open to all if not.
    rules: digest of a key -> its rights and limits; other keys have NO_RULE. Admin keys, and all
        callers if no keys are configured, may set any priority.
    limits: counter of requests and tokens against the keys' rules; None: nothing is counted.
    share_prefixes: whether requests of different keys share prefix-cache blocks.
    max_body_bytes: a larger body is refused before it is read; 4 MiB is about a million tokens of
        English.
    body_timeout_s: seconds within which the body of a request must arrive.
    max_prompts: maximum number of prompts of a completions request, each with n choices.
    max_choices: maximum number of choices of all prompts of a request together.
    max_tokens: maximum tokens of an answer, and the default of requests; None: only the context
        limits the answer.
    max_in_flight: maximum number of concurrent generation requests; more are answered 503 with
        Retry-After. It bounds the router's memory, as each waiting request holds its tokens and a
        connection.
    share_by: what identifies a tenant for fair queueing: "api_key", "user" (the field) or the name
        of a header in lower case.
    deadline_s: the default deadline of requests in seconds; None: no deadline.
    cors_origins: origins of web pages that may call the API, e.g. "https://chat.example.com"; "*":
        any.
    keepalive_s: seconds between the keep-alive comments of a stream that waits for its first
        token; 0: none.
    template_kwargs: the variables that chat_template_kwargs may set; other variables could change
        what the template means.
    store_bytes: maximum bytes of stored answers of /v1/responses; 0: none are stored.
    images: the reader of images in requests, within the operator's limits.
    page: whether /page is served, and /v1/live for it.
    batches: the batch folder of /v1/files and /v1/batches; None: these routes are off.
    models: the changes of served models; None: the only model never changes.
    training: the orders of trainers; None: the trainers' routes are off.
    event_secret: the secret that signs event ids, equal for all routers of an application, at most
        64 bytes.
    tell_request_id: whether answers have x-request-id; False if Serve itself adds the header.
    metrics: returns the text of /metrics (Prometheus exposition format).
    explain: returns the traces of a request, for /v1/requests/{id}; see router/request_trace.py.
    stop: ends requests, for /stop_generate and /abort_requests.
    live: returns the live views of all routers, for /v1/live; see router/live_view.py.
    observe: called after each request with (route, status, seconds); route is one of a fixed set.
    """

    strict: bool = False
    api_keys: frozenset[bytes] = frozenset()
    admin_keys: frozenset[bytes] = frozenset()
    rules: Mapping[bytes, KeyRule] = field(default_factory=dict)
    limits: KeyLimits | None = None
    share_prefixes: bool = False
    max_body_bytes: int = 4 * 1024 * 1024
    body_timeout_s: float = 30.0
    max_prompts: int = 32
    max_choices: int = 256
    max_tokens: int | None = None
    max_in_flight: int = 4096
    share_by: str = "api_key"
    deadline_s: float | None = None
    cors_origins: frozenset[str] = frozenset()
    keepalive_s: float = 5.0
    template_kwargs: frozenset[str] = field(
        default=frozenset(
            {"enable_thinking", "thinking", "reasoning_effort", "documents", "date_string"}
        )
    )
    store_bytes: int = 0
    images: ImageIntake = field(default_factory=ImageIntake)
    page: bool = False
    batches: BatchFolder | None = None
    models: ModelChanges | None = None
    training: Training | None = None
    event_secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    tell_request_id: bool = True
    metrics: Callable[[], Awaitable[str]] | None = None
    explain: Explain | None = None
    stop: Stop | None = None
    live: Live | None = None
    observe: Callable[[str, int, float], None] | None = None

    @property
    def max_image_body_bytes(self) -> int:
        """The maximum bytes of a body if a served model takes images."""
        return max(self.max_body_bytes, self.images.limits.body_bytes)

    def __post_init__(self) -> None:
        if any(len(digest) != 32 for digest in self.api_keys | self.admin_keys):
            raise ValueError("api_keys and admin_keys must be SHA-256 digests of 32 bytes")
