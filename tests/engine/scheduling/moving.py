"""MovingPair: two engine cores on fake devices, which pull KV blocks from each other one message at
a time, without sockets or threads."""

import queue
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.messages import KVSource
from engine.scheduling.memory.host_plan import HostPlan
from engine.scheduling.moves.block_moves import BlockMoves
from engine.scheduling.moves.puller import Arrival, Pull
from engine.scheduling.moves.records import MovePlan
from engine.scheduling.moves.source import Order
from engine.scheduling.moves.wire import Ask, Offer
from tests.engine.scheduling.driver import Driver
from tests.fakes import FakeCopies

_STRIPES = 2


class FakePuller:
    """The pulling side of an engine, whose pulls `MovingPair.deliver` advances."""

    def __init__(self, slots: range) -> None:
        self.free = deque(slots)
        self.begun: deque[Pull] = deque()

    def begin(self, pull: Pull) -> None:
        self.begun.append(pull)

    def give_back(self, slots: Sequence[int], pull: Pull) -> None:
        self.free.extend(slots)

    def watch(
        self, end: Callable[[], None], close: Callable[[], None], ended: Callable[[], None]
    ) -> None:
        ended()  # the loop then polls the fake copies until they are done


@dataclass(eq=False)
class Connection:
    """A pull of blocks from one engine to the other, and its progress."""

    pull: Pull
    puller: int  # the engine that pulls
    order: Order | None = None
    offer: Offer | None = None
    open: list[int] = field(default_factory=lambda: list(range(_STRIPES)))
    batches: list[deque[tuple[int, int]]] = field(
        default_factory=lambda: [deque() for _ in range(_STRIPES)]
    )
    received: int = 0

    def drop(self, source: BlockMoves) -> None:
        """End the pull at its source, as the sending thread does when the puller is lost."""
        if self.order is not None:
            source._post_lost(self.order)
            for batch in self.batches:
                source._post_sent(self.order, [slot for _, slot in batch])


class MovingPair:
    """Two engines, each watched by a Driver, that pull blocks from each other."""

    def __init__(self, slots: int, **changes: Any) -> None:
        plan = MovePlan(slots, 1, b"equal", 1.0)
        self.drivers = [Driver(moves=plan, **changes) for _ in range(2)]
        self.pullers = [FakePuller(range(slots, 2 * slots)) for _ in range(2)]
        for number, puller in enumerate(self.pullers):
            self.moves(number)._puller = puller  # type: ignore[assignment]
        self.connections: deque[Connection] = deque()

    def moves(self, engine: int) -> BlockMoves:
        moves = self.drivers[engine].scheduler.moves
        assert moves is not None
        return moves

    def add_request(self, engine: int, prompt: list[int], **fields: Any) -> int:
        """Add a request that pulls its prefix from the other engine."""
        source = KVSource("other", 1 - engine, "")
        number = self.drivers[engine].add_request(prompt, source=source, **fields)
        self._connect()
        return number

    def _connect(self) -> None:
        for number, puller in enumerate(self.pullers):
            while puller.begun:
                self.connections.append(Connection(puller.begun.popleft(), number))

    def step(self, engine: int) -> None:
        if self.drivers[engine].core.has_work():
            self.drivers[engine].step()

    def deliver(self) -> None:
        """Deliver the next message of the oldest connection."""
        if not self.connections:
            return
        connection = self.connections.popleft()
        error = self._deliver(connection)
        if error is None:
            self.connections.append(connection)
        else:
            self.moves(connection.puller)._post_ended(connection.pull, error)

    def cut(self) -> None:
        """Break the oldest connection."""
        if self.connections:
            connection = self.connections.popleft()
            connection.drop(self.moves(1 - connection.puller))
            self.moves(connection.puller)._post_ended(connection.pull, "cut")

    def _deliver(self, connection: Connection) -> str | None:
        """Deliver a message. Return None while the pull continues, its error if it failed, "" if it
        is complete."""
        pull, order = connection.pull, connection.order
        source, target = self.moves(1 - connection.puller), self.moves(connection.puller)
        if order is None:
            ask = Ask(pull.compatibility, b"".join(pull.hashes), pull.near, _STRIPES)
            connection.order = Order(ask, time.monotonic() + 600)
            source._post_order(connection.order)
            return None
        if connection.offer is None:
            try:
                connection.offer = order.answer.get_nowait()
            except queue.Empty:
                return None
            return connection.offer.refusal or None
        if pull.cancelled:
            connection.drop(source)
            return "cancelled"
        for stripe in list(connection.open):
            free = self.pullers[connection.puller].free
            batch = connection.batches[stripe]
            if not batch and not order.staged[stripe].empty():
                staged = order.staged[stripe].get_nowait()
                if staged is None:
                    connection.open.remove(stripe)
                    continue
                batch.extend(zip(staged.indices, staged.slots, strict=True))
            if not (batch and free):
                continue
            index, slot = batch.popleft()
            place = free.popleft()
            assert isinstance(source.copies, FakeCopies) and isinstance(target.copies, FakeCopies)
            target.copies._host[place] = source.copies._host[slot].copy()
            target.copies._owners[place] = source.copies._owners[slot]
            source._post_sent(order, [slot])
            target._post_arrived(pull, Arrival([index], [place]))
            connection.received += 1
        if connection.open:
            return None
        return "" if connection.received == len(connection.offer.indices) else "it gave up"

    def finish(self) -> None:
        """Run until both engines are idle; assert that no row or block is held then."""
        for _ in range(20_000):
            for engine in range(2):
                self.step(engine)
            self.deliver()
            busy = any(driver.core.has_work() for driver in self.drivers)
            if not (busy or self.connections or any(m.waiting() for m in map(self.moves, (0, 1)))):
                break
        assert not self.connections, "a pull never ends"
        for engine, driver in enumerate(self.drivers):
            moves = self.moves(engine)
            moves.yield_blocks()
            driver.finish()
            driver.core.check_integrity()
            slots = moves.plan.slots
            assert sorted(moves._free) == list(range(slots)), "a slot to send from is lost"
            assert sorted(self.pullers[engine].free) == list(range(slots, 2 * slots))
            assert not moves.tables(driver.scheduler.memory.pools[0])


