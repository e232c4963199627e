"""The time of each launch of an MoE layer on a CUDA device, and sweeps over its tiles.

    python -m bench.kernels.experts
    python -m bench.kernels.experts --model gpt-oss-20b --tokens 1 256
    python -m bench.kernels.experts --sweep few packed --tokens 1 8
    python -m bench.kernels.experts --sweep grouped packed --tokens 64 256 512 1024 --seconds 120
    python -m bench.kernels.experts --sweep fp8 --model qwen3-30b-a3b --tokens 1 8 32 256 1024

A row has microseconds, and the rate at which the weights of experts with tokens are read, as a
share of copy bandwidth. From 1,024 tokens on it has the rate of operations instead, as a share of a
large matmul's rate. A sweep tries tiles for each launch separately, then the best ones together,
and prints the best next to the engine's tile. Kernels are compiled in several processes before
timing. A tile whose result differs from the result of the engine's tile is reported and not timed.
The sweep of FP8 experts ends with tables of the best constants.
"""

import argparse
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.kernels.expert_layers import (
    COPIES,
    FP8,
    LAYERS,
    MXFP4,
    Bits,
    Step,
    make_packed,
    make_stack,
    random,
)
from bench.kernels.measure import Calls, copy_bandwidth, matmul_rate, time_us
from bench.kernels.sweeping import DIFFERS, WRONG, Timed, differs, lines
from kernels.dispatch import kernels_for
from kernels.experts import few_packed as few_moe
from kernels.experts import packed as packed_moe
from kernels.experts import rounded as rounded_moe
from kernels.experts.few import DOWN, MOST, UP, few_down, few_up
from kernels.experts.few_packed import few_packed, few_packed_down, few_packed_up
from kernels.experts.grouped import (
    Tile,
    Tiles,
    grouped,
    grouped_down,
    grouped_up,
    sum_experts,
    tiles_for,
)
from kernels.experts.packed import packed_down, packed_experts, packed_up
from kernels.experts.reference import ExpertWeights, PackedExperts
from kernels.experts.rounded import rounded_down, rounded_experts, rounded_up
from kernels.experts.routing import Routing
from kernels.experts.sorting import sort
from kernels.launch.compiling import Compilers

_BEST = 4  # number of launches of a sweep that are printed


def launches(step: Step) -> Iterator[tuple[str, float, Calls]]:
    """Yield (name, bytes of weights, calls to time) for each launch and for the whole layer."""
    kernels, layer, stack, x = kernels_for("cuda"), step.layer, step.stack, step.x
    router = random(layer.experts, layer.hidden)
    routing, residual = Routing(layer.chosen), torch.zeros_like(x)
    up_bytes, down_bytes = step.met * layer.up_bytes, step.met * layer.down_bytes
    norm = random(layer.hidden)
    routed = partial(kernels.norm_route, x, norm, 1e-6, router, None, routing, None)
    yield "norm, router, choice", router.nbytes, [routed] * COPIES
    yield "router", router.nbytes, [partial(kernels.router_logits, x, router, None)] * COPIES
    yield "choice", 0, [partial(kernels.route, choice, routing, None) for choice in step.logits]
    if len(x) <= MOST:
        inners = [few_up(x, *choice, stack) for choice in step.routed]
        yield "up", up_bytes, [partial(few_up, x, *choice, stack) for choice in step.routed]
        calls = [
            partial(few_down, inner, *choice, stack, residual)
            for inner, choice in zip(inners, step.routed, strict=True)
        ]
        yield "down", down_bytes, calls
    else:
        tiles = tiles_for(len(x) * layer.chosen, layer.experts, x.dtype)
        pairs = [sort(ids, layer.experts) for _, ids in step.routed]
        yield "sort", 0, [partial(sort, ids, layer.experts) for _, ids in step.routed]
        both = list(zip(step.routed, pairs, strict=True))
        inners = [grouped_up(x, *choice, stack, mine, tiles.up) for choice, mine in both]
        calls = [partial(grouped_up, x, *choice, stack, mine, tiles.up) for choice, mine in both]
        yield "up", up_bytes, calls
        calls = [
            partial(grouped_down, inner, *choice, stack, mine, tiles.down)
            for inner, (choice, mine) in zip(inners, both, strict=True)
        ]
        yield "down", down_bytes, calls
        output = calls[0]()
        assert isinstance(output, Tensor)
        calls = [partial(sum_experts, output, ids, stack, residual) for _, ids in step.routed]
        yield "sum", 0, calls
    calls = [partial(kernels.experts, x, *choice, stack, residual) for choice in step.routed]
    yield "experts, whole", up_bytes + down_bytes, calls
    packed, few_bits = make_packed(stack), 4.5 / 16
    if len(x) <= few_moe.MOST:
        ups = [partial(few_packed_up, x, *choice, packed) for choice in step.routed]
        downs = [
            partial(few_packed_down, up(), *choice, packed, residual)
            for up, choice in zip(ups, step.routed, strict=True)
        ]
    else:
        chosen_tiles = packed_moe.tiles_for(len(x) * layer.chosen, layer.experts)
        pairs = [sort(ids, layer.experts) for _, ids in step.routed]
        both = list(zip(step.routed, pairs, strict=True))
        ups = [
            partial(packed_up, x, *choice, packed, mine, chosen_tiles.up) for choice, mine in both
        ]
        downs = [
            partial(packed_down, up(), *choice, packed, mine, chosen_tiles.down)
            for up, (choice, mine) in zip(ups, both, strict=True)
        ]
    yield "up in MXFP4", up_bytes * few_bits, ups
    yield "down in MXFP4", down_bytes * few_bits, downs
    calls = [
        partial(kernels.packed_experts, x, *choice, packed, residual) for choice in step.routed
    ]
    yield "experts in MXFP4, whole", (up_bytes + down_bytes) * few_bits, calls


