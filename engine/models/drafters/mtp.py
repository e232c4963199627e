"""MtpDrafter: a checkpoint's multi-token-prediction (MTP) layer, with the target model's head."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from engine.config.kv_groups import Full, KVGroup, KVGroups
from engine.layers.experts import Stack
from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm
from engine.layers.rotary import Tables
from engine.models.decoder import Decoder
from engine.models.decoder_layer import DecoderLayer
from engine.quantization.method import LinearSpec, Part
from engine.quantization.registry import linear_method
from engine.weights.parameter import Parameter, Source, Unit
from kernels.kv.quantized import KV
from kernels.metadata import AttentionMeta


class MtpDrafter:
    """The multi-token-prediction layer of a model; implements drafter.ModelDrafter.

    The layer's weights are in the target model's files; the target model ignores them.
    """

    taps: tuple[int, ...] = ()
    reads_states = True

    def __init__(self, model: Decoder) -> None:
        """Allocate the layer on the target model's device.

        model: a target model whose checkpoint has an MTP layer.
        """
        config, mtp = model.config, model.config.record.mtp
        assert mtp is not None and config.mtp_layers
        self._model, self._mtp = model, mtp
        self._number = number = config.num_layers
        self.device, self.dtype = model.device, model.dtype
        build = replace(model.build, config=config.with_mtp())
        self._tables = Tables(config.max_positions, build.device)
        self._layer = DecoderLayer(build.at(number), self._tables)
        attention = build.config.attention[number]
        self.kv = KVGroups((KVGroup(Full(), (number,), attention),), 1)
        size = config.hidden_size

        def norm(name: str) -> RMSNorm:
            tensor = torch.empty(size, dtype=build.activation_dtype, device=build.device)
            source = Source(f"{self._ours(name)}.weight", (size,))
            offset = config.norm_offset
            weight = Parameter(f"{name}.weight", tensor, (source,), std=0.0, offset=offset)
            return RMSNorm(build.kernels, weight, config.norm_eps)

        self._embedding_norm = norm(mtp.embedding_norm)
        self._hidden_norm = norm(mtp.hidden_norm)
        self._norm = norm(mtp.norm)
        # this matrix is unquantised in quantised checkpoints too
        dense = linear_method("none", build.kernels, build.runs_on)
        part = Part(self._ours(mtp.project), size, 2 * size, (0, size), (0, 2 * size))
        spec = LinearSpec("mtp_project", (part,), False, build.dtype, build.device)
        self._project = Linear(spec, dense)

    def _ours(self, name: str) -> str:
        """Return the name that parameters use (`Source.name`) for a tensor or module of the layer.

        name: the name in the checkpoint, with "{layers}" or the layer's number.
        """
        name, layers = self._numbered(name), self._numbered(self._mtp.layer)
        if name.startswith(layers):
            return f"model.layers.{self._number}.{name[len(layers) :]}"
        return name

    def _numbered(self, name: str) -> str:
        return name.replace("{layers}", str(self._number))

    # ---- weights -------------------------------------------------------------------------------

    def tensor_name(self, stored: str) -> str:
        """Return the name that parameters use (`Source.name`) for the files' tensor `stored`."""
        name = self._ours(self._model.config.tensor_name(stored))
        quantized = self._model.config.quantized
        return name if quantized is None else quantized.canonical(name)

    def ignores(self, stored: str) -> bool:
        """Whether loading skips the checkpoint's tensor `stored`, which the MTP layer lacks."""
        name = self._model.config.tensor_name(stored)
        own = {self._numbered(module) for module in (self._mtp.layer, *self._outside)}
        copies = {self._numbered(module) for module in self._mtp.copies}
        mine = any(name.startswith(module) for module in own)
        return not mine or name.rpartition(".")[0] in copies or name.endswith(".inv_freq")

    @property
    def _outside(self) -> tuple[str, ...]:
        mtp = self._mtp
        return mtp.embedding_norm, mtp.hidden_norm, mtp.project, mtp.norm

    @property
    def _packed(self) -> Iterator[Linear | Stack]:
        yield from self._layer.packed
        yield self._project

    def parameters(self) -> Iterator[Parameter]:
        """Return every tensor that loading fills."""
        yield from self._layer.parameters()
        for norm in (self._embedding_norm, self._hidden_norm, self._norm):
            yield from norm.parameters
        yield from self._project.parameters

    def units(self) -> Iterator[Unit]:
        """Return the groups of parameters that any loading thread may pack."""
        return (owner.unit for owner in self._packed)

    @property
    def open_bytes(self) -> int:
        """The peak bytes of parameters that wait to be packed, which is all of them."""
        return sum(owner.loading_bytes for owner in self._packed if owner.transient)

    @property
    def loading_bytes(self) -> int:
        """The peak bytes while loading: `num_bytes`, and parameters that wait to be packed."""
        return self.num_bytes + self.open_bytes

    @property
    def num_bytes(self) -> int:
        """The bytes of weights and tables after `finish`."""
        vectors = chain.from_iterable(
            norm.parameters for norm in (self._embedding_norm, self._hidden_norm, self._norm)
        )
        inside = {id(p.tensor) for owner in self._layer.packed for p in owner.parameters}
        others = (p for p in self._layer.parameters() if id(p.tensor) not in inside)
        small = sum(parameter.tensor.nbytes for parameter in (*vectors, *others))
        return small + self._tables.num_bytes + sum(owner.num_bytes for owner in self._packed)

    def finish(self) -> None:
        """Pack the remaining layers, after all parameters are filled."""
        for owner in self._packed:
            if owner.parameters:
                owner.finish()

    # ---- drafts --------------------------------------------------------------------------------

    def fused(self, states: Tensor) -> Tensor:
        """Return the target model's final hidden states unchanged."""
        return states

    def forward(
        self, token_ids: Tensor, states: Tensor, kv: Mapping[int, KV], meta: AttentionMeta
    ) -> Tensor:
        """Return the hidden states of the MTP layer for tokens; see `ModelDrafter.forward`."""
        embedded = self._embedding_norm(self._model.enter(token_ids, meta.positions))
        hidden = self._hidden_norm(states)
        both = (hidden, embedded) if self._mtp.hidden_first else (embedded, hidden)
        residual = self._project.forward(torch.cat(both, dim=-1))
        return self._norm(self._layer.forward(residual, kv[self._number], meta))

    def logits(self, rows: Tensor) -> Tensor:
        """Compute logits by the model's head; see `ModelDrafter.logits`."""
        return self._model.logits(rows)
