"""MXFP4 experts in fragments (`kernels.experts.fragments`) against the usual layout, on one GPU.

It sweeps tiles and recommends settings. Fragments have the order of MMA operands; the usual layout
is that of `Format.span`.

    python -m bench.kernels.fragments_sweep

Kernels are compiled in several processes before timing. Each result is compared with float64
matmuls of the dequantised weights, for a sample of tokens. A tile with a larger error than rounding
explains is reported and not used. Times are of CUDA graphs over several routings.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.kernels.expert_layers import LAYERS, Layer, Step, random
from bench.kernels.measure import apart, copy_bandwidth, time_us
from kernels.experts import few_packed, packed
from kernels.experts.few import MOST, few
from kernels.experts.few_packed import few_packed_down, few_packed_up
from kernels.experts.fragments.dispatch import few_fragments, grouped_fragments
from kernels.experts.fragments.down import few_fragments_down, fragments_down
from kernels.experts.fragments.tiles import FragmentTile, FragmentTiles
from kernels.experts.fragments.up import few_fragments_up, fragments_up
from kernels.experts.grouped import grouped
from kernels.experts.packed import packed_down, packed_experts, packed_up
from kernels.experts.reference import ExpertWeights, PackedExperts, activated
from kernels.experts.sorting import sort
from kernels.launch.compiling import Compilers
from kernels.packed import E2M1, Format, PackedWeight

TOKENS = (1, 2, 4, 8, 16, 64, 256, 1024, 4096)
FEW = 16  # maximum number of tokens for kernels that compute each (token, expert) pair separately
BITS = 4.5 / 16  # bytes of MXFP4 relative to the 16 bits that `Layer` counts
_CHECKED = 64  # maximum number of tokens of a case that are checked
# Ratio to the time with the engine's tile; smaller gains are within the noise between two runs.
_PAYS = 0.97
# Tiles to try: for single pairs, by GEMM (in down, rows are a token's experts); then by number of
# columns.
UP_ALONE = [
    *(
        FragmentTile(8, 1, 1, 4, 4),
        FragmentTile(8, 1, 1, 4, 8),
        FragmentTile(8, 1, 1, 8, 4),
        FragmentTile(8, 1, 1, 2, 4),
    ),
    *(FragmentTile(8, 1, 2, 4, 3), FragmentTile(8, 1, 1, 8, 2), FragmentTile(8, 2, 1, 4, 2)),
]
DOWN_ALONE = [
    *(
        FragmentTile(8, 1, 8, 2, 3),
        FragmentTile(8, 1, 8, 1, 4),
        FragmentTile(8, 1, 8, 2, 6),
        FragmentTile(8, 2, 8, 2, 3),
    ),
    *(FragmentTile(8, 1, 8, 4, 3), FragmentTile(8, 1, 8, 1, 6)),
]


def columns(pairs: float) -> tuple[int, ...]:
    """Return the numbers of columns per tile to try, for a mean number of pairs per expert."""
    if pairs <= 2:
        return (8,)
    if pairs <= 6:
        return 8, 16
    if pairs <= 12:
        return 16, 24
    if pairs <= 20:
        return 16, 24, 32
    return (40, 48) if pairs <= 40 else (64, 48)


def grouped_tiles(pairs: float, up: bool) -> Iterator[FragmentTile]:
    """Yield tiles to try. up: whether the GEMM is gate and up, which has twice the rows."""
    for wide in columns(pairs):
        if wide <= 8:
            yield from (
                FragmentTile(wide, 1, 1, 4, 4),
                FragmentTile(wide, 1, 2, 2, 4),
                FragmentTile(wide, 1, 4, 1, 4),
            )
            yield FragmentTile(wide, 1, 4, 1, 2) if up else FragmentTile(wide, 2, 4, 1, 3)
        elif wide <= 32:
            most = 1 if up else 2
            yield from (FragmentTile(wide, most, 4, 1, 2), FragmentTile(wide, most, 8, 1, 2))
            yield from (FragmentTile(wide, most, 8, 1, 1), FragmentTile(wide, 2 * most, 4, 1, 1))
        else:
            most = 1 if up else 2
            yield from (FragmentTile(wide, most, 8, 1, 1), FragmentTile(wide, most, 4, 1, 1))
            if wide == 40:
                yield FragmentTile(wide, most, 8, 1, 1, 128)


@dataclass(slots=True)
class Case:
    """One model and number of tokens, with weights, float64 results and measured times."""

    name: str
    step: Step
    old: PackedExperts
    new: PackedExperts
    dense: ExpertWeights
    sample: Tensor  # sampled tokens of the first routing
    inner: Tensor  # float64 [sample, chosen, size]: inner values of the tokens' experts
    want: Tensor  # float64 [sample, hidden]
    times: dict[str, float] = field(default_factory=dict)
    best: dict[str, list[tuple[float, FragmentTile]]] = field(default_factory=dict)
    ways: dict[str, "Ways"] = field(default_factory=dict)  # GEMM -> ways to compute it

    @property
    def tokens(self) -> int:
        return len(self.step.x)

    @property
    def pairs(self) -> float:
        return self.tokens * self.step.layer.chosen / self.step.layer.experts


def make_packed(layer: Layer) -> tuple[PackedExperts, PackedExperts]:
    """Return the same random MXFP4 experts twice: in the usual layout, and in fragments.

    Scales are 2^-9 to 2^-5.
    """
    form = Format(4, 32, torch.bfloat16, zero=12, table=E2M1)
    count, size, hidden = layer.experts, layer.size, layer.hidden

    def both(rows: int, width: int) -> tuple[PackedWeight, PackedWeight]:
        old, new = (PackedWeight(form, rows, width, None, torch.device("cuda")) for _ in range(2))
        old.codes.view(torch.uint8).random_(0, 256)
        old.scale.copy_(2.0 ** torch.randint(-9, -4, old.scale.shape, device="cuda"))
        new.codes.copy_(old.codes)
        new.scale.copy_(old.scale)
        new.to_fragments()
        return old, new

    gate_up, down = both(count * 2 * size, hidden), both(count * hidden, size)
    biases = (random(count, 2 * size), random(count, hidden)) if layer.biased else (None, None)
    first, second = (
        PackedExperts(up, low, *biases, layer.act, 7.0)
        for up, low in zip(gate_up, down, strict=True)
    )
    return first, second


def rows_of(weight: PackedWeight, count: int, expert: int) -> Tensor:
    """Return the dequantised weights of one expert in float64; weight has the usual layout."""
    rows = weight.shape[0] // count
    part = PackedWeight(weight.form, rows, weight.shape[1], None, weight.codes.device)
    part.codes = weight.codes[expert * rows : (expert + 1) * rows]
    part.scale = weight.scale[expert * rows : (expert + 1) * rows]
    return part.dense(torch.float64)


def products(step: Step, stack: PackedExperts, sample: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the float64 results of the sampled tokens.

    Returns the values between the two GEMMs for each (token, expert) pair, and each token's output.
    """
    x = step.x[sample].double()
    weights, ids = (tensor[sample] for tensor in step.routed[0])
    inner = torch.zeros(*ids.shape, step.layer.size, dtype=torch.float64, device="cuda")
    out = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        token, place = (ids == expert).nonzero(as_tuple=True)
        up = x[token] @ rows_of(stack.gate_up, stack.count, expert).T
        if stack.gate_up_bias is not None:
            up += stack.gate_up_bias[expert].double()
        mine = activated(up, stack.act, stack.limit)
        inner[token, place] = mine
        down = mine @ rows_of(stack.down, stack.count, expert).T
        if stack.down_bias is not None:
            down += stack.down_bias[expert].double()
        out.index_add_(0, token, down * weights[token, place, None].double())
    return inner, out


