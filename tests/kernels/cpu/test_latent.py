"""Generated attention over latents against float64, in blocks that others have left NaN in."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.cpu.codegen.processor import CompilerUnavailable, lanes
from kernels.cpu.latent import prefill
from kernels.cpu.latent import shape as latent_shape
from kernels.cpu.latent.shape import LatentShape, shape_of
from kernels.dispatch import kernels_for
from kernels.metadata import AttentionMeta
from kernels.reference import Kernels
from tests.kernels.layout import lay_out

try:
    lanes()
except CompilerUnavailable as why:
    pytest.skip(f"no compiler: {why}", allow_module_level=True)

# (heads, nope, rope, value, rank), block size
SIZES = [((4, 32, 32, 48, 64), 16), ((6, 16, 64, 112, 96), 5), ((3, 48, 32, 16, 32), 1)]
SCALE = 0.2
# (keys, queries) of a step's entries: decodes, a chunk behind a prefix, prompts, and few queries of
# many keys, which are absorbed.
STEP = [(90, 1), (1, 1), (300, 1), (260, 131), (33, 33), (200, 200), (230, 3), (5, 2)]


class Step:
    def __init__(self, sizes: tuple[int, ...], block_size: int, padding: int = 0) -> None:
        heads, nope, rope, value, rank = sizes
        self.nope, self.rank = nope, rank
        entries, at = [], 0
        counts = [-(-keys // block_size) for keys, _ in STEP]
        blocks = torch.randperm(sum(counts) + 3).tolist()
        for (keys, queries), count in zip(STEP, counts, strict=True):
            entries.append((blocks[at : at + count], keys - queries, queries))
            at += count
        self.meta = lay_out(entries, block_size, padding)
        self.cache = torch.full((len(blocks), 1, block_size, rank + rope), torch.nan)
        self.own: list[list[int]] = []  # rows of the cache, by entry
        flat = self.cache.view(-1, rank + rope)
        for own, before, count in entries:
            rows = [
                own[key // block_size] * block_size + key % block_size
                for key in range(before + count)
            ]
            self.own.append(rows)
            flat[rows[:before]] = torch.randn(before, rank + rope)
        wide = torch.randn(len(self.meta.slots), heads * (nope + rope) + rank + rope)
        self.q = wide[:, : -(rank + rope)].unflatten(1, (heads, nope + rope))
        self.latents = wide[:, -(rank + rope) :]
        self.norm = torch.rand(rank) + 0.5
        self.up = torch.randn(heads, nope + value, rank) / rank**0.5
        self.cos_sin = torch.randn(max(keys for keys, _ in STEP), rope)

    def run(self, kernels: Kernels, cache: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rotated queries, and the result of attention."""
        meta: AttentionMeta = replace(self.meta, plan=None)
        q = kernels.latent_write(self.q, self.latents, self.norm, 1e-6, self.cos_sin, cache, meta)
        return q, kernels.latent_attention(q, cache, up, SCALE, meta)

    def want(self, q: Tensor, cache: Tensor, up: Tensor) -> Tensor:
        """Return attention of these queries and latents in float64."""
        q, up, rank = q.double(), up.double(), self.rank
        flat, outputs = cache.view(-1, cache.shape[3]).double(), []
        starts = self.meta.query_start.tolist()
        for rows, begin, end in zip(self.own, starts, starts[1:], strict=False):
            own, latents = q[begin:end], flat[rows]
            keys = torch.einsum("kr,hdr->hkd", latents[:, :rank], up)
            shared = latents[:, rank:].expand(len(keys), -1, -1)
            key = torch.cat((keys[..., : self.nope], shared), -1)
            score = torch.einsum("nhd,hkd->hnk", own, key) * SCALE
            later = torch.ones_like(score[0], dtype=torch.bool).triu(len(rows) - len(own) + 1)
            weight = score.masked_fill(later, -torch.inf).softmax(-1)
            outputs.append(torch.einsum("hnk,hkd->nhd", weight, keys[..., self.nope :]).flatten(1))
        return torch.cat(outputs)


