"""Mamba-1, Mamba-2 and causal convolutions on CUDA against the reference, and the reference against
their rules token by token."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from kernels.dispatch import kernels_for
from kernels.recurrent.mamba1 import Mamba1Inputs
from kernels.recurrent.mamba2 import Mamba2Heads
from kernels.reference import Kernels
from tests.kernels import rules
from tests.kernels.oracle import DEVICE, DTYPES, grid, random, row_error
from tests.kernels.test_delta import ROWS, step

cuda, reference = kernels_for("cuda"), Kernels()
BACK_ENDS = {"chunks": cuda, "walk": kernels_for("cuda", deterministic=True)}
LIMITS = (0.1, 1.5)


def made(heads: int, size: int, groups: int, state: int, taps: int) -> Mamba2Heads:
    channels = heads * size + 2 * groups * state
    conv, bias = random(channels, taps), random(channels)
    tensor = random(3, heads)
    return Mamba2Heads(
        heads, size, groups, state, conv, bias, tensor[0], tensor[1], tensor[2], LIMITS
    )


@pytest.mark.triton
@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize(
    ("heads", "sizes"), grid([(1, 1), (4, 2), (3, 1)], [(16, 8), (12, 20), (40, 16)]), ids=str
)
def test_mamba2(heads: tuple[int, int], sizes: tuple[int, int], back_end: str) -> None:
    """A request that begins in another's state, a head with another group's B, a step that is not
    cut, padding that writes, a chunk shorter than the tail."""
    torch.manual_seed(0)
    how = made(heads[0], sizes[0], heads[1], sizes[1], 4)
    meta = step([9, 1, 12, 4, 2, 0], [1, 1, 4, 4, 2, 2], 2)
    meta.counts = torch.tensor([2, 5], dtype=torch.int32, device=DEVICE)  # the last one pads
    channels = how.conv.shape[0]
    x, dt = random(14, channels + heads[0]).split((channels, heads[0]), dim=1)
    tail, state = random(ROWS, 3, channels), random(ROWS, heads[0], *sizes)
    want_tail, want_state = tail.clone(), state.clone()
    other = step([9, 1, 12, 4, 2], [1, 1, 4, 4, 2], 2)
    want = reference.mamba2(x[:12], dt[:12], how, want_tail, want_state, other)
    actual = BACK_ENDS[back_end].mamba2(x, dt, how, tail, state, meta)
    assert row_error(actual[:12], want) < 1e-4
    assert not actual[12:].any()
    assert torch.equal(tail, want_tail)
    assert row_error(state, want_state) < 1e-4


@pytest.mark.triton
@pytest.mark.parametrize(
    ("shape", "dtype"), grid([((2, 1), (16, 16)), ((4, 2), (40, 24))], DTYPES), ids=str
)
def test_mamba2_chunks(shape: tuple[tuple[int, int], tuple[int, int]], dtype: torch.dtype) -> None:
    """A state that is lost between two chunks, a slot of one entry's last chunk that is the next
    one's first: decodes, prompts of several chunks, one that goes on, and what a graph knows."""
    torch.manual_seed(2)
    heads, sizes = shape
    how = made(heads[0], sizes[0], heads[1], sizes[1], 4)
    lengths = [1, 130, 64, 65, 3]
    meta = step([7, 130, 100, 65, 30], lengths, 1)
    channels = how.conv.shape[0]
    x, dt = random(sum(lengths), channels + heads[0], dtype=dtype).split((channels, heads[0]), 1)
    tail, state = random(ROWS, 3, channels), random(ROWS, heads[0], *sizes)
    want_tail, want_state = tail.clone(), state.clone()
    before = tail.clone(), state.clone()
    want = reference.mamba2(x, dt, how, want_tail, want_state, meta)
    actual = cuda.mamba2(x, dt, how, tail, state, meta)
    bound = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}[dtype]
    assert row_error(actual.flatten(1), want.flatten(1)) < bound
    assert row_error(state.flatten(1), want_state.flatten(1)) < bound
    assert torch.equal(tail, want_tail)
    graph = replace(meta, num_decodes=5, counts=torch.tensor([1, 5], device=DEVICE).int())
    again = cuda.mamba2(x, dt, how, *before, graph)
    assert torch.equal(again, actual) and torch.equal(before[1], state)