@dataclass(frozen=True, slots=True)
class Way:
    """A way to compute a GEMM or a whole layer, with one call per routing.

    check: returns the distance of the first call's result from the float64 result."""

    calls: list[Callable[[], Tensor]]
    check: Callable[[Tensor], float]


Ways = dict[str, Callable[[FragmentTile | None], Way]]


def up_ways(case: Case) -> Ways:
    step, x = case.step, case.step.x
    order = [sort(ids, case.new.count) for _, ids in step.routed]
    routed = list(zip(step.routed, order, strict=True))

    def alone(result: Tensor) -> float:
        return apart(result.view(case.tokens, step.layer.chosen, -1)[case.sample], case.inner)

    def by_place(result: Tensor) -> float:
        back = torch.empty_like(result)
        back[order[0].order.long()] = result
        return alone(back)

    today = packed.tiles_for(step.routed[0][1].numel(), case.old.count).up
    ways: Ways = {
        "old grouped": lambda _: Way(
            [partial(packed_up, x, *choice, case.old, mine, today) for choice, mine in routed],
            by_place,
        ),
        "grouped": lambda tile: Way(
            [partial(fragments_up, x, *e, case.new, o, tile) for e, o in routed], by_place
        ),
    }
    if case.tokens <= FEW:
        ways["old few"] = lambda _: Way(
            [partial(few_packed_up, x, *choice, case.old) for choice in step.routed], alone
        )
        ways["few"] = lambda tile: Way(
            [partial(few_fragments_up, x, *e, case.new, tile) for e in step.routed],
            alone,
        )
    return ways


