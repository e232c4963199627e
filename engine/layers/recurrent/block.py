"""Which layer computes each mixer of a record."""

from engine.architectures.recurrent.delta import Delta
from engine.errors import ConfigError
from engine.layers.build import Builder
from engine.layers.recurrent.gated_delta import GatedDelta

MixerBlock = GatedDelta


def mixer_block(build: Builder) -> MixerBlock:
    """Of a layer that has one."""
    assert build.layer is not None
    match build.config.attention[build.layer].mixer:
        case Delta():
            return GatedDelta(build)
        case other:
            raise ConfigError(f"no layer computes {type(other).__name__}", param="model")
