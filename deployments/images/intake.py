"""ImageIntake: reads and decodes the images of requests, off the event loop and within limits."""

import asyncio
import warnings
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from PIL import Image

from deployments.images.download import ImageDownloads, not_allowed
from deployments.images.limits import ImageLimits
from deployments.images.memory import HeldBytes, HeldImages, ImageMemory
from engine.errors import InvalidRequest, MantaError, Overloaded
from engine.images.data_url import decode_base64, decode_data_url
from engine.images.image import Image as PreparedImage
from engine.images.layout import ImageLayout
from engine.images.picture_file import PictureFile
from engine.images.processor import ImageProcessor, PixelCache, prepare

T = TypeVar("T")

THREADS = 4  # Pillow releases the interpreter lock while it decodes and resizes
MAX_PIXEL_BYTES = 96 * 2**20  # of a request's resized pixels, which are sent in one frame
_WAIT_SECONDS = 20.0  # maximum seconds to wait for decoding to begin
_BLOCK_BYTES = 34 * 2**20  # size of Pillow's blocks: glibc returns large blocks when freed
_SPARE_BLOCKS = 4  # free blocks that Pillow keeps: new pages cost a quarter of a picture's time


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image as a request contains it: by URL or in base64.

    place: the path of its field in the request, for errors, as
        `messages[0].content[1].image_url`.
    url: a data: or http(s) URL; "": the image is in `base64`.
    base64: the file's bytes as text.
    detail: OpenAI's field `detail`, which determines the image's resolution for the model.
    """

    place: str
    url: str = ""
    base64: str = ""
    detail: str = "auto"


@dataclass(frozen=True, slots=True)
class PlacedPicture:
    """A picture, or a part of a video clip, with its position in the prompt.

    sources, files: one item for a picture, or one per frame of the whole clip.
    start: index of its first token in the prompt.
    """

    sources: Sequence[ImageSource]
    files: Sequence[PictureFile]
    layout: ImageLayout
    start: int

    @property
    def place(self) -> str:
        """The path in the request of the picture's field, or of the clip's list of frames."""
        place = self.sources[0].place
        return place if len(self.sources) == 1 else place.rpartition("[")[0]


class ImageIntake:
    """The reader and decoder of the images in a router's requests.

    All methods must be called on the event loop.
    """

    def __init__(self, limits: ImageLimits | None = None) -> None:
        self.limits = limits = limits or ImageLimits()
        # Pillow's warnings about files are disabled, as they would put clients' texts into the log.
        warnings.filterwarnings("ignore", module=r"PIL\.")
        # With Pillow's default block size, 16 MiB, glibc would keep freed blocks in each thread's
        # arena.
        Image.core.set_block_size(_BLOCK_BYTES)  # type: ignore[attr-defined]
        Image.core.set_blocks_max(_SPARE_BLOCKS)  # type: ignore[attr-defined]
        self.memory = ImageMemory(limits.memory_bytes)
        self.decoded = 0  # number of images since the start
        self._downloads = ImageDownloads(limits)
        self._cache = PixelCache()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="images")
        # The budget is the pixel limit of one image: either many small images are decoded
        # concurrently, or one of maximum size.
        self._turns = _Turns(limits.pixels)

    async def read(self, sources: Sequence[ImageSource], held: HeldBytes) -> list[PictureFile]:
        """Fetch or decode the files of images, read their headers, and return the files.

        held: the memory reservation to which their bytes are added.
        Raises InvalidRequest naming the image, Overloaded.
        """
        return await _all([self._read(source, held) for source in sources])

    async def _read(self, source: ImageSource, held: HeldBytes) -> PictureFile:
        limits = self.limits
        try:
            scheme = source.url[:8].partition(":")[0].lower()
            if scheme in ("http", "https"):
                data = await self._downloads.fetch(source.url)
                held.add(len(data))
                return await self._in_thread(lambda: PictureFile.read(data, limits.pixels))
            if source.url and scheme != "data":
                raise not_allowed("must be a data: URL, or an http(s) address")

            def decoded() -> PictureFile:
                most = limits.file_bytes
                if source.url:
                    file = decode_data_url(source.url, most)
                else:
                    file = decode_base64(source.base64, most)
                return PictureFile.read(file, limits.pixels)

            held.add(len(source.url or source.base64) // 4 * 3)
            return await self._in_thread(decoded)
        except InvalidRequest as error:
            raise _named(error, source.place, _setting(error, limits)) from None

    async def pixels(
        self,
        pictures: Sequence[PlacedPicture],
        processor: ImageProcessor,
        held: HeldBytes,
        copies: int = 1,
    ) -> HeldImages:
        """Decode pictures, and return the images in the form that engines take.

        held: the reservation of the request's bytes, which is released with the images.
        copies: the number of times that the pixels are sent (once for each choice).
        Raises InvalidRequest naming the image, Overloaded.
        """
        sizes = [3 * tiles * height * width for tiles, height, width in _shapes(pictures)]
        if sum(sizes) > MAX_PIXEL_BYTES:
            raise InvalidRequest(
                f"the images of one request may have {MAX_PIXEL_BYTES // 3} pixels after resizing, "
                f"these have {sum(sizes) // 3}",
                param=pictures[-1].place,
                code="image_too_large",
            )
        held.add(sum(sizes) * copies)
        images = await _all([self._prepared(picture, processor) for picture in pictures])
        return HeldImages(images, held)

    async def _prepared(self, picture: PlacedPicture, processor: ImageProcessor) -> PreparedImage:
        def work() -> PreparedImage:
            return prepare(processor, picture.files, picture.layout, picture.start, self._cache)

        # The frames of a clip, which have the same size, are decoded one after the other.
        pixels = min(picture.files[0].pixels, self._turns.limit)
        loop = asyncio.get_running_loop()
        await self._turns.take(pixels)
        decoding = self._threads.submit(work)
        # The thread continues even if its request ends, and until then its pixels remain counted.
        decoding.add_done_callback(lambda _: loop.call_soon_threadsafe(self._turns.give, pixels))
        try:
            image = await asyncio.wrap_future(decoding)
        except InvalidRequest as error:
            raise _named(error, picture.place) from None
        self.decoded += 1
        return image

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


class _Turns:
    """A budget for the pixels that are decoded concurrently, granted in the order of requests."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._free = limit
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, pixels: int) -> None:
        """Wait until this number of pixels may be decoded. Raises Overloaded after 20 s."""
        if not self._waiting and pixels <= self._free:
            self._free -= pixels
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((pixels, turn))
        try:
            async with asyncio.timeout(_WAIT_SECONDS):
                await asyncio.shield(turn)
        except BaseException as error:
            if turn.done():  # the pixels were granted, but are not needed any more
                self.give(pixels)
            else:
                self._waiting.remove((pixels, turn))
                self._next()
            if isinstance(error, TimeoutError):
                message = "too many images wait to be decoded"
                raise Overloaded(message, retry_after=_WAIT_SECONDS) from None
            raise

    def give(self, pixels: int) -> None:
        self._free += pixels
        self._next()

    def _next(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._free:
            pixels, turn = self._waiting.popleft()
            self._free -= pixels
            turn.set_result(None)


async def _all(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently and return their results; the first error cancels the rest."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
    try:
        return [await task for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _shapes(pictures: Sequence[PlacedPicture]) -> list[tuple[int, int, int]]:
    return [picture.layout.shape for picture in pictures]


def _named(error: MantaError, place: str, setting: str = "") -> InvalidRequest:
    """Return an error about an image, with the path of the image's field added.

    setting: the name of the setting whose limit the image exceeds; "": none.
    """
    limit = f" ({setting})" if setting else ""
    return InvalidRequest(f"{place} {error.message}{limit}", param=place, code=error.code)


def _setting(error: MantaError, limits: ImageLimits) -> str:
    """Return the setting whose limit a picture exceeded; "" for any other error."""
    if error.code == "image_too_large":
        if error.message.endswith(f"more than {limits.pixels} pixels"):
            return "images.pixels"
        if error.message.endswith(f"more than {limits.file_bytes} bytes"):
            return "images.file_bytes"
    return ""
