"""Generated CPU kernels against the reference ones. On a machine that cannot compile: skipped."""

import copy
import random
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.attention.inputs import AttentionInputs
from kernels.cpu.argmax import argmax
from kernels.cpu.attention import attention_for
from kernels.cpu.codegen import compiler
from kernels.cpu.codegen.compiler import compile_ir, has_int8
from kernels.cpu.codegen.processor import CompilerUnavailable, amx_bf16, dot_bf16, lanes
from kernels.cpu.gemm import tiled_bf16
from kernels.cpu.gemm.dense import PackedInt8, PackedLinear
from kernels.cpu.gemm.panels import GATES
from kernels.dispatch import kernels_for
from kernels.kv.inputs import RopeInputs
from kernels.reference import Kernels
from tests.kernels.layout import lay_out
from tests.kernels.test_reference import dirty_caches, error, normed

BLOCK = 4
reference, native = Kernels(), kernels_for("cpu")


def able() -> bool:
    try:
        lanes()
        compile_ir("define void @nothing(ptr %args) {\n  ret void\n}\n")
    except CompilerUnavailable:
        return False
    return True


pytestmark = pytest.mark.skipif(not able(), reason="no compiler for this machine")
needs_int8 = pytest.mark.skipif(not has_int8(), reason="no 8-bit dot products")


def test_one_thread_compiles_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing threads that find LLVM half set up: the engine's process dies of signal 11."""
    inside, most, compiled = 0, 0, []

    def slow(ir: str) -> bytes:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        compiled.append(ir)
        time.sleep(0.02)
        inside -= 1
        return b""

    monkeypatch.setattr(compiler, "_object_code", slow)
    monkeypatch.setattr(compiler, "load_object", lambda elf: {})
    modules = [f"; module {number % 4} of a test" for number in range(12)]
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(compile_ir, modules))
    assert most == 1 and sorted(compiled) == sorted(set(modules))


