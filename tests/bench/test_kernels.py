"""The kernels' bench without a device: every case can be made, launched and told rightly."""

import importlib
import pkgutil
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

from triton.runtime.jit import JITFunction  # noqa: E402

import kernels  # noqa: E402
import kernels.experts  # noqa: E402
from bench.kernels import expert_layers, experts, lora, measure, packed_sweep  # noqa: E402
from bench.kernels.cases import (  # noqa: E402
    LLAMA,
    PREFILL_TARGET,
    adapters,
    all_cases,
    assembly,
    decode,
    gate,
    norm,
    prefill,
    rope,
)
from bench.kernels.measure import Best, Calls, KernelWork, rows, told  # noqa: E402
from bench.kernels.sampling import sampling  # noqa: E402
from kernels.attention import decode as attention_decode  # noqa: E402
from kernels.attention import decode_plan, quantized_decode  # noqa: E402
from kernels.attention.latent import decode as latent_decode  # noqa: E402
from kernels.gemm import deterministic, gated  # noqa: E402
from kernels.gemm.packed import blocks, dot, fp8, int8  # noqa: E402
from kernels.kv.format import FORMATS  # noqa: E402
from kernels.launch.nvrtc import CudaKernel  # noqa: E402
from kernels.metadata import LoraLinear  # noqa: E402
from kernels.recurrent import delta_rule_cuda, delta_verify_cuda  # noqa: E402

NUM_SMS = (
    attention_decode, decode_plan, quantized_decode, latent_decode, deterministic, int8,
    blocks, dot, fp8, delta_rule_cuda, delta_verify_cuda,
)  # fmt: skip
INTERPRETED = triton.knobs.runtime.interpret
BEST = Best(copy=4e12, product=8e14)


def every_kernel(*packages: ModuleType) -> set[str]:
    return {
        value.__name__
        for package in packages
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        for value in vars(importlib.import_module(module.name)).values()
        if isinstance(value, JITFunction) and value.__name__.endswith("_kernel")
    }


def once(calls: Calls) -> float:
    for call in calls:
        call()
    return 100.0


_SUMS = {"_one_shot_kernel", "_two_shot_kernel", "_gather_kernel"}
_COPIES = {"_copy_rows_kernel"}
# Of one kind of GPU, where the cases of latents and of prompts launch them.
_HOPPER = {"_latent_specialized_kernel", "_prefill_specialized_kernel"}


