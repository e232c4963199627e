"""Launches of norms, GEMMs and activations, with 16-bit and with quantised weights."""

import torch

from kernels.activation import activation, add_opened, gelu_tanh_mul, silu_mul, xielu
from kernels.gemm.deterministic import TILES, product
from kernels.gemm.gemv import gemv
from kernels.gemm.packed.blocks import block_linear
from kernels.gemm.packed.dot import expand, packed_dot
from kernels.gemm.packed.few import packed_few
from kernels.gemm.packed.gemv import packed_gemv
from kernels.gemm.packed.gemv4 import gemv4
from kernels.gemm.packed.gemv8 import gemv8
from kernels.gemm.packed.int8 import FIXED, int8_linear
from kernels.gemm.packed.mma4 import mma4
from kernels.gemm.packed.round_rows import round_rows
from kernels.gemm.small_m import few_rows
from kernels.launch.device import compute_capability
from kernels.norm import layer_norm, rms_norm
from kernels.packed import E2M1, FLOAT8, INT8_PRODUCTS, Format, PackedWeight, multiplies
from tests.kernels.launches.sizes import EPS, MODELS, bf16


def layers(model: str) -> None:
    """Launch the norms, GEMMs and activations of a layer."""
    d = MODELS[model]
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


def packed(model: str) -> None:
    """Launch GEMMs with weights of 4 and 8 bits, for one token, a few and many."""
    d = MODELS[model]
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
    capability = compute_capability(device)
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
    matrix_units = capability >= (8, 0)
    for form in few if d.hidden % 256 == 0 and matrix_units else ():
        packed_few(bf16(4, d.hidden), PackedWeight(form, qkv, d.hidden, bf16(qkv), device))
        packed_few(bf16(1, d.hidden), PackedWeight(form, qkv, d.hidden, None, device), bf16(1, qkv))
    for form in (*few[:3], forms[0], forms[1]) if d.hidden % 128 == 0 else ():
        gated = PackedWeight(form, 2 * d.intermediate, d.hidden, None, device)
        gemv4(x, gated, norm=norm, eps=EPS, gate="silu")
        gemv4(x, PackedWeight(form, qkv, d.hidden, bf16(qkv), device), residual=bf16(1, qkv))
    for form in few[:3] if d.hidden % 128 == 0 and matrix_units else ():
        gated = PackedWeight(form, 2 * d.intermediate, d.hidden, None, device)
        square = PackedWeight(form, d.hidden, d.hidden, bf16(d.hidden), device)
        for tokens in (1, 5):
            residual = bf16(tokens, d.hidden)
            mma4(residual, gated, gate="silu")
            mma4(residual, square, residual=residual)
    if capability >= FLOAT8:
        floats = PackedWeight(forms[-2], qkv, d.hidden, None, device)
        gemv8(x, floats, norm=norm, eps=EPS)
        gemv8(x, floats, residual=bf16(1, qkv))
        floats = PackedWeight(forms[-2], 2 * d.intermediate, d.hidden, None, device)
        gemv8(x, floats, norm=norm, eps=EPS, gate="silu")
    rounds = multiplies("e4m3", capability)
    if d.hidden % 128 == 0 and rounds:
        blocks = Format(8, 128, torch.float32, code="e4m3", rows=128, activations=8)
        gated = PackedWeight(blocks, 2 * d.intermediate, d.hidden, None, device)
        gemv8(x, gated, norm=norm, eps=EPS, gate="silu")
        gemv8(x, PackedWeight(blocks, d.hidden, d.hidden, None, device), residual=x)
        square = PackedWeight(blocks, d.hidden, d.hidden, bf16(d.hidden), device)
        for tokens in (2, 32, 64, 256):
            rows, scales = round_rows(bf16(tokens, d.hidden), group=128)
            residual = bf16(tokens, d.hidden)
            block_linear(rows, scales, square, tokens, torch.bfloat16, residual)
    if rounds:
        round_rows(bf16(64, d.hidden))
        round_rows(bf16(64, d.hidden), norm, EPS)
    round_rows(bf16(64, 2 * d.intermediate), to=torch.int8, gate="silu")
    whole = PackedWeight(forms[-3], qkv, d.hidden, bf16(qkv), device)
    rows, scales = round_rows(bf16(2048, d.hidden), norm, EPS, torch.int8)
    tokens_and_tiles = ((32, None), (256, None), (2048, None), (2048, FIXED))
    for tokens, config in tokens_and_tiles if capability >= INT8_PRODUCTS else ():
        residual = bf16(tokens, qkv) if tokens < 2048 else None
        int8_linear(rows[:tokens], scales[:tokens], whole, torch.bfloat16, residual, config)
    for tokens in (32, 64, 256):
        packed_dot(bf16(tokens, d.hidden), PackedWeight(forms[0], qkv, d.hidden, bf16(qkv), device))


def plain(model: str) -> None:
    """Launch the kernels of networks with layer norms and MLPs without gates."""
    d = MODELS[model]
    for name in ("silu", "gelu_pytorch_tanh", "gelu", "relu", "relu2"):
        activation(bf16(64, d.intermediate), name)
    xielu(bf16(64, d.intermediate), bf16(4))
    for residual in (None, bf16(64, d.hidden)):
        add_opened(bf16(64, d.hidden), bf16(64, d.hidden), bf16(1, d.hidden), residual)
    weight = bf16(d.hidden)
    for scale, bias in ((weight, weight), (weight, None), (None, None)):
        layer_norm(bf16(64, d.hidden), scale, bias, 1e-5)
