"""Configuration sections of the endpoint rather than of one of its models.

They are routers, HTTP, gRPC, logs, usage, batches, traces and limits. models.py combines them.
"""

import re
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from deployments.api.batch_folder import BatchSettings
from deployments.images.limits import ImageLimits
from deployments.observe.otlp import TracingSettings
from engine.images.picture_file import MAX_PIXELS

SECTION = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=False)
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://([a-z0-9.-]+|\[[0-9a-f:]+\])(:[0-9]{1,5})?")


class Section(BaseModel):
    model_config = SECTION


class RouterConfig(Section):
    """The routers: HTTP, tokenising, requests in flight, the choice of a replica."""

    replicas: int = Field(
        2,
        ge=1,
        le=256,
        description="Router processes, a fixed number. 2: one can fail.",
    )
    batch_replicas: int = Field(
        0,
        ge=0,
        le=256,
        description="Further routers, for batch work alone: for datasets (docs/ray-data.md) and "
        "the requests of batches. HTTP never reaches them. 0: none.",
    )
    num_cpus: float = Field(
        0.0,
        ge=0,
        le=64,
        description="CPU cores that Ray reserves for each router. 0: on a small machine the "
        "engines get all cores.",
    )
    wait_seconds: float = Field(
        30.0,  # a replaced replica of a small model is ready again by then
        ge=0,
        le=3600,
        description="Longest wait of a request, in seconds, for a replica that is ready (beyond "
        "it 503 no_replica) or has room (503 overloaded).",
    )
    losses: int = Field(
        1,
        ge=0,
        le=100,
        description="How many replicas, killed from outside, a request may lose without a new "
        "token, before it fails as their possible cause. Where engines die by "
        "themselves, it fails at the second death.",
    )
    heartbeat_seconds: float = Field(
        0.5,
        gt=0,
        le=60,
        description="Seconds between heartbeats on a channel, which connects a router and a "
        "replica.",
    )
    silence_seconds: float = Field(
        2.5,  # five heartbeats: a busy interpreter may miss one
        gt=0,
        le=600,
        description="Seconds of silence after which a channel counts as dead and its requests "
        "move.",
    )

    @property
    def processes(self) -> int:
        """The number of router processes, those for batch work included."""
        return self.replicas + self.batch_replicas

    @model_validator(mode="after")
    def _order(self) -> "RouterConfig":
        if self.silence_seconds < 2 * self.heartbeat_seconds:
            raise ValueError("silence_seconds must be at least twice heartbeat_seconds")
        return self


class TlsConfig(Section):
    """TLS at the proxy, 1.2 or later. In a cluster: docs/deploy.md."""

    certificate: str | None = Field(
        None,
        description="PEM file with the certificate and its intermediate certificates, read when "
        "the edge starts or is reloaded. Default none: plain HTTP.",
    )
    key: str | None = Field(
        None,
        description="PEM file with the certificate's key, not encrypted, not readable by every "
        "user.",
    )

    @model_validator(mode="after")
    def _both(self) -> "TlsConfig":
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key belong together; one of them is missing")
        return self


