"""FakeCore: an engine core without a model, for tests and benchmarks of the rest of the system.

`EngineConfig(model="fake:key=value,...")` selects it. The token at position p of a sequence is
first + p % (vocab_size - first). The token depends only on the position, and on the adapter's name
and revision, the version of updated weights and the digests of images, which shift p. A token's
log-probability depends only on the token. So a stream that was resumed on another replica can be
checked for gaps and repeats, and the CPU cost of router and client is measured without that of a
model. The embedding of a text is [number of tokens, sum of their ids, first id, last id].
"""

import os
import shutil
import signal
import struct
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any
from zlib import crc32

import msgspec

from engine.batch import TokenLogprobs
from engine.config.engine_config import EngineConfig
from engine.errors import AdapterError, ConfigError, EngineDead, UpdateFailed
from engine.lora.fake import FakeLoader
from engine.lora.tiers.adapter import Adapter
from engine.lora.tiers.store import AdapterStore
from engine.messages import (
    NOT_JOINED,
    PARTS,
    WEIGHTS,
    AdapterAnswer,
    AddAdapter,
    Answer,
    Delta,
    EngineRequest,
    EngineStats,
    Ready,
    RemoveAdapter,
    RoutedExperts,
    TransferWeights,
    UpdateWeights,
)
from engine.scheduling.orders.sleeping import KEEP, EngineSleep
from engine.scheduling.orders.transfers import WeightTransfers
from engine.scheduling.orders.updates import Pause, WeightUpdates
from engine.scheduling.pacing.step_timer import StepTimer

PREFIX = "fake:"
STEP_TOKENS = 2048  # the reported token budget; a fake step computes all waiting tokens


class FakeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of the fake model's name.

    first: smallest token id produced.
    tokens_per_step: tokens of each running request in a step.
    step_seconds: duration of each step.
    answer_tokens: number of tokens after which an answer ends with the end token; 0 = never.
    eos: the end token.
    poison: a request whose prompt has this token fails.
    adapter_seconds: time that an adapter takes to reach the device.
    fail_start: raise at start.
    fail_step: the step that raises.
    exit_step: the step in which the process exits without a message.
    hang_step: the step that never ends.
    lethal: a request whose prompt has this token ends the process.
    lethal_at: index of the answer's token from whose step on the request ends the process.
    lethal_after: number of tokens that the request must first produce in this process.
    lost_at_signal: after SIGUSR1 the next step raises, as if the device were lost.
    wake_seconds: duration of a wake.
    fail_wake: raise at a wake.
    """

    vocab_size: int = 1000
    max_model_len: int = 4096
    first: int = 32
    tokens_per_step: int = 1
    step_seconds: float = 0.0
    start_seconds: float = 0.0
    answer_tokens: int = 0
    eos: int = 2
    poison: int = -1
    adapter_seconds: float = 0.0
    fail_start: bool = False
    fail_step: int = -1
    exit_step: int = -1
    hang_step: int = -1
    lethal: int = -1
    lethal_at: int = 0
    lethal_after: int = 0
    lost_at_signal: bool = False
    wake_seconds: float = 0.0
    fail_wake: bool = False

    @classmethod
    def parse(cls, model: str) -> "FakeOptions":
        """Read the options of a model name. Raises ConfigError on an unknown key or wrong value."""
        pairs = [item.partition("=") for item in model.removeprefix(PREFIX).split(",") if item]
        try:
            return msgspec.convert({k: v for k, _, v in pairs}, cls, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"model {model!r}: {error}", param="model") from error


def _routed(tokens: list[int]) -> RoutedExperts:
    """Return two layers' experts for tokens: the last two hexadecimal digits of each token's id."""
    data = bytes(digit for token in tokens for digit in (token & 15, token >> 4 & 15) * 2)
    return RoutedExperts((len(tokens), 2, 2), "uint8", data)


class FakeWeights:
    """A WeightLoader that reads no files."""

    def holds(self, folder: str) -> bool:
        return False

    def check(self, folder: str) -> None:
        """Do nothing: there are no names or shapes to compare."""

    def load(self, folder: str) -> None:
        """Do nothing: the core itself shifts its tokens by the version's name."""


