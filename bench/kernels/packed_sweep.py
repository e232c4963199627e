"""Sweeps of launch parameters of GEMMs with 4- and 8-bit weights at llama-8b's shapes on one GPU.

They print the best values for the kernels' tables.

    python -m bench.kernels.packed_sweep
    python -m bench.kernels.packed_sweep --only "fp8-block, 8 tokens" --seconds 90

Launches first run once in several processes, which compiles their kernels. Then each is timed in
CUDA graphs over so many weights that none stays in the cache, and its result is compared with that
of another kernel. The last lines have the recommended settings, and the time of a layer as in an
engine.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.kernels.cases import LINEARS, cuda, form_of, random_weight
from bench.kernels.measure import copies_for, copy_bandwidth, time_us
from bench.kernels.sizes import LLAMA, Sizes
from bench.kernels.sweeping import NO_TIME, WRONG, differs, first_launches, launch_these, pays
from kernels.gemm import cublaslt
from kernels.gemm.packed import blocks, dot, fp8, gemv4, gemv8
from kernels.gemm.packed.dot import packed_dot
from kernels.gemm.packed.gemv import packed_gemv
from kernels.gemm.packed.round_rows import round_rows
from kernels.launch.pdl import num_sms
from kernels.packed import PackedWeight

SHAPES = {name: LINEARS[f"8b {name}"][0] for name in ("qkv", "o", "gate_up", "down")}
SECONDS, COMPILING = 155, 0.45  # seconds of the whole run, and the share of it for first launches
EPS, GATE = 1e-5, "silu"
AGAINST = "the other way"  # a launch of another kernel, whose result is the expected one
LAYER = "layer"  # instead of a table's name: the GEMM with the operations that an engine fuses
LAYERS = {
    "fp8-block": (1, 2, 8, 32, 64, 128, 256),
    "int4": (1, 16, 64, 128, 256),
    "int4-add": (1, 16, 64, 128, 256),
    "int8-128": (1, 16, 64, 128, 256),
}
EIGHT = [
    (rows, words, warps)
    for rows, (words, warps) in product(
        (2, 4, 8, 16),
        ((64, 1), (128, 1), (256, 1), (256, 2), (512, 2), (512, 4), (1024, 4), (1024, 8)),
    )
    if rows * words <= 2048 * warps
]
FOUR = [
    (rows, words, warps)
    for rows, (words, warps) in product(
        (4, 8, 16), ((64, 1), (128, 1), (128, 2), (256, 2), (256, 4), (512, 4))
    )
    if rows * words <= 1024 * warps
]
BLOCKS = {
    8: [(64, 16, 4, stages) for stages in (3, 4, 6, 8)],
    32: [*((64, 32, 4, stages) for stages in (3, 4, 6)), (128, 32, 4, 4), (128, 32, 8, 4)],
    64: [*((64, 64, 4, stages) for stages in (3, 4, 6)), (128, 64, 4, 4), (128, 64, 8, 4)],
    128: [
        *((64, 128, 4, 3), (64, 128, 4, 4), (128, 128, 8, 3), (128, 128, 8, 4)),
        *((128, 64, 8, 4), (128, 64, 4, 4), (64, 64, 4, 3), (64, 64, 4, 4)),
    ],
    256: [
        *((128, 128, 8, 3), (128, 128, 8, 4), (64, 128, 4, 3), (64, 128, 4, 4)),
        *((128, 64, 8, 4), (128, 64, 4, 4)),
    ],
}
# (tile of `packed_dot` for 4 bits, whether codes and not sums are scaled)
LATE = {
    16: [
        *((64, 16, 32, 2, 3), (64, 16, 32, 2, 4), (64, 16, 32, 2, 5), (64, 16, 32, 4, 4)),
        *((32, 16, 32, 2, 4), (128, 16, 32, 4, 4)),
    ],
    64: [(128, 64, 32, 4, 3), (128, 64, 32, 8, 3), (64, 64, 32, 4, 3), (64, 64, 32, 4, 4)],
    128: [(128, 128, 32, 8, 3), (128, 64, 32, 4, 3), (64, 64, 32, 4, 3)],
    256: [(128, 128, 32, 8, 3), (128, 64, 32, 4, 3)],
}
EARLY = {
    16: [(64, 16, 32, 4, 3), (64, 16, 32, 4, 4)],
    64: [(64, 64, 32, 4, 3), (64, 64, 32, 4, 4), (128, 64, 32, 8, 3)],
    128: [(64, 128, 32, 4, 3), (128, 128, 32, 8, 3), (64, 64, 32, 4, 3)],
    256: [
        *((128, 256, 32, 8, 3), (128, 256, 32, 8, 2), (64, 128, 32, 4, 3), (64, 128, 32, 4, 2)),
        *((128, 128, 32, 8, 3), (128, 128, 32, 8, 2)),
    ],
}
# Tiles of `packed_dot` for 8 bits.
BYTES = {
    16: [(64, 16, 128, 2, 3), (64, 16, 128, 2, 4), (64, 16, 128, 4, 4)],
    64: [(64, 64, 128, 4, 3), (128, 64, 128, 8, 3), (128, 64, 128, 4, 3)],
    128: [(128, 64, 128, 8, 3), (128, 128, 128, 8, 3), (64, 128, 128, 4, 3)],
    256: [(128, 64, 128, 8, 3), (128, 128, 128, 8, 3), (128, 256, 128, 8, 2)],
}


class Step(NamedTuple):
    """The inputs of one GEMM of a layer, for a number of tokens.

    x: [tokens, in]. pair: for the MLP's down GEMM, the gate and up outputs that give x.
    """

    shape: str
    tokens: int
    x: Tensor
    pair: Tensor | None
    norm: Tensor
    residual: Tensor
    rounded: tuple[Tensor, Tensor]  # x quantised to 8 bits in groups of 128, and scales


class Try(NamedTuple):
    """One launch to time and check.

    what: the table whose launches are tried, or LAYER.
    launch: None for the launch that the engine uses, the name of another way, or (tile, number of
        parts of the columns, ...).
    """

    what: str
    case: str
    to: str  # the weights' format
    step: Step
    launch: Any
    call: Callable[[PackedWeight], Tensor]


Found = dict[tuple[str, str], dict[str, dict[Any, float]]]  # (what, case) -> shape -> launch -> us


@cache
def step_of(s: Sizes, shape: str, tokens: int) -> Step:
    outputs, width = SHAPES[shape]
    torch.manual_seed(tokens)
    x, pair = s.random(tokens, width), None
    if shape == "down":
        pair = s.random(tokens, 2 * width)
        gate, up = pair.chunk(2, -1)
        x = torch.nn.functional.silu(gate) * up
    norm, residual = 1 + 0.1 * s.random(width), s.random(tokens, outputs)
    return Step(shape, tokens, x, pair, norm, residual, round_rows(x, group=128))


@cache
def weights_of(s: Sizes, to: str, shape: str, many: bool) -> list[PackedWeight]:
    """Return random weights of a shape.

    to: the name of the weight format.
    many: whether to return more weights than fit in the L2 cache, for calls in turn; else one.
    """
    outputs, width = SHAPES[shape]
    form = form_of(to, width)
    count = copies_for(PackedWeight.num_bytes(form, outputs, width)) + 1 if many else 1
    torch.manual_seed(0)
    return [random_weight(s, form, outputs, width) for _ in range(count)]


def around(step: Step) -> dict[str, Any]:
    """Return the norm, gate or residual that an engine fuses into one token's GEMM."""
    if step.shape == "qkv":
        return {"norm": step.norm, "eps": EPS}
    if step.shape == "gate_up":
        return {"norm": step.norm, "eps": EPS, "gate": GATE}
    return {"residual": step.residual}


