"""ReplicaClient: a router's connection to one replica, its choices there, and its state for
routing."""

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from deployments.router.inflight import InflightChoice
from deployments.router.replicas.replica_calls import ReplicaCalls
from deployments.routing.fleet import Fleet
from deployments.routing.prefix_index import unpack_hashes
from deployments.transport.channel import ChannelLimits, FromReplica, RouterEnd
from engine.messages import Failed, KVSource, StepFrame

logger = logging.getLogger("manta.router")

_RETRY = (0.05, 2.0)  # seconds between attempts to connect: first, longest


@dataclass(frozen=True, slots=True)
class ReplicaEndpoint:
    """The metadata that a replica publishes: its address, its secret, and its engine's limits.

    secret: key of the channel's authentication.
    step_tokens: maximum of tokens in a step.
    image_tokens: maximum embeddings of an image; 0: not reported.
    adapter_slots: adapters that fit on the device; 0: not reported.
    weights, tokenizer: fields of checkpoints.resolve.ModelIdentity.
    start_seconds: duration of the replica's start; 0: not reported.
    dtype: the type of the engine's weights, as in "bfloat16"; "": not reported.
    logprobs_mode: the default logprobs mode of requests.
    tensor_parallel, pipeline_parallel: the number of ranks per pipeline stage, and of stages.
    kv_port, kv_secret: port and secret by which other replicas pull KV blocks from this one; 0 and
        "": blocks cannot be pulled.
    kv_token_bytes: bytes of a token's keys and values in all layers.
    role: "prefill": computes prompts for decode replicas; "decode": continues them; "engine": does
        both.
    """

    host: str
    port: int
    secret: str  # hex
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    step_tokens: int
    image_tokens: int = 0
    adapter_slots: int = 0
    prefix_caching: bool = True
    weights: str = ""
    tokenizer: str = ""
    start_seconds: float = 0.0
    dtype: str = ""
    logprobs_mode: str = "raw_logprobs"
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    kv_port: int = 0
    kv_secret: str = ""
    kv_token_bytes: float = 0.0
    role: str = "engine"

    @property
    def kv_source(self) -> KVSource | None:
        """The address and secret for pulling KV blocks from this replica; None: they cannot be
        pulled."""
        return KVSource(self.host, self.kv_port, self.kv_secret) if self.kv_port else None

    @classmethod
    def parse(cls, metadata: Mapping[str, Any]) -> "ReplicaEndpoint":
        return cls(
            host=str(metadata["host"]),
            port=int(metadata["port"]),
            secret=str(metadata["secret"]),
            max_model_len=int(metadata["max_model_len"]),
            vocab_size=int(metadata["vocab_size"]),
            eos_token_ids=tuple(int(token) for token in metadata["eos_token_ids"]),
            step_tokens=int(metadata["step_tokens"]),
            image_tokens=int(metadata.get("image_tokens", 0)),
            adapter_slots=int(metadata.get("adapter_slots", 0)),
            prefix_caching=bool(metadata.get("prefix_caching", True)),
            weights=str(metadata.get("weights", "")),
            tokenizer=str(metadata.get("tokenizer", "")),
            start_seconds=float(metadata.get("start_seconds", 0.0)),
            dtype=str(metadata.get("dtype", "")),
            logprobs_mode=str(metadata.get("logprobs_mode", "raw_logprobs")),
            tensor_parallel=int(metadata.get("tensor_parallel", 1)),
            pipeline_parallel=int(metadata.get("pipeline_parallel", 1)),
            kv_port=int(metadata.get("kv_port", 0)),
            kv_secret=str(metadata.get("kv_secret", "")),
            kv_token_bytes=float(metadata.get("kv_token_bytes", 0.0)),
            role=str(metadata.get("role", "engine")),
        )


class ReplicaListener(Protocol):
    """The interface for events of replicas, called on the event loop."""

    def opened(self, client: "ReplicaClient") -> None:
        """Handle an opened connection: the replica accepts requests now."""

    def frame(self, client: "ReplicaClient", frame: StepFrame, now: float) -> None:
        """Handle a frame with the deltas and stats of a replica's step. now: monotonic seconds."""

    def lost(self, client: "ReplicaClient", choices: list[InflightChoice], reason: str) -> None:
        """Handle a broken connection. choices: choices that the replica ran. reason: the cause."""


