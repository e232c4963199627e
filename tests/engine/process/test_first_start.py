"""A first start has its kernels compiled ahead, all of them; a later one does not look for any."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.batch import Batch
from engine.config.engine_config import EngineConfig
from engine.config.kv_groups import kv_groups
from engine.config.model_config import ModelConfig
from engine.factory.runner import _hand_over
from engine.layers.build import Builder
from engine.models.decoder import Decoder
from engine.models.registry import build_model
from engine.parallel.group import TensorParallelGroup
from engine.process import first_start
from engine.process.first_start import FirstStart
from engine.quantization.method import DenseCuda
from engine.runner import inputs
from engine.runner.caches.kv_cache import KVCache
from engine.runner.forward import ModelForward
from engine.runner.inputs import CudaInputs
from engine.runner.launch.graphs import StepGraphs
from engine.runner.model_runner import ModelRunner
from engine.runner.request_rows import RequestRows
from engine.runner.warm_up import capture_graphs, launch_everything, warm_up
from engine.sampling.sampler import Sampler
from engine.sampling.step_sampler import StepSampler
from kernels.dispatch import kernels_for
from kernels.launch.cache import cache_folder
from kernels.launch.compiling import Compilers
from kernels.metadata import AttentionMeta
from kernels.recurrent import delta_chunks_cuda

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512,
    "intermediate_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 1000, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True,
}  # fmt: skip
SEQS, TOKENS, SIZES = 80, 160, (1, 2, 4, 8, 40, 80)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return tmp_path


# ---- which start is the first --------------------------------------------------------------------


class _Compilers:
    """A stand-in for `Compilers`, which needs a device to compile for."""

    jobs, waited, failed, closed = 3, 0.5, False, False

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pretend a machine with a device; return its empty kernel cache."""
    cache = tmp_path / "cache"
    cache.mkdir()
    driver = tmp_path / "driver"
    driver.touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    monkeypatch.setattr(first_start, "Compilers", _Compilers)
    monkeypatch.setattr(first_start, "_DRIVER", driver)
    return cache


def starts(config: EngineConfig) -> bool:
    """Whether a start that succeeds has compilers."""
    with FirstStart(config) as first:
        compilers: Any = first.compilers
    assert compilers is None or compilers.closed
    return compilers is not None


def test_the_first_start_of_each_configuration_compiles_ahead(model: Path, machine: Path) -> None:
    """Bug: every start pays for looking, or the second model on a machine compiles one by one."""
    config = EngineConfig(model=str(model), load_format="dummy")
    assert starts(config)
    assert not starts(config)
    assert starts(EngineConfig(model=str(model), load_format="dummy", max_loras=2))
    (model / "config.json").write_text(json.dumps({**MODEL, "hidden_size": 128}))
    assert starts(config)
    for file in machine.iterdir():  # somebody clears the cache
        file.unlink()
    assert starts(config)


