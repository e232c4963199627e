"""image_processor: loads a model's image processor; prepare: processes a picture. No torch here."""

import hashlib
import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from PIL import Image as Pillow

from engine.architectures import WRAPPERS
from engine.config_reader import Reader
from engine.errors import InvalidRequest
from engine.images.image import Image
from engine.images.layout import ImageError, ImageLayout, check_sides, too_large
from engine.images.picture_file import PictureFile
from engine.images.settings import Encode, ProcessorSettings
from engine.images.threads import alone, prepares, share_out
from kernels.candidates import Lazy

_LARGE = 2**19  # minimum pixels of pictures that are hashed and resized at the same time
_BAND = 2**17  # pixels that are converted to bytes at once, to be hashed
_SAMPLE = 24, 24  # pixels that identify a picture in `PixelCache.may_have`

# not imported at runtime, as the library also imports this module for models without images
if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "ImageError",
    "ImageLayout",
    "ImageProcessor",
    "PixelCache",
    "image_processor",
    "prepare",
]


class ImageProcessor(Protocol):
    """The interface of an image processor, which converts a picture to tokens and pixels.

    placeholder: the text that the chat template writes for a picture, such as "<|image_pad|>".
    image_token_id: the placeholder token that the picture's embeddings replace.
    settings: all settings that affect pixels, as bytes for digests.

    """

    placeholder: str
    image_token_id: int
    settings: bytes

    def layout(self, width: int, height: int, detail: str = "auto") -> ImageLayout:
        """Return the layout of a picture of width x height pixels.

        detail: one of `DETAILS`; "low" requests few tokens.
        Raises ImageError for a picture that the model does not support.
        """
        ...

    def pixels(self, picture: Pillow.Image, layout: ImageLayout) -> "NDArray[np.uint8]":
        """Return the pixels [tiles, height, width, 3] of an RGB picture with this layout."""
        ...


class ClipProcessor(Protocol):
    """The interface of a video processor, which converts a clip's frames to tokens and pixels.

    placeholder: the text that the chat template writes for a clip.
    outer: the texts before and after the placeholder, which a clip's spans replace as well.
    settings: all settings that change pixels, as bytes for digests.
    """

    @property
    def placeholder(self) -> str: ...

    @property
    def outer(self) -> tuple[str, str]: ...

    @property
    def settings(self) -> bytes: ...

    def layouts(self, width: int, height: int, frames: int, fps: float) -> list[ImageLayout]:
        """Return the layouts of a clip's spans of tokens, in order.

        A clip is one span, or (Qwen3-VL) one for each temporal patch.

        width, height: pixels of each frame.
        fps: frames per second.
        Raises ImageError for a clip that the model does not support.
        """
        ...


def _processor(path: str) -> Lazy:
    """Return a processor's class, "module:class", imported when a model has such a processor."""
    return Lazy(f"engine.images.families.{path}")


# Wrapper.images -> the family's processor.
FAMILIES: Mapping[str, Callable[[ProcessorSettings], ImageProcessor]] = {
    "gemma3": _processor("gemma3:Gemma3Images"),
    "glm4v": _processor("glm4v:GlmImages"),
    "idefics3": _processor("idefics3:Idefics3Images"),
    "internvl": _processor("internvl:InternImages"),
    "internvl_chat": _processor("internvl:InternImages"),
    "kimi": _processor("kimi:KimiImages"),
    "kimi_split": _processor("kimi:KimiImages"),
    "llama4": _processor("llama4:Llama4Images"),
    "qwen2_vl": _processor("qwen_vl:Qwen2Images"),
    "qwen2_5_vl": _processor("qwen_vl:Qwen25Images"),
    "gemma4": _processor("gemma4:Gemma4Images"),
    "paddleocr_vl": _processor("paddleocr_vl:PaddleImages"),
    "pixtral": _processor("pixtral:PixtralImages"),
    "qwen3_vl": _processor("qwen_vl:Qwen3Images"),
}


def image_processor(folder: Path, encode: Encode | None = None) -> ImageProcessor | None:
    """Return the image processor of a model folder; None if images are not supported.

    encode: returns the tokens of a text that may have special tokens; some families do not need it.
    Raises ConfigError naming the file and the invalid key.
    """
    config = Reader.from_file(folder / "config.json")
    names = config.get("architectures", [])
    wrapper = WRAPPERS.get(str(names[0])) if isinstance(names, list) and names else None
    family = "" if wrapper is None else wrapper.family(config)
    settings = ProcessorSettings.read(folder, encode) if family else None
    return None if settings is None else FAMILIES[family](settings)


