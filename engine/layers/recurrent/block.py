"""mixer_block: chooses the layer for a record's recurrent mixer."""

from engine.architectures.recurrent.delta_net import DeltaNet
from engine.architectures.recurrent.jamba import Mamba1
from engine.architectures.recurrent.kimi import Kimi
from engine.architectures.recurrent.lfm2 import ShortConv
from engine.architectures.recurrent.mamba2 import Mamba2
from engine.errors import ConfigError
from engine.layers.block import Block
from engine.layers.build import Builder
from engine.layers.recurrent.gated_delta import GatedDelta
from engine.layers.recurrent.kimi_delta import KimiDelta
from engine.layers.recurrent.mamba1 import Mamba1Mixer
from engine.layers.recurrent.mamba2 import Mamba2Mixer
from engine.layers.recurrent.short_conv import GatedConvolution


def mixer_block(build: Builder) -> Block:
    """Build the recurrent mixer of the builder's layer."""
    assert build.layer is not None
    match build.config.attention[build.layer].mixer:
        case DeltaNet():
            return GatedDelta(build)
        case Kimi():
            return KimiDelta(build)
        case ShortConv():
            return GatedConvolution(build)
        case Mamba2():
            return Mamba2Mixer(build)
        case Mamba1():
            return Mamba1Mixer(build)
        case other:
            raise ConfigError(f"no layer computes {type(other).__name__}", param="model")
