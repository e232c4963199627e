"""ModelConfig: the network that config.json describes, in Manta's terms. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.architectures import ARCHITECTURES, WRAPPERS, Architecture, Read
from engine.architectures.find import find
from engine.architectures.latent import Latent
from engine.architectures.moe import Experts
from engine.architectures.record import renamed
from engine.architectures.recurrent.delta_net import DeltaNet
from engine.architectures.recurrent.kimi import Kimi
from engine.architectures.recurrent.mixer import Mixer
from engine.config.quantized import KEY, Quantized
from engine.config.quantized_config import read_quantized
from engine.config.towers import read_vision
from engine.config.vision import VisionConfig
from engine.config_reader import MODULES, Reader
from engine.errors import ConfigError
from engine.rope import Rope, read_rope, stretch_positions
from engine.shards import read_headers

# hidden_act in files -> key of kernels.reference.Kernels.GATES or ACTIVATIONS.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
    "gelu_python_tanh": "gelu_pytorch_tanh",
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_fast": "gelu_pytorch_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}
CODES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # safetensors' dtype -> torch's
DTYPES = tuple(CODES.values())


def divide_heads(
    num_heads: int, num_kv_heads: int, ranks: int, rank: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return a rank's half-open ranges of query heads and KV heads.

    A rank has KV heads with all query heads that read them. If the KV heads cannot be divided
    equally, the last ranks have one more. With fewer KV heads than ranks, several ranks have the
    same KV head. The number of ranks must then be a multiple of the KV heads, and the query heads a
    multiple of the ranks.
    """
    if ranks > num_kv_heads:
        own_heads, key = num_heads // ranks, rank * num_kv_heads // ranks
        return (rank * own_heads, (rank + 1) * own_heads), (key, key + 1)
    begin, end = rank * num_kv_heads // ranks, (rank + 1) * num_kv_heads // ranks
    readers = num_heads // num_kv_heads
    return (begin * readers, end * readers), (begin, end)


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """The attention of one decoder layer. The token at position t sees the keys at s <= t.

    window: if > 0, t sees only keys with t - s < window.
    chunk: if > 0, t sees only keys with s // chunk == t // chunk.
    scale: the factor of scores q k^T.
    softcap: if > 0, scores become softcap * tanh(score / softcap).
    sinks: whether each head has a learnt logit that joins the softmax without a value ("sinks" in
        the record's tensors).
    slopes: ALiBi's slope of each head: score + slope * (s - t); () = none.
    head_dim: elements of a key, and of a value.
    rope: the rotary embedding; None = none.
    value_size: elements of a value; 0 = head_dim. Narrower values are padded with zeros in the
        cache.
    qk_norm: whether queries and keys are normed, if the model has such norms.
    temperature: (beta, trained, shift) of a factor on queries that depends on the position:
        q *= 1 + beta * ln(1 + floor((t + shift) / trained)); None = no factor.
    value_is_key: whether values are the keys before their norm and rotation.
    value_norm: whether values are divided by their root mean square.
    keys_of: the number of an earlier layer whose KV this layer reads; None = the layer's own KV.
    bidirectional: whether tokens see all keys of their text, or those with |t - s| <= window; the
        cache then keeps nothing.
    latent: multi-head latent attention (MLA), whose cache has one "head" of head_dim elements for
        each token, and no values; None = the layer has keys and values.
    gated: whether the output is multiplied by the sigmoid of a projection of the layer's input.
    softplus_gates: elements per head, 1 or head_dim, of a projection whose softplus multiplies the
        output; 0 = none.
    attended_scale: a factor on attention's output.
    mixer: the recurrent part, which keeps a state for each request; None = none.
    attends: whether the layer has attention; otherwise the fields above have no meaning. A layer
        with a mixer and attention adds their outputs. A layer with neither has only an MLP.
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
    slopes: tuple[float, ...] = ()
    qk_norm: bool = True
    temperature: tuple[float, int, int] | None = None
    value_is_key: bool = False
    value_norm: bool = False
    keys_of: int | None = None
    bidirectional: bool = False
    latent: Latent | None = None
    gated: bool = False
    softplus_gates: int = 0
    attended_scale: float = 1.0
    value_size: int = 0
    mixer: Mixer | None = None
    attends: bool = True

    @property
    def tensors(self) -> int:
        """The number of tensors cached for each token: 2 for keys and values, 1 for latents."""
        return 1 if self.latent is not None else 2

    @property
    def latent_rank(self) -> int:
        """The width of cached latents; 0 = the cache has keys and values."""
        return 0 if self.latent is None else self.latent.rank

    @property
    def kept(self) -> tuple[int, int]:
        """The number of heads in the cache, and the elements of each.

        A bidirectional layer caches nothing, but has (1, 1), as the cache's blocks count its
        tokens.
        """
        if self.keys_of is not None or not self.attends:
            return 0, 0
        return (1, 1) if self.bidirectional else (self.num_kv_heads, self.head_dim)

    def of_rank(self, ranks: int, rank: int) -> "LayerAttention":
        """Return this layer's attention with only the heads of one rank.

        ranks: the number of ranks that divide the heads.
        """
        if ranks == 1:
            return self
        mixer = None if self.mixer is None else self.mixer.of_rank(ranks)
        if not self.attends:
            return replace(self, mixer=mixer)
        queries, keys = divide_heads(self.num_heads, self.num_kv_heads, ranks, rank)
        heads, kv_heads = queries[1] - queries[0], keys[1] - keys[0]
        return replace(self, num_heads=heads, num_kv_heads=kv_heads, mixer=mixer)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The network's sizes (in elements) and switches, independent of the device.

    architecture: the name of the model's record (`engine.architectures`).
    wrapper: the name of the multimodal model around the text model; "" = none.
    attention: the attention of each layer.
    num_heads, num_kv_heads, head_dim, rope: the values for a layer with plain attention.
    embedding_size: width of embedding and head, which is projected to hidden_size and back.
    embedding_scale: factor on embeddings.
    residual_scale: factor on the outputs of attention and MLP before they are added to the
        residual.
    logit_scale: factor on logits.
    logit_cap: logits become cap * tanh(logit / cap).
    head_bias: whether the LM head has a bias.
    unit_head: whether the LM head's rows are normalised to length 1.
    norm: "rms" or "layer".
    norm_bias: whether layer norms have biases.
    norm_offset: a number added to the weights of all norms.
    post_norm: whether norms follow the sum of block and residual.
    parallel: "" = the MLP reads the residual after attention; "shared" = attention and MLP read one
        norm of the same residual; "own" = each reads its own norm of the same residual.
    qk_norm: "" = none; "head" = one weight for all heads; "heads" = one for each head (layer
        norms); "flat" = a norm over all heads together.
    qk_norm_after: whether this norm follows the rotary embedding.
    qkv_clip: queries, keys and values are clipped to [-clip, clip].
    mlp_factors: factors on an MLP's gate before the activation, and on the MLP's output.
    position_offset: the row of the first position in the learned positions.
    position_rows: rows of the learned positions; 0 = no learned positions.
    token_types: the number of learned token types.
    separator: the token id after whose first occurrence tokens have the second type; -1 = all
        tokens have the first type, as in an embedding model.
    vision: the vision encoder's configuration; None = the model takes only text.
    """

    architecture: str
    wrapper: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rope: Rope
    embedding_size: int
    embedding_scale: float
    residual_scale: float
    logit_scale: float
    logit_cap: float | None
    tie_embeddings: bool
    head_bias: bool
    unit_head: bool
    norm: str
    norm_bias: bool
    norm_offset: float
    norm_eps: float
    post_norm: bool
    parallel: str
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: str
    qk_norm_after: bool
    qkv_clip: float | None
    mlp_factors: tuple[float, float]
    position_offset: int
    position_rows: int
    token_types: int
    separator: int
    hidden_act: str
    eos_token_ids: tuple[int, ...]
    max_positions: int
    dtype: str  # dtype of the checkpoint
    quantized: Quantized | None = None  # how the checkpoint stores quantised weights
    attention: tuple[LayerAttention, ...] = ()  # () at construction: all layers are plain
    experts: Experts | None = None
    # MLP width of each layer, 0 = no MLP; () = intermediate_size in all layers
    mlp_sizes: tuple[int, ...] = ()
    layer_input_size: int = 0  # elements of a token's per-layer embedding; 0 = none
    layer_input_rows: int = 0  # the number of tokens in the table of per-layer embeddings
    generates: bool = True  # False: an embedding model, whose checkpoint has no head
    # whether the head computes a logit for each label of a text: engine/pooling.py
    classifies: bool = False
    # number of the checkpoint's multi-token-prediction layers that have a supported layout
    mtp_layers: int = 0
    vision: VisionConfig | None = None

    def __post_init__(self) -> None:
        if not self.attention:
            alike = (self.plain_attention,) * self.num_layers
            object.__setattr__(self, "attention", alike)

    def within(self, max_model_len: int) -> "ModelConfig":
        """Return this configuration for texts of at most max_model_len tokens.

        A window or chunk of at least this length hides no keys, so its layers get full attention.
        """
        layers = tuple(
            replace(
                layer,
                window=layer.window if layer.window < max_model_len else 0,
                chunk=layer.chunk if layer.chunk < max_model_len else 0,
            )
            for layer in self.attention
        )
        return replace(self, max_positions=max_model_len, attention=layers)

    def with_pending_updates(self, count: int) -> "ModelConfig":
        """Return this configuration with delta-rule layers that keep this many pending updates.

        Such a layer writes its state only once in count + 1 decodes.
        """
        layers = tuple(
            replace(layer, mixer=replace(layer.mixer, pending_updates=count))
            if isinstance(layer.mixer, DeltaNet | Kimi)
            else layer
            for layer in self.attention
        )
        return replace(self, attention=layers)

    def with_mtp(self) -> "ModelConfig":
        """Return this configuration with its multi-token-prediction layer as one more layer.

        The MTP layer is like the last layer, with the attention of the last layer that has any.
        """
        last, experts = self.num_layers - 1, self.experts
        attending = [layer for layer in self.attention if layer.mixer is None]
        if experts is not None and last in experts.layers:
            experts = replace(experts, layers=(*experts.layers, self.num_layers))
        return replace(
            self,
            num_layers=self.num_layers + 1,
            attention=(*self.attention, attending[-1]),
            experts=experts,
            mlp_sizes=(*self.mlp_sizes, *self.mlp_sizes[last:]),
        )

    @property
    def plain_attention(self) -> LayerAttention:
        """The attention of a layer that sees the whole context, without special features."""
        return LayerAttention(
            self.num_heads, self.num_kv_heads, self.head_dim, self.rope, self.head_dim**-0.5
        )

    @classmethod
    def from_folder(
        cls, folder: str | Path, rope_scaling: Mapping[str, Any] | None = None
    ) -> "ModelConfig":
        """Read config.json and generation_config.json. Raises ConfigError naming file and key.

        rope_scaling: see `engine.config.engine_config.EngineConfig`."""
        return cls.from_file(Path(folder) / "config.json", rope_scaling)

    @classmethod
    def from_file(cls, path: Path, rope_scaling: Mapping[str, Any] | None = None) -> "ModelConfig":
        """Read a model's configuration as `from_folder`, from a config.json of any file name.

        Other files, such as generation_config.json, are read from the same folder. Raises as
        `from_folder`.
        """
        folder = path.parent
        generation = folder / "generation_config.json"
        config = Reader.from_file(path)
        beside = folder / MODELOPT
        if config.get(KEY) is None and beside.is_file():
            config.values[KEY] = {**Reader.from_file(beside).values, "quant_method": "modelopt"}
        if not any(_dtype_key(part) for part in (config, config.inner("text_config"))):
            config.values["dtype"] = _stored_dtype(folder)
        model = cls.from_dicts(
            config,
            Reader.from_file(generation) if generation.exists() else Reader({}, str(generation)),
            rope_scaling,
        )
        model = replace(model, vision=read_vision(config, model.wrapper, model.rotary_dim, folder))
        if model.tie_embeddings or not (folder / MODULES).is_file():
            return model
        # Embedding models are saved without an LM head, whatever config.json says.
        return replace(model, tie_embeddings=True, generates=False)

    @classmethod
    def from_dicts(
        cls, config: Reader, generation: Reader, rope_scaling: Mapping[str, Any] | None = None
    ) -> "ModelConfig":
        classifies = config.classifies()
        architecture, wrapper, config = find(config)
        config = architecture.filled(config)
        _refuse_others(config, architecture)
        for key, read_value in architecture.computed.items():
            config.values[key] = read_value(config)
        read = {**_SWITCHES, **architecture.switches}
        if rope_scaling:
            stretched_to = stretch_positions(config, read["max_positions"](config), rope_scaling)
            read["max_positions"] = lambda config: stretched_to
        values = {name: switch(config) for name, switch in read.items()}
        _check_heads(config, values)
        model = cls(
            architecture=architecture.name,
            wrapper=wrapper,
            eos_token_ids=tuple(
                dict.fromkeys(config.ids("eos_token_id") + generation.ids("eos_token_id"))
            ),
            dtype=_dtype(config),
            quantized=read_quantized(config),
            **values,
        )
        layers = architecture.attention(config, model.plain_attention, model.num_layers)
        if rope_scaling and not any(layer.rope for layer in layers):
            raise ConfigError(
                f"rope_scaling: no layer of {architecture.name} rotates positions; leave it out",
                param="rope_scaling",
            )
        experts = None
        if architecture.experts is not None:
            experts = architecture.experts(config, model)
        if classifies:  # a classifier has no LM head, whatever config.json says
            model = replace(model, tie_embeddings=True, classifies=True)
        generates = not architecture.encoder and not classifies
        mtp = architecture.mtp
        return replace(
            model,
            attention=tuple(layers),
            experts=experts,
            generates=generates,
            mtp_layers=0 if mtp is None else config.count(mtp.count, mtp.absent),
        )

    @property
    def whole_texts(self) -> bool:
        """Whether a text must be computed at once and not in chunks."""
        return any(layer.bidirectional for layer in self.attention)

    @property
    def recurrent(self) -> bool:
        """Whether the model is recurrent or hybrid, and reuses a prefix only at a snapshot."""
        return any(layer.mixer is not None for layer in self.attention)

    @property
    def places_of_axes(self) -> bool:
        """Whether the model uses M-RoPE: image tokens have rotary positions on several axes."""
        return self.vision is not None and self.vision.mrope_section is not None

    @property
    def record(self) -> Architecture:
        return ARCHITECTURES[self.architecture]

    def mlp_size(self, layer: int | None) -> int:
        """Return the inner width of a layer's MLP.

        layer: the layer's number; None = the width that most layers have.
        """
        if self.mlp_sizes and layer is not None:
            return self.mlp_sizes[layer]
        return self.intermediate_size

    @property
    def rotary_dim(self) -> int:
        """The number of rotary elements of a head."""
        return self.rope.dim or self.head_dim

    def tensor_name(self, stored: str) -> str:
        """Return Manta's name for a checkpoint's tensor or an adapter's module.

        The record has the names, or for the tower's tensors `VisionConfig.names`.
        """
        of_tower = None if self.vision is None else self.vision.tensor_name(stored)
        if of_tower is not None:
            return of_tower
        if self.wrapper:
            stored = renamed(stored, WRAPPERS[self.wrapper].renames)
        return self.record.stored_name(stored)

    def ignores(self, stored: str) -> bool:
        """Whether loading skips the checkpoint's tensor `stored`, as the model has no such
        parameter."""
        if self.vision is not None and self.vision.tensor_name(stored) is not None:
            return False
        if self.wrapper and WRAPPERS[self.wrapper].ignores(stored):
            return True
        name = self.tensor_name(stored)
        # engine/pooling.py reads the classifier's head
        if self.classifies and name == "score.weight":
            return True
        return self.record.ignores(name, self.num_layers) or name in self._unread()

    def _unread(self) -> set[str]:
        """Return the names of unused key and value weights, in layers that read another layer's
        KV."""
        tensors = self.record.tensors
        pieces = [*tensors["qkv"].names[1:]] if "qkv" in tensors else []
        pieces += tensors["k_norm"].names if "k_norm" in tensors else ()
        layers = [i for i, layer in enumerate(self.attention) if layer.keys_of is not None]
        return {f"{piece.replace('{i}', str(i))}.weight" for i in layers for piece in pieces}

    def kv_bytes_per_token(self, dtype_bytes: int, ranks: int = 1, rank: int = 0) -> int:
        """Return the bytes of one token's keys and values over all layers, on one rank.

        ranks: the number of ranks that divide the heads.
        """
        elements = 0
        for layer in self.attention:
            heads, dim = layer.of_rank(ranks, rank).kept
            elements += layer.tensors * heads * dim
        return elements * dtype_bytes


