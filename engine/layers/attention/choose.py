"""attention_block: chooses the block for a layer's attention, recurrent mixer, or both."""

from engine.config.model_config import LayerAttention, ModelConfig
from engine.layers.attention.bidirectional import BidirectionalAttention
from engine.layers.attention.data_parallel import DataParallelAttention
from engine.layers.attention.gated import GatedAttention, SoftplusGatedAttention
from engine.layers.attention.latent import LatentAttention
from engine.layers.attention.plain import Attention
from engine.layers.attention.variants import BorrowingAttention, VariantAttention
from engine.layers.block import Block
from engine.layers.build import Builder
from engine.layers.recurrent.beside import AttentionBesideMixer
from engine.layers.recurrent.block import mixer_block
from engine.layers.rotary import Tables


def attention_block(build: Builder, tables: Tables) -> Block:
    """Build the block for a layer's attention, recurrent mixer, or both."""
    layer = build.config.attention[build.layer or 0]
    if build.data_parallel_attention and build.group.size > 1:
        return DataParallelAttention(_attention(build.undivided(), tables, layer), build.group)
    if layer.mixer is None:
        return _attention(build, tables, layer)
    mixer = mixer_block(build)
    if not layer.attends:
        return mixer
    return AttentionBesideMixer(_attention(build, tables, layer), mixer)


def _attention(build: Builder, tables: Tables, layer: LayerAttention) -> Block:
    if layer.bidirectional:
        return BidirectionalAttention(build, tables)
    if layer.gated:
        return GatedAttention(build, tables)
    if layer.softplus_gates:
        return SoftplusGatedAttention(build, tables)
    if layer.latent is not None:
        return LatentAttention(build, tables)
    if layer.keys_of is not None:
        return BorrowingAttention(build, tables)
    variant = _is_variant(build.config, layer)
    return (VariantAttention if variant else Attention)(build, tables)


def _is_variant(config: ModelConfig, layer: LayerAttention) -> bool:
    """Whether a layer has features that the fused kernel of plain attention does not support."""
    return (
        config.qk_norm in ("heads", "flat")
        or config.qk_norm_after
        or config.qkv_clip is not None
        or layer.temperature is not None
        or layer.value_is_key
        or layer.value_norm
        or layer.attended_scale != 1.0
        or layer.value_size not in (0, layer.head_dim)
    )
