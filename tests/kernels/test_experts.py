"""Experts in Triton against plain torch in float64: the choice, the sort, few tokens and many."""

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.dispatch import kernels_for
from kernels.experts import few_packed as few_packed_module
from kernels.experts import packed as packed_module
from kernels.experts import reference, rounded, sorting
from kernels.experts.few import MOST, few
from kernels.experts.few_packed import few_packed, few_packed_fits
from kernels.experts.few_route import few_route
from kernels.experts.fragments.dispatch import few_fragments, grouped_fragments
from kernels.experts.grouped import (
    FIXED,
    TILES,
    Tile,
    Tiles,
    grouped,
    sum_experts,
    tma_fits,
)
from kernels.experts.packed import packed_experts
from kernels.experts.reference import ExpertWeights, PackedExperts
from kernels.experts.routing import CLAMPED, Routing, up_rows
from kernels.experts.sorting import sort, sort_by_blocks
from kernels.experts.topk import topk
from kernels.gemm.packed.round_rows import round_rows
from kernels.packed import E2M1, Format, PackedWeight
from kernels.reference import Kernels
from tests.kernels.oracle import BOUND, DEVICE, DTYPES, multiply_rows_apart, random, row_error

pytestmark = pytest.mark.triton
# In the interpreter a launch takes seconds.
CASES = [
    (DTYPES[0], "silu"),
    (DTYPES[0], "relu2"),  # without gates
    pytest.param(DTYPES[0], CLAMPED, marks=pytest.mark.slow),
    pytest.param(DTYPES[1], "gelu_pytorch_tanh", marks=pytest.mark.slow),
]


def stack(
    experts: int, size: int, hidden: int, dtype: torch.dtype, act: str, *, weigh: bool = False
) -> ExpertWeights:
    """Return random expert weights, with biases where gpt-oss has them."""
    biased = act == CLAMPED
    return ExpertWeights(
        random(experts, up_rows(size, act), hidden, dtype=dtype) / hidden**0.5,
        random(experts, hidden, size, dtype=dtype) / size**0.5,
        random(experts, 2 * size, dtype=dtype) if biased else None,
        random(experts, hidden, dtype=dtype) if biased else None,
        act,
        0.7 if biased else 0.0,
        weigh,
    )


def double(weights: ExpertWeights) -> ExpertWeights:
    tensors = {
        name: None if (tensor := getattr(weights, name)) is None else tensor.double()
        for name in ("gate_up", "down", "gate_up_bias", "down_bias")
    }
    return replace(weights, **tensors)


def chosen(tokens: int, experts: int, count: int, *, skewed: bool = False) -> tuple[Tensor, Tensor]:
    """Return the weights and ids of each token's experts. skewed: the first few get nearly all."""
    scores = torch.rand(tokens, experts, device=DEVICE)
    if skewed:
        scores[:, count:] *= 0.3
    weights, ids = scores.topk(count, dim=-1)
    return weights.contiguous(), ids.int().contiguous()


def error(
    tokens: int,
    weights: ExpertWeights,
    count: int,
    *,
    residual: bool,
    tiles: Tiles | None = None,
    skewed: bool = False,
) -> float:
    experts, hidden, _ = weights.down.shape
    x = random(tokens, hidden, dtype=weights.down.dtype)
    scale, ids = chosen(tokens, experts, count, skewed=skewed)
    before = random(tokens, hidden, dtype=x.dtype) if residual else None
    want = reference.experts(
        x.double(),
        scale.double(),
        ids,
        double(weights),
        None if before is None else before.double(),
    )
    if tokens <= MOST and tiles is None:
        out = few(x, scale, ids, weights, before)
    else:
        out = grouped(x, scale, ids, weights, before, tiles)
    if before is not None:
        assert out is before
    return row_error(out, want)


@pytest.mark.parametrize(("dtype", "act"), CASES)
def test_few_tokens(dtype: torch.dtype, act: str) -> None:
    """Sizes that fill no tile; three experts a token, where places are four."""
    for tokens, weigh in ((1, False), (3, True)):
        weights = stack(6, 40, 72, dtype, act, weigh=weigh and act != CLAMPED)
        assert error(tokens, weights, 3, residual=tokens == 1) < 2 * BOUND[dtype]


