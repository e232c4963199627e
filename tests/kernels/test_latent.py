"""Attention over latents, and their way into the cache, on every back end against float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.attention.candidates import LATENT_CHUNKS, LATENT_DECODE
from kernels.attention.inputs import AbsorbedInputs, LatentInputs
from kernels.attention.latent import decode, expanded, specialized_decode
from kernels.attention.latent.decode import plan_latent
from kernels.attention.latent.expanded import worth_expanding
from kernels.attention.shapes import head_parts
from kernels.candidates import first_fit
from kernels.cuda import Cuda
from kernels.dispatch import kernels_for
from kernels.metadata import AttentionMeta
from kernels.reference import Kernels
from tests.kernels.oracle import BOUND, DEVICE, DTYPES, attention, grid, paged, random, row_error

pytestmark = pytest.mark.triton
BACK_ENDS: dict[str, Any] = {"cuda": kernels_for("cuda"), "reference": Kernels()}
ROPE, NOPE, VALUE = 8, 12, 20


def latents(
    kv_len: list[int], query_len: list[int], decodes: int, rank: int, padding: int = 0,
    dtype: torch.dtype = torch.float32, block_size: int = 16,
) -> tuple[Tensor, AttentionMeta]:  # fmt: skip
    cache, _, meta = paged(
        kv_len, query_len, 1, rank + ROPE, block_size, decodes, dtype, padding=padding
    )
    return cache, meta


def want(q: Tensor, cache: Tensor, up: Tensor, scale: float, meta: AttentionMeta) -> Tensor:
    q, up = q.double(), up.double()
    absorbed = torch.einsum("nhd,hdr->nhr", q[..., :NOPE], up[:, :NOPE])
    query = torch.cat((absorbed, q[..., NOPE:]), -1)
    actual = attention(query, cache, cache[..., : up.shape[2]], scale, meta)
    return torch.einsum("nhr,hvr->nhv", actual, up[:, NOPE:]).flatten(1)


def check(back_end: str, heads: int, cache: Tensor, meta: AttentionMeta, rank: int) -> None:
    kernels = BACK_ENDS[back_end]
    q = random(len(meta.slots), heads, NOPE + ROPE, dtype=cache.dtype)
    up = random(heads, NOPE + VALUE, rank, dtype=cache.dtype) / rank**0.5
    kernels.prepare(meta, heads, cache, rank)
    out = kernels.latent_attention(q, cache, up, 0.3, meta)
    assert out.isfinite().all()
    ref = want(q, cache, up, 0.3, meta)
    bound = BOUND[cache.dtype] * (4 if cache.dtype != torch.float32 else 1)  # of three roundings
    assert row_error(out[: len(ref)], ref) < bound


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize(("heads", "rank"), grid([1, 4, 5, 16], [16, 24, 64]), ids=str)
def test_mixed_step(heads: int, rank: int, back_end: str) -> None:
    """A mask off by one, a padded element that leaks, a page of NaN: decodes, chunks behind a
    prefix, prompts, padding."""
    torch.manual_seed(0)
    cache, meta = latents([90, 1, 17, 50, 33, 1], [1, 1, 1, 7, 33, 1], 3, rank, padding=2)
    check(back_end, heads, cache, meta, rank)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("piece", [2048, 40])
def test_expanded(piece: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values made for chunks, where the host knows how many: another entry's, a piece that
    forgets what was found in the ones before, an entry that a piece has nothing of."""
    torch.manual_seed(5)
    lengths = [1, 5, 33, 90, 1]
    cache, meta = latents([60, 150, 33, 91, 1], lengths, 1, 32, padding=3, dtype=dtype)
    meta.kv_len_host = meta.kv_len.tolist()
    meta.query_start_host = meta.query_start.tolist()
    monkeypatch.setattr(expanded, "LEAST_PIECE", piece)
    monkeypatch.setattr(expanded, "MOST_ABSORBED", 10)
    expanded_only = [kernel for kernel in LATENT_CHUNKS if kernel.name == "latent_expanded"]
    monkeypatch.setattr(Cuda, "LATENT_CHUNKS", expanded_only)
    check("cuda", 3, cache, meta, 32)