def few_tiles() -> Iterator[tuple[int, int, int]]:
    for rows, columns, warps in product((2, 4, 8), (256, 512, 1024, 2048), (1, 2, 4)):
        if 16 <= rows * columns // (32 * warps) <= 128:
            yield rows, columns, warps


def down_tiles(places: int) -> Iterator[tuple[int, int, int]]:
    for rows, columns, warps in product((1, 2, 4), (128, 256, 512, 1024), (1, 2, 4)):
        if 16 <= rows * places * columns // (32 * warps) <= 128:
            yield rows, columns, warps


def near(pairs: float) -> list[int]:
    """Return the numbers of rows per tile to try, for a number of pairs per expert."""
    return [size for size in (16, 32, 64, 128) if pairs / 2 <= size <= max(16, 3 * pairs)] or [128]


def grouped_tiles(pairs: float, halves: int) -> Iterator[Tile]:
    """Yield tiles to try for a GEMM, for a number of pairs per expert.

    halves: 2 for the first GEMM, whose weights are gate and up.
    """
    many = pairs > 24  # so many rows that operations limit the speed, and wide tiles are faster
    every = product(
        near(pairs),
        (64, 128, 256) if many else (32, 64, 128),
        (64, 128),
        (3, 4) if many else (3, 4, 5),
    )
    for size, outs, depth, stages in every:
        ways = ((False, False), (False, True), (True, False)) if many else (
            (False, False), (True, False), (True, True)
        )  # fmt: skip
        for swap, tma in ways:
            if swap and outs == 32:  # swapped, outputs are the rows, of which wgmma needs 64
                continue
            if halves * size * outs > 32 * 1024:  # exceeds the registers
                continue
            if 64 * 1024 <= stages * depth * (size + halves * outs) * 2 <= 200 * 1024:
                yield Tile(size, outs, depth, 8 if size * outs > 8192 else 4, stages, tma, swap)


def packed_tiles(pairs: float) -> Iterator[packed_moe.PackedTile]:
    for size, outs, warps, stages in product(near(pairs), (32, 64, 128), (1, 2, 4, 8), (2, 4)):
        if 512 <= size * outs // warps <= 2048:
            yield packed_moe.PackedTile(size, outs, warps, stages)


def few_packed_tiles(places: int, bits: Bits) -> Iterator[few_moe.PairTile]:
    """Yield tiles to try for a few tokens.

    places: experts whose rows a program computes together: 1, or a token's experts rounded up to a
        power of two.
    """
    if bits is MXFP4:
        for rows, units, warps in product((1, 2, 4, 8, 16), (8, 16, 32, 64), (1, 2)):
            if rows * places > 1 and 4 <= rows * places * units // (32 * warps) <= 16:
                yield few_moe.PairTile(rows, units, warps)
        return
    every = product((1, 2, 4), (8, 16, 32, 64, 128), (1, 2, 4), (2, 4), (False, True))
    for rows, units, warps, ints, converts in every:
        words = rows * places * units * ints // (32 * warps)  # words of codes per thread
        if rows * places > 1 and 8 <= words <= 32 and units * ints >= 64:
            yield few_moe.PairTile(rows, units, warps, ints, converts)


