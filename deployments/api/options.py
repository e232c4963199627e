"""ApiOptions: what the operator decides about the HTTP API."""

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

        owner: digest of the key that asks; None may end any.
        partial: whether a request's answer is the output so far; else it is an error.
        """
        ...


class ModelChanges(Protocol):
    """The interface to the models of an endpoint of several: their status, and changes to them."""

    def status(self, model: str) -> str:
        """Return a model's status: ready, starting, or sleeping (the next request wakes it)."""
        ...

    async def trouble(self, model: str) -> dict[str, str]:
        """Return why a model does not start; {} if nothing is known to be wrong.

        `message` says why, and `status` is there where the status is failed.
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

    model: the name that requests use. dtype: as in "bfloat16"; "": unknown.
    logprobs_mode: the mode of requests that name none. replicas: their number.
    tensor_parallel, pipeline_parallel: the ranks of a replica's stage, and its stages.
    """

    model: str
    max_model_len: int
    dtype: str
    logprobs_mode: str
    replicas: int
    tensor_parallel: int
    pipeline_parallel: int


class Training(Protocol):
    """The orders that a trainer may give. model: "" where one is served.

    Methods raise MantaError.
    """

    async def update(self, model: str, folder: str, version: str) -> str:
        """Replace the weights at all replicas by a checkpoint, and return its version's name."""
        ...

    async def init_transfer(self, model: str, info: dict[str, Any]) -> None:
        """Make all replicas join a trainer's group. info: vLLM's `init_info`."""
        ...

    async def start_update(self, model: str) -> None: ...

    async def take_tensors(self, model: str, info: dict[str, Any], version: str) -> str:
        """Pass tensors from a trainer to all replicas. info: vLLM's `update_info`.

        Returns the version of the weights if they were replaced, which they are where no
        `start_update` has come before; else "".
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
        """Replace the weights by tensors that were sent; return the version, "" without them."""
        ...

    async def pause(self, model: str, mode: str) -> None: ...
    async def resume(self, model: str) -> None: ...

    async def sleep(self, model: str, level: int, tags: Sequence[str], mode: str) -> None:
        """Pause all replicas and free memory of their engines. tags: the parts; none = all."""
        ...

    async def wake(self, model: str, tags: Sequence[str]) -> None: ...
    async def reset_prefix_cache(self, model: str) -> None: ...

    async def state(self, model: str) -> dict[str, Any]:
        """Return version, paused, sleeping, dropped weights, and the same of each replica."""
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
    admin_keys: the same of keys that may change what is served, and do all that the others may.
        Without them the admin routes are closed if api_keys are set, and open to all if not.
    rules: of these keys, what each may do; NO_RULE for those not in it. Admin keys may set any
        priority; so may all callers where keys are not used.
    limits: counts requests and tokens of keys against their rules; None: nothing is counted.
    share_prefixes: requests of different keys share the prefix cache.
    max_body_bytes: a larger body is refused before it is read; 4 MiB is about a million tokens of
        English.
    body_timeout_s: seconds in which the body of a request must have arrived.
    max_prompts: in one completions request; each becomes n requests to the engines.
    max_choices: the most choices of all prompts of a request together.
    max_in_flight: generation requests at once; more are answered 503 with Retry-After. Bounds the
        router's memory: waiting requests hold their tokens and a connection each.
    share_by: by what waiting requests take turns: "api_key", "user" (the field) or the
        name of a header in lower case.
    deadline_s: seconds in which an answer must have ended that names no deadline; None: any time.
    cors_origins: origins of web pages that may ask, e.g. "https://chat.example.com"; "*" is any.
    keepalive_s: seconds between the signs of life of a stream that waits for its first token; 0:
        none.
    template_kwargs: names that chat_template_kwargs may set; others could change what the template
        means.
    store_bytes: room for answers of /v1/responses that are kept for later turns; 0: none are.
    images: reads the images of requests, within the operator's limits.
    page: the page at /page is served, and /v1/live for it.
    batches: where /v1/files and /v1/batches keep theirs; None: there are none.
    models: changes what is served; None where there is one model for good.
    training: what trainers may order; None: nothing.
    event_secret: signs the ids of events; the same for all routers of an application, at most 64
        bytes.
    tell_request_id: put x-request-id into answers; False where something in front of us does.
    metrics: gives the text of /metrics (Prometheus exposition format).
    explain: what routers know of a request, for /v1/requests/{id}; see router/request_trace.py.
    stop: for /stop_generate and /abort_requests.
    live: what all routers know at this moment, for /v1/live; see router/live.
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
        """The most bytes of a body where a served model takes images."""
        return max(self.max_body_bytes, self.images.limits.body_bytes)

    def __post_init__(self) -> None:
        if any(len(digest) != 32 for digest in self.api_keys | self.admin_keys):
            raise ValueError("api_keys and admin_keys must be SHA-256 digests of 32 bytes")
