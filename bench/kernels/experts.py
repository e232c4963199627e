"""Each launch of a mixture of experts on a CUDA device, and other tiles for it.

    python -m bench.kernels.experts
    python -m bench.kernels.experts --model gpt-oss-20b --tokens 1 256
    python -m bench.kernels.experts --sweep few --tokens 1
    python -m bench.kernels.experts --sweep grouped --tokens 256

A row has microseconds and the rate at which the weights of the experts that are met were read, as a
share of a copy's bandwidth; from 1,024 tokens on operations, as a share of a large product's rate.
A sweep tries the tiles of one launch after the other and prints the best.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from bench.kernels.measure import copy_bandwidth, matmul_rate, time_us
from kernels.dispatch import kernels_for
from kernels.experts.few import MOST, few_down, few_up
from kernels.experts.grouped import (
    Tile,
    grouped_down,
    grouped_up,
    sort,
    sum_experts,
    tiles_for,
)
from kernels.experts.packed import packed_experts
from kernels.experts.reference import ExpertWeights, PackedExperts
from kernels.experts.routing import CLAMPED, Routing
from kernels.packed import E2M1, Format, PackedWeight

COPIES = 8  # routings that a graph walks over, so that none finds its weights in the cache
_BEST = 8  # of a sweep, that are printed


@dataclass(frozen=True, slots=True)
class Layer:
    """experts: of which a token has `chosen`."""

    experts: int
    chosen: int
    size: int
    hidden: int
    act: str
    biased: bool

    @property
    def up_bytes(self) -> float:
        """Of one expert in 16 bits."""
        return 4.0 * self.size * self.hidden

    @property
    def down_bytes(self) -> float:
        return 2.0 * self.size * self.hidden


LAYERS = {
    "qwen3-30b-a3b": Layer(128, 8, 768, 2048, "silu", False),
    "gpt-oss-20b": Layer(32, 4, 2880, 2880, CLAMPED, True),
}


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.05


def make_stack(layer: Layer) -> ExpertWeights:
    count, size, hidden = layer.experts, layer.size, layer.hidden
    return ExpertWeights(
        random(count, 2 * size, hidden),
        random(count, hidden, size),
        random(count, 2 * size) if layer.biased else None,
        random(count, hidden) if layer.biased else None,
        layer.act,
        7.0,
    )


def make_packed(stack: ExpertWeights) -> PackedExperts:
    """Random codes of MXFP4, of the same sizes."""

    def packed(weight: Tensor) -> PackedWeight:
        form = Format(4, 32, torch.bfloat16, zero=12, table=E2M1)
        made = PackedWeight(form, *weight.flatten(0, 1).shape, None, weight.device)
        made.codes.view(torch.uint8).random_(0, 256)
        made.scale.fill_(2.0**-12)
        return made

    gate_up, down = packed(stack.gate_up), packed(stack.down)
    biases = stack.gate_up_bias, stack.down_bias
    return PackedExperts(gate_up, down, *biases, stack.act, stack.limit)


@dataclass(slots=True)
class Step:
    """One layer's work on so many tokens, COPIES times with other choices."""

    layer: Layer
    stack: ExpertWeights
    x: Tensor
    logits: list[Tensor]
    routed: list[tuple[Tensor, Tensor]]
    met: float  # experts, on average

    @classmethod
    def make(cls, layer: Layer, stack: ExpertWeights, tokens: int) -> "Step":
        kernels = kernels_for("cuda")
        logits = [random(tokens, layer.experts) * 20 for _ in range(COPIES)]
        routing = Routing(layer.chosen)
        routed = [kernels.route(each, routing, None) for each in logits]
        met = sum(len(ids.unique()) for _, ids in routed) / COPIES
        return cls(layer, stack, random(tokens, layer.hidden), logits, routed, met)


def launches(step: Step) -> Iterator[tuple[str, float, list[Callable[[], object]]]]:
    """(name, bytes of weights, the calls to be timed) of each launch, and of all together."""
    kernels, layer, stack, x = kernels_for("cuda"), step.layer, step.stack, step.x
    router = random(layer.experts, layer.hidden)
    routing, residual = Routing(layer.chosen), torch.zeros_like(x)
    up_bytes, down_bytes = step.met * layer.up_bytes, step.met * layer.down_bytes
    norm = random(layer.hidden)
    routed = partial(kernels.norm_route, x, norm, 1e-6, router, None, routing, None)
    yield "norm, router, choice", router.nbytes, [routed] * COPIES
    yield "router", router.nbytes, [partial(kernels.linear, x, router, None)] * COPIES
    yield "choice", 0, [partial(kernels.route, each, routing, None) for each in step.logits]
    if len(x) <= MOST:
        inners = [few_up(x, *each, stack) for each in step.routed]
        yield "up", up_bytes, [partial(few_up, x, *each, stack) for each in step.routed]
        calls = [
            partial(few_down, inner, *each, stack, residual)
            for inner, each in zip(inners, step.routed, strict=True)
        ]
        yield "down", down_bytes, calls
    else:
        tiles = tiles_for(len(x) * layer.chosen, layer.experts, x.dtype)
        pairs = [sort(ids, layer.experts) for _, ids in step.routed]
        yield "sort", 0, [partial(sort, ids, layer.experts) for _, ids in step.routed]
        both = list(zip(step.routed, pairs, strict=True))
        inners = [grouped_up(x, *each, stack, mine, tiles.up) for each, mine in both]
        calls = [partial(grouped_up, x, *each, stack, mine, tiles.up) for each, mine in both]
        yield "up", up_bytes, calls
        calls = [
            partial(grouped_down, inner, *each, stack, mine, tiles.down)
            for inner, (each, mine) in zip(inners, both, strict=True)
        ]
        yield "down", down_bytes, calls
        given = calls[0]()
        assert isinstance(given, Tensor)
        calls = [partial(sum_experts, given, ids, stack, residual) for _, ids in step.routed]
        yield "sum", 0, calls
    calls = [partial(kernels.experts, x, *each, stack, residual) for each in step.routed]
    yield "experts, whole", up_bytes + down_bytes, calls
    packed = make_packed(stack)
    calls = [partial(packed_experts, x, *each, packed, residual) for each in step.routed]
    yield "experts in MXFP4, whole", (up_bytes + down_bytes) * 4.5 / 16, calls