@pytest.mark.parametrize(("dtype", "act"), CASES)
def test_many_tokens(dtype: torch.dtype, act: str) -> None:
    """Experts with no token, one, and more than a block; sizes that fill no tile."""
    for tokens, skewed in ((9, False), (70, True)):
        weights = stack(11, 40, 72, dtype, act, weigh=skewed and act != CLAMPED)
        got = error(tokens, weights, 3, residual=not skewed, skewed=skewed)
        assert got < 2 * BOUND[dtype]


@pytest.mark.parametrize("act", ["silu", "relu2", CLAMPED])
def test_tiles_through_the_tma(act: str) -> None:
    """Rows of the next expert, or of the up's where the gate's end, taken for those that do not
    exist; halves that change places; a last step with columns of the next row."""
    dtype = next(dtype for dtype in DTYPES if dtype.itemsize == 2)
    weights = stack(3, 40, 72, dtype, act)
    tile = Tile(32, 32, 32, 4, 3, tma=True)
    assert tma_fits(torch.empty(1, 72, dtype=dtype), 40)
    assert not tma_fits(torch.empty(1, 72, dtype=dtype), 36)  # rows that begin between 16 bytes
    assert not tma_fits(torch.empty(1, 72), 40)
    got = error(40, weights, 2, residual=True, tiles=Tiles(tile, tile), skewed=True)
    assert got < 2 * BOUND[dtype]


@pytest.mark.parametrize(("tma", "act"), [(False, "silu"), (True, CLAMPED), (False, "relu2")])
def test_weights_on_the_left(tma: bool, act: str) -> None:
    """Outputs and pairs that change places; the second block of one expert taken for the first of
    another, behind one that nobody chose."""
    dtype = next(dtype for dtype in DTYPES if dtype.itemsize == 2)
    weights = stack(5, 40, 72, dtype, act)
    tile = Tile(16, 32, 32, 4, 3, tma, swap=True)
    got = error(60, weights, 2, residual=True, tiles=Tiles(tile, tile), skewed=True)
    assert got < 2 * BOUND[dtype]
    x, (scale, ids) = random(60, 72, dtype=dtype), chosen(60, 5, 2)
    ids = ids.clamp(max=3).fill_diagonal_(0)  # the last expert has none, the first one many
    want = reference.experts(x.double(), scale.double(), ids, double(weights), None)
    assert row_error(grouped(x, scale, ids, weights, None, Tiles(tile, tile)), want) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype.itemsize == 2])
def test_every_tile(dtype: torch.dtype) -> None:
    """Which are chosen by the number of tokens alone."""
    weights = stack(3, 40, 72, dtype, "silu")
    for tiles in (*(tiles for _, tiles in TILES), FIXED):
        got = error(150, weights, 2, residual=True, tiles=tiles, skewed=True)
        assert got < 2 * BOUND[dtype]


@pytest.mark.slow
def test_a_row_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deterministic mode: a token's numbers do not depend on its neighbours."""
    multiply_rows_apart(monkeypatch)
    dtype = DTYPES[0]
    weights = stack(5, 40, 72, dtype, "silu")
    x, (scale, ids) = random(90, 72, dtype=dtype), chosen(90, 5, 2)
    whole = grouped(x, scale, ids, weights, None, FIXED)
    some = torch.tensor([3, 50, 89], device=DEVICE)
    part = grouped(x[some], scale[some], ids[some], weights, None, FIXED)
    assert torch.equal(part, whole[some])


F32 = torch.float32
# Of gate_up, of down; hidden; size. Blocks of 64 divide both, other sizes fill no step.
PACKED = {
    "mxfp4": (Format(4, 32, F32, zero=12, table=E2M1), None, 96, 160),
    "e4m3-block": (Format(8, 64, F32, code="e4m3", rows=64), None, 192, 64),
    "int4-64": (Format(4, 64, offset="add"), None, 192, 64),
    "int8-row": (Format(8, 96, F32, zero=128), Format(8, 32, F32, zero=128), 96, 32),
    "e4m3-row": (Format(8, 96, F32, code="e4m3"), Format(8, 160, F32, code="e4m3"), 96, 160),
    "nvfp4": (Format(4, 16, F32, zero=12, table=E2M1), None, 96, 32),
}
QUICK = ("mxfp4", "e4m3-block")


