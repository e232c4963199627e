"""ApiOptions: the operator's choices for the HTTP API, and the services behind its routes."""

import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from deployments.api.batch_folder import BatchFolder
from deployments.api.caller import KeyRule
from deployments.api.key_limits import KeyLimits
from deployments.images.intake import ImageIntake

# (request id, owner's key or None for all keys) -> a trace for each prompt of the call.
Explain = Callable[[str, str | None], Awaitable[list[dict[str, Any]]]]
# () -> the live view of each router.
Live = Callable[[], Awaitable[list[dict[str, Any]]]]


class Stop(Protocol):
    """A function that ends the running requests of an id at all routers."""

    async def __call__(self, request_id: str, owner: str | None, partial: bool = False) -> int:
        """End the requests with this id at all routers, and return the number of prompts ended.

        owner: Caller.id of the caller, whose own requests alone are ended; None: any caller's.
        partial: whether a request is answered with its output so far, not with an error.
        """
        ...


class ModelChanges(Protocol):
    """The status of the models of an endpoint that serves several, and changes to the models."""

    def status(self, model: str) -> str:
        """Return a model's status: ready, starting, or sleeping (the next request wakes it)."""
        ...

    async def trouble(self, model: str) -> dict[str, str]:
        """Return {"message": why a model does not start}; {} if no reason is known.

        If the model's status is failed, `status` says so.
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
    """The engine settings that trainers ask for.

    model: the name that requests use. dtype: such as "bfloat16"; "": unknown.
    logprobs_mode: the mode of requests that name none. replicas: the number of replicas.
    tensor_parallel, pipeline_parallel: number of ranks of a replica's stage, and of its stages.
    """

    model: str
    max_model_len: int
    dtype: str
    logprobs_mode: str
    replicas: int
    tensor_parallel: int
    pipeline_parallel: int


class Training(Protocol):
    """The orders that a trainer may give. model: its name; "" where one model is served.

    version: a name for the new weights; "": a running number. Methods raise MantaError.
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

        Without a `start_update` before, replaces the weights by the tensors at once, and returns
        the version of the weights; else returns "".
        """
        ...

    async def finish_update(self, model: str, version: str) -> str:
        """Replace the weights by the tensors of the update; return the version's name."""
        ...

    async def begin_sent(self, model: str) -> None:
        """Begin an update in SGLang's way, which `end_sent` ends."""
        ...

    async def take_sent(self, model: str, info: dict[str, Any], version: str) -> str:
        """Pass tensors of an update to all replicas, as SGLang does. info: see `take_tensors`.

        Returns the version of the weights if these tensors have completed them; else "".
        """
        ...

    async def end_sent(self, model: str) -> str:
        """Replace the weights by the tensors that were sent; return the version, "" without any."""
        ...

    async def pause(self, model: str, mode: str) -> None: ...
    async def resume(self, model: str) -> None: ...

    async def sleep(self, model: str, level: int, tags: Sequence[str], mode: str) -> None:
        """Pause all replicas and free memory of their engines. tags: the parts to free; (): all."""
        ...

    async def wake(self, model: str, tags: Sequence[str]) -> None: ...
    async def reset_prefix_cache(self, model: str) -> None: ...

    async def state(self, model: str) -> dict[str, Any]:
        """Return the weights' version, whether paused, sleeping or without weights, and the same
        for each replica."""
        ...

    async def engine(self, model: str) -> "EngineFacts":
        """Return the settings that the engines of all replicas share."""
        ...


@dataclass(frozen=True, slots=True)
class ApiOptions:
    """The operator's choices for the HTTP API, and the services behind its routes. strict: refuse
    unknown request fields instead of naming them in x-ignored-fields.

    api_keys: SHA-256 digests (32 bytes each) of the accepted keys; empty = no authentication. With
        keys set, every route but /health and /ready needs one.
    admin_keys: digests of the keys that may also change what is served.
        Without them the admin routes are closed if api_keys are set, and open to all if not.
    rules: digest of a key -> its rights and limits; others have NO_RULE. Admin keys may set any
        priority; so may all callers where keys are not used.
    limits: counts requests and tokens of keys against their rules; None: nothing is counted.
    share_prefixes: requests of different keys share the prefix cache.
    max_body_bytes: a larger body is refused before it is read; 4 MiB is about a million tokens of
        English.
    body_timeout_s: seconds in which the body of a request must have arrived.
    max_prompts: maximum prompts of a completions request; each becomes n requests to the engines.
    max_choices: maximum number of choices of all prompts of a request together.
    max_tokens: most tokens of an answer, and the default of requests that set none; None: what the
        context leaves.
    max_in_flight: generation requests at once; more are answered 503 with Retry-After. Bounds the
        router's memory: waiting requests hold their tokens and a connection each.
    share_by: the tenants among which waiting requests take turns: "api_key", "user" (the field)
        or the name of a header in lower case.
    deadline_s: the deadline, in seconds, of requests that set none; None: no deadline.
    cors_origins: origins of web pages that may call, e.g. "https://chat.example.com"; "*": any.
    keepalive_s: seconds between the keep-alive comments of a stream that waits for its first
        token; 0: none.
    template_kwargs: names that chat_template_kwargs may set; others could change what the template
        means.
    store_bytes: room for answers of /v1/responses that are kept for later turns; 0: none are.
    images: reads the images of requests, within the operator's limits.
    page: whether /page is served, and /v1/live for it.
    batches: the folder of /v1/files and /v1/batches; None: these routes are off.
    models: changes the served models; None where there is one model for good.
    training: the orders of trainers; None: these routes are off.
    event_secret: signs the ids of events; the same for all routers of an application, at most 64
        bytes.
    tell_request_id: whether answers have x-request-id; False where Serve itself adds it.
    metrics: returns the text of /metrics (Prometheus exposition format).
    explain: returns the traces of a request, for /v1/requests/{id}; see router/request_trace.py.
    stop: ends requests, for /stop_generate and /abort_requests.
    live: returns the present state of all routers, for /v1/live; see router/live_view.py.
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
        """The maximum bytes of a body where a served model takes images."""
        return max(self.max_body_bytes, self.images.limits.body_bytes)

    def __post_init__(self) -> None:
        if any(len(digest) != 32 for digest in self.api_keys | self.admin_keys):
            raise ValueError("api_keys and admin_keys must be SHA-256 digests of 32 bytes")
