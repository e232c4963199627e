"""DeciLM (Nemotron Super and Ultra): a Llama whose KV heads and MLP width differ by layer.

An architecture search has chosen these, and removed attention or the MLP in some layers. The
models' code is only in their repositories.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.architectures.dense.llama import LLAMA
from engine.architectures.record import Architecture
from engine.config_reader import Reader

if TYPE_CHECKING:
    from engine.config.model_config import LayerAttention

# keys of layer kinds that an architecture search may choose but that are not supported
_OTHER = ("replace_with_linear", "sparsify", "is_mamba", "mamba", "moe", "llama4", "window_length")


def _layers(config: Reader, part: str) -> Iterator[Reader]:
    """Yield, for each layer, the object of block_configs under "attention" or "ffn"."""
    blocks, layers = config.listed("block_configs", dict), config.size("num_hidden_layers")
    if blocks is None or len(blocks) != layers:
        raise config.error("block_configs", f"must be a list of {layers} objects, one a layer")
    for number, block in enumerate(blocks):
        own = Reader(block, f"{config.path}: block_configs: {number}").inner(part)
        for key in _OTHER:
            if own.get(key):
                raise own.error(key, f"{own.get(key)!r} is not supported")
        yield own


def _attention(config: Reader, plain: "LayerAttention", layers: int) -> Sequence["LayerAttention"]:
    layers_attention = []
    for own in _layers(config, "attention"):
        if own.flag("no_op"):
            layers_attention.append(replace(plain, attends=False))
            continue
        group = own.size("n_heads_in_group")
        if plain.num_heads % group:
            message = f"{group} does not divide {plain.num_heads} heads"
            raise own.error("n_heads_in_group", message)
        layers_attention.append(replace(plain, num_kv_heads=plain.num_heads // group))
    if not any(layer.attends for layer in layers_attention):
        raise config.error("block_configs", "a model without a layer of attention is not supported")
    return layers_attention


def _mlp_sizes(config: Reader) -> tuple[int, ...]:
    """Return each layer's MLP width: intermediate_size, or the width by ffn_mult.

    The latter is 2/3 * ffn_mult * hidden_size, rounded up to a multiple of 256.
    """
    hidden, sizes = config.size("hidden_size"), []
    for own in _layers(config, "ffn"):
        size = 0
        if not own.flag("no_op"):
            size = own.size_or_none("intermediate_size") or 0
            size = size or -(-int(2 * own.number("ffn_mult") * hidden / 3) // 256) * 256
        sizes.append(size)
    return tuple(sizes)


ARCHITECTURES = (
    Architecture(
        "DeciLMForCausalLM",
        LLAMA,
        models="Llama Nemotron Super 49B and Ultra 253B",
        model_type="nemotron-nas",
        switches={
            "intermediate_size": lambda config: max(*_mlp_sizes(config), 1),
            "mlp_sizes": _mlp_sizes,
            "norm_eps": lambda config: config.number("rms_norm_eps", 1e-5),
        },
        attention=_attention,
    ),
)
