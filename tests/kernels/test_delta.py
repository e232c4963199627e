"""Gated DeltaNet on CUDA against the reference, which test_recurrent.py holds against its rule and
transformers: results, states, and what convolutions read next."""

import pytest
import torch
from torch import Tensor

from kernels.dispatch import kernels_for
from kernels.metadata import AttentionMeta
from kernels.recurrent.delta_rule import DeltaHeads
from kernels.reference import Kernels
from tests.kernels.oracle import DEVICE, grid, random, row_error

pytestmark = pytest.mark.triton
cuda, reference = kernels_for("cuda"), Kernels()
ROWS = 8


def step(kv_len: list[int], query_len: list[int], decodes: int) -> AttentionMeta:
    """Each entry in a row of its own."""
    starts = torch.tensor([0, *query_len], dtype=torch.int32).cumsum(0).int()
    nothing = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    return AttentionMeta(
        positions=nothing,
        slots=nothing,
        query_start=starts.to(DEVICE),
        kv_len=torch.tensor(kv_len, dtype=torch.int32, device=DEVICE),
        block_table=nothing,
        num_decodes=decodes,
        max_query_len=max(query_len),
        max_kv_len=max(kv_len),
        rows=torch.tensor([5, 2, 7, 0, 3, 6], device=DEVICE)[: len(kv_len)],
    )


def made(heads: tuple[int, int], sizes: tuple[int, int], taps: int) -> DeltaHeads:
    channels = 2 * heads[0] * sizes[0] + heads[1] * sizes[1]
    conv, decay, bias = random(channels, taps), random(heads[1]), random(heads[1])
    return DeltaHeads(*heads, *sizes, conv, decay, bias)


@pytest.mark.parametrize(
    ("heads", "sizes"), grid([(1, 1), (2, 4), (1, 3)], [(16, 8), (12, 40), (8, 33)]), ids=str
)
@pytest.mark.parametrize("taps", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_mixed_step(heads: tuple[int, int], sizes: tuple[int, int], taps: int) -> None:
    """A request that begins in another's state, a chunk that reads the wrong tail, one that is
    shorter than the tail, a value head with another's key head, padding that writes."""
    torch.manual_seed(0)
    how = made(heads, sizes, taps)
    meta = step([9, 1, 12, 4, 2, 0], [1, 1, 4, 4, 2, 2], 2)
    meta.counts = torch.tensor([2, 5], dtype=torch.int32, device=DEVICE)  # the last one pads
    tokens, channels = 14, how.conv.shape[0]
    whole = random(tokens, channels + 2 * heads[1])
    x, b, a = whole.split((channels, heads[1], heads[1]), dim=1)
    tail, state = random(ROWS, taps - 1, channels), random(ROWS, heads[1], *sizes)
    other = step([9, 1, 12, 4, 2], [1, 1, 4, 4, 2], 2)
    want_tail, want_state = tail.clone(), state.clone()
    want = reference.gated_delta(x[:12], a[:12], b[:12], how, want_tail, want_state, other)
    found = cuda.gated_delta(x, a, b, how, tail, state, meta)
    assert row_error(found[:12], want) < 1e-4
    assert not found[12:].any()
    assert torch.equal(tail, want_tail)
    assert row_error(state, want_state) < 1e-4


def test_token_by_token() -> None:
    """Numbers that depend on how a prompt was cut: bit by bit they must not."""
    torch.manual_seed(1)
    how = made((1, 2), (16, 16), 4)
    x, a, b = random(6, how.conv.shape[0]), random(6, 2), random(6, 2)

    def run(cuts: list[int]) -> tuple[Tensor, Tensor]:
        tail, state = random(ROWS, 3, how.conv.shape[0]), random(ROWS, 2, 16, 16)
        found, at = [], 0
        for count in cuts:
            part = slice(at, at + count)
            meta = step([at + count], [count], int(count == 1))
            found.append(cuda.gated_delta(x[part], a[part], b[part], how, tail, state, meta))
            at += count
        return torch.cat(found), state[5]

    whole = run([6])
    for cuts in ([1] * 6, [2, 4], [3, 1, 2]):
        assert all(map(torch.equal, run(cuts), whole))