def packed(name: str, experts: int, act: str = "silu", *, weigh: bool = False) -> PackedExperts:
    up, down, hidden, size = PACKED[name]
    biased = act == CLAMPED

    def weight(form: Format, rows: int, width: int) -> PackedWeight:
        codes = torch.randint(0, 256, (rows, width * form.bits // 8), dtype=torch.uint8)
        if form.code == "e4m3":
            codes &= 0xBF  # at most 1.875
        scale = (0.5 + torch.rand(rows // form.rows, width // form.group)) / width**0.5
        scale /= {"e4m3": 1, "int": 8 if form.bits == 4 else 128}[form.code]
        offset = -8 * scale if form.offset == "add" else None
        actual = PackedWeight(form, rows, width, None, torch.device(DEVICE))
        actual.fill(
            0, (codes.to(DEVICE), scale.to(DEVICE), offset if offset is None else offset.to(DEVICE))
        )
        return actual

    return PackedExperts(
        weight(up, experts * up_rows(size, act), hidden),
        weight(down or up, experts * hidden, size),
        random(experts, 2 * size, dtype=F32) if biased else None,
        random(experts, hidden, dtype=F32) if biased else None,
        act,
        0.7 if biased else 0.0,
        weigh,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in PACKED]
)
def test_packed(name: str, dtype: torch.dtype) -> None:
    """A scale of the expert before, gate's codes for up's, blocks of outputs counted from the
    expert's first row, a pair that is another expert's, experts without tokens."""
    torch.manual_seed(0)
    hidden = PACKED[name][2]
    for tokens, act, weigh in ((1, CLAMPED, False), (21, "silu", True), (3, "relu2", False)):
        stack = packed(name, 5, act, weigh=weigh)
        x, before = random(tokens, hidden, dtype=dtype), random(tokens, hidden, dtype=dtype)
        scale, ids = chosen(tokens, 5, 2, skewed=tokens > 1)
        want = reference.experts(
            x.double(), scale.double(), ids, double(stack.dense(torch.float64)), before.double()
        )
        assert packed_experts(x, scale, ids, stack, before) is before
        assert row_error(before, want) < 4 * BOUND[dtype]


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype.itemsize == 2], ids=str)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in PACKED]
)
def test_packed_few_tokens(name: str, dtype: torch.dtype) -> None:
    """A code taken for its neighbour, whose sign or exponent is another; a unit behind a row's end;
    a scale of the unit before; the inner numbers of another pair; three experts a token, where
    places are four."""
    torch.manual_seed(0)
    hidden = PACKED[name][2]
    for tokens, act, weigh in ((1, CLAMPED, False), (2, "silu", True), (1, "relu2", False)):
        stack = packed(name, 4, act, weigh=weigh)
        x, before = random(tokens, hidden, dtype=dtype), random(tokens, hidden, dtype=dtype)
        scale, ids = chosen(tokens, 4, 3)
        want = reference.experts(
            x.double(), scale.double(), ids, double(stack.dense(torch.float64)), None
        )
        assert few_packed_fits(x, stack)
        tiles = few_packed_module.PairTile(64, 2, 1), few_packed_module.PairTile(32, 2, 1, 4, True)
        got = few_packed(x, scale, ids, stack, None, *tiles)
        assert row_error(got, want) < 4 * BOUND[dtype]
        want += before.double()
        tile = few_packed_module.PairTile(32, 8, 1, 1)
        assert few_packed(x, scale, ids, stack, before, tile, tile) is before
        assert row_error(before, want) < 4 * BOUND[dtype]


@pytest.mark.slow
def test_packed_rows_are_rows() -> None:
    """Deterministic mode, and each tile."""
    stack = packed("mxfp4", 3)
    x, (scale, ids) = random(150, 96, dtype=DTYPES[0]), chosen(150, 3, 2)
    whole = packed_experts(x, scale, ids, stack, None, packed_module.FIXED)
    some = torch.tensor([3, 50, 149], device=DEVICE)
    part = packed_experts(x[some], scale[some], ids[some], stack, None, packed_module.FIXED)
    assert torch.equal(part, whole[some])
    for _, tiles in packed_module.TILES:
        other = packed_experts(x, scale, ids, stack, None, tiles)
        assert row_error(other, whole.double()) < 4 * BOUND[DTYPES[0]]


@pytest.fixture
def nothing_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what kernels allocate for intermediate results with NaN."""
    new = Tensor.new_empty

    def new_empty(*given: Any, **named: Any) -> Tensor:
        weight = new(*given, **named)
        return weight.fill_(float("nan")) if weight.is_floating_point() else weight

    monkeypatch.setattr(Tensor, "new_empty", new_empty)


def of_rank(stack: ExpertWeights, ids: Tensor, here: range) -> tuple[ExpertWeights, Tensor]:
    """Return the experts of one of several ranks, and the choice in this rank's numbers."""
    sizes = {
        name: None if (tensor := getattr(stack, name)) is None else tensor[here.start : here.stop]
        for name in ("gate_up", "down", "gate_up_bias", "down_bias")
    }
    ours = torch.where((ids >= here.start) & (ids < here.stop), ids - here.start, len(here))
    return replace(stack, **sizes, total=stack.count), ours