class HttpConfig(Section):
    """The HTTP proxy."""

    host: str = Field(
        "127.0.0.1",
        min_length=1,
        max_length=255,
        description="Address to listen on. Loopback: nothing is open to the network.",
    )
    port: int = Field(8000, ge=1, le=65535, description="Port to listen on.")  # Serve's default
    proxy: Literal["auto", "haproxy", "serve"] = Field(
        "auto",
        description="The proxy before the routers. haproxy takes far less CPU time than serve, "
        "Ray Serve's own. auto: haproxy where its binary is installed.",
    )
    max_stream_seconds: int = Field(
        3600,  # longer than any answer
        ge=1,
        le=7 * 86400,
        description="Longest time, in seconds, that a stream goes on while the proxy changes or "
        "its router is updated.",
    )
    api_keys_file: str | None = Field(
        None,
        description="File with one API key a line, or `sha256:` and its digest, readable by its "
        "owner only: docs/http.md. Default none: no key is asked for.",
    )
    admin_keys_file: str | None = Field(
        None,
        description="File of the keys that may also change what is served (/v1/adapters, and "
        "/v1/models where there are several). Default none: with api_keys_file no key may, "
        "without keys every client may change adapters.",
    )
    share_prefixes: bool = Field(
        False,
        description="Requests of different API keys share the prefix cache. Response times then "
        "tell one key what another has asked.",
    )
    cors_origins: list[str] = Field(
        default_factory=list,
        description="Origins of web pages that may send requests, such as "
        "https://chat.example.com; `*` is any. Default none: browsers keep all pages away. "
        "Without API keys a page named here can use the service through your browser.",
    )
    keepalive_seconds: float = Field(
        5.0,
        ge=0,
        le=600,
        description="Seconds without a token after which a stream sends its HTTP head, and then a "
        "comment line each time, for proxies (docs/http.md). 0: never.",
    )
    store_bytes: int = Field(
        0,
        ge=0,
        le=1 << 40,
        description="Bytes of memory for answers of /v1/responses that are kept for later turns, "
        "up to 30 days; the least recently used are dropped first. Only with "
        "`router.replicas: 1`. 0: none.",
    )
    page: bool = Field(
        True,
        description="Serve the page at /page: docs/page.md.",
    )
    tls: TlsConfig = Field(default_factory=TlsConfig)
    connections: int = Field(
        16384,  # twice what two routers have in flight
        ge=16,
        le=1_000_000,
        description="Client connections at once (haproxy); beyond them 503 overloaded. At most "
        "two fifths of the limit of open files.",
    )
    connections_per_address: int = Field(
        8192,
        ge=0,
        le=1_000_000,
        description="Connections from one address, at most half of `connections`; beyond them 429 "
        "too_many_connections. 0: no bound, for a service behind a proxy.",
    )
    strict: bool = Field(
        False,
        description="Refuse unknown request fields instead of naming them in x-ignored-fields.",
    )

    @property
    def loopback(self) -> bool:
        """Whether the HTTP service is reachable only from this machine."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    @property
    def exposed(self) -> str:
        """A warning about what clients in the network may do without an API key; "" if nothing."""
        if self.loopback or self.api_keys_file is not None:
            return ""
        admin = "" if self.admin_keys_file is not None else ", change adapters"
        return (
            f"http.host {self.host} is open to the network and no key is asked for: every client "
            f"that reaches port {self.port} may use it{admin} and read what became of all requests"
        )

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, value: list[str]) -> list[str]:
        for origin in value:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"{origin[:64]!r} is no origin: give scheme and host, and the port if it has "
                    "one, such as https://chat.example.com, or * for any"
                )
        return value


_HOST = re.compile(r"(\*\.)?[a-z0-9-]+(\.[a-z0-9-]+)*(:[0-9]{1,5})?")


class ImagesConfig(Section):
    """Images in requests. See docs/images.md."""

    per_request: int = Field(
        16, ge=0, le=1024, description="Most images of one request, earlier turns included."
    )
    frames: int = Field(
        128,
        ge=0,
        le=4096,
        description="Most frames of all clips of a request; a clip counts as one image, too.",
    )
    pixels: int = Field(
        MAX_PIXELS,
        ge=1024,
        le=2 * MAX_PIXELS,
        description="Most pixels of one image, and of all images that a router decodes at once, "
        "at up to 8 bytes each.",
    )
    file_bytes: int = Field(
        20 * 2**20, ge=1024, le=2**28, description="Most bytes of one image's file."
    )
    body_bytes: int = Field(
        32 * 2**20,
        ge=1024,
        le=2**30,
        description="`limits.body_bytes` where a served model takes images.",
    )
    memory_bytes: int = Field(
        2**30,
        ge=2**20,
        le=2**40,
        description="Most bytes of image files and pixels of one router's requests in flight; "
        "beyond them 503 overloaded. 1 GiB: 170 images of 1920 x 1080.",
    )
    hosts: list[str] = Field(
        default_factory=list,
        max_length=256,
        description="Hosts from which images are fetched by http(s) URLs, such as "
        "`images.example.com`, `*.example.com` or `example.com:8443`. Default none.",
    )

    @field_validator("hosts")
    @classmethod
    def _are_hosts(cls, hosts: list[str]) -> list[str]:
        for host in hosts:
            if not _HOST.fullmatch(host):
                raise ValueError(
                    f"{host[:64]!r} is no host: give a name in lower case, *.name for all names "
                    "below it, and :port unless it is 80 or 443"
                )
        return hosts

    def limits(self) -> ImageLimits:
        return ImageLimits(
            self.per_request,
            self.frames,
            self.pixels,
            self.file_bytes,
            self.body_bytes,
            self.memory_bytes,
            tuple(self.hosts),
        )


class GrpcConfig(Section):
    """The service over gRPC, with the host, keys and certificate of `http`. See docs/grpc.md."""

    port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="Port on each node that has a router; a node's routers share it. Default "
        "none: no gRPC.",
    )


class LogConfig(Section):
    """The level and the content of Serve's log files. See docs/observability.md."""

    level: Literal["info", "debug"] = Field(
        "info",
        description="info: lines for requests that failed or moved. debug: lines for each "
        "request, in router, replica and engine.",
    )
    format: Literal["text", "json"] = Field(
        "text", description="json: an object a line, with the request's id and Manta's fields."
    )