# the file with ModelOpt's quantization_config, where config.json has none
MODELOPT = "hf_quant_config.json"


def no_folder(folder: Path) -> ConfigError:
    """Return the error for a model path that is no folder."""
    return ConfigError(
        f"{folder}: there is no such folder; deployments.checkpoints.resolve.resolve_model(...) "
        "makes one of 'default', a .gguf file or a hub name like org/name",
        param="model",
    )


def _refuse_others(config: Reader, architecture: Architecture) -> None:
    """Raise ConfigError for unsupported values of config.json that would change the result."""
    for key, allowed in architecture.only.items():
        if config.raw(key, allowed[0]) not in allowed:
            raise config.error(
                key, f"{config.raw(key)!r} is not supported, only {' or '.join(map(repr, allowed))}"
            )


def _check_heads(config: Reader, values: Mapping[str, Any]) -> None:
    heads, kv_heads = values["num_heads"], values["num_kv_heads"]
    if heads % kv_heads:
        raise config.error("num_key_value_heads", f"{kv_heads} does not divide {heads} heads")
    if values["head_dim"] % 2:
        raise config.error("head_dim", f"{values['head_dim']} is odd, rotary embeddings need pairs")
    dim = values["rope"].dim
    if dim % 2 or dim > values["head_dim"]:
        raise config.error(
            "partial_rotary_factor",
            f"{dim} of {values['head_dim']} elements of a head cannot be rotated",
        )


