"""ImageRows: gets the embeddings of requests' images from an encoder pool before the requests go to
the engine.

A request waits here for embeddings that the engine's cache lacks, as far as this process knows. If
embeddings do not arrive in time, the engine computes them from the pixels, which the request keeps.
So a dead, slow or full encoder only costs time. This module does not need Ray.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from msgspec.structs import replace
from numpy.typing import NDArray

from engine.images.image import Image
from engine.messages import EngineRequest

logger = logging.getLogger("manta.replica")

_PAUSE_SECONDS = 5.0  # seconds without calls to encoders after one of them did not answer in time

# Requests embeddings from an encoder; returns their array and dtype, as in `Image`. May raise any
# error.
AskEncoder = Callable[[Image], Awaitable[tuple[NDArray[Any], str]]]
_Key = tuple[str, bytes]  # (cache_salt, digest) of an image; tenants do not share embeddings


@dataclass(frozen=True, slots=True)
class EncoderPool:
    """The encoder pool of a replica. wait_seconds: maximum seconds to wait for an image's
    embeddings."""

    ask: AskEncoder
    wait_seconds: float


class WaitingRequest(Protocol):
    """The interface of `deployments.replica.adapters.SubmittedRequest` that this module uses.

    encoded: whether embeddings were already requested, so that the request does not wait here
        again.
    """

    encoded: bool

    @property
    def request(self) -> EngineRequest: ...
    @property
    def wanted(self) -> bool: ...


class ImageRows:
    """The requests of a replica that wait for embeddings of their images.

    size: the maximum number of embeddings in the engine's cache.
    failures: the number of images, since the start, for which no encoder delivered embeddings.
    """

    def __init__(self, pool: EncoderPool, begin: Callable[[Any], None]) -> None:
        """Set up an empty list of waiting requests.

        begin: called with a waiting request once its embeddings have arrived or failed.
        """
        self.size = self.failures = 0
        self._pool = pool
        self._begin = begin
        # image -> number of its embeddings, for images that are probably in the engine's cache,
        # least recently used first; an error costs an encode or a transfer
        self._held: OrderedDict[_Key, int] = OrderedDict()
        self._held_size = 0
        self._asking: dict[_Key, asyncio.Task[None]] = {}
        # image -> the image with embeddings that have arrived, for the first request that waits for
        # them
        self._arrived: dict[_Key, Image] = {}
        self._waiting: dict[int, asyncio.Task[None]] = {}  # request id -> its task
        self._silent_until = 0.0
        self._logged = -_PAUSE_SECONDS
        self._stopped = False

    def submit(self, submitted: WaitingRequest) -> bool:
        """Request the embeddings of a request's images from encoders.

        Returns whether the request waits for any; if so, `begin` is called with the request later.
        """
        if submitted.encoded or self._stopped or not submitted.request.images:
            return False
        submitted.encoded = True
        request = submitted.request
        asked = [
            task
            for image in request.images
            if (task := self._ask((request.cache_salt, image.digest), image)) is not None
        ]
        if asked:
            self._waiting[request.id] = asyncio.ensure_future(self._go_on(submitted, asked))
        return bool(asked)

    def _ask(self, key: _Key, image: Image) -> asyncio.Task[None] | None:
        """Return the task that gets an image's embeddings; None if the engine has them in its
        cache, or must compute them."""
        if key in self._held:
            self._held.move_to_end(key)
            return None
        if key not in self._asking:
            if asyncio.get_running_loop().time() < self._silent_until:
                self.failures += 1
                return None
            self._asking[key] = asyncio.ensure_future(self._get(key, image))
        return self._asking[key]

    async def _get(self, key: _Key, image: Image) -> None:
        """Get an image's embeddings from an encoder, and store them for a waiting request."""
        pool = self._pool
        try:
            async with asyncio.timeout(pool.wait_seconds):
                rows, dtype = await pool.ask(replace(image, start=0, rows=b""))
            self._arrived[key] = replace(image, rows=rows.tobytes(), rows_dtype=dtype)
        except Exception as error:
            self.failures += 1
            now = asyncio.get_running_loop().time()
            if isinstance(error, TimeoutError):
                self._silent_until = now + _PAUSE_SECONDS
            if now >= self._logged + _PAUSE_SECONDS:
                self._logged = now
                reason = f"{type(error).__name__}: {error}"[:300]
                logger.warning("no encoder encodes an image, so the engine does: %s", reason)
        finally:
            del self._asking[key]

    async def _go_on(self, submitted: WaitingRequest, asked: Sequence[asyncio.Task[None]]) -> None:
        """Wait for the tasks that get a request's embeddings; then begin the request unless it was
        aborted."""
        request = submitted.request
        await asyncio.wait(asked)
        arrived = [
            self._arrived.pop((request.cache_salt, image.digest), image) for image in request.images
        ]
        self._waiting.pop(request.id, None)
        if not submitted.wanted:
            return
        if not self._stopped:
            request.images = [
                replace(image, rows=encoded.rows, rows_dtype=encoded.rows_dtype)
                for image, encoded in zip(request.images, arrived, strict=True)
            ]
            for image in request.images:
                self._hold((request.cache_salt, image.digest), image.size)
        self._begin(submitted)

    def _hold(self, key: _Key, size: int) -> None:
        """Record that the engine gets an image's embeddings, with a request, into its cache.

        Beyond the size of the engine's cache, the least recently used records are removed.
        """
        if key not in self._held:
            self._held[key] = size
            self._held_size += size
        while self._held_size > self.size:
            _, size = self._held.popitem(last=False)
            self._held_size -= size

    def take_back(self, live: set[int], ids: Iterable[int]) -> None:
        """Remove those aborted requests from `live` that wait here.

        live: ids of the unfinished requests of a router. ids: those of the aborted ones.
        """
        live -= self._waiting.keys() & set(ids)

    def stop(self) -> None:
        """Stop using encoders, because the engine gets weights that they do not have."""
        self._stopped = True

    def close(self) -> None:
        self.stop()
        for task in (*self._asking.values(), *self._waiting.values()):
            task.cancel()