@pytest.mark.parametrize("width", [1, 15, 64, 65, 127, 1000, 49152])
@pytest.mark.parametrize("threads", [1, 2])
def test_argmax(width: int, threads: int) -> None:
    """The last of equals, or one of another lane; numbers behind the last whole vector unseen, or
    the next row's seen; a NaN that a number after it hides."""
    generator = np.random.default_rng(width)
    x = generator.standard_normal((7, width + 3)).astype(np.float32)[:, :width]
    x[1] = np.round(x[1])
    x[2] = -np.inf
    x[3, width // 2] = np.nan
    x[4, -1] = np.inf
    x[5] = np.where(x[5] > 0, np.float32(0), np.float32(-0.0))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        places, best = argmax(x)
    finally:
        torch.set_num_threads(before)
    assert np.isnan(best[3])
    rows = [0, 1, 2, 4, 5, 6]
    assert places[rows].tolist() == x.argmax(1)[rows].tolist()
    assert best[rows].tolist() == x.max(1)[rows].tolist()


def products(linear: PackedLinear, rows: int, weight: Tensor, bias: Tensor) -> list[float]:
    """Return the errors of every way to call a linear layer, against float64."""
    width, eps = weight.shape[1], 1e-5
    x, norm = torch.randn(rows, width), torch.rand(width)
    residual = torch.randn(rows, weight.shape[0])
    plain = x.double() @ weight.T + bias
    after = normed(x, norm, eps) @ weight.T + bias
    pairs = [
        (linear(x), plain),
        (linear.add_to_residual(x, residual.clone()), plain + residual),
        (linear.after_norm(x, norm, eps), after),
    ]
    pairs += [
        (linear.gated_after_norm(x, norm, eps, gate), reference.GATES[gate](after))
        for gate in GATES
    ]
    return [error(out, want) for out, want in pairs]


@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_products(dtype: torch.dtype, biased: bool) -> None:
    """Weights in the wrong lane, rows lost between tiles, gate and up exchanged."""
    weight = (torch.randn(192, 96) * 0.05).to(dtype)
    bias = torch.randn(192).to(dtype) if biased else None
    linear = PackedLinear(weight, bias)
    added = torch.zeros(192).double() if bias is None else bias.double()
    # Pairs of bfloat16 are multiplied exactly; what is lost is in the rows of x, half a step each.
    bound = 4e-3 if dtype == torch.bfloat16 and dot_bf16() else 2e-6
    for rows in (1, 2, 11, 13, 40):
        assert max(products(linear, rows, weight.double(), added)) < bound


@pytest.fixture(params=["tiles", "pairs"])
def bfloat16(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use bfloat16 matrix tiles, if the processor has them, or pairs of numbers."""
    if request.param == "pairs":
        monkeypatch.setattr("kernels.cpu.gemm.dense.amx_bf16", lambda: False)
    elif not amx_bf16():
        pytest.skip("no AMX")


@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_in_bfloat16(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair of columns exchanged is as far off as another row; so is a row that another thread had
    not rounded yet. Of rows that bfloat16 holds, products are float32's."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    weight = (torch.randn(192, 96) * 0.05).bfloat16()
    x = torch.randn(40, 96).bfloat16().float()
    linear = PackedLinear(weight, None)
    for rows in (1, 7, 8, 16, 33, 40):
        assert error(linear(x[:rows]), x[:rows].double() @ weight.double().T) < 2e-6


@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize("threads", [1, 2])
def test_blocks_of_rows(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a block of rows, or the last tile of one, that is lost, written elsewhere or read from
    another thread's; a result that depends on how rows were divided."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    weight = (torch.randn(192, 96) * 0.05).bfloat16()
    bias = torch.randn(192)
    linear = PackedLinear(weight, bias)
    for rows in (64, 129, 300, 530):
        assert max(products(linear, rows, weight.double(), bias.double())) < 4e-3
    x, residual, norm = torch.randn(530, 96), torch.randn(530, 192), torch.rand(96)
    few = (slice(0, 9), slice(250, 283), slice(515, 530))
    ways = (
        lambda part: linear(x[part].contiguous()),
        lambda part: linear.add_to_residual(x[part].contiguous(), residual[part].clone()),
        lambda part: linear.gated_after_norm(x[part].contiguous(), norm, 1e-5, "silu"),
    )
    for way in ways:
        whole = way(slice(None))
        for part in few:
            assert torch.equal(way(part), whole[part])


def test_blocks_fill_the_threads() -> None:
    """Bug: a thread that waits for another one's block; blocks that no second-level cache holds;
    few rows that are not shared by panels."""
    assert tiled_bf16.block_rows(127, 2, 1216) == 0
    for threads in (1, 2, 3, 8):
        for rows in range(64 * threads, 4000, 37):
            for row_bytes in (832, 1216, 3136, 28736):
                length = tiled_bf16.block_rows(rows, threads, row_bytes)
                blocks = -(-rows // length)
                assert length % tiled_bf16.MOST == 0 and length * row_bytes <= 1 << 20
                most = -(-blocks // threads)  # of a thread
                assert most * length <= rows / threads + most * tiled_bf16.MOST


def test_without_products_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that has none multiplies in float32, and loses nothing of x."""
    monkeypatch.setattr("kernels.cpu.gemm.dense.dot_bf16", lambda: False)
    weight = (torch.randn(192, 96) * 0.05).bfloat16()
    none = torch.zeros(192).double()
    for rows in (1, 13):
        assert max(products(PackedLinear(weight, None), rows, weight.double(), none)) < 2e-6


@needs_int8
def test_int8_products() -> None:
    """A wrong scale, or sums that wrap around: the error must be that of rounding to 8 bits."""
    torch.manual_seed(0)
    weight = (torch.randn(192, 96) * 0.05).bfloat16()
    weight[5] *= 50  # an output of its own scale
    weight[6] = 0
    bias = torch.randn(192)
    linear = PackedInt8(weight, bias)
    for rows in (1, 2, 11, 13, 40):
        assert max(products(linear, rows, weight.double(), bias.double())) < 3e-2
    x = torch.zeros(2, 96)
    x[1] = 1e20
    assert torch.equal(linear(x)[0], bias)
    assert linear(x).isfinite().all()
    # The ends of the range: sums must not wrap around.
    weight = torch.full((64, 96), 127.0)
    weight[::2] *= -1
    for x in (weight[:1], -weight[:1]):
        assert error(PackedInt8(weight, None)(x), x @ weight.T) < 1e-6


@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize(
    "kind, dtype",
    [
        (PackedLinear, torch.bfloat16),
        (PackedLinear, torch.float32),
        pytest.param(PackedInt8, torch.bfloat16, marks=needs_int8),
    ],
    ids=str,
)
def test_a_row_does_not_depend_on_its_neighbours(
    kind: type[PackedLinear], dtype: torch.dtype
) -> None:
    """A request's text would change with what else is in the batch."""
    linear = kind((torch.randn(128, 96) * 0.05).to(dtype), None)
    x, norm = torch.randn(50, 96) * torch.rand(50, 1), torch.rand(96)
    whole = linear.after_norm(x, norm, 1e-5)
    for rows in (1, 7, 13, 33):
        for at in range(0, 50 - rows, rows):
            part = linear.after_norm(x[at : at + rows].contiguous(), norm, 1e-5)
            assert torch.equal(part, whole[at : at + rows])


@pytest.mark.usefixtures("bfloat16")
def test_nan_in_nan_out() -> None:
    """A NaN that is lost would let a broken step pass for a good one."""
    x = torch.zeros(3, 96)
    x[1, 5] = torch.nan
    out = PackedLinear(torch.randn(64, 96).bfloat16(), None)(x)
    assert out[1].isnan().all() and not out[[0, 2]].any()


@pytest.mark.parametrize("width", [48, 384, 1000])
def test_layer_norms_and_gelu(width: int) -> None:
    """Bug: a variance that loses its digits where the mean is large; a missing bias read as one;
    an error function whose error grows with |x|."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(70, width, generator=generator) * 3 + 20
    weight, bias = torch.randn(2, width, generator=generator)
    for parts in ((weight, bias), (weight, None), (None, None)):
        own = [None if part is None else part.double() for part in parts]
        want = torch.nn.functional.layer_norm(x.double(), (width,), *own, 1e-6)
        output = native.layer_norm(x, *parts, 1e-6)
        assert float((output - want).abs().max()) < 2e-5
        assert torch.equal(native.layer_norm(x[9:10].clone(), *parts, 1e-6), output[9:10])
    both = torch.linspace(-14, 14, 20 * width).view(10, 2 * width)
    exact = torch.nn.functional.gelu(both.double())
    assert float((native.activation(both, "gelu") - exact).abs().max()) < 1e-6
    gated = exact[:, :width] * both[:, width:]
    assert float((native.gelu_mul(both) - gated).abs().max()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(9, 3, 64, 64), (4, 1, 128, 128), (4, 4, 64, 32)], ids=str)
@pytest.mark.parametrize("qk_norm", [False, True])
def test_attention(dtype: torch.dtype, shape: tuple[int, int, int, int], qk_norm: bool) -> None:
    """Keys of another block or head, the last key missed, what others left in a block read."""
    heads, kv_heads, dim, rotary = shape
    rng = random.Random(0)
    caches = dirty_caches(150, kv_heads, dim, dtype)
    free = rng.sample(range(150), 150)
    entries = []
    for length in (1, 1, 1, 1, 7, 9):
        total = max(rng.randint(1, 70), length)
        blocks = [free.pop() for _ in range(-(-total // BLOCK))]
        for at in range(total - length):
            row = torch.randn(2, kv_heads, dim).to(dtype)
            caches[:, blocks[at // BLOCK], :, at % BLOCK] = row
        entries.append((blocks, total - length, length))
    meta = lay_out(entries, BLOCK, padding=2)
    theirs, expected = copy.copy(meta), caches.clone()
    qkv, cos_sin = (
        torch.randn(len(meta.slots), (heads + 2 * kv_heads) * dim),
        torch.randn(80, rotary),
    )
    norms = (torch.rand(dim), torch.rand(dim)) if qk_norm else (None, None)
    assert attention_for(heads, kv_heads, dim, BLOCK, rotary, qk_norm, dtype) is not None
    q = native.rope_kv_write(RopeInputs(qkv, cos_sin, *norms, 1e-5, *caches, heads), meta)
    want = reference.rope_kv_write(RopeInputs(qkv, cos_sin, *norms, 1e-5, *expected, heads), theirs)
    assert error(q, want) < 1e-6
    assert torch.equal(caches.isnan(), expected.isnan())
    assert error(caches.nan_to_num(), expected.nan_to_num()) < 1e-4
    out = native.attention(AttentionInputs(q, *caches, 0.1), meta)
    assert out.isfinite().all()
    assert (
        error(out[:-2], reference.attention(AttentionInputs(want, *expected, 0.1), theirs)[:-2])
        < 3e-3
    )


@pytest.mark.parametrize(
    "kernels", [reference, native, kernels_for("cpu", True)], ids=lambda x: type(x).__name__
)
@pytest.mark.parametrize("dim", [64, 20], ids=["generated", "torch"])
def test_gates_behind_queries(kernels: Kernels, dim: int) -> None:
    """A gate taken for the next head's query, as a key or as a value: queries and caches are those
    of the same rows without gates."""
    heads, kv_heads = 4, 2
    qkv = torch.randn(10, (2 * heads + 2 * kv_heads) * dim)
    queries = [qkv[:, 2 * head * dim :][:, :dim] for head in range(heads)]
    plain = torch.cat((*queries, qkv[:, 2 * heads * dim :]), 1)
    cos_sin, outputs = torch.randn(80, dim), []
    for rows, gated in ((plain, False), (qkv, True)):
        meta = lay_out([((3, 1, 8, 9, 2), 17, 1), ((5,), 2, 1), ((4, 0, 7), 3, 8)], BLOCK)
        caches = torch.zeros(2, 12, kv_heads, BLOCK, dim).bfloat16()
        inputs = RopeInputs(rows, cos_sin, None, None, 1e-5, *caches, heads, gated)
        outputs.append((kernels.rope_kv_write(inputs, meta), caches))
    assert outputs[0][1].count_nonzero()
    assert all(map(torch.equal, *outputs))


def test_shapes_that_do_not_fit_are_refused() -> None:
    """A panel or a head that is not full would read and write beside its memory."""
    assert not PackedLinear.fits(4 * lanes(), 2 * lanes() + 4)
    assert not PackedLinear.fits(3 * lanes(), 2 * lanes())
    assert attention_for(4, 2, 20, 16, 20, False, torch.bfloat16) is None
    assert attention_for(4, 2, 64, 16, 64, False, torch.float32) is None


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "special",
    [{}, {"softcap": 4.0}, {"sinks": torch.ones(4)}, {"slopes": torch.rand(4)}],
    ids=["plain", "cap", "sinks", "slopes"],
)
@pytest.mark.parametrize("sees", [(0, 0), (6, 0), (0, 8)], ids=["all", "window", "chunk"])
def test_what_layers_do_otherwise(
    sees: tuple[int, int], special: dict[str, Tensor | float], deterministic: bool
) -> None:
    """Layers of one step that rotate heads otherwise, and decodes that see a part of their keys or
    change their scores: a generated kernel taken that reads all of them, or that is another
    layer's."""
    entries = [((3, 1, 8, 9, 2), 17, 1), ((5,), 2, 1), ((4, 0, 7), 3, 8)]
    meta = lay_out(entries, BLOCK)
    meta.window, meta.chunk = sees
    kernels = kernels_for("cpu", deterministic)
    for rotary in (64, 32, 64):
        caches = torch.randn(2, 12, 2, BLOCK, 64).bfloat16()
        expected, theirs = caches.clone(), copy.copy(meta)
        theirs.plan = None
        qkv, cos_sin = torch.randn(len(meta.slots), 8 * 64), torch.randn(80, rotary)
        q = kernels.rope_kv_write(RopeInputs(qkv, cos_sin, None, None, 1e-5, *caches, 4), meta)
        want = reference.rope_kv_write(
            RopeInputs(qkv, cos_sin, None, None, 1e-5, *expected, 4), theirs
        )
        assert error(q, want) < 1e-6
        out = kernels.attention(AttentionInputs(q, *caches, 0.1, **special), meta)
        assert (
            error(
                out, reference.attention(AttentionInputs(want, *expected, 0.1, **special), theirs)
            )
            < 6e-3
        )


def test_a_gate_that_is_not_generated_is_named() -> None:
    """A KeyError out of a table of names, that says nothing of the layer."""
    linear = PackedLinear(torch.randn(64, 32).bfloat16(), None)
    with pytest.raises(ValueError, match="the gate 'relu'"):
        linear.gated_after_norm(torch.randn(1, 32), torch.ones(32), 1e-5, "relu")
