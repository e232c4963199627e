"""Simulated ablations: Manta's own core, scheduler and block manager with a device that only
computes how long a step takes.

The time of a step is that of its memory traffic or of its arithmetic on an A100-80G, whichever is
longer. A step reads the weights once and each request's KV cache once, with two operations per
weight and token. Both sides of a ratio have the same step times, so only the ablated technique
matters. Gains of the original systems from their own kernels and hosts are not included.
"""

import json
import random
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.ablations.ablation_row import AblationRow
from bench.ablations.lengths import Sizes, batches, sharegpt, widely_different
from engine.batch import Batch, StepResult
from engine.lora.fake import FakeLoader
from engine.lora.tiers.store import AdapterStore
from engine.messages import AddAdapter, EngineRequest
from engine.sampling_params import SamplingParams
from engine.scheduling.core import CoreConfig, EngineCore
from engine.scheduling.memory.block_manager import FreeBlocks, FreeList
from engine.scheduling.memory.regions import Regions

SLOT = 2048  # tokens that a static slot reserves


@dataclass(frozen=True)
class SimulatedDevice:
    """The costs of a model on its device.

    weights: bytes. kv: bytes per token. bandwidth, operations: per second, as achieved by kernels.
    overhead: seconds added to each step.
    """

    weights: float
    kv: float
    parameters: float
    bandwidth: float
    operations: float
    overhead: float = 0.001

    def seconds(self, batch: Batch) -> float:
        keys = sum(batch.starts) + sum(batch.lengths)
        arithmetic = 2 * self.parameters * batch.num_tokens / self.operations
        products = max(self.weights / self.bandwidth, arithmetic)
        return self.overhead + products + keys * self.kv / self.bandwidth


# An A100-80G has 2.0 TB/s and 312 TFLOP/s, of which kernels achieve 85 % and 70 %. Eight in
# parallel achieve 70 % of eight times that.
LLAMA_7B = SimulatedDevice(13.5e9, 2**19, 6.7e9, 1.7e12, 218e12)
LLAMA_65B = SimulatedDevice(130e9, 2.5 * 2**20, 65e9, 5.6 * 1.7e12, 5.6 * 218e12, 0.003)


class _Done:
    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        return self._result


class TimedRunner:
    """An `engine.scheduling.core.Runner` that only adds up step times; each sampled token is 9."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self.seconds = 0.0
        self.steps = self.entries = self.tokens = 0

    def launch(self, batch: Batch) -> _Done:
        self.seconds += self._device.seconds(batch)
        self.steps += 1
        self.entries += len(batch.rows)
        self.tokens += batch.num_tokens
        return _Done(StepResult(batch.step, [9] * sum(batch.samples)))

    def recover(self) -> bool:
        return True

    def shrink(self, num_blocks: int) -> None:
        """Do nothing, as there is no memory."""


@dataclass(frozen=True)
class SimulatedRun:
    seconds: float
    steps: int
    running: float  # mean number of requests per step
    most: int  # maximum number of concurrent requests
    filled: float  # mean share of KV memory that holds computed tokens
    preemptions: int


def serve(
    sizes: Sizes,
    device: SimulatedDevice,
    capacity: int,  # KV memory, in tokens
    *,
    rate: float = 0.0,  # requests per second with Poisson arrivals; 0: all at once
    seed: int = 0,
    adapters: Sequence[str] = (),  # adapter of each request; empty: no adapters
    free_blocks: Callable[[int], FreeBlocks] = FreeList,
    **changes: Any,  # fields of CoreConfig
) -> SimulatedRun:
    """Serve requests of these sizes until all have finished; return the figures of the run."""
    values: dict[str, Any] = {
        "max_num_seqs": 1024,
        "max_num_batched_tokens": 8192,
        "max_model_len": 4096,
        "block_size": 1,
        "prefix_caching": False,
        **changes,
    }
    config = CoreConfig(num_blocks=capacity // values["block_size"], **values)
    runner = TimedRunner(device)
    store = _store(sorted(set(adapters))) if adapters else None
    core = EngineCore(config, runner, store, free_blocks)
    rng = random.Random(seed)
    arrivals, at = [], 0.0
    for _ in sizes:
        at += rng.expovariate(rate) if rate else 0.0
        arrivals.append(at)
    coming = 0
    filled = 0.0
    most = 0
    while coming < len(sizes) or core.has_work():
        if not core.has_work():
            runner.seconds = max(runner.seconds, arrivals[coming])
        while coming < len(sizes) and arrivals[coming] <= runner.seconds:
            prompt, output = sizes[coming]
            params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
            adapter = adapters[coming] if adapters else ""
            core.add_request(
                EngineRequest(coming, [5] * prompt, prompt, params, seed=0, adapter=adapter)
            )
            coming += 1
        core.step()
        running = core.scheduler.running.values()
        most = max(most, len(running))
        filled += sum(r.num_computed if r.group_index < 0 else r.base + core.scheduler.step
                      for r in running) / capacity  # fmt: skip
    core.check_integrity()
    return SimulatedRun(
        runner.seconds,
        runner.steps,
        runner.entries / runner.steps,
        most,
        filled / runner.steps,
        core.scheduler.counters.preemptions,
    )


class _AtOnce(Executor):
    """An executor that runs work immediately, so that simulations do not depend on threads."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **more: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(work(*args, **more))
        return future