def clips_of(processor: ImageProcessor | None) -> ClipProcessor | None:
    """Return the video processor of a model; None if clips are not supported."""
    if processor is None:
        return None
    from engine.images.families.qwen_vl import QwenImages

    return processor.clips if isinstance(processor, QwenImages) else None


def clip_layouts(
    processor: ImageProcessor, sizes: Sequence[tuple[int, int]], fps: float
) -> list[ImageLayout]:
    """Return the layouts of a clip's spans of tokens, in order.

    sizes: (width, height) of its frames.
    fps: frames per second, valid by `is_fps`.
    Raises ImageError for frames of different sizes, and for a clip that the model does not support.
    """
    clips = clips_of(processor)
    if clips is None:
        raise ImageError("modality_not_supported", "this model takes no clips")
    for number, size in enumerate(sizes):
        check_sides(*size)
        if size != sizes[0]:
            raise ImageError(
                "invalid_clip",
                f"frame {number} of the clip is {size[0]} x {size[1]}, the first is "
                f"{sizes[0][0]} x {sizes[0][1]}; send frames of one size",
            )
    width, height = sizes[0] if sizes else (1, 1)
    return clips.layouts(width, height, len(sizes), fps)


def check_layouts(
    processor: ImageProcessor,
    layouts: Sequence[ImageLayout],
    most: int,
    sides: tuple[int, int] | None = None,
) -> None:
    """Refuse an image or a clip that has more embeddings than an engine takes.

    layouts: the layout of the image, or those of the clip's spans.
    most: the maximum number of embeddings of an image; 0 = unknown.
    sides: width and height of an image whose `detail` the client may choose; None = no such image.
    Raises ImageError.
    """
    for layout in layouts:
        if most and layout.size > most:
            low = sides is not None and processor.layout(*sides, "low").size <= most
            raise too_large(layout.size, most, low=low)


class PixelCache:
    """A least recently used cache of pictures' pixels, by digest. Thread-safe.

    A conversation sends its pictures again with each turn. Samples show early that a picture is not
    in the cache.

    limit: the maximum bytes of all pixels.
    """

    def __init__(self, limit: int = 64 * 2**20) -> None:
        self._limit = limit
        self._size = 0
        self._pixels: OrderedDict[bytes, tuple[bytes, bytes]] = OrderedDict()  # pixels, sample
        self._samples: Counter[bytes] = Counter()
        self._lock = threading.Lock()

    def may_have(self, sample: bytes) -> bool:
        """Whether a picture with this sample is in the cache; another one may have the same."""
        with self._lock:
            return sample in self._samples

    def get(self, digest: bytes) -> bytes | None:
        with self._lock:
            if digest not in self._pixels:
                return None
            self._pixels.move_to_end(digest)
            return self._pixels[digest][0]

    def put(self, digest: bytes, pixels: bytes, sample: bytes = b"") -> None:
        if len(pixels) > self._limit:
            return
        with self._lock:
            if digest in self._pixels:
                self._forget(digest)
            self._pixels[digest] = pixels, sample
            self._samples[sample] += 1
            self._size += len(pixels)
            while self._size > self._limit:
                self._forget(next(iter(self._pixels)))

    def _forget(self, digest: bytes) -> None:
        pixels, sample = self._pixels.pop(digest)
        self._size -= len(pixels)
        self._samples[sample] -= 1
        if not self._samples[sample]:
            del self._samples[sample]


def prepare(
    processor: ImageProcessor,
    picture: Pillow.Image | PictureFile | Sequence[Pillow.Image | PictureFile],
    layout: ImageLayout,
    start: int,
    cache: PixelCache | None = None,
) -> Image:
    """Compute the pixels and the digest of a picture, or of a span of a clip.

    picture: a file or an RGB picture of the layout's width and height; for a clip the list of all
        frames.
    start: the index in the prompt's token_ids of the layout's first token.
    cache: a cache of pixels to use and to fill.
    Raises InvalidRequest for a file that cannot be decoded.
    """
    frames = picture if isinstance(picture, Sequence) else [picture]
    own = [frames[index] for index in layout.frames]

    def digest() -> bytes:
        return _digest(processor, own, layout)

    def resized() -> bytes:
        return _resized(processor, frames, layout)

    sample = _sample(own)
    with prepares():
        if sample and alone() and (cache is None or not cache.may_have(sample)):
            pixels, name = share_out(lambda work: work(), [resized, digest])
        else:
            name = digest()
            pixels = (cache.get(name) if cache is not None else None) or resized()
    if cache is not None:
        cache.put(name, pixels, sample)
    return Image(
        name,
        start + layout.first,
        layout.length,
        layout.size,
        layout.grid,
        layout.shape,
        pixels,
        time_step=layout.time_step,
    )


