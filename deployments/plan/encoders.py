"""plan_encoders: estimates memory and speed of the actors of encoder pools."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deployments.config.load import MantaConfig
from deployments.plan.gpus import GIB
from deployments.plan.memory import CPU_PROCESS, CUDA_CONTEXT, DoesNotFit, Hardware
from engine.config.engine_config import EngineConfig
from engine.config.model_config import ModelConfig

if TYPE_CHECKING:  # imports torch
    from engine.encoder import TowerAlone

_EMBEDDINGS = 260  # number of embeddings of a picture of 640 x 427 pixels for Qwen3-VL
# Measured speed of vision encoders in bfloat16. On an H200, Qwen3-VL-8B's encodes 519 pictures in
# 1.83 s: the share `_OF_PRODUCTS` of the GPU's peak. On one core, Qwen3-VL-2B's takes 2.2 s per
# picture: `_A_CORE` operations per second.
_OF_PRODUCTS = 0.40
_A_CORE = 0.44e12


@dataclass(frozen=True, slots=True)
class EncoderPlan:
    """The plan of an encoder pool's actor, which loads only a model's vision encoder.

    kind: type of the actor's device, "cuda" or "cpu".
    rows: (purpose, bytes) of the memory that the actor takes.
    pictures_s: pictures of about 260 embeddings that a whole GPU or one core encodes per second; 0:
        unknown.
    """

    pool: str
    kind: str
    rows: list[tuple[str, int]]
    pictures_s: float

    @property
    def used(self) -> int:
        """The sum of the bytes of all rows."""
        return sum(size for _, size in self.rows)

    @property
    def rate(self) -> str:
        """The pictures per second, in words; "" if unknown."""
        if not self.pictures_s:
            return ""
        number = f"{self.pictures_s:.{0 if self.pictures_s > 10 else 1}f}"
        return f"about {number} pictures/s {'a GPU' if self.kind == 'cuda' else 'a core'}"


def plan_encoders(
    config: MantaConfig, model: ModelConfig, device: Hardware
) -> Iterator[EncoderPlan]:
    """Yield the plan of each encoder pool of a configuration.

    device: device of the engines' replicas; for encoders on the other kind of device, the size is
        unknown.

    Raises DoesNotFit, and ConfigError for a model without a vision encoder.
    """
    for name, pool in config.encoders.items():
        engine = EngineConfig(**config.encoder_options(pool))
        own = device
        if engine.device != device.kind:
            kind = "a GPU" if engine.device == "cuda" else "a CPU"
            own = Hardware(kind, engine.device, 0)
        yield _plan(name, model, engine, own)


def _plan(pool: str, model: ModelConfig, config: EngineConfig, device: Hardware) -> EncoderPlan:
    """Return the plan of a pool's actor on a device; if device.memory is 0, any size fits.

    Raises DoesNotFit.
    """
    import torch

    from engine.encoder import TowerAlone
    from engine.resolve import decide

    where = torch.device(device.kind)
    resolved = decide(config, model, where, device.name, device.capability)
    encoder = TowerAlone(resolved, torch.device("meta"))
    rows = [
        ("weights", encoder.num_bytes),
        (f"activations ({encoder.largest:,} embeddings)", encoder.step_bytes),
        CUDA_CONTEXT if device.kind == "cuda" else CPU_PROCESS,
    ]
    speed = _OF_PRODUCTS * 1e12 * device.teraflops if device.kind == "cuda" else _A_CORE
    result = EncoderPlan(pool, device.kind, rows, speed / _operations(encoder))
    if device.memory and result.used > device.memory:
        raise DoesNotFit(
            f"the encoder pool takes {result.used / GIB:.2f} GiB and {device.name} has "
            f"{device.memory / GIB:.2f}; lower its engine.image_cache_tokens, the most embeddings "
            "of an image that it takes",
            param="pools",
        )
    return result


def _operations(encoder: "TowerAlone") -> float:
    """Return the number of multiplications and additions to encode a picture of `_EMBEDDINGS`
    embeddings, in linear layers and attention."""
    tower = encoder.tower
    tiles, height, width = tower.shape_of(_EMBEDDINGS)
    patches = height * width // tower.config.patch_size**2
    products = 2 * encoder.num_bytes // encoder.dtype.itemsize * patches
    attention = 4 * tower.config.hidden_size * patches**2 * tower.config.num_layers
    return float(tiles * (products + attention))