def down_ways(case: Case) -> Ways:
    """Return the ways to compute the down GEMM.

    Inputs are the sample's float64 inner values, and random values for other tokens. Torch sums
    over experts.
    """
    step = case.step
    order = [sort(ids, case.new.count) for _, ids in step.routed]
    inner = random(case.tokens, step.layer.chosen, step.layer.size)
    inner[case.sample] = case.inner.bfloat16()
    inner = inner.flatten(0, 1)
    routed = [(inner[o.order.long()], e, o) for e, o in zip(step.routed, order, strict=True)]

    def summed(result: Tensor) -> float:
        mine = result.view(case.tokens, step.layer.chosen, -1)[case.sample]
        return apart(mine.double().sum(1), case.want)

    def alone(result: Tensor) -> float:
        return apart(result[case.sample], case.want)

    today = packed.tiles_for(step.routed[0][1].numel(), case.old.count).down
    ways: Ways = {
        "old grouped": lambda _: Way(
            [partial(packed_down, y, *e, case.old, o, today) for y, e, o in routed], summed
        ),
        "grouped": lambda tile: Way(
            [partial(fragments_down, y, *e, case.new, o, tile) for y, e, o in routed],
            summed,
        ),
    }
    if case.tokens <= FEW:
        ways["old few"] = lambda _: Way(
            [partial(few_packed_down, inner, *e, case.old, None) for e in step.routed], alone
        )
        ways["few"] = lambda tile: Way(
            [partial(few_fragments_down, inner, *e, case.new, None, tile) for e in step.routed],
            alone,
        )
    return ways


def tiles_of(case: Case, way: str, up: bool) -> list[Any]:
    if way.startswith("old"):
        return [None]
    if way == "few":
        return UP_ALONE if up else DOWN_ALONE
    return list(dict.fromkeys(grouped_tiles(case.pairs, up)))


def whole_ways(case: Case) -> dict[str, Way]:
    """Return the ways to compute a whole layer with the best tiles of each GEMM."""
    step = case.step

    def check(result: Tensor) -> float:
        return apart(result[case.sample], case.want)

    def way(function: Callable[..., Tensor], stack: object, *rest: Any) -> Way:
        calls = [partial(function, step.x, *choice, stack, None, *rest) for choice in step.routed]
        return Way(calls, check)

    ways = {"16 bits": way(few if case.tokens <= MOST else grouped, case.dense)}
    ways["old grouped"] = way(packed_experts, case.old)
    if case.tokens <= FEW:
        ways["old few"] = way(few_packed.few_packed, case.old)
    for name, function in (
        ("few", few_fragments),
        ("grouped", grouped_fragments),
    ):
        up, down = (case.best.get(f"{part} {name}", []) for part in ("up", "down"))
        if up and down:
            ways[name] = way(function, case.new, FragmentTiles(up[0][1], down[0][1]))
    return ways


class Sweep:
    def __init__(self, seconds: float, copy: float) -> None:
        self.until, self.copy = time.monotonic() + seconds, copy
        self.wrong = 0

    def left(self) -> float:
        return self.until - time.monotonic()

    def us(self, case: Case, label: str, way: Way, bound: float) -> float | None:
        """Return a way's microseconds, or None if it is wrong or fails, or no time is left."""
        if self.left() < 0:
            return None
        try:
            error = way.check(way.calls[0]())
            if not error < bound:
                self.wrong += 1
                print(f"  WRONG by {error:.4f}: {case.name} {label}", flush=True)
                return None
            return time_us(way.calls, 7)
        except Exception as error:
            print(f"  {case.name} {label}: {str(error)[:100]}", flush=True)
            return None

    def product(self, case: Case, part: str) -> None:
        """Time all ways and tiles for one GEMM, and keep the best tile of each way."""
        up = part == "up"
        layer = case.step.layer
        num_bytes = case.step.met * (layer.up_bytes if up else layer.down_bytes) * BITS
        line = []
        for name, make in case.ways[part].items():
            lines = []
            for tile in tiles_of(case, name, up):
                us = self.us(case, f"{part} {name} {tile}", make(tile), 0.01)
                if us is not None:
                    lines.append((us, tile))
            lines.sort(key=lambda each: each[0])
            if lines:
                case.best[f"{part} {name}"] = lines
                us, tile = lines[0]
                share = num_bytes / us * 1e6 / self.copy
                shown = "" if tile is None else str(tuple(tile)).replace(" ", "")
                line.append(f"{name} {us:.1f} us {share:.2f}{shown}")
        print(
            f"{case.name:<28} {part:<5} {case.step.met:5.1f} met | {' | '.join(line)}", flush=True
        )

    def whole(self, case: Case) -> None:
        for name, way in whole_ways(case).items():
            us = self.us(case, f"whole {name}", way, 0.02)
            if us is not None:
                case.times[name] = us


