"""The MoE layers of the benches: sizes of models, random weights (16 bits, packed) and steps."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.dispatch import kernels_for
from kernels.experts.reference import ExpertWeights, PackedExperts
from kernels.experts.routing import CLAMPED, Routing
from kernels.packed import E2M1, Format, PackedWeight

COPIES = 8  # routings per CUDA graph, so that no launch's weights are in the L2 cache


@dataclass(frozen=True, slots=True)
class Layer:
    """The sizes of an MoE layer. experts: number of experts. chosen: experts per token."""

    experts: int
    chosen: int
    size: int
    hidden: int
    act: str
    biased: bool

    @property
    def up_bytes(self) -> float:
        """The bytes of one expert's gate and up matrices in 16 bits."""
        return 4.0 * self.size * self.hidden

    @property
    def down_bytes(self) -> float:
        return 2.0 * self.size * self.hidden


LAYERS = {
    "qwen3-30b-a3b": Layer(128, 8, 768, 2048, "silu", False),
    "gpt-oss-20b": Layer(32, 4, 2880, 2880, CLAMPED, True),
    "qwen3-next": Layer(512, 10, 512, 2048, "silu", False),
}


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.05


def make_stack(layer: Layer) -> ExpertWeights:
    count, size, hidden = layer.experts, layer.size, layer.hidden
    return ExpertWeights(
        random(count, 2 * size, hidden),
        random(count, hidden, size),
        random(count, 2 * size) if layer.biased else None,
        random(count, hidden) if layer.biased else None,
        layer.act,
        7.0,
    )


@dataclass(frozen=True, slots=True)
class Bits:
    """A format of packed experts. share: its bytes relative to 16 bits."""

    name: str
    share: float


MXFP4, FP8 = Bits("MXFP4", 4.5 / 16), Bits("FP8", 0.5)


def make_packed(stack: ExpertWeights, bits: Bits = MXFP4) -> PackedExperts:
    """Make packed experts with random codes, and with the sizes of `stack`."""

    def packed(weight: Tensor) -> PackedWeight:
        form = Format(4, 32, torch.bfloat16, zero=12, table=E2M1)
        if bits is FP8:
            form = Format(8, weight.shape[2], torch.float32, code="e4m3", activations=8)
        packed = PackedWeight(form, *weight.flatten(0, 1).shape, None, weight.device)
        packed.codes.view(torch.uint8).random_(0, 256)
        if bits is FP8:
            packed.codes &= 0xBF  # magnitudes below 2, of both signs
        packed.scale.fill_(2.0**-3 if bits is FP8 else 2.0**-7)
        return packed

    gate_up, down = packed(stack.gate_up), packed(stack.down)
    biases = stack.gate_up_bias, stack.down_bias
    return PackedExperts(gate_up, down, *biases, stack.act, stack.limit)


@dataclass(slots=True)
class Step:
    """The inputs of one MoE layer for a number of tokens, with COPIES different routings."""

    model: str
    layer: Layer
    stack: ExpertWeights
    x: Tensor
    logits: list[Tensor]
    routed: list[tuple[Tensor, Tensor]]
    met: float  # mean number of experts that have tokens

    @classmethod
    def make(cls, model: str, layer: Layer, stack: ExpertWeights, tokens: int) -> "Step":
        kernels = kernels_for("cuda")
        logits = [random(tokens, layer.experts) * 20 for _ in range(COPIES)]
        routing = Routing(layer.chosen)
        routed = [kernels.route(scores, routing, None) for scores in logits]
        met = sum(len(ids.unique()) for _, ids in routed) / COPIES
        return cls(model, layer, stack, random(tokens, layer.hidden), logits, routed, met)

    def __str__(self) -> str:
        return f"{self.model}, {len(self.x)} tokens, {self.met:.1f} experts met"
