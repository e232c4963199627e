"""The launch path never waits for the device: the host would lose the step it is ahead."""

import ast
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.sampling_params import SamplingParams

ROOT = Path(__file__).parents[3]
LOOKED_AT = (
    "engine/layers/**/*.py",
    "engine/models/*.py",
    "engine/models/drafters/*.py",
    "engine/runner/**/*.py",
    "engine/sampling/*.py",
    "engine/lora/device.py",
    "engine/lora/virtual_tokens.py",
    "kernels/*.py",
    "kernels/attention/*.py",
    "kernels/attention/latent/*.py",
    "kernels/experts/*.py",
    "kernels/gemm/**/*.py",
    "kernels/launch/*.py",
    "kernels/kv/*.py",
    "kernels/recurrent/*.py",
    "kernels/sampling/*.py",
)
WAITS = {"item", "cpu", "tolist", "nonzero", "synchronize", "numpy"}

_CPU = "on the CPU alone, where tensors and arrays share memory and nothing is in flight"
_ORACLE = "the oracle in plain torch, not the CUDA back end"
_START = "at the start, before any request"
ALLOWED = {
    ("engine/lora/device.py", "LoraDevice._upload"): "a view of pinned host memory",
    ("engine/models/entrance.py", "Entrance.__init__"): _START,
    ("engine/runner/caches/block_pages.py", "BlockPages._map"): "on the thread of KV growth",
    ("engine/runner/caches/block_pages.py", "BlockPages.give_all"): "falling asleep",
    ("engine/runner/caches/block_pages.py", "BlockPages.retract.unmap"): (
        "on the thread of KV growth"
    ),
    ("engine/runner/caches/cuda_copies.py", "CudaCopies.__init__"): _START,
    ("engine/runner/caches/cuda_copies.py", "CudaCopies.wait"): "falling asleep, and in tests",
    ("engine/runner/caches/cuda_copies.py", "_end_of"): (
        "waited for by threads of moves; by the loop when it drops a move"
    ),
    ("engine/runner/caches/cuda_copies.py", "_enqueue"): "a numpy table of addresses",
    ("engine/runner/caches/sleep_memory.py", "CudaSleepMemory._finish_work"): (
        "falling asleep, awaking"
    ),
    ("engine/runner/caches/token_pool.py", "TokenPool.__iter__"): "for checks of integrity",
    (
        "engine/runner/caches/token_pool.py",
        "TokenPool.take_blocks",
    ): "in schedule, of the mode that waits",
    ("engine/runner/drafts/drafting.py", "Drafting._follow"): "a numpy table of proposals",
    ("engine/runner/drafts/drafting.py", "Drafting._propose"): "a numpy table of proposals",
    ("engine/runner/drafts/passes.py", "DraftPasses._single"): _CPU,
    ("engine/runner/launch/graphs.py", "StepGraphs._seconds"): _START,
    ("engine/sampling/device_result.py", "DeviceResult._read_drafts"): (
        "drafts of a step whose successor is done"
    ),
    ("engine/runner/images.py", "StepImages._on_device"): "a view of pinned host memory",
    ("engine/runner/inputs.py", "CpuInputs.__init__"): _CPU,
    ("engine/runner/inputs.py", "CpuInputs.assemble"): _CPU,
    ("engine/runner/inputs.py", "_Staging.__init__"): "a view of pinned host memory",
    ("engine/runner/model_runner.py", "ModelRunner.recover"): "after a step that has failed",
    ("engine/runner/refill.py", "Refill.load"): "with new weights, before a step may read them",
    ("engine/runner/refill.py", "_check_finite"): "of new weights, on a thread beside the steps",
    ("engine/runner/refill.py", "_check_held"): "of new weights, between two steps",
    ("engine/runner/warm_up.py", "_run_step"): _START,
    ("engine/runner/state_runs.py", "StateVerification.lay_out"): "arrays of host memory",
    ("engine/runner/state_runs.py", "StateVerification.upload"): "an array of host memory",
    ("engine/runner/state_runs.py", "_Numbers.__init__"): "views of pinned host memory",
    ("engine/sampling/device_result.py", "DeviceResult.wait"): "the place to wait",
    ("engine/sampling/device_result.py", "HostLogprobs.items"): "host memory, in DeviceResult.wait",
    ("engine/runner/launch/programs.py", "StepPrograms.__init__"): _CPU,
    ("engine/runner/launch/programs.py", "StepPrograms._enter"): _CPU,
    ("engine/sampling/cpu_sampler.py", "_gumbel_argmax"): _CPU,
    ("engine/sampling/cpu_sampler.py", "_gumbel_argmax.compute"): _CPU,
    ("engine/sampling/cpu_sampler.py", "apply_masks"): _CPU,
    ("engine/sampling/sampler.py", "Masked.memory.allocate"): "a view of host memory",
    ("engine/sampling/sampler.py", "Sampler._sample_on_host"): _CPU,
    ("engine/sampling/sampler.py", "Sampler.prompt_logprobs"): _CPU,
    ("engine/sampling/step_sampler.py", "StepSampler._write_on_host"): _CPU,
    ("kernels/attention/bidirectional.py", "_padded"): "of host memory, before the upload",
    ("kernels/experts/reference.py", "experts"): _ORACLE,
    ("kernels/reference.py", "Kernels.whole_texts"): (
        "where no runner has said where the texts begin, as tests and `manta verify` do not"
    ),
    ("kernels/recurrent/convolution.py", "chunks_of"): _ORACLE,
    ("kernels/recurrent/mamba1.py", "mamba1"): _ORACLE,
    ("kernels/recurrent/mamba2.py", "mamba2"): _ORACLE,
    ("kernels/gemm/cublaslt_tune.py", "_AlgorithmSearch.milliseconds"): _START,
    ("kernels/attention/reference.py", "make_plan"): _ORACLE,
    ("kernels/attention/reference.py", "_plan_decodes"): _ORACLE,
    ("kernels/attention/reference.py", "plan_chunks"): _ORACLE,
    ("kernels/attention/reference.py", "plan_writes"): _ORACLE,
}


