"""Fakes for tests of the scheduler: FakeRunner, a model runner without a model, and others.

FakeRunner's next token is a hash of the tokens it reads through the block table, so a wrong block,
a stale row or a lost token changes the text.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import takewhile
from typing import Any, NamedTuple
from zlib import crc32

import msgspec
import numpy as np

from engine.batch import Batch, NewRow, PrefixCopy, StepResult, TokenLogprobs
from engine.config.kv_groups import KVKind
from engine.errors import AdapterError
from engine.images.image import Image
from engine.lora.tiers.adapter import AdapterDescription, LoadedAdapter
from engine.lora.tiers.store import AdapterStore
from engine.messages import AddAdapter, Delta, EngineRequest
from engine.sampling_params import SamplingParams
from engine.scheduling.core import CoreConfig, EngineCore
from engine.scheduling.drafts.speculation import Speculation
from engine.scheduling.memory.block_manager import LowestFirst
from engine.scheduling.memory.host_plan import HostPlan, Pairs
from engine.scheduling.memory.host_tier import HostTier
from engine.scheduling.memory.image_plan import ImagePlan
from engine.scheduling.memory.kv_growth import KVGrowth
from engine.scheduling.memory.kv_shares import Holding
from engine.scheduling.moves.block_moves import BlockMoves
from engine.scheduling.moves.records import MovePlan
from engine.speculation.computed import ON_DEVICE

LETTERS = "abcdefghijklmnopqrstuvwxyz"
EOS = 1
VOCAB = 50  # small, so that about one in fifty sampled tokens ends a text


def key_of(before: int, token: int) -> int:
    """Return the fake KV entry of a token: a hash >= 0 of the token and all tokens before it.

    before: the key of the token before it.
    """
    return (before * 6364136223846793005 + token + 1442695040888963407) % 2**62


def next_token(keys: Sequence[int], new: NewRow, count: int, vocab: int = VOCAB) -> int:
    """Return the token that the fake model samples after `count` tokens.

    keys: the keys of the tokens that the model attends to. new: the row, with its seed and choice.
    """
    data = np.asarray(keys, dtype=np.int64).tobytes()
    salt = f"{new.seed} {new.choice}".encode()
    token = int.from_bytes(blake2b(data, key=salt, digest_size=4).digest(), "little") % vocab
    if count - new.num_prompt_tokens < new.params.min_tokens:
        while token in new.stop_ids:
            token = (token + 1) % vocab
    return token


def seen(keys: Sequence[int], config: CoreConfig) -> list[int]:
    """Return the keys that all KV groups read to sample the next token, concatenated.

    keys: the keys of all tokens.
    """
    read: list[int] = []
    for kind in config.kinds:
        read += keys[first_read(kind, len(keys) - 1) :] if kind.by_position else keys[-1:]
    return read + keys[-1:] if config.snapshots is not None else read


def first_read(kind: KVKind, position: int) -> int:
    """Return the position of the first token whose key the token at `position` reads."""
    return kind.behind(position, 1)


# Adapters with virtual tokens: name -> (kind, number of tokens), no multiple of a block of 4.
VIRTUAL = {"words": ("prompt_tuning", 5), "keys": ("prefix_tuning", 7)}


def virtual_tokens(adapter: str) -> int:
    return VIRTUAL.get(adapter, ("lora", 0))[1]


def expected(request: EngineRequest, config: CoreConfig) -> tuple[list[int], str]:
    """Return the output and the finish reason of a request that runs alone on a correct device."""
    p = request.params
    stops = set(p.stop_token_ids) | (set() if p.ignore_eos else set(config.eos_token_ids))
    new = NewRow(0, [], request.num_prompt_tokens, p, request.seed, request.choice, sorted(stops))
    virtual = virtual_tokens(request.adapter)
    tokens, keys = [*range(VOCAB, VOCAB + virtual), *request.token_ids], [0]
    places = image_places(request.token_ids, request.images)
    for at, token in enumerate(tokens, start=-virtual):
        image, index = places.get(at, (None, 0))
        code = token if image is None else embedding(crc32(image.pixels), index)
        keys.append(key_of(keys[-1], code))
    new.num_prompt_tokens += virtual
    limit = min(config.max_model_len, config.num_blocks * config.block_size)
    if p.max_tokens is not None:
        limit = min(limit, new.num_prompt_tokens + p.max_tokens)
    while len(tokens) < limit:
        tokens.append(next_token(seen(keys[1:], config), new, len(tokens)))
        keys.append(key_of(keys[-1], tokens[-1]))
        if tokens[-1] in stops and len(tokens) - new.num_prompt_tokens > p.min_tokens:
            return tokens[virtual + len(request.token_ids) :], "stop"
    return tokens[virtual + len(request.token_ids) :], "length"


IMAGE_TOKEN = 0  # prompts without images do not contain it
ROW_END = 4


def embedding(picture: int, index: int) -> int:
    """Return the number that stands for an image's embedding in `key_of`.

    picture: the CRC of the image's pixels. index: of the embedding in the image.
    """
    return VOCAB + 100 + 1000 * picture + index


def received(images: Sequence[Image], row_size: int = 1) -> list[Image]:
    """Return copies of images with fake embeddings, as if an encoder pool had computed them."""
    return [
        msgspec.structs.replace(image, rows=image.pixels[:1] * 4 * row_size * image.size)
        for image in images
    ]


def drawn(image: Image) -> bytes:
    """Return the pixels of an image; those of `received` are recovered from its embeddings."""
    return image.pixels or image.rows[:1] * 6


def image_places(token_ids: Sequence[int], images: Sequence[Image]) -> dict[int, tuple[Image, int]]:
    """Return position -> (image, index of the embedding) for each image token of a prompt."""
    places = {}
    for image in images:
        span = range(image.start, image.start + image.length)
        own = [at for at in span if token_ids[at] == IMAGE_TOKEN]
        assert len(own) == image.size
        places.update({at: (image, index) for index, at in enumerate(own)})
    return places


def make_prompt(*parts: int | list[int]) -> dict[str, Any]:
    """Return the prompt and the images of a request, as keyword arguments of `make_request`.

    parts: lists of tokens, and images as numbers. Image p has 1 + p % 8 embeddings, in rows of 3
        if p is odd.
    """
    tokens: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, list):
            tokens += part
            continue
        span = [IMAGE_TOKEN] * (1 + part % 8)
        for at in range(3, len(span), 4):
            if part % 2:
                span.insert(at, ROW_END)
        if span[-1] == ROW_END:
            del span[-1]
        pixels = bytes([part]) * 6
        digest = blake2b(pixels, digest_size=16).digest()
        size = span.count(IMAGE_TOKEN)
        images.append(Image(digest, len(tokens), len(span), size, (1, size), (1, 1, 2), pixels))
        tokens += span
    return {"prompt": tokens, "images": images}


class Proposal(NamedTuple):
    """A request for drafts by the device: a column of `Batch.proposals`, as a named tuple."""

    row: int
    position: int
    entry: int
    first_draft: int
    count: int
    verified: int
    synthetic: int


def proposals_of(batch: Batch) -> list[Proposal]:
    """Return a batch's proposals, in order."""
    table = batch.proposals
    return [] if table is None else [Proposal(*column) for column in table.T.tolist()]


