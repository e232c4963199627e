"""Mamba2: the description of a Mamba-2 layer; and the hybrid models Granite 4 and Bamba."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from engine.architectures.by_layer import FULL
from engine.architectures.dense.llama import GRANITE, LAYER, LLAMA, granite
from engine.architectures.moe import Experts, read_experts
from engine.architectures.record import Architecture, CheckpointTensor
from engine.architectures.recurrent.mixer import CHUNK, LINEAR, mixed_kinds, mixing, padded
from engine.config_reader import Reader

if TYPE_CHECKING:
    from engine.config.model_config import LayerAttention, ModelConfig


@dataclass(frozen=True, slots=True)
class Mamba2:
    """A recurrent layer of Mamba-2. Groups of heads share B and C.

    The state of a request is the last taps - 1 inputs of the layer's convolution, and a matrix
    [head_size, state_size] for each head.

    conv_bias: whether the convolution has a bias.
    bias: whether both matmuls have biases.
    limits: the minimum and maximum time step, to which time steps are clipped.
    factors: factors on the first matmul's outputs: gate, x, B, C and time steps; () = none.
    out_factor: a factor on the mixer's output.
    normed: whether the heads' output has a norm before the last matmul.
    gate_last: whether the gate is applied after the norm.
    """

    heads: int
    head_size: int
    groups: int
    state_size: int
    taps: int
    conv_bias: bool
    bias: bool
    limits: tuple[float, float] = (0.0, float("inf"))
    factors: tuple[float, ...] = ()
    out_factor: float = 1.0
    normed: bool = True
    gate_last: bool = False

    def undivided(self, ranks: int) -> str:
        """Return why the layer cannot be divided among `ranks` ranks; "" = it can.

        With a single group, every rank has B and C. A norm over all heads cannot be divided.
        """
        if self.groups > 1:
            return f"{self.groups} groups of Mamba-2's heads" if self.groups % ranks else ""
        if self.normed:
            return "a norm over all heads of its Mamba-2"
        return f"{self.heads} heads of its Mamba-2" if self.heads % ranks else ""

    def of_rank(self, ranks: int) -> "Mamba2":
        groups = max(1, self.groups // ranks)
        return replace(self, heads=self.heads // ranks, groups=groups)

    @property
    def inner(self) -> int:
        """The number of elements of all heads together."""
        return self.heads * self.head_size

    @property
    def channels(self) -> int:
        """The number of the convolution's channels: x, B and C."""
        return self.inner + 2 * self.groups * self.state_size

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        matrices = (self.heads, self.head_size, self.state_size)
        return (self.taps - 1, self.channels), matrices

    @property
    def chunk_elements(self) -> tuple[int, int]:
        """The buffer elements of a prompt's chunk: (16-bit elements, float32 elements).

        `kernels.recurrent.mamba2_chunks_cuda` allocates them. The 16-bit elements are x and states
        of each head, and B and C of each group. The float32 elements are time steps and cumulative
        decays.
        """
        size, states = padded(self.head_size), padded(self.state_size)
        per_head = CHUNK * size + size * states
        shared = 2 * self.groups * CHUNK * states
        return self.heads * per_head + shared, 2 * self.heads * CHUNK


def mamba2_mixer(config: Reader) -> Mamba2:
    """Read a Mamba-2 layer from the keys mamba_...; records map other names to these."""
    heads = config.size("mamba_n_heads", 128)
    inner = config.size_or_none("mamba_d_ssm")
    if inner is None:
        inner = config.size("mamba_expand", 2) * config.size("hidden_size")
    size = config.get("mamba_d_head", "auto")
    if size == "auto":
        if inner % heads:
            raise config.error("mamba_n_heads", f"{heads} does not divide {inner} elements")
        size = inner // heads
    else:
        size = config.size("mamba_d_head")
    groups = config.size("mamba_n_groups", 1)
    if heads % groups:
        raise config.error("mamba_n_groups", f"{groups} does not divide {heads} heads")
    taps = config.size("mamba_d_conv", 4)
    if taps < 2:
        raise config.error("mamba_d_conv", "must be at least 2")
    return Mamba2(
        heads,
        size,
        groups,
        config.size("mamba_d_state", 256),
        taps,
        config.flag("mamba_conv_bias", True),
        config.flag("mamba_proj_bias"),
        _limits(config),
    )


def _limits(config: Reader) -> tuple[float, float]:
    """Read time_step_limit, in which infinity is a string or an object, as JSON has none."""
    limits = config.get("time_step_limit", [0.0, "inf"])
    try:
        least, most = (
            float(limit["__float__"] if isinstance(limit, dict) else limit) for limit in limits
        )
    except (TypeError, ValueError, KeyError):
        raise config.error("time_step_limit", f"must be two numbers, got {limits!r}") from None
    return least, most