def _digest(
    processor: ImageProcessor, frames: Sequence[Pillow.Image | PictureFile], layout: ImageLayout
) -> bytes:
    """Return the digest of a picture, or of a span of a clip, with a layout."""
    clips = clips_of(processor) if len(frames) > 1 else None
    settings = processor.settings if clips is None else processor.settings + clips.settings
    kind = "file" if isinstance(frames[0], PictureFile) else str(frames[0].size)
    digest = hashlib.sha256()  # fast, as CPUs have instructions for SHA-256
    for field in (settings, f"{kind} {layout.grid} {layout.shape}".encode()):
        digest.update(len(field).to_bytes(8, "little") + field)
    for frame in frames:
        if len(frames) > 1:
            size = len(frame.data) if isinstance(frame, PictureFile) else 3 * math.prod(frame.size)
            digest.update(size.to_bytes(8, "little"))
        for data in [frame.data] if isinstance(frame, PictureFile) else _bands(frame):
            digest.update(data)
    return digest.digest()[:16]


def _bands(picture: Pillow.Image) -> Iterator[bytes]:
    """Yield an RGB picture's bytes, a few rows at a time.

    The bytes of all rows would take new pages of memory, which cost more time than their hash.
    """
    width, height = picture.size
    rows = max(1, _BAND // width)
    for top in range(0, height, rows):
        yield picture.crop((0, top, width, min(top + rows, height))).tobytes()


def _sample(frames: Sequence[Pillow.Image | PictureFile]) -> bytes:
    """Return a few pixels of frames that take long to hash; b"" for files and small frames.

    Files are hashed fast.
    """
    pictures = [frame for frame in frames if isinstance(frame, Pillow.Image)]
    if sum(picture.width * picture.height for picture in pictures) < _LARGE:
        return b""
    few = [picture.resize(_SAMPLE, Pillow.Resampling.NEAREST) for picture in pictures]
    return hashlib.sha256(b"".join(picture.tobytes() for picture in few)).digest()


def _resized(
    processor: ImageProcessor, frames: Sequence[Pillow.Image | PictureFile], layout: ImageLayout
) -> bytes:
    """Return the pixels of a picture, or of a span of a clip with all its `frames`.

    Raises InvalidRequest for a file that cannot be decoded.
    """
    tiles = {index: _tiles(processor, frames, index, layout) for index in {*layout.frames}}
    if len(layout.frames) == 1:
        array = tiles[layout.frames[0]]
    else:
        import numpy as np

        array = np.concatenate([tiles[index] for index in layout.frames])
    assert array.shape == (*layout.shape, 3), (array.shape, layout.shape)
    return _bytes(array)


def _tiles(
    processor: ImageProcessor,
    frames: Sequence[Pillow.Image | PictureFile],
    index: int,
    layout: ImageLayout,
) -> "NDArray[np.uint8]":
    """Return the pixels [tiles, height, width, 3] of a picture, or of one frame of a clip.

    index: the frame's index, which the error names for a clip.
    Raises InvalidRequest for a file that cannot be decoded.
    """
    picture = frames[index]
    if isinstance(picture, PictureFile):
        try:
            picture = picture.decode()
        except InvalidRequest as error:
            if len(frames) == 1:
                raise
            raise InvalidRequest(f"frame {index} {error.message}", code=error.code) from None
    return processor.pixels(picture, layout)


def _bytes(pixels: "NDArray[np.uint8]") -> bytes:
    """Return an array's bytes in C order, without a copy if the array views a whole bytes
    object."""
    buffer: Any = pixels
    while hasattr(buffer, "base"):
        buffer = buffer.base
    if isinstance(buffer, bytes) and pixels.flags.c_contiguous and len(buffer) == pixels.nbytes:
        return buffer
    return pixels.tobytes()
