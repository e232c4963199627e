"""The Llama family: Llama, Mistral, Qwen2 (biases on q, k, v) and Qwen3 (norms on q and k).

They differ by switches of ModelConfig only, and keep their weights under the same names.
"""

import copy
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from engine.layers.linear import Linear, LinearFactory, RowParallelLinear
from engine.layers.rotary import cos_sin_table
from engine.model_config import ModelConfig
from engine.parallel.group import TensorParallelGroup
from engine.quantization.method import DenseState, LinearMethod
from engine.weights.parameter import Parameter, Source
from kernels.dispatch import Kernels
from kernels.metadata import AttentionMeta

# ours -> theirs, merged along the output in this order; {i} is the layer.
CHECKPOINT = {
    "embedding": ("model.embed_tokens",),
    "attention_norm": ("model.layers.{i}.input_layernorm",),
    "qkv": (
        "model.layers.{i}.self_attn.q_proj",
        "model.layers.{i}.self_attn.k_proj",
        "model.layers.{i}.self_attn.v_proj",
    ),
    "q_norm": ("model.layers.{i}.self_attn.q_norm",),
    "k_norm": ("model.layers.{i}.self_attn.k_norm",),
    "out": ("model.layers.{i}.self_attn.o_proj",),
    "mlp_norm": ("model.layers.{i}.post_attention_layernorm",),
    "gate_up": ("model.layers.{i}.mlp.gate_proj", "model.layers.{i}.mlp.up_proj"),
    "down": ("model.layers.{i}.mlp.down_proj",),
    "norm": ("model.norm",),
    "head": ("lm_head",),
}
# What checkpoints carry and nobody needs (suffixes).
IGNORED = (".rotary_emb.inv_freq",)


