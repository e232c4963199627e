"""Every Triton kernel compiles for Hopper, as its launcher calls it; no GPU is needed for that.

The interpreter accepts types and shapes that the compiler does not. Here the launchers run on
unfilled CPU tensors, and each launch ends where the machine code is there.
"""

import importlib
import itertools
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import kernels
from kernels.metadata import AttentionMeta, LoraLinear, LoraStep

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("needs Triton's compiler", allow_module_level=True)

from triton.runtime import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from kernels.activation import activation, gelu_tanh_mul, silu_mul, xielu  # noqa: E402
from kernels.attention.decode import attention_decode  # noqa: E402
from kernels.attention.decode_plan import plan  # noqa: E402
from kernels.attention.latent.decode import latent_decode, plan_latent  # noqa: E402
from kernels.attention.latent.prefill import latent_prefill  # noqa: E402
from kernels.attention.latent.write import latent_write  # noqa: E402
from kernels.attention.paged import attend_chunks, attend_decodes  # noqa: E402
from kernels.attention.prefill import attention_prefill  # noqa: E402
from kernels.batch import apply_updates, assemble  # noqa: E402
from kernels.experts import grouped as moe  # noqa: E402
from kernels.experts import packed as packed_moe  # noqa: E402
from kernels.experts.few import few  # noqa: E402
from kernels.experts.few_route import few_route  # noqa: E402
from kernels.experts.reference import ExpertWeights, PackedExperts  # noqa: E402
from kernels.experts.routing import CLAMPED, Routing  # noqa: E402
from kernels.experts.topk import topk  # noqa: E402
from kernels.gemm.deterministic import TILES, product  # noqa: E402
from kernels.gemm.fp8 import round_rows  # noqa: E402
from kernels.gemm.gemv import gemv  # noqa: E402
from kernels.gemm.packed_dot import expand, packed_dot  # noqa: E402
from kernels.gemm.packed_few import packed_few  # noqa: E402
from kernels.gemm.packed_gemv import packed_gemv  # noqa: E402
from kernels.gemm.small_m import few_rows  # noqa: E402
from kernels.kv.format import FORMATS  # noqa: E402
from kernels.kv.quantized import QuantizedKV  # noqa: E402
from kernels.kv.write import rope_kv_write  # noqa: E402
from kernels.lora import lora_add, lora_gated, tile_rows  # noqa: E402
from kernels.norm import layer_norm, rms_norm  # noqa: E402
from kernels.packed import E2M1, Format, PackedWeight  # noqa: E402
from kernels.sampling.choose import choose  # noqa: E402
from kernels.sampling.edits import add_bias, apply_masks, ban, penalise  # noqa: E402
from kernels.sampling.filters import filter_thresholds  # noqa: E402
from kernels.sampling.layout import NUM_WORDS  # noqa: E402
from kernels.sampling.logprobs import logprobs  # noqa: E402
from tests.kernels.compiled_mixers import convolution, delta, mamba  # noqa: E402
from tests.kernels.hopper import Ampere, Hopper  # noqa: E402

SHARED_MEMORY = 227 * 1024  # bytes that one program may have on sm_90
BLOCK_SIZE, NUM_BLOCKS, EPS = 16, 64, 1e-5


class Dims(NamedTuple):
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    qk_norm: bool


MODELS = {
    "llama-8b": Dims(4096, 14336, 32, 8, 128, 128256, False),
    "qwen3-0.6b": Dims(1024, 3072, 16, 8, 128, 151936, True),
    "smollm2-135m": Dims(576, 1536, 9, 3, 64, 49152, False),
}


@dataclass
class Launches:
    """What has been launched: (kernel, compiled) pairs; `compile` False only takes the names."""

    seen: list[tuple[str, Any]]
    compile: bool = True


