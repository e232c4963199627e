"""traced: records traces, which are a model's intermediate tensors at certain points.

 embedding            the input of the first layer
 layers.3.attention   the output of attention of layer 3, before its norm and the residual
 layers.3.mlp         the output of the MLP or experts of layer 3, likewise
 layers.3             the output of layer 3

A layer without attention or MLP lacks that point. A layer with an MLP and experts has
layers.3.mlp_and_experts instead, a sum that transformers does not have. A layer with attention and
a mixer has layers.3.attention_and_mixer.
Each tensor is [n, hidden_size], for n tokens. A trace also has the tokens ("ids") and the logits.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from engine.layers.block import Block
from engine.layers.experts import ExpertsBeside
from engine.layers.recurrent.beside import AttentionBesideMixer
from engine.models.decoder import Decoder
from engine.models.decoder_layer import DecoderLayer
from engine.models.registry import Model
from kernels.kv.quantized import KV
from kernels.metadata import AttentionMeta

Trace = dict[str, Tensor]


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest relative distance between the two vectors of a token; inf if not finite.

    The relative distance is |ours - theirs| / |theirs|, of Euclidean lengths.

    ours, theirs: [n, size].
    """
    ours, theirs = ours.float(), theirs.float()
    length = theirs.norm(dim=-1).clamp(min=1e-30)
    largest = ((ours - theirs).norm(dim=-1) / length).max()
    return float(largest) if bool(largest.isfinite()) else float("inf")


@contextmanager
def traced(model: Model) -> Iterator[Trace]:
    """Record a trace of each forward pass of a model, float32 on the CPU.

    The context manager yields the trace; each pass overwrites the points of the pass before.
    """
    decoder = cast(Decoder, model)
    trace: Trace = {}
    scale = decoder.config.residual_scale
    layers = decoder.layers
    taps: list[_BlockTap] = []
    try:
        for layer in layers:
            for name, sublayer in (("attention", layer.attention), ("mlp", layer.mlp)):
                if sublayer is None:
                    continue
                if isinstance(sublayer.block, ExpertsBeside):
                    name = "mlp_and_experts"
                elif isinstance(sublayer.block, AttentionBesideMixer):
                    name = "attention_and_mixer"
                tap = _BlockTap(sublayer, f"layers.{layer.number}.{name}", trace)
                sublayer.block = cast(Block, tap)
                taps.append(tap)
        first = layers[0].number
        decoder.layers = [
            cast(DecoderLayer, _LayerTap(layer, layer.number == first, scale, trace))
            for layer in layers
        ]
        yield trace
    finally:
        decoder.layers = layers
        for tap in taps:
            tap.sublayer.block = tap.block


def _kept(values: Tensor, scale: float = 1.0) -> Tensor:
    return values.detach().to("cpu", torch.float32, copy=True) * scale


class _BlockTap:
    """A wrapper of attention or an MLP that records the output in the trace.

    The wrapper itself adds the residual, so that the recorded output does not include the residual.
    """

    def __init__(self, sublayer: Any, name: str, trace: Trace) -> None:
        self.sublayer = sublayer
        self.block: Block = sublayer.block
        self._name, self._trace = name, trace

    def forward(
        self,
        x: Tensor,
        kv: KV,
        meta: AttentionMeta,
        *,
        norm: Any = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        out = self.block.forward(x, kv, meta, norm=norm)
        self._trace[self._name] = _kept(out)
        return out if residual is None else residual.add_(out)


class _LayerTap:
    """A wrapper of a layer that records the residual, multiplied by `scale`, in the trace.

    The decoder keeps the residual divided by `scale`.

    first: whether to record the layer's input too, as the embedding.
    """

    def __init__(self, layer: DecoderLayer, first: bool, scale: float, trace: Trace) -> None:
        self.number = layer.number
        self._layer, self._first, self._scale, self._trace = layer, first, scale, trace

    def forward(
        self, residual: Tensor, kv: KV, meta: AttentionMeta, inputs: Tensor | None = None
    ) -> Tensor:
        if self._first:
            self._trace["embedding"] = _kept(residual, self._scale)
        residual = self._layer.forward(residual, kv, meta, inputs)
        self._trace[f"layers.{self.number}"] = _kept(residual, self._scale)
        return residual
