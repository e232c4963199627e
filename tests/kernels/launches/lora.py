"""Launches of LoRA."""

import torch

from kernels.lora import lora_add, lora_gated, tile_rows
from kernels.metadata import LoraLinear, LoraStep
from tests.kernels.launches.sizes import MODELS, bf16, int32


def adapters(model: str) -> None:
    """Launch LoRA on all linear layers of a decoder layer, at decode and prefill sizes."""
    d = MODELS[model]
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