def whole(step: Step, weight: PackedWeight) -> Tensor:
    """Compute the GEMM with the operations that an engine's step fuses or runs around it.

    The MLP's gate is computed after the gate and up GEMM, or in the quantisation before the down
    GEMM.
    """
    how = around(step)
    x = step.x
    if step.tokens > 1 and cuda.takes_gate(x, weight):
        how.pop("gate", None)
        if step.pair is not None:
            x, how["x_gate"] = step.pair, GATE
    return cuda.packed_linear(x, weight, **how)


def case_of(to: str, tokens: int) -> str:
    return f"{to}, {tokens} token{'' if tokens == 1 else 's'}"


def tries(s: Sizes = LLAMA) -> Iterator[Try]:
    """Yield all launches to try, grouped by case and shape; each group begins with AGAINST."""
    launch: Any
    for to, counts in LAYERS.items():
        for tokens, shape in product(counts, SHAPES):
            step = step_of(s, shape, tokens)
            yield Try(LAYER, case_of(to, tokens), to, step, None, partial(whole, step))
    for to, table, other, tiles in (
        ("fp8-block", "gemv8.tile", gemv8.gemv8, EIGHT),
        ("int4", "gemv4.tile", gemv4.gemv4, FOUR),
        ("int4-add", "gemv4.tile", gemv4.gemv4, FOUR),
    ):
        for shape in SHAPES:
            step = step_of(s, shape, 1)
            mine: Callable[..., Try] = partial(Try, table, case_of(to, 1), to, step)
            yield mine(AGAINST, partial(_with, packed_gemv, step, around(step)))
            yield mine("in an engine", partial(whole, step))
            for launch in (None, *((tile, 0) for tile in tiles)):
                how = around(step) | {"config": launch and launch[0]}
                yield mine(launch, partial(_with, other, step, how))
    for tokens, shape in product(BLOCKS, SHAPES):
        step = step_of(s, shape, tokens)
        mine = partial(Try, "blocks.tile", case_of("fp8-block", tokens), "fp8-block", step)
        yield mine(AGAINST, partial(_decoded, step))
        if s.device == "cuda":
            yield mine("torch's scaled product", partial(_library, step))
        for launch in (None, *product(BLOCKS[tokens], (1, 2, 3, 4, 8))):
            if launch is None or _worthwhile(step, *launch):
                yield mine(launch, partial(_blocks, step, launch))
    for to, tokens, shape in product(("int4", "int4-add", "int8-128"), LATE, SHAPES):
        step = step_of(s, shape, tokens)
        mine = partial(Try, "dot.tile", case_of(to, tokens), to, step)
        yield mine(AGAINST, partial(_expanded, step))
        late = LATE[tokens] if to == "int4" or tokens <= 16 else []
        late = BYTES[tokens] if to == "int8-128" else late
        early = EARLY[tokens] if to == "int4" or (to == "int4-add" and tokens > 16) else []
        for launch in (
            None,
            *product(late, (1, 2, 4), (False,)),
            *product(early, (1, 2, 4), (True,)),
        ):
            if launch is None or _worthwhile(step, *launch[:2]):
                yield mine(launch, partial(_dot, step, launch))


