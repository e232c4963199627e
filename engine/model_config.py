"""ModelConfig: what config.json says about the network, in our words. No torch here."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ConfigError

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
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
class ModelConfig:
    """The network's sizes (in elements) and switches; nothing here depends on the device."""

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

    @classmethod
    def from_folder(cls, folder: str | Path) -> "ModelConfig":
        """Read config.json and generation_config.json. Raises ConfigError naming file and key."""
        folder = Path(folder)
        generation = folder / "generation_config.json"
        return cls.from_dicts(
            _Reader(_read_json(folder / "config.json"), str(folder / "config.json")),
            _Reader(_read_json(generation) if generation.exists() else {}, str(generation)),
        )

    @classmethod
    def from_dicts(cls, config: "_Reader", generation: "_Reader") -> "ModelConfig":
        architecture = _architecture(config)
        hidden_size = config.size("hidden_size")
        num_heads = config.size("num_attention_heads")
        num_kv_heads = config.size("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise config.error(
                "num_key_value_heads", f"{num_kv_heads} does not divide {num_heads} heads"
            )
        if architecture == "Qwen3ForCausalLM":
            head_dim = config.size("head_dim", 128)
        elif config.get("head_dim") is None and hidden_size % num_heads:
            raise config.error(
                "hidden_size", f"{hidden_size} is not a multiple of {num_heads} heads"
            )
        else:
            head_dim = config.size("head_dim", hidden_size // num_heads)
        if head_dim % 2:
            raise config.error("head_dim", f"{head_dim} is odd, rotary embeddings need pairs")
        max_positions = config.size("max_position_embeddings")
        _refuse_windows(config, architecture)
        activation = config.one_of("hidden_act", ACTIVATIONS, "silu")
        bias = bool(config.get("attention_bias"))
        return cls(
            architecture=architecture,
            hidden_size=hidden_size,
            intermediate_size=config.size("intermediate_size"),
            num_layers=config.size("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=config.size("vocab_size"),
            rope=_rope(config, max_positions),
            rms_eps=config.number("rms_norm_eps", 1e-6),
            tie_embeddings=bool(config.get("tie_word_embeddings")),
            qkv_bias=bias or architecture == "Qwen2ForCausalLM",
            out_bias=bias and architecture != "Qwen2ForCausalLM",
            mlp_bias=bool(config.get("mlp_bias")),
            qk_norm=architecture == "Qwen3ForCausalLM",
            hidden_act=activation,
            bos_token_id=_first(config.ids("bos_token_id")),
            eos_token_ids=tuple(
                dict.fromkeys(config.ids("eos_token_id") + generation.ids("eos_token_id"))
            ),
            max_positions=max_positions,
            dtype=_dtype(config),
        )

    def num_parameters(self) -> int:
        """Weights of the network, tied ones once."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        hidden, inter = self.hidden_size, self.intermediate_size
        layer = hidden * (q + 2 * kv) + q * hidden + 3 * hidden * inter + 2 * hidden
        layer += (q + 2 * kv) * self.qkv_bias + hidden * self.out_bias
        layer += (2 * inter + hidden) * self.mlp_bias + 2 * self.head_dim * self.qk_norm
        tables = self.vocab_size * hidden * (1 if self.tie_embeddings else 2)
        return self.num_layers * layer + tables + hidden

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes that the keys and values of one token take over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes


class _Reader:
    """A JSON object with typed reads whose errors name the file and the key."""

    def __init__(self, values: dict[str, Any], path: str) -> None:
        self.values = values
        self.path = path

    def error(self, key: str, message: str) -> ConfigError:
        return ConfigError(f"{self.path}: {key}: {message}", param=key)

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def size(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if value is None:
            raise self.error(key, "is missing")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(key, f"must be a positive integer, got {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if value is None:
            raise self.error(key, "is missing")
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise self.error(key, f"must be a positive number, got {value!r}")
        return float(value)

    def one_of(self, key: str, allowed: tuple[str, ...], default: str) -> str:
        value = self.get(key, default)
        if value not in allowed:
            raise self.error(key, f"{value!r} is not supported; supported: {', '.join(allowed)}")
        return str(value)

    def ids(self, key: str) -> list[int]:
        """Token ids written as one number, a list or nothing."""
        value = self.get(key, [])
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values):
            raise self.error(key, f"must be a token id or a list of them, got {value!r}")
        return values


def no_folder(folder: Path) -> ConfigError:
    """For a model that is none: the engine reads folders only."""
    return ConfigError(
        f"{folder}: there is no such folder; deployments.models.resolve_model(...) makes one of "
        "'default', a .gguf file or a hub name like org/name",
        param="model",
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; a model folder needs it", param="model") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}", param="model") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must hold a JSON object", param="model")
    return values


def _architecture(config: _Reader) -> str:
    names = config.get("architectures", [])
    if isinstance(names, list) and len(names) == 1 and names[0] in ARCHITECTURES:
        return str(names[0])
    raise config.error(
        "architectures", f"{names!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
    )


def _refuse_windows(config: _Reader, architecture: str) -> None:
    """A sliding window that the checkpoint uses would make longer texts wrong without notice."""
    if architecture.startswith("Qwen"):
        if config.get("use_sliding_window"):
            raise config.error("use_sliding_window", "sliding-window attention is not supported")
    elif architecture == "MistralForCausalLM" and config.values.get("sliding_window", 4096):
        raise config.error("sliding_window", "sliding-window attention is not supported")
    kinds = set(config.get("layer_types", []))
    if kinds - {"full_attention"}:
        raise config.error("layer_types", f"{sorted(kinds)} is not supported, only full_attention")


def _rope(config: _Reader, max_positions: int) -> Rope:
    """transformers 5 writes rope_parameters; before, rope_theta and rope_scaling were apart."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    values = config.get(key, {})
    if not isinstance(values, dict):
        raise config.error(key, f"must be an object, got {values!r}")
    read = _Reader(values, f"{config.path}: {key}")
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
        config.get("original_max_position_embeddings", max_positions),
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


def _yarn_attention_factor(read: _Reader, factor: float) -> float:
    if read.get("attention_factor") is not None:
        return read.number("attention_factor")

    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if read.get("mscale") and read.get("mscale_all_dim"):
        return scale(read.number("mscale")) / scale(read.number("mscale_all_dim"))
    return scale(1.0)


def _dtype(config: _Reader) -> str:
    key = "dtype" if config.get("dtype") is not None else "torch_dtype"
    return config.one_of(key, DTYPES, "float32")


def _first(ids: list[int]) -> int | None:
    return ids[0] if ids else None
