"""Split, head norm, rotation and KV write against float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.attention.reference import without_gates
from kernels.kv.format import FORMATS
from kernels.kv.inputs import RopeInputs
from kernels.kv.quantized import QuantizedKV
from kernels.kv.write import rope_kv_write
from kernels.metadata import AttentionMeta, RotaryPlaces
from tests.kernels.oracle import BOUND, DEVICE, DTYPES, random, row_error

pytestmark = pytest.mark.triton


def reference(
    x: Tensor, weight: Tensor | None, eps: float, cos_sin: Tensor, positions: Tensor
) -> Tensor:
    x = x.double()
    if weight is not None:
        x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    rotary = cos_sin.shape[-1]
    cos, sin = cos_sin[positions.long()].double()[:, None].chunk(2, -1)
    first, second = x[..., : rotary // 2], x[..., rotary // 2 : rotary]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, x[..., rotary:]], -1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        (4, 2, 64, 64, 16),
        (9, 3, 64, 64, 16),
        (5, 1, 80, 80, 1),
        (8, 8, 96, 48, 32),
        (16, 8, 128, 128, 64),
    ],
    ids=str,
)
def test_against_float64(shape: tuple[int, ...], norm: bool, dtype: torch.dtype) -> None:
    """The wrong half rotated, a norm over padding, a key in the wrong place, slot -1 written to."""
    num_heads, num_kv_heads, head_dim, rotary, block_size = shape
    num_tokens, num_blocks, eps = 11, 24, 1e-6
    qkv = random(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    cos_sin = random(64, rotary)
    weights = [random(head_dim, dtype=dtype) if norm else None for _ in range(2)]
    caches = [
        torch.full(
            (num_blocks, num_kv_heads, block_size, head_dim), torch.nan, device=DEVICE, dtype=dtype
        )
        for _ in range(2)
    ]
    slots = torch.randperm(num_blocks * block_size, device=DEVICE)[:num_tokens]
    slots[[2, 7]] = -1
    positions = torch.randint(0, 64, (num_tokens,), device=DEVICE).int()
    meta = AttentionMeta(positions, slots, positions, positions, positions, 0, 1)
    q = rope_kv_write(RopeInputs(qkv, cos_sin, *weights, eps, *caches, num_heads), meta)

    heads = qkv.view(num_tokens, -1, head_dim)
    ref_q = reference(heads[:, :num_heads], weights[0], eps, cos_sin, positions)
    key = heads[:, num_heads : num_heads + num_kv_heads]
    ref_k = reference(key, weights[1], eps, cos_sin, positions)
    assert row_error(q, ref_q) < BOUND[dtype]
    written = slots >= 0
    blocks, offsets = slots[written] // block_size, slots[written] % block_size
    assert row_error(caches[0][blocks, :, offsets], ref_k[written]) < BOUND[dtype]
    assert torch.equal(caches[1][blocks, :, offsets], heads[:, num_heads + num_kv_heads :][written])
    for cache in caches:  # nothing beside the slots was touched
        cache[blocks, :, offsets] = torch.nan
        assert cache.isnan().all()


@pytest.mark.parametrize("code", [None, "int8", "int4"])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("shape", [(16, 2, 256, 64), (9, 3, 80, 80), (4, 4, 64, 32)], ids=str)
def test_gates_behind_queries(shape: tuple[int, ...], norm: bool, code: str | None) -> None:
    """A gate taken for a query, keys or values looked for where they are without gates: queries and
    caches are, bit by bit, those of rows from which the gates were cut."""
    num_heads, num_kv_heads, head_dim, rotary = shape
    dtype = torch.float16
    qkv = random(7, (2 * num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    cos_sin = random(64, rotary)
    weights = [random(head_dim, dtype=dtype) if norm else None for _ in range(2)]
    slots = torch.randperm(48, device=DEVICE)[:7]
    positions = torch.randint(0, 64, (7,), device=DEVICE).int()
    meta = AttentionMeta(positions, slots, positions, positions, positions, 0, 1)
    writes = []
    for gated in (False, True):
        sizes = 3, num_kv_heads, 16, head_dim
        caches: list[Any] = [torch.zeros(sizes, dtype=dtype, device=DEVICE) for _ in range(2)]
        if code is not None:
            caches = [QuantizedKV.empty(FORMATS[code], sizes, DEVICE) for _ in range(2)]
        inputs = RopeInputs(qkv, cos_sin, *weights, 1e-6, *caches, num_heads, gated=True)
        q = rope_kv_write(inputs if gated else without_gates(inputs), meta)
        stored = [cache if code is None else cache.codes for cache in caches]
        writes.append((q, *(tensor.view(torch.uint8) for tensor in stored)))
    assert all(torch.equal(single, other) for single, other in zip(*writes, strict=True))


def test_places_and_a_table_of_the_step() -> None:
    """Bug: a token is rotated by its position although it stands elsewhere, or by the layers' table
    although the step has one of its own."""
    cos_sin, other = random(64, 64), random(7, 64)
    qkv, slots = random(7, 8 * 64), torch.randperm(48, device=DEVICE)[:7]
    positions, rows = torch.randint(0, 64, (2, 7), device=DEVICE).int()
    for table in (None, other):
        own = rows if table is None else torch.arange(7, device=DEVICE).int()
        places = RotaryPlaces(own, table)
        meta = AttentionMeta(positions, slots, positions, positions, positions, 0, 1, rotary=places)
        caches = [torch.zeros(3, 2, 16, 64, device=DEVICE) for _ in range(2)]
        q = rope_kv_write(RopeInputs(qkv, cos_sin, None, None, 1e-6, *caches, 4), meta)
        heads = qkv.view(7, -1, 64)[:, :4]
        want = reference(heads, None, 1e-6, cos_sin if table is None else table, own)
        assert row_error(q, want) < BOUND[torch.float32]


@pytest.mark.gpu
def test_slots_beyond_int32_offsets() -> None:
    """The element offset of a late slot overflows 32 bits."""
    num_blocks = 2**31 // (8 * 16 * 128) + 8
    caches = [
        torch.empty(num_blocks, 8, 16, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    ]
    qkv = random(600, 48 * 128, dtype=torch.bfloat16)
    slots = torch.full((600,), -1, device="cuda")
    slots[599] = num_blocks * 16 - 1
    positions = torch.arange(600, device="cuda").int()
    meta = AttentionMeta(positions, slots, positions, positions, positions, 0, 1)
    rope_kv_write(RopeInputs(qkv, random(600, 128), None, None, 1e-6, *caches, 32), meta)
    assert torch.equal(caches[1][-1, :, -1], qkv.view(600, 48, 128)[-1, 40:])