def _store(names: Sequence[str]) -> AdapterStore:
    """Return a store of adapters with these names and without weights; all fit on the device."""
    at_once = _AtOnce()
    store = AdapterStore(FakeLoader(), len(names), 1 << 20, disk=at_once, device=at_once)
    with tempfile.TemporaryDirectory(prefix="manta-ablations-") as folder:
        (Path(folder) / "adapter_config.json").write_text(
            json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj"]})
        )
        (Path(folder) / "adapter_model.safetensors").touch()
        for ticket, name in enumerate(names):
            store.add(AddAdapter(ticket, name, folder))
        store.poll()
        answers = store.take_answers()
        assert len(answers) == len(names) and all(answer.info for answer in answers), answers
    return store


def serve_in_batches(
    sizes: Sizes, size: int, device: SimulatedDevice, *, fill_prompts: bool = True, **options: Any
) -> SimulatedRun:
    """Serve static batches (`batches`), whose requests start together and end with the longest."""
    groups = batches(sizes, size, fill_prompts=fill_prompts)
    parts = [serve(group, device, **options) for group in groups]
    steps = sum(part.steps for part in parts)
    return SimulatedRun(
        sum(part.seconds for part in parts),
        steps,
        sum(part.running * part.steps for part in parts) / steps,
        size,
        sum(part.filled * part.steps for part in parts) / steps,
        0,
    )


def _rates(
    workload: str,
    count: int,
    ours: tuple[str, SimulatedRun],
    others: Sequence[tuple[str, SimulatedRun, float | None]],
) -> list[AblationRow]:
    """Return rows of requests/s with the technique against each run without it."""
    name, mine = ours
    return [
        AblationRow.of(
            f"{workload}: {name} / {other}",
            count / mine.seconds,
            count / outcome.seconds,
            "req/s",
            claimed=claimed,
            how="simulated",
            note=f"running {mine.running:.0f} / {outcome.running:.0f}, memory filled "
            f"{mine.filled:.0%} / {outcome.filled:.0%}, preempted {mine.preemptions} / "
            f"{outcome.preemptions}",
        )
        for other, outcome, claimed in others
    ]


def paged_kv_under_load(scale: float) -> list[AblationRow]:
    """Simulate ShareGPT at 200 requests/s on LLaMA-7B with KV memory for 121,060 tokens."""
    sizes, memory = sharegpt(int(2000 * scale)), {"capacity": 121_060}
    poisson = {**memory, "rate": 200.0}
    slots = 121_060 // SLOT
    return _rates(
        "paged-kv-under-load LLaMA-7B, ShareGPT",
        len(sizes),
        ("token + peak", serve(sizes, LLAMA_7B, admission="peak", **poisson)),
        [
            ("blocks of 16, optimistic", serve(sizes, LLAMA_7B, block_size=16, **poisson), 1.92),
            (f"slots of {SLOT}", serve(sizes, LLAMA_7B, block_size=SLOT, **poisson), 3.83),
            (
                f"static batches of {slots} slots",
                serve_in_batches(sizes, slots, LLAMA_7B, **memory),
                4.1,
            ),
        ],
    )