def rounded_tiles(pairs: float, halves: int) -> Iterator[Tile]:
    """Yield tiles to try for a GEMM whose operands are both 8-bit floats.

    Tiles with fewer rows than an expert has pairs are left out: they would read all weights again.
    halves: as in `grouped_tiles`.
    """
    for size in [size for size in near(pairs) if size >= pairs] or [128]:
        ways: tuple[tuple[bool, bool], ...] = ((True, False), (True, True))  # (swap, tma)
        if size > 32:
            ways = ((False, True), *(ways if size == 64 else ((False, False),)))
        outs_depths = product((64, 128) if size <= 32 else (64, 128, 256), (128, 256))
        for (outs, depth), stages, (swap, tma) in product(outs_depths, (3, 4, 6), ways):
            if halves * size * outs > 32 * 1024:  # exceeds the registers
                continue
            if 48 * 1024 <= stages * depth * (size + halves * outs) <= 200 * 1024:
                yield Tile(size, outs, depth, 8 if size * outs > 8192 else 4, stages, tma, swap)


@dataclass(frozen=True, slots=True)
class Choice:
    """A launch to time with several tiles.

    tiles: the candidates; the first is the one that the engine uses.
    calls: returns the calls of the launch with a tile.
    num_bytes: bytes that a call has to move.
    """

    name: str
    tiles: list[Any]
    calls: Callable[[Any], Calls]
    num_bytes: float = 0.0
    most: float = DIFFERS  # largest accepted difference from the result with the engine's tile


class SortedLaunch(NamedTuple):
    """A GEMM over (token, expert) pairs that are sorted by expert.

    tiles: the candidates; the first is the one that the engine uses.
    """

    name: str
    call: Callable[..., Tensor]
    tiles: list[Any]


class Sweep:
    """A sweep over the tiles of `Choice`s, which ends at a time limit.

    copy: copy bandwidth in bytes per second.
    """

    def __init__(self, seconds: float, copy: float) -> None:
        self.until, self.copy = time.monotonic() + seconds, copy
        self.compilers = Compilers()

    def compile(self, choices: Iterable[Choice]) -> None:
        """Start to compile the choices' kernels in other processes, without launching them."""
        with self.compilers.collecting():
            for choice in choices:
                for tile in choice.tiles:
                    with suppress(Exception):  # the timing reports the error
                        choice.calls(tile)[0]()

    def best(self, choice: Choice) -> list[Any]:
        """Time a choice's tiles and return the two fastest; print the fastest and the engine's."""
        today = choice.tiles[0]
        rows: dict[Any, Timed] = {}
        try:
            want = _numbers(choice.calls(today)[0]())
        except Exception as error:
            print(f"  {choice.name} {today}, today's: {error}", flush=True)
            return [today]
        for tile in dict.fromkeys(choice.tiles):
            if time.monotonic() > self.until:
                print(f"  {choice.name}: out of time after {len(rows)} tiles", flush=True)
                break
            try:
                calls = choice.calls(tile)
                remark = differs(_numbers(calls[0]()), want, choice.most)
                if remark.startswith(WRONG):
                    print(f"  {choice.name} {remark}: {tile}", flush=True)
                    continue
                us = time_us(calls, 5)
            except Exception as error:  # a tile that does not fit the device
                print(f"  {choice.name} {tile}: {str(error)[:80]}", flush=True)
                continue
            if choice.num_bytes:
                remark += f", {choice.num_bytes / us * 1e6 / self.copy:.2f} of a copy"
            table = "" if tile == today else choice.name
            rows[tile] = Timed(us, f"{choice.name} {tuple(tile)}", table, remark)
        for line in lines(rows.values(), _BEST):
            print(f"  {line}", flush=True)
        return sorted(rows, key=rows.__getitem__)[:2] or [today]