def _head_dim(config: Reader) -> int:
    hidden_size, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    if config.get("head_dim") is None and hidden_size % num_heads:
        raise config.error("hidden_size", f"{hidden_size} is not a multiple of {num_heads} heads")
    return config.size("head_dim", hidden_size // num_heads)


def _activation(config: Reader) -> str:
    return ACTIVATIONS[config.one_of("hidden_act", tuple(ACTIVATIONS), "silu")]


def _dtype(config: Reader) -> str:
    return config.one_of(_dtype_key(config) or "dtype", DTYPES, "float32")


def _dtype_key(config: Reader) -> str:
    """Return the key that names the checkpoint's dtype; "" without one."""
    return next((key for key in ("dtype", "torch_dtype") if config.get(key) is not None), "")


def _stored_dtype(folder: Path) -> str | None:
    """Return the dtype of most bytes in a folder's safetensors files, of the dtypes in CODES.

    The result is None without such tensors, or if files cannot be read, which loading reports.
    """
    sizes = dict.fromkeys(CODES, 0)
    try:
        entries = read_headers(folder)
    except ConfigError:
        return None
    for entry in entries.values():
        if entry.code in sizes:
            sizes[entry.code] += entry.num_bytes
    code = max(sizes, key=lambda code: sizes[code])
    return CODES[code] if sizes[code] else None


# Field of ModelConfig -> its reader of config.json, unless the record has another one.
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
    "rope": lambda config: read_rope(config, _head_dim(config)),
    "embedding_size": lambda config: config.size("hidden_size"),
    "embedding_scale": lambda config: 1.0,
    "residual_scale": lambda config: 1.0,
    "logit_scale": lambda config: 1.0,
    "logit_cap": lambda config: None,
    "tie_embeddings": lambda config: config.flag("tie_word_embeddings"),
    "head_bias": lambda config: False,
    "unit_head": lambda config: False,
    "norm": lambda config: "rms",
    "norm_bias": lambda config: False,
    "norm_offset": lambda config: 0.0,
    "norm_eps": lambda config: config.number("rms_norm_eps", 1e-6),
    "post_norm": lambda config: False,
    "parallel": lambda config: "",
    "qkv_bias": lambda config: config.flag("attention_bias"),
    "out_bias": lambda config: config.flag("attention_bias"),
    "mlp_bias": lambda config: config.flag("mlp_bias"),
    "qk_norm": lambda config: "",
    "qk_norm_after": lambda config: False,
    "qkv_clip": lambda config: None,
    "mlp_factors": lambda config: (1.0, 1.0),
    "position_offset": lambda config: 0,
    "position_rows": lambda config: 0,
    "token_types": lambda config: 0,
    "separator": lambda config: -1,
    "hidden_act": _activation,
}