@pytest.mark.parametrize(("tokens", "act"), [(2, "silu"), (21, CLAMPED)])
def test_experts_of_other_ranks(nothing_is_zero: None, tokens: int, act: str) -> None:
    """A pair that is another rank's reads an expert that is not there, is given to one that is, or
    leaves what was in memory in its token's sum; ranks whose pairs are none, or all."""
    dtype, hidden = DTYPES[0], 72
    whole = stack(6, 24, hidden, dtype, act)
    x, (scale, ids) = random(tokens, hidden, dtype=dtype), chosen(tokens, 6, 3)
    ids = torch.where(ids >= 4, ids - 3, ids)  # of the last two nobody takes any
    want, total = reference.experts(x.double(), scale.double(), ids, double(whole), None), 0.0
    for here in (range(3), range(3, 4), range(4, 6)):
        ours, places = of_rank(whole, ids, here)
        part = reference.experts(x.double(), scale.double(), places, double(ours), None)
        assert here.stop < 6 or not part.any()
        total = total + part
        if tokens <= MOST and len(here) != 3:
            continue  # in the interpreter a launch takes seconds
        before = random(tokens, hidden, dtype=dtype)
        products = few if tokens <= MOST else grouped
        got = products(x, scale, places, ours, before.clone())
        assert row_error(got, before + part) < 2 * BOUND[dtype]
    torch.testing.assert_close(total, want)


def test_packed_experts_of_other_ranks(nothing_is_zero: None) -> None:
    """As above; packed experts have the launches before and behind their products in common."""
    dtype, weights = DTYPES[0], packed("mxfp4", 5, CLAMPED)
    hidden, weights.total = PACKED["mxfp4"][2], 8
    x, (scale, ids) = random(9, hidden, dtype=dtype), chosen(9, 8, 3)
    ids = ids.clamp(max=5)
    want = reference.experts(
        x.double(), scale.double(), ids, double(weights.dense(torch.float64)), None
    )
    assert (ids == 5).all(1).logical_not().any() and (ids == 5).any()
    got = packed_experts(x, scale, ids, weights, None)
    assert float((got - want).abs().max()) < 4 * BOUND[dtype] * float(want.abs().max())
    x = x[:2].to(torch.float16)
    tiles = few_packed_module.PairTile(64, 4, 1), few_packed_module.PairTile(32, 4, 1)
    got = few_packed(x, scale[:2], ids[:2], weights, None, *tiles)
    assert float((got - want[:2]).abs().max()) < 4 * BOUND[x.dtype] * float(want.abs().max())


def rounding(stack: PackedExperts) -> PackedExperts:
    """Change experts to a format whose inputs are rounded too, and return them."""
    for weight in (stack.gate_up, stack.down):
        weight.form = replace(weight.form, activations=8)
    return stack


