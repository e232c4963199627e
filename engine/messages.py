"""The messages across the boundary of the engine process, as msgpack. Token ids only: no text.

client -> engine   EngineRequest | Abort | Control | AddAdapter | RemoveAdapter
engine -> client   Progress while it starts, Ready, then one StepFrame for each step that
                   produced something (or on a state change), an AdapterAnswer for each adapter
                   message, a Pulse twice a second and LogLines; Failed instead, if it cannot
"""

import msgspec

from engine.batch import TokenLogprobs
from engine.sampling_params import SamplingParams


class EngineRequest(msgspec.Struct, array_like=True, tag="add"):
    """A choice of a request. n > 1 is n of these with choice = 0 .. n-1 and the same seed.

    token_ids: the prompt and, when a request is resumed elsewhere, what was already emitted.
    num_prompt_tokens: where the output begins in token_ids. max_tokens, min_tokens and the random
        counters count from there, so a resumed request goes on as if nothing had happened.
    cache_salt: part of the prefix-cache key; requests share cached blocks only within one salt.
    adapter: name of a known adapter, or "name@revision" (a request resumed elsewhere goes on with
        the weights that it began with); "" = the model itself.
    priority: smaller runs earlier; ties by arrival.
    request_id: what the caller knows it by; for logs alone.
    """

    id: int
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    choice: int = 0
    cache_salt: str = ""
    adapter: str = ""
    priority: int = 0
    request_id: str = ""

    @property
    def urgency(self) -> tuple[int, bool]:
        """Return the sort key of a request; smaller runs earlier and is preempted later.

        Among equal priorities, a request that another replica began comes first, because a client
        is reading its answer.
        """
        return self.priority, len(self.token_ids) <= self.num_prompt_tokens


class Abort(msgspec.Struct, array_like=True, tag="abort"):
    """Forget these requests; each running one ends with a delta whose finish is "abort"."""

    ids: list[int]


class Control(msgspec.Struct, array_like=True, tag="control"):
    """An order to the engine.

    what: "drain" (refuse new, finish old), "stats" (send a frame now), "reset_prefix_cache",
        "sleep" (once nothing is left to do), "wake" or "stop".
    ticket: the next frame's carries it, so that the sender can tell it from a frame under way.
    """

    what: str
    ticket: int = 0


class AddAdapter(msgspec.Struct, array_like=True, tag="add_adapter"):
    """Make the adapter in folder `path` known as `name`, in place of an adapter of that name.

    Requests that come after the answer run on the new weights. Requests before it finish on the old
    weights.

    revision: names this state of the files; "" = a hash of what they hold.
    load: False reads the configuration only, and the weights when a request first needs them.
    digest: the hash that the files must have ("" = any): weights that are something else are
        refused with adapter_changed, now or when they are read.
    """

    ticket: int  # the answer's
    name: str
    path: str
    revision: str = ""
    load: bool = True
    digest: str = ""


class RemoveAdapter(msgspec.Struct, array_like=True, tag="remove_adapter"):
    """Forget an adapter; requests that were accepted finish on it. revision "" = any."""

    ticket: int
    name: str
    revision: str = ""


class AdapterInfo(msgspec.Struct, array_like=True, frozen=True):
    """A known adapter."""

    name: str
    revision: str
    kind: str  # "lora", "prompt_tuning", "p_tuning" or "prefix_tuning"
    rank: int  # the largest; 0 of other kinds
    num_bytes: int  # on the device
    targets: list[str]  # the linear layers it changes, e.g. "q_proj"
    virtual_tokens: int = 0  # that stand before every prompt, and count in max_model_len alone


class AdapterAnswer(msgspec.Struct, array_like=True, tag="adapter"):
    """The answer to AddAdapter and RemoveAdapter.

    info: None if it failed, with code and message.
    """

    ticket: int
    info: AdapterInfo | None = None
    code: str = ""
    message: str = ""


class Delta(msgspec.Struct, array_like=True, gc=False):
    """The new tokens of a request.

    gc=False, because a step makes a thousand of them, and none is ever in a cycle.

    finish: "" while running; "stop", "length", "abort" or "error".
    stop_token: the end token that finished it; None if none did. It is included in token_ids.
    cached: prompt tokens that came from the prefix cache; -1 on all but a request's first delta.
    error: with finish "error": "code: message".
    vector: with `pooled`: the prompt's, float32 little-endian.
    queued_us: from the request's arrival here to its first step, in microseconds; -1 on all but its
        first delta. adapter_us: part of that, until its adapter was on the device.
    """

    id: int
    token_ids: list[int]
    finish: str = ""
    stop_token: int | None = None
    cached: int = -1
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: str = ""
    queued_us: int = -1
    adapter_us: int = -1
    vector: bytes | None = None


