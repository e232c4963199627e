"""Warp-specialised attention of chunks on Hopper, against float64."""

import pytest
import torch
from torch import Tensor

from kernels.attention.candidates import CHUNK_ATTENTION
from kernels.attention.inputs import AttentionForm, AttentionInputs
from kernels.candidates import first_fit, taking
from kernels.metadata import AttentionMeta
from tests.kernels.oracle import BOUND, DEVICE, attention, paged, random, row_error
from tests.kernels.test_masks import step

HOPPER = DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.triton
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")


def run(inputs: AttentionInputs, meta: AttentionMeta, out: Tensor) -> None:
    """Run the kernel that a step's chunks get, which must be the specialised one."""
    kernel = first_fit(CHUNK_ATTENTION, inputs, meta)
    assert kernel.name == "specialized_prefill"
    kernel.run(inputs, meta, out)


LENGTHS = ([130, 3, 1, 700, 65, 2000, 17], [1, 1, 1, 640, 3, 33, 17])


@needs_hopper
@pytest.mark.parametrize("sees", [(0, 0), (100, 0), (0, 256)], ids=["all", "window", "chunk"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size", "sinks"),
    [
        (8, 2, 128, 16, False),
        (8, 8, 128, 64, True),
        (16, 2, 128, 256, False),
        (4, 2, 256, 32, True),
        (8, 1, 256, 128, False),
    ],
)
def test_mixed_step(
    heads: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    sinks: bool,
    dtype: torch.dtype,
    sees: tuple[int, int],
) -> None:
    """A tile that is read before it is there or overwritten while it is read, NaN behind the last
    key and in blocks that went back, rows of another query or head, a mask off by one, padding that
    is not zero, a queue that is not empty for the next launch."""
    torch.manual_seed(0)
    k_cache, v_cache, meta = step(
        *LENGTHS, 0, sees, dim, block_size, kv_heads, padding=77, dtype=dtype
    )
    num_tokens = sum(LENGTHS[1])
    meta.counts = torch.tensor([2, len(LENGTHS[0])], dtype=torch.int32, device=DEVICE)
    q = random(num_tokens + 77, heads, dim, dtype=dtype)
    sink = torch.randn(heads, device=DEVICE) if sinks else None
    want = attention(q, k_cache, v_cache, dim**-0.5, meta, sinks=sink)
    inputs = AttentionInputs(q, k_cache, v_cache, dim**-0.5, sinks=sink)
    for _ in range(3):
        out = torch.full_like(q, 7.0)
        run(inputs, meta, out)
        assert row_error(out[2:num_tokens], want[2:]) < BOUND[dtype]
        assert (out[:2] == 7.0).all(), "decodes are another kernel's"
        assert (out[num_tokens:] == 0.0).all()


@needs_hopper
def test_many_entries_and_long_ones() -> None:
    """Work that two programs take, or none; an entry looked up wrongly among hundreds."""
    torch.manual_seed(1)
    for kv_len, query_len in (
        ([9000], [5000]),
        ([*range(1, 300)], [1 + n % 7 for n in range(299)]),
    ):
        query_len = [min(n, m) for n, m in zip(kv_len, query_len, strict=True)]
        k_cache, v_cache, meta = paged(kv_len, query_len, 2, 128, 16, 0, torch.bfloat16)
        meta.counts = torch.tensor([0, len(kv_len)], dtype=torch.int32, device=DEVICE)
        q = random(sum(query_len), 8, 128, dtype=torch.bfloat16)
        out = torch.full_like(q, torch.nan)
        run(AttentionInputs(q, k_cache, v_cache, 0.1), meta, out)
        assert row_error(out, attention(q, k_cache, v_cache, 0.1, meta)) < BOUND[torch.bfloat16]


@needs_hopper
def test_rows_do_not_depend_on_the_chunk() -> None:
    """A prompt's chunk whose bits depend on where the prompt was cut."""
    torch.manual_seed(2)
    k_cache, v_cache, meta = paged([1500], [1500], 2, 128, 16, 0, torch.bfloat16)
    meta.counts = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    q = random(1500, 8, 128, dtype=torch.bfloat16)
    whole, parts = torch.empty_like(q), torch.empty_like(q)
    run(AttentionInputs(q, k_cache, v_cache, 0.1), meta, whole)
    for begin, end in ((0, 333), (333, 1400), (1400, 1500)):
        meta.kv_len.fill_(end)
        meta.query_start[1] = end - begin
        run(AttentionInputs(q[begin:end], k_cache, v_cache, 0.1), meta, parts[begin:end])
    assert torch.equal(whole, parts)


PLAIN = AttentionForm("", 2, 128, 4, 16)


@pytest.mark.parametrize(
    "form",
    [
        PLAIN._replace(head_dim=64),
        PLAIN._replace(element_size=4),
        PLAIN._replace(block_size=4),
        PLAIN._replace(block_size=48),
        PLAIN._replace(group=3),
        PLAIN._replace(softcap=True),
        PLAIN._replace(slopes=True),
        PLAIN._replace(kv="fp8"),
    ],
    ids=str,
)
def test_the_rest_is_not_taken(form: AttentionForm) -> None:
    """A head size, dtype, block size, group, score function or cache that the kernel has not; any
    other GPU than Hopper's."""
    assert taking(CHUNK_ATTENTION, PLAIN, (9, 0))[0].name == "specialized_prefill"
    for capability, asked in (((9, 0), form), ((8, 0), PLAIN), ((10, 0), PLAIN)):
        kernels = taking(CHUNK_ATTENTION, asked, capability)
        assert kernels and all(kernel.name != "specialized_prefill" for kernel in kernels)