def rounded_errors(
    x: Tensor, scale: Tensor, ids: Tensor, stack: PackedExperts, tiles: Tiles
) -> tuple[float, float]:
    """Return the errors of both GEMMs against float64 products of the rounded operands."""
    pairs, chosen_experts = sort(ids, stack.count), ids.shape[1]
    inner = rounded.rounded_up(x, scale, ids, stack, pairs, tiles.up)
    inputs = rounded.rounded_down(inner, scale, ids, stack, pairs, tiles.down)
    assert inner.dtype == inputs.dtype == x.dtype
    (rows, of_rows), (inners, of_inners) = round_rows(x), round_rows(inner)
    wide, wide_inner = rows.double() * of_rows, inners.double() * of_inners
    dense = double(stack.dense(torch.float32))
    want_inner, want_given = (
        torch.zeros_like(tensor, dtype=torch.float64) for tensor in (inner, inputs)
    )
    starts = pairs.starts.tolist()
    for expert in range(stack.count):
        here = slice(starts[expert], starts[expert + 1])
        mine = pairs.order[here].long()
        weight = scale.flatten()[mine, None].double()
        both = wide[mine // chosen_experts] @ dense.gate_up[expert].t()
        if stack.weigh_input:
            both = both * weight
        if dense.gate_up_bias is not None:
            both = both + dense.gate_up_bias[expert]
        want_inner[here] = reference.activated(both, stack.act, stack.limit)
        down = wide_inner[here] @ dense.down[expert].t()
        if dense.down_bias is not None:
            down = down + dense.down_bias[expert]
        want_given[mine] = down if stack.weigh_input else down * weight
    end = starts[-1]  # what is behind is of pairs of another rank
    here = ids.flatten() < stack.count
    return row_error(inner[:end], want_inner[:end]), row_error(inputs[here], want_given[here])


SHORT = next(dtype for dtype in DTYPES if dtype.itemsize == 2)


@pytest.mark.parametrize(
    ("act", "weigh", "tile"),
    [
        ("silu", True, Tile(16, 64, 32, 4, 3, swap=True)),
        (CLAMPED, False, Tile(32, 32, 64, 4, 3, tma=True)),
        pytest.param("relu2", False, Tile(16, 64, 64, 4, 3, True, True), marks=pytest.mark.slow),
        pytest.param("silu", False, Tile(64, 32, 64, 4, 3), marks=pytest.mark.slow),
    ],
)
def test_rounded(act: str, weigh: bool, tile: Tile) -> None:
    """A scale of another token, pair or output, or of the gate for the up; sums that are scaled
    behind a bias; sizes that fill no tile; experts without tokens."""
    torch.manual_seed(0)
    stack = rounding(packed("e4m3-row", 5, act, weigh=weigh))
    x, (scale, ids) = random(21, 96, dtype=SHORT), chosen(21, 5, 2, skewed=True)
    x *= 1 + torch.arange(21, device=DEVICE)[:, None]
    assert rounded.rounded_fits(x, stack)
    tiles = Tiles(tile, tile)
    errors = rounded_errors(x, scale, ids, stack, tiles)
    assert max(errors) < 4 * BOUND[SHORT]
    before = random(21, 96, dtype=SHORT)
    want = before.clone()
    pairs = sort(ids, stack.count)
    inner = rounded.rounded_up(x, scale, ids, stack, pairs, tile)
    sum_experts(rounded.rounded_down(inner, scale, ids, stack, pairs, tile), ids, stack, want)
    assert rounded.rounded_experts(x, scale, ids, stack, before, tiles) is before
    assert torch.equal(before, want)


def test_rounded_experts_of_other_ranks(nothing_is_zero: None) -> None:
    """A scale of a pair that has no place; what was in memory in a token's sum."""
    stack = rounding(packed("e4m3-row", 5, CLAMPED))
    stack.total = 8
    x, (scale, ids) = random(9, 96, dtype=SHORT), chosen(9, 8, 3)
    ids = ids.clamp(max=5)
    assert (ids == 5).any()
    tile = Tile(16, 64, 64, 4, 3, swap=True)
    assert max(rounded_errors(x, scale, ids, stack, Tiles(tile, tile))) < 4 * BOUND[SHORT]
    got = rounded.rounded_experts(x, scale, ids, stack, None, Tiles(tile, tile))
    want = reference.experts(
        x.double(), scale.double(), ids, double(stack.dense(torch.float64)), None
    )
    assert got.isfinite().all()
    assert float((got - want).norm() / want.norm()) < 0.15  # inputs are rounded


@pytest.mark.slow
def test_which_experts_are_rounded() -> None:
    """Inputs that are rounded though the format, or the deterministic mode, takes them as they
    come; a row of few tokens that is not as it is among more."""
    stack = packed("e4m3-row", 3)
    x, (scale, ids) = random(5, 96, dtype=SHORT), chosen(5, 3, 2)
    inputs = x, scale, ids, stack, None
    as_they_come = few_packed(*inputs)
    assert torch.equal(kernels_for("cuda").packed_experts(*inputs), as_they_come)
    rounding(stack)
    actual = kernels_for("cuda").packed_experts(*inputs)
    assert torch.equal(actual, rounded.rounded_experts(*inputs))
    assert not torch.equal(actual, as_they_come)
    fewer = x[:4], scale[:4], ids[:4], stack, None
    assert torch.equal(kernels_for("cuda").packed_experts(*fewer), actual[:4])
    fixed = kernels_for("cuda", deterministic=True)
    whole = fixed.packed_experts(*inputs)
    assert torch.equal(fixed.packed_experts(*fewer), whole[:4])
    assert row_error(whole, as_they_come.double()) < 4 * BOUND[SHORT]


def test_sort() -> None:
    """Each expert's pairs, in their order; experts that nobody chose have none."""
    for tokens in (1, 40, 600):
        _, ids = chosen(tokens, 9, 4, skewed=True)
        ids[ids == 7] = 8
        order, starts = sort(ids, 9)
        assert starts.tolist()[-1] == ids.numel()
        for expert in range(9):
            mine = order[starts[expert] : starts[expert + 1]]
            assert mine.tolist() == (ids.flatten() == expert).nonzero().flatten().tolist()


def spread(pairs: int, experts: int, how: str) -> Tensor:
    """Return chosen experts [pairs / 2, 2], distributed as `how` says.

    The id `experts` stands for an expert of another rank.
    """
    ids = torch.randint(0, experts, (pairs,), device=DEVICE)
    if how == "one expert":
        ids = torch.full_like(ids, experts - 1)
    elif how == "elsewhere":
        ids[torch.rand(pairs, device=DEVICE) < 0.6] = experts
        ids[ids == experts // 2] = 0  # nobody's
    elif how == "nowhere":
        ids = torch.full_like(ids, experts)
    elif how == "falling":
        ids = ids.sort(descending=True).values
    return ids.int().view(-1, 2)


@pytest.mark.parametrize("how", ["any", "one expert", "elsewhere", "nowhere", "falling"])
@pytest.mark.parametrize("pairs, experts", [(2, 9), (2048, 60), (5002, 512), (4610, 9)])
def test_sort_of_many_pairs(pairs: int, experts: int, how: str) -> None:
    """A pair's place taken from another block's counts, pairs behind the last that are counted,
    pairs of one expert that are not in their order, at the borders of blocks and of runs of them:
    what a stable sort gives."""
    ids = spread(pairs, experts, how)
    values, want = ids.flatten().sort(stable=True)
    inside = int((values < experts).sum())
    first = torch.searchsorted(values, torch.arange(experts + 1, device=DEVICE).int())
    for way in (sort_by_blocks, partial(sort_by_blocks, block=128, blocks=2)):
        order, starts = way(ids, experts)
        assert torch.equal(starts.long(), first)
        assert torch.equal(order[:inside].long(), want[:inside])


def test_how_pairs_are_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many pairs in the launch whose programs all walk all of them; or a decode's in two."""
    taken = []
    for name in ("sort_at_once", "sort_by_blocks"):
        monkeypatch.setattr(sorting, name, lambda ids, experts, name=name: taken.append(name))
    for pairs in (2, sorting.AT_ONCE, sorting.AT_ONCE + 2):
        sort(spread(pairs, 4, "any"), 4)
    assert taken == ["sort_at_once", "sort_at_once", "sort_by_blocks"]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("experts", [6, 200])
def test_choice(score: str, corrected: bool, experts: int) -> None:
    """Numbers of experts that are no power of two; a correction that changes weights, too."""
    logits = random(3, experts) * 2
    correction = random(experts) if corrected else None
    for renormalise, chosen in ((True, 1), (False, 5)):
        routing = Routing(chosen, score, renormalise, 2.5)
        weights, ids = topk(logits, routing, correction)
        want, want_ids = reference.route(logits, routing, correction)
        assert torch.equal(ids, want_ids)
        torch.testing.assert_close(weights, want)


@pytest.mark.parametrize("biased", [False, True])
def test_norm_router_and_choice_at_once(biased: bool) -> None:
    """Sizes that fill no tile; the counters are zeros again for the next launch."""
    experts, hidden = 37, 72
    norm, router = random(hidden), random(experts, hidden) / 8
    bias = random(experts) if biased else None
    routing = Routing(3, "sigmoid" if biased else "softmax")
    for tokens in (1, 3):
        x = random(tokens, hidden)
        normed, weights, ids = few_route(x, norm, 1e-5, router, bias, routing, bias)
        want = Kernels().norm_route(x, norm, 1e-5, router, bias, routing, bias)
        torch.testing.assert_close(normed, want[0])
        torch.testing.assert_close(weights, want[1])
        assert torch.equal(ids, want[2])
    x = random(MOST + 2, hidden)
    many = (x, norm, 1e-5, router, bias, routing, bias)
    actual = kernels_for("cuda").norm_route(*many)
    torch.testing.assert_close(actual, Kernels().norm_route(*many))


def test_numbers_that_are_none() -> None:
    """What pads a captured step may hold anything, and must still meet an expert that is there."""
    logits = torch.full((2, 6), float("nan"), device=DEVICE)
    _, ids = topk(logits, Routing(3), None)
    assert all(0 <= expert < 6 for expert in ids.flatten().tolist())


def test_routing_by_groups() -> None:
    """Two experts of the best group alone, though another group has the best expert."""
    scores = torch.tensor([[0.9, 0.0, 0.1, 0.1, 0.8, 0.7]]).logit(eps=1e-6)
    routing = Routing(2, "sigmoid", True, 1.0, 3, 1, 2)
    weights, ids = reference.route(scores, routing, None)
    assert ids.tolist() == [[4, 5]]
    torch.testing.assert_close(weights, torch.tensor([[0.8, 0.7]]) / 1.5)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(128, 8, 768, 2048), (32, 4, 2880, 2880)])
