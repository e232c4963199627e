"""Eagle3Drafter: an EAGLE-3 drafter, which reads inputs of some layers of the target model."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import embedding

from engine.config.eagle3_config import Eagle3Config
from engine.config.kv_groups import Full, KVGroup, KVGroups
from engine.errors import ConfigError
from engine.layers.attention.plain import Attention
from engine.layers.experts import mlp_block
from engine.layers.linear import Linear
from engine.layers.norm import Norm, RMSNorm
from engine.layers.rotary import Tables
from engine.models.decoder import Decoder
from engine.models.decoder_layer import Sublayer
from engine.quantization.method import LinearSpec, Part
from engine.quantization.registry import linear_method
from engine.weights.parameter import Parameter, Source, Unit
from kernels.kv.quantized import KV
from kernels.metadata import AttentionMeta

# (prefix of tensor names in the drafter's files, prefix in a Llama)
_RENAMES = (
    ("midlayer.", "model.layers.0."),
    ("layers.0.", "model.layers.0."),
    ("norm.", "model.norm."),
    ("embed_tokens.", "model.embed_tokens."),
)
_UNREAD = ("t2d", "verifier_", "rotary_emb.inv_freq", "model.layers.0.self_attn.rotary_emb.")
_EMBEDDING = "model.embed_tokens.weight"


class Eagle3Drafter:
    """An EAGLE-3 drafter; implements drafter.ModelDrafter.

    Each pass reads the next token's embedding and a hidden state. In a step's first pass that state
    is computed from the inputs of some of the target model's layers. Later passes read the
    drafter's own output.
    """

    reads_states = True

    def __init__(self, config: Eagle3Config, model: Decoder, *, own_embedding: bool) -> None:
        """Allocate the drafter on its target model's device, and set the target model's `taps`.

        own_embedding: whether the drafter's files have an embedding table.
        Raises ConfigError if they have none and the target model's has another width.
        """
        body, self._config, self._model = config.layer, config, model
        size, target = body.hidden_size, model.config.hidden_size
        if not own_embedding and body.hidden_size != model.config.embedding_size:
            raise ConfigError(
                f"speculation: the drafter has no embed_tokens, and its hidden_size {size} is not "
                f"the {model.config.embedding_size} of the model's embeddings",
                param="speculation",
            )
        model.taps = self.taps = config.taps
        self.device, self.dtype = model.device, model.dtype
        own = model.build
        method = linear_method("none", own.kernels, own.runs_on, body.quantized)
        build = replace(own, config=body, method=method, elsewhere=set(), ahead=[])
        layer = build.at(0)
        self._tables = Tables(body.max_positions, build.device)
        self._attention = Attention(layer, self._tables, in_features=2 * size)
        self._mlp = Sublayer(mlp_block(layer), layer.norm("mlp_norm", size), None)
        self.kv = KVGroups((KVGroup(Full(), (0,), body.attention[0]),), 1)
        self._activations = build.activation_dtype

        def norm(name: str, width: int) -> RMSNorm:
            tensor = torch.empty(width, dtype=build.activation_dtype, device=build.device)
            source = Source(f"{name}.weight", (width,))
            weight = Parameter(f"{name}.weight", tensor, (source,), std=0.0)
            return RMSNorm(build.kernels, weight, body.norm_eps)

        self._embedding_norm = layer.norm("attention_norm", size)
        self._hidden_norm = norm("model.layers.0.hidden_norm", size)
        self._norm = build.norm("norm", size)
        joined = len(config.taps) * target
        self._input_norm = norm("input_norm", joined) if config.norm_before_fc else None
        self._input_norms = [
            norm(f"fc_norm.{number}", target)
            for number in range(len(config.taps) if config.fc_norm else 0)
        ]
        part = Part("fc", size, joined, (0, size), (0, joined))
        spec = LinearSpec("fc", (part,), False, build.dtype, build.device)
        self._join = Linear(spec, method)
        self._head = build.column("head", (config.vocab_size,), size)
        self._others: list[Parameter] = []
        self._table: Tensor | None = None
        if own_embedding:
            shape = (body.vocab_size, size)
            self._table = torch.empty(shape, dtype=build.dtype, device=build.device)
            source = Source(_EMBEDDING, shape)
            self._others.append(Parameter(_EMBEDDING, self._table, (source,)))
        # [drafter's vocab_size] int64: the model's token id for each of the drafter's ids, filled
        # by `finish`
        self._numbers: Tensor | None = None
        if config.vocab_size < body.vocab_size:
            count = config.vocab_size
            self._numbers = torch.zeros(count, dtype=torch.int64, device=build.device)
            offsets = Source("d2t", (count,))
            self._others.append(Parameter("d2t", self._numbers, (offsets,), fill=_no_offset))

    # ---- weights -------------------------------------------------------------------------------

    def tensor_name(self, stored: str) -> str:
        """Return the name that parameters use (`Source.name`) for the files' tensor `stored`."""
        name = stored.removeprefix("model.")
        for begin, ours in _RENAMES:
            if name.startswith(begin):
                name = ours + name.removeprefix(begin)
                break
        quantized = self._config.layer.quantized
        return name if quantized is None else quantized.canonical(name)

    def ignores(self, stored: str) -> bool:
        """Whether loading skips the checkpoint's tensor `stored`, which the drafter lacks."""
        name = self.tensor_name(stored)
        unread = self._table is None and name == _EMBEDDING
        unread |= self._numbers is None and name == "d2t"
        return unread or name.startswith(_UNREAD)

    @property
    def _linears(self) -> list[Linear]:
        return [self._join, *self._attention.linears, *self._mlp.block.linears, self._head]

    def parameters(self) -> Iterator[Parameter]:
        """Return every tensor that loading fills."""
        norms: list[Norm] = [self._embedding_norm, self._hidden_norm, self._norm, *self._mlp.norms]
        norms += [self._input_norm] if self._input_norm is not None else self._input_norms
        yield from self._others
        for norm in norms:
            yield from norm.parameters
        for linear in self._linears:
            yield from linear.parameters

    def units(self) -> Iterator[Unit]:
        """Return the groups of parameters that any loading thread may pack."""
        return (linear.unit for linear in self._linears)

    @property
    def open_bytes(self) -> int:
        """The peak bytes of parameters that wait to be packed, which is all of them."""
        return sum(linear.loading_bytes for linear in self._linears if linear.transient)

    @property
    def loading_bytes(self) -> int:
        """The peak bytes while loading: `num_bytes`, and parameters that wait to be packed."""
        return self.num_bytes + self.open_bytes

    @property
    def num_bytes(self) -> int:
        """The bytes of weights and tables after `finish`."""
        inside = {id(p.tensor) for linear in self._linears for p in linear.parameters}
        small = sum(p.tensor.nbytes for p in self.parameters() if id(p.tensor) not in inside)
        return small + self._tables.num_bytes + sum(linear.num_bytes for linear in self._linears)

    def finish(self) -> None:
        """Pack the remaining layers, after all parameters are filled. Raises ConfigError."""
        for linear in self._linears:
            if linear.parameters:
                linear.finish()
        if self._numbers is None:
            return
        # the files store the difference between the target model's id and the drafter's
        self._numbers += torch.arange(len(self._numbers), device=self.device)
        if self._numbers.min() < 0 or self._numbers.max() >= self._config.layer.vocab_size:
            raise ConfigError(
                "speculation: d2t of the drafter names tokens outside the model's vocabulary",
                param="speculation",
            )

    # ---- drafts --------------------------------------------------------------------------------

    def fused(self, states: Tensor) -> Tensor:
        """Project the concatenated inputs of the target model's layers (`ModelDrafter.fused`)."""
        if self._input_norm is not None:
            states = self._input_norm(states)
        elif self._input_norms:
            parts = states.chunk(len(self._input_norms), dim=-1)
            normed = [
                norm(part.contiguous()) for norm, part in zip(self._input_norms, parts, strict=True)
            ]
            states = torch.cat(normed, dim=-1)
        return self._join.forward(states)

    def forward(
        self, token_ids: Tensor, states: Tensor, kv: Mapping[int, KV], meta: AttentionMeta
    ) -> Tensor:
        """Return the drafter's hidden states for tokens; see `ModelDrafter.forward`."""
        if self._table is None:
            embedded = self._model.enter(token_ids, meta.positions)
        else:  # ids of virtual tokens are beyond the table
            known = token_ids.clamp(max=len(self._table) - 1)
            embedded = embedding(known, self._table).to(self._activations)
        normed = self._hidden_norm(states)
        x = torch.cat((self._embedding_norm(embedded), normed), dim=-1)
        residual = normed if self._config.norm_before_residual else states
        residual = self._attention.forward(x, kv[0], meta, residual=residual)
        rows = self._mlp.forward(residual, kv[0], meta)
        return self._norm(rows) if self._config.norm_output else rows

    def logits(self, rows: Tensor) -> Tensor:
        """Compute logits, -inf for tokens that cannot be drafted; see `ModelDrafter.logits`."""
        logits = self._head.forward(rows if self._config.norm_output else self._norm(rows))
        if self._numbers is None:
            return logits
        whole = logits.new_full((len(logits), self._config.layer.vocab_size), -torch.inf)
        return whole.index_copy_(1, self._numbers, logits)


def _no_offset(tensor: Tensor, generator: torch.Generator) -> None:
    """Fill a drafter's table of token id offsets with zeros, for random weights.

    The drafter's vocabulary is then the first tokens of the target model's.
    """
    tensor.zero_()
