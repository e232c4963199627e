"""Request: the scheduler's state of one choice of a request.

A request's progress is given by three counts. The host knows the tokens in token_ids. The KV of
num_computed tokens is computed, or a launched step computes it. num_tokens counts the known tokens
and the token that a launched step samples:

 token_ids     [ prompt ............ | output ... ]
 num_computed  ------------------------------------^      (decoding: num_tokens - 1)
 num_tokens    -------------------------------------^     (num_pending = 1: sampled, not known)

While a request decodes, its num_computed grows by one a step but is not written (decode_group.py).
"""

import enum
import time
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import msgspec

from engine.batch import NewRow, TokenLogprobs
from engine.errors import InvalidRequest, context_too_long, no_vectors
from engine.images.image import Image
from engine.lora.tiers.adapter import Adapter
from engine.messages import BATCH_PRIORITY, Delta, EngineRequest
from engine.pooling import PooledText
from engine.scheduling.admission import Footprint
from engine.scheduling.core_config import CoreConfig
from engine.scheduling.memory.image_plan import check_images
from engine.scheduling.memory.prefix_hash import root_hash
from engine.scheduling.memory.snapshots import Marks
from engine.scheduling.routes import RequestRoutes
from engine.structured.constraint import Constraint

if TYPE_CHECKING:
    from engine.scheduling.drafts.speculation import RequestDrafts


class RequestPhase(enum.Enum):
    """The phase of a request, which is the list of the scheduler that has it."""

    WAITING = enum.auto()  # no row and no blocks: new or preempted
    WAITING_FOR_ADAPTER = enum.auto()  # like WAITING, but its adapter is not on the device
    WAITING_FOR_BLOCKS = enum.auto()  # like WAITING, while its prefix is loaded from the host
    COMPUTING = enum.auto()  # has a row, and computes its prompt or lacks a block to decode
    DECODING = enum.auto()  # in a decode group: one token in each of its steps
    FINISHING = enum.auto()  # its last step is launched; it ends when the result arrives
    ENDED = enum.auto()