def few_tiles() -> Iterator[tuple[int, int, int]]:
    for rows, columns, warps in product((2, 4, 8), (256, 512, 1024, 2048), (1, 2, 4)):
        if 16 <= rows * columns // (32 * warps) <= 128:
            yield rows, columns, warps


def down_tiles(places: int) -> Iterator[tuple[int, int, int]]:
    for rows, columns, warps in product((1, 2, 4), (128, 256, 512, 1024), (1, 2, 4)):
        if 16 <= rows * places * columns // (32 * warps) <= 128:
            yield rows, columns, warps


def grouped_tiles(rows: int) -> Iterator[Tile]:
    """For so many pairs an expert: tiles of about that many rows."""
    near = [size for size in (16, 32, 64, 128) if rows / 2 <= size <= max(16, 2 * rows)] or [128]
    for size, outs, depth, warps, stages in product(
        near, (32, 64, 128), (64, 128), (4, 8), (3, 4, 5)
    ):
        if warps == 8 and size * outs < 64 * 64:
            continue
        if stages * depth * (size + 2 * outs) * 2 <= 200 * 1024:
            yield Tile(size, outs, depth, warps, stages)


def best_of(
    name: str, tiles: list[object], calls: Callable[[object], list[Callable[[], object]]]
) -> None:
    """Time the launch with each tile, and print the best."""
    found = []
    for tile in tiles:
        try:
            found.append((time_us(calls(tile), 5), tile))
        except Exception as error:  # one that does not fit the device
            print(f"  {name} {tile}: {str(error)[:80]}")
    for us, tile in sorted(found, key=lambda each: each[0])[:_BEST]:
        print(f"  {name} {us:8.2f} us  {tile}", flush=True)


def sweep(step: Step, what: str) -> None:
    layer, stack, x = step.layer, step.stack, step.x
    if what == "few":
        inners = [few_up(x, *each, stack) for each in step.routed]
        best_of(
            "up",
            [*few_tiles()],
            lambda tile: [partial(few_up, x, *each, stack, tile) for each in step.routed],
        )
        places = 1 << (layer.chosen - 1).bit_length()
        both = list(zip(inners, step.routed, strict=True))
        best_of(
            "down",
            [*down_tiles(places)],
            lambda tile: [partial(few_down, y, *each, stack, None, tile) for y, each in both],
        )
        return
    pairs = [sort(ids, layer.experts) for _, ids in step.routed]
    tiles = tiles_for(len(x) * layer.chosen, layer.experts, x.dtype)
    routed = list(zip(step.routed, pairs, strict=True))
    inners = [grouped_up(x, *each, stack, mine, tiles.up) for each, mine in routed]
    candidates: list[object] = [*grouped_tiles(len(x) * layer.chosen // layer.experts)]
    best_of(
        "up",
        candidates,
        lambda tile: [partial(grouped_up, x, *each, stack, mine, tile) for each, mine in routed],
    )
    best_of(
        "down",
        candidates,
        lambda tile: [
            partial(grouped_down, y, *each, stack, mine, tile)
            for y, (each, mine) in zip(inners, routed, strict=True)
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", default=[*LAYERS], choices=[*LAYERS])
    parser.add_argument(
        "--tokens", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 8192]
    )
    parser.add_argument("--sweep", choices=["few", "grouped"])
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("error: no CUDA device here")
    copy, rate = copy_bandwidth(), matmul_rate()
    print(f"copy {copy / 1e12:.2f} TB/s, product {rate / 1e12:.0f} TFLOP/s", flush=True)
    for name in args.model:
        layer = LAYERS[name]
        stack = make_stack(layer)
        for tokens in args.tokens:
            step = Step.make(layer, stack, tokens)
            print(f"{name}, {tokens} tokens, {step.met:.1f} experts met", flush=True)
            if args.sweep:
                sweep(step, args.sweep)
                continue
            for launch, num_bytes, calls in launches(step):
                us = time_us(calls)
                line = f"  {launch:<22}{us:9.2f} us"
                if num_bytes:
                    line += f"  {num_bytes / us * 1e6 / copy:6.2f} of a copy"
                if launch == "experts, whole" and tokens >= 1024:
                    work = 6.0 * tokens * layer.chosen * layer.size * layer.hidden
                    line += f"  {work / us * 1e6 / rate:6.2f} of a product"
                print(line, flush=True)


if __name__ == "__main__":
    main()
