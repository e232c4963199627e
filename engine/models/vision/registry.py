"""build_tower: creates the vision encoder of a model with image support."""

from collections.abc import Callable, Mapping
from typing import Any

from engine.layers.build import Builder
from engine.models.vision.tower import Tower
from kernels.candidates import Lazy


def _tower(path: str) -> Lazy:
    """Return a tower's class, "module:class", imported when a model has such a tower."""
    return Lazy(f"engine.models.vision.{path}")


# VisionConfig.family -> the tower's class, which takes (builder, VisionConfig).
TOWERS: Mapping[str, Callable[[Builder, Any], Tower]] = {
    "gemma3": _tower("gemma3:Gemma3Tower"),
    "glm4v": _tower("glm4v:GlmTower"),
    "idefics3": _tower("idefics3:Idefics3Tower"),
    "internvl": _tower("internvl:InternTower"),
    "internvl_chat": _tower("internvl:InternTower"),
    "kimi": _tower("kimi:KimiTower"),
    "kimi_split": _tower("kimi:KimiTower"),
    "llama4": _tower("llama4:Llama4Tower"),
    "qwen2_vl": _tower("qwen_vl:Qwen2Tower"),
    "qwen2_5_vl": _tower("qwen_vl:Qwen25Tower"),
    "gemma4": _tower("gemma4:Gemma4Tower"),
    "paddleocr_vl": _tower("paddleocr_vl:PaddleTower"),
    "pixtral": _tower("pixtral:PixtralTower"),
    "qwen3_vl": _tower("qwen_vl:Qwen3Tower"),
}


def build_tower(build: Builder) -> Tower | None:
    """Allocate the vision encoder, without weights; None for a text model."""
    vision = build.config.vision
    return None if vision is None else TOWERS[vision.family](build, vision)
