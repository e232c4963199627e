"""ModelConfig: what config.json says about the network, in our words. No torch here."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from engine.architectures import ARCHITECTURES, Architecture, Read
from engine.config_reader import Reader
from engine.errors import ConfigError
from engine.quantized import Quantized, read_quantized

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding. Fields after ``factor`` are None where the type has no use for them."""

    theta: float
    type: str = "default"
    factor: float = 1.0  # how many times longer the context is than in training
    original_max_positions: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # yarn: cosines and sines are multiplied by it
    truncate: bool = True  # yarn: round the correction range to whole dimensions


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """How one decoder layer attends. The token at position t sees the keys at s <= t, and of these:

    window: > 0: those with t - s < window. chunk: > 0: those with s // chunk == t // chunk.
    scale: scores are q k^T times it. softcap: > 0: then softcap * tanh(score / softcap).
    sinks: each head has a learnt logit that joins the softmax and has no value ("sinks" in the
        record's tensors).
    head_dim: of keys and of values. rope: None where nothing is rotated.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope | None
    scale: float
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    sinks: bool = False


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The network's sizes (in elements) and switches; nothing here depends on the device.

    attention: of each layer. num_heads, num_kv_heads, head_dim and rope are those of the plain
        layer that `Architecture.attention` starts from.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rope: Rope
    rms_eps: float
    tie_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    hidden_act: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    max_positions: int
    dtype: str  # of the checkpoint
    quantized: Quantized | None = None  # what it keeps in fewer bits
    attention: tuple[LayerAttention, ...] = ()  # () at construction: all layers are plain

    def __post_init__(self) -> None:
        if not self.attention:
            alike = (self.plain_attention,) * self.num_layers
            object.__setattr__(self, "attention", alike)

    @property
    def plain_attention(self) -> LayerAttention:
        """Of a layer that sees the whole context and has nothing special."""
        return LayerAttention(
            self.num_heads, self.num_kv_heads, self.head_dim, self.rope, self.head_dim**-0.5
        )

    @classmethod
    def from_folder(cls, folder: str | Path) -> "ModelConfig":
        """Read config.json and generation_config.json. Raises ConfigError naming file and key."""
        folder = Path(folder)
        generation = folder / "generation_config.json"
        return cls.from_dicts(
            Reader.from_file(folder / "config.json"),
            Reader.from_file(generation) if generation.exists() else Reader({}, str(generation)),
        )

    @classmethod
    def from_dicts(cls, config: Reader, generation: Reader) -> "ModelConfig":
        architecture = _architecture(config)
        config = config.renamed(architecture.keys)
        _refuse_windows(config, architecture)
        read = {**_SWITCHES, **architecture.switches}
        model = cls(
            architecture=architecture.name,
            bos_token_id=_first(config.ids("bos_token_id")),
            eos_token_ids=tuple(
                dict.fromkeys(config.ids("eos_token_id") + generation.ids("eos_token_id"))
            ),
            dtype=_dtype(config),
            quantized=read_quantized(config),
            **{name: switch(config) for name, switch in read.items()},
        )
        if model.num_heads % model.num_kv_heads:
            raise config.error(
                "num_key_value_heads",
                f"{model.num_kv_heads} does not divide {model.num_heads} heads",
            )
        if model.head_dim % 2:
            raise config.error("head_dim", f"{model.head_dim} is odd, rotary embeddings need pairs")
        layers = architecture.attention(config, model.plain_attention, model.num_layers)
        return replace(model, attention=tuple(layers))

    @property
    def record(self) -> Architecture:
        return ARCHITECTURES[self.architecture]

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes that the keys and values of one token take over all layers, while all keep them."""
        elements = sum(layer.num_kv_heads * layer.head_dim for layer in self.attention)
        return 2 * elements * dtype_bytes


def no_folder(folder: Path) -> ConfigError:
    """For a model that is none: the engine reads folders only."""
    return ConfigError(
        f"{folder}: there is no such folder; deployments.checkpoints.resolve.resolve_model(...) "
        "makes one of 'default', a .gguf file or a hub name like org/name",
        param="model",
    )


def _architecture(config: Reader) -> Architecture:
    names = config.get("architectures", [])
    if isinstance(names, list) and len(names) == 1 and names[0] in ARCHITECTURES:
        return ARCHITECTURES[names[0]]
    raise config.error(
        "architectures", f"{names!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
    )


