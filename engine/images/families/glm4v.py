"""GlmImages: the image processor of GLM-4.1V, GLM-4.5V and GLM-4.6V."""

from engine.images.families.qwen_vl import QwenImages
from engine.images.layout import ImageLayout
from engine.images.settings import ProcessorSettings

_FRAMES = 2  # default frames that a patch covers


class GlmImages(QwenImages):
    """The image processor of GLM-4.1V and later, which resizes as Qwen's does.

    Small pictures are enlarged first. The area limits in the settings count all frames of a
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
        """Return the layout of a picture, which is enlarged first if it is smaller than an
        embedding.

        Raises ImageError for an aspect ratio above 200.
        """
        if 0 < min(width, height) < self.unit:
            scale = max(self.unit / height, self.unit / width)
            width, height = int(width * scale), int(height * scale)
        return super().layout(width, height, detail)