def row_error(found: Tensor, want: Tensor) -> float:
    error = (found.double() - want).norm(dim=-1) / want.norm(dim=-1)
    return float(error.nan_to_num(nan=float("inf")).max())


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_machine_without_a_compiler(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: an assertion, as with Triton 3.6, whose library hides its compiler on any processor."""

    def none() -> None:
        raise CompilerUnavailable("none here")

    monkeypatch.setattr(latent_shape, "check", none)
    step = Step(*SIZES[0])
    assert shape_of(step.q, step.cache, step.up) is None
    q, outputs = step.run(kernels_for("cpu", deterministic), step.cache, step.up)
    assert row_error(outputs, step.want(q, step.cache, step.up)) < 1e-5


@pytest.mark.parametrize("how", ["chunks", "pairs", "deterministic"])
@pytest.mark.parametrize(
    ("sizes", "block_size", "dtype", "of_up"),
    [
        (*SIZES[0], torch.bfloat16, torch.bfloat16),
        (*SIZES[1], torch.float16, torch.bfloat16),
        (*SIZES[2], torch.float32, torch.float32),
    ],
    ids=["bfloat16", "float16", "float32"],
)
def test_step(
    sizes: tuple[int, ...], block_size: int, dtype: torch.dtype, of_up: torch.dtype, how: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Bug: a mask off by one; a head's keys for another's queries; a key behind the last; another
    entry's blocks; numbers that padding, or what stood in a block, has left."""
    pairs, deterministic = how == "pairs", how == "deterministic"
    if not pairs:
        monkeypatch.setattr(LatentShape, "dot", False)
    torch.manual_seed(0)
    step = Step(sizes, block_size, padding=0 if deterministic else 2)
    up, cache, own = step.up.to(of_up), step.cache.to(dtype), step.cache.clone()
    shape = shape_of(step.q, cache, up)
    assert shape is not None
    if pairs and not shape.dot:
        pytest.skip("no pairs are multiplied")
    q, output = step.run(kernels_for("cpu", deterministic), cache, up)
    wanted_q, _ = step.run(Kernels(), own, up.float())
    count = int(step.meta.query_start[-1])
    assert row_error(q[:count].flatten(1), wanted_q[:count].double().flatten(1)) < 1e-6
    written = own.isfinite()
    assert torch.equal(written, cache.isfinite())
    bound = {torch.float32: 1e-6, torch.float16: 6e-4, torch.bfloat16: 4e-3}[dtype]
    assert row_error(cache[written][None], own[written].double()[None]) < bound
    want = step.want(q, cache, up)
    assert row_error(output[:count], want) < (0.016 if pairs else 5e-6)
    assert not output[count:].any()


@pytest.mark.parametrize("pairs", [False, True])
def test_cuts(pairs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a prompt's numbers that depend on where it was cut, on how many queries are computed at
    once, or on the threads."""
    dtype = torch.bfloat16 if pairs else torch.float32
    torch.manual_seed(0)
    heads, nope, rope, value, rank = 2, 32, 32, 32, 64
    table = torch.randperm(30)[:20].int()
    cache = torch.randn(30, 1, 16, rank + rope).to(dtype)
    up = (torch.randn(heads, nope + value, rank) / rank**0.5).to(dtype)
    q = torch.randn(310, heads, nope + rope)
    shape = shape_of(q, cache, up)
    assert shape is not None

    def run(cuts: list[int]) -> Tensor:
        out, at = torch.empty(len(q), heads * value), 0
        for count in cuts:
            end = at + count
            prefill.prefill(shape, q[at:end], cache, up, SCALE, table, end, out[at:end])
            at = end
        return out

    whole = run([310])
    assert torch.equal(run([1, 62, 65, 100, 82]), whole)
    monkeypatch.setattr(prefill, "_MOST", 70)
    assert torch.equal(run([310]), whole)


def test_few_queries_are_absorbed() -> None:
    """Bug: keys made of a long context for a few queries."""
    shape = LatentShape(16, 128, 64, 128, 512, 16, "float", "float")
    for tokens, keys, worth in ((2, 5000, False), (100, 5000, False), (400, 5000, True),
                                (100, 100, True)):  # fmt: skip
        assert prefill.worth_making(tokens, keys, shape) is worth