def paged_kv_and_admission(scale: float) -> list[AblationRow]:
    """Simulate paged KV memory with two admission policies against reserved slots.

    There are few slots, so that throughput depends on the use of memory.
    """
    rows = []
    for name, device, count, claims in (
        ("LLaMA-7B", LLAMA_7B, 2000, (3.83, 4.02)),
        ("LLaMA-65B", LLAMA_65B, 2000, (2.87, 2.98)),
    ):
        sizes = sharegpt(int(count * scale))
        memory = {"capacity": 40_960, "rate": 200.0}
        slots = serve(sizes, device, block_size=SLOT, **memory)
        for admission, claimed in zip(("sum", "peak"), claims, strict=True):
            outcome = serve(sizes, device, admission=admission, **memory)
            rows += _rates(
                f"paged-kv-and-admission {name}, 40,960 tokens",
                len(sizes),
                (f"token + {admission}", outcome),
                [(f"slots of {SLOT}", slots, claimed)],
            )
    return rows


def contiguous_kv(scale: float) -> list[AblationRow]:
    """Simulate blocks against one contiguous region per request, allocated by first fit.

    A region has a request's whole length. Blocks are admitted by two policies. By a request's whole
    length, as for regions, only gaps and unused parts of regions make a difference. The other
    policy admits by a request's known tokens.
    """
    rows = []
    for name, sizes, capacity, rate in (
        ("ShareGPT at 200 requests/s", sharegpt(int(2000 * scale)), 121_060, 200.0),
        ("mixed lengths", widely_different(int(600 * scale)), 40_960, 0.0),
    ):
        served = {
            kind: serve(sizes, LLAMA_7B, capacity, rate=rate, block_size=16, **options)
            for kind, options in {
                "blocks, optimistic": {},
                "blocks, reserved": {"admission": "reserved"},
                "regions": {"free_blocks": Regions},
            }.items()
        }
        regions = served.pop("regions")
        for kind, outcome in served.items():
            rows += _rates(
                f"contiguous-kv LLaMA-7B, {name}",
                len(sizes),
                (kind, outcome),
                [("regions by first fit", regions, None)],
            )
    return rows


def admission(scale: float) -> list[AblationRow]:
    """Simulate Manta's admission policies for requests of widely different lengths.

    All requests arrive at once; KV memory is for 16,000 tokens.
    """
    sizes, count = widely_different(int(600 * scale)), int(600 * scale)
    served = {
        admission: serve(sizes, LLAMA_65B, 16_000, admission=admission)
        for admission in ("peak", "sum", "reserved", "optimistic")
    }
    claims = {"sum": 1.51, "reserved": None, "optimistic": None}
    return _rates(
        "admission LLaMA-65B, mixed lengths",
        count,
        ("peak", served["peak"]),
        [(name, served[name], claimed) for name, claimed in claims.items()],
    )


def continuous_batching(scale: float) -> list[AblationRow]:
    """Simulate continuous against static batching, at several limits of concurrent requests.

    Static batches run until their longest output ends. The technique's authors claim 2 to 3 times;
    the rows have the ratios of steps that these lengths allow.
    """
    rows = []
    sizes = sharegpt(int(1024 * scale))
    for limit, ideal in ((8, 2.20), (16, 2.56), (32, 2.78), (64, 2.97)):
        ours = serve(sizes, LLAMA_7B, 400_000, max_num_seqs=limit)
        static = serve_in_batches(sizes, limit, LLAMA_7B, fill_prompts=False, capacity=400_000)
        rows += _rates(
            f"continuous-batching at most {limit} at once",
            len(sizes),
            ("continuous", ours),
            [(f"static batches ({static.steps / ours.steps:.2f} times the steps)", static, ideal)],
        )
    return rows