def _numbers(result: object) -> Tensor:
    """Return the result of a launch, or the last of several results, as float32."""
    output = result[-1] if isinstance(result, tuple) else result
    assert isinstance(output, Tensor)
    return output.float()


def few_choices(step: Step) -> list[Choice]:
    layer, stack, x = step.layer, step.stack, step.x
    inners = [few_up(x, *choice, stack) for choice in step.routed]
    both = list(zip(inners, step.routed, strict=True))
    places = 1 << (layer.chosen - 1).bit_length()
    return [
        Choice(
            "up",
            [UP, *few_tiles()],
            lambda tile: [partial(few_up, x, *choice, stack, tile) for choice in step.routed],
            step.met * layer.up_bytes,
        ),
        Choice(
            "down",
            [DOWN, *down_tiles(places)],
            lambda tile: [partial(few_down, y, *choice, stack, None, tile) for y, choice in both],
            step.met * layer.down_bytes,
        ),
    ]


def by_expert_choices(
    step: Step,
    stack: ExpertWeights | PackedExperts,
    share: float,
    up: SortedLaunch,
    down: SortedLaunch,
) -> list[Choice]:
    """Return the choices for a layer whose pairs are sorted by expert.

    share: bytes of weights relative to 16 bits.
    """
    layer, x = step.layer, step.x
    pairs = [sort(ids, layer.experts) for _, ids in step.routed]
    routed = list(zip(step.routed, pairs, strict=True))
    inners = [random(len(x) * layer.chosen, layer.size) for _ in routed]
    return [
        Choice(
            up.name,
            up.tiles,
            lambda tile: [
                partial(up.call, x, *choice, stack, mine, tile) for choice, mine in routed
            ],
            step.met * layer.up_bytes * share,
        ),
        Choice(
            down.name,
            down.tiles,
            lambda tile: [
                partial(down.call, y, *choice, stack, mine, tile)
                for y, (choice, mine) in zip(inners, routed, strict=True)
            ],
            step.met * layer.down_bytes * share,
        ),
    ]


def grouped_choices(step: Step) -> list[Choice]:
    layer, x = step.layer, step.x
    today = tiles_for(len(x) * layer.chosen, layer.experts, x.dtype)
    each_has = len(x) * layer.chosen / layer.experts
    up = SortedLaunch("up", grouped_up, [today.up, *grouped_tiles(each_has, 2)])
    down = SortedLaunch("down", grouped_down, [today.down, *grouped_tiles(each_has, 1)])
    return by_expert_choices(step, step.stack, 1.0, up, down)


def whole(step: Step, ups: list[Tile], downs: list[Tile]) -> Choice:
    """Return the choice of a whole layer (sort, GEMMs and sum) with these tiles."""
    layer, stack, x = step.layer, step.stack, step.x
    today = tiles_for(len(x) * layer.chosen, layer.experts, x.dtype)
    ups, downs = [*dict.fromkeys([*ups, today.up])], [*dict.fromkeys([*downs, today.down])]
    pairs = [Tiles(up, down) for up, down in product(ups, downs)]
    return Choice(
        "whole",
        [today, *pairs],
        lambda tiles: [partial(grouped, x, *choice, stack, None, tiles) for choice in step.routed],
        step.met * (layer.up_bytes + layer.down_bytes),
    )


def packed_choices(step: Step, packed: PackedExperts, bits: Bits) -> list[Choice]:
    layer, x = step.layer, step.x
    today = packed_moe.tiles_for(len(x) * layer.chosen, layer.experts)
    others: list[packed_moe.PackedTile] = []
    if bits is MXFP4 or len(x) <= 32:  # in other cases the kernel takes too long with e4m3
        others = list(packed_tiles(len(x) * layer.chosen / layer.experts))
    up = SortedLaunch(f"up in {bits.name}", packed_up, [today.up, *others])
    down = SortedLaunch(f"down in {bits.name}", packed_down, [today.down, *others])
    return by_expert_choices(step, packed, bits.share, up, down)