class Request:
    """The state of one request, changed only by the scheduler. It takes over message.token_ids."""

    __slots__ = (
        "adapter",
        "adapter_slot",
        "adapter_us",
        "arrived",
        "base",
        "batch_work",
        "blocks",
        "cache_salt",
        "cacheable",
        "choice",
        "constraint",
        "delivered",
        "drafts",
        "fetched",
        "group_index",
        "hashes",
        "id",
        "images",
        "keep_seconds",
        "kv_rank",
        "last_step",
        "limit",
        "marks",
        "micro_batch",
        "min_tokens",
        "next_image",
        "num_cached",
        "num_computed",
        "num_prefix",
        "num_prompt",
        "num_registered",
        "num_reused",
        "num_virtual",
        "order",
        "params",
        "phase",
        "pooled",
        "prediction",
        "prefix_hashes",
        "prompt_logprobs",
        "queued_tokens",
        "queued_us",
        "read_from_disk",
        "request_id",
        "root",
        "routes",
        "row",
        "seed",
        "speculates",
        "stop_ids",
        "token_ids",
    )

    def __init__(
        self,
        message: EngineRequest,
        config: CoreConfig,
        arrival: int,
        adapter: Adapter | None = None,
    ) -> None:
        params = message.params
        self.id = message.id
        self.request_id = message.request_id
        self.token_ids = message.token_ids
        self.num_prompt = message.num_prompt_tokens
        self.params = params
        self.seed = message.seed
        self.choice = message.choice
        self.order = (*message.urgency, arrival)
        self.batch_work = message.priority >= BATCH_PRIORITY
        # set before the request is queued, if it has a grammar
        self.constraint: Constraint | None = None
        self.adapter = adapter
        self.adapter_slot = -1  # device slot of its adapter while it has a row
        self.adapter_us = 0  # microseconds that it has waited for its adapter
        # Virtual tokens of the adapter come before the prompt, with ids outside the vocabulary.
        # They are included in all counts except those that the caller gets. num_prefix: the number
        # of virtual tokens whose KV is copied from the adapter.
        self.num_virtual = 0 if adapter is None else adapter.info.virtual_tokens
        self.num_prefix = self.num_virtual if adapter is not None and adapter.is_prefix else 0
        if self.num_virtual:
            self.token_ids[:0] = range(-self.num_virtual, 0)
            self.num_prompt += self.num_virtual
        self.cache_salt = message.cache_salt
        self.images: Sequence[Image] = message.images
        if self.images:
            self.images = [_own(image, self.num_virtual, self.cache_salt) for image in self.images]
        self.next_image = 0  # index of the first image with a token beyond num_computed
        self.set_model_key(config.model_key)
        # The maximum number of the request's tokens, prompt and output.
        self.limit = config.max_model_len
        if params.max_tokens is not None:
            self.limit = min(self.limit, self.num_prompt + params.max_tokens)
        self.min_tokens = params.min_tokens
        eos = () if params.ignore_eos else config.eos_token_ids
        self.stop_ids = frozenset(eos).union(params.stop_token_ids)

        self.phase = RequestPhase.WAITING
        self.num_computed = 0
        self.row = -1
        self.kv_rank = 0  # the rank that has its blocks, while it has a row
        self.blocks: list[int] = []  # its block table, as block_manager.py describes
        # prefix hashes of its leading full blocks, computed on demand
        self.hashes: list[bytes] = []
        self.num_registered = 0  # number of leading blocks that are registered in the prefix cache
        self.cacheable = config.prefix_caching
        self.fetched = False  # whether blocks were loaded for it since it was queued
        self.read_from_disk = False  # whether these blocks were read from disk before
        self.keep_seconds = message.keep_seconds
        self.prefix_hashes = message.prefix_hashes
        # number of leading blocks that the host tier stores when the request leaves
        self.num_reused = 0
        # positions for snapshots while it has a row, in models with recurrent layers
        self.marks: Marks | None = None
        self.group_index = -1  # index in the decode group
        self.base = 0  # while decoding: num_computed = base + the next step_index of its group
        self.micro_batch = 0  # the number of its decode group
        self.last_step = 0  # the last step that uses its row and blocks; not updated while decoding
        self.queued_tokens = 0  # number of known tokens when it was queued
        self.arrived = time.monotonic_ns()
        self.queued_us = -1  # microseconds from arrival to its first step
        # number of prompt tokens found in the prefix cache; -1 = never started
        self.num_cached = -1
        self.prediction: Sequence[int] = message.prediction
        # whether steps may verify drafts for it; never if routed experts are returned, as those of
        # drafts are not recorded
        self.speculates = message.speculate and not params.return_routed_experts
        # its drafts' source and record; None until a step asks for drafts
        self.drafts: RequestDrafts | None = None
        self.delivered = False  # whether its first delta was returned
        self.prompt_logprobs: list[TokenLogprobs | None] | None = (
            None if params.prompt_logprobs is None else [None]
        )
        self.routes = RequestRoutes() if params.return_routed_experts else None
        self.pooled: PooledText | None = None
        if params.pooled:
            assert config.pooling is not None
            self.pooled = PooledText(config.pooling, self.num_prompt, unscaled=params.unscaled)

    def __repr__(self) -> str:
        known, done = len(self.token_ids), self.num_computed
        return f"Request({self.id}, {self.phase.name}, {known} tokens, {done} computed)"

    def set_model_key(self, model_key: str) -> None:
        """Set the root of the request's prefix hashes for a model's weights."""
        key = "" if self.adapter is None else self.adapter.blocks_key
        self.root = root_hash(model_key, key, self.cache_salt)

    def __lt__(self, other: Any) -> bool:
        """Whether this request comes before the other one in the order of service."""
        return bool(self.order < other.order)

    @property
    def num_tokens(self) -> int:
        """The number of known tokens plus the pending one; not valid while decoding."""
        return max(len(self.token_ids), self.num_computed + 1)

    @property
    def remaining(self) -> int:
        """The number of tokens to compute before the next one is sampled.

        Not valid while decoding.
        """
        return self.num_tokens - self.num_computed

    def footprint(self, step_index: int, held: int) -> Footprint:
        """Return the request's memory at a step of its decode group, and at its maximum length.

        step_index: the number of the step, counted by the group.
        held: number of blocks in the request's table.
        Call this only while the request has a row.
        """
        if self.phase is RequestPhase.DECODING:
            now = self.base + step_index + 1
        else:
            now = max(self.num_computed, len(self.token_ids))
        return Footprint(now, max(now, self.limit - 1), held)

    def new_row(self) -> NewRow:
        """Return the data of the request's row on the device; the request must have a row."""
        new = NewRow(
            self.row,
            self.token_ids.copy(),
            self.num_prompt,
            self.params,
            self.seed,
            self.choice,
            sorted(self.stop_ids) if self.constraint is None else (),
            kv_rank=self.kv_rank,
            images=self.images,
        )
        if self.num_virtual:
            new.virtual_slot, new.num_virtual = self.adapter_slot, self.num_virtual
        else:
            new.lora_slot = self.adapter_slot
        return new

    def stops_at(self, token: int) -> bool:
        """Whether the newest token, already appended, ends the request; False up to min_tokens.

        It is always False for a request with a grammar, which decides the end itself.
        """
        if self.constraint is not None:
            return False
        return token in self.stop_ids and len(self.token_ids) - self.num_prompt > self.min_tokens

    def collect_prompt_logprobs(self, start: int, items: list[TokenLogprobs]) -> None:
        """Append the prompt log-probabilities of a chunk that began at `start`.

        items: log-probabilities of the tokens from start + 1 on.
        After a preemption the same tokens are computed again, and only new items are appended.
        """
        if self.prompt_logprobs is not None and not self.delivered:
            known = len(self.prompt_logprobs)
            start = max(0, start - self.num_virtual)
            assert start < known, "a chunk's prompt log-probabilities were lost"
            self.prompt_logprobs.extend(items[known - start - 1 :])

    def deliver_routes(self, delta: Delta) -> None:
        """Set `delta.routed` to the experts chosen for all tokens but the last, if the request asks
        for them.

        Call this once the request has ended, with its last delta.
        """
        if self.routes is not None:
            delta.routed = self.routes.answer(self.num_virtual, len(self.token_ids) - 1)

    def deliver_first(self, delta: Delta) -> None:
        """Set the fields that only a request's first delta has, if `delta` is the first."""
        if not self.delivered:
            self.delivered = True
            delta.cached = self.num_cached
            delta.queued_us = self.queued_us
            delta.adapter_us = self.adapter_us
            delta.prompt_logprobs = self.prompt_logprobs
            if self.pooled is not None:
                delta.vector = self.pooled.vector()