def _with(
    launcher: Callable[..., Tensor], step: Step, how: dict[str, Any], weight: PackedWeight
) -> Tensor:
    return launcher(step.x, weight, **how)


def _decoded(step: Step, weight: PackedWeight) -> Tensor:
    """Multiply x, quantised to 8 bits and dequantised, by dequantised weights."""
    rows, scales = (tensor[: step.tokens].float() for tensor in step.rounded)
    return packed_dot((rows * scales.repeat_interleave(128, 1)).to(step.x.dtype), weight)


def _expanded(step: Step, weight: PackedWeight) -> Tensor:
    """Multiply x by dequantised weights with cuBLASLt."""
    return cublaslt.linear(step.x, dot.expand(weight, step.x), None)


def _library(step: Step, weight: PackedWeight) -> Tensor:
    return fp8.scaled(*step.rounded, weight, step.x.dtype)[: step.tokens]


def _blocks(step: Step, launch: Any, weight: PackedWeight) -> Tensor:
    tile, split = launch or (None, 0)
    dtype = step.x.dtype
    return blocks.block_linear(*step.rounded, weight, step.tokens, dtype, None, tile, split)


def _dot(step: Step, launch: Any, weight: PackedWeight) -> Tensor:
    return packed_dot(step.x, weight, None, *(launch or (None, 0, None)))


