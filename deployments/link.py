"""Link: one replica as a router sees it. Keeps the connection up, the choices there, and what
routing needs to know."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deployments.channel import ChannelLimits, RouterEnd
from deployments.intake import Intake
from deployments.ledger import Choice
from deployments.routing import Snapshot, StepModel
from engine.messages import EngineStats, Failed, StepFrame

logger = logging.getLogger("manta.router")

_UNMEASURED_RATE = 1000.0  # tokens/s, until the replica has computed a prompt
_SMOOTHING = 0.2  # weight of the newest measurement of a rate
_RETRY = (0.05, 2.0)  # seconds between attempts to connect: first, longest


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What a replica publishes: where it listens, the secret, and what its engine can do."""

    host: str
    port: int
    secret: str  # hex
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    @classmethod
    def parse(cls, metadata: Mapping[str, Any]) -> "Endpoint":
        return cls(
            host=str(metadata["host"]),
            port=int(metadata["port"]),
            secret=str(metadata["secret"]),
            max_model_len=int(metadata["max_model_len"]),
            vocab_size=int(metadata["vocab_size"]),
            eos_token_ids=tuple(int(token) for token in metadata["eos_token_ids"]),
        )


class Link:
    """on_open(link), on_frame(link, message), on_lost(link, choices, reason) are called on the
    loop."""

    def __init__(
        self,
        replica: str,
        endpoint: Endpoint,
        limits: ChannelLimits,
        router: str,
        *,
        on_open: Callable[["Link"], None],
        on_frame: Callable[["Link", StepFrame | Failed], None],
        on_lost: Callable[["Link", list[Choice], str], None],
    ) -> None:
        self.replica = replica
        self.endpoint = endpoint
        self.connection: RouterEnd | None = None  # an open one
        self.stats = EngineStats()
        self.intake = Intake()
        self.choices: dict[int, Choice] = {}
        self.retired = False  # Serve no longer counts it: send nothing new
        self._limits = limits
        self._router = router
        self._on_open = on_open
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._booked: deque[tuple[float, int]] = deque()  # (when sent, prompt tokens)
        self._booked_tokens = 0
        self._prompt_rate = _UNMEASURED_RATE
        self._steps = StepModel()
        self._seen = 0.0  # monotonic seconds of the last frame
        self._ended = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._keep_connected())

    @property
    def available(self) -> bool:
        return self.connection is not None and not self.retired and not self.stats.draining

    def snapshot(self) -> Snapshot:
        stats = self.stats
        base, per_sequence = self._steps.fit()
        return Snapshot(
            replica=self.replica,
            waiting_tokens=stats.waiting_tokens,
            sequences=stats.running + stats.waiting,
            booked_tokens=self._booked_tokens,
            booked_sequences=len(self._booked),
            free_tokens=stats.free_blocks * stats.block_size if stats.total_blocks else 2**62,
            prompt_rate=self._prompt_rate,
            base_seconds=base,
            sequence_seconds=per_sequence,
            available=self.available,
        )

    def book(self, prompt_tokens: int) -> None:
        """A choice was sent; it counts until the replica's own figures can contain it."""
        self._booked.append((time.monotonic(), prompt_tokens))
        self._booked_tokens += prompt_tokens

    def observe(self, stats: EngineStats, now: float) -> None:
        """The figures of a frame. now: monotonic seconds."""
        self.intake.observe(stats, now)
        last = self.stats
        seconds = now - self._seen
        computed = stats.prompt_tokens - last.prompt_tokens
        if computed > 0 and last.waiting_tokens > 0 and seconds > 0:
            self._prompt_rate += _SMOOTHING * (computed / seconds - self._prompt_rate)
        steps = stats.step - last.step
        if steps > 0 and last.running:  # it was busy from that frame to this
            self._steps.observe(last.running, seconds / steps)
        self.stats = stats
        self._seen = now
        settled = now - max(0.02, 2 * stats.step_seconds)
        while self._booked and self._booked[0][0] < settled:
            self._booked_tokens -= self._booked.popleft()[1]

    def forget(self, choice: Choice) -> None:
        """The choice ended or moved. A retired link closes with its last choice."""
        self.choices.pop(choice.id, None)
        self.intake.unbook(choice.id)
        if self.retired and not self.choices:
            self.close("no longer in service")

    def retire(self) -> None:
        """Take nothing new, let what is there end."""
        self.retired = True
        if not self.choices:
            self.close("no longer in service")

    def close(self, reason: str) -> None:
        self.retired = True
        if self.connection is not None:
            self.connection.close(reason)
        else:
            self._task.cancel()

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
                if delay == _RETRY[0]:  # once; Serve will take it out or bring it back
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
            on_frame=lambda _, message: self._on_frame(self, message),
            on_close=self._closed,
        )

    def _opened(self, connection: RouterEnd) -> None:
        self.connection = connection
        self._on_open(self)

    def _closed(self, connection: RouterEnd, reason: str) -> None:
        was_open = connection is self.connection
        self.connection = None
        self.intake.lost()
        self._booked.clear()
        self._booked_tokens = 0
        self.stats = EngineStats()
        lost = list(self.choices.values())
        self.choices.clear()
        self._ended.set()
        if was_open or lost:
            self._on_lost(self, lost, reason)
        else:
            logger.warning("replica %s: %s", self.replica, reason)
