"""Image processors of Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5 and 3.6."""

import json
from typing import TYPE_CHECKING

from PIL import Image as Pillow

from engine.images.families.qwen_clips import (
    PacedClips,
    QwenClips,
    TimedClips,
    check_aspect,
    clip_token,
    grid_of,
)
from engine.images.layout import ImageLayout, check_sides
from engine.images.resize import resized
from engine.images.settings import ProcessorSettings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Defaults of transformers' class, for keys that the file lacks.
_PATCH, _MERGE, _LEAST, _MOST = 14, 2, 56 * 56, 28 * 28 * 1280
_LOW = 512  # maximum embeddings of a picture with detail: low


class QwenImages:
    """The base class of Qwen's image processors, which round sides to whole embeddings.

    unit: the side, in pixels, of the square that becomes one embedding.
    least, most: the limits of a picture's area in pixels.
    clips: the video processor; None = the model takes no clips.
    """

    name, text = "qwen_vl", "<|image_pad|>"
    limits = _LEAST, _MOST  # transformers' defaults of (least, most)
    clip_class: type[QwenClips] | None = None

    def __init__(self, settings: ProcessorSettings) -> None:
        values = settings.values
        self.image_token_id = settings.token("image_token_id")
        self.placeholder = settings.text(self.image_token_id, self.text)
        self.unit = values.size("patch_size", _PATCH) * values.size("merge_size", _MERGE)
        size, (least, most) = values.inner("size"), self.limits
        self.least = values.size("min_pixels", size.size("shortest_edge", least))
        self.most = values.size("max_pixels", size.size("longest_edge", most))
        self.filter = settings.filter(Pillow.Resampling.BICUBIC)
        shown = [self.name, self.unit, self.least, self.most, self.filter]
        self.settings = json.dumps(shown).encode()
        token = None if self.clip_class is None else clip_token(settings.config)
        self.clips: QwenClips | None = None
        if self.clip_class is not None and token is not None:
            self.clips = self.clip_class(settings, token, self.unit)

    def layout(self, width: int, height: int, detail: str = "auto") -> ImageLayout:
        """Return the layout of a picture. Raises ImageError for an aspect ratio above 200."""
        check_sides(width, height)
        check_aspect(width, height)
        most = self.most
        if detail == "low":
            most = min(most, max(self.least, _LOW * self.unit**2))
        rows, columns = grid_of(height, width, self.unit, self.least, most)
        size = rows * columns
        shape = 1, rows * self.unit, columns * self.unit
        token_ids = (self.image_token_id,) * size
        return ImageLayout(token_ids, 0, size, size, (rows, columns), shape)

    def pixels(self, picture: Pillow.Image, layout: ImageLayout) -> "NDArray[np.uint8]":
        """Return the pixels [1, height, width, 3] of an RGB picture, or of one frame of a clip."""
        _, height, width = layout.shape
        return resized(picture, (width, height), self.filter)[None]


class Qwen2Images(QwenImages):
    """The image processor of Qwen2-VL, which takes pictures and clips."""

    clip_class = QwenClips


class Qwen25Images(QwenImages):
    """The image processor of Qwen2.5-VL, which takes pictures and clips."""

    clip_class = PacedClips


class Qwen3Images(QwenImages):
    """The image processor of Qwen3-VL and later, which takes pictures and clips."""

    clip_class = TimedClips
