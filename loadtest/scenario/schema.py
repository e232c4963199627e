"""The schema of a scenario file: which requests are sent, when and where to, and what must hold.

Durations are seconds or text: 500ms, 30s, 5m, 1h.
"""

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    model_validator,
)

from loadtest.chaos import faults as chaos
from loadtest.errors import ScenarioError, hint
from loadtest.measure import asserts
from loadtest.scenario.lengths import Length, LengthError, parse_length

MAX_RATE = 100_000
MAX_REQUESTS = 5_000_000
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def seconds(value: object) -> float:
    """Parse a duration into seconds. Raises ValueError for anything else."""
    if isinstance(value, bool):
        raise ValueError("a duration is seconds, or text such as 500ms, 30s, 5m")
    if isinstance(value, int | float):
        return float(value)
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(us|ms|s|min|m|h)?\s*", str(value))
    if match is None:
        raise ValueError(f"{str(value)[:60]!r} is no duration; write 500ms, 30s, 5m or seconds")
    return float(match[1]) * _UNITS[match[2] or "s"]


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError("must be finite")
    return value


def _length(value: object) -> Length:
    try:
        return parse_length(value)
    except LengthError as error:
        raise ValueError(str(error)) from None


_Seconds = Annotated[float, BeforeValidator(seconds), AfterValidator(_finite)]
Duration = Annotated[_Seconds, Field(gt=0)]
Pause = Annotated[_Seconds, Field(ge=0)]
Rate = Annotated[float, Field(gt=0, le=MAX_RATE)]
Share = Annotated[float, Field(ge=0, le=1)]
Lengths = Annotated[Length, BeforeValidator(_length)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


class Target(_Model):
    """The OpenAI-compatible server, or servers, that get the load.

    url: one address, or several to which requests go in turn.
    model: None: the first that /v1/models lists.
    gpus: the number of GPUs behind the addresses, for figures per GPU.
    """

    url: str | list[str] = "http://127.0.0.1:8000"
    model: str | None = None
    key_file: Path | None = None
    headers: dict[str, str] = {}
    gpus: Annotated[int, Field(ge=1)] | None = None
    about: dict[str, str] = {}  # shown in the report: device, commit, configuration, ...
    connect_timeout: Duration = 10.0
    timeout: Duration = 300.0  # for a whole request
    chunk_timeout: Duration = 120.0  # longest time without a byte
    # whether to ask for return_token_ids; None: if answers are verified
    token_ids: bool | None = None
    chunk_usage: bool = False  # whether to ask for stream_options.continuous_usage_stats

    @property
    def urls(self) -> list[str]:
        return [self.url] if isinstance(self.url, str) else self.url

    @model_validator(mode="after")
    def _urls(self) -> "Target":
        if not self.urls:
            raise ValueError("url: an empty list")
        for url in self.urls:
            if not re.fullmatch(r"https?://[^/\s?#@]+(/[^\s?#]*)?", url):
                raise ValueError(f"url: {url!r} is not http://host:port or https://host")
        return self


class _OpenLoop(_Model):
    cv: Annotated[float, Field(ge=0, le=100)] = 1.0  # 0 even, 1 Poisson, above 1 burstier


class Constant(_Model):
    kind: Literal["constant"]
    rate: Rate


class Poisson(_Model):
    kind: Literal["poisson"]
    rate: Rate


class Gamma(_OpenLoop):
    kind: Literal["gamma"]
    rate: Rate
    cv: Annotated[float, Field(gt=0, le=100)]


class Bursts(_OpenLoop):
    kind: Literal["bursts"]
    rate: Rate
    on: Duration
    off: Duration
    between: Annotated[float, Field(ge=0, le=MAX_RATE)] = 0.0


class Ramp(_OpenLoop):
    kind: Literal["ramp"]
    first: Annotated[float, Field(ge=0, le=MAX_RATE)] = 0.0
    last: Rate
    over: Duration | None = None  # None: the phase's duration


class Steps(_OpenLoop):
    kind: Literal["steps"]
    rates: Annotated[list[Rate], Field(min_length=1)]
    each: Duration


class AtOnce(_Model):
    """An arrival of all `requests` at time 0, for the longest possible queue."""

    kind: Literal["at_once"]


class Trace(_Model):
    kind: Literal["trace"]
    file: Path
    speed: Annotated[float, Field(gt=0, le=1e6)] = 1.0


class Closed(_Model):
    """A closed loop of `concurrency` requests in flight: each answer starts the next request.

    Such a load hides a server's stalls.
    """

    kind: Literal["closed"]
    concurrency: Annotated[int, Field(ge=1, le=100_000)]


class Sessions(_OpenLoop):
    """Conversations that begin at a rate. Each turn is sent a pause after the previous answer."""

    kind: Literal["sessions"]
    rate: Rate
    turns: Lengths = parse_length([2, 6])
    think: Pause = 2.0  # mean of an exponential distribution


Arrivals = Annotated[
    Constant | Poisson | Gamma | Bursts | Ramp | Steps | AtOnce | Trace | Closed | Sessions,
    Discriminator("kind"),
]


class AdapterMix(_Model):
    """The adapters that requests name.

    names: the names, or `count` of them from a pattern such as lora-{}.
    base: the share of requests without any adapter.
    """

    names: list[str] = []
    count: Annotated[int, Field(ge=1, le=100_000)] | None = None
    pattern: str = "lora-{}"
    choice: Literal["uniform", "zipf", "round_robin"] = "uniform"
    s: Annotated[float, Field(gt=0, le=10)] = 1.0  # Zipf's exponent
    base: Share = 0.0

    @model_validator(mode="after")
    def _some(self) -> "AdapterMix":
        if bool(self.names) == (self.count is not None):
            raise ValueError("give either names or count")
        if self.count is not None and "{}" not in self.pattern:
            raise ValueError("pattern needs {} where the number goes")
        return self

    def all_names(self) -> list[str]:
        return self.names or [self.pattern.replace("{}", str(i)) for i in range(self.count or 0)]


class Tenant(_Model):
    name: str
    share: Annotated[float, Field(gt=0)] = 1.0
    key_file: Path | None = None
    headers: dict[str, str] = {}
    priority: int | None = None
    output: Lengths | None = None


class Prefix(_Model):
    """The shared prefixes: each prompt begins with one of `groups` prefixes of `tokens` tokens."""

    groups: Annotated[int, Field(ge=1, le=1_000_000)] = 8
    tokens: Annotated[int, Field(ge=1, le=1_000_000)] = 512
    choice: Literal["uniform", "zipf"] = "uniform"
    s: Annotated[float, Field(gt=0, le=10)] = 1.0


class Cancels(_Model):
    """The share of requests that hang up, after a number of chunks (streams) or a time (answers
    without streaming).
    """

    share: Share
    after_chunks: Lengths = parse_length([1, 32])
    after: Duration = 0.5


class SlowReaders(_Model):
    """The share of requests that read 1 KiB at a time and then pause."""

    share: Share
    pause: Duration = 0.1


class JsonSchema(_Model):
    """The share of requests with a JSON schema. json_schema: None for a built-in one."""

    share: Share
    json_schema: dict[str, Any] | None = None


class Workload(_Model):
    """The content of the requests.

    name: see `manta loadtest list`. input, output: lengths that replace the workload's own.
    copies: how often each request of a list such as `dialogue` is sent, each time with another
    prompt of the same length. With as many copies as replicas, each replica has the work of one
    server.
    dataset: the file of conversations that the workload "dataset" sends.
    """

    name: str = "dialogue"
    dataset: Path | None = None
    copies: Annotated[int, Field(ge=1, le=10_000)] = 1
    input: Lengths | None = None
    output: Lengths | None = None
    ids: tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=1)]] | None = None
    prefix: Prefix | None = None
    ignore_eos: bool | None = None  # None: as the workload specifies
    sampling: dict[str, Any] = {"temperature": 0}
    extra: dict[str, Any] = {}
    stream: Share = 1.0
    adapters: AdapterMix | None = None
    tenants: list[Tenant] = []
    json_schema: JsonSchema | None = None
    cancel: Cancels | None = None
    slow: SlowReaders | None = None

    @model_validator(mode="after")
    def _known(self) -> "Workload":
        from loadtest.scenario.requests import NAMES
        from loadtest.scenario.workloads import WORKLOADS

        if self.name not in NAMES:
            raise ValueError(f"name: no workload {self.name!r}{hint(self.name, list(NAMES))}")
        if self.name == "tokens" and (self.input is None or self.output is None):
            raise ValueError("name: workload 'tokens' needs input and output")
        if (self.name == "dataset") != (self.dataset is not None):
            raise ValueError(
                "dataset: workload 'dataset' needs a file of conversations, and no other has one"
            )
        if self.dataset is not None and self.input is not None:
            raise ValueError("input: the texts of a dataset are as long as they are")
        listed = self.name in WORKLOADS and self.input is None and self.output is None
        if self.copies > 1 and not listed:
            raise ValueError(
                "copies: only of the requests of a list, without input and output of the "
                f"scenario's own; there are: {', '.join(WORKLOADS)}"
            )
        if self.ids is not None and self.ids[0] >= self.ids[1]:
            raise ValueError("ids: [low, high] with low below high")
        names = [tenant.name for tenant in self.tenants]
        if len(set(names)) < len(names):
            raise ValueError("tenants: two of one name")
        return self