class UsageConfig(Section):
    """A file of the tokens that each API key has used. The same figures are in /metrics."""

    file: str | None = Field(
        None,
        min_length=1,
        max_length=4096,
        description="File on each machine that has a router, with a JSON line for each prompt "
        "that has ended. Budgets go on from its sums. Default none: budgets begin "
        "anew with the application.",
    )
    bytes: int = Field(
        64 * 2**20,
        ge=4096,
        le=1 << 40,
        description="Size at which the file is renamed to file.1, and file.1 to file.2. 64 MiB: "
        "about 200,000 prompts.",
    )
    files: int = Field(
        8,  # half a gigabyte
        ge=0,
        le=1000,
        description="Renamed files that are kept; the oldest are deleted.",
    )


class BatchConfig(Section):
    """/v1/files and /v1/batches: requests from a file, answered when there is room."""

    folder: str | None = Field(
        None,
        min_length=1,
        max_length=4096,
        description="Folder of files and batches, which all routers see: docs/http.md. Default "
        "none: no such routes.",
    )
    in_flight: int = Field(
        32,  # fills what others leave of a few replicas
        ge=1,
        le=4096,
        description="Batch requests that run at once, after all other requests.",
    )
    file_bytes: int = Field(
        200 * 2**20, ge=1024, le=1 << 40, description="The largest upload. 200 MiB: OpenAI's."
    )
    key_bytes: int = Field(
        10 * 2**30,  # 50 of the largest uploads
        ge=1024,
        le=1 << 50,
        description="Bytes of a key's files, results included, beyond which an upload is refused.",
    )
    key_batches: int = Field(
        100, ge=1, le=100_000, description="Most batches of a key that have not ended."
    )
    keep_days: float = Field(
        30.0,
        gt=0,
        le=3650,
        description="Days after which files, results and ended batches are removed. 30: OpenAI's.",
    )

    def settings(self) -> BatchSettings | None:
        """Return the settings of the batch routes; None if they are off."""
        if self.folder is None:
            return None
        return BatchSettings(
            self.folder,
            self.in_flight,
            self.file_bytes,
            self.key_bytes,
            self.key_batches,
            self.keep_days * 86400.0,
        )


