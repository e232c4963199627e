"""The profile of a step on a GPU: time and lower bound of each kind of kernel, and idle gaps.

    python -m bench.step_profile --model FOLDER --name llama-8b --out bench/results

FOLDER needs only a config.json: weights are random. The engine's own loop runs three kinds of step:
one decode, 256 decodes, and 255 decodes with 768 prompt tokens.

A kernel's time is the time that it adds to the step: under programmatic dependent launch kernels
overlap, and the overlap counts for the earlier kernel. The lower bound of a kind of kernel is its
bytes divided by a copy's bandwidth, or its operations divided by a large matmul's rate, whichever
is longer. Bandwidth and rate are measured in the same run.
"""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.report.result_file import write
from bench.versus.engine import engine_fields
from engine.config.model_config import ModelConfig
from engine.factory import build
from engine.library.llm import make_config
from engine.messages import EngineRequest
from engine.sampling_params import SamplingParams
from engine.scheduling.core import EngineCore
from kernels.experts.routing import up_rows

STEPS = 12  # profiled steps, of which the first and the last are dropped
PROMPT = 400  # prompt tokens of the decoding requests
CHUNK = 768  # prompt tokens of a mixed step
BOUNDARY = "_assemble_kernel"  # the first kernel of a step
COPY = "Memcpy"

# Kinds of kernels, by their names; the first matching kind is used.
KINDS = (
    ("decode attention", re.compile(r"_decode_kernel|_merge_kernel|_plan_kernel")),
    ("prefill attention", re.compile(r"_prefill_kernel|flash|fmha")),
    ("rope and KV write", re.compile(r"_rope_kv_write|_latent_write")),
    ("norm", re.compile(r"_rms_norm")),
    ("gate", re.compile(r"_gated_kernel")),
    ("experts up", re.compile(r"^_(few|grouped|packed|few_packed)_up_kernel")),
    ("experts down", re.compile(r"^_(few|grouped|packed|few_packed)_down_kernel")),
    ("expert choice", re.compile(r"^_(few_route|topk)_kernel")),
    ("expert sort", re.compile(r"^_(sort|count|place)_kernel")),
    ("expert sum", re.compile(r"^_sum_kernel")),
    # cuBLAS's name of GEMMs with 16-bit inputs and 32-bit outputs, such as routers
    ("router product", re.compile(r"^nvjet_sm\d+_tss_")),
    ("products", re.compile(r"gemv|nvjet|gemm|cutlass|few_rows|splitk|cublas", re.IGNORECASE)),
    (
        "sampling",
        re.compile(r"_best_of|_filter_kernel|_logprob_|_penalty|_ban_kernel|_bias_kernel"),
    ),
    ("assembly", re.compile(r"_assemble_kernel|_apply_updates")),
)
OTHER = "other"  # embedding, index selections, copies to and from the host


@dataclass(frozen=True, slots=True)
class Kernel:
    """A launched kernel. Times are microseconds of the device's clock."""

    name: str
    start: float
    end: float


@dataclass(slots=True)
class TimeLine:
    """The parts of complete steps, in microseconds per step."""

    steps: int = 0
    step_us: float = 0.0
    idle_us: float = 0.0  # all gaps between kernels
    between_us: float = 0.0  # gaps between two steps
    kinds: dict[str, float] = field(default_factory=dict)
    # name of a kernel -> microseconds and launches per step
    names: dict[str, tuple[float, float]] = field(default_factory=dict)

    def launches(self, kind: str) -> float:
        """Return the number of kernels of a kind that are launched per step."""
        return sum(count for name, (_, count) in self.names.items() if kind_of(name) == kind)


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS if pattern.search(name)), OTHER)