@pytest.mark.skipif(INTERPRETED, reason="launches of the compiler's kernels are counted")
def test_every_case_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A case that cannot be made, or calls a launcher as it was last month: found out on a GPU,
    after the others; and a kernel that none has. Here all sizes are real, and nothing has
    contents."""
    launched: list[str] = []

    def count(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launched.append(self.__name__)

    monkeypatch.setattr(JITFunction, "run", count)
    monkeypatch.setattr(gated, "tensor_map", lambda *_: None)
    monkeypatch.setattr(CudaKernel, "__call__", lambda *_: launched.append("gated_gemm"))
    for module in NUM_SMS:
        monkeypatch.setattr(module, "num_sms", lambda device: 132)
    monkeypatch.setattr(deterministic, "agreeing", lambda weight, bias, add: deterministic.TILES[2])
    cases = all_cases(LLAMA._replace(device="meta"), {"other": lambda *_: lambda: None})
    seen, names = {}, set()
    for row in rows(cases, BEST, once):
        assert "error" not in row, row
        seen[row["case"]] = row
        assert launched or "product/" in row["case"], row["case"]  # the library's own product
        names.update(launched)
        launched.clear()
    assert seen.keys() == cases.keys()
    # Sums of ranks are timed by bench.kernels.sums, as they need others, and copies of moved blocks
    # by bench.kv.moves.
    wanted = every_kernel(kernels) - every_kernel(kernels.experts) - _SUMS - _COPIES - _HOPPER
    assert names == wanted | {"gated_gemm"}, "a kernel that nothing times"
    targets = {case: row["target"] for case, row in seen.items() if "target" in row}
    assert targets == {
        "decode/64 x 4096": 0.9,
        "decode/256 x 1024": 0.9,
        "decode/16 x 1024": 0.7,
        "decode/1 x 32768": 0.7,
        "prefill/1 x 8192": PREFILL_TARGET,
        "fp8 decode/64 x 4096": 0.85,
        "fp8 decode/256 x 1024": 0.85,
    }
    assert seen["prefill/1 x 8192"]["against"] == "other"


@pytest.mark.skipif(INTERPRETED, reason="launches of the compiler's kernels are counted")
def test_every_launch_of_a_mixture_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of experts that `bench.kernels.experts` leaves out or calls as it was last month."""
    launched: set[str] = set()

    def count(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launched.add(self.__name__)

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    monkeypatch.setattr(JITFunction, "run", count)
    for module in (expert_layers, experts):
        monkeypatch.setattr(module, "random", empty)
    layer = expert_layers.LAYERS["qwen3-30b-a3b"]
    stack = expert_layers.make_stack(layer)
    for tokens in (1, 256, 1024):  # 1024: whose pairs are sorted by blocks
        routed = (
            empty(tokens, layer.chosen, dtype=torch.float32),
            empty(tokens, layer.chosen, dtype=torch.int32),
        )
        logits = [empty(tokens, layer.experts)]
        x = empty(tokens, layer.hidden)
        step = expert_layers.Step("qwen3-30b-a3b", layer, stack, x, logits, [routed], 8.0)
        for _, _, calls in experts.launches(step):
            for call in calls:
                call()
    # MXFP4 in the order of matrix instructions is of Hopper, where fragments_sweep times it.
    fragments = {name for name in every_kernel(kernels.experts) if name.startswith("_fragments_")}
    assert fragments and launched >= every_kernel(kernels.experts) - fragments


@pytest.mark.skipif(INTERPRETED, reason="launches of the compiler's kernels are counted")
def test_the_sweep_of_packed_products_tries_its_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """A try that calls a launcher as it was last month; a table that is not tried with any of its
    launches, or held against nothing."""
    launched: list[str] = []

    def count(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launched.append(self.__name__)

    monkeypatch.setattr(JITFunction, "run", count)
    monkeypatch.setattr("kernels.gemm.cublaslt.linear", lambda *args: launched.append("library"))
    for module in NUM_SMS:
        monkeypatch.setattr(module, "num_sms", lambda device: 132)
    meta = LLAMA._replace(device="meta")
    sides: dict[tuple[str, str, str], set[Any]] = {}
    for trial in packed_sweep.tries(meta):
        launched.clear()
        trial.call(packed_sweep.weights_of(meta, trial.to, trial.step.shape, False)[0])
        assert launched, trial
        sides.setdefault((trial.what, trial.case, trial.step.shape), set()).add(trial.launch)
    packed_sweep.step_of.cache_clear()
    packed_sweep.weights_of.cache_clear()
    tables = {"gemv8.tile", "gemv4.tile", "blocks.tile", "dot.tile"}
    assert {what for what, *_ in sides} == {*tables, packed_sweep.LAYER}
    for (what, *_), tried in sides.items():
        assert None in tried
        if what in tables:
            assert packed_sweep.AGAINST in tried
            assert sum(isinstance(launch, tuple) for launch in tried) > 2


def test_the_sweep_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """A better tile that is not named, or a worse one that is; a layer's sum without one of its
    products; the table's own tile told as another one."""
    names = list(packed_sweep.SHAPES)
    layers: packed_sweep.Found = {
        (packed_sweep.LAYER, "int4, 1 token"): {name: {None: 10.5} for name in names},
        (packed_sweep.LAYER, "int4, 16 tokens"): {name: {None: 10.5} for name in names[1:]},
    }
    (layer_line,) = packed_sweep.layer_lines(layers)
    assert "int4, 1 token" in layer_line and "42.0 us" in layer_line
    tile: Any = ((4, 64, 1), 0)
    tiles: packed_sweep.Found = {
        ("gemv4.tile", "int4, 1 token"): {
            name: {None: 10.0, tile: us, packed_sweep.AGAINST: 12.0}
            for name, us in zip(names, (9.9, 9.0, 10.5, 8.0), strict=True)
        }
    }
    *lines, total = packed_sweep.table_lines(tiles, lambda *_: "(8, 64, 1)")
    assert [line.rpartition(": ")[2] == "set it" for line in lines] == [False, True, False, True]
    assert all("today (8, 64, 1) 10.0 us, best (4, 64, 1)" in line for line in lines)
    assert "all four today 40.0 us, best (4, 64, 1) 37.4 us" in total
    monkeypatch.setattr(packed_sweep, "num_sms", lambda device: 132)
    for table, to, shape, tokens, tile in (
        ("gemv8.tile", "fp8-block", "qkv", 1, "(8, 256, 2)"),
        ("gemv4.tile", "int4", "down", 1, "(8, 256, 2)"),
        ("blocks.tile", "fp8-block", "down", 8, "(64, 16, 4, 3) x 8"),
        ("dot.tile", "int4", "gate_up", 256, "(128, 256, 32, 8, 3) x 1"),
        ("dot.tile", "int8-128", "o", 128, "(64, 128, 128, 4, 3) x 4"),
    ):
        assert packed_sweep.now(table, to, shape, tokens) == tile


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_cases_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table, a slot or a parameter that points beside its tensor: on a GPU an illegal access,
    and no case after it has a result."""
    monkeypatch.setattr(measure, "_COLD", 0)  # one copy
    s = LLAMA._replace(
        heads=4, kv_heads=2, dim=16, hidden=32, inner=48, vocab=5000, device="cpu",
        dtype=torch.float32,
    )  # fmt: skip
    layer = LoraLinear(0, 32, (32, 16, 16))
    monkeypatch.setattr(lora, "LAYER", (layer, LoraLinear(3, 32, (48, 48))))
    monkeypatch.setattr(lora, "PARTS", [(32, 32), (32, 16), (32, 16), (32, 48), (32, 48)])
    makes: list[Callable[[], KernelWork]] = [
        *(lambda n=n: decode(s, [70, 1, 33], n, None) for n in (1, 16)),
        lambda: prefill(s, [40, 9], [17, 9]),
        *(lambda n=n: decode(s._replace(kv=n), [70, 1, 33], 16, None) for n in FORMATS),
        lambda: rope(s._replace(kv="int4"), 3, False),
        *(lambda n=n: rope(s, 3, n) for n in (False, True)),
        lambda: norm(s, 3),
        lambda: gate(s, 3, "silu"),
        *(lambda how=how: sampling(s, 2, how) for how in ("greedy", "top-k", "top-p", "logprobs")),
        *(lambda how=how: sampling(s, 1, how) for how in ("penalties", "bias and ban")),
        *(lambda what=what: assembly(s, 4, what) for what in ("updates", "layout")),
        *(lambda part=part: adapters(s, 5, part) for part in (0, 1)),
    ]
    for number, make in enumerate(makes):
        results: list[object] = []

        def run(calls: Calls, results: list[object] = results) -> float:
            results += [call() for call in calls]
            return 1.0

        (row,) = rows({str(number): make}, BEST, run)
        assert "error" not in row, row
        for out in results:
            for tensor in out if isinstance(out, tuple) else [out]:
                if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                    assert tensor.isfinite().all(), number


def fail() -> KernelWork:
    raise ValueError("this one cannot")


def test_rows_of_one_run() -> None:
    """A share of the wrong peak, a ratio upside down, a failure that takes the others with it."""
    times = {"ours": 100.0, "other": 50.0}

    def timer(calls: Calls) -> float:
        return times[str(calls[0]())]

    def calls(name: str) -> Calls:
        return [lambda: name]

    def broken() -> object:
        raise RuntimeError("no such shape")

    cases: dict[str, Callable[[], KernelWork]] = {
        "bytes": lambda: KernelWork(calls("ours"), 2e8, target=0.6),
        "failing": fail,
        "operations": lambda: KernelWork(calls("ours"), 4e10, "TFLOP/s", 0.4, "cudnn", {
            "other": calls("other"), "cudnn": [broken],
        }),
    }  # fmt: skip
    copied, failing, multiplied = rows(cases, BEST, timer)
    assert (copied["ours"], copied["peer"], copied["ratio"]) == (2.0, 4.0, 0.5)
    assert copied["reached"] is False and "target 60%: missed" in told(copied)
    assert failing["error"] == "ValueError: this one cannot" and "failed" in told(failing)
    assert (multiplied["ours"], multiplied["of_best"]) == (400.0, 0.5)
    assert (multiplied["against"], multiplied["peer"], multiplied["ratio"]) == ("other", 800.0, 0.5)
    assert multiplied["cudnn_failed"] == "no such shape" and multiplied["reached"]
    assert "0.50 of other" in told(multiplied)
