"""image_processor: loads a model's image processor; prepare: processes a picture. No torch here."""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from PIL import Image as Pillow

from engine.architectures import WRAPPERS
from engine.config_reader import Reader
from engine.errors import InvalidRequest
from engine.images.image import Image
from engine.images.layout import ImageError, ImageLayout, check_sides
from engine.images.picture_file import PictureFile
from engine.images.settings import Encode, ProcessorSettings
from engine.images.threads import prepares
from kernels.candidates import Lazy

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


class PixelCache:
    """A least recently used cache of pictures' pixels, by digest. Thread-safe.

    A conversation sends its pictures again with each turn.

    limit: the maximum bytes of all pixels.
    """

    def __init__(self, limit: int = 64 * 2**20) -> None:
        self._limit = limit
        self._size = 0
        self._pixels: OrderedDict[bytes, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, digest: bytes) -> bytes | None:
        with self._lock:
            if digest in self._pixels:
                self._pixels.move_to_end(digest)
            return self._pixels.get(digest)

    def put(self, digest: bytes, pixels: bytes) -> None:
        if len(pixels) > self._limit:
            return
        with self._lock:
            self._size += len(pixels) - len(self._pixels.pop(digest, b""))
            self._pixels[digest] = pixels
            while self._size > self._limit:
                self._size -= len(self._pixels.popitem(last=False)[1])


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
    name = _digest(processor, [frames[index] for index in layout.frames], layout)
    pixels = None if cache is None else cache.get(name)
    if pixels is None:
        with prepares():
            tiles = {index: _tiles(processor, frames, index, layout) for index in {*layout.frames}}
        if len(layout.frames) == 1:
            array = tiles[layout.frames[0]]
        else:
            import numpy as np

            array = np.concatenate([tiles[index] for index in layout.frames])
        assert array.shape == (*layout.shape, 3), (array.shape, layout.shape)
        pixels = _bytes(array)
        if cache is not None:
            cache.put(name, pixels)
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
        data = frame.data if isinstance(frame, PictureFile) else frame.tobytes()
        if len(frames) > 1:
            digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()[:16]


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
