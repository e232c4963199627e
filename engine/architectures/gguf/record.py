"""Gguf: the record of an architecture's layout in GGUF files, and the names all families share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from engine.architectures.class_defaults import class_defaults
from engine.architectures.record import Architecture, CheckpointTensor, Rows


class Metadata(Protocol):
    """The interface of a GGUF file's metadata."""

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a metadata key."""
        ...

    def own(self, key: str, default: Any = None) -> Any:
        """Return the value of a metadata key of the architecture; key: without the architecture's
        name."""
        ...

    def need(self, key: str) -> Any:
        """Return the value of a required metadata key; see `own`. Raises ConfigError if it is
        missing."""
        ...

    def has(self, tensor: str) -> bool: ...


Make = Callable[[Metadata], Any]

# Manta's tensor name -> GGUF names of its parts, without "blk.<layer>." and ".weight".
STEMS: Mapping[str, tuple[str, ...]] = {
    "embedding": ("token_embd",),
    "positions": ("position_embd",),
    "embedding_norm": ("token_embd_norm",),
    "norm": ("output_norm",),
    "head": ("output",),
    "attention_norm": ("attn_norm",),
    "qkv": ("attn_q", "attn_k", "attn_v"),
    "q_norm": ("attn_q_norm",),
    "k_norm": ("attn_k_norm",),
    "sinks": ("attn_sinks",),
    "out": ("attn_output",),
    "attention_out_norm": ("post_attention_norm",),
    "mlp_norm": ("ffn_norm",),
    "gate_up": ("ffn_gate", "ffn_up"),
    "up": ("ffn_up",),
    "down": ("ffn_down",),
    "mlp_out_norm": ("post_ffw_norm",),
    "router": ("ffn_gate_inp",),
    "experts_gate_up": ("ffn_gate_exps", "ffn_up_exps"),
    "experts_down": ("ffn_down_exps",),
    "shared_gate_up": ("ffn_gate_shexp", "ffn_up_shexp"),
    "shared_down": ("ffn_down_shexp",),
    "shared_gate": ("ffn_gate_inp_shexp",),
}
# GGUF names if the record has one tensor for all parts.
_FUSED = {"qkv": "attn_qkv", "gate_up": "ffn_up"}
# Tensors whose names in the record are complete -> the last part of the GGUF name.
_WHOLE = {
    "sinks": "weight",
    "experts_gate_up": "weight",
    "experts_down": "weight",
    "experts_gate_up_bias": "bias",
    "experts_down_bias": "bias",
    "router_correction": "bias",
}
_STEMS_OF_WHOLE = {
    **STEMS,
    "experts_gate_up_bias": STEMS["experts_gate_up"],
    "experts_down_bias": STEMS["experts_down"],
    "router_correction": ("exp_probs_b",),
}
# Key of config.json, in the records' naming -> key of the GGUF file.
KEYS: Mapping[str, str] = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "sliding_window": "attention.sliding_window",
    "rope_local_base_freq": "rope.freq_base_swa",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "clip_qkv": "attention.clamp_kqv",
    "use_parallel_residual": "use_parallel_residual",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "norm_topk_prob": "expert_weights_norm",
    "routed_scaling_factor": "expert_weights_scale",
    "first_k_dense_replace": "leading_dense_block_count",
}


@dataclass(frozen=True, slots=True)
class Gguf:
    """The GGUF layout of an architecture.

    record: the name of the architecture's record.
    name: the value of general.architecture.
    stems: Manta's name -> the file's names, where they differ from STEMS.
    pieces: Manta's name -> the tensor's description in the converted folder, where it differs from
        the original checkpoint: split, transposed, or with another row order.
    rows: stem -> the order of its rows, where it differs from the folder's.
    plus_one: whether the file's norm weights have one added.
    keys: further keys, like KEYS.
    says: fixed values of config.json.
    computed: key of config.json -> the function that computes its value. The result None becomes
        null in config.json, not the class's default.
    rope: key of rope_parameters -> the function that computes its value.
    eps: the key of config.json for the epsilon of norms.
    when: returns whether the entry is for a file; among entries of one name the first match
        applies.
    """

    record: str
    name: str
    stems: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    pieces: Mapping[str, CheckpointTensor] = field(default_factory=dict)
    rows: Mapping[str, Rows] = field(default_factory=dict)
    plus_one: bool = False
    keys: Mapping[str, str] = field(default_factory=dict)
    says: Mapping[str, Any] = field(default_factory=dict)
    computed: Mapping[str, Make] = field(default_factory=dict)
    rope: Mapping[str, Any] = field(default_factory=dict)
    eps: str = "rms_norm_eps"
    when: Make = lambda file: True

    @property
    def architecture(self) -> str:
        """The architecture in the converted folder's config.json."""
        return f"{self.record}, {self.name} in GGUF" if self.pieces else self.record

    def applied(self, record: Architecture) -> Architecture:
        """Return the record for folders that are converted from a GGUF file."""
        return replace(
            record,
            name=self.architecture,
            tensors={**record.tensors, **self.pieces},
            models="",
            model_type="",
            defaults={**record.defaults, **class_defaults(record.model_type).values},
            variant=None,
        )

    def targets(self, record: Architecture) -> dict[str, str]:
        """Return {tensor name in the file, without "blk.<layer>.": tensor name in the folder}.

        In the folder's names "{i}" is the layer, and "{e}" or "{h}" an expert or a head, all of
        which the file has in one tensor.

        record: the result of `applied`.
        """
        names = {}
        for ours, stored in record.tensors.items():
            stems = self.stems.get(ours) or _STEMS_OF_WHOLE.get(ours, ())
            if len(stems) > len(stored.names) == 1:
                stems = (_FUSED[ours],)
            for stem, name in zip(stems, stored.names, strict=bool(stored.names)):
                if ours in _WHOLE:
                    names[f"{stem}.{_WHOLE[ours]}"] = name
                else:
                    names[f"{stem}.weight"] = f"{name}.weight"
                    names[f"{stem}.bias"] = f"{name}.bias"
        return names


def own(key: str) -> Make:
    """Return a function that takes a GGUF file and returns the value of `<architecture>.<key>`."""
    return lambda file: file.own(key)


# Expert weights are normalised to a sum of 1 only if the file says so.
NORMED: Mapping[str, Make] = {"norm_topk_prob": lambda file: file.own("expert_weights_norm", False)}