class TracingConfig(Section):
    """Spans of requests for an OpenTelemetry collector. See docs/observability.md."""

    endpoint: str | None = Field(
        None,
        pattern=r"https?://[^/\s]+.*",
        max_length=2048,
        description="Address that takes OTLP over HTTP, such as http://127.0.0.1:4318; "
        "/v1/traces is added. Default none: no span is made.",
    )
    sample: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Share of the requests without a traceparent that is traced.",
    )
    service: str = Field(
        "manta", min_length=1, max_length=128, description="service.name of the spans."
    )
    headers: dict[str, str] = Field(
        default_factory=dict, description="Headers of each request to the collector, such as a key."
    )

    def settings(self) -> TracingSettings | None:
        """Return the settings of the span exporter; None if tracing is off."""
        if self.endpoint is None:
            return None
        return TracingSettings(self.endpoint, self.sample, self.service, self.headers)


class LimitsConfig(Section):
    """Bounds on what the service takes in."""

    in_flight: int = Field(
        4096,  # two routers then take half of http.connections
        ge=1,
        le=1_000_000,
        description="Requests in flight at one router; beyond them 503 overloaded.",
    )
    waiting: int = Field(
        1024,
        ge=0,
        le=1_000_000,
        description="Choices that may wait at one router while no replica is ready.",
    )
    queue_seconds: float | None = Field(
        None,
        gt=0,
        le=3600,
        description="Work that may wait at one router, in seconds at the replicas' measured "
        "speed; beyond it 503 overloaded with the time until there is room. Default: 0.75 of "
        "`scaling.ttft`, so that the first token comes within twice `scaling.ttft` (p99). A "
        "burst that fits into the free slots may wait four times as long.",
    )
    queue_tokens: int = Field(
        1_000_000,
        ge=1,
        le=10**12,
        description="Longest queue in tokens of prompts and expected outputs. Bounds the "
        "router's memory: about 40 bytes a token.",
    )
    share_by: str = Field(
        "api_key",
        pattern=r"^(api_key|user|x-[a-z0-9-]{1,62})$",
        description="What waiting requests take turns by: `api_key`, `user` (the request's "
        "field) or the name of a header, such as x-tenant. The last two are for a gateway in "
        "front: a client that can choose them can take more turns.",
    )
    deadline_seconds: float | None = Field(
        None,
        gt=0,
        le=7 * 86400,
        description="Seconds that a request without a deadline of its own (x-deadline-seconds) "
        "may take; then 408 deadline_exceeded.",
    )
    age_seconds: float = Field(
        5.0,
        gt=0,
        le=3600,
        description="Seconds of waiting that outweigh a difference of 1 in `priority`.",
    )
    body_bytes: int = Field(
        4 * 2**20,
        ge=1024,
        le=2**30,
        description="Most bytes of a request body.",
    )
    choices: int = Field(
        256,
        ge=1,
        le=4096,
        description="Most choices of one request: its prompts times `n`.",
    )
    max_tokens: int | None = Field(
        None,
        ge=1,
        le=2**31 - 1,
        description="Most tokens of an answer, also where a request sets none; 400 for one that "
        "asks for more. Default none.",
    )
    drain_seconds: float = Field(
        60.0,
        ge=0,
        le=3600,
        description="How long requests may go on at a replica that is to stop, before they move "
        "elsewhere, or end with an error when `manta serve` stops.",
    )
    restarts: int = Field(
        5,
        ge=0,
        le=1000,
        description="How often in an hour `manta serve` starts its own Ray and the application "
        "again when that Ray is lost. Beyond that it ends with exit code 1, for a supervisor; 0: "
        "at once.",
    )
    stall_seconds: float = Field(
        30.0,
        ge=1,
        le=3600,
        description="Seconds of one step after which its engine is replaced. Engines that hang "
        "are noticed earlier: docs/reliability.md.",
    )