class Phase(_Model):
    """A phase of the load. drain: wait for all answers before the next phase; default for
    warm-up.
    """

    name: str
    arrivals: Arrivals
    duration: Duration | None = None
    requests: Annotated[int, Field(ge=1, le=MAX_REQUESTS)] | None = None
    warmup: bool = False
    drain: bool | None = None
    work: Workload | None = None

    @model_validator(mode="after")
    def _ends(self) -> "Phase":
        kind = self.arrivals.kind
        if kind == "at_once" and self.requests is None:
            raise ValueError("at_once needs requests: how many")
        if kind not in ("trace", "steps") and self.duration is None and self.requests is None:
            raise ValueError("needs duration or requests, or it would never end")
        if isinstance(self.arrivals, Ramp) and self.arrivals.over is None and not self.duration:
            raise ValueError("a ramp needs over, or the phase a duration")
        rate = getattr(self.arrivals, "rate", 0)
        if self.duration and self.requests is None and rate * self.duration > MAX_REQUESTS:
            raise ValueError(f"more than {MAX_REQUESTS} requests")
        return self


Assertion = Annotated[str, AfterValidator(asserts.check_syntax)]
Faults = Annotated[str, AfterValidator(chaos.check_syntax)]


class Slo(_Model):
    """The limits of a good request. itl: its longest gap between chunks."""

    ttft: Duration | None = None
    tpot: Duration | None = None
    itl: Duration | None = None
    e2e: Duration | None = None

    def limits(self) -> dict[str, float]:
        return {name: value for name, value in self if value is not None}