def test_at_the_sizes_of_models(sizes: tuple[int, int, int, int]) -> None:
    """Qwen3-30B-A3B's layer and gpt-oss-20b's, from one token to a whole step's prompt."""
    experts, count, size, hidden = sizes
    weights = stack(experts, size, hidden, torch.bfloat16, CLAMPED if size == hidden else "silu")
    for tokens in (1, 2, 8, 9, 64, 256, 1024, 8192):
        assert error(tokens, weights, count, residual=True) < 2 * BOUND[torch.bfloat16], tokens


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(128, 8, 768, 2048), (32, 4, 2880, 2880)])
def test_packed_at_the_sizes_of_models(sizes: tuple[int, int, int, int]) -> None:
    """MXFP4 in groups by expert, and pair by pair, alone and in a graph. Small numbers and scales:
    products with codes as they are decoded would have no digits."""
    experts, count, size, hidden = sizes
    form = Format(4, 32, torch.bfloat16, zero=12, table=E2M1)

    def weight(rows: int, width: int) -> PackedWeight:
        weight = PackedWeight(form, rows, width, None, torch.device(DEVICE))
        weight.codes.view(torch.uint8).random_(0, 256)
        weight.scale.copy_(2.0 ** torch.randint(-9, -4, weight.scale.shape, device=DEVICE))
        return weight

    stack = PackedExperts(
        weight(experts * 2 * size, hidden), weight(experts * hidden, size), None, None
    )
    dense = stack.dense(torch.float32)
    for tokens in (1, 3, 8, 64, 300):
        x, (scale, ids) = random(tokens, hidden) / 64, chosen(tokens, experts, count)
        x = x.bfloat16()
        want = reference.experts(x.float(), scale, ids, dense, None)
        actual = packed_experts(x, scale, ids, stack, None)
        assert row_error(actual, want) < 4 * BOUND[torch.bfloat16], tokens
        if tokens <= 8:
            actual = few_packed(x, scale, ids, stack, None)
            assert row_error(actual, want) < 2 * BOUND[torch.bfloat16], tokens
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                again = few_packed(x, scale, ids, stack, None)
            graph.replay()
            assert torch.equal(again, actual)


