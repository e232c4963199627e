"""Video processors of Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5 and 3.6, for equally spaced frames.

A patch of the tower covers a few frames, two in all published models. The last frame is repeated to
fill the last patch.
"""

import json
import math

from engine.config_reader import Reader
from engine.images.layout import ImageError, ImageLayout
from engine.images.settings import ProcessorSettings

_ASPECT = 200  # maximum ratio of a picture's longer side to the shorter one
# default number of frames that a patch covers, and default maximum frames of a clip
_FRAMES, _MOST_FRAMES = 2, 768
_POSITIONS_S = 4  # default of config.json's tokens_per_second
_LEAST_UNITS, _MOST_UNITS = 128, 768  # default minimum and maximum embeddings of a frame or clip


def clip_token(config: Reader) -> int | None:
    """Return the id of the placeholder token of videos; None if the model takes no videos.

    If config.json has no video_token_id, it is transformers' default. A model whose vocabulary does
    not reach that id takes no videos.
    """
    text = config.inner("text_config") if config.get("text_config") else config
    token, vocabulary = config.count("video_token_id", 151656), text.get("vocab_size")
    return token if vocabulary is None or token < vocabulary else None


def check_aspect(width: int, height: int) -> None:
    """Raise ImageError for a picture whose aspect ratio the models do not support."""
    if max(width, height) > _ASPECT * min(width, height):
        raise ImageError(
            "invalid_image",
            f"the picture is {width} x {height}, and the model takes sides of which the longer "
            f"is at most {_ASPECT} times the other",
        )


def grid_of(
    height: int, width: int, unit: int, least: int, most: int, frames: int = 1, counted: int = 1
) -> tuple[int, int]:
    """Return the grid (rows, columns) of embeddings for a picture of height x width pixels.

    The picture is scaled so that the area of all frames is between `least` and `most` pixels.

    unit: the side, in pixels, of the square that becomes one embedding.
    frames: the number of frames whose area the scale is computed from.
    counted: the number of frames whose area decides whether the picture is scaled at all.
    """
    rows, columns = round(height / unit), round(width / unit)
    if counted * rows * columns * unit**2 > most:
        shrink = math.sqrt(frames * height * width / most)
        rows = max(1, math.floor(height / shrink / unit))
        columns = max(1, math.floor(width / shrink / unit))
    elif counted * rows * columns * unit**2 < least:
        grow = math.sqrt(least / (frames * height * width))
        rows, columns = math.ceil(height * grow / unit), math.ceil(width * grow / unit)
    return rows, columns