def waits_in(source: str) -> Iterator[str]:
    """Yield the qualified name of the function around each name that may wait, called or passed
    on."""

    def look(node: ast.AST, around: tuple[str, ...]) -> Iterator[str]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            around = (*around, node.name)
        if (isinstance(node, ast.Attribute) and node.attr in WAITS) or (
            isinstance(node, ast.ImportFrom) and any(name.name in WAITS for name in node.names)
        ):
            yield ".".join(around)
        for child in ast.iter_child_nodes(node):
            yield from look(child, around)

    return look(ast.parse(source), ())


@pytest.mark.parametrize(
    "line",
    [
        "x.item()",
        "x[0].max().cpu()",
        "a, b = x.tolist()",
        "return [y for y in (x > 0).nonzero()]",
        "torch.cuda.synchronize()",
        "x.cpu().numpy()",
        "list(map(torch.Tensor.item, x))",
        "from torch.cuda import synchronize",
        "f(lambda: x.item())",
    ],
)
def test_a_planted_wait_is_found(line: str) -> None:
    """Bug: the test below finds nothing, whatever there is."""
    source = f"class A:\n    def f(self, x):\n        {line}\n\n    def g(self, x):\n        pass\n"
    assert set(waits_in(source)) == {"A.f"}


def test_nothing_in_the_launch_path_asks_for_the_value_of_a_tensor() -> None:
    """Bug: one `.item()` added to a launcher, right on every test and half as fast."""
    waits = set()
    for pattern in LOOKED_AT:
        files = sorted(ROOT.glob(pattern))
        assert files, pattern
        for file in files:
            path = file.relative_to(ROOT).as_posix()
            waits |= {(path, name) for name in waits_in(file.read_text())}
    assert waits - set(ALLOWED) == set(), "these may wait for the device"
    assert set(ALLOWED) - waits == set(), "allowed, and not there any more"