@pytest.mark.triton
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("channels", "taps"), [(24, 3), (530, 4)])
def test_causal_conv(channels: int, taps: int, biased: bool) -> None:
    """Tokens that no program of several has, a tail that a chunk reads when it was written."""
    torch.manual_seed(0)
    conv, bias = random(channels, taps), random(channels) if biased else None
    meta = step([9, 1, 40, 4, 1], [1, 1, 20, 4, 1], 2)
    meta.counts = torch.tensor([2, 5], dtype=torch.int32, device=DEVICE)
    x, tail = random(27, channels), random(ROWS, taps - 1, channels)
    want_tail = tail.clone()
    want = reference.causal_conv(x, conv, bias, want_tail, meta)
    actual = cuda.causal_conv(x, conv, bias, tail, meta)
    assert row_error(actual, want) < 1e-5
    assert torch.equal(tail, want_tail)
    alone = step([10, 2, 0], [1, 1, 1], 2)  # decodes only, one of padding
    alone.counts = torch.tensor([2, 2], dtype=torch.int32, device=DEVICE)
    actual = cuda.causal_conv(x[:3], conv, bias, tail, alone)
    want = reference.causal_conv(x[:2], conv, bias, want_tail, step([10, 2], [1, 1], 2))
    assert row_error(actual[:2], want) < 1e-5 and not actual[2].any()


def scanned(tokens: int, channels: int, size: int) -> tuple[Tensor, ...]:
    """Return random x, dt, B, C, rates and skip of a Mamba-1 scan."""
    wide, narrow = random(2, tokens, channels), random(2, tokens, size)
    return wide[0], wide[1], narrow[0], narrow[1], -random(channels, size).exp(), random(channels)


@pytest.mark.triton
@pytest.mark.parametrize(("channels", "size"), [(64, 16), (130, 16), (8, 5)])
def test_mamba1(channels: int, size: int) -> None:
    """A request that begins in another's state, channels behind the last, padding that writes."""
    torch.manual_seed(0)
    x, dt, b, c, rates, skip = scanned(14, channels, size)
    meta = step([9, 1, 12, 4, 2, 0], [1, 1, 4, 4, 2, 2], 2)
    meta.counts = torch.tensor([2, 5], dtype=torch.int32, device=DEVICE)  # the last one pads
    state = random(ROWS, channels, size)
    want_state, other = state.clone(), step([9, 1, 12, 4, 2], [1, 1, 4, 4, 2], 2)
    real = [tensor[:12] for tensor in (x, dt, b, c)]
    gate = random(14, 2 * channels)[:, channels:]
    want = reference.mamba1(Mamba1Inputs(*real, rates, skip, gate[:12], want_state), other)
    actual = cuda.mamba1(Mamba1Inputs(x, dt, b, c, rates, skip, gate, state), meta)
    assert row_error(actual[:12], want) < 1e-4
    assert not actual[12:].any()
    assert row_error(state, want_state) < 1e-4


@pytest.mark.parametrize("cuts", [[70], [66, 1, 1, 2], [2, 68]])
def test_mamba1_is_the_rule(cuts: list[int]) -> None:
    """A decay counted twice or not at all between two chunks, or between a chunk and a decode."""
    torch.manual_seed(1)
    x, dt, b, c, rates, skip = scanned(70, 12, 5)
    left = torch.zeros(12, 5, device=DEVICE)
    gate = random(70, 12)
    want = rules.mamba1(x, dt, b, c, rates, skip, left) * silu(gate)
    state, actual, at = random(ROWS, 12, 5), [], 0
    for count in cuts:
        part = slice(at, at + count)
        at += count
        own = [tensor[part] for tensor in (x, dt, b, c)]
        meta = step([at], [count], int(count == 1))
        actual.append(reference.mamba1(Mamba1Inputs(*own, rates, skip, gate[part], state), meta))
    assert row_error(torch.cat(actual), want) < 1e-4
    assert row_error(state[5], left) < 1e-4


@pytest.mark.parametrize("cuts", [[70], [66, 1, 1, 2], [1] * 3 + [67], [2, 68]])
def test_reference_is_the_rule(cuts: list[int]) -> None:
    """A decay counted twice or not at all between two chunks, or between a chunk and a decode."""
    torch.manual_seed(1)
    how = made(4, 6, 2, 5, 4)
    channels = how.conv.shape[0]
    x, dt = random(70, channels), random(70, 4)
    tail, state = random(ROWS, 3, channels), random(ROWS, 4, 6, 5)
    left = state.new_zeros(4, 6, 5)
    want = rules.mamba2(x, dt, how, tail.new_zeros(3, channels), left)
    actual, at = [], 0
    for count in cuts:
        part = slice(at, at + count)
        at += count
        meta = step([at], [count], int(count == 1))
        actual.append(reference.mamba2(x[part], dt[part], how, tail, state, meta))
    assert row_error(torch.cat(actual), want) < 1e-3
    assert row_error(state[5], left) < 1e-3
    assert torch.equal(tail[5], x[67:])