def few_packed_choices(step: Step, packed: PackedExperts, bits: Bits) -> list[Choice]:
    """Return the choices for kernels that compute each pair separately, and for whole layers.

    Whole layers are also timed with pairs sorted by expert.
    """
    x, layer = step.x, step.layer
    inners = [random(len(x) * layer.chosen, layer.size) for _ in step.routed]
    both = list(zip(inners, step.routed, strict=True))
    places = 1 << (layer.chosen - 1).bit_length()
    up_bytes, down_bytes = step.met * layer.up_bytes, step.met * layer.down_bytes
    return [
        Choice(
            f"up in {bits.name}, pair by pair",
            [few_moe.up_tile(packed.gate_up), *few_packed_tiles(1, bits)],
            lambda tile: [
                partial(few_packed_up, x, *choice, packed, tile) for choice in step.routed
            ],
            up_bytes * bits.share,
        ),
        Choice(
            f"down in {bits.name}, pair by pair",
            [few_moe.down_tile(packed.down, len(x)), *few_packed_tiles(places, bits)],
            lambda tile: [
                partial(few_packed_down, y, *choice, packed, None, tile) for y, choice in both
            ],
            down_bytes * bits.share,
        ),
        Choice(
            f"whole in {bits.name}, (pair by pair)",
            [(len(x) <= few_moe.MOST,), (len(x) > few_moe.MOST,)],
            lambda way: [
                partial(few_packed if way[0] else packed_experts, x, *choice, packed, None)
                for choice in step.routed
            ],
            (up_bytes + down_bytes) * bits.share,
        ),
    ]


def rounded_choices(step: Step, packed: PackedExperts) -> list[Choice]:
    """Return the choices for launches with FP8 weights and inputs, including quantisation."""
    layer, x = step.layer, step.x
    today = rounded_moe.tiles_for(len(x) * layer.chosen, layer.experts)
    each_has = len(x) * layer.chosen / layer.experts
    up = SortedLaunch("up, rounded", rounded_up, [today.up, *rounded_tiles(each_has, 2)])
    down = SortedLaunch("down, rounded", rounded_down, [today.down, *rounded_tiles(each_has, 1)])
    return by_expert_choices(step, packed, FP8.share, up, down)


def rounded_whole(step: Step, packed: PackedExperts, ups: list[Tile], downs: list[Tile]) -> Choice:
    """Return a choice of the whole layer: with 16-bit inputs (None), or FP8 inputs and these tiles.

    The results differ by the quantisation of inputs.
    """
    layer, x = step.layer, step.x
    today = rounded_moe.tiles_for(len(x) * layer.chosen, layer.experts)
    as_they_come = few_packed if len(x) <= few_moe.MOST else packed_experts

    def calls(tiles: tuple[Tiles | None]) -> Calls:
        if tiles[0] is None:
            return [partial(as_they_come, x, *choice, packed, None) for choice in step.routed]
        return [
            partial(rounded_experts, x, *choice, packed, None, tiles[0]) for choice in step.routed
        ]

    tiles_tried = dict.fromkeys([today, *(Tiles(up, down) for up, down in product(ups, downs))])
    return Choice(
        "whole in FP8",
        [(None,), *((tiles,) for tiles in tiles_tried)],
        calls,
        step.met * (layer.up_bytes + layer.down_bytes) * FP8.share,
        most=0.15,
    )


@dataclass(slots=True)
class Found:
    """The best tiles of FP8 experts, in the form of the kernels' tables."""

    few: dict[int, tuple[few_moe.PairTile, few_moe.PairTile]]  # tokens -> tiles of both GEMMs
    rounded: dict[float, Tiles]  # pairs per expert -> tiles
    pays: dict[int, bool]  # tokens -> whether quantised inputs are faster

    def tell(self) -> None:
        print("kernels/experts/few_packed.py: UP8, DOWN8, by tokens")
        for tokens, (up, down) in sorted(self.few.items()):
            print(f"  {tokens:6}  UP8 = {up}\n          DOWN8 = {down}")
        print("kernels/experts/rounded.py: TILES, by pairs an expert")
        for pairs, tiles in sorted(self.rounded.items()):
            print(f"  {pairs:8.2f}  Tiles({tiles.up}, {tiles.down})")
        print("tokens, and whether rounding takes less time than inputs as they come")
        print("  " + ", ".join(f"{tokens}: {pays}" for tokens, pays in sorted(self.pays.items())))


