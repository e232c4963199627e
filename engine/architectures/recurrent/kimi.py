"""Kimi Linear: three layers of Kimi Delta Attention for each layer of latent attention.

Latent attention has no rotary embedding. The first layer is dense, the others have mixtures of
experts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.architectures.by_layer import FULL, of_layers
from engine.architectures.dense.llama import LAYER, LLAMA
from engine.architectures.latent import LATENT, ONE_KEY_HEAD, UNBIASED, latent_layer
from engine.architectures.mixtures.families import deepseek, experts_at
from engine.architectures.moe import Experts
from engine.architectures.record import Architecture, CheckpointTensor
from engine.architectures.recurrent.mixer import CHUNK, LINEAR, mixed_kinds, mixing, padded
from engine.config_reader import Reader

if TYPE_CHECKING:
    from engine.config.model_config import LayerAttention, ModelConfig


@dataclass(frozen=True, slots=True)
class Kimi:
    """A recurrent layer of Kimi Delta Attention.

    The state of a request is a matrix [size, size] for each head, and the last taps - 1 inputs of
    the layer's convolution.

    rank: elements of the latents from which decays and gates are computed; every tensor-parallel
        rank has whole latents.
    pending_updates: the number of decodes whose updates are stored next to the state before they
        are applied to it (`kernels.recurrent.delta_rule_cuda`).
    """

    heads: int
    size: int
    taps: int
    rank: int
    pending_updates: int = 0

    def undivided(self, ranks: int) -> str:
        return f"{self.heads} heads of its delta attention" if self.heads % ranks else ""

    def of_rank(self, ranks: int) -> "Kimi":
        return replace(self, heads=self.heads // ranks)

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of a request's float32 states: convolution inputs, matrices, pending updates.

        A pending update is not yet added to the matrices. For each head and decode it has a key, a
        correction, and cumulative decays.
        """
        channels = 3 * self.heads * self.size
        entry = 3 * self.size
        entries = ((self.heads, self.pending_updates, entry),) if self.pending_updates else ()
        return (self.taps - 1, channels), (self.heads, self.size, self.size), *entries

    @property
    def chunk_elements(self) -> tuple[int, int]:
        """The buffer elements of a prompt's chunk, all heads: (16-bit elements, float32 elements).

        `kernels.recurrent.kimi_chunks_cuda` allocates them. The 16-bit elements are queries, keys,
        weights, values and token pairs. The float32 elements are cumulative decays.
        """
        elements = CHUNK * max(64, padded(self.size))
        return self.heads * (4 * elements + CHUNK * CHUNK), self.heads * elements


def _attention(config: Reader, plain: "LayerAttention", layers: int) -> Sequence["LayerAttention"]:
    """Return each layer's attention: latent without rotary embedding, or Kimi Delta Attention.

    transformers' files have layer_types. The hub's files have the numbers of layers, from 1 on, in
    linear_attn_config.
    """
    own = config.inner("linear_attn_config")
    default = [FULL if i and i % 4 == 0 else LINEAR for i in range(layers)]
    full, linear = own.listed("full_attn_layers", int), own.listed("kda_layers", int)
    if full is not None and linear is not None:
        if sorted(full + linear) != [*range(1, layers + 1)]:
            message = f"and kda_layers must name each of {layers} layers once, from 1 on"
            raise own.error("full_attn_layers", message)
        default = [FULL if i + 1 in full else LINEAR for i in range(layers)]
    kinds = mixed_kinds(config, layers, {FULL: FULL, LINEAR: LINEAR}, default)
    size = own.size("head_dim", config.size("linear_head_dim", 128))
    mixer = Kimi(
        own.size("num_heads", config.size("linear_num_heads", 32)),
        size,
        own.size("short_conv_kernel_size", config.size("linear_conv_kernel_dim", 4)),
        size,
    )
    if mixer.taps < 2:
        raise own.error("short_conv_kernel_size", "must be at least 2")
    latent = latent_layer(config, plain)
    return [replace(latent, rope=None) if kind == FULL else mixing(plain, mixer) for kind in kinds]


def _experts(config: Reader, model: "ModelConfig") -> Experts | None:
    experts = deepseek(config, model)
    kinds = of_layers(config, "mlp_layer_types", model.num_layers, str)
    if experts is None or kinds is None:
        return experts
    layers = tuple(i for i, kind in enumerate(kinds) if kind == "sparse")
    return replace(experts, layers=layers) if layers else None


_OWN = f"{LAYER}self_attn."
_BLOCK = f"{LAYER}block_sparse_moe."
_EXPERT = f"{_BLOCK}experts.{{e}}."
_TENSORS: Mapping[str, CheckpointTensor] = {
    **LLAMA,
    **LATENT,
    **experts_at(
        "block_sparse_moe.gate",
        *(f"{_EXPERT}{name}" for name in ("w1", "w3", "w2")),
        router_correction="block_sparse_moe.gate.e_score_correction_bias",
        shared_down="block_sparse_moe.shared_experts.down_proj",
    ),
    "shared_gate_up": CheckpointTensor(
        (f"{_BLOCK}shared_experts.gate_proj", f"{_BLOCK}shared_experts.up_proj")
    ),
    # queries, keys, values, betas, and the latents of decays and of gates
    "kimi_in": CheckpointTensor(
        tuple(f"{_OWN}{name}_proj" for name in ("q", "k", "v", "b", "f_a", "g_a"))
    ),
    "kimi_decays": CheckpointTensor((f"{_OWN}f_b_proj",)),
    "kimi_gates": CheckpointTensor((f"{_OWN}g_b_proj",)),
    "kimi_conv": CheckpointTensor(tuple(f"{_OWN}{letter}_conv1d.weight" for letter in "qkv")),
    "kimi_decay": CheckpointTensor((f"{_OWN}A_log",)),
    "kimi_bias": CheckpointTensor((f"{_OWN}dt_bias",)),
    "kimi_norm": CheckpointTensor((f"{_OWN}o_norm.weight",)),
    "kimi_out": CheckpointTensor((f"{_OWN}o_proj",)),
}
ARCHITECTURES = (
    Architecture(
        "KimiLinearForCausalLM",
        _TENSORS,
        models="Kimi Linear 48B-A3B",
        model_type="kimi_linear",
        keys={
            "max_position_embeddings": "model_max_length",
            "norm_topk_prob": "moe_renormalize",
            "n_group": "num_expert_group",
            "num_experts_per_tok": "num_experts_per_token",
            "n_shared_experts": "num_shared_experts",
        },
        defaults={"first_k_dense_replace": 1},
        computed=ONE_KEY_HEAD,
        only={
            **UNBIASED,
            "mla_use_nope": (True,),
            "moe_router_activation_func": ("sigmoid",),
            "moe_layer_freq": (1,),
        },
        # transformers 5 stores the dense layer's matrices under the experts' name.
        renames=tuple(
            (f"model.layers.0.block_sparse_moe.{name}", f"model.layers.0.mlp.{name}")
            for name in ("gate_proj", "up_proj", "down_proj")
        ),
        attention=_attention,
        experts=_experts,
    ),
)