class EngineStats(msgspec.Struct, array_like=True):
    """The engine's state after a step. Times are seconds, clocks monotonic."""

    step: int = 0
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0  # prompt tokens not yet computed, running and waiting
    free_blocks: int = 0
    total_blocks: int = 0
    block_size: int = 0
    preemptions: int = 0
    prefix_queries: int = 0  # prompt tokens looked up
    prefix_hits: int = 0  # of these, found
    prompt_tokens: int = 0  # computed since start
    output_tokens: int = 0  # sampled since start
    step_seconds: float = 0.0  # duration of the last step
    busy_seconds: float = 0.0  # with work to do, since start; goes with the counts of this frame
    finished: int = 0
    draining: bool = False
    adapters: list[str] = []  # on the device, the next to go last
    adapter_loads: int = 0  # host to device, since start
    out_of_memory: int = 0  # steps that the device had no memory for, since start
    rows: int = 0  # requests that can run at once; 0: unknown
    routers: int = 0  # that share the replica; put in by the replica
    reserved_blocks: int = 0  # at their full length, of all that run; shared ones of each
    # Of models whose layers keep states of requests: one a running request, of so many, and
    # snapshots of them that prefixes are found with, of so many.
    state_slots: int = 0
    snapshots: int = 0
    snapshot_slots: int = 0
    snapshots_taken: int = 0  # since start
    snapshots_evicted: int = 0  # since start, to make room for others
    asleep: bool = False
    wakes: int = 0  # since start
    wake_seconds: float = 0.0  # of the last one, until the engine could go on


class StepFrame(msgspec.Struct, array_like=True, tag="frame"):
    """The result of a step of the engine, and the engine's state after it.

    prefix_hashes: of prompts that other routers sent to this replica; put in by the replica.
    ticket: of the newest order that the engine had carried out when it made this frame.
    taken: ids of requests that `stats` is the first to count, refused ones among them. The router
        that has sent a request counts it on top of the figures until its id is here.
    """

    stats: EngineStats
    deltas: list[Delta]
    prefix_hashes: bytes = b""
    ticket: int = 0
    taken: list[int] = []


class Pulse(msgspec.Struct, array_like=True, tag="pulse"):
    """A sign of life from a thread beside the step loop, which also comes in the middle of a step.

    doing: "step" = in one, "device" = in one and waiting for the device, "input" = waiting for a
    message or an adapter, with nothing that could run; "" = none of these.
    cpu_seconds: what the process has used so far.
    """

    doing: str = ""
    cpu_seconds: float = 0.0


class Ready(msgspec.Struct, array_like=True, tag="ready"):
    """The news that the engine can serve, with its decisions for logs, plan and /v1/models."""

    max_model_len: int  # tokens of a request, prompt and output, that the KV cache can hold
    vocab_size: int
    block_size: int
    num_blocks: int
    eos_token_ids: list[int]
    start_seconds: dict[str, float]  # by phase
    memory_table: str
    step_tokens: int  # that a step computes at most
    vector_size: int = 0  # elements of a text's vector; 0: the model makes none
    prefix_caching: bool = True  # what was computed of a prompt may be found again
    stats: EngineStats | None = None  # before its first step: what it has room for


class Failed(msgspec.Struct, array_like=True, tag="failed"):
    """The news that the engine could not start or cannot go on.

    message: the error, with a suggestion.
    The replica adds the rest for a router:
    suspects: ids of that router's requests that the engine may have died of, if it ran a request on
        probation; None if it ran none.
    deaths: replicas whose deaths the request on probation was suspected of.
    doubt: whether other requests were at all these deaths and ran beside it. They are suspects too,
        and `deaths` is empty.
    """

    code: str
    message: str
    param: str | None = None
    suspects: list[int] | None = None
    deaths: list[str] = []
    doubt: bool = False


class LogLine(msgspec.Struct, array_like=True, tag="log"):
    """A line of the engine's log, for the log of the process that owns it. level: logging's."""

    level: int
    message: str
    request_id: str = ""


class Progress(msgspec.Struct, array_like=True, tag="progress"):
    """The progress of a starting engine: a phase, and the share of the phase that is done
    (0..1)."""

    phase: str
    fraction: float


ToEngine = EngineRequest | Abort | Control | AddAdapter | RemoveAdapter
FromEngine = Progress | Ready | StepFrame | AdapterAnswer | Pulse | LogLine | Failed
