"""image_processor: returns how a folder's pictures become tokens and pixels. No torch here."""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from PIL import Image as Pillow

from engine.architectures import WRAPPERS
from engine.config_reader import Reader
from engine.images.families.gemma3 import Gemma3Images
from engine.images.families.gemma4 import Gemma4Images
from engine.images.families.glm4v import GlmImages
from engine.images.families.idefics3 import Idefics3Images
from engine.images.families.internvl import InternImages
from engine.images.families.llama4 import Llama4Images
from engine.images.families.paddleocr_vl import PaddleImages
from engine.images.families.pixtral import PixtralImages
from engine.images.families.qwen_vl import QwenImages
from engine.images.image import Image
from engine.images.layout import ImageError, ImageLayout
from engine.images.picture_file import PictureFile
from engine.images.settings import Encode, ProcessorSettings

if TYPE_CHECKING:  # the library imports this module where no picture comes
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
    """The way from a picture to the tokens and pixels of one model.

    placeholder: the text that the chat template writes for a picture, such as "<|image_pad|>".
    image_token_id: the token at whose positions the picture's embeddings stand.
    settings: what changes pixels, for digests.
    """

    placeholder: str
    image_token_id: int
    settings: bytes

    def layout(self, width: int, height: int, detail: str = "auto") -> ImageLayout:
        """Return the layout of a picture of this many pixels.

        detail: "low" asks for few tokens.
        Raises ImageError for a picture that the model does not take.
        """
        ...

    def pixels(self, picture: Pillow.Image, layout: ImageLayout) -> "NDArray[np.uint8]":
        """Return the pixels [tiles, height, width, 3] of an RGB picture with this layout."""
        ...


# Wrapper.images -> the family's processor.
FAMILIES: Mapping[str, Callable[[ProcessorSettings], ImageProcessor]] = {
    "gemma3": Gemma3Images,
    "glm4v": GlmImages,
    "idefics3": Idefics3Images,
    "internvl": InternImages,
    "internvl_chat": InternImages,
    "llama4": Llama4Images,
    "qwen2_vl": QwenImages,
    "qwen2_5_vl": QwenImages,
    "gemma4": Gemma4Images,
    "paddleocr_vl": PaddleImages,
    "pixtral": PixtralImages,
    "qwen3_vl": QwenImages,
}


def image_processor(folder: Path, encode: Encode | None = None) -> ImageProcessor | None:
    """Return the processor of a model folder; None if the model takes no pictures here.

    encode: of the model's tokenizer, as of `ProcessorSettings`. Some families need none.
    Raises ConfigError naming the file and key that cannot be read.
    """
    config = Reader.from_file(folder / "config.json")
    names = config.get("architectures", [])
    wrapper = WRAPPERS.get(str(names[0])) if isinstance(names, list) and names else None
    family = "" if wrapper is None else wrapper.family(config)
    settings = ProcessorSettings.read(folder, encode) if family else None
    return None if settings is None else FAMILIES[family](settings)


class PixelCache:
    """A cache of the pixels of the pictures that came last. Thread-safe.

    A conversation sends its pictures again with each turn.

    limit: bytes.
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
    picture: Pillow.Image | PictureFile,
    layout: ImageLayout,
    start: int,
    cache: PixelCache | None = None,
) -> Image:
    """Return the picture with its pixels and digest.

    picture: a file, or an RGB picture, of the width and height that the layout was made of.
    start: the index in the prompt's token_ids of the layout's first token.
    cache: where pixels may be already, and are put.
    Raises InvalidRequest for a file that cannot be decoded.
    """
    if isinstance(picture, PictureFile):
        kind, data = "file", picture.data
    else:
        kind, data = str(picture.size), picture.tobytes()
    digest = hashlib.sha256()  # which processors have instructions for
    for field in (processor.settings, f"{kind} {layout.grid} {layout.shape}".encode()):
        digest.update(len(field).to_bytes(8, "little") + field)
    digest.update(data)
    name = digest.digest()[:16]
    pixels = None if cache is None else cache.get(name)
    if pixels is None:
        decoded = picture.decode() if isinstance(picture, PictureFile) else picture
        array = processor.pixels(decoded, layout)
        assert array.shape == (*layout.shape, 3), (array.shape, layout.shape)
        pixels = _bytes(array)
        if cache is not None:
            cache.put(name, pixels)
    return Image(
        name, start + layout.first, layout.length, layout.size, layout.grid, layout.shape, pixels
    )


def _bytes(pixels: "NDArray[np.uint8]") -> bytes:
    """Return the pixels in order, without a copy where the array is a view of all of Pillow's."""
    buffer: Any = pixels
    while hasattr(buffer, "base"):
        buffer = buffer.base
    if isinstance(buffer, bytes) and pixels.flags.c_contiguous and len(buffer) == pixels.nbytes:
        return buffer
    return pixels.tobytes()