class FakeReceiver:
    """A receiver of a trainer's weights that reads no tensor and creates an empty folder.

    info: each init_info and update_info received so far.
    """

    def __init__(self) -> None:
        self.info: list[dict[str, Any]] = []
        self._folders: list[str] = []
        self._placed = ""
        self._started = False

    def init(self, info: dict[str, Any]) -> None:
        self.info.append(info)

    def start(self, info: dict[str, Any]) -> None:
        self.drop({})
        self._started = True

    def update(self, info: dict[str, Any]) -> str:
        self.info.append(info)
        if self._started:
            return ""
        self.start({})
        return self.finish({})

    def collect(self, info: dict[str, Any]) -> str:
        """Record a message; if it names the fake tensor "last", end the update.

        Returns the folder of the ended update, else "". Raises UpdateFailed if no update was
        started.
        """
        if not self._started:
            raise UpdateFailed("no update of the weights was started", code=NOT_JOINED)
        self.info.append(info)
        return self.finish({}) if "last" in info.get("names", ()) else ""

    def finish(self, info: dict[str, Any]) -> str:
        if not self._started:
            raise UpdateFailed("no update of the weights was started", code=NOT_JOINED)
        self._started = False
        self._folders.append(tempfile.mkdtemp(prefix="manta-weights-"))
        return self._folders[-1]

    def drop(self, info: dict[str, Any]) -> None:
        self._started = False
        for path in self._folders:
            if path != self._placed:
                shutil.rmtree(path, ignore_errors=True)
        self._folders = [path for path in self._folders if path == self._placed]

    def in_place(self, folder: str) -> None:
        self._placed = folder
        self.drop({})

    def close(self) -> None:
        self.in_place("")


class FakeMemory:
    """The memory of the fake core; a sleep frees nothing."""

    def sleep(self, parts: Collection[str] = PARTS, *, drop: bool = False) -> None:
        """Do nothing."""

    def wake(self, parts: Collection[str] = PARTS) -> None:
        """Do nothing."""


