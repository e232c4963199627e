"""The reference kernels (oracle of the others, and the CPU back end) against float64 formulas."""

import pytest
import torch
from torch import Tensor

from kernels.attention.inputs import AttentionInputs
from kernels.cpu.codegen.processor import CompilerUnavailable
from kernels.cpu.gemm import dense
from kernels.cpu.gemm.linear import pack
from kernels.dispatch import kernels_for
from kernels.kv.inputs import RopeInputs
from kernels.metadata import AttentionMeta
from kernels.reference import Kernels
from tests.kernels.layout import lay_out

BLOCK = 4
reference = Kernels()
BOUND = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def error(out: Tensor, ref: Tensor) -> float:
    """Return the error relative to the reference's norm; NaN counts as infinite."""
    out, ref = out.double(), ref.double()
    return float(((out - ref).norm() / ref.norm()).nan_to_num(nan=float("inf")))


def dirty_caches(num_blocks: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Return caches [2, num_blocks, ...] of NaN, as unwritten places must never be used."""
    return torch.full((2, num_blocks, num_kv_heads, BLOCK, head_dim), torch.nan, dtype=dtype)


def rotated(x: Tensor, cos_sin: Tensor, positions: Tensor) -> Tensor:
    rotary = cos_sin.shape[-1]
    cos, sin = cos_sin[positions.long()].double()[:, None].chunk(2, -1)
    first, second = x[..., : rotary // 2].double(), x[..., rotary // 2 : rotary].double()
    rotated = (first * cos - second * sin, second * cos + first * sin, x[..., rotary:].double())
    return torch.cat(rotated, -1)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def attended(q: Tensor, caches: Tensor, scale: float, meta: AttentionMeta) -> Tensor:
    """Return attention in float64, [num_tokens without padding, num_heads * head_dim], by entry."""
    group = q.shape[1] // caches.shape[2]
    starts, rows = meta.query_start.tolist(), []
    for entry, length in enumerate(meta.kv_len.tolist()):
        query = q[starts[entry] : starts[entry + 1]].double()
        at = torch.arange(length)
        blocks = meta.block_table[entry, at // BLOCK].long()
        key, value = (
            cache[blocks, :, at % BLOCK].double().repeat_interleave(group, 1) for cache in caches
        )
        score = torch.einsum("qhd,khd->hqk", query, key) * scale
        position = torch.arange(length - len(query), length)
        score.masked_fill_(at[None, None, :] > position[None, :, None], -torch.inf)
        rows.append(torch.einsum("hqk,khd->qhd", score.softmax(-1), value).flatten(1))
    return torch.cat(rows)


def test_a_back_end_says_only_what_it_does_better() -> None:
    """A name that the base does not have is an operation nobody calls, or one misspelt."""
    own = {name for name in vars(Kernels) if not name.startswith("_")}
    for device, deterministic in (("cpu", False), ("cpu", True)):
        back_end = type(kernels_for(device, deterministic))
        assert {name for name in vars(back_end) if not name.startswith("_")} <= own


def test_a_new_operation_is_a_method_of_the_base_and_of_one_back_end() -> None:
    """A back end without the operation takes the reference's, and what is made of others takes its
    own of these: nothing else has to be told."""

    class Base(Kernels):
        def doubled(self, x: Tensor) -> Tensor:
            return self.linear(x, 2 * torch.eye(x.shape[-1]), None)

    class Other(Base):
        def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return super().linear(x, weight, bias) + 1

    class Own(Base):
        def doubled(self, x: Tensor) -> Tensor:
            return x + x

    x = torch.ones(2, 3)
    assert torch.equal(Base().doubled(x), 2 * x) and torch.equal(Own().doubled(x), 2 * x)
    assert torch.equal(Other().doubled(x), 2 * x + 1)


@pytest.mark.parametrize("dtype", list(BOUND), ids=str)
def test_norms_and_activations(dtype: torch.dtype) -> None:
    """eps outside the root, a sum of squares rounded to 16 bits, gate and up exchanged."""
    x = torch.randn(7, 48).to(dtype) * 1e-2
    weight = torch.randn(48).to(dtype)
    assert error(reference.rms_norm(x, weight, 1e-3), normed(x, weight, 1e-3)) < BOUND[dtype]
    gate_up = torch.randn(5, 64).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    assert error(reference.silu_mul(gate_up), gate * gate.sigmoid() * up) < BOUND[dtype]
    tanh = torch.nn.functional.gelu(gate, approximate="tanh")
    assert error(reference.gelu_tanh_mul(gate_up), tanh * up) < BOUND[dtype]
    exact = torch.nn.functional.gelu(gate)
    assert error(reference.gelu_mul(gate_up), exact * up) < BOUND[dtype]
    assert error(reference.relu_mul(gate_up), gate.relu() * up) < BOUND[dtype]
    assert error(reference.activation(gate_up, "relu2")[:, :32], gate.relu() ** 2) < BOUND[dtype]
    assert error(reference.activation(gate_up, "gelu")[:, :32], exact) < BOUND[dtype]
    assert (
        error(reference.rms_norm(x, weight.float(), 1e-3), normed(x, weight, 1e-3)) < BOUND[dtype]
    )


@pytest.mark.parametrize("dtype", list(BOUND), ids=str)
def test_layer_norm(dtype: torch.dtype) -> None:
    """eps outside the root, a variance about zero instead of the mean, a bias that is scaled."""
    x = torch.randn(7, 48).to(dtype) + 2
    weight, bias = torch.randn(2, 48).to(dtype)
    centred = x.double() - x.double().mean(-1, keepdim=True)
    want = centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    assert error(reference.layer_norm(x, None, None, 1e-3), want) < BOUND[dtype]
    want = want * weight.double() + bias.double()
    assert error(reference.layer_norm(x, weight, bias, 1e-3), want) < BOUND[dtype]


@pytest.mark.parametrize("dtype", list(BOUND), ids=str)
def test_xielu(dtype: torch.dtype) -> None:
    """The branches exchanged, a softplus forgotten, parameters rounded to 16 bits."""
    x = torch.randn(5, 64).to(dtype)
    alpha_p, alpha_n, beta, eps = torch.tensor([0.3, -0.7, 0.5, -1e-6]).double()
    wide = x.double()
    positive, negative = alpha_p.exp().log1p(), beta + alpha_n.exp().log1p()
    below = (torch.expm1(torch.minimum(wide, eps)) - wide) * negative
    want = torch.where(wide > 0, positive * wide * wide, below) + beta * wide
    parameters = torch.tensor([0.3, -0.7, 0.5, -1e-6])
    assert error(reference.xielu(x, parameters), want) < BOUND[dtype]


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("shape", [(4, 2, 16, 16), (9, 3, 8, 8), (5, 5, 16, 8)], ids=str)
@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.float32, torch.bfloat16)], ids=str)
def test_rope_kv_write(
    shape: tuple[int, int, int, int], norm: bool, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """The wrong half rotated, a key at another head's place, a padding token written to a slot."""
    num_heads, num_kv_heads, head_dim, rotary = shape
    activations, stored = dtypes
    meta = lay_out([((5, 2), 6, 1), ((1, 7, 3), 3, 6)], BLOCK, padding=2)
    num_tokens = len(meta.slots)
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=activations)
    cos_sin = torch.randn(16, rotary)
    q_norm, k_norm = torch.randn(2, head_dim, dtype=activations)
    caches = dirty_caches(9, num_kv_heads, head_dim, stored)
    heads = qkv.view(num_tokens, -1, head_dim).clone()
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), 1)
    if norm:
        q, k = normed(q, q_norm, 1e-6), normed(k, k_norm, 1e-6)
    norms = (q_norm, k_norm) if norm else (None, None)
    out = reference.rope_kv_write(RopeInputs(qkv, cos_sin, *norms, 1e-6, *caches, num_heads), meta)
    assert error(out, rotated(q, cos_sin, meta.positions)) < BOUND[activations]
    written = meta.slots[:-2]
    at = (written // BLOCK, slice(None), written % BLOCK)
    assert error(caches[0][at], rotated(k, cos_sin, meta.positions)[:-2]) < BOUND[stored]
    assert error(caches[1][at], v[:-2]) < BOUND[stored]
    for cache in caches:  # nothing beside the slots was touched
        cache[at] = torch.nan
        assert cache.isnan().all()


STEPS = {
    "decodes": [((3, 1, 8), 9, 1), ((5,), 0, 1), ((2, 6), 7, 1)],
    "decodes of very different lengths": [
        (tuple(range(1, 41)), 158, 1),
        *(((41 + i,), i, 1) for i in range(3)),
        (tuple(range(45, 85)), 150, 1),
    ],
    "one long prefill": [((4, 0, 7), 0, 11)],
    "chunk after a prefix": [((4, 0, 7), 5, 6)],
    "one token that is no decode": [((1, 2), 0, 7), ((4, 0, 7), 9, 1)],
    "decodes, chunks and prefills": [
        ((3, 1, 8), 9, 1),
        ((2,), 0, 1),
        ((4, 0, 7), 5, 7),
        ((5, 6), 0, 8),
        ((9, 10, 11), 8, 2),
    ],
    "shared prefix": [((3, 1, 8), 9, 1), ((3, 1, 7), 8, 4), ((3, 2), 4, 3)],
}


@pytest.mark.parametrize("heads", [(3, 3), (6, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("step", list(STEPS))
def test_attention(step: str, heads: tuple[int, int]) -> None:
    """Masks off by one after a prefix, padding of the batch attended to, stale NaN let through."""
    num_heads, num_kv_heads = heads
    head_dim, padding = 16, 3
    entries = STEPS[step]
    meta = lay_out(entries, BLOCK, padding)
    caches = dirty_caches(100, num_kv_heads, head_dim, torch.float32)
    for blocks, start, length in entries:
        for position in range(start + length):
            at = (blocks[position // BLOCK], slice(None), position % BLOCK)
            if caches[0][at].isnan().any():
                caches[0][at], caches[1][at] = torch.randn(2, num_kv_heads, head_dim)
    q = torch.randn(len(meta.slots), num_heads, head_dim)
    want = attended(q, caches, 0.3, meta)
    out = reference.attention(AttentionInputs(q, *caches, 0.3), meta)
    assert error(out[:-padding], want) < BOUND[torch.float32]
    assert out.isfinite().all()
    bare = lay_out(entries, BLOCK)
    caches = caches.bfloat16()
    reference.prepare(bare, num_heads, caches[0])
    out = reference.attention(AttentionInputs(q[:-padding].bfloat16(), *caches, 0.3), bare)
    assert out.dtype == torch.bfloat16
    assert error(out, want) < 2e-2


def test_a_plan_serves_every_layer() -> None:
    """Buffers that layers share must not keep the keys of the layer before."""
    meta = lay_out(STEPS["decodes"], BLOCK)
    reference.prepare(meta, 4, torch.empty(9, 2, BLOCK, 16))
    q = torch.randn(3, 4, 16)
    outs = []
    for _ in range(2):
        caches = torch.randn(2, 9, 2, BLOCK, 16)
        outs.append(reference.attention(AttentionInputs(q, *caches, 0.25), meta))
        assert error(outs[-1], attended(q, caches, 0.25, meta)) < BOUND[torch.float32]
    assert error(*outs) > 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_packed_linear(dtype: torch.dtype, biased: bool) -> None:
    """A lost bias, or a rounding beyond that of the weight's storage."""
    weight = (torch.randn(48, 40) * 0.02).to(dtype)
    bias = torch.randn(48).to(dtype) if biased else None
    packed = pack(weight, bias)
    if packed is None:
        pytest.skip("this build of torch has no FBGEMM")
    for rows in (1, 3, 32, 130):
        x = torch.randn(rows, 40)
        want = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        assert error(packed(x), want) < 1e-5


def test_pack_refuses_what_float16_cannot_hold() -> None:
    """A bfloat16 weight above 65504 would silently become the largest float16."""
    assert pack(torch.tensor([[1e5, 1.0]], dtype=torch.bfloat16), None) is None
    assert pack(torch.ones(2, 2), None) is None


def test_a_machine_without_a_compiler_packs_no_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that cannot start there, or float32 weights that are rounded to 16 bits."""

    def none() -> None:
        raise CompilerUnavailable("none here")

    monkeypatch.setattr(dense, "check", none)
    assert pack(torch.ones(128, 64), None) is None
    assert not dense.PackedLinear.fits(128, 64)