class LlamaLayer:
    """One decoder layer: attention and MLP, each after an RMS norm and added to the residual."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        linears: LinearFactory,
        kernels: Kernels,
        activation_dtype: torch.dtype,
        cos_sin: Tensor,
    ) -> None:
        names = {ours: [t.format(i=index) for t in theirs] for ours, theirs in CHECKPOINT.items()}
        prefix = f"layers.{index}"
        hidden, inter, dim = config.hidden_size, config.intermediate_size, config.head_dim
        group = linears.group
        begin, end = group.part(config.num_heads, "num_attention_heads")
        self.num_heads = end - begin
        self.eps = config.rms_eps
        self.scale = dim**-0.5
        self.kernels = kernels
        self.gate = config.hidden_act
        self.cos_sin = cos_sin
        rows = (config.num_heads * dim, config.num_kv_heads * dim, config.num_kv_heads * dim)
        self.qkv = linears.column(
            f"{prefix}.qkv",
            list(zip(names["qkv"], rows, strict=True)),
            hidden,
            bias=config.qkv_bias,
            unit=dim,
        )
        self.out = linears.row(
            f"{prefix}.out", names["out"][0], hidden, rows[0], bias=config.out_bias
        )
        self.gate_up = linears.column(
            f"{prefix}.gate_up",
            [(name, inter) for name in names["gate_up"]],
            hidden,
            bias=config.mlp_bias,
        )
        self.down = linears.row(
            f"{prefix}.down", names["down"][0], hidden, inter, bias=config.mlp_bias
        )

        norms: list[Parameter] = []

        def norm(ours: str, size: int) -> Tensor:
            weight = torch.empty(size, dtype=activation_dtype, device=linears.device)
            source = Source(f"{names[ours][0]}.weight", (size,))
            norms.append(Parameter(f"{prefix}.{ours}.weight", weight, (source,), std=0.0))
            return weight

        self.attention_norm = norm("attention_norm", hidden)
        self.mlp_norm = norm("mlp_norm", hidden)
        self.q_norm = norm("q_norm", dim) if config.qk_norm else None
        self.k_norm = norm("k_norm", dim) if config.qk_norm else None
        self.norms = norms

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.out, self.gate_up, self.down

    def __call__(self, residual: Tensor, kv: tuple[Tensor, Tensor], meta: AttentionMeta) -> Tensor:
        """residual [n, hidden] -> the same with attention and MLP added; its memory is reused."""
        k_cache, v_cache = kv
        lora = meta.lora
        q = self.kernels.rope_kv_write(
            self.qkv.after_norm(residual, self.attention_norm, self.eps, lora),
            self.cos_sin,
            self.q_norm,
            self.k_norm,
            self.eps,
            k_cache,
            v_cache,
            self.num_heads,
            meta,
        )
        attended = self.kernels.attention(q, k_cache, v_cache, self.scale, meta)
        residual = self.out.add(attended, residual, lora)
        gated = self.gate_up.gated_after_norm(residual, self.mlp_norm, self.eps, self.gate, lora)
        return self.down.add(gated, residual, lora)


class Llama:
    """See registry.Model."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        activation_dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels,
        method: LinearMethod,
        unquantized: LinearMethod,  # for the head, if it is the embedding
        group: TensorParallelGroup,
        virtual_tokens: int,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.activation_dtype = activation_dtype
        self.device = device
        self.kernels = kernels
        self.group = group
        linears = LinearFactory(method, group, dtype, device)
        hidden, vocab = config.hidden_size, config.vocab_size
        self.lookup = torch.empty(vocab + virtual_tokens, hidden, dtype=dtype, device=device)
        self.embedding = self.lookup[:vocab]
        self.norm = torch.empty(hidden, dtype=activation_dtype, device=device)
        cos_sin = cos_sin_table(config.rope, config.head_dim, config.max_positions, device)
        self.layers = [
            LlamaLayer(config, index, linears, kernels, activation_dtype, cos_sin)
            for index in range(config.num_layers)
        ]
        self._unquantized = unquantized
        self._tied_head: Any = DenseState(self.embedding, None)
        self.head: Linear | None = None
        if not config.tie_embeddings:
            self.head = linears.column("head", [(CHECKPOINT["head"][0], vocab)], hidden)
        self._num_bytes = cos_sin.nbytes + sum(p.tensor.nbytes for p in self.parameters())
        if self.head is None and activation_dtype != dtype:  # the CPU packs the embedding once more
            self._num_bytes += self.embedding.nbytes

    def linears(self) -> Iterator[Linear]:
        return (linear for layer in self.layers for linear in layer.linears)

    def num_bytes(self) -> int:
        return self._num_bytes

    def forward(
        self, token_ids: Tensor, meta: AttentionMeta, kv: Sequence[tuple[Tensor, Tensor]]
    ) -> Tensor:
        residual = embedding(token_ids, self.lookup).to(self.activation_dtype)
        for layer, layer_kv in zip(self.layers, kv, strict=True):
            residual = layer(residual, layer_kv, meta)
        return self.kernels.rms_norm(residual, self.norm, self.config.rms_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        if self.head is None:
            return self._unquantized.apply(self._tied_head, hidden)
        return self.group.all_gather_columns(self.head(hidden))

    def tune(self, tokens: Sequence[int], samples: Sequence[int]) -> None:
        for alike in zip(*(layer.linears for layer in self.layers), strict=True):
            added = isinstance(alike[0], RowParallelLinear) and self.group.size == 1
            alike[0].method.tune([linear.state for linear in alike], tokens, added)
        if self.head is None:
            self._unquantized.tune([self._tied_head], samples, add=False)
        else:
            self.head.method.tune([self.head.state], samples, add=False)

    def parameters(self) -> Iterator[Parameter]:
        vocab, hidden = self.embedding.shape
        source = Source(f"{CHECKPOINT['embedding'][0]}.weight", (vocab, hidden))
        yield Parameter("embedding.weight", self.embedding, (source,))
        for layer in self.layers:
            yield from layer.norms
            for linear in layer.linears:
                yield from linear.parameters
        source = Source(f"{CHECKPOINT['norm'][0]}.weight", (hidden,))
        yield Parameter("norm.weight", self.norm, (source,), std=0.0)
        if self.head is not None:
            yield from self.head.parameters

    def one_layer(self) -> "Llama":
        short = copy.copy(self)
        short.layers = self.layers[:1]
        return short

    def ignores(self, name: str) -> bool:
        """A tied head may be in the checkpoint all the same; it is the embedding."""
        tied = self.head is None and name == f"{CHECKPOINT['head'][0]}.weight"
        return tied or name.endswith(IGNORED)

    def finish(self) -> None:
        linears = [linear for layer in self.layers for linear in layer.linears]
        if self.head is not None:
            linears.append(self.head)
        with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
            list(pool.map(Linear.finish, linears))
        if self.head is None:
            self._tied_head = self._unquantized.finish(self._tied_head)
