"""FleetWeights: applies a trainer's weight updates, pauses and sleeps to all replicas of a model.

First every replica checks an update. Then the WeightsRecord, which all routers share, is written,
and each replica loads the weights between two of its steps. Each token is labelled with the version
of the weights that sampled it. A replica that has just joined, or did not get the order to load,
loads the recorded weights before it gets requests.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec

from deployments.router.replicas.replica_client import ReplicaClient
from deployments.router.replicas.replicas import Replicas
from deployments.router.weights_record import LocalWeightsStore, WeightsRecord, WeightsStore
from engine.errors import InvalidRequest, MantaError, Overloaded, UpdateFailed
from engine.messages import (
    NO_FOLDER,
    NOT_JOINED,
    PARTS,
    Answer,
    Control,
    EngineStats,
    TransferWeights,
    UpdateWeights,
)
from engine.scheduling.orders.sleeping import CHECK
from engine.scheduling.orders.updates import MODES

logger = logging.getLogger("manta.router")

ORDER_SECONDS = 600.0  # longest wait for an answer, as disks may be slow and pauses long
_RETRY = 0.3  # seconds between attempts to make a replica match the record
LOST_SECONDS = 30.0  # seconds after which weights that no replica has count as lost


Order = UpdateWeights | TransferWeights | Control


class MakeOrder(Protocol):
    """A function that returns the order for a replica, given the ticket that identifies its
    answer."""

    def __call__(self, ticket: int) -> Order: ...


class FleetWeights:
    """One router's control of the weights, pauses and sleeps of one model's replicas.

    base: identity of the weights in the model's folder; "": unknown.
    version: the recorded version of the weights.
    paused, asleep: whether a pause is recorded, and whether a sleep is, also one of level 0.
    slept_deeply: whether the last sleep was of level 2, which drops weights.
    on_deep_sleep: called without arguments when this router learns of a sleep of level 2.
    on_pause: called without arguments when this router learns of a pause.
    """

    def __init__(
        self, replicas: Replicas, base: str = "", weights_store: WeightsStore | None = None
    ) -> None:
        self._replicas = replicas
        self._base = base
        self._store = weights_store or LocalWeightsStore()
        self._record = WeightsRecord(base=base)
        self.version, self.paused, self.asleep = self._record.version, False, False
        self.slept_deeply = False
        self.on_deep_sleep: Callable[[], None] = lambda: None
        self.on_pause: Callable[[], None] = lambda: None
        self._bringing: dict[ReplicaClient, asyncio.Task[None]] = {}
        # Monotonic time since when no replica has had the recorded weights.
        self._lost_since: float | None = None

    @property
    def dropped(self) -> bool:
        """Whether a sleep has dropped the weights of all replicas, with no update since."""
        states = [client.state for client in self._replicas.values() if client.connection]
        return bool(states) and all(state.stats.weights_dropped for state in states)

    async def refresh(self) -> None:
        """Read the record that routers share. An unavailable store is only logged."""
        try:
            record = await asyncio.to_thread(self._store.get)
        except OSError as error:
            logger.warning("weights: %s", error)
            return
        good = record is not None and record.base == self._base
        if record is not None and good and record.number > self._record.number:
            self._take_record(record)

    def _take_record(self, record: WeightsRecord) -> None:
        begins = bool(record.paused) and not self.paused
        self._record = record
        self.version, self.paused = record.version, bool(record.paused)
        self.asleep = bool(record.asleep) or record.dozes
        self.slept_deeply = record.level > 1
        if record.asleep and self.slept_deeply:
            self.on_deep_sleep()
        if begins:
            self.on_pause()

    @property
    def pause_mode(self) -> str:
        """The mode of the pause; "": there is none."""
        return self._record.paused

    @property
    def ended_by(self) -> str:
        """The HTTP routes that end the present pause, for log lines."""
        record = self._record
        if record.dozes:
            return "POST /wake_up"
        return "POST /wake_up and /resume" if record.asleep else "POST /resume"

    async def _write(self, **fields: Any) -> None:
        """Change fields of the record for all routers. Raises Overloaded if the store is
        unavailable."""
        await self.refresh()
        number = self._record.number + 1
        record = msgspec.structs.replace(self._record, number=number, **fields)
        try:
            await asyncio.to_thread(self._store.put, record)
        except OSError as error:
            raise Overloaded(
                f"the weights were not changed: {error}", code="store_unavailable"
            ) from None
        self._take_record(record)

    # -- orders

    async def update(self, folder: str, version: str = "", *, recompute: bool = False) -> str:
        """Replace the weights at all replicas, and return the version's name.

        folder: path of a checkpoint that every replica's node can read until the next update,
            because replicas that start later read it, too.
        recompute: whether running requests recompute their KV cache with the new weights.
        Raises UpdateFailed, after which all replicas have the old weights, and Overloaded.
        """
        version = await self._new_version(version)
        await self._order_all(
            lambda ticket: UpdateWeights(ticket, folder, version, check_only=True)
        )
        await self._replace(folder, version, recompute=recompute)
        return version

    async def _new_version(self, version: str) -> str:
        """Return the version name of the next weights: `version`, or the record's next number if
        `version` is "".

        Raises UpdateFailed if the present weights have that name.
        """
        await self.refresh()
        version = version or str(self._record.number + 1)
        if version == self.version:
            raise UpdateFailed(
                f"the weights in place are called {version!r} already; give another weight_version",
                param="weight_version",
            )
        return version

    async def _replace(self, folder: str, version: str, *, recompute: bool = False) -> None:
        """Record new weights that all replicas have checked, and have the replicas load them.

        Raises Overloaded.
        """
        await self._write(folder=folder, version=version)
        try:
            await self._order_all(lambda ticket: UpdateWeights(ticket, folder, version, recompute))
        except UpdateFailed as error:
            # The replica has passed the check, so `_bring_up` retries the load.
            logger.error("weights of version %s: %s", version, error.message)

    # -- updates that a trainer sends

    async def init_transfer(self, info: dict[str, Any]) -> None:
        """Make all replicas join a trainer's process group. Raises MantaError.

        info: vLLM's `init_info`; replicas get the ranks from rank_offset on, in order of their
            names. {}: no group, for a trainer that shares tensors on the replicas' machine.
        """
        offset, size = info.get("rank_offset"), info.get("world_size")
        replicas = sorted(client.replica for client in self.connected())
        if isinstance(offset, int) and isinstance(size, int) and size != offset + len(replicas):
            raise InvalidRequest(
                f"world_size is {size}, and there are {len(replicas)} replicas from rank_offset "
                f"{offset} on, each one receiver whatever its ranks; /get_world_size tells their "
                "number, and /update_weights_from_disk needs no group",
                param="init_info",
            )

        def make(client: ReplicaClient, ticket: int) -> TransferWeights:
            own = {"rank_offset": offset + replicas.index(client.replica)} if offset else {}
            return TransferWeights(ticket, "init", info | own)

        await self._forget_sent()
        self._check_all(await self._ask_all(make))

    async def start_update(self) -> None:
        """Begin, at all replicas, an update whose tensors arrive in several messages. Raises
        MantaError."""
        await self._order_all(lambda ticket: TransferWeights(ticket, "start"))
        await self._forget_sent()

    async def take_tensors(self, info: dict[str, Any], version: str = "") -> str:
        """Have all replicas receive tensors from a trainer.

        After `start_update` the tensors are a part of an update, and "" is returned. Otherwise the
        tensors are a whole update: it is loaded at once, and its version is returned.

        info: vLLM's `update_info`.
        Raises UpdateFailed, after which all replicas have the old weights, and Overloaded.
        """
        folders = await self._transferred("update", info)
        if all(folders.values()):
            return await self._replace_each(folders, version)
        # a replica that joined after `start_update` treats the tensors as a whole update: drop it
        late = [client for client, folder in folders.items() if folder]
        if late:
            await self._drop(late)
        return ""

    async def finish_update(self, version: str = "") -> str:
        """End the update that `start_update` has begun; return the version of the new weights.

        Raises the errors of `take_tensors`.
        """
        return await self._replace_each(await self._transferred("finish", {}), version)

    # -- updates by SGLang's routes, whose messages do not mark the last one

    async def begin_sent(self) -> None:
        """Begin an update by SGLang's routes, which `end_sent` ends. Raises MantaError."""
        await self.start_update()
        await self._write(sending=True)

    async def take_sent(self, info: dict[str, Any], version: str = "") -> str:
        """Have all replicas receive tensors of an update by SGLang's routes, which the first call
        begins.

        Once the checkpoint is complete, the weights are loaded and their version is returned;
        before, "". During a pause the result is always "", and the update ends with `end_sent`.

        Raises the errors of `take_tensors`.
        """
        await self.refresh()
        if not self._record.sending:
            await self.begin_sent()
        name = version or self._record.sent_version
        if name != self._record.sent_version:
            await self._write(sent_version=name)
        try:
            folders = await self._transferred("update" if self.paused else "collect", info)
            complete = {client: folder for client, folder in folders.items() if folder}
            if len(complete) < len(folders) or self.paused:
                # a replica that joined after the update began lacks its first tensors: drop its
                # tensors
                if complete:
                    await self._drop([*complete])
                return ""
        except UpdateFailed:
            await self._forget_sent()
            raise
        await self._forget_sent()
        return await self._replace_each(folders, name)

    async def end_sent(self) -> str:
        """Replace the weights by the tensors that were sent by SGLang's routes; return the version.

        Returns "" if no update was begun. Raises the errors of `take_tensors`.
        """
        await self.refresh()
        if not self._record.sending:
            return ""
        version = self._record.sent_version
        await self._forget_sent()
        return await self._replace_each(await self._transferred("finish", {}), version)

    async def _forget_sent(self) -> None:
        await self.refresh()
        if self._record.sending:
            await self._write(sending=False, sent_version="")

    async def _transferred(self, what: str, info: dict[str, Any]) -> dict[ReplicaClient, str]:
        """Send a TransferWeights order to all replicas, and return {replica: its checkpoint
        folder}.

        A folder is "" while the replica's checkpoint is incomplete. Replicas that have not joined
        the transfer are left out, and load the recorded weights later. Raises MantaError if a
        replica fails, after which no replica continues the transfer.

        what, info: fields of TransferWeights.
        """
        answers = await self._ask_all(lambda _, ticket: TransferWeights(ticket, what, info))
        members = {
            client: answer for client, answer in answers.items() if answer.code != NOT_JOINED
        }
        try:
            self._check_all(members or answers)
        except UpdateFailed:
            await self._drop()
            raise
        return {client: answer.message for client, answer in members.items()}

    async def _drop(self, clients: Sequence[ReplicaClient] | None = None) -> None:
        """Have replicas drop the tensors of an unfinished update. clients: the replicas; None:
        all."""
        await self._ask_all(lambda _, ticket: TransferWeights(ticket, "drop"), clients)

    async def _replace_each(self, folders: dict[ReplicaClient, str], version: str) -> str:
        """Have each replica load new weights from its own folder, after all replicas have checked
        theirs.

        folders: the folder of each replica.
        Returns the version. Raises UpdateFailed, after which the update is dropped.
        """
        try:
            version = await self._new_version(version)
            self._check_all(
                await self._ask_all(
                    lambda client, ticket: UpdateWeights(
                        ticket, folders[client], version, check_only=True
                    ),
                    [*folders],
                )
            )
        except UpdateFailed:
            await self._drop()
            raise
        await self._replace("\n".join(sorted(set(folders.values()))), version)
        return version

    # -- pauses and sleeps

    async def pause(self, mode: str) -> None:
        """Pause all replicas; see `engine.scheduling.orders.updates.Pause`. Raises MantaError."""
        if mode not in MODES:
            raise InvalidRequest(f"mode is one of {', '.join(MODES)}", param="mode")
        await self._write(paused=mode)
        await self._order_all(lambda ticket: Control("pause", ticket, mode))

    async def resume(self) -> None:
        """End the pause of all replicas. Raises MantaError."""
        await self._write(paused="", dozes=False)
        await self._order_all(lambda ticket: Control("resume", ticket))

    async def sleep(self, level: int, tags: Sequence[str], mode: str) -> None:
        """Pause all replicas, and free memory of their engines; see `engine.LLM.sleep`.

        level, tags: as in `engine.LLM.sleep`; level 0 only pauses.
        mode: mode of the pause. Waking ends this pause, but not an earlier one.
        Raises MantaError, after which only an earlier pause remains. Engines that cannot sleep
        refuse before a request is paused.
        """
        if level not in (0, 1, 2):
            raise InvalidRequest(f"level is 0, 1 or 2, not {level}", param="level")
        parts = _parts(tags)
        await self.refresh()
        if level:
            await self._order_all(
                lambda ticket: Control("sleep", ticket, level=CHECK, tags=[*parts])
            )
        began = not self.paused
        if began:
            await self.pause(mode)
            await self._write(dozes=True)
        if not level:
            return
        try:
            await self._order_all(
                lambda ticket: Control("sleep", ticket, level=level, tags=[*parts])
            )
        except MantaError:
            if began:
                await self.resume()
            raise
        asleep = tuple(part for part in PARTS if part in (*self._record.asleep, *parts))
        await self._write(asleep=asleep, level=level)

    async def wake(self, tags: Sequence[str]) -> None:
        """Wake the engines: allocate memory that a sleep has freed. Raises MantaError.

        When all memory is allocated, the pause that the sleep began ends.

        tags: names of the memory parts to allocate; none: all parts.
        """
        parts = _parts(tags)
        await self.refresh()
        asleep = tuple(part for part in self._record.asleep if part not in parts)
        await self._write(asleep=asleep)
        # without tags the order ends the whole sleep
        order = [*parts] if asleep else []
        await self._order_all(lambda ticket: Control("wake", ticket, tags=order))
        if self._record.dozes and not asleep:
            await self.resume()

    async def reset_prefix_cache(self) -> None:
        """Drop the cached prefixes of all replicas. Raises MantaError."""
        await self._order_all(lambda ticket: Control("reset_prefix_cache", ticket))

    def connected(self) -> list[ReplicaClient]:
        """Return the connected replicas. Raises Overloaded if there is none."""
        clients = [client for client in self._replicas.values() if client.connection is not None]
        if not clients:
            raise Overloaded("no replica is ready", code="no_replica", retry_after=5)
        return clients

    async def _order_all(self, make: MakeOrder) -> None:
        """Send an order to all replicas and wait for their answers.

        Raises Overloaded if there is no replica, and the error of a replica that refused. A replica
        that is lost meanwhile is ignored, as another one replaces it.
        """
        self._check_all(await self._ask_all(lambda _, ticket: make(ticket)))

    async def _ask_all(
        self,
        make: Callable[[ReplicaClient, int], Order],
        clients: Sequence[ReplicaClient] | None = None,
    ) -> dict[ReplicaClient, Answer]:
        """Send each replica an order, and return the answers of replicas that are not lost.

        make: returns the order, given the replica and the ticket.
        clients: the replicas; None: all.
        Raises Overloaded if there is no replica, or none answers.
        """
        clients = self.connected() if clients is None else clients
        answers = await asyncio.gather(
            *(self._order(client, partial(make, client)) for client in clients)
        )
        by_client = {
            client: answer
            for client, answer in zip(clients, answers, strict=True)
            if answer is not None
        }
        if not by_client:
            raise Overloaded("no replica answered", code="no_replica", retry_after=5)
        return by_client

    def _check_all(self, answers: Mapping[ReplicaClient, Answer]) -> None:
        """Raise Overloaded or UpdateFailed for the first answer that is a refusal."""
        for client, answer in answers.items():
            if answer.code == "device_busy":
                raise Overloaded(answer.message, code=answer.code)
            if answer.code:
                raise UpdateFailed(
                    f"{client.replica}: {answer.message}",
                    param=answer.param or None,
                    code=answer.code,
                )

    async def _order(self, client: ReplicaClient, make: MakeOrder) -> Answer | None:
        """Send an order to one replica, and return its answer; None if the replica was lost."""
        calls = self._replicas.calls
        while True:
            answer = await calls.ask(client, make(calls.ticket()), ORDER_SECONDS)
            if not isinstance(answer, Answer) or answer.code != "update_in_progress":
                return answer if isinstance(answer, Answer) else None
            # The replica is loading weights on another router's order.
            await asyncio.sleep(_RETRY)

    # -- replicas that differ from the record

    def opened(self, client: ReplicaClient) -> None:
        """Send no requests to a newly connected replica until its weights, pause and sleep match
        the record."""
        if self._record.number:
            client.state.keep_out(True)
            self._bring(client)

    def differs(self, client: ReplicaClient, stats: EngineStats) -> None:
        """Compare a replica's stats with the record. If they match, requests are sent to it again;
        otherwise a task sends the recorded state to it."""
        if not self.lacks(stats):
            client.state.keep_out(False)
        else:
            self._bring(client)

    def _bring(self, client: ReplicaClient) -> None:
        if client not in self._bringing:
            task = asyncio.get_running_loop().create_task(self._bring_up(client))
            self._bringing[client] = task
            task.add_done_callback(lambda _: self._bringing.pop(client, None))

    async def _bring_up(self, client: ReplicaClient) -> None:
        """Send a replica orders for the recorded weights, pause and sleep, until it matches the
        record or is lost."""
        logged = ""
        while client.connection is not None and not client.retired:
            await asyncio.sleep(_RETRY)
            await self.refresh()
            record, stats = self._record, client.state.stats
            if stats.weights_version != record.version and record.folder:
                answer = await self._order(
                    client,
                    lambda ticket, record=record: UpdateWeights(
                        ticket, record.folder, record.version
                    ),
                )
                if answer is None or not answer.code:
                    continue
                if answer.message != logged:
                    logger.error("replica %s: weights: %s", client.replica, answer.message)
                    logged = answer.message
                if answer.code == NO_FOLDER and self._lost(record):
                    await self._forget(record)
                else:
                    await asyncio.sleep(min(10 * _RETRY, LOST_SECONDS))
            elif stats.paused != bool(record.paused):
                what = "pause" if record.paused else "resume"
                await self._order(
                    client,
                    lambda ticket, what=what, record=record: Control(what, ticket, record.paused),
                )
            elif record.asleep and not stats.asleep:
                await self._order(
                    client,
                    lambda ticket, record=record: Control(
                        "sleep", ticket, level=record.level, tags=[*record.asleep]
                    ),
                )
            elif stats.weights_version == record.version:
                if client.state.kept_out:
                    # `differs` needs a frame, which an idle engine sends only after an order.
                    await self._order(client, lambda ticket: Control("resume", ticket))
                return

    def _lost(self, record: WeightsRecord) -> bool:
        """Whether the recorded weights are lost: no replica has had them for LOST_SECONDS.

        Called when a replica could not find the folder of the weights.
        """
        if any(
            client.state.stats.weights_version == record.version
            for client in self._replicas.values()
            if client.connection is not None
        ):
            self._lost_since = None
            return False
        now = asyncio.get_running_loop().time()
        if self._lost_since is None:
            self._lost_since = now
        return now - self._lost_since >= LOST_SECONDS

    async def _forget(self, record: WeightsRecord) -> None:
        """Change the record back to the weights in the model's own folder, because the recorded
        weights are lost."""
        self._lost_since = None
        await self.refresh()
        if self._record.version != record.version:
            return
        logger.error(
            "weights of version %s are lost: no replica has them, and %s is gone. The weights of "
            "the model's own folder are served, as version 0; send the update again",
            record.version,
            record.folder.replace("\n", ", "),
        )
        try:
            await self._write(folder="", version=WeightsRecord().version)
        except Overloaded as error:
            logger.warning("weights: %s", error.message)

    def lacks(self, stats: EngineStats) -> bool:
        """Whether a replica's weights version, pause or sleep differs from the record. stats: the
        replica's."""
        return (
            stats.weights_version != self.version
            or stats.paused != self.paused
            or (bool(self._record.asleep) and not stats.asleep)
        )

    def close(self) -> None:
        for task in self._bringing.values():
            task.cancel()


def _parts(tags: Sequence[str]) -> tuple[str, ...]:
    """Return the engine memory parts that a request's tags name; without tags, all parts.

    Raises InvalidRequest.
    """
    for tag in tags:
        if tag not in PARTS:
            raise InvalidRequest(f"tags are {', '.join(PARTS)}, not {tag!r}", param="tags")
    return tuple(tags) or PARTS