@pytest.mark.gpu
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 8, 33, 256, 1024, 8192])
def test_rounded_at_the_sizes_of_models(tokens: int, biased: bool) -> None:
    """Qwen3-30B-A3B's layer with its tiles, and those of other numbers of tokens; in a graph."""
    experts, count, size, hidden = 128, 8, 768, 2048

    def weight(rows: int, width: int) -> PackedWeight:
        form = Format(8, width, torch.float32, code="e4m3", activations=8)
        weight = PackedWeight(form, rows, width, None, torch.device(DEVICE))
        weight.codes.random_(0, 256)
        weight.codes &= 0xBF  # below 2
        weight.scale.uniform_(0.5, 1.5).div_(width**0.5)
        return weight

    stack = PackedExperts(
        weight(experts * 2 * size, hidden),
        weight(experts * hidden, size),
        random(experts, 2 * size, dtype=F32) if biased else None,
        random(experts, hidden, dtype=F32) if biased else None,
        CLAMPED if biased else "silu",
        7.0,
        biased,
    )
    x, (scale, ids) = random(tokens, hidden).bfloat16(), chosen(tokens, experts, count)
    today = rounded.tiles_for(tokens * count, experts)
    for tiles in [today] if tokens != 256 else [tiles for _, tiles in rounded.TILES]:
        errors = rounded_errors(x, scale, ids, stack, tiles)
        print(tokens, tiles, errors)
        assert max(errors) < 2 * BOUND[torch.bfloat16], tiles
    actual = rounded.rounded_experts(x, scale, ids, stack, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = rounded.rounded_experts(x, scale, ids, stack, None)
    graph.replay()
    assert torch.equal(again, actual)


@pytest.mark.gpu
def test_few_tokens_of_floats_that_the_device_converts() -> None:
    """Codes in another order than the numbers of x; each sign, exponent and mantissa."""
    form = Format(8, 2048, torch.float32, code="e4m3")
    stack = PackedExperts(
        PackedWeight(form, 16 * 2 * 2048, 2048, None, torch.device(DEVICE)),
        PackedWeight(form, 16 * 2048, 2048, None, torch.device(DEVICE)),
        None,
        None,
    )
    for weight in (stack.gate_up, stack.down):
        weight.codes.random_(0, 255)
        weight.codes[(weight.codes & 0x7F) == 0x7F] = 0  # no number
        weight.scale.uniform_(0.5, 1.5).div_(2**12)
    dense = stack.dense(torch.float32)
    for tokens, ints, converts in product((1, 3, 8), (1, 2, 4), (False, True)):
        x, (scale, ids) = random(tokens, 2048).bfloat16(), chosen(tokens, 16, 5)
        want = reference.experts(x.double(), scale.double(), ids, double(dense), None)
        tile = few_packed_module.PairTile(2, 32, 1, ints, converts)
        actual = few_packed(x, scale, ids, stack, None, tile, tile)
        assert row_error(actual, want) < 2 * BOUND[torch.bfloat16], (tokens, tile)
        actual = few_packed(x, scale, ids, stack, None)
        assert row_error(actual, want) < 2 * BOUND[torch.bfloat16], tokens


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(128, 8, 768, 2048), (32, 4, 2880, 2880), (8, 3, 320, 192)])
def test_fragments_at_the_sizes_of_models(
    sizes: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, with codes as matrix instructions take them: a lane that has its neighbour's inputs
    or scale, a step behind a row's end, an expert's pairs in another's block."""
    experts, count, size, hidden = sizes
    form = Format(4, 32, torch.bfloat16, zero=12, table=E2M1)

    def weight(rows: int, width: int) -> PackedWeight:
        weight = PackedWeight(form, rows, width, None, torch.device(DEVICE))
        weight.codes.view(torch.uint8).random_(0, 256)
        weight.scale.copy_(2.0 ** torch.randint(-9, -4, weight.scale.shape, device=DEVICE))
        return weight

    biased = size >= hidden
    stack = PackedExperts(
        weight(experts * 2 * size, hidden),
        weight(experts * hidden, size),
        random(experts, 2 * size) if biased else None,
        random(experts, hidden) if biased else None,
        CLAMPED if biased else "silu",
        7.0,
    )
    dense = stack.dense(torch.float32)
    cuda = kernels_for(DEVICE)
    cuda.order_experts(stack, torch.bfloat16)
    assert stack.gate_up.in_fragments and stack.down.in_fragments
    for tokens in (1, 3, 8, 64, 300, 1500):
        x, (scale, ids) = random(tokens, hidden) / 64, chosen(tokens, experts, count)
        x = x.bfloat16()
        want = reference.experts(x.float(), scale, ids, dense, None)
        for way in (few_fragments, grouped_fragments):
            if way is grouped_fragments or tokens <= 8:
                actual = way(x, scale, ids, stack, None)
                assert row_error(actual, want) < 4 * BOUND[torch.bfloat16], (tokens, way)
        before = random(tokens, hidden, dtype=torch.bfloat16)
        want += before.float()
        assert cuda.packed_experts(x, scale, ids, stack, before) is before
        assert row_error(before, want) < 4 * BOUND[torch.bfloat16], tokens


@pytest.mark.gpu
@pytest.mark.parametrize("biased", [False, True])
def test_router_logits_are_not_rounded(biased: bool) -> None:
    """Bug: a bfloat16 logit has three digits, so that of 256 experts some are alike, and another
    one is chosen than in float32."""
    x, router = random(64, 2048, dtype=torch.bfloat16), random(256, 2048, dtype=torch.bfloat16)
    bias = random(256, dtype=torch.bfloat16) if biased else None
    want = x.double() @ router.double().t()
    if bias is not None:
        want += bias.double()
    assert row_error(kernels_for("cuda").router_logits(x, router, bias), want) < 1e-5