def time_line(kernels: Sequence[Kernel]) -> TimeLine:
    """Split the time between the first and the last step boundary among kernels and gaps.

    Raises ValueError without a complete step.
    """
    ordered = sorted(kernels, key=lambda kernel: kernel.start)
    starts = [kernel.start for kernel in ordered if BOUNDARY in kernel.name]
    if len(starts) < 2:
        raise ValueError(f"{len(starts)} starts of a step among {len(ordered)} kernels")
    begin, finish = starts[0], starts[-1]
    steps = len(starts) - 1
    line = TimeLine(steps, (finish - begin) / steps)
    now, before = begin, ""
    for kernel in ordered:
        if kernel.start < begin:
            continue
        gap = max(0.0, kernel.start - now) / steps
        line.idle_us += gap
        # A step ends with a copy to the host and begins with a copy from it.
        if BOUNDARY in kernel.name or COPY in kernel.name or COPY in before:
            line.between_us += gap
        if kernel.start >= finish:
            break
        before = kernel.name
        added = max(0.0, min(kernel.end, finish) - max(now, kernel.start)) / steps
        now = max(now, kernel.end)
        kind = kind_of(kernel.name)
        line.kinds[kind] = line.kinds.get(kind, 0.0) + added
        us, launches = line.names.get(kernel.name, (0.0, 0.0))
        line.names[kernel.name] = (us + added, launches + 1 / steps)
    return line


def products_floor_us(
    parameters: Sequence[tuple[str, tuple[int, int], int]],
    tokens: int,
    samples: int,
    bandwidth: float,
    rate: float,
) -> float:
    """Return the lower bound of a step's GEMM time in microseconds.

    parameters: (name, (outputs, inputs), bytes per element) of each matrix.
    tokens: rows of x. samples: rows of x for the head, which computes only sampled rows.
    bandwidth: bytes/s. rate: operations/s.
    """
    total = 0.0
    for name, (outputs, inputs), size in parameters:
        rows = samples if name.startswith("head") else tokens
        read = outputs * inputs * size / bandwidth
        total += max(read, 2 * rows * outputs * inputs / rate)
    return total * 1e6


@dataclass(frozen=True, slots=True)
class Mixture:
    """The sizes of a layer's experts on this device, for bounds of its GEMMs.

    here: experts on this device. choices: all experts. chosen: experts per token.
    num_bytes: bytes of all experts on this device.
    """

    here: int
    choices: int
    chosen: int
    hidden: int
    size: int
    up_rows: int  # rows of an expert's first GEMM
    num_bytes: int


def mixture_floors_us(
    mixtures: Sequence[Mixture], step: "Step", line: TimeLine, bandwidth: float, rate: float
) -> dict[str, float]:
    """Return {kind: lower bound in microseconds} for the kernels of MoE experts.

    The number of experts with tokens is the mean under even routing. Their weights are read once.
    """
    element, floors = step.element, dict.fromkeys(("experts up", "experts down"), 0.0)
    floors |= dict.fromkeys(("expert choice", "expert sort", "expert sum", "router product"), 0.0)
    fused = any("_few_route_kernel" in name for name in line.names)
    for mixture in mixtures:
        tokens, pairs = step.tokens, step.tokens * mixture.chosen
        met = 1 - (1 - mixture.chosen / mixture.choices) ** tokens
        pairs_here = pairs * mixture.here / mixture.choices
        rows = mixture.up_rows, mixture.size
        for kind, share in zip(("experts up", "experts down"), rows, strict=True):
            read = met * mixture.num_bytes * share / sum(rows) / bandwidth
            floors[kind] += max(read, 2 * pairs_here * share * mixture.hidden / rate)
        router = (mixture.choices + tokens) * mixture.hidden * element
        logits = 4 * tokens * mixture.choices
        # With few tokens, norm, router GEMM and routing are one launch, which writes no logits.
        of_choice = router + tokens * mixture.hidden * element if fused else logits
        floors["expert choice"] += (of_choice + 8 * pairs) / bandwidth
        floors["router product"] += (router + logits) / bandwidth
        floors["expert sort"] += 8 * pairs / bandwidth
        floors["expert sum"] += (pairs + 2 * tokens) * mixture.hidden * element / bandwidth
    return {kind: floor * 1e6 for kind, floor in floors.items() if kind in line.kinds}


@dataclass(frozen=True, slots=True)
class Step:
    """The work of a step, for the lower bounds of all kinds except GEMMs."""

    tokens: int
    samples: int
    prompt: int  # prompt tokens in the step
    keys: float  # keys that decodes read
    block_size: int
    element: int  # bytes of an element of activations, keys and values


def floors_us(
    config: ModelConfig, step: Step, line: TimeLine, bandwidth: float, rate: float
) -> dict[str, float]:
    """Return {kind: lower bound in microseconds} for the kinds of kernels that ran.

    Norms, gates and rotary embeddings count once per launch, so fused ones are not counted twice.
    """
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    seen = step.prompt * (step.prompt + 1) / 2
    row = step.tokens * step.element
    num_bytes = {
        "decode attention": step.keys * config.num_layers * 2 * kv_heads * dim * step.element,
        "norm": line.launches("norm") * row * 2 * config.hidden_size,
        "gate": line.launches("gate") * row * 3 * config.intermediate_size,
        "rope and KV write": line.launches("rope and KV write")
        * (row * 2 * (heads + 2 * kv_heads) * dim),
        "sampling": step.samples * config.vocab_size * step.element,
        # Block ids are read and written. Per token an id is read and written, and a position and a
        # slot are written.
        "assembly": step.keys / step.block_size * 8 + step.tokens * 20,
    }
    floors = {kind: count / bandwidth * 1e6 for kind, count in num_bytes.items()}
    floors["prefill attention"] = config.num_layers * 4 * seen * heads * dim / rate * 1e6
    return {kind: floor for kind, floor in floors.items() if kind in line.kinds}


def _matrices(model: Any) -> list[tuple[str, tuple[int, int], int]]:
    """Return the matrices of a decoder with unquantised weights.

    The embedding counts as the head of a model with tied embeddings.
    """
    weights = [("layer", linear.state.weight) for linear in model.linears()]
    weights.append(("head", model.embedding if model.head is None else model.head.state.weight))
    return [
        (name, (weight.shape[0], weight.shape[1]), weight.element_size())
        for name, weight in weights
    ]


def _mixtures(model: Any) -> list[Mixture]:
    """Return the experts of each layer that has experts."""
    rows = []
    for layer in model.layers:
        for stack in layer.stacks:
            spec, config = stack.spec, model.config.experts
            up = up_rows(spec.size, spec.act)
            rows.append(
                Mixture(
                    *(spec.count, config.choices, config.routing.chosen),
                    *(spec.hidden, spec.size, up, stack.num_bytes),
                )
            )
    return rows


def _record(core: EngineCore, feed: Any) -> tuple[list[Kernel], float]:
    """Record STEPS rounds of the loop; return the kernels, and the mean keys that decodes read."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    keys = []
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            feed()
            core.step()
            running = core.scheduler.running.values()
            keys.append(sum(len(r.token_ids) for r in running if r.num_prompt == PROMPT))
        torch.cuda.synchronize()
    kernels = [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if str(event.device_type).endswith("CUDA")
    ]
    return kernels, sum(keys) / len(keys)


def measure(core: EngineCore, running: int, chunk: int) -> tuple[list[Kernel], float]:
    """Record steps with `running` decoding requests; then abort all requests.

    chunk: prompt tokens of a new request in each step, 0 for none.
    """
    greedy = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=64)
    single = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=1)
    number = iter(range(10**6))

    def add_request(tokens: int, params: SamplingParams) -> None:
        at = next(number)
        ids = [(at + i * 7) % min(core.config.vocab_size, 32_000) for i in range(tokens)]
        core.add_request(EngineRequest(at, ids, tokens, params, seed=0))

    def feed() -> None:
        if chunk:
            add_request(chunk, single)

    for _ in range(running):
        add_request(PROMPT, greedy)
    counted: set[int] = set()
    while len(counted) < running:
        counted |= {delta.id for delta in core.step() if delta.token_ids}
    for _ in range(6):
        feed()
        core.step()
    recorded = _record(core, feed)
    core.abort(list(core.scheduler.requests))
    while core.has_work():
        core.step()
    return recorded


def report(core: EngineCore, label: str, bandwidth: float, rate: float) -> list[dict[str, Any]]:
    """Profile the three kinds of step, print each, and return their rows."""
    runner: Any = core._runner  # the model runner, with model and KV cache
    matrices, mixtures = _matrices(runner.model), _mixtures(runner.model)
    kv = runner.kv
    rows = []
    for case, running, chunk in (("decode-1", 1, 0), ("decode-256", 256, 0), ("mixed", 255, CHUNK)):
        kernels, keys = measure(core, running, chunk)
        line = time_line(kernels)
        step = Step(
            running + chunk, running + (chunk > 0), chunk, keys, kv.block_size,
            kv.layers[0][0].element_size(),
        )  # fmt: skip
        floors = floors_us(runner.model.config, step, line, bandwidth, rate)
        floors |= mixture_floors_us(mixtures, step, line, bandwidth, rate)
        floors["products"] = products_floor_us(matrices, step.tokens, step.samples, bandwidth, rate)
        print(f"\n{label}/{case}: {line.step_us:.0f} us a step, {line.steps} steps, ", end="")
        print(
            f"idle {line.idle_us / line.step_us:.2%}, "
            f"between steps {line.between_us / line.step_us:.2%}"
        )
        parts = sorted(line.kinds.items(), key=lambda item: -item[1])
        gaps = [("idle", line.idle_us), ("idle between steps", line.between_us)]
        for kind, us in [*parts, *gaps]:
            floor = floors.get(kind)
            row = {
                "case": f"{label}/{case}/{kind.replace(' ', '-')}",
                "us": round(us, 1),
                "share": round(us / line.step_us, 4),
            }
            if floor is not None:
                row |= {"floor_us": round(floor, 1), "of_floor": round(floor / us, 3)}
            rows.append(row)
            share = "" if floor is None else f"floor {floor:9.1f}  {floor / us:6.1%}"
            print(f"  {kind:<22} {us:9.1f} us  {us / line.step_us:6.1%}  {share}")
        top = sorted(line.names.items(), key=lambda item: -item[1][0])
        for name, (us, launches) in top[:14]:
            print(f"    {us:8.1f} us {launches:6.1f} x  {name[:90]}")
        rows.append(
            {
                "case": f"{label}/{case}",
                "us": round(line.step_us, 1),
                "share": 1.0,
                "kernels": {
                    name[:120]: [round(us, 1), round(launches, 2)] for name, (us, launches) in top
                },
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder with config.json")
    parser.add_argument("--name", default="model", help="label of the cases")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of the engine")
    parser.add_argument("--out", type=Path, help="folder for the result files")
    args = parser.parse_args()

    import torch

    from bench.kernels.measure import copy_bandwidth, matmul_rate

    bandwidth, rate = copy_bandwidth(), matmul_rate()
    print(f"copy {bandwidth / 1e12:.2f} TB/s, product {rate / 1e12:.0f} TFLOP/s", flush=True)
    torch.cuda.empty_cache()
    values = {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_model_len": 9216,
        "max_num_seqs": 1024,
        "memory_fraction": 0.85,
        "prefix_caching": False,
        **engine_fields(args.set),
    }
    core, _ready = build(make_config(args.model, values))
    rows = report(core, args.name, bandwidth, rate)
    if args.out:
        details = {row["case"]: row.pop("kernels") for row in rows if "kernels" in row}
        config = {
            "ours": values,
            "floors": {"copy_bytes_s": bandwidth, "product_flop_s": rate},
        }
        lines = [{"case": case, "us_and_launches": names} for case, names in details.items()]
        write(args.out, f"step-profile-{args.name}", config, rows, lines)


if __name__ == "__main__":
    main()