def test_a_start_that_failed_does_not_count(
    model: Path, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a start that ended half way, or whose compilers failed, leaves the mark, and the next
    one compiles what is missing one by one."""
    config = EngineConfig(model=str(model), load_format="dummy")
    with pytest.raises(RuntimeError), FirstStart(config):
        raise RuntimeError
    monkeypatch.setattr(_Compilers, "failed", True)
    assert starts(config)
    monkeypatch.setattr(_Compilers, "failed", False)
    assert starts(config)
    assert not starts(config)


def test_without_a_device_there_is_nothing_to_compile(
    model: Path, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: an engine on a CPU starts processes that import torch and wait for nothing."""
    assert not starts(EngineConfig(model=str(model), device="cpu"))
    assert not starts(EngineConfig(model=str(model / "none")))  # the engine says so better
    monkeypatch.setattr(first_start, "_DRIVER", machine / "none")
    assert not starts(EngineConfig(model=str(model)))


@pytest.mark.parametrize("name", ["TRITON_CACHE_DIR", "TRITON_HOME", ""])
def test_the_mark_lies_in_tritons_cache(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a cache that is thrown away leaves the mark, and nothing is compiled ahead again."""
    triton = pytest.importorskip("triton")
    for variable in ("TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.delenv(variable, raising=False)
    if name:
        monkeypatch.setenv(name, str(tmp_path))
    with triton.knobs.cache.scope():
        assert cache_folder() == Path(triton.knobs.cache.dir)


# ---- what is found -------------------------------------------------------------------------------


def test_one_layer_is_the_first_of_all(model: Path) -> None:
    """Bug: the model itself is left with one layer; or the short one wants the KV of all."""
    kernels = kernels_for("cpu")
    whole = build_model(ModelConfig.from_folder(model), torch.bfloat16, "cpu", kernels)
    short = whole.one_layer()
    assert (len(short.layers), len(whole.layers)) == (1, 3)  # type: ignore[attr-defined]
    assert short.layers[0] is whole.layers[0]  # type: ignore[attr-defined]


class _Unpinned:
    """Staging memory of the same size that is not pinned, as there is no device."""

    def __init__(self, size: int) -> None:
        self.tensor = torch.empty(size, dtype=torch.int32)
        self.array = self.tensor.numpy()


def runner_of(model: Decoder, config: ModelConfig, rows: RequestRows, layers: int) -> ModelRunner:
    """Return a model runner as on CUDA, with its tensors on the CPU."""
    device = torch.device("cpu")
    sampler = Sampler(SEQS + 1, config.vocab_size, device)
    sampler._scratch = torch.zeros(64, config.vocab_size, dtype=torch.int32)
    sampler._rows.device_words = torch.from_numpy(sampler._rows.words)
    kv = KVCache.allocate(kv_groups(config), 4, 16, torch.bfloat16, device, rows=SEQS + 1)
    inputs = CudaInputs(rows, 16, TOKENS, device)
    forward = ModelForward(model, model.kernels, rows, kv, inputs)
    sampling = StepSampler(model, sampler, rows.tokens)
    forward.cuda = sampling.cuda = True
    return ModelRunner(forward, sampling)


def on_cpu(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> tuple[Decoder, RequestRows]:
    """Return a model and rows for `runner_of`."""
    monkeypatch.setattr(inputs, "_Staging", _Unpinned)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **kw: empty(*a, **kw))
    cuda, device = kernels_for("cuda"), torch.device("cpu")
    method = DenseCuda(cuda)
    build = Builder(
        config, cuda, method, TensorParallelGroup(), torch.bfloat16, torch.bfloat16, device
    )
    rows = RequestRows.allocate(SEQS, 256, 16, device)
    return Decoder(build, method, virtual_tokens=0), rows


@contextmanager
def _no_recording(self: Any) -> Iterator[None]:
    yield None


@pytest.fixture
def compilers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compilers]:
    """Yield compilers that only record the kernels' names."""
    triton = pytest.importorskip("triton")
    if triton.knobs.runtime.interpret:
        pytest.skip("needs Triton's compiler")
    from triton.runtime import driver

    from tests.kernels.hopper import Hopper

    class Fresh(Hopper):
        def get_current_device(self) -> str:
            return "fresh"  # other tests may have compiled for the other one

    monkeypatch.setattr(driver, "_active", Fresh())
    monkeypatch.setattr(
        Compilers, "_hand_over", lambda self, job, *_: self._jobs.update({job: Future()})
    )
    compilers_here = Compilers(1)
    yield compilers_here
    compilers_here._process.kill()


@pytest.mark.slow
def test_what_a_start_launches_has_been_collected(
    model: Path, compilers: Compilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a size, or a kernel of one, that capture needs and the collection leaves out; or what a
    skipped kernel should have written is looked up, there or afterwards. On the CPU, torch would
    say so. Or GEMMs are tuned when the kernels are there, not while they are compiled; for other
    sizes; or with one layer's weights, which stay in the device's cache."""
    config = ModelConfig.from_folder(model)
    whole, rows = on_cpu(config, monkeypatch)
    tuned: list[Any] = []

    def tune(self: Decoder, *sizes: list[int]) -> None:
        tuned.append((self is whole, compilers.is_collecting, compilers.jobs > 0, sizes))

    monkeypatch.setattr(Decoder, "tune", tune)
    resolved: Any = SimpleNamespace(
        config=SimpleNamespace(graph_sizes=SIZES),
        captures=True,
        max_num_batched_tokens=TOKENS,
        speculation="drafts",
    )
    _hand_over(compilers, resolved, whole, lambda: runner_of(whole.one_layer(), config, rows, 1))
    assert tuned == [(True, False, True, tuned[0][-1])]
    assert not rows.tokens.any()
    collected = set(compilers._jobs)
    names = {name for _, name, _ in collected}
    assert {"_prefill_kernel", "_decode_kernel", "_filter_kernel", "_apply_updates_kernel"} <= names

    monkeypatch.setattr(StepGraphs, "_recording", _no_recording)
    monkeypatch.setattr(StepGraphs, "_device_seconds", lambda *_: 0.0)
    monkeypatch.setattr(StepGraphs, "_launch_seconds", lambda *_: 1.0)
    seen: list[tuple[int, int]] = []
    assemble = CudaInputs.lay_out

    def lay_out(
        self: CudaInputs, entries: int, tokens: int, *rest: int, runs: bool = False
    ) -> tuple[Any, AttentionMeta]:
        seen.append((entries, tokens))
        # What recording does not read, and nobody has uploaded.
        self.rows[:entries] = rows.pad_row
        self.last[:entries] = 0
        self.which[:entries] = 0
        return assemble(self, entries, tokens, *rest, runs=runs)

    monkeypatch.setattr(CudaInputs, "lay_out", lay_out)
    with compilers.collecting():
        runner = runner_of(whole, config, rows, len(whole.layers))
        warm_up(runner, TOKENS)
        capture_graphs(runner, SIZES, TOKENS, drafts=True)
    assert runner.graphs is not None and runner.graphs._verifications
    assert {(size, size) for size in SIZES} <= set(seen)
    assert any(tokens > entries for entries, tokens in seen)
    assert {name for _, name, _ in set(compilers._jobs) - collected} == set()
    assert tuned[1][-1] == tuned[0][-1]


@pytest.mark.slow
@pytest.mark.parametrize("heads", [8, 32])  # a rank's share of Qwen3-Next's, and all of them
def test_no_number_of_prompts_is_new(
    heads: int, model: Path, compilers: Compilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: how many prompts a step has decides the launch of a layer of DeltaNet, of which a start
    saw one: the first step with two or three of them waited for the compiler."""
    hybrid = {
        **MODEL, "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text",
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": heads // 2, "linear_num_value_heads": heads,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "head_dim": 64, "partial_rotary_factor": 1.0,
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(hybrid))
    monkeypatch.setattr(delta_chunks_cuda, "num_sms", lambda device: 132)
    config = ModelConfig.from_folder(model)
    whole, rows = on_cpu(config, monkeypatch)
    runner = runner_of(whole, config, rows, len(whole.layers))
    with compilers.collecting():
        launch_everything(runner, SIZES, TOKENS)
    assert runner.forward.model is whole
    collected = set(compilers._jobs)
    assert [name for _, name, _ in collected].count("_delta_pass_kernel") > 1
    pad = rows.pad_row
    with compilers.collecting(), torch.inference_mode():
        for prompts in range(1, 33):
            lengths = [TOKENS // prompts] * prompts
            batch = Batch(-1, [pad] * prompts, [0] * prompts, lengths, [True] * prompts)
            runner.forward.run_step(runner.forward.inputs.assemble(batch))
    assert {name for _, name, _ in set(compilers._jobs) - collected} == set()


KEY = """
import sys
from kernels.launch.compiling import hash_callees
from kernels.sampling import logprobs
for name in sys.argv[1:]:
    kernel = getattr(logprobs, name)
    hash_callees(kernel)
    print(kernel.cache_key)
"""


def test_a_key_does_not_depend_on_what_was_compiled_before() -> None:
    """Bug of Triton up to 3.7: the second kernel that calls a function has the function's constants
    in its key, the first has not; so a worker that compiled it alone did so for nothing."""

    def keys(*kernels: str) -> list[str]:
        command = [sys.executable, "-c", KEY, *kernels]
        root = Path(__file__).parents[3]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
        return done.stdout.split()

    both = keys("_logprob_block_kernel", "_logprob_row_kernel")
    assert [*keys("_logprob_block_kernel"), *keys("_logprob_row_kernel")] == both


# ---- only a device can tell: `python -m pytest -m gpu tests/engine/process/test_first_start.py`

START = """
import json, sys
from collections import Counter
from engine.config.engine_config import EngineConfig
from kernels.launch.compiling import Compilers
compilers = Compilers()
from triton import knobs
from engine.factory import build
missed = []
knobs.compilation.listener = (
    lambda *, src, cache_hit, **_: None if cache_hit else missed.append(src.name)
)
build(EngineConfig(**json.loads(sys.argv[1])), None, compilers)
compilers.close()
missed = Counter(missed) - Counter(compilers.own)
print(json.dumps([compilers.jobs, compilers.failed, [*missed.elements()]]))
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    "changes",
    [{}, {"max_loras": 2}, {"deterministic": True}, {"dtype": "float32"}],
)
def test_a_first_start_compiles_nothing_itself(
    changes: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    """Bug: kernels that the processes compile for nothing, or that they are not told of."""
    options = {"device": "cuda", "load_format": "dummy", "num_blocks": 64}
    config = {"model": str(model), **options, **changes}
    done = subprocess.run(
        [sys.executable, "-c", START, json.dumps(config)],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")},
        cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE,
        check=True,
    )
    jobs, failed, missed = json.loads(done.stdout.splitlines()[-1])
    assert jobs > 15 and not failed
    assert missed == []


SERVE = """
import json, sys
from engine.config.engine_config import EngineConfig
from engine.factory import build
from engine.messages import EngineRequest
from engine.sampling_params import SamplingParams
from triton import knobs
core, _ = build(EngineConfig(**json.loads(sys.argv[1])))
missed = []
knobs.compilation.listener = (
    lambda *, src, cache_hit, **_: None if cache_hit else missed.append(src.name)
)
for number, wanted in enumerate([0, 1, 3, 16, 20]):
    params = SamplingParams(max_tokens=3, logprobs=wanted, prompt_logprobs=wanted, ignore_eos=True)
    core.add_request(EngineRequest(number, [1, 2, 3], 3, params, seed=0))
    while core.has_work():
        core.step()
print(json.dumps(missed))
"""


@pytest.mark.gpu
def test_the_first_request_with_logprobs_compiles_nothing(model: Path, tmp_path: Path) -> None:
    """Bug: two kernels for each number of alternatives, which the first to ask waits for."""
    options = {"device": "cuda", "load_format": "dummy", "num_blocks": 64}
    config = {"model": str(model), **options}
    done = subprocess.run(
        [sys.executable, "-c", SERVE, json.dumps(config)],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")},
        cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE,
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == []
