"""Decode steps on the CPU: the time besides matmuls, and the speed of matmuls.

Rows have the share of a step that is not matmuls, the cost of more rows, the gain of more cores,
and matmul speeds relative to the machine's limits.

    python -m bench.cpu.steps --quantization gguf w8a8 none --out bench/results

Each format and number of threads has its own process, and the best of many short runs counts.
"Matmuls" means one multiplication by each of the decoder's matrices, as one program, and by the
head. Cases:

    FORMAT/others/N      share of a step of N decodes that is not matmuls
    FORMAT/host/N        share outside of all kernels: scheduler, assembly, sampling, Python
    FORMAT/verify/N      seconds of a step with N tokens of one request / with one (speculation)
    FORMAT/cores/N       seconds of a step of N decodes on one core / on all
    FORMAT/cores/read    seconds of a streaming read on one core / on all; bounds one-row matmuls
    FORMAT/cores/peak    seconds of multiply instructions likewise; bounds matmuls of many rows
    FORMAT/bandwidth     share of a streaming read's bandwidth that matmuls of one row achieve
    FORMAT/peak          share of the multiply rate that matmuls of 512 rows achieve
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.report.result_file import last_result, write

RUNNING = (1, 32)
ROWS = (1, 2, 4, 8)
PROMPT = 128
MANY = 512  # tokens of a prompt chunk
READ = 256 << 20


def best(run: Callable[[], object], seconds: float) -> float:
    """Run a function repeatedly for about `seconds`; return the seconds of its shortest run."""
    run()
    end, least = time.perf_counter() + seconds, float("inf")
    while time.perf_counter() < end:
        began = time.perf_counter()
        run()
        least = min(least, time.perf_counter() - began)
    return least


def read_bandwidth(threads: int) -> float:
    """Measure the bytes/s of all threads together, each of which streams its own memory."""
    import ctypes

    import torch

    from engine.weights import huge_pages
    from kernels.cpu.codegen.compiler import compile_ir
    from kernels.cpu.codegen.ir import IRWriter, Value, module
    from kernels.cpu.codegen.processor import lanes

    writer, part = IRWriter(lanes()), 1 << 20

    def stream(index: Value) -> None:
        begin = writer.at(writer.argument(2, "ptr"), writer.mul(index, part), "i8")

        def line(at: Value, *sums: Value) -> list[Value]:
            place = writer.at(begin, at, "i8")
            totals = []
            for number, total in enumerate(sums):
                some = writer.load(writer.at(place, number * writer.lanes), writer.integers)
                totals.append(writer.op(f"xor {writer.integers} {total}, {some}"))
            return totals

        start = [(writer.integers, "zeroinitializer")] * 4
        sums = writer.loop(0, part, start, line, step=16 * writer.lanes)
        for number, total in enumerate(sums):  # use the sums, or the compiler would drop the reads
            writer.store(total, writer.at(begin, number * writer.lanes), writer.integers)

    writer.claim_shares("%args", str(threads), str(READ // part), stream)
    function = compile_ir(module([(writer, "void @stream(ptr %args)")]))["stream"]
    # Write the memory once, as untouched pages would all map to the same page of zeros.
    memory = torch.ones(READ, dtype=torch.uint8)
    huge_pages.collapse()
    args = (ctypes.c_int64 * 8)()
    args[2] = memory.data_ptr()
    return READ / best(lambda: function(args, threads), 1.0)


def peak(quantization: str, threads: int) -> float:
    """Measure the operations/s of the multiply instruction that a format's matmuls use."""
    import ctypes

    from kernels.cpu.codegen import compiler, processor
    from kernels.cpu.codegen.ir import IRWriter, module
    from kernels.cpu.codegen.products import dot_bytes, dot_pairs

    size = processor.lanes()
    writer, turns, sums = IRWriter(size), 100_000, 16
    kind, products, operand = writer.vector, 1, ""
    if quantization != "none" and processor.byte_dot():
        kind, products = writer.integers, 4
        operand = writer.op(f"freeze {kind} zeroinitializer")
    elif quantization == "none" and processor.dot_bf16():
        products = 2
        operand = writer.op(f"freeze <{2 * size} x bfloat> zeroinitializer")

    def added(total: str) -> str:
        if products == 4:
            return dot_bytes(writer, total, operand, operand, wide=False)
        if products == 2:
            return dot_pairs(writer, total, operand, operand)
        return writer.fma(total, total, total)

    def turn(_: str, *totals: str) -> list[str]:
        return [added(total) for total in totals]

    sums_out = writer.loop(0, turns, [(kind, "zeroinitializer")] * sums, turn)
    for total in sums_out:
        writer.store(total, writer.argument(2, "ptr"), kind)
    function = compiler.compile_ir(module([(writer, "void @peak(ptr %args)")]))["peak"]
    target = (ctypes.c_int64 * 64)()
    args = (ctypes.c_int64 * 8)()
    args[2] = ctypes.addressof(target)
    seconds = best(lambda: function(args, threads), 0.5)
    return threads * turns * sums * size * products * 2 / seconds


def products_of(model: Any, rows: int) -> Callable[[], object]:
    """Return a function that multiplies `rows` rows by each matrix of a decoder once."""
    import torch

    from kernels.cpu.codegen.program import Buffers, Program

    linears = [*model.linears()]
    inputs = {
        width: torch.randn(rows, width) for width in {linear.spec.in_features for linear in linears}
    }
    hidden = torch.randn(rows, model.config.hidden_size)

    def body() -> torch.Tensor:
        for projection in linears:
            out = projection.method.apply(projection.state, inputs[projection.spec.in_features])
        return out

    program = Program(body, Buffers(rows), rows, torch.get_num_threads())

    def run() -> None:
        program.play()
        if rows != MANY:  # for a prompt only the last token is sampled
            model.logits(hidden)

    return run


class Kernels:
    """The seconds spent in a step's kernels: those of its program, and of the head."""

    def __init__(self, model: Any) -> None:
        from kernels.cpu.codegen.program import Program

        self.seconds = 0.0
        Program.play = self._timed(Program.play)  # type: ignore[method-assign]
        model.logits = self._timed(model.logits)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any) -> Any:
            began = time.perf_counter()
            out = call(*given)
            self.seconds += time.perf_counter() - began
            return out

        return timed

    def of_the_shortest(self, step: Callable[[], object], seconds: float) -> tuple[float, float]:
        """Return (seconds of the shortest step, seconds of it spent in kernels)."""
        step()
        end, least = time.perf_counter() + seconds, (float("inf"), 0.0)
        while time.perf_counter() < end:
            self.seconds, began = 0.0, time.perf_counter()
            step()
            least = min(least, (time.perf_counter() - began, self.seconds))
        return least


def checking(core: Any, count: int) -> Callable[[], object]:
    """Return a step that verifies `count` tokens of the only running request.

    As in speculative decoding, each token is a decode with one more key than the previous one. The
    tokens are the prompt's last ones, recomputed, so the KV cache does not change.
    """
    from engine.batch import Batch

    (request,) = core.scheduler.running.values()
    starts = [*range(PROMPT - count, PROMPT)]
    batch = Batch(-1, [request.row] * count, starts, [1] * count, [True] * count)
    batch.num_decodes = count
    return lambda: core._runner.launch(batch).wait()