def _refuse_windows(config: Reader, architecture: Architecture) -> None:
    """A sliding window that the checkpoint uses would make longer texts wrong without notice."""
    for key, absent in architecture.windows.items():
        if config.raw(key, absent):
            raise config.error(key, "sliding-window attention is not supported")
    kinds = set(config.get("layer_types", []))
    if kinds - {"full_attention"}:
        raise config.error("layer_types", f"{sorted(kinds)} is not supported, only full_attention")


def _head_dim(config: Reader) -> int:
    hidden_size, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    if config.get("head_dim") is None and hidden_size % num_heads:
        raise config.error("hidden_size", f"{hidden_size} is not a multiple of {num_heads} heads")
    return config.size("head_dim", hidden_size // num_heads)


def _rope(config: Reader) -> Rope:
    """transformers 5 writes rope_parameters; before, rope_theta and rope_scaling were apart."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    values = config.get(key, {})
    if not isinstance(values, dict):
        raise config.error(key, f"must be an object, got {values!r}")
    read = Reader(values, f"{config.path}: {key}")
    if read.get("rope_type") is None and read.get("type") is not None:
        read.values = {**values, "rope_type": values["type"]}
    kind = read.one_of("rope_type", ROPE_TYPES, "default")
    for reader in (config, read):
        if reader.number("partial_rotary_factor", 1.0) != 1.0:
            raise reader.error("partial_rotary_factor", "only 1.0 is supported")
    theta = read.number("rope_theta", config.number("rope_theta", 10000.0))
    if kind == "default":
        return Rope(theta)
    factor = read.number("factor")
    if kind == "linear":
        return Rope(theta, kind, factor)
    if kind == "llama3":
        return Rope(
            theta,
            kind,
            factor,
            original_max_positions=read.size("original_max_position_embeddings"),
            low_freq_factor=read.number("low_freq_factor"),
            high_freq_factor=read.number("high_freq_factor"),
        )
    original = read.size(
        "original_max_position_embeddings",
        config.get("original_max_position_embeddings", config.size("max_position_embeddings")),
    )
    return Rope(
        theta,
        kind,
        factor,
        original_max_positions=original,
        beta_fast=read.number("beta_fast", 32.0),
        beta_slow=read.number("beta_slow", 1.0),
        attention_factor=_yarn_attention_factor(read, factor),
        truncate=bool(read.get("truncate", True)),
    )


def _yarn_attention_factor(read: Reader, factor: float) -> float:
    if read.get("attention_factor") is not None:
        return read.number("attention_factor")

    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if read.get("mscale") and read.get("mscale_all_dim"):
        return scale(read.number("mscale")) / scale(read.number("mscale_all_dim"))
    return scale(1.0)


def _dtype(config: Reader) -> str:
    key = "dtype" if config.get("dtype") is not None else "torch_dtype"
    return config.one_of(key, DTYPES, "float32")


def _first(ids: list[int]) -> int | None:
    return ids[0] if ids else None


# Field of ModelConfig -> how config.json says it, unless the architecture's record has another way.
_SWITCHES: Mapping[str, Read] = {
    "hidden_size": lambda config: config.size("hidden_size"),
    "intermediate_size": lambda config: config.size("intermediate_size"),
    "num_layers": lambda config: config.size("num_hidden_layers"),
    "num_heads": lambda config: config.size("num_attention_heads"),
    "num_kv_heads": lambda config: config.size(
        "num_key_value_heads", config.size("num_attention_heads")
    ),
    "head_dim": _head_dim,
    "vocab_size": lambda config: config.size("vocab_size"),
    "max_positions": lambda config: config.size("max_position_embeddings"),
    "rope": _rope,
    "rms_eps": lambda config: config.number("rms_norm_eps", 1e-6),
    "tie_embeddings": lambda config: config.flag("tie_word_embeddings"),
    "qkv_bias": lambda config: config.flag("attention_bias"),
    "out_bias": lambda config: config.flag("attention_bias"),
    "mlp_bias": lambda config: config.flag("mlp_bias"),
    "qk_norm": lambda config: False,
    "hidden_act": lambda config: config.one_of("hidden_act", ACTIVATIONS, "silu"),
}