def sweep_fp8(steps: list[Step], sweep: Sweep) -> None:
    """Sweep the launches of FP8 experts for each step, and print the best tiles.

    Launches are timed separately, then together.
    """
    stacks = {step.model: make_packed(step.stack, FP8) for step in steps}
    sweeps: list[tuple[Step, list[Choice], list[Choice]]] = []
    for step in steps:
        packed = stacks[step.model]
        few = few_packed_choices(step, packed, FP8) if len(step.x) <= few_moe.MOST else []
        grouped_ways = packed_choices(step, packed, FP8) if len(step.x) > 1 else []
        sweeps.append((step, [*few, *grouped_ways], rounded_choices(step, packed)))
    sweep.compile(choice for _, *both in sweeps for choices in both for choice in choices)
    for model, packed in stacks.items():
        results = Found({}, {}, {})
        for step, others, rounded in sweeps:
            if step.model != model:
                continue
            print(f"{step}: fp8", flush=True)
            tokens, layer = len(step.x), step.layer
            best = [sweep.best(choice) for choice in others]
            if tokens <= few_moe.MOST:
                results.few[tokens] = best[0][0], best[1][0]
            together = rounded_whole(step, packed, *(sweep.best(choice) for choice in rounded))
            sweep.compile([together])
            ranked = [result[0] for result in sweep.best(together)]
            results.pays[tokens] = ranked[0] is not None
            tiles = next((result for result in ranked if result is not None), None)
            if tiles is not None:  # None if time ran out
                results.rounded[tokens * layer.chosen / layer.experts] = tiles
        print(model)
        results.tell()


def sweep(steps: list[Step], what: list[str], sweep: Sweep) -> None:
    """Start to compile all kernels, then sweep the launches of each step."""
    sweeps: list[tuple[Step, str, list[Choice]]] = []
    for step in steps:
        small = len(step.x) <= MOST
        if "few" in what and small:
            sweeps.append((step, "few", few_choices(step)))
        if "grouped" in what and not small:
            sweeps.append((step, "grouped", grouped_choices(step)))
        if "packed" in what and len(step.x) <= 2 * few_moe.MOST:
            choices = few_packed_choices(step, make_packed(step.stack), MXFP4)
            sweeps.append((step, "packed, pair by pair", choices))
        if "packed" in what:
            choices = packed_choices(step, make_packed(step.stack), MXFP4)
            sweeps.append((step, "packed", choices))
    sweep.compile(choice for *_, choices in sweeps for choice in choices)
    for step, name, choices in sweeps:
        print(f"{step}: {name}", flush=True)
        best = [sweep.best(choice) for choice in choices]
        if name == "grouped":
            together = whole(step, *best)
            sweep.compile([together])
            sweep.best(together)


def tell(step: Step, copy: float, rate: float) -> None:
    """Time each launch of a step and print a line for it.

    copy, rate: the device's best bytes/s and FLOP/s.
    """
    for launch, num_bytes, calls in launches(step):
        us = time_us(calls)
        line = f"  {launch:<22}{us:9.2f} us"
        if num_bytes:
            line += f"  {num_bytes / us * 1e6 / copy:6.2f} of a copy"
        if launch == "experts, whole" and len(step.x) >= 1024:
            work = 6.0 * len(step.x) * step.layer.chosen * step.layer.size * step.layer.hidden
            line += f"  {work / us * 1e6 / rate:6.2f} of a product"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", default=[*LAYERS], choices=[*LAYERS])
    parser.add_argument(
        "--tokens", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 8192]
    )
    parser.add_argument("--sweep", nargs="+", choices=["few", "grouped", "packed", "fp8"])
    parser.add_argument("--seconds", type=float, default=600, help="of a sweep, at most")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("error: no CUDA device here")
    copy, rate = copy_bandwidth(), matmul_rate()
    print(f"copy {copy / 1e12:.2f} TB/s, product {rate / 1e12:.0f} TFLOP/s", flush=True)
    measured = Sweep(args.seconds, copy)
    stacks = {name: make_stack(LAYERS[name]) for name in args.model}
    steps = [
        Step.make(name, LAYERS[name], stack, tokens)
        for name, stack in stacks.items()
        for tokens in args.tokens
    ]
    if args.sweep:
        sweep(steps, args.sweep, measured)
        if "fp8" in args.sweep:
            sweep_fp8(steps, measured)
    else:
        with measured.compilers.collecting():
            for step in steps:
                for *_, calls in launches(step):
                    calls[0]()
        for step in steps:
            print(step, flush=True)
            tell(step, copy, rate)
    measured.compilers.close()


if __name__ == "__main__":
    main()