def test_few_queries_are_absorbed() -> None:
    """Keys made of a long context for a few queries, which costs more than it spares."""
    cache, meta = latents([5000, 5000], [1, 1], 1, 16)
    up = torch.empty(1, 256, 512, device=DEVICE)
    for tokens, keys, worth in (
        (1, 5000, False), (100, 5000, False), (400, 5000, True), (100, 100, True),
        (5000, 100_000, True),
    ):  # fmt: skip
        meta.query_start_host, meta.kv_len_host = [0, 1, 1 + tokens], [5000, keys]
        q = torch.empty(1 + tokens, 1, 1, device=DEVICE)
        assert worth_expanding(LatentInputs(q, cache, up, 1.0), meta) is worth
    meta.kv_len_host = None
    assert not worth_expanding(LatentInputs(q, cache, up, 1.0), meta)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_types_and_pages(block_size: int, dtype: torch.dtype) -> None:
    """Tiles that begin in the middle of a page; sums in few bits; half of a score, or the branch
    that is never taken."""
    torch.manual_seed(1)
    cache, meta = latents([65, 64, 16, 20], [1, 1, 1, 9], 3, 32, dtype=dtype, block_size=block_size)
    check("cuda", 3, cache, meta, 32)


@pytest.mark.parametrize("rank", [16, 24])
def test_decodes_are_merged(rank: int) -> None:
    """Splits of one entry merged with the wrong weights, or another entry's; a piece of a merge
    that writes into the next head, where elements are no power of 2."""
    torch.manual_seed(2)
    lengths = [1500, 3, 40]
    cache, meta = latents(lengths, [1] * 3, 3, rank)
    check("cuda", 4, cache, meta, rank)
    splits = meta.plan.entries[:, 1].tolist()
    assert splits[0] > 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_heads_are_parts(dtype: torch.dtype) -> None:
    """Heads of the second part that read the first one's queries."""
    torch.manual_seed(3)
    cache, meta = latents([70, 5, 30], [1, 1, 4], 2, 16, dtype=dtype)
    assert [head_parts(n) for n in (16, 20, 64, 96, 128)] == [1, 1, 1, 2, 2]
    check("cuda", 96, cache, meta, 16)


