"""Architectures: all that is known of each, in one record. No torch here.

`engine.model_config` reads switches from it, `engine.models.registry` the class, the layers where
the checkpoint keeps what they need, checkpoints/gguf.py the names in GGUF files. Nothing
else asks which architecture a model is of.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from engine.config_reader import Reader

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from engine.model_config import LayerAttention, ModelConfig

# The stored row of each of our rows, in our order: int64.
Rows = Callable[["ModelConfig"], "NDArray[np.int64]"]
Read = Callable[[Reader], Any]
# From config.json, a layer that sees the whole context, and how many layers there are.
Attend = Callable[[Reader, "LayerAttention", int], Sequence["LayerAttention"]]


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a checkpoint keeps one of our matrices, norms or tables.

    names: without ".weight"; "{i}" is the layer. A matrix of ours that has several pieces (query,
        key and value; gate and up) is stored as one tensor for each, or as one with all of them.
    rows: how rows are ordered, where not as ours; of all pieces below each other. Rows of one
        tensor cannot go to another. Biases and adapters follow their matrix.
    transposed: the checkpoint keeps [in, out].
    """

    names: tuple[str, ...]
    rows: Rows | None = None
    transposed: bool = False

    def at(self, layer: int) -> "Stored":
        names = tuple(name.format(i=layer) for name in self.names)
        return Stored(names, self.rows, self.transposed)


@dataclass(frozen=True, slots=True)
class Gguf:
    """How GGUF files hold it.

    name: general.architecture.
    tensors: their names, less "blk.<layer>." and ".weight" -> the checkpoint's.
    rows: those whose rows are ordered otherwise than the checkpoint's, as in Stored.
    """

    name: str
    tensors: Mapping[str, str]
    rows: Mapping[str, Rows] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Architecture:
    """One value of "architectures" in config.json.

    tensors: our name -> where the checkpoint keeps it. A decoder layer has the norms that are named
        here, and a gated MLP if there is a gate_up, else a plain one (up).
    switches: field of ModelConfig -> what reads it, where not as in `model_config`.
    keys: names of config.json that stand for others, ours -> theirs (see Reader).
    windows: keys that ask for sliding windows -> what their absence means. True values are refused.
    attention: how each layer attends.
    ignored: patterns of tensors that nobody needs.
    network: the class that computes it, a key of `registry.MODELS`.
    """

    name: str
    tensors: Mapping[str, Stored]
    switches: Mapping[str, Read] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    windows: Mapping[str, Any] = field(default_factory=dict)
    attention: Attend = lambda config, plain, layers: [plain] * layers
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq",)
    gguf: Gguf | None = None
    network: str = "decoder"

    def ignores(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.ignored)


def always(value: Any) -> Read:
    """A switch that no file sets."""
    return lambda config: value


def half_pairs(heads: int, size: int) -> "NDArray[np.int64]":
    """Rows of `heads` heads of this size, stored for rotary embeddings that turn (0, 1), (2, 3) and
    so on; ours turn (0, size / 2), (1, size / 2 + 1) ..."""
    import numpy as np  # for those who load a model: routers and the command line read records too

    return np.arange(heads * size).reshape(heads, -1, 2).swapaxes(1, 2).ravel()


# ---- Llama and its relatives ---------------------------------------------------------------------

_LAYER = "model.layers.{i}."
_QKV = tuple(f"{_LAYER}self_attn.{name}_proj" for name in "qkv")
_LLAMA = {
    "embedding": Stored(("model.embed_tokens",)),
    "attention_norm": Stored((f"{_LAYER}input_layernorm",)),
    "qkv": Stored(_QKV),
    "out": Stored((f"{_LAYER}self_attn.o_proj",)),
    "mlp_norm": Stored((f"{_LAYER}post_attention_layernorm",)),
    "gate_up": Stored((f"{_LAYER}mlp.gate_proj", f"{_LAYER}mlp.up_proj")),
    "down": Stored((f"{_LAYER}mlp.down_proj",)),
    "norm": Stored(("model.norm",)),
    "head": Stored(("lm_head",)),
}
_QK_NORM = {
    "q_norm": Stored((f"{_LAYER}self_attn.q_norm",)),
    "k_norm": Stored((f"{_LAYER}self_attn.k_norm",)),
}
_GGUF = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": f"{_LAYER}input_layernorm",
    "attn_q": _QKV[0],
    "attn_k": _QKV[1],
    "attn_v": _QKV[2],
    "attn_output": f"{_LAYER}self_attn.o_proj",
    "ffn_norm": f"{_LAYER}post_attention_layernorm",
    "ffn_gate": f"{_LAYER}mlp.gate_proj",
    "ffn_up": f"{_LAYER}mlp.up_proj",
    "ffn_down": f"{_LAYER}mlp.down_proj",
}
_GGUF_QK_NORM = {
    "attn_q_norm": f"{_LAYER}self_attn.q_norm",
    "attn_k_norm": f"{_LAYER}self_attn.k_norm",
}

_ALL = (
    Architecture(
        "LlamaForCausalLM",
        _LLAMA,
        gguf=Gguf(
            "llama",
            _GGUF,
            rows={
                "attn_q": lambda model: half_pairs(model.num_heads, model.head_dim),
                "attn_k": lambda model: half_pairs(model.num_kv_heads, model.head_dim),
            },
        ),
    ),
    Architecture(
        "MistralForCausalLM",
        _LLAMA,
        windows={"sliding_window": 4096},
    ),
    Architecture(
        "Qwen2ForCausalLM",
        _LLAMA,
        switches={"qkv_bias": always(True), "out_bias": always(False)},
        windows={"use_sliding_window": False},
        gguf=Gguf("qwen2", _GGUF),
    ),
    Architecture(
        "Qwen3ForCausalLM",
        _LLAMA | _QK_NORM,
        switches={
            "head_dim": lambda config: config.size("head_dim", 128),
            "qk_norm": always(True),
        },
        windows={"use_sliding_window": False},
        gguf=Gguf("qwen3", _GGUF | _GGUF_QK_NORM),
    ),
)

ARCHITECTURES: dict[str, Architecture] = {each.name: each for each in _ALL}
