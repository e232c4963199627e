"""The time that LoRA adds to a step of llama-8b on a CUDA device: `python -m bench.kernels.lora
[sweep]`.

Tokens have Zipf-distributed adapters on all seven linear layers. Times are of one decoder layer's
four LoRA calls, minus the activation that one of the calls replaces. Calls run in CUDA graphs over
so many layers that no weights stay in the L2 cache.
"""

import sys

import torch

from bench.kernels.measure import copies_for, time_us
from kernels import lora
from kernels.activation import silu_mul
from kernels.metadata import LoraLinear, LoraStep

HIDDEN, INNER, KV = 4096, 14336, 1024
LAYER = (
    LoraLinear(0, HIDDEN, (HIDDEN, KV, KV)),
    LoraLinear(3, HIDDEN, (HIDDEN,)),
    LoraLinear(4, HIDDEN, (INNER, INNER)),
    LoraLinear(6, INNER, (HIDDEN,)),
)
PARTS = [(layer.in_features, out) for layer in LAYER for out in layer.outs]


def zipf_slots(tokens: int, adapters: int) -> torch.Tensor:
    weights = 1 / torch.arange(1, adapters + 1, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    return torch.multinomial(weights, tokens, replacement=True, generator=generator)


def make_step(
    tokens: int,
    adapters: int,
    rank: int,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
) -> LoraStep:
    table = torch.zeros(adapters, len(PARTS), 4, dtype=torch.int32)
    at = 0
    for part, (width, height) in enumerate(PARTS):
        b = at + rank * width
        table[:, part] = torch.tensor([rank, at // 16, b // 16, 0])
        at = b + rank * height
    slots = zipf_slots(tokens, adapters)
    order = slots.argsort(stable=True)
    block = lora.tile_rows(tokens, adapters)
    tiles = []
    first = 0
    for slot in range(adapters):
        count = int((slots == slot).sum())
        tiles += [(slot, first + i, min(block, count - i)) for i in range(0, count, block)]
        first += count
    room = tokens // block + min(adapters + 1, tokens)
    tiles += [(-1, 0, 0)] * (room - len(tiles))
    return LoraStep(
        order.int().to(device),
        torch.tensor(tiles, dtype=torch.int32).to(device),
        block,
        torch.randn(adapters, at, device=device, dtype=dtype) * 0.02,
        table.to(device),
        torch.empty(lora.partial_size(tokens, rank), device=device),
        rank,
    )


def layer_us(tokens: int, adapters: int, rank: int) -> dict[str, float]:
    """Return the microseconds of each call of one layer."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    first = make_step(tokens, adapters, rank)
    count = max(2, copies_for(first.slab.nbytes))
    steps = [first] + [make_step(tokens, adapters, rank) for _ in range(count - 1)]
    x, inner = random(tokens, HIDDEN), random(tokens, INNER)
    qkv, out = random(tokens, HIDDEN + 2 * KV), random(tokens, HIDDEN)
    both = random(tokens, 2 * INNER)
    return {
        "qkv": time_us([lambda s=s: lora.lora_add(qkv, x, LAYER[0], s) for s in steps]),
        "out": time_us([lambda s=s: lora.lora_add(out, x, LAYER[1], s) for s in steps]),
        "gate_up": time_us(
            [lambda s=s: lora.lora_gated(both, x, LAYER[2], s, "silu") for s in steps]
        )
        - time_us([lambda: silu_mul(both)] * len(steps)),
        "down": time_us([lambda s=s: lora.lora_add(out, inner, LAYER[3], s) for s in steps]),
    }


def main(sweep: bool) -> None:
    print(torch.cuda.get_device_name(), "LoRA on llama-8b, us a layer; ms of 32 layers")
    for rank in (16, 64):
        for tokens in (1, 16, 64, 128, 256, 512, 1024, 4096):
            for adapters in (1, 16, 64):
                if adapters <= tokens:
                    show(tokens, adapters, rank, layer_us(tokens, adapters, rank))
    if not sweep:
        return
    classes = lora.CLASSES
    for tokens in (64, 256, 1024):
        for rows in (16, 32, 64):
            for splits in (1, 2, 4, 8, 16):
                lora.CLASSES = ((1 << 30, rows, splits, splits),)
                times = layer_us(tokens, 16, 16)
                show(tokens, 16, 16, times, f"tiles of {rows}, {splits} splits")
    lora.CLASSES = classes
    columns, wide = lora.BLOCK_N, lora.WIDE_N
    for tokens in (16, 128, 512):
        for lora.BLOCK_N in (64, 128, 256):
            lora.WIDE_N = lora.BLOCK_N
            times = layer_us(tokens, 16, 16)
            show(tokens, 16, 16, times, f"{lora.BLOCK_N} columns a program of expand")
    lora.BLOCK_N, lora.WIDE_N = columns, wide


def show(tokens: int, adapters: int, rank: int, times: dict[str, float], what: str = "") -> None:
    total = sum(times.values())
    calls = "  ".join(f"{name} {us:6.1f}" for name, us in times.items())
    print(
        f"rank {rank:3} {tokens:5} rows {adapters:3} adapters  {calls}  layer {total:6.1f} us, "
        f"step {total * 32 / 1e3:5.2f} ms {what}",
        flush=True,
    )


if __name__ == "__main__":
    main("sweep" in sys.argv[1:])