def random_moves(seed: int, stem: list[int], steps: int = 80) -> int:
    """Run random requests on two engines that pull from each other; return the number of moved
    blocks."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 3, 4])
    pair = MovingPair(
        rng.choice([1, 3, 40]),
        block_size=block_size,
        max_num_batched_tokens=rng.choice([7, 64]),
        max_num_seqs=6,
        max_model_len=60,
        num_blocks=-(-60 // block_size) + rng.randrange(20),
        fail=(13,),
        async_scheduling=rng.random() < 0.5,
        delay=rng.choice([0, 1, 5]),
        failing=rng.choice([(), (2, 5)]),
        host=rng.choice([None, None, HostPlan(30, 1, everything=True)]),
    )
    requests: list[tuple[int, int]] = []
    for _ in range(steps):
        action, engine = rng.random(), rng.randrange(2)
        if action < 0.3:
            own = rng.randrange(3)
            prompt = (stem * 2)[: max(1, rng.randrange(1, 58) - own)] + [40 + own] * own
            fields: dict[str, Any] = {
                "max_tokens": rng.choice([0, 1, 7, 30, None]),
                "seed": rng.choice([1, 2, 13]),
                "cache_salt": rng.choice(["", "", "tenant"]),
                "adapter": rng.choice(["", "", "lora", "words"]),
                "keep_seconds": rng.choice([0.0, 20.0]),
            }
            requests.append((engine, pair.add_request(engine, prompt, **fields)))
        elif action < 0.6:
            for _ in range(rng.randrange(1, 12)):
                pair.step(engine)
        elif action < 0.85:
            for _ in range(rng.randrange(1, 12)):
                pair.deliver()
        elif action < 0.88:
            pair.cut()
        elif action < 0.94 and requests:
            engine, number = requests.pop(rng.randrange(len(requests)))
            pair.drivers[engine].abort(number)
        elif action < 0.95:
            pair.drivers[engine].core.reset_prefix_cache()
        elif action < 0.97:
            pair.moves(engine).yield_blocks()
        elif action < 0.98:
            pair.finish()
        for driver in pair.drivers:
            driver.core.check_integrity()
    pair.finish()
    return sum(pair.moves(engine).pulled_bytes for engine in range(2))
