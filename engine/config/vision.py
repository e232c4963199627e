"""VisionConfig: the configuration of a vision tower, read from a model's folder. No torch here."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.architectures.record import Renames
from engine.config_reader import Reader

logger = logging.getLogger("manta.engine")

Colour = tuple[float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """The configuration that the vision towers of all families have; each family adds its own.

    family: the key in `engine.models.vision.registry.TOWERS` of the class that computes the tower,
        which is `Wrapper.images`.
    image_token_id: the placeholder token that embeddings of pictures replace.
    clip_token_id: the placeholder token that embeddings of videos replace; None = the model takes
        no videos.
    names: (prefix of the tower's tensor names in a checkpoint, Manta's prefix) pairs; the first
        match applies.
    hidden_size: the width of the tower's layers.
    out_size: the width of an embedding without DeepStack levels, which is that of the text model.
    mean, deviation: normalisation of pixels from 0 to 1, by colour.
    deepstack: the number of further embeddings of each patch (DeepStack); the text model adds one
        after each of its first layers.
    mrope_section: the number of rotary frequencies of each of the three axes (M-RoPE); None =
        pictures have one-dimensional positions.
    interleaved: whether the axes' rotary frequencies alternate.
    bidirectional: whether the text model's attention among a picture's tokens is bidirectional.
    windows_alone: whether `bidirectional` holds only in layers with a sliding window.
    largest: the maximum number of tokens of a picture; required if `bidirectional`.
    padding_id: the token whose per-layer inputs are used for image tokens (`LayerInputs`), if the
        model has such inputs.
    """

    family: str
    image_token_id: int
    names: Renames
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int
    out_size: int
    activation: str
    norm_eps: float
    mean: Colour
    deviation: Colour
    deepstack: int = 0
    mrope_section: tuple[int, ...] | None = None
    interleaved: bool = False
    bidirectional: bool = False
    windows_alone: bool = False
    largest: int = 0
    padding_id: int = 0
    clip_token_id: int | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The placeholder tokens that embeddings replace."""
        clips = () if self.clip_token_id is None else (self.clip_token_id,)
        return self.image_token_id, *clips

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    def step_size(self, tokens: int, cache_tokens: int) -> int:
        """Return the maximum number of embeddings that a step encodes.

        tokens: the maximum number of tokens of a step.
        cache_tokens: the maximum number of cached embeddings.
        """
        return max(tokens, self.largest or cache_tokens)

    def owns(self, stored: str) -> bool:
        """Whether a tensor is the tower's, by its name in a checkpoint or a converted folder."""
        return any(stored.startswith(pair) for pair in self.names)

    def tensor_name(self, stored: str) -> str | None:
        """Return Manta's name of a checkpoint's tensor; None if the tensor is not the tower's."""
        for begin, ours in self.names:
            if stored.startswith(begin):
                return ours + stored[len(begin) :]
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TileVision(VisionConfig):
    """The configuration of a vision tower that encodes square tiles of one size.

    tile: the side of a tile in pixels.
    merge: the side, in patches, of the square that becomes one embedding.
    """

    tile: int
    merge: int

    @property
    def patches(self) -> int:
        """The side of a tile in patches."""
        return self.tile // self.patch_size

    @property
    def tile_size(self) -> int:
        """The number of embeddings of a tile."""
        return (self.patches // self.merge) ** 2


def text_alone(config: Reader, why: str) -> None:
    """Log that only the text model is served, and why pictures are not supported."""
    logger.warning("%s: %s: the model takes text alone", config.path, why)


CLIP_MEAN, CLIP_DEVIATION = (
    (0.48145466, 0.4578275, 0.40821073),
    (0.26862954, 0.26130258, 0.27577711),
)
HALF = (0.5, 0.5, 0.5)


def normalisation(
    settings: Reader, mean: Colour = HALF, deviation: Colour = HALF
) -> Mapping[str, Any]:
    """Return the fields `mean` and `deviation` of VisionConfig, read from the processor's settings.

    mean, deviation: defaults of the processor's class.
    """
    if not settings.flag("do_normalize", True):
        return {"mean": (0.0, 0.0, 0.0), "deviation": (1.0, 1.0, 1.0)}
    scale = 255 * settings.number("rescale_factor", 1 / 255)
    return {
        "mean": _colours(settings, "image_mean", mean, scale),
        "deviation": _colours(settings, "image_std", deviation, scale),
    }


def _colours(settings: Reader, key: str, default: Colour, scale: float) -> Colour:
    """Return the three values of a key, one for each colour, divided by `scale`."""
    values = settings.listed(key, int, float) or [*default]
    if len(values) != 3:
        raise settings.error(key, f"must have a number for each of three colours, got {values!r}")
    red, green, blue = (value / scale for value in values)
    return red, green, blue


def rotary_section(text: Reader, default: tuple[int, ...]) -> tuple[int, ...]:
    """Return a text model's `mrope_section`; `default` if config.json has none."""
    for key in ("rope_parameters", "rope_scaling"):
        section = text.inner(key).listed("mrope_section", int)
        if section is not None:
            return tuple(section)
    return default
