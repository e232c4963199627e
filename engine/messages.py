"""The messages between the engine process and its client, as msgpack. Token ids only: no text.

client -> engine   EngineRequest | Abort | Control | AddAdapter | RemoveAdapter | UpdateWeights
engine -> client   Progress while it starts, then Ready, or Failed if it cannot serve. Then a
                   StepFrame for each step with output or changed state, an AdapterAnswer for each
                   adapter message, an Answer for each pause and update of the weights, a Pulse
                   twice a second, and LogLines
"""

from typing import TYPE_CHECKING, Any

import msgspec

from engine.batch import TokenLogprobs
from engine.images.image import Image
from engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# number of tokens that a router's prefix hash covers, and its bytes
PREFIX_STRIDE, PREFIX_BYTES = 64, 8


class KVSource(msgspec.Struct, array_like=True, frozen=True):
    """A replica from which other replicas can pull KV blocks.

    secret: the source's secret, in hex.
    shared: whether blocks may be transferred by shared memory, if both replicas are on one machine.
    device: whether the puller's GPU may read the source's GPU memory.
    """

    host: str
    port: int
    secret: str
    shared: bool = True
    device: bool = True


BATCH_PRIORITY = 16  # the priority of batch work: the lowest that a router's queue distinguishes


class EngineRequest(msgspec.Struct, array_like=True, tag="add"):
    """A request for one choice; a client's n > 1 becomes n messages with the same seed.

    token_ids: the prompt and, when a request is resumed on another replica, the output emitted so
        far.
    num_prompt_tokens: the index in token_ids where the output begins. max_tokens, min_tokens and
        the random counters count from there, so that a resumed request continues without a
        difference.
    cache_salt: part of the prefix-cache key; only requests of one salt share cached blocks.
    adapter: name of a known adapter, or "name@revision" (a request that is resumed on another
        replica needs the weights that it began with); "" = the model itself.
    priority: smaller runs earlier; ties by arrival. From BATCH_PRIORITY on the request is batch
        work, which takes a small part of steps beside other requests.
    request_id: the caller's id of the request, only for logs.
    prediction: tokens that the client expects in the output, for drafts.
    speculate: whether the engine may use drafts for the request; they do not change the text.
    images: the images of the prompt, in its order; their spans in token_ids do not overlap.
    source: the replica that has the prefix, from which an engine with kv_moves pulls the blocks
        that it lacks; set by routers, never by clients.
    keep_seconds: how long the blocks are held for a pull after the request has ended.
    prefix_hashes: joined hashes by which routers know the prefixes of token_ids
        (`deployments.routing.prefix_index`); the engine reports which of them it has evicted.
    verbatim: whether the client sent token ids, such as a trainer that returns sampled tokens. An
        image placeholder without an image is then an ordinary token.
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
    prediction: list[int] = []
    speculate: bool = True
    images: list[Image] = []
    source: KVSource | None = None
    keep_seconds: float = 0.0
    prefix_hashes: bytes = b""
    verbatim: bool = False

    @property
    def urgency(self) -> tuple[int, bool]:
        """The sort key of a request: (priority, whether no replica began it before).

        The request with the smaller key runs earlier and is preempted later.

        Among equal priorities, a request that another replica began comes first, because a client
        is already reading its answer.
        """
        return self.priority, len(self.token_ids) <= self.num_prompt_tokens


class Abort(msgspec.Struct, array_like=True, tag="abort"):
    """A message to abort requests; each running one ends with a delta whose finish is "abort"."""

    ids: list[int]


WEIGHTS, CACHES = "weights", "kv_cache"
# error codes of an Answer: the engine cannot sleep, is not part of a weight transfer, or does not
# have the folder
CANNOT_SLEEP, NOT_JOINED, NO_FOLDER = "cannot_sleep", "not_in_transfer", "folder_not_found"
PARTS = (WEIGHTS, CACHES)  # parts of an engine's memory that can be freed, by vLLM's names


class Control(msgspec.Struct, array_like=True, tag="control"):
    """A control message to the engine.

    what: "drain" (refuse new requests, finish old ones), "stats" (send a frame now),
        "reset_prefix_cache", "sleep" (once no request runs), "wake", "pause", "resume", "serve_kv"
        or "stop". An Answer follows once a sleep, a wake, a pause or a serve_kv has been carried
        out.
    ticket: a number that the next frame returns, so that the sender recognises that frame.
    argument: the mode of a pause, see `engine.scheduling.orders.updates.Pause`; the address on
        which a "serve_kv" listens.
    level: what a sleep does with the weights: 1 keeps them in host memory, 2 drops them; 0 only
        checks whether the engine would refuse.
    tags: the parts of the memory to free or to allocate, of PARTS; none = all.
    """

    what: str
    ticket: int = 0
    argument: str = ""
    level: int = 1
    tags: list[str] = []


class UpdateWeights(msgspec.Struct, array_like=True, tag="update_weights"):
    """A message to check a checkpoint folder and replace the model's weights by its weights.

    Running requests continue with the new weights. An Answer follows.

    folder: the checkpoint's folder, or several, one a line; each node loads the first that it has.
    version: the name of the new weights; "" = the number of updates so far.
    recompute: whether the KV of running requests is computed again, so that their next tokens are
        those of a new request with the same tokens. Otherwise they keep their old KV.
    check_only: whether to check the folder and change nothing.
    """

    ticket: int
    folder: str
    version: str = ""
    recompute: bool = False
    check_only: bool = False


class TransferWeights(msgspec.Struct, array_like=True, tag="transfer_weights"):
    """A message to receive weights from a trainer while steps run. An Answer follows.

    what: "init" (join the trainer's group), "start", "update" (receive tensors), "collect",
        "finish" or "drop" (discard the updates that are not loaded). A "start" and a "finish"
        enclose several updates; an update without them is complete. "collect" is an update after a
        "start" that also finishes once the checkpoint is complete. The answer to a complete update
        has its folder as message, for `UpdateWeights`.
    info: vLLM's `init_info` or `update_info`; see `engine.weights.transfers.transfer`.
    """

    ticket: int
    what: str
    info: dict[str, Any] = {}


class Answer(msgspec.Struct, array_like=True, tag="answer"):
    """The answer to a message; with a code the message failed and changed nothing.

    param: the field of the message that is wrong.
    """

    ticket: int
    code: str = ""
    message: str = ""
    param: str = ""


class AddAdapter(msgspec.Struct, array_like=True, tag="add_adapter"):
    """A message to register the adapter in folder `path` as `name`, replacing one of that name.

    Requests after the answer use the new weights. Earlier requests finish with the old weights.

    revision: a name of this state of the files; "" = a hash of their contents.
    load: False reads only the configuration; weights are read when a request first needs them.
    digest: the hash that the files must have ("" = any). Other files are refused with
        adapter_changed, now or when they are read.
    """

    ticket: int  # ticket of the answer
    name: str
    path: str
    revision: str = ""
    load: bool = True
    digest: str = ""


class RemoveAdapter(msgspec.Struct, array_like=True, tag="remove_adapter"):
    """A message to remove an adapter; accepted requests still finish with the adapter.

    revision: "" = any.
    """

    ticket: int
    name: str
    revision: str = ""


class AdapterInfo(msgspec.Struct, array_like=True, frozen=True):
    """The description of a registered adapter, for lists and answers."""

    name: str
    revision: str
    kind: str  # "lora", "prompt_tuning", "p_tuning" or "prefix_tuning"
    rank: int  # the largest rank of LoRA; 0 for other kinds
    num_bytes: int  # bytes on the device
    targets: list[str]  # the linear layers that it changes, e.g. "q_proj"
    virtual_tokens: int = 0  # virtual tokens before every prompt, which count only in max_model_len


class AdapterAnswer(msgspec.Struct, array_like=True, tag="adapter"):
    """The answer to AddAdapter and RemoveAdapter.

    info: the adapter's description; None if the message failed for the reason in code and message.
    """

    ticket: int
    info: AdapterInfo | None = None
    code: str = ""
    message: str = ""


class RoutedExperts(msgspec.Struct, array_like=True, frozen=True):
    """The experts that each layer has chosen for each token of a request, prompt and output.

    The last token has none, as no step has computed it. Layers without experts have 0.

    shape: (tokens, layers, experts of a token).
    dtype: "uint8", or "int16" for more than 256 experts.
    data: the ids in this order, little-endian.
    """

    shape: tuple[int, int, int]
    dtype: str
    data: bytes

    def array(self) -> "NDArray[np.integer]":
        """Return the ids as an array of this shape, which shares the memory of `data`."""
        import numpy as np

        return np.frombuffer(self.data, np.dtype(self.dtype)).reshape(self.shape)


class Delta(msgspec.Struct, array_like=True, gc=False):
    """The new tokens of a request, and its end.

    gc=False: a step creates up to a thousand deltas, which are never in reference cycles.

    finish: "" while running; "stop", "length", "abort" or "error".
    stop_token: the end token that ended it, which token_ids includes; None if none did.
    cached: prompt tokens that came from the prefix cache; -1 on all but a request's first delta.
    error: "code: message" with finish "error".
    vector: the prompt's embedding, with `pooled`, as little-endian float32 bytes.
    queued_us: microseconds from the request's arrival in the engine to its first step; -1 on all
        but its first delta.
    adapter_us: the part of queued_us for which the request waited for its adapter.
    routed: the experts of all tokens so far, with `return_routed_experts`; only in a request's last
        delta.
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
    routed: RoutedExperts | None = None


class EngineStats(msgspec.Struct, array_like=True):
    """The engine's state after a step. Times are seconds, clocks monotonic."""

    step: int = 0
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0  # uncomputed prompt tokens of running and waiting requests
    free_blocks: int = 0
    total_blocks: int = 0
    block_size: int = 0
    preemptions: int = 0
    prefix_queries: int = 0  # prompt tokens looked up in the prefix cache
    prefix_hits: int = 0  # prompt tokens found in the prefix cache
    prompt_tokens: int = 0  # computed since start
    output_tokens: int = 0  # sampled since start
    step_seconds: float = 0.0  # duration of the last step
    # seconds with work since start; consistent with the counts of this frame
    busy_seconds: float = 0.0
    finished: int = 0
    draining: bool = False
    adapters: list[str] = []  # adapters on the device; the last is evicted first
    adapter_loads: int = 0  # host to device, since start
    out_of_memory: int = 0  # steps that failed for lack of device memory, since start
    rows: int = 0  # requests that can run at once; 0: unknown
    routers: int = 0  # routers that share the replica; set by the replica
    # blocks that running requests need at full length; shared blocks count for each request
    reserved_blocks: int = 0
    # Recurrent and hybrid models: slots for states of running requests, and snapshots for prefix
    # caching, used and available.
    state_slots: int = 0
    snapshots: int = 0
    snapshot_slots: int = 0
    snapshots_taken: int = 0  # since start
    snapshots_evicted: int = 0  # evictions of snapshots since start, to make room for others
    asleep: bool = False  # whether a part of the memory is freed
    wakes: int = 0  # since start
    wake_seconds: float = 0.0  # seconds that the last wake took
    paused: bool = False
    weights_version: str = "0"  # version of the weights that sampled this frame's tokens
    weight_updates: int = 0  # since start
    update_seconds: float = 0.0  # seconds for which the last update stopped the steps
    # Speculation, since start: drafts (at most one per request and step), draft tokens, and how
    # often the draft token of position 0, 1, ... was accepted.
    drafts: int = 0
    draft_tokens: int = 0
    accepted_by_position: list[int] = []
    # Models with images, since start: images that steps encoded, their embeddings, the seconds that
    # this took, and images whose embeddings were cached.
    images_encoded: int = 0
    image_tokens_encoded: int = 0
    image_encode_seconds: float = 0.0
    image_cache_hits: int = 0
    image_cache_tokens: int = 0  # cached image embeddings
    image_cache_size: int = 0  # maximum number of cached image embeddings
    weights_dropped: bool = False  # weights were dropped by a sleep; requests wait for new ones
    # Host tier: blocks in use and their maximum; other numbers are since the start.
    host_kv_blocks: int = 0
    host_kv_slots: int = 0
    host_kv_stored_bytes: int = 0
    host_kv_loaded_bytes: int = 0
    host_kv_loaded_tokens: int = 0  # prompt tokens that were loaded instead of computed
    host_kv_store_seconds: float = 0.0  # seconds of copies
    host_kv_load_seconds: float = 0.0
    host_kv_wait_seconds: float = 0.0  # time that requests waited for loads
    host_kv_dropped: int = 0  # blocks not stored, as too many waited to be copied
    host_kv_evicted: int = 0  # blocks that made room for others
    host_kv_failed_loads: int = 0
    # Disk tier, likewise.
    disk_kv_blocks: int = 0
    disk_kv_used_bytes: int = 0  # bytes of all files of the folder, those of other engines included
    disk_kv_most_bytes: int = 0
    disk_kv_written_bytes: int = 0
    disk_kv_read_bytes: int = 0
    disk_kv_read_tokens: int = 0  # prompt tokens that were read instead of computed
    disk_kv_write_seconds: float = 0.0
    disk_kv_read_seconds: float = 0.0
    disk_kv_wait_seconds: float = 0.0  # time that requests waited for reads
    disk_kv_dropped: int = 0  # blocks not written: full queue, no room, evicted, or an error
    disk_kv_evicted: int = 0  # files that made room for others
    disk_kv_damaged: int = 0  # files that were short, foreign or damaged
    disk_kv_failed_reads: int = 0
    # Since start: images whose embeddings came from an encoder pool, and images whose embeddings
    # were expected from it but did not arrive. The replica sets the second number.
    images_received: int = 0
    images_not_received: int = 0
    # KV blocks from other replicas, since the start: pulls, pulls that failed in part or as a
    # whole, received tokens and bytes. sent_kv_bytes: bytes that other replicas pulled from this
    # one.
    moves: int = 0
    failed_moves: int = 0
    moved_tokens: int = 0
    moved_bytes: int = 0
    move_seconds: float = 0.0  # seconds from a pull's beginning to its last block
    shared_moves: int = 0  # pulls through shared memory
    sent_kv_bytes: int = 0
    # Growing KV memory: mapped bytes; numbers of growths and shrinks since the start; seconds that
    # the step loop spent on these, and the longest of them.
    kv_mapped_bytes: int = 0
    kv_growths: int = 0
    kv_shrinks: int = 0
    kv_pause_seconds: float = 0.0
    kv_longest_pause: float = 0.0
    # Batch work: running and waiting requests, and their uncomputed prompt tokens.
    batch_requests: int = 0
    batch_waiting_tokens: int = 0
    device_moves: int = 0  # the `shared_moves` that read the source's GPU memory


class StepFrame(msgspec.Struct, array_like=True, tag="frame"):
    """The result of a step, and the engine's state after it.

    prefix_hashes: hashes of prompts that other routers sent to this replica; set by the replica.
    ticket: the ticket of the newest message that the engine had handled before this frame.
    taken: ids of requests that `stats` counts for the first time, including refused ones. Until
        then the router that sent a request adds it to the figures.
    gone: joined hashes of prefixes that have left the prefix cache and the lower tiers.
    lowered: joined hashes of prefixes that have left the prefix cache but are in a lower tier.
    """

    stats: EngineStats
    deltas: list[Delta]
    prefix_hashes: bytes = b""
    ticket: int = 0
    taken: list[int] = []
    gone: bytes = b""
    lowered: bytes = b""


class Pulse(msgspec.Struct, array_like=True, tag="pulse"):
    """A heartbeat, which another thread than the step loop's sends also during a step.

    doing: "step" = in a step; "device" = in a step and waiting for the device; "input" = waiting
        for a message or an adapter, with nothing to run; "" = none of these.
    cpu_seconds: CPU time that the process has used so far.
    """

    doing: str = ""
    cpu_seconds: float = 0.0


class Ready(msgspec.Struct, array_like=True, tag="ready"):
    """The message that the engine can serve, with its resolved settings for logs and /v1/models."""

    # the maximum number of tokens of a request, prompt and output, that the KV cache can hold
    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int
    eos_token_ids: list[int]
    start_seconds: dict[str, float]  # phase -> seconds
    memory_table: str
    step_tokens: int  # the maximum number of tokens in a step
    vector_size: int = 0  # elements of an embedding; 0 = the model computes none
    prefix_caching: bool = True  # whether computed prompts may be reused
    # state before the first step, which shows the engine's capacity
    stats: EngineStats | None = None
    # placeholder token ids of images, then of clips; empty = requests have no images
    image_token_ids: list[int] = []
    image_tokens: int = 0  # the maximum number of embeddings of an image; 0 = unknown
    dtype: str = ""  # dtype of weights that are not quantised, such as "bfloat16"


class Failed(msgspec.Struct, array_like=True, tag="failed"):
    """The message that the engine could not start or has failed.

    message: the error, with a suggestion.
    The replica adds the following for a router:

    suspects: ids of that router's requests that may have killed the engine, if the engine ran a
        request on probation (alone, as a possible poison request: deployments/router/poison.py);
        None if it ran none.
    deaths: replicas whose deaths the request on probation may have caused.
    doubt: whether other requests ran at the same time and at all these deaths. They are suspects
        too, and `deaths` is empty.
    """

    code: str
    message: str
    param: str | None = None
    suspects: list[int] | None = None
    deaths: list[str] = []
    doubt: bool = False


class LogLine(msgspec.Struct, array_like=True, tag="log"):
    """A line of the engine's log, for the log of the parent process.

    level: a level of `logging`.
    """

    level: int
    message: str
    request_id: str = ""


class Progress(msgspec.Struct, array_like=True, tag="progress"):
    """The progress of a starting engine: a phase, and the phase's completed fraction (0..1)."""

    phase: str
    fraction: float


ToEngine = (
    EngineRequest | Abort | Control | AddAdapter | RemoveAdapter | UpdateWeights | TransferWeights
)
FromEngine = Progress | Ready | StepFrame | AdapterAnswer | Answer | Pulse | LogLine | Failed
