"""Jamba: Mamba-1 and some attention layers without rotary embeddings; MLPs and experts
alternate."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.architectures.by_layer import FULL
from engine.architectures.dense.llama import LAYER, LLAMA
from engine.architectures.moe import Experts, read_experts
from engine.architectures.record import Architecture, CheckpointTensor
from engine.architectures.recurrent.mixer import LINEAR, mixed_kinds, mixing
from engine.config_reader import Reader

if TYPE_CHECKING:
    from engine.config.model_config import LayerAttention, ModelConfig


@dataclass(frozen=True, slots=True)
class Mamba1:
    """A recurrent layer of Mamba-1.

    The state of a request is the last taps - 1 inputs of the layer's convolution, and state_size
    numbers for each channel.

    rank: the rank of the matmul that computes the time steps.
    conv_bias: whether the convolution has a bias.
    bias: whether the first and the last matmul have biases.
    """

    channels: int
    state_size: int
    rank: int
    taps: int
    conv_bias: bool
    bias: bool

    def undivided(self, ranks: int) -> str:
        return "Mamba-1, whose steps are projections of all channels"

    def of_rank(self, ranks: int) -> "Mamba1":
        raise AssertionError("is not divided")

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return (self.taps - 1, self.channels), (self.channels, self.state_size)

    @property
    def chunk_elements(self) -> tuple[int, int]:
        return 0, 0


def _mixer(config: Reader) -> Mamba1:
    hidden, rank = config.size("hidden_size"), config.get("mamba_dt_rank", "auto")
    taps = config.size("mamba_d_conv", 4)
    if taps < 2:
        raise config.error("mamba_d_conv", "must be at least 2")
    return Mamba1(
        config.size("mamba_expand", 2) * hidden,
        config.size("mamba_d_state", 16),
        -(-hidden // 16) if rank == "auto" else config.size("mamba_dt_rank"),
        taps,
        config.flag("mamba_conv_bias", True),
        config.flag("mamba_proj_bias"),
    )


def _every(config: Reader, what: str, layers: int, period: int, offset: int) -> list[bool]:
    """Return for each layer whether layer % period == offset.

    what: the prefix of the config.json keys that override period and offset.
    """
    period = config.size(f"{what}_layer_period", period)
    offset = config.get(f"{what}_layer_offset", offset)
    if not isinstance(offset, int) or not 0 <= offset < period:
        raise config.error(
            f"{what}_layer_offset", f"must be a number below {period}, got {offset!r}"
        )
    return [i % period == offset for i in range(layers)]


def _attention(config: Reader, plain: "LayerAttention", layers: int) -> Sequence["LayerAttention"]:
    full = _every(config, "attn", layers, 8, 4)
    named = [FULL if is_full else LINEAR for is_full in full]
    plain, mixer = replace(plain, rope=None), _mixer(config)
    kinds = mixed_kinds(config, layers, {FULL: FULL, LINEAR: LINEAR}, named)
    return [plain if kind == FULL else mixing(plain, mixer) for kind in kinds]


def _experts(config: Reader, model: "ModelConfig") -> Experts | None:
    if config.size("num_experts", 16) == 1:
        return None
    mixed = _every(config, "expert", model.num_layers, 2, 1)
    layers = [i for i, is_mixture in enumerate(mixed) if is_mixture]
    return read_experts(config, model, layers, renormalise=False)


_MAMBA, _FORWARD = f"{LAYER}mamba.", f"{LAYER}feed_forward."
_TENSORS: Mapping[str, CheckpointTensor] = {
    **LLAMA,
    "mamba_in": CheckpointTensor((f"{_MAMBA}in_proj",)),
    "mamba_conv": CheckpointTensor((f"{_MAMBA}conv1d.weight",)),
    "mamba_conv_bias": CheckpointTensor((f"{_MAMBA}conv1d.bias",)),
    "mamba_select": CheckpointTensor((f"{_MAMBA}x_proj",)),
    "mamba_step_norm": CheckpointTensor((f"{_MAMBA}dt_layernorm",)),
    "mamba_b_norm": CheckpointTensor((f"{_MAMBA}b_layernorm",)),
    "mamba_c_norm": CheckpointTensor((f"{_MAMBA}c_layernorm",)),
    "mamba_step": CheckpointTensor((f"{_MAMBA}dt_proj",)),
    "mamba_decay": CheckpointTensor((f"{_MAMBA}A_log",)),
    "mamba_skip": CheckpointTensor((f"{_MAMBA}D",)),
    "mamba_out": CheckpointTensor((f"{_MAMBA}out_proj",)),
    "mlp_norm": CheckpointTensor((f"{LAYER}pre_ff_layernorm",)),
    "gate_up": CheckpointTensor((f"{_FORWARD}gate_proj", f"{_FORWARD}up_proj")),
    "down": CheckpointTensor((f"{_FORWARD}down_proj",)),
    "router": CheckpointTensor((f"{_FORWARD}router",)),
    "experts_gate_up": CheckpointTensor(
        (
            f"{_FORWARD}experts.{{e}}.gate_proj.weight",
            f"{_FORWARD}experts.{{e}}.up_proj.weight",
        )
    ),
    "experts_down": CheckpointTensor((f"{_FORWARD}experts.{{e}}.down_proj.weight",)),
    "norm": CheckpointTensor(("model.final_layernorm",)),
}
ARCHITECTURES = (
    Architecture(
        "JambaForCausalLM",
        _TENSORS,
        models="Jamba (Mini, Large, Reasoning 3B)",
        model_type="jamba",
        only={"sliding_window": (None,)},
        attention=_attention,
        experts=_experts,
    ),
)
