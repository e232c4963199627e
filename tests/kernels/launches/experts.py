"""Launches of the kernels of mixtures of experts."""

import torch

from kernels.experts import grouped as moe
from kernels.experts import packed as packed_moe
from kernels.experts import rounded as rounded_moe
from kernels.experts.few import few
from kernels.experts.few_packed import few_packed
from kernels.experts.few_route import few_route
from kernels.experts.fragments import tiles as fragment_tiles
from kernels.experts.fragments.dispatch import few_fragments, grouped_fragments
from kernels.experts.fragments.tiles import MOST
from kernels.experts.reference import ExpertWeights, PackedExperts
from kernels.experts.routing import CLAMPED, Routing
from kernels.experts.sorting import sort_by_blocks
from kernels.experts.topk import topk
from kernels.packed import E2M1, Format, PackedWeight
from tests.kernels.launches.sizes import EPS, bf16, int32

# (experts, experts per token, inner width, hidden size) of Qwen3-30B-A3B, gpt-oss-20b and OLMoE.
MIXTURES = {
    "llama-8b": (128, 8, 768, 2048),
    "qwen3-0.6b": (32, 4, 2880, 2880),
    "smollm2-135m": (64, 8, 1024, 2048),
}


def experts(model: str) -> None:
    """Launch the routing and the GEMMs of a layer of experts, for few and for many tokens."""
    count, chosen, size, hidden = MIXTURES[model]
    biased = size == hidden
    router, bias = bf16(count, hidden), bf16(count) if biased else None
    for score, correction in (("softmax", None), ("sigmoid", torch.empty(count))):
        routing = Routing(chosen, score)
        topk(bf16(3, count), routing, correction, bias)
        few_route(bf16(2, hidden), bf16(hidden), EPS, router, bias, routing, correction)

    def stack(dtype: torch.dtype) -> ExpertWeights:
        # The tensors are never written, so they take no physical memory.
        return ExpertWeights(
            torch.empty(count, 2 * size, hidden, dtype=dtype),
            torch.empty(count, hidden, size, dtype=dtype),
            bf16(count, 2 * size) if biased else None,
            bf16(count, hidden) if biased else None,
            CLAMPED if biased else "silu",
            7.0,
        )

    weights = stack(torch.bfloat16)
    for tokens in (1, 8):
        x, scale, ids = bf16(tokens, hidden), torch.empty(tokens, chosen), int32(tokens, chosen)
        few(x, scale, ids, weights, x)
        few(x, scale, ids, weights, None)
    for rows in (count, 4 * count):
        sort_by_blocks(int32(8192, chosen), rows)
    x, scale, ids = bf16(64, hidden), torch.empty(64, chosen), int32(64, chosen)
    for tiles in (*(tiles for _, tiles in moe.TILES), moe.FIXED):
        moe.grouped(x, scale, ids, weights, x, tiles)
    for tma in (False, True):
        other = moe.Tile(32, 64, 64, 4, 4, tma, swap=True)
        moe.grouped(x, scale, ids, weights, x, moe.Tiles(other, other))
    weights.total = 2 * count  # another rank has the other half
    few(x[:2], scale[:2], ids[:2], weights, None)
    moe.grouped(x, scale, ids, weights, None)
    weights.act, weights.weigh_input, weights.total = "gelu_pytorch_tanh", True, 0
    few(x[:2], scale[:2], ids[:2], weights, None)
    moe.grouped(x, scale, ids, weights, None)
    if not biased:
        weights.act, weights.gate_up = "relu2", weights.gate_up[:, :size]  # without gates
        few(x[:2], scale[:2], ids[:2], weights, x[:2])
        moe.grouped(x, scale, ids, weights, x)
        for tiles in (moe.PLAIN, moe.FIXED):
            moe.grouped(x.float(), scale, ids, stack(torch.float32), None, tiles)