def agreed(cases: list[Case], key: str) -> FragmentTile | None:
    """Return the best common tile of several cases, or None.

    It has the smallest maximum slowdown relative to each case's own best tile.
    """
    worst: dict[FragmentTile, float] = {}
    seen: dict[FragmentTile, int] = {}
    for case in cases:
        best = case.best.get(key, [])
        for us, tile in best:
            worst[tile] = max(worst.get(tile, 0.0), us / best[0][0])
            seen[tile] = seen.get(tile, 0) + 1
    most = max(seen.values(), default=0)
    every = [tile for tile, count in seen.items() if count == most]
    return min(every, key=lambda tile: worst[tile], default=None)


def told(tiles: tuple[FragmentTile | None, FragmentTile | None]) -> str:
    parts = ("None" if tile is None else f"FragmentTile{tuple(tile)}" for tile in tiles)
    return f"FragmentTiles({', '.join(parts)})"


def decide(cases: list[Case]) -> str:
    """Return the values for the constants in `kernels.experts.fragments.tiles`."""
    both = [case for case in cases if {"few", "grouped"} <= case.times.keys()]
    most = 0
    for tokens in TOKENS:
        here = [case for case in both if case.tokens == tokens]
        if here and all(case.times["few"] <= case.times["grouped"] * 1.02 for case in here):
            most = tokens
    few = [case for case in cases if case.tokens <= max(most, 1)]
    lines = [f"MOST={most} FEW={told((agreed(few, 'up few'), agreed(few, 'down few')))}"]
    table = []
    for pairs in sorted({case.pairs for case in cases if case.tokens > most}):
        here = [case for case in cases if case.pairs == pairs and case.tokens > most]
        tiles = agreed(here, "up grouped"), agreed(here, "down grouped")
        table.append(f"({pairs:g}, {told(tiles)})")
    lines.append(f"TILES=({', '.join(table)})")
    ratios = {}
    for case in cases:
        old = [us for name, us in case.times.items() if name.startswith("old")]
        new = [case.times[name] for name in ("few", "grouped") if name in case.times]
        if old and new:
            ratios[case.name] = min(new) / min(old)
    slower = [f"{name}: {ratio:.2f}" for name, ratio in ratios.items() if ratio >= 1.02]
    pays = sum(ratio < _PAYS for ratio in ratios.values())
    return (
        f"set: {' '.join(lines)} ({pays} of {len(ratios)} faster than in the order of spans, "
        f"slower: {', '.join(slower) or 'none'})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", default=[*LAYERS], choices=[*LAYERS])
    parser.add_argument("--tokens", nargs="+", type=int, default=[*TOKENS])
    parser.add_argument("--seconds", type=float, default=170)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("error: no CUDA device here")
    sweep = Sweep(args.seconds, copy_bandwidth())
    print(f"{torch.cuda.get_device_name()}, copy {sweep.copy / 1e12:.2f} TB/s", flush=True)
    torch.manual_seed(0)
    compilers = Compilers()
    cases = []
    for model in args.model:
        old, new = make_packed(LAYERS[model])
        dense = old.dense(torch.bfloat16)
        for tokens in args.tokens:
            step = Step.make(model, LAYERS[model], dense, tokens)
            sample = torch.randperm(tokens, device="cuda")[:_CHECKED]
            expected = products(step, old, sample)
            case = Case(f"{model}, {tokens}", step, old, new, dense, sample, *expected)
            # This sorts the (token, expert) pairs, so that the sort is not timed.
            case.ways = {"up": up_ways(case), "down": down_ways(case)}
            cases.append(case)
    # Order by size, so that truncated output still has whole groups.
    cases.sort(key=lambda case: args.tokens.index(case.tokens))
    print(f"weights and float64 are there, {sweep.left():.0f} s left", flush=True)
    with compilers.collecting():
        for case in cases:
            for part, ways in case.ways.items():
                for name, make in ways.items():
                    for tile in tiles_of(case, name, part == "up"):
                        with suppress(Exception):  # the timing raises and reports the error again
                            make(tile).calls[0]()
    print(f"{compilers.jobs} kernels are being compiled, {sweep.left():.0f} s left", flush=True)
    for case in cases:
        sweep.product(case, "up")
        sweep.product(case, "down")
    for case in cases:
        sweep.whole(case)
    print("\na layer, us: all launches, with the best tiles of each product")
    for case in cases:
        layer = case.step.layer
        num_bytes = case.step.met * (layer.up_bytes + layer.down_bytes) * BITS
        parts = [
            f"{name} {us:8.1f} {num_bytes / us * 1e6 / sweep.copy:5.2f}"
            for name, us in case.times.items()
        ]
        print(f"{case.name:<28} {'  '.join(parts)}")
    print(f"{sweep.wrong} wrong, {sweep.left():.0f} s left, waited {compilers.waited:.0f} s")
    compilers.close()
    print(decide(cases))


if __name__ == "__main__":
    main()