class FakeCore:
    """A core with the interface of `engine.scheduling.core.EngineCore`, without a model.

    All waiting requests run in the next step.
    """

    on_device = False

    def __init__(self, config: EngineConfig) -> None:
        self._options = FakeOptions.parse(config.model)
        self._limit = config.max_num_seqs or 1024
        self._block_size = config.block_size
        self._step_tokens = config.max_num_batched_tokens or STEP_TOKENS
        self._max_len = min(
            config.max_model_len or self._options.max_model_len, self._options.max_model_len
        )
        self._requests: dict[int, EngineRequest] = {}  # in order of arrival
        self._new: set[int] = set()
        self._ended: list[Delta] = []  # deltas of requests refused or aborted since the last step
        # Memory for the longest requests in all rows, so that rows are the limit.
        self._blocks = -(-self._max_len // config.block_size)
        self._stats = EngineStats(
            total_blocks=self._blocks * self._limit, block_size=config.block_size, rows=self._limit
        )
        loader = FakeLoader(self._options.adapter_seconds)
        self._store = AdapterStore(loader, config.max_loras, config.lora_host_bytes or 1 << 30)
        self._adapters: dict[int, Adapter] = {}  # request id -> its adapter
        self._slots: dict[int, int] = {}  # request id -> its adapter's slot, once it has one
        self._blocked: set[int] = set()  # requests that wait for their adapters
        self.lost = False  # whether the device was lost
        self.end_process: Callable[[int], object] = os._exit
        # requests that will end the process -> their tokens at arrival
        self._lethal: dict[int, int] = {}
        self._timer = StepTimer()
        self._pause = Pause()
        self._sleep = EngineSleep(FakeMemory())
        self._updates = WeightUpdates(FakeWeights())
        self._transfers = WeightTransfers(FakeReceiver())

    def ready(self) -> Ready:
        o = self._options
        return Ready(
            max_model_len=self._max_len,
            vocab_size=o.vocab_size,
            block_size=self._block_size,
            num_blocks=self._stats.total_blocks,
            eos_token_ids=[o.eos],
            start_seconds={},
            memory_table="fake",
            step_tokens=self._step_tokens,
            stats=msgspec.structs.replace(self.stats()),
        )

    def add_request(self, request: EngineRequest) -> None:
        if self._pause.on and not self._stats.draining:
            self._pause.later[request.id] = request
        elif self._stats.draining:
            self._end(request.id, "error", "draining: this engine takes no new requests")
        elif self._options.poison in request.token_ids:
            self._end(request.id, "error", "poisoned: the prompt has the poison token")
        elif request.params.structured is not None:
            self._end(
                request.id, "error", "structured_not_supported: a fake engine has no grammars"
            )
        else:
            try:
                self._claim(request)
            except AdapterError as error:
                self._end(request.id, "error", f"{error.code}: {error.message}")
                return
            self._requests[request.id] = request
            self._new.add(request.id)
            if self._options.lethal in request.token_ids[: request.num_prompt_tokens]:
                self._lethal[request.id] = len(request.token_ids)

    def _kills(self) -> bool:
        """Whether a lethal request ends the process in this step."""
        options = self._options
        for id, begun in self._lethal.items():
            request = self._requests.get(id)
            if request is not None:
                num_new = len(request.token_ids) - begun
                position = len(request.token_ids) - request.num_prompt_tokens
                if position >= options.lethal_at and num_new >= options.lethal_after:
                    return True
        return False

    def _claim(self, request: EngineRequest) -> None:
        if request.adapter:
            adapter = self._adapters[request.id] = self._store.find(request.adapter)
            self._store.claim(adapter)

    def _can_run(self, request: EngineRequest) -> bool:
        """Return whether the request has its adapter's slot, or gets it now.

        A request whose adapter cannot be loaded ends here.
        """
        adapter = self._adapters.get(request.id)
        if adapter is None or request.id in self._slots:
            return True
        try:
            ready = self._store.ask(adapter)
        except AdapterError as error:
            self._forget(request.id)
            self._end(request.id, "error", f"{error.code}: {error.message}")
            return False
        if ready:
            self._slots[request.id] = self._store.pin(adapter, first=True)
        else:
            self._blocked.add(request.id)
        return ready

    def _forget(self, request_id: int) -> None:
        del self._requests[request_id]
        self._new.discard(request_id)
        self._blocked.discard(request_id)
        adapter, slot = self._adapters.pop(request_id, None), self._slots.pop(request_id, None)
        if adapter is not None:
            self._store.release(adapter, started=slot is not None)
        if slot is not None:
            self._store.unpin(slot)

    def _end(self, request_id: int, finish: str, error: str = "") -> None:
        self._ended.append(Delta(request_id, [], finish, error=error))

    def abort(self, ids: list[int]) -> None:
        for request_id in ids:
            if request_id in self._requests:
                self._forget(request_id)
                self._end(request_id, "abort")
            elif self._pause.later.pop(request_id, None) is not None:
                self._end(request_id, "abort")

    def has_work(self) -> bool:
        runnable = len(self._requests) > len(self._blocked) and not self._held
        waiting = self._ended or self._store.has_news() or self._updates.ready
        return bool(runnable or waiting)

    def launch_delay(self) -> float:
        return 0.0

    @property
    def _held(self) -> bool:
        return self._pause.frozen or self._sleep.dropped

    def step(self) -> list[Delta]:
        options, stats = self._options, self._stats
        if self._sleep.asleep and self._requests and not self._held:
            self.wake()
        stats.step += 1
        began = time.perf_counter()
        if stats.step == options.fail_step:
            raise RuntimeError("the fake engine was told to fail")
        if self.lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if stats.step == options.exit_step:
            os._exit(3)
        if self._kills():
            self.end_process(3)
        if stats.step == options.hang_step:
            time.sleep(3600)
        if options.step_seconds:
            time.sleep(options.step_seconds)
        if self._updates.ready:
            self.wake([WEIGHTS])
            if self._updates.replace():
                self._sleep.replaced()
                self._transfers.in_place(self._updates.folder)
        deltas, self._ended = self._ended, []
        if self._store.poll():
            self._blocked.clear()
        running = [] if self._held else list(self._requests.values())[: self._limit]
        for request in running:
            if request.id not in self._blocked and self._can_run(request):
                deltas.append(self._advance(request))
        stats.finished += sum(1 for delta in deltas if delta.finish)
        self._fall_asleep()
        self._timer.stepped(began, result=True, more=self.has_work())
        stats.step_seconds, stats.busy_seconds = self._timer.step, self._timer.total
        return deltas

    def _advance(self, request: EngineRequest) -> Delta:
        options, params, tokens = self._options, request.params, request.token_ids
        new: list[int] = []
        if params.pooled:
            self._forget(request.id)
            self._stats.prompt_tokens += len(tokens)
            vector = struct.pack("<4f", len(tokens), sum(tokens), tokens[0], tokens[-1])
            return Delta(request.id, [], "length", cached=0, vector=vector)
        adapter = self._adapters.get(request.id)
        shift = 0 if adapter is None else crc32(adapter.key.encode())
        if self._updates.count:
            shift += crc32(self._updates.version.encode())
        for image in request.images:
            shift += crc32(image.digest)
        finish, stop_token = "", None
        limit = self._max_len
        if params.max_tokens is not None:
            limit = min(limit, request.num_prompt_tokens + params.max_tokens)
        while len(new) < options.tokens_per_step and not finish:
            if len(tokens) >= limit:
                finish = "length"
                break
            token = options.first + (len(tokens) + shift) % (options.vocab_size - options.first)
            produced = len(tokens) - request.num_prompt_tokens + 1
            if produced == options.answer_tokens and not params.ignore_eos:
                token = options.eos
            tokens.append(token)
            new.append(token)
            ends = token == options.eos and not params.ignore_eos
            if ends or token in params.stop_token_ids:
                finish, stop_token = "stop", token
            elif len(tokens) >= limit:
                finish = "length"
        self._stats.output_tokens += len(new)
        delta = Delta(request.id, new, finish, stop_token)
        if params.logprobs is not None:
            delta.logprobs = [self._logprobs(token, params.logprobs) for token in new]
        if request.id in self._new:
            self._new.discard(request.id)
            self._stats.prompt_tokens += len(tokens) - len(new)
            delta.cached = 0
        if finish:
            if params.return_routed_experts:
                delta.routed = _routed(tokens[:-1])
            self._forget(request.id)
        return delta

    def _logprobs(self, token: int, k: int) -> TokenLogprobs:
        """Return the log-probability of a token, which is the most likely, and of k following
        tokens."""
        first, size = self._options.first, self._options.vocab_size
        ids = [first + (token - first + place) % (size - first) for place in range(k)]
        best = -1.0 - token / size
        return TokenLogprobs(token, best, 1, ids, [best - place for place in range(k)], 9.0)

    def stats(self) -> EngineStats:
        stats = self._stats
        stats.running = min(len(self._requests), self._limit)
        stats.waiting = len(self._requests) - stats.running + len(self._pause.later)
        stats.paused = self._pause.on
        stats.weights_version, stats.weight_updates = self._updates.version, self._updates.count
        stats.free_blocks = stats.total_blocks - stats.running * self._blocks
        stats.adapters, stats.adapter_loads = self._store.resident, self._store.loads
        return stats

    def drain(self) -> None:
        self._stats.draining = True

    def sleep(self, level: int = KEEP, parts: Sequence[str] = (), ticket: int = 0) -> None:
        self._sleep.ask(level, parts, ticket)
        self._fall_asleep()

    def _fall_asleep(self) -> None:
        if self._sleep.wanted and (self._held or not self._requests):
            self._sleep.begin()
        self._note_sleep()

    def wake(self, parts: Sequence[str] = (), ticket: int = 0) -> None:
        if self._sleep.asleep:
            if self._options.fail_wake:
                raise EngineDead("the fake engine was told not to wake", code="device_taken")
            time.sleep(self._options.wake_seconds)
        self._sleep.end(parts, ticket)
        self._note_sleep()

    def _note_sleep(self) -> None:
        self._stats.asleep, self._stats.weights_dropped = self._sleep.asleep, self._sleep.dropped
        self._stats.wakes = self._sleep.wakes
        if self._sleep.wakes:
            self._stats.wake_seconds = self._options.wake_seconds

    def reset_prefix_cache(self) -> None:
        """Do nothing, as the fake core has no prefix cache."""

    def pause(self, mode: str, ticket: int) -> None:
        if self._pause.begin(mode, ticket):
            self.abort([*self._requests, *self._pause.later])

    def resume(self) -> None:
        self._timer.skip()
        for message in self._pause.end():
            self.add_request(message)

    def take_evicted(self) -> tuple[bytes, bytes]:
        """Return nothing, as the fake core has no prefix cache."""
        return b"", b""

    def serve_kv(self, host: str, ticket: int) -> None:
        """Do nothing, as the fake core has no KV blocks."""

    def update_weights(self, message: UpdateWeights) -> None:
        self._updates.ask(message)

    def transfer_weights(self, message: TransferWeights) -> None:
        self._transfers.ask(message)

    def close(self) -> None:
        self._transfers.close()

    def add_adapter(self, message: AddAdapter) -> None:
        self._store.add(message)

    def remove_adapter(self, message: RemoveAdapter) -> None:
        self._store.remove(message)

    def answers(self) -> list[AdapterAnswer | Answer]:
        return [
            *self._store.take_answers(),
            *self._updates.take_answers(),
            *self._sleep.take_answers(),
            *self._transfers.take_answers(),
            *self._pause.take_answers(in_flight=False, requests=bool(self._requests)),
        ]

    def on_loaded(self, wake: Callable[[], None]) -> None:
        self._store.on_loaded(wake)
        self._updates.on_checked(wake)
        self._transfers.on_done(wake)

    def check_integrity(self) -> None:
        held = self._held or self._requests.keys() == self._blocked
        assert held and not self._ended


def build(config: EngineConfig) -> tuple[FakeCore, Ready]:
    options = FakeOptions.parse(config.model)
    time.sleep(options.start_seconds)
    if options.fail_start:
        raise ConfigError("the fake engine was told not to start", param="model")
    core = FakeCore(config)
    if options.lost_at_signal:
        signal.signal(signal.SIGUSR1, lambda *_: setattr(core, "lost", True))
    return core, core.ready()