@dataclass
class _Step:
    """A launched step, with a copy of its batch, which later changes of the scheduler do not
    affect."""

    runner: "FakeRunner"
    step: int
    entries: list[tuple[int, int, int, bool]]  # row, start, length, samples
    rows: list[NewRow]
    blocks: list[tuple[int, int, int]]
    drafts: list[tuple[int, int, list[int]]]
    prefixes: list[PrefixCopy]
    settled: list[tuple[int, int]]
    saved: list[tuple[int, int]]
    resumed: list[tuple[int, int]]
    masked: list[int]
    proposals: list[Proposal]
    unsettled: int
    images: list[Image]
    dropped_images: list[bytes]
    ahead_images: list[Image]
    loads: list[Callable[[], None]] = field(default_factory=list)  # each ends loads it waits for
    masks: Any = None  # as of engine.scheduling.core.PendingResult.sample
    concluded: bool = False
    done: bool = False

    def conclude(self) -> None:
        assert not self.masked or self.masks is not None, "concluded what was not sampled"
        before = self.runner.in_flight[: self.runner.in_flight.index(self)]
        assert all(step.concluded for step in before), "concluded out of order"
        self.concluded = True

    def ready(self) -> bool:
        return False

    def sample(self, masks: Any) -> None:
        assert self.masked and self.masks is None and len(masks) == len(self.masked)
        self.masks = masks

    def wait(self) -> StepResult:
        assert not self.masked or self.masks is not None, "waited for what was not sampled"
        assert not self.done and self.runner.in_flight[0] is self, "waited out of order"
        self.done = True
        for end in self.loads:
            end()
        self.runner.in_flight.pop(0)
        return self.runner.execute(self)


