"""PaddleImages: the image processor of PaddleOCR-VL, which resizes as Qwen's does."""

from engine.images.families.qwen_vl import QwenImages
from engine.images.layout import ImageLayout


class PaddleImages(QwenImages):
    """The image processor of PaddleOCR-VL, which resizes as Qwen's does, after enlarging small
    pictures.
    """

    name, text = "paddleocr_vl", "<|IMAGE_PLACEHOLDER|>"
    limits = 384 * 384, 1536 * 1536

    def layout(self, width: int, height: int, detail: str = "auto") -> ImageLayout:
        """Return the layout of a picture, which is enlarged first if it is smaller than an
        embedding.

        Raises ImageError for an aspect ratio above 200.
        """
        if width > 0 and 0 < height < self.unit:
            width, height = round(width * self.unit / height), self.unit
        if 0 < width < self.unit <= height:
            width, height = self.unit, round(height * self.unit / width)
        return super().layout(width, height, detail)