def experts_in_fewer_bits(model: str) -> None:
    """Launch packed experts with each way to decode codes: PTX for pairs of codes, plain Triton,
    and a scale per block."""
    count, chosen, size, hidden = MIXTURES[model]
    biased = size == hidden
    forms = [
        Format(4, 32, torch.bfloat16, zero=12, table=E2M1),
        *([] if size % 128 else [Format(4, 128, offset="add")]),
        *([] if size % 128 else [Format(8, 128, torch.float32, code="e4m3", rows=128)]),
        None,
    ]
    x, scale, ids = bf16(64, hidden), torch.empty(64, chosen), int32(64, chosen)
    for form in forms:
        row = [Format(8, width, torch.float32, code="e4m3") for width in (hidden, size)]
        up, down = row if form is None else (form, form)
        stack = PackedExperts(
            PackedWeight(up, count * 2 * size, hidden, None, torch.device("cpu")),
            PackedWeight(down, count * hidden, size, None, torch.device("cpu")),
            bf16(count, 2 * size) if biased else None,
            bf16(count, hidden) if biased else None,
            CLAMPED if biased else "silu",
            7.0,
        )
        packed_moe.packed_experts(x[:1], scale[:1], ids[:1], stack, x[:1])
        for tokens in (1, 8):
            few_packed(x[:tokens], scale[:tokens], ids[:tokens], stack, x[:tokens])
        for _, tiles in packed_moe.TILES if form is forms[0] else packed_moe.TILES[-1:]:
            packed_moe.packed_experts(x, scale, ids, stack, None, tiles)
        if not biased:
            stack.act = "relu2"
            stack.gate_up = PackedWeight(up, count * size, hidden, None, torch.device("cpu"))
            packed_moe.packed_experts(x, scale, ids, stack, x)
            few_packed(x[:2], scale[:2], ids[:2], stack, None)


def experts_in_floats(model: str) -> None:
    """Launch experts with weights and inputs in e4m3, with each size of tiles."""
    count, chosen, size, hidden = MIXTURES[model]
    biased = size == hidden

    def weight(rows: int, width: int) -> PackedWeight:
        form = Format(8, width, torch.float32, code="e4m3", activations=8)
        return PackedWeight(form, rows, width, None, torch.device("cpu"))

    stack = PackedExperts(
        weight(count * 2 * size, hidden),
        weight(count * hidden, size),
        bf16(count, 2 * size) if biased else None,
        bf16(count, hidden) if biased else None,
        CLAMPED if biased else "silu",
        7.0,
    )
    x, scale, ids = bf16(64, hidden), torch.empty(64, chosen), int32(64, chosen)
    for _, tiles in rounded_moe.TILES:
        rounded_moe.rounded_experts(x, scale, ids, stack, None, tiles)
    stack.total = 2 * count
    rounded_moe.rounded_experts(x, scale, ids, stack, x)
    if not biased:
        stack.act, stack.weigh_input, stack.total = "relu2", True, 0
        stack.gate_up = weight(count * size, hidden)
        rounded_moe.rounded_experts(x, scale, ids, stack, x)


def experts_in_fragments(model: str) -> None:
    """Launch MXFP4 experts in the fragment layout of matrix instructions, with each size of
    tiles."""
    count, chosen, size, hidden = MIXTURES[model]
    biased = size == hidden
    form = Format(4, 32, torch.bfloat16, zero=12, table=E2M1)

    def weight(rows: int, width: int) -> PackedWeight:
        weight = PackedWeight(form, rows, width, None, torch.device("cpu"))
        weight.codes = torch.empty(rows // 16, width // 64, 32, 4, dtype=torch.int32)
        weight.scale = torch.empty(rows // 16, width // 64, 8, 4, dtype=torch.bfloat16)
        weight.in_fragments = True
        return weight

    stack = PackedExperts(
        weight(count * 2 * size, hidden),
        weight(count * hidden, size),
        bf16(count, 2 * size) if biased else None,
        bf16(count, hidden) if biased else None,
        CLAMPED if biased else "silu",
        7.0,
    )
    x, scale, ids = bf16(64, hidden), torch.empty(64, chosen), int32(64, chosen)
    for tokens in (1, 2):
        (few_fragments if tokens <= MOST else grouped_fragments)(
            x[:tokens], scale[:tokens], ids[:tokens], stack, x[:tokens]
        )
    for tiles in (*(tiles for _, tiles in fragment_tiles.TILES), fragment_tiles.FIXED):
        grouped_fragments(x, scale, ids, stack, None, tiles)
    stack.total = 2 * count
    few_fragments(x[:1], scale[:1], ids[:1], stack, None)
    if not biased:
        stack.act, stack.weigh_input, stack.total = "relu2", True, 0
        stack.gate_up = weight(count * size, hidden)
        few_fragments(x[:1], scale[:1], ids[:1], stack, None)
        grouped_fragments(x, scale, ids, stack, x)