def modules() -> Iterator[ModuleType]:
    for module in pkgutil.walk_packages(kernels.__path__, "kernels."):
        yield importlib.import_module(module.name)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    found = Launches([])
    run: Callable[..., Any] = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = None
        if found.compile:
            compiled = run(self, *args, grid=grid, warmup=True, **options)
        found.seen.append((self.__name__, compiled))
        return compiled

    monkeypatch.setattr(driver, "_active", Hopper())
    monkeypatch.setattr(JITFunction, "run", compile_only)
    for module in modules():
        for name, value in (
            ("pdl", lambda device: {"PDL": True, "launch_pdl": True}),
            ("num_sms", lambda device: 132),
        ):
            if hasattr(module, name) and module.__name__ != "kernels.pdl":
                monkeypatch.setattr(module, name, value)
    return found


def bf16(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def int32(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def int64(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def layers(d: Dims) -> None:
    """Norms, products and activations of a layer."""
    rms_norm(bf16(3, d.hidden), bf16(d.hidden), EPS)
    silu_mul(bf16(3, 2 * d.intermediate))
    gelu_tanh_mul(bf16(3, 2 * d.intermediate))
    x, norm = bf16(1, d.hidden), bf16(d.hidden)
    qkv = (d.num_heads + 2 * d.num_kv_heads) * d.head_dim
    gemv(x, bf16(qkv, d.hidden), norm=norm, eps=EPS)
    gemv(x, bf16(qkv, d.hidden), bf16(qkv), norm=norm, eps=EPS)
    for gate in ("silu", "gelu_pytorch_tanh"):
        gemv(x, bf16(2 * d.intermediate, d.hidden), norm=norm, eps=EPS, gate=gate)
    gemv(bf16(1, d.intermediate), bf16(d.hidden, d.intermediate), residual=x)
    gemv(x, bf16(d.vocab, d.hidden))
    for tokens in (2, 3, 4):
        few_rows(bf16(tokens, d.hidden), bf16(qkv, d.hidden), bf16(qkv))
        x = bf16(tokens, d.hidden)
        few_rows(bf16(tokens, d.intermediate), bf16(d.hidden, d.intermediate), residual=x)
    for dtype, tiles in ((torch.bfloat16, TILES[2]), (torch.float32, TILES[4])):
        x, weight = bf16(5, d.hidden).to(dtype), bf16(qkv, d.hidden).to(dtype)
        for tile in tiles:
            product(x, weight, None, None, tile)


def packed(d: Dims) -> None:
    """Products with weights of 4 and 8 bits: one token, a few, many."""
    forms = [
        Format(4, 64, zero=8),
        Format(4, 32, torch.bfloat16, offset="add"),
        Format(4, 64, torch.float32, offset="shift"),
        Format(4, 32, torch.bfloat16, zero=12, table=E2M1),
        Format(4, 16, torch.float32, zero=128, table=tuple(range(16))),
        Format(8, d.hidden, torch.float32, zero=128),
        Format(8, d.hidden, torch.float32, code="e4m3"),
        Format(8, 64, torch.float32, code="e4m3", rows=64),
    ]
    qkv = (d.num_heads + 2 * d.num_kv_heads) * d.head_dim
    x, norm, device = bf16(1, d.hidden), bf16(d.hidden), torch.device("cpu")
    for form in forms:
        weight = PackedWeight(form, qkv, d.hidden, None, device)
        gated = PackedWeight(form, 2 * d.intermediate, d.hidden, None, device)
        packed_gemv(x, weight, norm=norm, eps=EPS)
        packed_gemv(x, weight, residual=bf16(1, qkv))
        packed_gemv(x, gated, norm=norm, eps=EPS, gate="silu")
        packed_dot(bf16(8, d.hidden), weight, bf16(8, qkv))
        expand(weight, x)
    few = [
        Format(4, 128, zero=8),
        Format(4, 128, offset="add"),
        Format(4, 128, offset="shift"),
        forms[-3],
        forms[-2],
    ]
    for form in few if d.hidden % 256 == 0 else ():
        packed_few(bf16(4, d.hidden), PackedWeight(form, qkv, d.hidden, bf16(qkv), device))
        packed_few(bf16(1, d.hidden), PackedWeight(form, qkv, d.hidden, None, device), bf16(1, qkv))
    round_rows(bf16(64, d.hidden))
    round_rows(bf16(64, d.hidden), norm, EPS)
    for tokens in (32, 64, 256):
        packed_dot(bf16(tokens, d.hidden), PackedWeight(forms[0], qkv, d.hidden, bf16(qkv), device))


def plain(d: Dims) -> None:
    """What networks without gates and RMS norms launch."""
    for name in ("silu", "gelu_pytorch_tanh", "gelu", "relu", "relu2"):
        activation(bf16(64, d.intermediate), name)
    xielu(bf16(64, d.intermediate), bf16(4))
    weight = bf16(d.hidden)
    for scale, bias in ((weight, weight), (weight, None), (None, None)):
        layer_norm(bf16(64, d.hidden), scale, bias, 1e-5)


def attention(d: Dims) -> None:
    """Rotation and cache write, then both kinds of attention."""
    heads, dim = d.num_heads + 2 * d.num_kv_heads, d.head_dim
    k_cache, v_cache = (bf16(NUM_BLOCKS, d.num_kv_heads, BLOCK_SIZE, dim) for _ in range(2))
    norms = (bf16(dim), bf16(dim)) if d.qk_norm else (None, None)
    for num_tokens in (5, 300):  # with and without an early start
        meta = AttentionMeta(
            positions=int32(num_tokens),
            slots=int64(num_tokens),
            query_start=int32(3),
            kv_len=int32(2),
            block_table=int32(2, 40),
            num_decodes=0,
            max_query_len=num_tokens,
            max_kv_len=600,
            counts=int32(2),
        )
        qkv, cos_sin = bf16(num_tokens, heads * dim), torch.empty(1024, dim)
        q = rope_kv_write(qkv, cos_sin, *norms, EPS, k_cache, v_cache, d.num_heads, meta)
    for deterministic in (False, True):
        attention_prefill(
            q,
            k_cache,
            v_cache,
            torch.empty_like(q),
            dim**-0.5,
            meta,
            deterministic,
        )
    for entries in (1, 20, 64, 512):
        splits = plan(int32(entries), d.num_heads, k_cache, 8192, int32(1))
        q = bf16(entries, d.num_heads, dim)
        table = int32(entries, 512)
        attention_decode(q, k_cache, v_cache, torch.empty_like(q), table, dim**-0.5, splits)
    # What some layers see and how their scores are changed (tests/kernels/test_masks.py).
    heads32 = torch.empty(d.num_heads)
    for window, chunk, how in (
        (1024, 0, (0.0, None, None)),
        (0, 8192, (50.0, None, None)),
        (128, 0, (0.0, heads32, None)),
        (0, 0, (0.0, None, heads32)),
    ):
        splits = plan(int32(20), d.num_heads, k_cache, 8192, int32(1), window, chunk)
        q = bf16(20, d.num_heads, dim)
        out = torch.empty_like(q)
        attention_decode(q, k_cache, v_cache, out, int32(20, 512), dim**-0.5, splits, *how)
        meta.window, meta.chunk = window, chunk
        for deterministic in (False, True):
            attention_prefill(q, k_cache, v_cache, out, dim**-0.5, meta, deterministic, *how)


def quantized_attention(d: Dims) -> None:
    """The same over keys and values in fewer bits."""
    heads, dim = d.num_heads + 2 * d.num_kv_heads, d.head_dim
    norms = (bf16(dim), bf16(dim)) if d.qk_norm else (None, None)
    heads32 = torch.empty(d.num_heads)
    for form in FORMATS.values():
        if form.name == "fp8" and driver.active.get_current_target().arch < 89:
            continue  # engine/resolve.py refuses it there
        form = replace(form, turn=dim // 2) if form.name == "int4" else form
        shape = (NUM_BLOCKS, d.num_kv_heads, BLOCK_SIZE, dim)
        k_cache, v_cache = (QuantizedKV.empty(form, shape) for _ in range(2))
        meta = AttentionMeta(
            int32(5), int64(5), int32(3), int32(2), int32(2, 40), 0, 5, 600, counts=int32(2)
        )
        qkv, cos_sin = bf16(5, heads * dim), torch.empty(1024, dim)
        q = rope_kv_write(qkv, cos_sin, *norms, EPS, k_cache, v_cache, d.num_heads, meta)
        out = torch.empty_like(q)
        for deterministic in (False, True):
            attend_chunks(q, k_cache, v_cache, out, dim**-0.5, meta, deterministic)
        meta.window = 1024
        attend_chunks(q, k_cache, v_cache, out, dim**-0.5, meta, False, 50.0, heads32, None)
        q, table = bf16(512, d.num_heads, dim), int32(512, 512)
        out = torch.empty_like(q)
        for entries in (1, 20, 64, 512):
            splits = plan(int32(entries), d.num_heads, k_cache, 8192, int32(1))
            attend_decodes(q[:entries], k_cache, v_cache, out, table, dim**-0.5, splits)
        for how in ((50.0, heads32, None), (0.0, None, heads32)):
            attend_decodes(q, k_cache, v_cache, out, table, dim**-0.5, splits, *how)


def sampling(d: Dims) -> None:
    """Edits, filters, choice and log-probabilities over the vocabulary."""
    count = 2
    logits, words = bf16(count, d.vocab), int32(count + 1, NUM_WORDS)
    rows, positions, tokens = int64(count), int64(count), int32(count + 1, 1025)
    add_bias(logits, rows, words)
    penalise(logits, rows, positions, words, tokens, int32(count, d.vocab))
    ban(logits, rows, positions, words)
    apply_masks(logits, int32(count), int32(count, -(-d.vocab // 32)))
    filters = filter_thresholds(logits, rows, words)
    for sampled, wanted in ((False, None), (True, None), (True, filters)):
        choose(logits, rows, positions, words, sampled=sampled, filters=wanted)
    for k in (0, 1, 20):
        logprobs(logits, positions, k, rows, words)
    logprobs(logits, positions, 5)


def assembly(_: Dims) -> None:
    """Updates of the rows and the layout of a step."""
    tokens, table, count = int32(5, 1025), int32(5, 64), 4
    apply_updates(int32(30), tokens, table, 2, 3)
    assemble(
        int32(count),
        int32(count),
        int32(count + 1),
        tokens,
        table,
        int32(64),
        int32(64),
        int64(64),
        int32(count),
        int32(count, 64),
        BLOCK_SIZE,
        4,
    )


def adapters(d: Dims) -> None:
    """LoRA on all layers of a decoder layer, at decode and prefill sizes."""
    heads, kv = d.num_heads * d.head_dim, d.num_kv_heads * d.head_dim
    qkv = LoraLinear(0, d.hidden, (heads, kv, kv))
    out = LoraLinear(3, heads, (d.hidden,))
    gate_up = LoraLinear(4, d.hidden, (d.intermediate, d.intermediate))
    for num_tokens, slots, max_rank in ((1, 2, 16), (256, 2, 64), (256, 64, 64), (2048, 2, 256)):
        step = LoraStep(
            int32(num_tokens),
            int32(5, 3),
            tile_rows(num_tokens, slots),
            bf16(2, 1024),
            int32(2, 7, 4),
            torch.empty(1),
            max_rank,
        )
        lora_add(bf16(num_tokens, heads + 2 * kv), bf16(num_tokens, d.hidden), qkv, step)
        lora_add(bf16(num_tokens, d.hidden), bf16(num_tokens, heads), out, step)
        x, both = bf16(num_tokens, d.hidden), bf16(num_tokens, 2 * d.intermediate)
        for gate in ("silu", "gelu_pytorch_tanh"):
            lora_gated(both, x, gate_up, step, gate)


# Experts, how many a token has, the inner width and the hidden one: Qwen3-30B-A3B, gpt-oss-20b,
# OLMoE.
MIXTURES = {
    "llama-8b": (128, 8, 768, 2048),
    "qwen3-0.6b": (32, 4, 2880, 2880),
    "smollm2-135m": (64, 8, 1024, 2048),
}


def experts(d: Dims) -> None:
    """Choice and products of a layer of a mixture, of a few tokens and of many."""
    (count, chosen, size, hidden) = next(
        sizes for name, sizes in MIXTURES.items() if MODELS[name] == d
    )
    biased = size == hidden
    router, bias = bf16(count, hidden), bf16(count) if biased else None
    for score, correction in (("softmax", None), ("sigmoid", torch.empty(count))):
        routing = Routing(chosen, score)
        topk(bf16(3, count), routing, correction)
        few_route(bf16(2, hidden), bf16(hidden), EPS, router, bias, routing, correction)

    def stack(dtype: torch.dtype) -> ExpertWeights:
        one = torch.empty(1, 1, 1, dtype=dtype)  # without memory for the rest
        return ExpertWeights(
            one.expand(count, 2 * size, hidden),
            one.expand(count, hidden, size),
            bf16(count, 2 * size) if biased else None,
            bf16(count, hidden) if biased else None,
            CLAMPED if biased else "silu",
            7.0,
        )

    weights = stack(torch.bfloat16)
    for tokens in (1, 8):
        x, scale, ids = bf16(tokens, hidden), torch.empty(tokens, chosen), int32(tokens, chosen)
        few(x, scale, ids, weights, x)
        few(x, scale, ids, weights, None)
    x, scale, ids = bf16(64, hidden), torch.empty(64, chosen), int32(64, chosen)
    for tiles in (*(tiles for _, tiles in moe.TILES), moe.FIXED):
        moe.grouped(x, scale, ids, weights, x, tiles)
    weights.act, weights.weigh_input = "gelu_pytorch_tanh", True
    few(x[:2], scale[:2], ids[:2], weights, None)
    moe.grouped(x, scale, ids, weights, None)
    if not biased:
        for tiles in (moe.PLAIN, moe.FIXED):
            moe.grouped(x.float(), scale, ids, stack(torch.float32), None, tiles)


def experts_in_fewer_bits(d: Dims) -> None:
    """Of each way to decode: with PTX for pairs of codes, without, a scale a block."""
    (count, chosen, size, hidden) = next(
        sizes for name, sizes in MIXTURES.items() if MODELS[name] == d
    )
    biased = size == hidden
    forms = [
        Format(4, 32, torch.bfloat16, zero=12, table=E2M1),
        *([] if size % 128 else [Format(4, 128, offset="add")]),
        *([] if size % 128 else [Format(8, 128, torch.float32, code="e4m3", rows=128)]),
        None,
    ]
    x, scale, ids = bf16(64, hidden), torch.empty(64, chosen), int32(64, chosen)
    for form in forms:
        row = [Format(8, width, torch.float32, code="e4m3") for width in (hidden, size)]
        up, down = row if form is None else (form, form)
        stack = PackedExperts(
            PackedWeight(up, count * 2 * size, hidden, None, torch.device("cpu")),
            PackedWeight(down, count * hidden, size, None, torch.device("cpu")),
            bf16(count, 2 * size) if biased else None,
            bf16(count, hidden) if biased else None,
            CLAMPED if biased else "silu",
            7.0,
        )
        packed_moe.packed_experts(x[:1], scale[:1], ids[:1], stack, x[:1])
        for tile in (tile for _, tile in packed_moe.TILES[1:] if form is forms[0]):
            packed_moe.packed_experts(x, scale, ids, stack, None, tile)


# Heads, and elements of a head that do not turn: DeepSeek-V3, GLM-4.7-Flash, DeepSeek-V2-Lite.
LATENTS = {"llama-8b": (128, 128), "qwen3-0.6b": (20, 192), "smollm2-135m": (16, 128)}


def latent(d: Dims) -> None:
    """Latents of 512 and 64: their way into the cache, decodes, chunks; in float32 too."""
    heads, nope = next(sizes for name, sizes in LATENTS.items() if MODELS[name] == d)
    rank, rope = 512, 64
    for dtype in (torch.bfloat16, torch.float32):
        cache = torch.empty(NUM_BLOCKS, 1, BLOCK_SIZE, rank + rope, dtype=dtype)
        meta = AttentionMeta(
            int32(20), int64(20), int32(3), int32(2), int32(2, 40), 0, 20, 600, counts=int32(2)
        )
        down = torch.empty(20, heads * (nope + rope) + rank + rope, dtype=dtype)
        q = down[:, : -(rank + rope)].unflatten(1, (heads, nope + rope))
        norm, cos_sin = torch.empty(rank, dtype=dtype), torch.empty(1024, rope)
        q = latent_write(q, down[:, -(rank + rope) :], norm, EPS, cos_sin, cache, meta)
        absorbed = torch.empty(heads, 20, rank, dtype=dtype)
        out = torch.empty(20, heads, rank, dtype=dtype)
        latent_prefill(absorbed, q, cache, out, 0.1, meta)
        splits = plan_latent(int32(20), heads, rank, cache, 8192, int32(1))
        latent_decode(absorbed, q, cache, out, int32(20, 512), 0.1, splits)


PARTS = {
    part.__name__: part
    for part in (
        *(layers, packed, plain, attention, quantized_attention, latent),
        *(sampling, assembly, adapters, experts, experts_in_fewer_bits),
    )
}
MIXERS = {part.__name__: part for part in (delta, mamba, convolution)}


def cases() -> Iterator[Any]:
    """Every part at the sizes of every model; of the one in the middle, what it alone has."""
    for model, part in itertools.product(MODELS, {**PARTS, **MIXERS}):
        middle = model == "qwen3-0.6b" and part != "layers"
        again = (model, part) == ("smollm2-135m", "quantized_attention")  # heads of 64: 40 s
        yield pytest.param(model, part, marks=pytest.mark.long if middle or again else ())


@pytest.mark.slow
@pytest.mark.parametrize(("model", "part"), list(cases()))
def test_compiles_for_hopper(model: str, part: str, launches: Launches) -> None:
    """A kernel that only the interpreter has run fails on its first step on a GPU."""
    if part in MIXERS:
        MIXERS[part](model)
    else:
        PARTS[part](MODELS[model])
    assert launches.seen
    for name, compiled in launches.seen:
        assert compiled.asm["cubin"], name
        assert compiled.metadata.shared <= SHARED_MEMORY, name


@pytest.mark.slow
def test_codes_compile_for_ampere(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversion that begins with Hopper, or tiles for its memory: int8 and int4 keys run on an
    A100 too."""
    monkeypatch.setattr(driver, "_active", Ampere())
    for module in modules():
        if hasattr(module, "pdl") and module.__name__ != "kernels.pdl":
            monkeypatch.setattr(module, "pdl", lambda device: {"PDL": False})
    quantized_attention(MODELS["llama-8b"])
    for name, compiled in launches.seen:
        assert compiled.metadata.shared <= 163 * 1024, name


@pytest.mark.slow
def test_heads_of_512_fit(launches: Launches) -> None:
    """Tiles of keys that leave no room for each other: Gemma 4's full layers."""
    k_cache, v_cache, q = (
        bf16(NUM_BLOCKS, 4, 16, 512),
        bf16(NUM_BLOCKS, 4, 16, 512),
        bf16(20, 32, 512),
    )
    meta = AttentionMeta(
        int32(20), int64(20), int32(3), int32(2), int32(2, 40), 0, 20, 600, counts=int32(2)
    )
    rope_kv_write(
        bf16(20, 40 * 512), torch.empty(1024, 512), None, None, EPS, k_cache, v_cache, 32, meta
    )
    attention_prefill(q, k_cache, v_cache, torch.empty_like(q), 1.0, meta)
    splits = plan(int32(20), 32, k_cache, 8192, int32(1))
    attention_decode(q, k_cache, v_cache, torch.empty_like(q), int32(20, 512), 1.0, splits)
    for form in FORMATS.values():
        form = replace(form, turn=256) if form.name == "int4" else form
        codes = [QuantizedKV.empty(form, (NUM_BLOCKS, 4, 16, 512)) for _ in range(2)]
        qkv, table = bf16(20, 40 * 512), torch.empty(1024, 512)
        rope_kv_write(qkv, table, None, None, EPS, *codes, 32, meta)
        attend_chunks(q, *codes, torch.empty_like(q), 1.0, meta)
        splits = plan(int32(20), 32, codes[0], 8192, int32(1))
        attend_decodes(q, *codes, torch.empty_like(q), int32(20, 512), 1.0, splits)
    for name, compiled in launches.seen:
        assert compiled.metadata.shared <= SHARED_MEMORY, name


@pytest.mark.slow
def test_adapters_are_read_wide(launches: Launches) -> None:
    """A rank that the compiler does not know to be a multiple of 16 makes it read B two bytes at a
    time, which costs more than everything else."""
    step = LoraStep(
        int32(64), int32(5, 3), tile_rows(64, 2), bf16(2, 1024), int32(2, 7, 4), torch.empty(1), 16
    )
    lora_add(bf16(64, 6144), bf16(64, 4096), LoraLinear(0, 4096, (4096, 1024, 1024)), step)
    lora_gated(bf16(64, 28672), bf16(64, 4096), LoraLinear(4, 4096, (14336,) * 2), step, "silu")
    for name, compiled in launches.seen:
        assert "ld.global.b16" not in compiled.asm["ptx"], name
        assert "ld.global.v4" in compiled.asm["ptx"] or "cp.async.cg" in compiled.asm["ptx"], name


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama-8b", "qwen3-0.6b"])
def test_experts_are_read_wide(model: str, launches: Launches) -> None:
    """A mask or a stride that the compiler knows too little of makes it read weights two bytes at a
    time."""
    experts(MODELS[model])
    for name, compiled in launches.seen:
        ptx = compiled.asm["ptx"]
        if name in ("_few_up_kernel", "_few_down_kernel"):
            weights = [line for line in ptx.split("\n") if "evict_first" in line and "ld." in line]
            assert weights, name
            assert all(".v4.b32" in line for line in weights), name
        if name.startswith("_grouped_"):
            assert "cp.async.cg" in ptx, name
            assert "cp.async.ca" not in ptx, name


@pytest.mark.slow
def test_expand_waits_for_memory_once(launches: Launches) -> None:
    """Splits that are added up as they come are waited for one after the other, each with two
    barriers: most of what adapters cost a small step. And B, which nobody writes, is fetched while
    shrink still runs."""
    for rank in (16, 64):
        tiles, table = int32(5, 3), int32(2, 7, 4)
        rows, slab = tile_rows(64, 2), bf16(2, 1024)
        step = LoraStep(int32(64), tiles, rows, slab, table, torch.empty(1), rank)
        lora_add(bf16(64, 4096), bf16(64, 14336), LoraLinear(0, 14336, (4096,)), step)
    for name, compiled in launches.seen:
        if name == "_expand_kernel":
            early, late = compiled.asm["ptx"].split("griddepcontrol.wait")
            assert "ld.global.v4" in early
            first, *others = late.split("bar.sync")
            assert first.count("ld.global.v4") >= 6
            if compiled is launches.seen[1][1]:  # all ranks at once
                assert not any("ld.global" in part for part in others)


def test_no_kernel_is_left_out(launches: Launches) -> None:
    """A new kernel that nothing above launches."""
    launches.compile = False
    for part in PARTS.values():
        part(MODELS["qwen3-0.6b"])
    for mixer in MIXERS.values():
        mixer("qwen3-0.6b")
    every = {
        value.__name__
        for module in modules()
        for value in vars(module).values()
        if isinstance(value, JITFunction) and value.__name__.endswith("_kernel")
    }
    assert {name for name, _ in launches.seen} == every
