"""Bidirectional attention over whole texts, of every size of head, against float64."""

from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from kernels.dispatch import kernels_for
from kernels.metadata import AttentionMeta, RotaryPlaces
from tests.kernels.oracle import BOUND, DEVICE, DTYPES, random, row_error

pytestmark = pytest.mark.triton
cuda, cuda_deterministic = kernels_for("cuda"), kernels_for("cuda", True)
LENGTHS = [1, 130, 63, 200, 64, 128]
HEADS = 3


def step(lengths: list[int], table: Tensor | None = None) -> AttentionMeta:
    starts = list(accumulate(lengths, initial=0))
    nothing = torch.empty(0)
    at = torch.cat([torch.arange(length) for length in lengths]).int().to(DEVICE)
    rotary = None
    if table is not None:
        rotary = RotaryPlaces(torch.arange(len(at), dtype=torch.int32, device=DEVICE), table)
    return AttentionMeta(
        at, nothing, torch.tensor(starts, dtype=torch.int32, device=DEVICE), nothing, nothing, 0,
        max(lengths), starts, rotary=rotary,
    )  # fmt: skip


def wanted(qkv: Tensor, table: Tensor | None, lengths: list[int], window: int) -> Tensor:
    """Return attention in float64 of each text. table: rotary rows, one for each token."""
    q, k, v = qkv.double().unflatten(1, (3, HEADS, -1)).unbind(1)
    if table is not None:
        cos, sin = table.double()[:, None].chunk(2, -1)
        half = cos.shape[-1]

        def rotated(x: Tensor) -> Tensor:
            a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
            return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)

        q, k = (rotated(x).to(qkv.dtype).double() for x in (q, k))
    parts = []
    for begin, end in pairwise(accumulate(lengths, initial=0)):
        score = torch.einsum("qhd,khd->hqk", q[begin:end], k[begin:end]) * q.shape[-1] ** -0.5
        place = torch.arange(end - begin, device=qkv.device)
        if window:
            score = score.masked_fill((place[:, None] - place).abs() > window, -torch.inf)
        parts.append(torch.einsum("hqk,khd->qhd", score.softmax(-1), v[begin:end]))
    return torch.cat(parts)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 24, 64, 72, 80, 96, 128, 256])
def test_heads(head_dim: int, dtype: torch.dtype) -> None:
    """Bug: elements behind a head join its sums, or a text sees its neighbour in the step."""
    lengths = LENGTHS if DEVICE == "cuda" else LENGTHS[:3]
    qkv = random(sum(lengths), 3 * HEADS * head_dim, dtype=dtype)
    output = cuda.whole_texts(qkv.clone(), None, HEADS, head_dim**-0.5, 0, step(lengths), dtype)
    want = wanted(qkv, None, lengths, 0)
    got = output.view_as(want)
    if head_dim < 64:  # of so few elements one head's result may be short by chance
        got, want = got.flatten(1), want.flatten(1)
    assert row_error(got, want) < BOUND[dtype]


@pytest.mark.parametrize("dtype", DTYPES[:1], ids=str)
@pytest.mark.parametrize("window", [1, 5, 70, 500])
def test_windows(window: int, dtype: torch.dtype) -> None:
    """Bug: a window is off by one at either end, or a tile that no query sees gives NaN."""
    lengths = LENGTHS if DEVICE == "cuda" else LENGTHS[:3]
    qkv = random(sum(lengths), 3 * HEADS * 32, dtype=dtype)
    output = cuda.whole_texts(qkv.clone(), None, HEADS, 32**-0.5, window, step(lengths), dtype)
    want = wanted(qkv, None, lengths, window).flatten(1)
    assert row_error(output, want) < BOUND[dtype]


@pytest.mark.parametrize("dtype", DTYPES[:1], ids=str)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(72, 72), (64, 32), (80, 80)])
@pytest.mark.parametrize("places", ["positions", "table"])
def test_rotation(places: str, head_dim: int, rotary_dim: int, dtype: torch.dtype) -> None:
    """Bug: keys are rotated by another row than queries, a rest is rotated, or a step's own table
    (pictures) is not read."""
    lengths = LENGTHS[:3]
    qkv = random(sum(lengths), 3 * HEADS * head_dim, dtype=dtype)
    angles = random(sum(lengths), rotary_dim // 2, dtype=torch.float32)
    table = torch.cat((angles.cos(), angles.sin()), -1)
    own = table
    meta = step(lengths, table)
    if places == "positions":
        meta = step(lengths)
        own = table.index_select(0, meta.positions)
    output = cuda.whole_texts(qkv.clone(), table, HEADS, head_dim**-0.5, 0, meta, dtype)
    want = wanted(qkv, own, lengths, 0).flatten(1)
    assert row_error(output, want) < BOUND[dtype]


def test_a_text_alone_is_the_same() -> None:
    """Bug: in the deterministic mode a text's numbers depend on what stands beside it."""
    dtype = DTYPES[0]
    qkv = random(sum(LENGTHS), 3 * HEADS * 32, dtype=dtype)
    arguments = (None, HEADS, 32**-0.5, 0)
    output = cuda_deterministic.whole_texts(qkv.clone(), *arguments, step(LENGTHS), dtype)
    begin = sum(LENGTHS[:3])
    own = qkv[begin : begin + LENGTHS[3]].clone()
    alone = cuda_deterministic.whole_texts(own, *arguments, step([LENGTHS[3]]), dtype)
    if DEVICE == "cuda":
        assert torch.equal(alone, output[begin : begin + LENGTHS[3]])
    else:  # the interpreter's products depend on their place
        assert row_error(alone, output[begin : begin + LENGTHS[3]]) < BOUND[dtype]
