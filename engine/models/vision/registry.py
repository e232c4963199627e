"""build_tower: creates the vision encoder of a model with image support."""

from collections.abc import Callable, Mapping
from typing import Any

from engine.layers.build import Builder
from engine.models.vision.gemma3 import Gemma3Tower
from engine.models.vision.gemma4 import Gemma4Tower
from engine.models.vision.glm4v import GlmTower
from engine.models.vision.idefics3 import Idefics3Tower
from engine.models.vision.internvl import InternTower
from engine.models.vision.kimi import KimiTower
from engine.models.vision.llama4 import Llama4Tower
from engine.models.vision.paddleocr_vl import PaddleTower
from engine.models.vision.pixtral import PixtralTower
from engine.models.vision.qwen_vl import Qwen2Tower, Qwen3Tower, Qwen25Tower
from engine.models.vision.tower import Tower

# VisionConfig.family -> the tower's class, which takes (builder, VisionConfig).
TOWERS: Mapping[str, Callable[[Builder, Any], Tower]] = {
    "gemma3": Gemma3Tower,
    "glm4v": GlmTower,
    "idefics3": Idefics3Tower,
    "internvl": InternTower,
    "internvl_chat": InternTower,
    "kimi": KimiTower,
    "kimi_split": KimiTower,
    "llama4": Llama4Tower,
    "qwen2_vl": Qwen2Tower,
    "qwen2_5_vl": Qwen25Tower,
    "gemma4": Gemma4Tower,
    "paddleocr_vl": PaddleTower,
    "pixtral": PixtralTower,
    "qwen3_vl": Qwen3Tower,
}


def build_tower(build: Builder) -> Tower | None:
    """Allocate the vision encoder, without weights; None for a text model."""
    vision = build.config.vision
    return None if vision is None else TOWERS[vision.family](build, vision)