def side(model: str, quantization: str, threads: int, seconds: float) -> dict[str, Any]:
    """Measure one quantisation in this process. Returns seconds by name."""
    import torch

    from deployments.checkpoints.resolve import resolve_model
    from engine.factory import build
    from engine.library.llm import make_config
    from engine.messages import EngineRequest
    from engine.sampling_params import SamplingParams

    folder = resolve_model(model, blocks=quantization == "gguf")
    fields = {"device": "cpu", "dtype": "bfloat16", "quantization": quantization}
    fields |= {"prefix_caching": False, "max_num_seqs": max(RUNNING), "max_model_len": 2048}
    core, _ready = build(make_config(str(folder), {**fields, "num_threads": threads}))
    decoder: Any = core._runner.model  # type: ignore[attr-defined]
    greedy = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=1800)
    figures: dict[str, Any] = {}
    kernels = Kernels(decoder)
    for running in RUNNING:
        for number in range(running):
            ids = [(7 * at + number) % core.config.vocab_size for at in range(PROMPT)]
            core.add_request(EngineRequest(number, ids, PROMPT, greedy, seed=0))
        started: set[int] = set()
        while len(started) < running:
            started |= {delta.id for delta in core.step() if delta.token_ids}
        # The time is limited, so that contexts do not grow much.
        step, inside = kernels.of_the_shortest(core.step, min(seconds, 2.0))
        figures[f"step-{running}"], figures[f"host-{running}"] = step, step - inside
        if running == 1:
            for count in ROWS:
                figures[f"verify-{count}"] = best(checking(core, count), min(seconds, 2.0))
        core.abort([*range(running)])
        while core.has_work():
            core.step()
    with torch.inference_mode():
        for rows in sorted({*RUNNING, MANY}):
            figures[f"products-{rows}"] = best(products_of(decoder, rows), seconds)
    specs = [linear.spec for linear in decoder.linears()]
    figures["weights"] = sum(linear.spec.num_parameters for linear in decoder.linears())
    figures["bytes"] = sum(linear.num_bytes for linear in decoder.linears())
    head = decoder.config.vocab_size * decoder.config.hidden_size
    figures["bytes"] += int(figures["bytes"] / figures["weights"] * head) if specs else 0
    # Alternate, as other load on the machine changes from minute to minute.
    for _ in range(2):
        for key, count in (("read", threads), ("read-1", 1)):
            figures[key] = max(figures.get(key, 0.0), read_bandwidth(count))
        for key, count in (("peak", threads), ("peak-1", 1)):
            figures[key] = max(figures.get(key, 0.0), peak(quantization, count))
    return figures


def rows_of(name: str, one: dict[str, Any], all_cores: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a format from the results of `side` with one core and with all."""
    rows = []

    def row(case: str, ratio: float, unit: str = "") -> None:
        rows.append({"case": f"{name}/{case}", "ratio": round(ratio, 3), "unit": unit})

    for running in RUNNING:
        step, products = all_cores[f"step-{running}"], all_cores[f"products-{running}"]
        row(f"others/{running}", 1 - products / step, "of a step")
        row(f"host/{running}", all_cores[f"host-{running}"] / step, "of a step")
        row(f"cores/{running}", one[f"step-{running}"] / step, "of one core")
    for key in ("read", "peak"):
        row(f"cores/{key}", all_cores[key] / all_cores[f"{key}-1"], "of one core")
    for count in ROWS[1:]:
        row(f"verify/{count}", all_cores[f"verify-{count}"] / all_cores["verify-1"], "of one row")
    row("bandwidth", all_cores["bytes"] / all_cores["products-1"] / all_cores["read"], "of a read")
    operations = 2 * MANY * all_cores["weights"]
    rate = operations / all_cores[f"products-{MANY}"]
    row("peak", rate / all_cores["peak"], "of the peak")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="default")
    parser.add_argument("--quantization", nargs="+", default=["gguf", "w8a8", "none"])
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--out", type=Path, help="folder for the result files")
    parser.add_argument("--side", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        times = side(args.model, args.quantization[0], args.side, args.seconds)
        print("RESULT " + json.dumps(times), flush=True)
        return
    cores = len(os.sched_getaffinity(0))
    rows, lines = [], []
    for name in args.quantization:
        sides = []
        for threads in (1, cores):
            command = [sys.executable, "-m", "bench.cpu.steps", "--model", args.model]
            command += ["--quantization", name, "--seconds", str(args.seconds)]
            # the engine process sets these, too (engine.process.lifeline)
            threads_of = {"OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": "30000"}
            done = subprocess.run(
                [*command, "--side", str(threads)],
                stdout=subprocess.PIPE, text=True, env={**os.environ, **threads_of},
            )  # fmt: skip
            times = last_result(done)
            if times is None:
                raise SystemExit(f"{name} on {threads} threads failed")
            sides.append(times)
            lines.append({"format": name, "threads": threads, **sides[-1]})
        format_rows = rows_of(name, *sides)
        for row in format_rows:
            print(f"{row['case']:<24} {row['ratio']:>7} {row['unit']}", flush=True)
        rows += format_rows
    if args.out:
        config = {"model": args.model, "formats": args.quantization, "cores": cores}
        write(args.out, "cpu-steps", config, rows, lines)


if __name__ == "__main__":
    main()