def _own(image: Image, num_virtual: int, cache_salt: str) -> Image:
    """Return an image moved behind virtual tokens, whose digest includes the request's salt.

    num_virtual: number of virtual tokens before the prompt.
    cache_salt: the request's salt; only requests with the same salt share embeddings.
    """
    digest = image.digest
    if cache_salt:
        digest = blake2b(digest + cache_salt.encode(), digest_size=len(digest)).digest()
    return msgspec.structs.replace(image, digest=digest, start=image.start + num_virtual)


def validate(message: EngineRequest, config: CoreConfig, num_virtual: int = 0) -> None:
    """Refuse a request that the engine cannot run. Raises InvalidRequest.

    num_virtual: virtual tokens that the request's adapter puts before the prompt.
    The router or the library has checked all fields before. This check keeps a faulty client from
    crashing the engine.
    """
    token_ids, num_prompt = message.token_ids, message.num_prompt_tokens
    if not token_ids or not 1 <= num_prompt <= len(token_ids):
        raise InvalidRequest("the prompt must have at least one token", param="prompt")
    if min(token_ids) < 0 or max(token_ids) >= config.vocab_size:
        raise InvalidRequest(
            f"token ids must be between 0 and {config.vocab_size - 1}",
            param="prompt",
            code="token_out_of_range",
        )
    check_images(message, config.images)
    context = config.max_model_len - num_virtual
    if num_prompt > context - (message.params.max_tokens != 0) or len(token_ids) > context:
        raise context_too_long(context, num_prompt, virtual=num_virtual)
    max_tokens = message.params.max_tokens
    if max_tokens is not None and len(token_ids) - num_prompt > max_tokens:
        raise InvalidRequest("token_ids has more output than max_tokens", param="max_tokens")
    message.params.check_vocabulary(config.vocab_size)
    if message.params.return_routed_experts and config.no_routes:
        raise InvalidRequest(
            f"return_routed_experts: {config.no_routes}",
            param="return_routed_experts",
            code="routed_experts_not_supported",
        )
    if message.params.pooled:
        if config.pooling is None:
            raise no_vectors()
        if num_virtual:
            raise InvalidRequest("an adapter of virtual tokens makes no embeddings", param="model")
        if len(token_ids) > num_prompt:
            raise InvalidRequest("pooled has no output", param="pooled")
    elif not config.generates:
        raise InvalidRequest(
            "this is an embedding model; it does not generate text", code="generation_not_supported"
        )
