"""EncoderReplica: the Serve deployment of an encoder pool. asks: creates a replica's function for
calling the pool.

Serve places, checks, replaces and scales the actors, and distributes calls among them.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from numpy.typing import NDArray
from ray.serve.handle import DeploymentHandle

from deployments.checkpoints.resolve import ModelIdentity
from deployments.encoder.rows import AskEncoder
from deployments.observe.logs import log_through_serve
from deployments.transport import discovery
from engine.config.engine_config import EngineConfig
from engine.errors import InvalidRequest
from engine.images.image import Image

logger = logging.getLogger("manta.encoder")


class EncoderReplica:
    """An actor that has only a model's vision encoder, and encodes one image at a time."""

    async def __init__(self, prepare: Callable[[], EngineConfig], stall_seconds: float) -> None:  # type: ignore[misc]  # Serve awaits it
        """Load the vision encoder.

        prepare: finds or downloads the model, and returns its EngineConfig for this machine.
        stall_seconds: maximum seconds for one image.
        """
        from engine.encoder import ImageEncoder  # imports torch, which replicas and routers do not

        config = await asyncio.to_thread(prepare)
        log_through_serve(config.log_level)
        identity = await asyncio.to_thread(ModelIdentity.of, config.model)
        self._weights = identity.weights
        self._stall_seconds = stall_seconds
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="encoder")
        # Monotonic time at which the present image was started; 0: there is none.
        self._began = 0.0
        self._failed = ""
        self._images = 0
        self._encoder = await self._run(ImageEncoder, config)
        logger.info("encoder ready: %s", config.model)

    async def encode(self, weights: str, image: Image) -> tuple[NDArray[Any], str]:
        """Return the embeddings of an image and their dtype, as in `Image.rows` and `rows_dtype`.

        weights: the identity of the caller's weights; "": unknown. Raises ValueError if this
            encoder has other weights.
        """
        if weights and self._weights and weights != self._weights:
            raise ValueError("this encoder has other weights than the replica")
        return await self._run(self._encode, image), self._encoder.dtype

    async def stats(self) -> dict[str, int]:
        """Return the actor's process id and its number of encoded images, for operators."""
        return {"pid": os.getpid(), "images": self._images}

    async def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def _encode(self, image: Image) -> NDArray[Any]:
        self._began = time.monotonic()
        try:
            rows: NDArray[Any] = self._encoder.encode(image)
            self._images += 1
            return rows
        except InvalidRequest:
            raise
        except Exception as error:
            self._failed = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._began = 0.0

    def check_health(self) -> None:
        """Raise RuntimeError if an image failed or takes too long; Serve then replaces this
        actor."""
        seconds = time.monotonic() - self._began
        if self._began and seconds > self._stall_seconds:
            self._failed = f"an image has not ended in {seconds:.0f} s"
        if self._failed:
            raise RuntimeError(self._failed)


def asks(encoders: DeploymentHandle[Any], weights: str) -> AskEncoder:
    """Return the function by which a replica requests embeddings from its encoder pool.

    The function raises ConnectionError once no actor runs, as Serve would keep the call until one
    has started. Must be called on the event loop.

    weights: see `EncoderReplica.encode`.
    """
    loop, gone = asyncio.get_running_loop(), asyncio.Event()

    def changed(running: discovery.Replicas) -> None:
        loop.call_soon_threadsafe(gone.clear if running else gone.set)

    discovery.subscribe(encoders.app_name, encoders.deployment_name, changed)

    async def ask(image: Image) -> tuple[NDArray[Any], str]:
        response: Any = encoders.encode.remote(weights, image)
        reading: asyncio.Future[tuple[NDArray[Any], str]] = asyncio.ensure_future(response)
        leaving = asyncio.create_task(gone.wait())
        try:
            await asyncio.wait((reading, leaving), return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                return reading.result()
            raise ConnectionError("no actor of the encoder pool runs")
        finally:
            leaving.cancel()
            if not reading.done():
                reading.cancel()
                response.cancel()

    return ask