def ragged_prefill(scale: float) -> list[AblationRow]:
    """Count the tokens of ragged prefill batches against padded ones, over the scheduler's
    steps.
    """
    rows = []
    sizes = [(prompt, 1) for prompt, _ in sharegpt(int(1024 * scale))]
    for size, share in ((4, 0.63), (8, 0.76), (16, 0.81), (32, 0.85)):
        counted = []
        for groups in ([sizes[at : at + size] for at in range(0, len(sizes), size)],
                       batches(sizes, size)):  # fmt: skip
            config = CoreConfig(
                max_num_seqs=size, max_num_batched_tokens=8192, max_model_len=4096,
                num_blocks=4096, block_size=16, prefix_caching=False,
            )  # fmt: skip
            runner = TimedRunner(LLAMA_7B)
            core = EngineCore(config, runner)
            number = 0
            for group in groups:
                for prompt, output in group:
                    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
                    core.add_request(EngineRequest(number, [5] * prompt, prompt, params, seed=0))
                    number += 1
                while core.has_work():
                    core.step()
            counted.append(runner.tokens)
        ragged, padded = counted
        rows.append(
            AblationRow.of(
                f"ragged-prefill prompts in batches of {size}: ragged / filled up",
                100.0,
                100.0 * ragged / padded,
                "% of computed tokens used",
                claimed=round(1 / (1 - share), 2),
                how="simulated",
                note=f"{1 - ragged / padded:.0%} of the tokens saved, claimed {share:.0%}",
            )
        )
    return rows


def paged_kv_capacity(scale: float) -> list[AblationRow]:
    """Count concurrent requests in the memory of 32 slots of 2,048 tokens (32 GB for 7B)."""
    sizes = sharegpt(int(2000 * scale))
    capacity = 32 * SLOT
    served = {
        size: serve(sizes, LLAMA_7B, capacity, block_size=size, admission=admission)
        for size, admission in ((SLOT, "optimistic"), (16, "optimistic"), (1, "peak"))
    }
    grouped = serve(sizes, LLAMA_7B, 4 * capacity)
    slots = served[SLOT]
    return [
        AblationRow.of(
            f"paged-kv-capacity 32 GB: {name} / slots of {SLOT}",
            outcome.running,
            slots.running,
            "requests",
            claimed=claimed,
            how="simulated",
            note=f"memory filled {outcome.filled:.0%} / {slots.filled:.0%}",
        )
        for name, outcome, claimed in (
            ("blocks of 16", served[16], 4.0),
            ("token + peak", served[1], 4.0),
            ("token, 8 of 32 heads with keys", grouped, None),
        )
    ]


def multi_adapter_batches(scale: float) -> list[AblationRow]:
    """Simulate one adapter per step against all adapters in one step, for two adapters.

    Adapters are requested in blocks of 16 or alternately. One adapter per step is first come first
    served (`batching: split`). LoRA matmuls take no time here, so only the number of requests per
    step differs.
    """
    rows = []
    sizes = [(128, 128)] * int(256 * scale)
    for case, length in (("in blocks of 16", 16), ("in turns", 1)):
        adapters = ["ab"[index // length % 2] for index in range(len(sizes))]
        options: dict[str, Any] = {"capacity": 400_000, "max_num_seqs": 64, "adapters": adapters}
        mixed = serve(sizes, LLAMA_7B, **options)
        split = serve(sizes, LLAMA_7B, batching="split", **options)
        workload = f"multi-adapter-batches adapters {case}"
        rows += _rates(workload, len(sizes), ("mixed", mixed), [("split", split, None)])
    return rows


WORKLOADS = {
    "paged-kv-under-load": paged_kv_under_load,
    "paged-kv-and-admission": paged_kv_and_admission,
    "contiguous-kv": contiguous_kv,
    "admission": admission,
    "continuous-batching": continuous_batching,
    "ragged-prefill": ragged_prefill,
    "paged-kv-capacity": paged_kv_capacity,
    "multi-adapter-batches": multi_adapter_batches,
}