def _worthwhile(step: Step, tile: tuple[int, ...], split: int) -> bool:
    """Whether to try a launch: it has no splits, or few enough programs for one wave."""
    programs = -(-SHAPES[step.shape][0] // tile[0]) * -(-step.tokens // tile[1])
    return split == 1 or split * programs <= 132 * 4


def now(table: str, to: str, shape: str, tokens: int) -> str:
    """Return the launch that the engine uses: its tile, and the number of splits of the columns.

    table: the name of the function that chooses it, such as "dot.tile".
    """
    outputs, width = SHAPES[shape]
    form = form_of(to, width)
    weight = PackedWeight(form, outputs, width, None, torch.device("meta"))
    if table == "gemv8.tile":
        return str(gemv8.tile(outputs, form.rows > 1))
    if table == "gemv4.tile":
        return str(gemv4.tile(outputs, width // 16))
    sms = num_sms(torch.device("cuda"))
    tile: tuple[int, ...]
    if table == "blocks.tile":
        tile, steps = blocks.tile(tokens, outputs, sms), width // 128
        rule: Callable[[int, int, int, int], int] = blocks.splits
    else:
        early = form.bits == 4 and dot.scale_codes_pays(weight, tokens, sms)
        tile = dot.tile(form.bits, tokens, SHAPES[shape], sms, early, dot.scales_sums(weight))
        steps, rule = width // (tile[2] * (4 if form.bits == 4 else 1)), dot.splits
    programs = -(-outputs // tile[0]) * -(-tokens // tile[1])
    return f"{tile} x {rule(tile[0] * tile[1], programs, steps, sms)}"


def layer_lines(found: Found) -> Iterator[str]:
    """Yield a line with the time of a layer's four GEMMs for each case in which all were timed."""
    for (what, case), shapes in found.items():
        if what == LAYER and len(shapes) == len(SHAPES):
            total = sum(times[None] for times in shapes.values())
            parts = ", ".join(f"{shape} {times[None]:.1f}" for shape, times in shapes.items())
            yield f"  {case:<22} {total:8.1f} us: {parts}"


def table_lines(found: Found, today: Callable[[str, str, str, int], str]) -> Iterator[str]:
    """Yield lines: each shape's fastest launch, the engine's launch, and the best tile for SHAPES.

    today: returns the launch that the engine uses (`now`).
    """
    for (what, case), shapes in found.items():
        if not what.endswith(".tile"):
            continue
        to, count = case.split(", ")
        tokens = int(count.split()[0])
        tiles: dict[Any, list[float]] = {}
        for shape, times in shapes.items():
            tried = {launch: us for launch, us in times.items() if isinstance(launch, tuple)}
            if not tried or None not in times:
                continue
            best = min(tried, key=tried.__getitem__)
            tile, split, *early = best
            text = f"{tile}{f' x {split}' if split else ''}{' early' if early == [True] else ''}"
            advice = "set it" if pays(tried[best], times[None]) else "leave it"
            others = "".join(f", {of} {us:.1f}" for of, us in times.items() if isinstance(of, str))
            yield (
                f"  {what:<12} {case:<22} {shape:<8} today {today(what, to, shape, tokens)} "
                f"{times[None]:.1f} us, best {text} {tried[best]:.1f} us{others}: {advice}"
            )
            by_tile: dict[Any, float] = {}
            for (tile, _, *early), us in tried.items():
                by_tile[tile, *early] = min(us, by_tile.get((tile, *early), us))
            for key, us in by_tile.items():
                tiles.setdefault(key, []).append(us)
        full = {key: sum(us) for key, us in tiles.items() if len(us) == len(SHAPES)}
        if full:
            key = min(full, key=full.__getitem__)
            total = sum(times[None] for times in shapes.values())
            text = f"{key[0]}{' early' if key[1:] == (True,) else ''} {full[key]:.1f} us"
            yield f"  {what:<12} {case:<22} all four today {total:.1f} us, best {text}"


def check(each: Try, wanted: Tensor | None) -> tuple[Tensor, str]:
    """Run a launch; return its result, and a remark on the distance from the expected result."""
    each.step.residual.zero_()
    output = each.call(weights_of(LLAMA, each.to, each.step.shape, False)[0])
    output = output.clone()  # a copy, as the result may be the residual's memory
    return output, differs(output, wanted)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[""], metavar="CASE", help="or its beginning")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="of all (default %(default)s)"
    )
    parser.add_argument("--these", nargs="+", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    began = time.monotonic()
    if not torch.cuda.is_available():
        raise SystemExit("error: no CUDA device here")
    every = [trial for trial in tries() if trial.case.startswith(tuple(args.only))]
    if args.these is not None:
        launch_these(args.these, lambda number: check(every[number], None))
        return 0
    seconds, name = COMPILING * args.seconds, "bench.kernels.packed_sweep"
    failed = first_launches(name, ["--only", *args.only], len(every), seconds)
    copy = copy_bandwidth()
    print(
        f"{torch.cuda.get_device_name()}, copy {copy / 1e12:.2f} TB/s, {len(every)} launches, "
        f"compiled after {time.monotonic() - began:.0f} s",
        flush=True,
    )
    results: Found = {}
    wanted: Tensor | None = None
    last: Any = None
    for number, trial in enumerate(every):
        if time.monotonic() - began > args.seconds - 3:
            print(f"time is up: {len(every) - number} launches were not timed")
            break
        at = trial.what, trial.case, trial.step.shape
        if at != last:
            last, wanted = at, None
        line = f"{trial.what:<15} {trial.case:<22} {trial.step.shape:<8} {trial.launch}"
        weights = weights_of(LLAMA, trial.to, trial.step.shape, True)
        error, remark, us = failed.get(number, ""), "", 0.0
        error = "" if error == NO_TIME else error  # not compiled in time: the timing compiles it
        try:
            if not error:
                output, remark = check(trial, wanted)
                wanted = output if wanted is None else wanted
                us = time_us([partial(trial.call, weight) for weight in weights], 10)
        except Exception as caught:  # a launch that does not fit the device
            error = str(caught)
        print(f"{line}: {error[:120] or f'{us:.2f} us'}  {remark}".rstrip(), flush=True)
        if not error and not remark.startswith(WRONG):
            results.setdefault(at[:2], {}).setdefault(at[2], {})[trial.launch] = us
    print("\nTables: a launch's microseconds, x shares of the columns")
    print("\n".join(table_lines(results, now)))
    print("\nA layer's four products with norms, gate and residuals, in microseconds")
    print("\n".join(layer_lines(results)))
    print(f"{time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