HOPPER = DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(("heads", "block_size"), [(128, 16), (128, 64), (96, 32), (64, 128)])
def test_specialized_warps(heads: int, block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warps that wait for each other: a tile that is read before it is there or overwritten while
    it is read, NaN behind an entry's last latent, a split or an entry that takes the one's before,
    queries of heads that there are not; an entry without a latent; pieces of a merge.

    A program that merges fewer elements takes more splits at once, so its sums over splits have
    another order: float32's last bits differ, and with them at most one rounding to 16 bits."""
    torch.manual_seed(6)
    rank, rope = specialized_decode.RANK, specialized_decode.ROPE
    for lengths in ([0, 1, 63, 64, 65, 200, 3000], [40_001], [*range(1, 300)]):
        for dtype in (torch.bfloat16, torch.float16):
            count = len(lengths)
            cache, _, meta = paged(
                lengths, [1] * count, 1, rank + rope, block_size, count, dtype, padding=2
            )
            padded = len(meta.slots)
            absorbed = random(heads, padded, rank, dtype=dtype)
            q = random(padded, heads, 128 + rope, dtype=dtype)
            BACK_ENDS["cuda"].prepare(meta, heads, cache, rank)
            actual = []
            for pieces in (1, 4):
                monkeypatch.setattr(
                    specialized_decode, "merge_pieces", lambda out, pieces=pieces: pieces
                )
                out = torch.full_like(absorbed, torch.nan).transpose(0, 1).contiguous()
                inputs = AbsorbedInputs(absorbed, q, cache, 0.1)
                kernel = first_fit(LATENT_DECODE, inputs, meta)
                assert kernel.name == "specialized_decode"
                kernel.run(inputs, meta, out)
                actual.append(out[:count])
            whole, shared = (tensor.double() for tensor in actual)
            torch.testing.assert_close(whole, shared, rtol=torch.finfo(dtype).eps, atol=1e-6)
            query = torch.cat((absorbed.transpose(0, 1), q[..., -rope:]), -1)
            for entry, length in enumerate(lengths):
                blocks = meta.block_table[entry, : -(-length // block_size)].long()
                key = cache[blocks, 0].flatten(0, 1)[:length].double()
                ref = (query[entry].double() @ key.T * 0.1).softmax(-1) @ key[:, :rank]
                assert row_error(actual[0][entry], ref) < 2 * BOUND[dtype], (length, dtype)


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_write(back_end: str) -> None:
    """A latent normed with its shared key, a key rotated by another's angle, padding that
    writes; and queries whose rows are pieces of longer ones."""
    torch.manual_seed(4)
    tokens, heads, rank, eps = 5, 10, 24, 1e-6
    down = random(tokens, heads * (NOPE + ROPE) + rank + ROPE)
    q = down[:, : -(rank + ROPE)].unflatten(1, (heads, NOPE + ROPE))
    cache = torch.full((6, 1, 4, rank + ROPE), torch.nan, device=DEVICE)
    cos_sin, norm = random(30, ROPE), random(rank)
    _, meta = latents([9], [tokens], 0, rank, block_size=4)
    meta.positions = torch.tensor([7, 3, 0, 29, 5], dtype=torch.int32, device=DEVICE)
    meta.slots = torch.tensor([9, 22, -1, 0, 7], device=DEVICE)
    out = BACK_ENDS[back_end].latent_write(
        q, down[:, -(rank + ROPE) :], norm, eps, cos_sin, cache, meta
    )

    def rotated(x: Tensor) -> Tensor:
        cos, sin = cos_sin[meta.positions.long()].double().chunk(2, -1)
        first, second = x.double().chunk(2, -1)
        while cos.dim() < first.dim():
            cos, sin = cos[:, None], sin[:, None]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    latent = down[:, -(rank + ROPE) : -ROPE].double()
    latent = latent / (latent.square().mean(-1, keepdim=True) + eps).sqrt() * norm
    expected = torch.cat((latent, rotated(down[:, -ROPE:])), -1)
    flat = cache[:, 0].flatten(0, 1)
    written = meta.slots >= 0
    assert row_error(flat[meta.slots[written]], expected[written]) < 1e-5
    assert int(flat.isfinite().all(-1).sum()) == int(written.sum())
    assert torch.equal(out[..., :NOPE], q[..., :NOPE]) and out.is_contiguous()
    assert row_error(out[..., NOPE:], rotated(q[..., NOPE:])) < 1e-5


@pytest.mark.parametrize("room", [99, 163, 227])
def test_tiles_fit_beside_queries(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: on a device with less shared memory than Hopper a tile of 128 heads is beyond it, or has
    so many keys that no other is on its way while it is multiplied."""
    monkeypatch.setattr(decode, "shared_memory", lambda _: room * 1024)
    cache = torch.empty(1, 1, 16, 576, dtype=torch.bfloat16, device=DEVICE)
    lengths = torch.ones(4, dtype=torch.int32, device=DEVICE)
    shape = plan_latent(lengths, 128, 512, cache, 64, lengths[:1]).shape
    row = 576 * 2
    heads = 128 // decode.parts_within(128, cache)
    assert heads >= 32
    assert (heads + shape.keys * shape.num_stages) * row <= room * 1024
    assert shape.num_stages > 1 or shape.keys == 16