class Scenario(_Model):
    """A load test. Relative paths count from the file's folder."""

    name: str = ""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    target: Target = Target()
    work: Workload = Workload()
    phases: Annotated[list[Phase], Field(min_length=1)]
    slo: Slo = Slo()
    asserts: Annotated[list[Assertion], Field(alias="assert")] = []
    chaos: list[Faults] = []  # faults during the run: see loadtest/chaos/faults.py
    no_service_after: Duration = 1.0
    out: Path | None = None

    @model_validator(mode="after")
    def _phases(self) -> "Scenario":
        names = [phase.name for phase in self.phases]
        if len(set(names)) < len(names):
            raise ValueError("phases: two of one name")
        if all(phase.warmup for phase in self.phases):
            raise ValueError("phases: all are warm-up, so nothing would be measured")
        for number, phase in enumerate(self.phases):
            if self.work_of(phase).name == "trace" and phase.arrivals.kind != "trace":
                raise ValueError(
                    f"phases.{number}: work 'trace' needs arrivals of kind trace, and these are "
                    f"{phase.arrivals.kind!r}; give this phase a work of its own"
                )
        return self

    def work_of(self, phase: Phase) -> Workload:
        return phase.work or self.work


def read_key(path: Path) -> str:
    """Read the first line of a key file. Raises ScenarioError."""
    try:
        lines = path.read_text("utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ScenarioError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if not lines:
        raise ScenarioError(f"{path}: an empty key file")
    return lines[0]
