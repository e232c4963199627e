"""ModelLoader: loads the models that a router serves, and connects the router to their replicas.

The loader also polls for changes that other routers make to adapters and models. One poll covers
all models, so unused models add no cost.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from deployments import model_applications
from deployments.adapters.record_store import RayRecordStore, mark_of_all
from deployments.backend import ModelCard
from deployments.checkpoints.facts import read_facts
from deployments.checkpoints.resolve import ModelIdentity
from deployments.cluster_store import first_served
from deployments.environment import installed_version
from deployments.router.admission.scale_from_zero import Waking
from deployments.router.dispatcher import Dispatcher
from deployments.router.models.model_settings import ServedModel
from deployments.router.models.models_backend import ModelsBackend
from deployments.router.weights_record import RayWeightsStore
from deployments.transport import discovery
from engine.config.model_config import ModelConfig
from engine.errors import MantaError
from engine.images.processor import image_processor
from engine.pooled_checkpoint import read_pooling
from engine.text.tokenizer import Tokenizer

logger = logging.getLogger("manta.router")

# Seconds between two reads of the change marks in Ray's store, which commands and routers rewrite
# with each change of models and adapters.
_POLL_SECONDS = 1.0
# Seconds between two full reads of models and adapters, for changes that did not change a mark.
_FULL_POLL_SECONDS = 10.0

FindModels = Callable[[str], dict[str, ServedModel]]
Engines = Sequence["DeploymentHandle[Any]"]


@dataclass(slots=True)
class _Connected:
    """A served model with its dispatcher, and the subscriptions that track its replicas."""

    model: ServedModel
    dispatcher: Dispatcher
    handles: Engines
    unsubscribe: list[Callable[[], None]] = field(default_factory=list)
    replicas: dict[str, discovery.Replicas] = field(default_factory=dict)  # by deployment

    def set_replicas(self, deployment: str, replicas: discovery.Replicas) -> None:
        self.replicas[deployment] = replicas
        everything: dict[str, Mapping[str, Any]] = {
            f"{name}/{replica}": metadata
            for name, known in self.replicas.items()
            for replica, metadata in known.items()
        }
        self.dispatcher.set_replicas(everything)


class ModelLoader:
    """The models of one router and their replicas. All methods must be called on the event loop.

    app: name of the router's Serve application.
    seconds: time for which requests may go on after their model was changed or removed.
    """

    def __init__(self, front: ModelsBackend, app: str, seconds: float) -> None:
        self._front = front
        self._app = app
        self._seconds = seconds
        self._connected: dict[str, _Connected] = {}
        self._failed: dict[str, ServedModel] = {}  # models that could not be loaded, by name
        self._mark = b""
        self._polled = 0.0
        self._adapters_mark = b""
        self._refreshed = 0.0
        self._task: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()  # references that keep the tasks alive
        self._find: FindModels | None = None
        self._polling = asyncio.Lock()

    async def serve(self, model: ServedModel, engines: Engines) -> None:
        """Load a model and serve it from now on, in place of an earlier model of the same name.

        engines: handles of the model's engine deployments.

        Raises MantaError, OSError or ValueError if the model cannot be loaded.
        """
        card, tokenizer, identity = await asyncio.to_thread(_load, model, self._app)
        dispatcher = Dispatcher(
            card,
            tokenizer,
            model.dispatch,
            self._front.name,
            identity,
            model.adapters,
            RayRecordStore(model.app or self._app, self._app),
            Waking(model.name, model.start_seconds, partial(_ask, engines)),
            RayWeightsStore(model.app or self._app),
        )
        await dispatcher.adapters.start()
        await dispatcher.weights.refresh()
        connected = _Connected(model, dispatcher, engines)
        loop = asyncio.get_running_loop()
        for engine in engines:
            # Setting an option makes the handle track its deployment from now on, not only from its
            # first call.
            engine.options(method_name="stats")
            set_replicas = partial(connected.set_replicas, engine.deployment_name)

            def listener(
                replicas: discovery.Replicas, call: Callable[..., None] = set_replicas
            ) -> None:
                loop.call_soon_threadsafe(call, replicas)

            connected.unsubscribe.append(
                discovery.subscribe(engine.app_name, engine.deployment_name, listener)
            )
        before = self._connected.get(model.name)
        if before is not None:
            dispatcher.waking.take_over(before.dispatcher.waking)
        self._connected[model.name] = connected
        self._front.set_dispatcher(model.name, dispatcher, self._seconds)
        if before is not None:
            self._disconnect(before, same=model)

    async def follow(self, find: FindModels | None) -> None:
        """Start polling for changes of models and adapters.

        find: blocking function that returns the models to serve; None: the served models never
            change.
        """
        self._find = find
        await self.poll()
        self._task = asyncio.get_running_loop().create_task(self._watch())

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        for connected in self._connected.values():
            for unsubscribe in connected.unsubscribe:
                unsubscribe()

    async def _watch(self) -> None:
        reachable = True
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            try:
                adapters, models = await asyncio.to_thread(self._marks)
                now = time.monotonic()
                if adapters != self._adapters_mark or now - self._refreshed > _FULL_POLL_SECONDS:
                    self._adapters_mark, self._refreshed = adapters, now
                    served = self._connected.values()
                    await asyncio.gather(
                        *(connected.dispatcher.adapters.refresh() for connected in served)
                    )
                if models != self._mark or now - self._polled > _FULL_POLL_SECONDS:
                    await self.poll()
                reachable = True
            except (OSError, RayError, RayServeException) as error:
                if reachable:
                    logger.warning("changes by other routers cannot be seen: %s", error)
                reachable = False
            except Exception:
                logger.exception("the look at the models failed")

    def _marks(self) -> tuple[bytes, bytes]:
        """Return the change marks of adapters and of models: bytes in Ray's store that differ after
        each change. Blocks.
        """
        models = self._mark if self._find is None else model_applications.mark(self._app)
        return mark_of_all(self._app), models

    async def poll(self) -> None:
        """Connect to models that were added to Serve or changed, and disconnect from removed ones.

        Raises OSError and Ray's exceptions.
        """
        async with self._polling:
            if self._find is not None:
                await self._poll(self._find)
            self._polled = time.monotonic()

    async def _poll(self, find: FindModels) -> None:
        # The mark is read before the models, so that the next poll notices a change made in
        # between.
        mark = await asyncio.to_thread(model_applications.mark, self._app)
        wanted = await asyncio.to_thread(find, self._app)
        for name in self._connected.keys() - wanted.keys():
            logger.info("the model %s is not served any more", name)
            self._front.take_out(name, self._seconds)
            self._disconnect(self._connected.pop(name))
        for name, model in wanted.items():
            now, failed = self._connected.get(name), self._failed.get(name)
            if now is not None and now.model.same(model):
                continue
            try:
                await self.serve(model, self._engines(model, now))
            except (MantaError, OSError, ValueError) as error:
                if failed is None or not failed.same(model):
                    logger.error("the model %s cannot be served: %s", name, error)
                self._failed[name] = model  # to be tried again at the next poll
            else:
                logger.info("the model %s is served", name)
                self._failed.pop(name, None)
        self._front.sort([name for name in wanted if name in self._connected])
        self._mark = mark

    @staticmethod
    def _engines(model: ServedModel, now: "_Connected | None") -> Engines:
        known = {
            (engine.app_name, engine.deployment_name): engine
            for engine in (() if now is None else now.handles)
        }
        return [
            known.get((model.app, pool))
            or serve.get_deployment_handle(pool, model.app, _check_exists=False)
            for pool in model.pools
        ]

    def _disconnect(self, connected: _Connected, same: ServedModel | None = None) -> None:
        """Start a task that disconnects a model from its replicas after its last request.

        The task ends the subscriptions to the replicas' addresses and closes the handles.

        same: the model's new version, whose handles stay open if both versions use them; None: the
            model was removed.
        """
        in_use = () if same is None else [(same.app, pool) for pool in same.pools]

        async def end() -> None:
            while connected.dispatcher.requests:
                await asyncio.sleep(_POLL_SECONDS)
            for unsubscribe in connected.unsubscribe:
                unsubscribe()
            for handle in connected.handles:
                if (handle.app_name, handle.deployment_name) not in in_use:
                    await handle.shutdown_async()

        task = asyncio.get_running_loop().create_task(end())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


@dataclass(frozen=True, slots=True)
class ChangeModels:
    """The functions that change Serve's list of models. All block, and raise MantaError.

    put_model: adds or changes a model, given its name and its section of the configuration.
    remove: removes a model, given its name.
    trouble: returns the reason why a model does not start; see ModelChanges.
    """

    put_model: Callable[[str, Mapping[str, Any]], None]
    remove: Callable[[str], None]
    trouble: Callable[[str], dict[str, str]]


class RouterChanges:
    """The changes of models that clients make over HTTP, applied one at a time.

    This router serves a changed model before it answers the change; other routers do within a
    second.
    """

    def __init__(self, change: ChangeModels, front: ModelsBackend, loader: ModelLoader) -> None:
        self._change, self._front, self._loader = change, front, loader
        self._changing = asyncio.Lock()

    def status(self, model: str) -> str:
        dispatcher = self._front.dispatchers.get(model)
        if dispatcher is None:
            return "starting"
        return dispatcher.status()

    async def trouble(self, model: str) -> dict[str, str]:
        return await asyncio.to_thread(self._change.trouble, model)

    async def put_model(self, name: str, section: Mapping[str, Any]) -> None:
        async with self._changing:
            await asyncio.to_thread(self._change.put_model, name, section)
            await self._loader.poll()
            if name in self._front.dispatchers:
                # Start a replica now, to find out whether the model can run.
                self._front.dispatchers[name].waking.wake()

    async def remove(self, name: str) -> None:
        async with self._changing:
            await asyncio.to_thread(self._change.remove, name)
            await self._loader.poll()


async def _ask(engines: Engines) -> None:
    """Wait for a model's first replica, by a call to one of its engine deployments.

    Serve reports the call to the scaling policy as waiting work until it is answered or cancelled.
    A call to one pool is enough, as the policy considers all pools.
    """
    response: Any = engines[0].stats.remote()
    try:
        await response
    except asyncio.CancelledError:
        response.cancel()
        raise
    except (RayError, RayServeException) as error:
        logger.warning("no replica came: %s", error)


def _load(model: ServedModel, app: str) -> tuple[ModelCard, Tokenizer, ModelIdentity]:
    folder = model.find_model()
    config = ModelConfig.from_folder(folder)
    tokenizer = Tokenizer.load(
        folder,
        generation_config=model.generation_config,
        chat_template=model.chat_template,
    )
    pooling = read_pooling(folder)
    sees = config.vision is not None
    identity = ModelIdentity.of(folder)
    server = f"{installed_version()} {identity.weights}".encode()
    card = ModelCard(
        id=model.name,
        max_model_len=config.max_positions,
        vocab_size=config.vocab_size,
        eos_token_ids=tokenizer.eos_token_ids,
        created=first_served(app, model.name, int(time.time())),
        root=model.name,
        seed=model.seed,
        fingerprint=f"fp_{hashlib.blake2b(server, digest_size=6).hexdigest()}",
        aliases=model.aliases,
        pooling=pooling,
        vector_size=0 if pooling is None else pooling.size(config.hidden_size),
        facts=read_facts(folder, config),
        images=image_processor(folder, tokenizer.encode) if sees and model.images else None,
        images_off=sees and not model.images,
    )
    return card, tokenizer, identity