# ---- only a device can tell: `python -m pytest -m gpu tests/engine/models/test_launch_path.py`

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512,
    "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 1000, "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True,
}  # fmt: skip
PROMPTS = [[2 + (i * 37 + j * j) % 990 for j in range(n)] for i, n in enumerate((100, 300, 33, 64))]
COMMON: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True}
PARAMS = {
    "greedy": [SamplingParams(temperature=0.0, **COMMON)] * 4,
    "sampled": [SamplingParams(temperature=0.8, **COMMON)] * 4,
    "everything": [
        SamplingParams(temperature=0.0, prompt_logprobs=2, **COMMON),
        SamplingParams(temperature=0.8, top_p=0.9, top_k=20, min_p=0.01, **COMMON),
        SamplingParams(repetition_penalty=1.1, frequency_penalty=0.2, logprobs=3, **COMMON),
        SamplingParams(logit_bias={5: 3.0}, min_tokens=8, **COMMON),
    ],
}


@contextmanager
def waits_are_errors() -> Iterator[None]:
    """Make waiting for the device an error, by torch's own check and for explicit
    synchronisation."""
    import torch

    def wait(*_: object) -> None:
        raise AssertionError("waits for the device")

    with pytest.MonkeyPatch.context() as patch:
        for owner in (torch.cuda, torch.cuda.Event, torch.cuda.Stream):
            patch.setattr(owner, "synchronize", wait)
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        except RuntimeError as error:  # as it is, the engine would look for a request to blame
            raise AssertionError(f"waits for the device: {error}") from error
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_planted_wait_is_found_on_the_device() -> None:
    """Bug: the test below finds nothing, whatever there is."""
    import torch

    x = torch.ones(3, device="cuda")
    event = torch.cuda.Event()
    event.record()
    waits: list[Callable[[], object]] = [
        x[0].item,
        x.tolist,
        x.cpu,
        x.nonzero,
        lambda: x[x > 0],
        lambda: torch.tensor([1, 2, 3], device="cuda"),
        lambda: torch.cuda.synchronize(),  # looked up when it is replaced
        lambda: event.synchronize(),
    ]
    for wait in waits:
        with pytest.raises(AssertionError, match="waits for the device"), waits_are_errors():
            wait()


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize("name", PARAMS)
def test_launch_does_not_wait(
    cuda_graphs: bool, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a wait that does not look like one: an index by a mask, a copy from pageable memory, a
    tensor made of a list, a condition on a tensor; or a graph that is recorded when it is first
    needed, with requests running."""
    from tests.parity.engine_driver import engine, run

    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    core = engine(
        tmp_path, device="cuda", dtype="bfloat16", load_format="dummy", prefix_caching=False,
        max_num_batched_tokens=128, cuda_graphs=cuda_graphs, graph_sizes=(1, 2, 4, 8),
    )  # fmt: skip
    runner: Any = core._runner
    launch, kinds = runner.launch, set()

    def guarded(batch: Any) -> Any:
        count = len(batch.rows)
        kinds.add({count: "decode", 0: "prefill"}.get(batch.num_decodes, "mixed"))
        with waits_are_errors():
            return launch(batch)

    monkeypatch.setattr(runner, "launch", guarded)
    outputs = run(core, PROMPTS, PARAMS[name])
    assert kinds == {"prefill", "mixed", "decode"}
    assert [(o.error, len(o.token_ids)) for o in outputs] == [("", 16)] * 4


@pytest.mark.gpu
def test_any_sampling_is_behind_a_graph(tmp_path: Path) -> None:
    """Bug: one row with a top_p keeps its step out of graphs, and each layer is launched from the
    host; or what is sampled behind a graph is not what is sampled without."""
    from tests.parity.engine_driver import engine, run

    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    params = PARAMS["everything"][1:]
    texts = []
    for cuda_graphs in (False, True):
        core = engine(
            tmp_path, device="cuda", dtype="float32", load_format="dummy", prefix_caching=False,
            max_model_len=1024, max_num_batched_tokens=512, cuda_graphs=cuda_graphs,
            graph_sizes=(1, 2, 4, 8),
        )  # fmt: skip
        runner: Any = core._runner
        if cuda_graphs:
            runner.eager.launch = None  # of steps that are launched kernel by kernel
        texts.append(run(core, PROMPTS[1:], params))
    for alone, graphed in zip(*texts, strict=True):
        assert (graphed.error, graphed.token_ids) == ("", alone.token_ids)
    ours, theirs = (
        [item.logprob for item in outputs[1].logprobs or ()] for outputs in (texts[1], texts[0])
    )
    assert len(ours) == 16 and ours == pytest.approx(theirs, abs=1e-4)
