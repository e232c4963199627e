"""LFM2: layers of gated short convolutions and of attention; dense or mixtures of experts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.architectures.by_layer import FULL
from engine.architectures.dense.llama import LAYER, LLAMA, QKV
from engine.architectures.moe import Experts, read_experts
from engine.architectures.record import Architecture, CheckpointTensor, Read, always
from engine.architectures.recurrent.mixer import mixed_kinds, mixing
from engine.config_reader import Reader

if TYPE_CHECKING:
    from engine.config.model_config import LayerAttention, ModelConfig

_CONV = "conv"


@dataclass(frozen=True, slots=True)
class ShortConv:
    """A layer with a short convolution: out(c * conv(b * x)), where b, c, x are projections.

    bias: whether the convolution and both matmuls have biases.
    """

    channels: int
    taps: int
    bias: bool

    def undivided(self, ranks: int) -> str:
        return f"{self.channels} channels of its convolutions" if self.channels % ranks else ""

    def of_rank(self, ranks: int) -> "ShortConv":
        return replace(self, channels=self.channels // ranks)

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.taps - 1, self.channels),)

    @property
    def chunk_elements(self) -> tuple[int, int]:
        return 0, 0


def _attention(config: Reader, plain: "LayerAttention", layers: int) -> Sequence["LayerAttention"]:
    default = None
    full = config.listed("full_attn_idxs", int)
    if full is not None:
        default = [FULL if i in full else _CONV for i in range(layers)]
    kinds = mixed_kinds(config, layers, {FULL: FULL, _CONV: _CONV}, default)
    taps = config.size("conv_L_cache", 3)
    if taps < 2:
        raise config.error("conv_L_cache", "must be at least 2")
    conv = ShortConv(config.size("hidden_size"), taps, config.flag("conv_bias"))
    return [plain if kind == FULL else mixing(plain, conv) for kind in kinds]


def _full_layers(config: Reader) -> list[int]:
    """Return the numbers of the attention layers; all layers if the file does not list them."""
    full = config.listed("full_attn_idxs", int)
    return [*range(config.size("num_hidden_layers"))] if full is None else full


def _inner(config: Reader) -> int:
    """Return the MLP width, from a size, a multiplier and a rounding multiple in the file."""
    size = config.size("intermediate_size")
    if not config.flag("block_auto_adjust_ff_dim", True):
        return size
    size = int(config.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    unit = config.size("block_multiple_of", 256)
    return -(-size // unit) * unit


def _experts(config: Reader, model: "ModelConfig") -> Experts | None:
    return read_experts(
        config,
        model,
        range(config.count("num_dense_layers", 2), model.num_layers),
        score="sigmoid",
        renormalise=config.flag("norm_topk_prob", True),
        scale=config.number("routed_scaling_factor", 1.0),
    )


_MLP = f"{LAYER}feed_forward."
_TENSORS: Mapping[str, CheckpointTensor] = {
    **LLAMA,
    "attention_norm": CheckpointTensor((f"{LAYER}operator_norm",)),
    "qkv": CheckpointTensor(QKV),
    "out": CheckpointTensor((f"{LAYER}self_attn.out_proj",)),
    "q_norm": CheckpointTensor((f"{LAYER}self_attn.q_layernorm",)),
    "k_norm": CheckpointTensor((f"{LAYER}self_attn.k_layernorm",)),
    "conv_in": CheckpointTensor((f"{LAYER}conv.in_proj",)),
    "conv": CheckpointTensor((f"{LAYER}conv.conv.weight",)),
    "conv_bias": CheckpointTensor((f"{LAYER}conv.conv.bias",)),
    "conv_out": CheckpointTensor((f"{LAYER}conv.out_proj",)),
    "mlp_norm": CheckpointTensor((f"{LAYER}ffn_norm",)),
    "gate_up": CheckpointTensor((f"{_MLP}w1", f"{_MLP}w3")),
    "down": CheckpointTensor((f"{_MLP}w2",)),
    "norm": CheckpointTensor(("model.embedding_norm",)),
}
_SWITCHES: Mapping[str, Read] = {
    "qk_norm": always("head"),
    "norm_eps": lambda config: config.number("norm_eps", 1e-5),
    "tie_embeddings": lambda config: config.flag(
        "tie_embedding", config.flag("tie_word_embeddings", True)
    ),
}
ARCHITECTURES = (
    Architecture(
        "Lfm2ForCausalLM",
        _TENSORS,
        models="LFM2 and 2.5 (350M, 700M, 1.2B, 2.6B)",
        model_type="lfm2",
        switches={**_SWITCHES, "intermediate_size": _inner},
        keys={"intermediate_size": "block_ff_dim"},
        computed={"full_attn_idxs": _full_layers},
        attention=_attention,
    ),
    Architecture(
        "Lfm2MoeForCausalLM",
        {
            **_TENSORS,
            "router": CheckpointTensor((f"{_MLP}gate",)),
            "router_correction": CheckpointTensor((f"{_MLP}expert_bias",)),
            "experts_gate_up": CheckpointTensor(
                (f"{_MLP}experts.{{e}}.w1.weight", f"{_MLP}experts.{{e}}.w3.weight")
            ),
            "experts_down": CheckpointTensor((f"{_MLP}experts.{{e}}.w2.weight",)),
        },
        models="LFM2 mixtures (8B-A1B, 24B-A2B)",
        model_type="lfm2_moe",
        switches=_SWITCHES,
        only={"use_expert_bias": (True,)},
        attention=_attention,
        experts=_experts,
    ),
)