class ReplicaClient:
    """A connection to one replica, which is re-established until the client is retired.

    choices: this router's choices at the replica, by number.
    listener: the handler of the replica's events.
    fleet: the fleet that has the replica's state until this client is retired.
    calls: the router's calls to replicas, which get the replica's answers.
    router: name of the router, for the replica's logs.
    state: the replica's state for routing.
    """

    def __init__(
        self,
        replica: str,
        endpoint: ReplicaEndpoint,
        listener: ReplicaListener,
        *,
        fleet: Fleet,
        calls: ReplicaCalls,
        limits: ChannelLimits,
        router: str,
    ) -> None:
        self.replica = replica
        self.endpoint = endpoint
        self.connection: RouterEnd | None = None  # None while it is not open
        self.choices: dict[int, InflightChoice] = {}
        self.failed: Failed | None = None  # the replica's last message, if its engine has failed
        # Whether the connection was closed because nothing arrived; the process may be alive.
        self.silent = False
        # Whether Serve has removed the replica, so that it gets no new requests.
        self.retired = False
        self._limits = limits
        self._router = router
        self._listener = listener
        self._calls = calls
        self._fleet = fleet
        self.state = fleet.add_replica(
            replica,
            replica.partition("/")[0],
            step_tokens=endpoint.step_tokens,
            adapter_slots=endpoint.adapter_slots,
            prefix_caching=endpoint.prefix_caching,
            kv_token_bytes=endpoint.kv_token_bytes,
            role=endpoint.role,
        )
        self._ended = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._keep_connected())

    def receive(self, message: FromReplica) -> None:
        """Handle a message of the replica: update its state, and pass deltas or an answer to the
        router."""
        if isinstance(message, StepFrame):
            now = time.monotonic()
            self.state.observe(message.stats, message.taken, now)
            if message.lowered:
                self._fleet.lower_prefix(self.state, unpack_hashes(message.lowered))
            if message.gone:
                self._fleet.remove_prefix(self.state, unpack_hashes(message.gone))
            if message.prefix_hashes:
                self._fleet.add_prefix(self.state, unpack_hashes(message.prefix_hashes))
            self._listener.frame(self, message, now)
        elif isinstance(message, Failed):
            assert self.connection is not None
            self.failed = message
            self.connection.close(f"{message.code}: {message.message}")
        else:
            self._calls.answered(message)

    def forget(self, choice: InflightChoice) -> None:
        """Remove a choice that ended or moved. A retired client closes after its last choice."""
        self.choices.pop(choice.id, None)
        self.state.unbook(choice.id)
        if self.retired and not self.choices:
            self.close("no longer in service")

    def retire(self) -> None:
        """Stop sending new requests, and close the connection once the replica's choices have
        ended."""
        self._leave()
        if not self.choices:
            self.close("no longer in service")

    def close(self, reason: str) -> None:
        self._leave()
        if self.connection is not None:
            self.connection.close(reason)
        else:
            self._task.cancel()

    def _leave(self) -> None:
        if not self.retired:
            self.retired = True
            self._fleet.remove(self.state)

    async def _keep_connected(self) -> None:
        loop = asyncio.get_running_loop()
        delay, longest = _RETRY
        while not self.retired:
            self._ended.clear()
            try:
                async with asyncio.timeout(self._limits.handshake):
                    await loop.create_connection(
                        self._protocol, self.endpoint.host, self.endpoint.port
                    )
            except (OSError, TimeoutError) as error:
                if delay == _RETRY[0]:
                    # Log once; Serve will remove the replica or bring it back.
                    logger.warning("replica %s: cannot connect: %s", self.replica, error)
            else:
                started = time.monotonic()
                await self._ended.wait()
                if time.monotonic() - started > longest:
                    delay = _RETRY[0]
            await asyncio.sleep(delay)
            delay = min(delay * 2, longest)

    def _protocol(self) -> RouterEnd:
        return RouterEnd(
            bytes.fromhex(self.endpoint.secret),
            self._limits,
            self._router,
            on_open=self._opened,
            on_frame=lambda _, message: self.receive(message),
            on_close=self._closed,
        )

    def _opened(self, connection: RouterEnd) -> None:
        self.connection = connection
        self.failed = None
        self.state.opened(self._fleet.routers(), time.monotonic())
        self._listener.opened(self)

    def _closed(self, connection: RouterEnd, reason: str) -> None:
        was_open = connection is self.connection
        self.silent = connection.silent
        self.connection = None
        self.state.lost()
        self._fleet.forget_caches(self.state)
        lost = list(self.choices.values())
        self.choices.clear()
        self._ended.set()
        if was_open or lost:
            self._calls.lost(self)
            self._listener.lost(self, lost, reason)
        else:
            logger.warning("replica %s: %s", self.replica, reason)
