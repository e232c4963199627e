"""read_vision: reads the configuration of a model's vision tower; each module has one family."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from engine.architectures import WRAPPERS
from engine.config.vision import TileVision, VisionConfig, text_alone
from engine.config_reader import Reader
from engine.images.settings import ProcessorSettings
from engine.shards import find_shards, read_headers
from kernels.candidates import Lazy

# (config.json, settings of the image processor) -> the tower's configuration; None for an
# unsupported tower, after logging why
_Read = Callable[[Reader, Reader], VisionConfig | None]


def _reader(path: str) -> Lazy:
    """Return a family's reader, "module:function", imported when a model of the family is read."""
    return Lazy(f"{__name__}.{path}")


# Wrapper.images -> the reader of its tower.
FAMILIES: Mapping[str, _Read] = {
    "gemma3": _reader("gemma3:read_gemma3"),
    "glm4v": _reader("glm4v:read_glm4v"),
    "idefics3": _reader("idefics3:read_idefics3"),
    "internvl": _reader("internvl:read_internvl"),
    "internvl_chat": _reader("internvl:read_internvl_chat"),
    "kimi": _reader("kimi:read_kimi"),
    "kimi_split": _reader("kimi:read_kimi_split"),
    "llama4": _reader("llama4:read_llama4"),
    "qwen2_vl": _reader("qwen_vl:read_qwen2_vl"),
    "qwen2_5_vl": _reader("qwen_vl:read_qwen2_5_vl"),
    "gemma4": _reader("gemma4:read_gemma4"),
    "paddleocr_vl": _reader("paddleocr_vl:read_paddleocr_vl"),
    "pixtral": _reader("pixtral:read_pixtral"),
    "qwen3_vl": _reader("qwen_vl:read_qwen3_vl"),
}
# Matches the names of vision tensors in checkpoints of all families.
_OF_TOWER = re.compile(r"(^|\.)vis(ion|ual)[^.]*\.")
# Suffixes of the tensor names of quantised matrices.
_OF_QUANTIZED = (
    *(".qweight", ".qzeros", ".scales", ".g_idx", ".weight_packed", ".weight_scale"),
    *(".weight_scale_inv", ".weight_scale_2", ".absmax", ".quant_map", ".SCB"),
)


def lacks_settings(file: Path, wrapper: str) -> bool:
    """Whether a folder has a vision tower's weights but no settings of an image processor.

    file: config.json in the folder.
    wrapper: the name of the multimodal model; "" = none.
    """
    folder = file.parent
    family = WRAPPERS[wrapper].family(Reader.from_file(file)) if wrapper else ""
    shards = find_shards(folder) if family else None
    if shards is None or ProcessorSettings.values_of(folder) is not None:
        return False
    stored = read_headers(folder) if shards.listed is None else shards.listed
    return any(_OF_TOWER.search(name) for name in stored)


def read_vision(config: Reader, wrapper: str, rotary_dim: int, folder: Path) -> VisionConfig | None:
    """Return a multimodal model's vision configuration; None if only the text model is served.

    The result is None if the tower is unsupported, if its weights are missing or quantised, if the
    image processor's settings are missing, or if tiles or mrope_section do not fit the model.

    config: config.json with its outer keys.
    wrapper: the name of the multimodal model; "" = none.
    rotary_dim: the rotary elements of a head of the text model.
    """
    family = WRAPPERS[wrapper].family(config) if wrapper else ""
    if not family:
        return None
    settings = ProcessorSettings.read(folder)
    shards = find_shards(folder)
    if shards is not None and settings is None:
        return None
    values = Reader({}, str(folder)) if settings is None else settings.values
    vision = FAMILIES[family](config, values)
    if vision is None:
        return None
    if isinstance(vision, TileVision) and vision.tile % (vision.patch_size * vision.merge):
        text_alone(
            config,
            f"tiles of {vision.tile} pixels have no whole embeddings of {vision.merge**2} patches "
            f"of {vision.patch_size} pixels",
        )
        return None
    section = vision.mrope_section
    if section is not None and sum(section) != rotary_dim // 2:
        text_alone(
            config,
            f"mrope_section has {sum(section)} frequencies and rotary embeddings {rotary_dim // 2}",
        )
        return None
    if shards is None:  # the folder has no weights: it is only planned, or filled at random
        return vision
    stored = read_headers(folder) if shards.listed is None else shards.listed
    names = [name for name in stored if vision.owns(name)]
    quantized = next((name for name in names if name.endswith(_OF_QUANTIZED)), None)
    if quantized is not None:
        text_alone(config, f"the tower is quantised (tensor {quantized}), which is not supported")
        return None
    return vision if names else None
