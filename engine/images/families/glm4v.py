"""GlmImages: pictures of GLM-4.1V, GLM-4.5V and GLM-4.6V become one view that keeps their shape."""

from engine.images.families.qwen_vl import QwenImages
from engine.images.layout import ImageLayout
from engine.images.settings import ProcessorSettings

_FRAMES = 2  # frames that a patch covers, if config.json does not say


class GlmImages(QwenImages):
    """The image processor of GLM-4.1V and later, which resizes as Qwen's does.

    Small pictures are enlarged first. The limits of the area in the settings count all frames of a
    temporal patch, in which a still picture is repeated.
    """

    name, text = "glm4v", "<|image|>"
    limits = 112 * 112, 28 * 28 * 15000

    def __init__(self, settings: ProcessorSettings) -> None:
        super().__init__(settings)
        frames = settings.values.size("temporal_patch_size", _FRAMES)
        self.least, self.most = -(-self.least // frames), self.most // frames
        self.settings += f" {frames}".encode()

    def layout(self, width: int, height: int, detail: str = "auto") -> ImageLayout:
        """Return the layout of a picture, enlarged first if a side is shorter than an embedding's.

        Raises ImageError for an aspect ratio above 200.
        """
        if 0 < min(width, height) < self.unit:
            scale = max(self.unit / height, self.unit / width)
            width, height = int(width * scale), int(height * scale)
        return super().layout(width, height, detail)