class FakeRunner:
    """A model runner without a model, which runs each step when its result is awaited.

    That is as late as a device may run it. KV slots hold keys of `key_of`. Rows keep their own
    tokens, as the device does. `launch` asserts conditions that a device does not check: the order
    of entries, the budget, and that no row or block is reused that a step in flight still uses.

    fail: request seeds whose next sample is an error.
    drafts: whether drafts for the batch's proposals are "right", "wrong", or "mixed".
    """

    def __init__(
        self, config: CoreConfig, *, fail: Sequence[int] = (), drafts: str = "mixed"
    ) -> None:
        self.drafts = drafts
        self.config = config
        self.fail = set(fail)
        width = config.max_model_len + 1
        self.tokens = np.full((config.max_num_seqs, width), -1, dtype=np.int64)
        self.groups = len(config.kinds)
        per_row = -(-width // config.block_size) * self.groups
        self.table = np.full((config.max_num_seqs, per_row), -1, dtype=np.int64)
        self.kv = np.full((config.kv_ranks * config.num_blocks, config.block_size), -1)
        # row -> number of the first block of the row's rank, see `in_one`
        self.bases = np.zeros(config.max_num_seqs, dtype=np.int64)
        # state slot (a row, or a snapshot) -> key and position of the state's last token
        self.states: dict[int, tuple[int, int]] = {}
        # row whose drafts the last step verified -> states after each token of its run
        self.runs: dict[int, list[tuple[int, int]]] = {}
        self.news: dict[int, NewRow] = {}
        # row -> `image_places`, as of the last launch
        self.places: dict[int, dict[int, tuple[Image, int]]] = {}
        self.encoded: dict[bytes, int] = {}  # digest -> CRC of the pixels, of cached embeddings
        self.pictures: dict[bytes, int] = {}  # digest -> CRC, of all embeddings ever cached
        self.launch_encoded: dict[bytes, int] = {}  # digest -> size, as of the last launch
        self.computed: dict[int, list[int]] = {}  # row -> drafts that the last step computed
        self.accepted: dict[int, int] = {}  # row -> number of drafts that the last step accepted
        # row -> maximum number of drafts that the last launched step may accept
        self.uncertain: dict[int, int] = {}
        self.num_encoded = 0
        self.launch_table: dict[int, dict[int, int]] = {}  # the tables as of the last launch
        self.in_flight: list[_Step] = []
        self.max_in_flight = 0
        self.num_steps = 0
        self.num_tokens = 0
        # whose loads steps wait for
        self.moved: FakeCopies | None = None
        self.host: FakeCopies | None = None
        self.batches: list[Batch] = []  # the last few, newest last

    def in_one(self, batch: Batch) -> Batch:
        """Return a copy of a batch with the blocks of all ranks numbered consecutively, rank after
        rank."""
        blocks = self.config.num_blocks
        for new in batch.new_rows:
            self.bases[new.row] = new.kv_rank * blocks
        return replace(
            batch,
            new_blocks=[(row, at, int(self.bases[row]) + b) for row, at, b in batch.new_blocks],
            prefixes=[
                replace(copy, blocks=[copy.kv_rank * blocks + block for block in copy.blocks])
                for copy in batch.prefixes
            ],
        )

    def launch(self, batch: Batch) -> _Step:
        batch = self.in_one(batch)
        self._check(batch)
        entries = list(zip(batch.rows, batch.starts, batch.lengths, batch.samples, strict=True))
        step = _Step(
            self,
            batch.step,
            entries,
            list(batch.new_rows),
            list(batch.new_blocks),
            [(row, first, list(drafts)) for row, first, drafts in batch.drafts],
            list(batch.prefixes),
            list(batch.settled),
            list(batch.saved_states),
            list(batch.resumed_states),
            list(batch.masked),
            proposals_of(batch),
            batch.unsettled,
            list(batch.images),
            list(batch.dropped_images),
            list(batch.ahead_images),
        )
        if self.moved is not None:
            step.loads.append(self.moved.before(batch))
        if self.host is not None:
            step.loads.append(self.host.before(batch))
        self.in_flight.append(step)
        self.max_in_flight = max(self.max_in_flight, len(self.in_flight))
        self.num_steps += 1
        self.num_tokens += batch.num_tokens
        self.batches = [*self.batches[-3:], batch]
        return step

    def recover(self) -> bool:
        assert not self.in_flight
        self.encoded.clear()
        self.launch_encoded.clear()
        return True

    def shrink(self, num_blocks: int) -> None:
        assert not self.in_flight
        self.config = replace(self.config, num_blocks=num_blocks)
        self.kv = np.full((self.config.kv_ranks * num_blocks, self.config.block_size), -1)

    def _check(self, batch: Batch) -> None:
        config = self.config
        assert batch.rows, "an empty batch was launched"
        assert batch.num_tokens <= config.max_num_batched_tokens, "over the token budget"
        drafted = [row for row, _, drafts in batch.drafts for _ in drafts]
        twice = Counter(batch.rows) - Counter(set(batch.rows))
        assert twice == Counter(drafted), "a row is in the batch twice"
        known = any(drafts[0] != ON_DEVICE for _, _, drafts in batch.drafts)
        assert not (known and self.in_flight), "drafts beside a token that is not known"
        uncertain = self.uncertain if self.in_flight else {}
        assert batch.unsettled == max(uncertain.values(), default=0), "positions are not known"
        self.uncertain = {row: len(drafts) for row, _, drafts in batch.drafts}
        assert len(batch.rows) <= config.max_num_seqs, "more requests than rows"
        single = [n == 1 and s for n, s in zip(batch.lengths, batch.samples, strict=True)]
        assert all(single[: batch.num_decodes]) and not any(single[batch.num_decodes :])
        busy = {row for step in self.in_flight for row, *_ in step.entries}
        if config.micro_batches > 1:
            unknown = {
                row
                for step in self.in_flight
                for row, _, _, samples in step.entries
                if samples and not step.concluded
            }
            assert unknown.isdisjoint(batch.rows), "the last token is not known where it is needed"
        proposals = proposals_of(batch)
        for new in batch.new_rows:
            assert new.row not in busy, "a row was given away while a step uses it"
            self.launch_table[new.row] = {}
            assert not any(image.pixels for image in new.images), "rows need no pixels"
            self.places[new.row] = image_places(new.token_ids, new.images)
        if config.images is not None:
            self._check_images(batch, config.images)
        written: dict[int, int] = {}
        for row, index, block in batch.new_blocks:
            self.launch_table[row][index] = block
        for row, start, length in zip(batch.rows, batch.starts, batch.lengths, strict=True):
            last = start + length - 1 + uncertain.get(row, 0)
            assert last < config.max_model_len
            for index in range(start // config.block_size, last // config.block_size + 1):
                for group, kind in enumerate(config.kinds):
                    at = (index if kind.by_position else 0) * self.groups + group
                    block = self.launch_table[row].get(at, -1)
                    assert block >= 0, "a token has no block"
                    assert written.setdefault(block, row) == row, "two requests write one block"
        proposed = [proposal.row for proposal in proposals]
        assert len({*proposed}) == len(proposed), "a row gets drafts twice"
        verified = {row: (first, drafts) for row, first, drafts in batch.drafts}
        for proposal in proposals:
            row, entry = proposal.row, proposal.entry
            end = batch.starts[entry] + batch.lengths[entry]
            assert proposal.position == end - 1
            assert batch.rows[entry] == row and batch.samples[entry]
            assert proposal.count > 0 or proposal.verified, "nothing to draft or to count"
            first, own = verified.get(row, (end, ()))
            assert first == end and len(own) == proposal.verified
            for at in range(len(own)):
                place = proposal.first_draft + at
                assert (batch.rows[place], batch.starts[place]) == (row, end + at)
            if not proposal.count:
                continue
            # the text is never longer than this
            last = end + uncertain.get(row, 0) + len(own) + proposal.count
            assert last < config.max_model_len, "drafts beyond the longest text"
            for index in range(end // config.block_size, (last - 1) // config.block_size + 1):
                for group, kind in enumerate(config.kinds):
                    if kind.by_position and index * config.block_size < last:
                        block = self.launch_table[row][index * self.groups + group]
                        assert written.setdefault(block, row) == row, "two requests write one block"
        copied = {block for prefix in batch.prefixes for block in prefix.blocks}
        for step in self.in_flight:
            for row, start, length, _ in step.entries:
                if row in batch.rows:
                    continue
                for index in range(-(-(start + length) // config.block_size)):
                    for group, kind in enumerate(config.kinds):
                        # Blocks before a window are freed at once (BlockManager.drop_behind).
                        if not kind.whole:
                            continue
                        block = self.launch_table.get(row, {}).get(index * self.groups + group)
                        taken = block in written or block in copied
                        assert not taken, "a block was given away while a step uses it"

    def _check_images(self, batch: Batch, plan: ImagePlan) -> None:
        encoded = self.launch_encoded
        for digest in batch.dropped_images:
            encoded.pop(digest, None)
        both = [*batch.images, *batch.ahead_images]
        assert not batch.ahead_images or batch.num_decodes, "nothing runs beside an encode"
        ahead = {image.digest for image in batch.ahead_images}
        for image in both:
            assert image.digest not in encoded, "an image is encoded that the runner has"
            whole = math.prod(image.shape) * 3 == len(image.pixels)
            assert whole or image.rows, "pixels are lost"
            encoded[image.digest] = image.size
        assert sum(encoded.values()) <= plan.cache_tokens, "more embeddings than the cache holds"
        together = sum(image.size for image in both if not image.rows)
        most = max(self.config.max_num_batched_tokens, plan.largest)
        assert together <= most, "over the budget of embeddings"
        self.num_encoded += sum(not image.rows for image in both)
        for row, start, length in zip(batch.rows, batch.starts, batch.lengths, strict=True):
            stop = start + length
            for at, (image, _) in self.places[row].items():
                if not start <= at < stop:
                    continue
                here = image.digest in encoded and image.digest not in ahead
                assert here, "a chunk needs an image that is not encoded"
                if plan.bidirectional:
                    assert stop >= image.start + image.length, "an image is cut"
        used = {
            image.digest
            for row, start, length in zip(batch.rows, batch.starts, batch.lengths, strict=True)
            for at, (image, _) in self.places[row].items()
            if start <= at < start + length
        }
        assert used >= {image.digest for image in batch.images}, "encoded without need"

    def execute(self, step: _Step) -> StepResult:
        """Run a step as the device does, and return its result: apply updates, write all keys, read
        them, and sample."""
        for digest in step.dropped_images:
            self.encoded.pop(digest, None)
        for image in step.images:
            self.encoded[image.digest] = self.pictures[image.digest] = crc32(drawn(image))
        size = self.config.block_size
        assert len({slot for _, slot in step.saved}) == len(step.saved), "a snapshot is saved twice"
        for row, count in step.settled:
            self.states[row] = self.runs[row][count - 1]
        self.runs = {row: [] for row, _, _ in step.drafts}
        for row, slot in step.saved:
            self.states[slot] = self.states[row]
        for row, slot in step.resumed:
            self.states[row] = self.states[slot]
        for new in step.rows:
            self.tokens[new.row] = -1
            self.tokens[new.row, : len(new.token_ids)] = new.token_ids
            self.tokens[new.row, : new.num_virtual] = VOCAB + np.arange(new.num_virtual)
            self.table[new.row] = -1
            self.news[new.row] = new
        for row, index, block in step.blocks:
            self.table[row, index] = block
        if step.unsettled:
            accepted = self.accepted
            step.entries = [(row, at + accepted.get(row, 0), *n) for row, at, *n in step.entries]
            step.drafts = [(row, at + accepted.get(row, 0), ids) for row, at, ids in step.drafts]
        verified: dict[int, list[int]] = {}  # row -> its drafts
        for row, first, drafts in step.drafts:
            computed = drafts[0] == ON_DEVICE
            verified[row] = self.computed[row][: len(drafts)] if computed else drafts
            self.tokens[row, first : first + len(drafts)] = verified[row]
        self.computed = {}  # only the step after a proposal can verify its drafts
        for prefix in step.prefixes:
            key = 0
            for at in range(prefix.stop):
                key = key_of(key, VOCAB + at)
                if at >= prefix.start:
                    block = prefix.blocks[(at - prefix.start) // size]
                    self.kv[block, at % size] = key
        # In order of position, because an entry may share blocks that another entry of this step
        # writes. (A model needs no order: each layer writes all keys before it reads any.)
        for row, start, length, _ in sorted(step.entries, key=lambda entry: entry[1]):
            key = 0
            places = self.places[row]
            for at in range(start + length):
                token = self.tokens[row, at]
                assert token >= 0, "computed a token that the row does not have"
                if at in places:
                    image, index = places[at]
                    pictures = self.pictures if at < start else self.encoded
                    token = embedding(pictures[image.digest], index)
                key = key_of(key, int(token))
                if at < start:
                    continue
                if self.config.snapshots is not None:
                    run = self.runs.get(row)
                    before, last = (run[-1] if run else self.states[row]) if at else (0, -1)
                    assert last == at - 1, "a request goes on from the state of another place"
                    state = key_of(before, int(token)), at
                    if run is None:
                        self.states[row] = state
                    else:
                        run.append(state)
                for group, kind in enumerate(self.config.kinds):
                    if not kind.by_position:  # a state, which must be of the token before
                        block = self.table[row, group]
                        assert not at or self.kv[block, 1] == at - 1, "a state was lost"
                        self.kv[block, :2] = key, at
                        continue
                    block = self.table[row, at // size * self.groups + group]
                    assert block >= 0, "computed a token that has no block"
                    self.kv[block, at % size] = key
        for image in step.ahead_images:
            self.encoded[image.digest] = self.pictures[image.digest] = crc32(drawn(image))
        result = StepResult(step.step, [])
        logprobs: dict[int, TokenLogprobs] = {}
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        errors: dict[int, str] = {}
        for entry, (row, start, length, samples) in enumerate(step.entries):
            new, end = self.news[row], start + length
            read: list[int] = []
            for group, kind in enumerate(self.config.kinds):
                if not kind.by_position:
                    read.append(int(self.kv[self.table[row, group], 0]))
                    continue
                begin = first_read(kind, end - 1)
                table = self.table[row, group :: self.groups][begin // size : -(-end // size)]
                first = begin // size * size
                read += self.kv[table].ravel()[begin - first : end - first].tolist()
            if self.config.snapshots is not None:
                after = {at: key for key, at in self.runs.get(row, [self.states.get(row, (0, -1))])}
                read.append(after[end - 1])
            if new.params.prompt_logprobs is not None:
                upper = min(end, new.num_prompt_tokens - 1)
                lower = max(start, new.num_virtual) + 1
                items = [_logprob(int(self.tokens[row, at]), at) for at in range(lower, upper + 1)]
                if items:
                    prompt_logprobs[entry] = items
            if new.params.pooled:
                part = self.tokens[row, start:end].sum(dtype=np.float32)
                result.pooled = {**result.pooled, entry: np.array([part, length], np.float32)}
            if not samples:
                continue
            token = next_token(read, new, end)
            sample = len(result.tokens)
            if sample in step.masked:
                bits = step.masks[step.masked.index(sample)].view(np.uint32)
                while not bits[token // 32] >> (token % 32) & 1:
                    token = (token + 1) % VOCAB
            if new.seed in self.fail:
                errors[entry], token = "numerical_error: not finite", -1
            elif new.params.logprobs is not None:
                logprobs[entry] = _logprob(token, end)
            self.tokens[row, end] = max(token, 0)
            result.tokens.append(token)
        result.logprobs, result.prompt_logprobs, result.errors = logprobs, prompt_logprobs, errors
        self.accepted = {
            p.row: self._accept(step, p, verified[p.row]) for p in step.proposals if p.verified
        }
        drafted = [self._draft(step, p) for p in step.proposals if p.count]
        ordered = (p.row for p in step.proposals if p.count)
        self.computed = dict(zip(ordered, drafted, strict=True))
        most = max((p.count for p in step.proposals), default=0)
        result.drafts = lambda: [ids + [-1] * (most - len(ids)) for ids in drafted]
        return result

    def _accept(self, step: _Step, proposal: Proposal, verified: Sequence[int]) -> int:
        """Return how many drafts of a row the step accepts, which the next step may need.

        verified: the row's drafts in this step."""
        if proposal.synthetic >= 0:
            return proposal.synthetic
        row, start, length, _ = step.entries[proposal.entry]
        sampled = self.tokens[row, start + length :]
        pairs = zip(verified, sampled.tolist(), strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def _draft(self, step: _Step, proposal: Proposal) -> list[int]:
        """Return drafts that continue the row's text after the accepted drafts of the step."""
        row, start, length, _ = step.entries[proposal.entry]
        end = start + length + self.accepted.get(row, 0)
        text: list[int] = self.tokens[row, : end + 1].tolist()
        new, keys, drafts = self.news[row], [0], []
        for at, token in enumerate(text):
            if at in self.places[row]:
                image, index = self.places[row][at]
                token = embedding(self.pictures[image.digest], index)
            keys.append(key_of(keys[-1], token))
        right = {"right": proposal.count, "wrong": 0, "mixed": end * end % 5}[self.drafts]
        for at in range(proposal.count):
            token = next_token(seen(keys[1:], self.config), new, len(keys) - 1)
            keys.append(key_of(keys[-1], token))
            drafts.append(token if at < right else (token + 1) % VOCAB)
        return drafts


def _logprob(token: int, position: int) -> TokenLogprobs:
    return TokenLogprobs(token, -float(position), 1, [], [], 0.0)


def make_config(**changes: Any) -> CoreConfig:
    values: dict[str, Any] = {
        "max_num_seqs": 32,
        "max_num_batched_tokens": 64,
        "max_model_len": 128,
        "num_blocks": 512,
        "block_size": 4,
        "eos_token_ids": (EOS,),
        "vocab_size": VOCAB,
        "model_key": "fake",
    }
    return CoreConfig(**(values | changes))


class FakeCopies:
    """A fake of `HostCopies`, which copies blocks of a FakeRunner to host slots and back.

    A load ends `delay` polls after it began. Until then its blocks hold garbage, and its slots must
    not change. Loads whose numbers are in `failing` fail. A block's entry in `owners`, the request
    whose keys it holds, is copied with the block.
    """

    def __init__(self, runner: FakeRunner, delay: int = 0, failing: Container[int] = ()) -> None:
        self._runner = runner
        self._kv = runner.kv
        self._states: dict[int, Any] = {}  # by host slot
        self._delay, self._failing = delay, failing
        self._host: dict[int, Any] = {}
        self._owners: dict[int, Any] = {}  # by host slot
        # ticket -> polls left, pairs of blocks, pairs of states, steps that must end before
        self._loads: dict[int, tuple[int, Pairs, Pairs, list[Any]]] = {}
        self.owners: dict[int, Any] = {}  # by block
        self.load_rate = self.store_seconds = self.load_seconds = 0.0
        self.most = 1 << 30
        self.num_stored = 0

    @property
    def storing(self) -> bool:
        return False

    def room(self) -> int:
        return self.most

    def store(self, pairs: Pairs, states: Pairs = ()) -> bool:
        reading = {slot for _, pairs, _, _ in self._loads.values() for slot, _ in pairs}
        assert reading.isdisjoint(slot for _, slot in pairs), "a slot is overwritten while read"
        reading = {slot for _, _, states, _ in self._loads.values() for slot, _ in states}
        assert reading.isdisjoint(slot for _, slot in states), "a state is overwritten while read"
        for snapshot, slot in states:
            self._states[slot] = self._runner.states[snapshot]
        self._end(self._loads_of({block for block, _ in pairs}))  # it waits for them
        for block, slot in pairs:
            self._host[slot] = self._kv[block].copy()
            self._owners[slot] = self.owners.get(block)
        self.num_stored += len(pairs)
        return True

    def load(self, ticket: int, pairs: Pairs, states: Pairs = ()) -> bool:
        for slot, block in pairs:
            self._kv[block] = -7
            self.owners[block] = self._owners[slot]
        self._loads[ticket] = self._delay, pairs, states, list(self._runner.in_flight)
        return ticket not in self._failing

    def finished(self) -> list[tuple[int, bool]]:
        done = []
        for ticket, (looks, pairs, states, steps) in list(self._loads.items()):
            self._loads[ticket] = max(0, looks - 1), pairs, states, steps
            if looks or any(step in self._runner.in_flight for step in steps):
                continue
            del self._loads[ticket]
            done.append((ticket, ticket not in self._failing))
            if ticket not in self._failing:
                self._copy(pairs)
            for slot, snapshot in states:
                failed = ticket in self._failing
                self._runner.states[snapshot] = (-7, -7) if failed else self._states[slot]
        return done

    def ending(self) -> dict[int, float]:
        """Return 0 seconds for each load that ends at the next poll but one, or before."""
        soon = {ticket for ticket, (looks, *_) in self._loads.items() if looks <= 1}
        return {ticket: 0.0 for ticket in soon if ticket not in self._failing}

    def _copy(self, pairs: Pairs) -> None:
        for slot, block in pairs:
            self._kv[block] = self._host[slot]

    def stored(self, slots: Collection[int], states: Collection[int] = ()) -> bool:
        return True

    def wait(self) -> None:
        self._loads = {ticket: (0, *load[1:]) for ticket, load in self._loads.items()}

    def before(self, batch: Batch) -> Callable[[], None]:
        """Return what a step of this batch does before it runs: end the loads that it needs."""
        needed = self._loads_of({block for _, _, block in batch.new_blocks})
        return lambda: self._end(needed)

    def _loads_of(self, blocks: Container[int]) -> list[int]:
        return [
            ticket
            for ticket, (_, pairs, *_) in self._loads.items()
            if any(block in blocks for _, block in pairs)
        ]

    def _end(self, needed: Sequence[int]) -> None:
        for ticket in needed:
            if ticket in self._loads:
                _, pairs, states, _ = self._loads[ticket]
                assert not states and ticket not in self._failing
                self._copy(pairs)
                self._loads[ticket] = 0, (), (), []

    def stores_end(self) -> Callable[[], None]:
        return lambda: None

    def loads_end(self) -> Callable[[], None]:
        return lambda: None


class FakeFiles:
    """A fake of `BlockFiles`, whose files hold the contents of slots of `FakeCopies`.

    A second engine may share the files. A write ends at the second poll, a read `delay` polls after
    it began. The slots of a write or read must not change meanwhile. Reads whose numbers are in
    `failing` fail for their first block."""

    def __init__(self, copies: FakeCopies, delay: int = 0, failing: Container[int] = ()) -> None:
        self._copies, self._delay, self._failing = copies, delay, failing
        self.files: dict[int, dict[bytes, Any]] = {-1: {}, **{group: {} for group in range(8)}}
        self._writes: list[tuple[tuple[int, bytes], int, Any]] = []
        self._reads: dict[int, tuple[int, Sequence[tuple[tuple[int, bytes], int]]]] = {}
        self.num_reads = 0
        self.most = 1 << 30
        self.read_rate = 0.0
        self.closed = False
        self.wake: Callable[[], None] = lambda: None

    def _contents(self, key: tuple[int, bytes], slot: int) -> Any:
        if key[0] == -1:
            return self._copies._states[slot]
        return self._copies._host[slot].tolist(), self._copies._owners.get(slot)

    def has(self, key: tuple[int, bytes]) -> bool:
        return key[1] in self.files[key[0]]

    def hashes(self, group: int) -> dict[bytes, Any]:
        return self.files[group]

    def look_up(self, digests: Iterable[bytes]) -> bool:
        return False

    def room(self) -> int:
        return self.most

    def write(self, key: tuple[int, bytes], slot: int, rank: int = 0) -> None:
        self._writes.append((key, slot, self._contents(key, slot)))

    def written(self) -> list[tuple[tuple[int, bytes], int]]:
        ended, self._writes = self._writes, []
        for key, slot, contents in ended:
            assert contents == self._contents(key, slot), "a slot changed while it was written"
            self.files[key[0]][key[1]] = contents
        return [(key, slot) for key, slot, _ in ended]

    def has_news(self) -> bool:
        return bool(self._writes)

    def read(self, ticket: int, entries: Sequence[tuple[tuple[int, bytes], int]]) -> None:
        self._reads[ticket] = self._delay, entries
        for key, slot in entries:
            self._fill(key, slot, None)

    def _fill(self, key: tuple[int, bytes], slot: int, contents: Any) -> None:
        if key[0] == -1:
            self._copies._states[slot] = (-7, -7) if contents is None else contents
        elif contents is not None:
            self._copies._host[slot] = np.array(contents[0])
            self._copies._owners[slot] = contents[1]
        else:
            self._copies._host[slot] = np.full(self._copies._runner.kv.shape[1:], -7)

    def finished(self) -> list[tuple[int, frozenset[tuple[int, bytes]]]]:
        done = []
        for ticket, (looks, entries) in list(self._reads.items()):
            self._reads[ticket] = looks - 1, entries
            if looks > 0:
                continue
            del self._reads[ticket]
            self.num_reads += 1
            failed = {entries[0][0]} if self.num_reads in self._failing else set()
            for key, slot in entries:
                contents = self.files[key[0]].get(key[1])
                if key in failed or contents is None:
                    failed.add(key)
                    self.files[key[0]].pop(key[1], None)
                else:
                    self._fill(key, slot, contents)
            done.append((ticket, frozenset(failed)))
        return done

    def forget(self, keys: Iterable[tuple[int, bytes]]) -> None:
        keys = {*keys}
        for group, digest in keys:
            self.files[group].pop(digest, None)

    def clear(self) -> None:
        for files in self.files.values():
            files.clear()

    renew = clear

    def stats(self) -> dict[str, Any]:
        return {"disk_kv_blocks": sum(map(len, self.files.values()))}

    def close(self) -> None:
        self.closed = True


class Inline(Executor):
    """An executor that runs a call when it is submitted, or with `hold` when `release` is
    called."""

    def __init__(self, hold: bool = False) -> None:
        self.hold = hold
        self.held: list[Callable[[], Any]] = []

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self.held.append(lambda: work(*args, **kwargs))
        if not self.hold:
            self.release()

    def release(self) -> None:
        held, self.held = self.held, []
        for work in held:
            work()


class MemoryLoader:
    """A loader of adapters that have no files.

    An adapter's path is its size in bytes followed by its name in VIRTUAL, or the error of its
    load.
    """

    def describe(self, path: str, digest: str = "") -> AdapterDescription:
        if not path[0].isdigit():
            raise AdapterError(path)
        kind, virtual = VIRTUAL.get(path.lstrip("0123456789"), ("lora", 0))
        return AdapterDescription(kind, 8, int(path.rstrip(LETTERS)), [], path, virtual)

    def read(self, path: str, digest: str = "") -> LoadedAdapter:
        described = self.describe(path)
        return LoadedAdapter(described, path, described.num_bytes, object())

    def upload(self, weights: Any, slot: int) -> None:
        assert weights is not None


def make_store(
    names: Sequence[str] = (),
    max_loras: int = 2,
    host_bytes: int = 1 << 30,
    *,
    disk: Inline | None = None,
    device: Inline | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> AdapterStore:
    """Return a store with these adapters registered, of one byte each, and none loaded."""
    disk, device = disk or Inline(), device or Inline()
    store = AdapterStore(
        MemoryLoader(), max_loras, host_bytes, disk=disk, device=device, clock=clock
    )
    for ticket, name in enumerate(names):
        store.add(AddAdapter(ticket, name, f"1{name if name in VIRTUAL else ''}", load=False))
        disk.release()
    store.poll()
    assert all(answer.info is not None for answer in store.take_answers())
    return store


class FakePages:
    """The pages of a FakeRunner's KV blocks; blocks beyond the initial ones are mapped in steps of
    3.

    Unmapping a block clears its keys.
    """

    def __init__(self, runner: FakeRunner, most: int) -> None:
        self.most = most
        self.mapped = self.least = runner.config.num_blocks
        self.copying = False
        self._runner = runner
        runner.kv = np.full((most, runner.config.block_size), -1)

    @property
    def mapped_bytes(self) -> int:
        return 10 * self.mapped

    def rounded(self, num_blocks: int) -> int:
        beyond = max(0, num_blocks - self.least)
        return min(self.most, self.least + -(-beyond // 3) * 3)

    def num_bytes(self, num_blocks: int) -> int:
        return 10 * self.rounded(num_blocks)

    def grow(self, num_blocks: int) -> None:
        self.mapped = self.rounded(num_blocks)

    def retract(self, num_blocks: int) -> Callable[[], None] | None:
        if self.copying:
            return None

        def unmap() -> None:
            self.mapped = self.rounded(num_blocks)
            self._runner.kv[self.mapped :] = -1

        return unmap

    def give_all(self) -> None:
        self.mapped = 0
        self._runner.kv[:] = -1


class FakeShare:
    """One engine's share of a device's KV memory, which it divides with a second, fake engine.

    free: bytes available to this engine. wanted: bytes that the other engine asks for.
    """

    def __init__(self, pages: FakePages) -> None:
        self.free = 10 * pages.most
        self.wanted = 0
        self.own = Holding()

    sleeping = False

    def claim(self, size: int, *, last: bool = False) -> int:
        granted = min(size, self.room())
        self.own.claimed += granted
        return granted

    def settle(self, mapped: int, *, least: int | None = None) -> None:
        self.own.claimed = self.own.mapped = mapped

    def wait_for(self, size: int, seconds: float) -> bool:
        return bool(self.claim(size))

    def report(self, *, used: int, short: int) -> None:
        self.own.used, self.own.short = used, short

    def asked(self) -> int:
        return min(self.wanted, self.own.spare)

    def room(self) -> int:
        return max(0, self.free - self.own.claimed)

    def others(self) -> list[Holding]:
        return [Holding(short=self.wanted)]


def make_core(
    *,
    fail: Sequence[int] = (),
    adapters: AdapterStore | None = None,
    speculation: Speculation | None = None,
    drafts: str = "mixed",
    host: HostPlan | None = None,
    delay: int = 0,
    failing: Container[int] = (),
    disk: bool = False,
    growth: int = 0,
    moves: MovePlan | None = None,
    **changes: Any,
) -> tuple[EngineCore, FakeRunner]:
    """Return an engine core on a FakeRunner, and the runner.

    adapters: by default a store with the adapters "lora", "lora2" and VIRTUAL, and one slot.
    host, delay, failing: a host tier, and the behaviour of its copies (`FakeCopies`).
    disk: whether there is a disk tier below the host tier (`FakeFiles`).
    growth: number of blocks that may be added while the core runs (`FakePages`).
    moves: settings of moves of blocks from another engine (tests/engine/scheduling/moving.py).
    """
    config = make_config(**changes)
    runner = FakeRunner(config, fail=fail, drafts=drafts)
    store = make_store(["lora", "lora2", *VIRTUAL], max_loras=1) if adapters is None else adapters
    tier = None
    if host is not None:
        copies = FakeCopies(runner, delay, failing)
        files = FakeFiles(copies, delay, failing) if disk else None
        runner.host = copies
        tier = HostTier(host, copies, len(config.kinds), files)
    moving = None
    if moves is not None:
        memory = [memoryview(bytearray(1))] * 2 * moves.slots
        early = host is None
        moved = FakeCopies(runner, delay, failing)
        runner.moved = moved if early else None
        moving = BlockMoves(moves, moved, memory, early=early)
    if not growth:
        core = EngineCore(config, runner, store, speculation=speculation, tier=tier, moves=moving)
        return core, runner
    pages = FakePages(runner, config.num_blocks + growth)
    grows = KVGrowth(pages, FakeShare(pages), config.num_blocks)  # type: ignore[arg-type]
    core = EngineCore(
        config, runner, store, LowestFirst, speculation=speculation, tier=tier, moves=moving,
        growth=grows,
    )  # fmt: skip
    return core, runner


def make_request(id: int, prompt: Sequence[int] | int = 8, **fields: Any) -> EngineRequest:
    """Return a request; fields that EngineRequest lacks go to its SamplingParams.

    prompt: token ids, or a number of tokens, which are then derived from `id`.
    """
    if isinstance(prompt, int):
        prompt = [2 + (id * 7 + i * i) % (VOCAB - 2) for i in range(prompt)]
    own = {"seed", "choice", "cache_salt", "adapter", "priority", "num_prompt_tokens", "images"}
    own |= {"source", "keep_seconds", "prefix_hashes", "verbatim"}
    message = {name: fields.pop(name) for name in own & fields.keys()}
    params = SamplingParams(**({"max_tokens": 16} | fields))
    return EngineRequest(
        id,
        list(prompt),
        message.pop("num_prompt_tokens", len(prompt)),
        params,
        message.pop("seed", id),
        **message,
    )


@dataclass
class Output:
    """The whole output of one request, collected from its deltas."""

    tokens: list[int]
    finish: str
    deltas: list[Delta]

    @property
    def cached(self) -> int:
        return self.deltas[0].cached


def collect(deltas: Sequence[Delta], outputs: dict[int, Output] | None = None) -> dict[int, Output]:
    """Add deltas to the outputs of their requests; return all outputs by request id.

    Asserts that no delta follows the end of its request.
    """
    outputs = {} if outputs is None else outputs
    for delta in deltas:
        output = outputs.setdefault(delta.id, Output([], "", []))
        assert not output.finish, f"request {delta.id} goes on after its end: {delta}"
        output.tokens += delta.token_ids
        output.finish = delta.finish
        output.deltas.append(delta)
    return outputs


def run(
    core: EngineCore, requests: Sequence[EngineRequest] = (), limit: int = 100_000
) -> dict[int, Output]:
    """Add all requests and step until idle; return the outputs by request id.

    Asserts that no row or block is held then.
    """
    for request in requests:
        core.add_request(request)
    outputs: dict[int, Output] = {}
    while core.has_work():
        collect(core.step(), outputs)
        limit -= 1
        assert limit > 0, "the engine never becomes idle"
    core.check_integrity()
    assert all(pool.num_free == pool.num_blocks for pool in core.scheduler.memory.pools)
    assert all(output.finish for output in outputs.values()), "a request never ended"
    return outputs