class QwenClips:
    """The video processor of Qwen2-VL, and the base class of later ones.

    A clip is one span of tokens. M-RoPE's temporal positions count the clip's temporal patches,
    groups of `patch_frames` frames.

    placeholder: the text that the chat template writes for a clip.
    outer: the texts before and after the placeholder, which a clip's spans replace as well.
    token_id: the placeholder token that embeddings of clips replace.
    unit: the side, in pixels, of the square that becomes one embedding.
    least, most: the limits of a frame's area in pixels.
    """

    outer = "", ""

    def __init__(self, settings: ProcessorSettings, token_id: int, unit: int) -> None:
        values = settings.of_clips()
        self.token_id, self.unit = token_id, unit
        self.placeholder = settings.text(token_id, "<|video_pad|>")
        size, area = values.inner("size"), unit**2
        self.least = values.size("min_pixels", size.size("shortest_edge", _LEAST_UNITS * area))
        self.most = values.size("max_pixels", size.size("longest_edge", _MOST_UNITS * area))
        self.most_frames = values.size("max_frames", _MOST_FRAMES)
        config = settings.config.inner("vision_config")
        self.patch_frames = config.square("temporal_patch_size", _FRAMES)
        # temporal M-RoPE positions per second
        self.positions_s = config.number("tokens_per_second", _POSITIONS_S)

    @property
    def settings(self) -> bytes:
        """All settings that affect the pixels of a clip, as bytes for digests."""
        return json.dumps(["clip", self.unit, self.least, self.most, self.patch_frames]).encode()

    def layouts(self, width: int, height: int, frames: int, fps: float) -> list[ImageLayout]:
        """Return the layouts of a clip's spans of tokens, in order.

        width, height: pixels of each frame.
        frames: the number of frames.
        fps: frames per second.
        Raises ImageError for a clip that the model does not support.
        """
        if not 2 <= frames <= self.most_frames:
            raise ImageError(
                "invalid_clip",
                f"the clip has {frames} frames, and the model takes 2 to {self.most_frames}",
            )
        check_aspect(width, height)
        rows, columns = self._grid(width, height, frames)
        return self._pieces((rows, columns), frames, fps)

    def _grid(self, width: int, height: int, frames: int) -> tuple[int, int]:
        return grid_of(height, width, self.unit, self.least, self.most)

    def _pieces(self, grid: tuple[int, int], frames: int, fps: float) -> list[ImageLayout]:
        indices = tuple(index for patch in self._patches(frames) for index in patch)
        return [self._piece(grid, indices, time_step=self._time_step(fps))]

    def _time_step(self, fps: float) -> float:
        """Return the distance between consecutive temporal patches in temporal M-RoPE positions."""
        return 1.0

    def _patches(self, frames: int) -> list[tuple[int, ...]]:
        """Return the indices of each temporal patch's frames; the last frame may be repeated."""
        size = self.patch_frames
        return [
            tuple(min(index, frames - 1) for index in range(first, first + size))
            for first in range(0, frames, size)
        ]

    def _piece(
        self,
        grid: tuple[int, int],
        frames: tuple[int, ...],
        around: tuple[str, str] = ("", ""),
        time_step: float = 0.0,
    ) -> ImageLayout:
        rows, columns = grid
        size = rows * columns * len(frames) // self.patch_frames
        ids = (self.token_id,) * size
        shape = len(frames), rows * self.unit, columns * self.unit
        return ImageLayout(ids, 0, size, size, grid, shape, *around, frames, time_step)


class PacedClips(QwenClips):
    """The video processor of Qwen2.5-VL, whose temporal M-RoPE positions are proportional to time.

    Otherwise it equals Qwen2-VL's.
    """

    def _time_step(self, fps: float) -> float:
        return self.positions_s * self.patch_frames / fps


class TimedClips(QwenClips):
    """The video processor of Qwen3-VL and later.

    A clip has a span of tokens for each temporal patch, after the patch's time as text.

    least, most: the limits on the area of all frames of a clip in pixels.
    """

    def __init__(self, settings: ProcessorSettings, token_id: int, unit: int) -> None:
        super().__init__(settings, token_id, unit)
        values, config = settings.of_clips(), settings.config
        begin = config.count("vision_start_token_id", 151652)
        end = config.count("vision_end_token_id", 151653)
        self.outer = (
            settings.text(begin, "<|vision_start|>"),
            settings.text(end, "<|vision_end|>"),
        )
        capped = values.flag("cap_pixels_per_frame")
        self.most_frame = values.size("max_video_tokens", _MOST_UNITS) * unit**2 if capped else 0

    def _grid(self, width: int, height: int, frames: int) -> tuple[int, int]:
        if min(width, height) < self.unit:
            scale = max(self.unit / height, self.unit / width)
            width, height = int(width * scale), int(height * scale)
        most = self.most
        if self.most_frame:
            most = max(min(self.most_frame, most // frames), int(self.least * 1.05)) * frames
        counted = round(frames / self.patch_frames) * self.patch_frames
        return grid_of(height, width, self.unit, self.least, most, frames, counted)

    def _pieces(self, grid: tuple[int, int], frames: int, fps: float) -> list[ImageLayout]:
        begin, end = self.outer
        pieces = []
        for patch in self._patches(frames):
            seconds = (patch[0] / fps + patch[-1] / fps) / 2
            pieces.append(self._piece(grid, patch, (f"<{seconds:.1f} seconds>{begin}", end)))
        return pieces