def mamba2_tensors(prefix: str) -> Mapping[str, CheckpointTensor]:
    """Return the tensors of a mixer whose names in the checkpoint begin with `prefix`.

    Rows are stored in Manta's order: the gate, x, B and C, the time steps.
    """
    return {
        "mamba_in": CheckpointTensor((f"{prefix}in_proj",)),
        "mamba_conv": CheckpointTensor((f"{prefix}conv1d.weight",)),
        "mamba_conv_bias": CheckpointTensor((f"{prefix}conv1d.bias",)),
        "mamba_decay": CheckpointTensor((f"{prefix}A_log",)),
        "mamba_skip": CheckpointTensor((f"{prefix}D",)),
        "mamba_bias": CheckpointTensor((f"{prefix}dt_bias",)),
        "mamba_norm": CheckpointTensor((f"{prefix}norm.weight",)),
        "mamba_out": CheckpointTensor((f"{prefix}out_proj",)),
    }


# The values of layer_types in files of transformers before and from version 5 on.
KINDS = {FULL: FULL, "attention": FULL, LINEAR: LINEAR, "mamba": LINEAR}


def _granite(config: Reader, plain: "LayerAttention", layers: int) -> Sequence["LayerAttention"]:
    kinds = mixed_kinds(config, layers, KINDS)
    plain = granite(config, plain, 1)[0]
    if config.get("position_embedding_type") != "rope":
        plain = replace(plain, rope=None)
    mixer = mamba2_mixer(config)
    return [plain if kind == FULL else mixing(plain, mixer) for kind in kinds]


def _granite_experts(config: Reader, model: "ModelConfig") -> Experts | None:
    experts = read_experts(config, model)
    if experts is None:
        return None
    size = config.size("intermediate_size")
    return replace(experts, size=size, shared_size=config.size("shared_intermediate_size", 1024))


def _granite_variant(config: Reader) -> str:
    dense = config.get("num_local_experts", 8) == 0
    return GRANITE_DENSE if dense else "GraniteMoeHybridForCausalLM"


def _bamba(config: Reader, plain: "LayerAttention", layers: int) -> Sequence["LayerAttention"]:
    full = config.listed("attn_layer_indices", int) or []
    kinds = mixed_kinds(
        config, layers, KINDS, [FULL if i in full else LINEAR for i in range(layers)]
    )
    mixer = mamba2_mixer(config)
    return [plain if kind == FULL else mixing(plain, mixer) for kind in kinds]


GRANITE_DENSE = "GraniteMoeHybridForCausalLM, dense"
_MAMBA = mamba2_tensors(f"{LAYER}mamba.")
_SHARED, _BLOCK = f"{LAYER}shared_mlp.", f"{LAYER}block_sparse_moe."
_GATE_UP = CheckpointTensor((f"{_SHARED}input_linear",))
_DOWN = CheckpointTensor((f"{_SHARED}output_linear",))
_COMMON: Mapping[str, Any] = {
    "model_type": "granitemoehybrid",
    "variant": _granite_variant,
    "attention": _granite,
    "keys": {"layer_types": "layers_block_type"},
}
ARCHITECTURES = (
    Architecture(
        "GraniteMoeHybridForCausalLM",
        {
            **{ours: at for ours, at in LLAMA.items() if ours not in ("gate_up", "down")},
            **_MAMBA,
            "shared_gate_up": _GATE_UP,
            "shared_down": _DOWN,
            "router": CheckpointTensor((f"{_BLOCK}router.layer",)),
            "experts_gate_up": CheckpointTensor((f"{_BLOCK}input_linear.weight",)),
            "experts_down": CheckpointTensor((f"{_BLOCK}output_linear.weight",)),
        },
        models="Granite 4 H (Tiny, Small)",
        switches=GRANITE,
        experts=_granite_experts,
        **{
            **_COMMON,
            "keys": {**_COMMON["keys"], "num_experts": "num_local_experts"},
        },
    ),
    Architecture(
        GRANITE_DENSE,
        {**LLAMA, **_MAMBA, "gate_up": _GATE_UP, "down": _DOWN},
        switches={
            **GRANITE,
            "intermediate_size": lambda config: config.size("shared_intermediate_size", 1024),
        },
        **_COMMON,
    ),
    Architecture(
        "BambaForCausalLM",
        {
            **LLAMA,
            **_MAMBA,
            "mlp_norm": CheckpointTensor((f"{LAYER}pre_ff_layernorm",)),
            "gate_up": CheckpointTensor(
                (f"{LAYER}feed_forward.gate_proj", f"{LAYER}feed_forward.up_proj")
            ),
            "down": CheckpointTensor((f"{LAYER}feed_forward.down_proj",)),
            "norm": CheckpointTensor(("model.final_layernorm",)),
        },
        models="Bamba 9B",
        model_type="bamba",
        keys={"layer_types": "layers_block_type"},
        attention=_bamba,
    ),
)
