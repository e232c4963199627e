"""Model runner on the CPU: layout of steps, results by entry, memory planning, start-up."""

import json
import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine import factory
from engine.batch import Batch, NewRow, StepResult, TokenLogprobs
from engine.config.engine_config import EngineConfig
from engine.config.kv_groups import kv_groups
from engine.config.model_config import ModelConfig
from engine.config_reader import Reader
from engine.errors import ConfigError
from engine.factory.plans import model_key
from engine.messages import EngineRequest
from engine.models.registry import build_model
from engine.parallel.group import TensorParallelGroup
from engine.parallel.stages import Stage
from engine.resolve import resolve
from engine.runner.caches.kv_cache import KVCache
from engine.runner.forward import ModelForward
from engine.runner.inputs import CpuInputs, max_entries
from engine.runner.launch.graphs import StepGraphs, default_sizes
from engine.runner.memory import (
    GIB,
    WEIGHTS_TOO_LARGE,
    MemoryPlan,
    available_host_memory,
    check_weights,
    count_blocks,
    fits_on,
    kv_ways_out,
)
from engine.runner.model_runner import ModelRunner
from engine.runner.request_rows import RequestRows
from engine.runner.warm_up import largest_step, warm_up
from engine.sampling.sampler import Sampler
from engine.sampling.step_sampler import StepSampler
from engine.sampling_params import SamplingParams
from kernels.dispatch import kernels_for
from kernels.kv.format import KVFormat
from tests.batches import BLOCK_SIZE, MAX_LEN, RandomSteps, new_row

NUM_ROWS = 4
CPU = torch.device("cpu")
CONFIG = ModelConfig.from_dicts(
    Reader(
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 32,
            "intermediate_size": 56,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 101,
            "rope_theta": 1000.0,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 2,
            "max_position_embeddings": MAX_LEN,
        },
        "config.json",
    ),
    Reader({}, "generation_config.json"),
)
POISON = 7  # a token whose embedding is not a number


@pytest.fixture
def runner() -> ModelRunner:
    return make_runner()


def make_runner() -> ModelRunner:
    kernels = kernels_for("cpu")
    model = build_model(CONFIG, torch.float32, CPU, kernels)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # large, so that a wrong attention shows in the logits
        parameter.allocate()
        parameter.tensor.normal_(0.0 if parameter.std else 1.0, 0.3, generator=generator)
    model.finish()
    rows = RequestRows.allocate(NUM_ROWS, MAX_LEN, BLOCK_SIZE, CPU)
    kv = KVCache.allocate(kv_groups(CONFIG), NUM_ROWS * 16, BLOCK_SIZE, torch.float32, CPU)
    forward = ModelForward(model, kernels, rows, kv, CpuInputs(rows, BLOCK_SIZE))
    sampler = Sampler(NUM_ROWS + 1, CONFIG.vocab_size, CPU)
    return ModelRunner(forward, StepSampler(model, sampler, rows.tokens))


def step(
    runner: ModelRunner, *entries: tuple[int, int, int, bool], new_rows: tuple[NewRow, ...] = ()
) -> StepResult:
    """Run entries (row, start, length, samples) as a step; row r owns the blocks from 16 * r."""
    batch = Batch(1, new_rows=list(new_rows))
    for new in new_rows:
        batch.new_blocks += [(new.row, i, 16 * new.row + i) for i in range(MAX_LEN // BLOCK_SIZE)]
    for row, start, length, samples in entries:
        batch.rows.append(row)
        batch.starts.append(start)
        batch.lengths.append(length)
        batch.samples.append(samples)
        at_head = len(batch.rows) == batch.num_decodes + 1
        batch.num_decodes += at_head and length == 1 and samples
    return runner.launch(batch).wait()


def prompt(length: int) -> list[int]:
    return [10 + 13 * i % 90 for i in range(length)]


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_layout_equals_a_plain_loop(seed: int, groups: int) -> None:
    """A token reads another's row, or its key lands in another request's block or group's."""
    rows = RequestRows.allocate(NUM_ROWS, MAX_LEN, BLOCK_SIZE, CPU, groups)
    inputs, steps = CpuInputs(rows, BLOCK_SIZE), RandomSteps(NUM_ROWS, seed, groups)
    for _ in range(40):
        batch, want = steps.next()
        laid_out = inputs.assemble(batch)
        meta = laid_out.metas[0]
        assert laid_out.token_ids.tolist() == want.token_ids
        assert meta.positions.tolist() == want.positions
        assert [meta_of_group.slots.tolist() for meta_of_group in laid_out.metas] == want.slots
        assert meta.query_start.tolist() == meta.query_start_host == want.query_start
        assert meta.kv_len.tolist() == meta.kv_len_host == want.kv_len
        assert meta.max_kv_len == max(want.kv_len)
        for meta_of_group, tables in zip(laid_out.metas, want.tables, strict=True):
            for own, blocks in zip(meta_of_group.block_table.tolist(), tables, strict=True):
                assert own[: len(blocks)] == blocks
        every = list(range(len(want.token_ids)))
        assert (every if laid_out.last is None else laid_out.last.tolist()) == want.last
        assert laid_out.sample_rows.tolist() == want.sample_rows
        assert laid_out.sample_positions.tolist() == want.sample_positions
        tokens = [
            row + position
            for row, position in zip(want.sample_rows, want.sample_positions, strict=True)
        ]
        rows.tokens[laid_out.sample_rows, laid_out.sample_positions] = torch.tensor(tokens).int()
        steps.sampled(want.sample_rows, tokens)


def test_the_next_step_reads_what_the_last_one_sampled(runner: ModelRunner) -> None:
    """One batch ahead nobody uploads the new token, so it must be in its row already."""
    (first,) = step(runner, (0, 0, 9, True), new_rows=(new_row(0, prompt(9)),)).tokens
    assert runner.rows.tokens[0, 9] == first
    (second,) = step(runner, (0, 9, 1, True)).tokens
    whole = new_row(1, [*prompt(9), first])
    assert step(runner, (1, 0, 10, True), new_rows=(whole,)).tokens == [second]


def test_results_belong_to_their_entries(runner: ModelRunner) -> None:
    """With a silent chunk between, a request gets its neighbour's token or log-probabilities."""
    wants = SamplingParams(temperature=0.0, logprobs=2)
    step(runner, (0, 0, 5, True), new_rows=(new_row(0, prompt(5)),))
    alone = step(runner, (3, 0, 6, True), new_rows=(new_row(3, prompt(6), wants),))
    result = step(
        runner,
        (0, 5, 1, True),
        (1, 0, 4, False),
        (2, 0, 6, True),
        new_rows=(new_row(1, prompt(8)), new_row(2, prompt(6), wants)),
    )
    assert result.tokens[1:] == alone.tokens
    assert len(result.tokens) == 2
    assert list(result.logprobs) == [2]
    item = result.logprobs[2]
    assert item.token_id == result.tokens[1] == item.top_ids[0]
    assert (item.rank, len(item.top_ids)) == (1, 2)
    assert item.logprob == pytest.approx(alone.logprobs[0].logprob, abs=1e-4)
    assert result.prompt_logprobs == {}


def test_no_entry_samples(runner: ModelRunner) -> None:
    """A step of first chunks only has no row to sample, and the sampler is asked all the same."""
    result = step(runner, (0, 0, 4, False), new_rows=(new_row(0, prompt(8)),))
    assert (result.tokens, result.errors) == ([], {})


def test_one_broken_row_fails_alone(runner: ModelRunner) -> None:
    """A request whose logits are NaN takes the whole batch with it, or emits token 0 as if real."""
    good = step(runner, (3, 0, 6, True), new_rows=(new_row(3, prompt(6)),)).tokens
    runner.model.embedding[POISON] = math.nan  # type: ignore[attr-defined]
    params = SamplingParams(temperature=0.0, logprobs=1)
    new_rows = (
        new_row(0, [POISON], params),
        new_row(1, [*prompt(4), POISON]),
        new_row(2, prompt(6), params),
    )
    entries = ((0, 0, 1, True), (1, 0, 5, True), (2, 0, 6, True))
    result = step(runner, *entries, new_rows=new_rows)
    assert result.tokens == [-1, -1, *good]
    assert list(result.errors) == [0, 1]
    assert all(text.startswith("numerical_error: ") for text in result.errors.values())
    # What the failed rows read next, one batch ahead, is a token all the same.
    assert runner.rows.tokens[0, 1] == runner.rows.tokens[1, 5] == 0
    silent = step(runner, (1, 0, 3, False), (2, 6, 1, True))
    assert silent.errors == {}


def test_prompt_logprobs_in_chunks_equal_one_pass(runner: ModelRunner) -> None:
    """The token after a chunk is predicted by its last position; at a seam it is lost or twice."""
    params = SamplingParams(temperature=0.0, prompt_logprobs=3)
    length = 20

    def scored(row: int, *cuts: int) -> list[TokenLogprobs]:
        items, start = [], 0
        new_rows: tuple[NewRow, ...] = (new_row(row, prompt(length), params),)
        for end in cuts:
            entry = (row, start, end - start, end == length)
            result = step(runner, entry, new_rows=new_rows)
            items += result.prompt_logprobs.get(0, [])
            start, new_rows = end, ()
        return items

    whole = scored(0, length)
    assert [item.token_id for item in whole] == prompt(length)[1:]
    for row, cuts in enumerate([(7, 14, 20), (1, 19, 20), tuple(range(1, 21))], start=1):
        for chunked, other in zip(scored(row, *cuts), whole, strict=True):
            assert (chunked.token_id, chunked.rank, chunked.top_ids) == (
                other.token_id,
                other.rank,
                other.top_ids,
            )
            assert chunked.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert chunked.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-4)
    resumed = replace(new_row(0, prompt(length), params), num_prompt_tokens=12)
    result = step(runner, (0, 0, length, True), new_rows=(resumed,))
    assert [item.token_id for item in result.prompt_logprobs[0]] == prompt(length)[1:12]


def test_prompt_logprobs_hold_few_logits(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the logits of a chunk of 8,192 tokens were there at once, 2 GiB of a large vocabulary
    where 0.9 GiB were planned for all that a step makes; or a seam between slices is lost."""
    rows: list[int] = []
    logits = runner.model.logits

    def counted(hidden: torch.Tensor, whole: bool = True) -> torch.Tensor:
        rows.append(hidden.shape[0])
        return logits(hidden, whole)

    monkeypatch.setattr(runner.model, "logits", counted)
    params = SamplingParams(temperature=0.0, prompt_logprobs=3)
    length, logprobs = 40, []
    for row, most in enumerate((39, 7)):
        runner.sampling._logits_rows = most
        rows.clear()
        new = new_row(row, prompt(length), params)
        logprobs.append(step(runner, (row, 0, length, True), new_rows=(new,)).prompt_logprobs[0])
        assert max(rows) == most
    assert [item.token_id for item in logprobs[0]] == prompt(length)[1:]
    for chunked, other in zip(*logprobs, strict=True):
        assert (chunked.rank, chunked.top_ids) == (other.rank, other.top_ids)
        assert chunked.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert chunked.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-4)


def test_warm_up_touches_no_request(runner: ModelRunner) -> None:
    """Warming up writes keys into blocks, or tokens into rows, that requests use later."""
    warm_up(runner, 64)
    assert not runner.rows.tokens[:NUM_ROWS].any()
    assert not any(cache[1:].any() for layer in runner.kv.layers.values() for cache in layer)


def test_the_largest_step_is_one_that_can_be(runner: ModelRunner) -> None:
    """Bug: with few rows that are short the warm-up ran more prompts than there are rows, and an
    engine on CUDA did not start: a step of 8,192 tokens with 8 rows of 128."""
    for num_tokens in (1, MAX_LEN, 3 * MAX_LEN - 5, 10_000):
        batch = largest_step(runner, num_tokens)
        assert len(batch.rows) <= NUM_ROWS and max(batch.lengths) <= MAX_LEN
        assert batch.num_tokens == min(num_tokens, NUM_ROWS * MAX_LEN)


def test_graph_sizes_cover_every_batch() -> None:
    """A batch larger than the largest graph runs eagerly, ten times slower."""
    for most in (1, 2, 3, 4, 7, 8, 9, 255, 256, 257, 300, 1000, 1024):
        sizes = default_sizes(most)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == most
        for count in range(1, most + 1):
            size = next(size for size in sizes if size >= count)
            assert size - count < max(8, count / 8 + 1), (count, size)


@pytest.mark.parametrize("most", [1, 7, 8, 40, 100, 200, 256, 1024])
def test_mixed_graphs_cover_every_row_up_to_256(most: int) -> None:
    """Bug: with max_num_seqs 256 a mixed step of 136 entries or more had no graph, because padding
    wants an entry more than there are rows."""
    rows = RequestRows.allocate(most, 4096, 16, torch.device("cpu"))
    forward: Any = SimpleNamespace(rows=rows, inputs=None, own=None, state_runs=None)
    graphs = StepGraphs(forward, SimpleNamespace(), default_sizes(most), 2048)  # type: ignore[arg-type]
    for count in range(1, min(most, 256) + 1):
        batch = Batch(0, [0] * count, [0] * count, [1] * (count - 1) + [30], num_decodes=count - 1)
        size = graphs.size_of(batch)
        assert size is not None
        entries, tokens = size
        assert count < entries <= max_entries(most) and batch.num_tokens <= tokens


def test_ranks_record_the_same_sizes() -> None:
    """Bug: each rank times mixed steps for itself, and leaves out others than the rest: they bring
    a sum of 512 tokens, where one has 384, and wait for each other for good."""
    meet, said = threading.Barrier(2, timeout=20), [0, 0]

    class Rank:
        def __init__(self, number: int) -> None:
            self.number = number

        def least(self, number: int) -> int:
            said[self.number] = number
            meet.wait()
            least = min(said)
            meet.wait()
            return least

    class Timed(StepGraphs):
        """Step graphs with simulated times. slow: sizes that take the device too long."""

        slow: set[tuple[int, int]]

        def _allocate(self) -> None: ...

        def _launch_seconds(self, size: tuple[int, int]) -> float:
            return 1.0

        def _device_seconds(self, size: tuple[int, int]) -> float:
            return 1.0 + (size in self.slow)

        def _capture_forward(self, size: tuple[int, int], adapters: bool) -> None:
            self._forwards[size, adapters] = None  # type: ignore[assignment]

        def _capture_choice(self, entries: int, mixed: bool, how: str) -> None: ...

    rows = RequestRows.allocate(64, 4096, 16, torch.device("cpu"))

    def captured(number: int) -> Timed:
        model = SimpleNamespace(group=Rank(number), stage=Stage(), tune=lambda *sizes: None)
        forward: Any = SimpleNamespace(
            rows=rows, model=model, lora=None, inputs=None, own=None, state_runs=None
        )
        graphs = Timed(forward, SimpleNamespace(), [1, 2], 2048)  # type: ignore[arg-type]
        graphs.slow = [{(16, 384), (72, 512)}, {(16, 768), (72, 192)}][number]
        graphs.capture()
        return graphs

    with ThreadPoolExecutor(2) as threads:
        first, other = threads.map(captured, range(2))
    assert first._mixed == other._mixed and first._forwards.keys() == other._forwards.keys()
    assert first._mixed[16][-1] == 256 and first._mixed[72][-1] == 160


def test_decodes_of_all_ranks_are_recorded_where_that_pays() -> None:
    """Bug: where ranks divide attention by requests, a graph's attention has the requests of all
    ranks, and steps of a thousand decodes are slower with graphs than without."""

    class Timed(StepGraphs):
        timed: tuple[int, ...] = ()

        def _allocate(self) -> None: ...

        def _device_seconds(self, size: tuple[int, int]) -> float:
            self.timed += size[:1]
            return size[0] / 1000

        def _divided_seconds(self, count: int) -> float:
            return 0.2 + count / 4000

        def _capture_forward(self, size: tuple[int, int], adapters: bool) -> None:
            self._forwards[size, adapters] = None  # type: ignore[assignment]

        def _capture_choice(self, entries: int, mixed: bool, how: str) -> None:
            assert mixed or entries in self._decodes

    rows = RequestRows.allocate(1024, 32, 16, torch.device("cpu"))
    model = SimpleNamespace(group=TensorParallelGroup(), stage=Stage(), tune=lambda *_: None)
    fields = {"rows": rows, "model": model, "lora": object(), "inputs": None, "state_runs": None}
    sizes = default_sizes(1024)
    sampling: Any = None
    forward: Any = SimpleNamespace(**fields, own=SimpleNamespace(inputs=object()))
    graphs = Timed(forward, sampling, sizes, 31)
    graphs.capture()
    recorded = [size for size in sizes if size <= 256]
    assert graphs._decodes == recorded and set(graphs.timed) == set(sizes) - set(recorded) | {
        recorded[-1]
    }
    assert set(graphs._forwards) == {
        ((n, n), adapters) for n in recorded for adapters in (False, True)
    }
    for count, size in ((3, (4, 4)), (256, (256, 256)), (257, None)):
        assert graphs.size_of(Batch(0, [0] * count, num_decodes=count)) == size
    graphs = Timed(SimpleNamespace(**fields, own=None), sampling, sizes, 31)  # type: ignore[arg-type]
    graphs.capture()
    assert graphs._decodes == sizes and not graphs.timed


def test_too_few_blocks_name_the_ways_out() -> None:
    """A user who gave too little memory learns that the engine is out of blocks, at request 1."""
    on_cuda, on_cpu = kv_ways_out(True, False), kv_ways_out(False, True)
    assert "memory_fraction" not in on_cpu and "max_num_seqs (each has a state)" in on_cpu
    assert count_blocks(1000, 100, 160, 10, given="kv_cache_bytes", ways_out=on_cpu) == 10
    for budget in (999, 0, -5):
        with pytest.raises(ConfigError) as raised:
            count_blocks(budget, 100, 160, 10, given="a share of 0.9", ways_out=on_cuda)
        text = raised.value.message
        for word in ("160", "10 blocks", "a share of 0.9", "max_model_len", "memory_fraction"):
            assert word in text
        assert "-" not in text.split("are left")[0].rsplit("and", 1)[1]


def test_what_does_not_fit_is_told_with_numbers_and_three_ways_out(tmp_path: Path) -> None:
    """A device that is too small ends in the middle of a start, or the system ends the process."""
    path = folder(tmp_path)
    messages = []
    for changes in ({"num_blocks": 1 << 40}, {"kv_cache_bytes": 1 << 60}, {"kv_cache_bytes": 1000}):
        with pytest.raises(ConfigError) as raised:
            factory.build(config_of(path, **changes))
        messages.append(raised.value.message)
    with pytest.raises(ConfigError) as raised:
        sizes = SimpleNamespace(loading_bytes=16 * GIB, num_bytes=8 * GIB)
        check_weights([sizes], 10 * GIB)  # type: ignore[arg-type]
    messages.append(raised.value.message)
    for text in messages:
        assert text.count("GiB") >= 2
        ways = text.split("Ways out: ")[1]
        assert ways.count(", ") >= 2 and ", or " in ways
    assert "16.00 GiB" in messages[-1] and "10.00 GiB" in messages[-1]


def test_a_device_out_of_memory_at_the_start_is_a_mistake_of_the_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A traceback from deep inside torch instead of what to change."""
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 3 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB, 8 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a small one")
    with (
        pytest.raises(ConfigError) as raised,
        fits_on(torch.device("cuda"), "the weights", WEIGHTS_TOO_LARGE, param="model"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")
    for word in ("the weights", "a small one", "8.00 GiB", "3.00 GiB", "1.00 GiB", "Ways out"):
        assert word in raised.value.message


def test_memory_table_adds_up() -> None:
    """The table names a purpose twice or leaves bytes out, and nobody can find what took them."""
    plan = MemoryPlan("cpu", 8 * GIB, [("weights", 2 * GIB), ("request rows", GIB // 2)])
    plan.num_blocks, plan.block_bytes, plan.block_size = 1024, GIB // 512, 16
    assert plan.table().splitlines() == [
        "weights                           2.00 GiB",
        "request rows                      0.50 GiB",
        "KV cache (1024 blocks of 16)      2.00 GiB",
        "free                              3.50 GiB",
        "total on cpu                      8.00 GiB",
    ]
    assert 0 < available_host_memory() < 1 << 50


def folder(path: Path, **changes: Any) -> Path:
    """Write a config.json alone, which is enough for random weights; return the folder."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 56,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 101,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 2,
        **changes,
    }
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


def config_of(path: Path, **changes: Any) -> EngineConfig:
    values = {"device": "cpu", "load_format": "dummy", "num_threads": 1, **changes}
    return EngineConfig(model=str(path), **values)


def test_ready_tells_what_the_cache_can_hold(tmp_path: Path) -> None:
    """Callers are told the model's length and fail beyond what the KV cache can hold."""
    seen: list[tuple[str, float]] = []
    core, ready = factory.build(
        config_of(folder(tmp_path), num_blocks=3), lambda name, done: seen.append((name, done))
    )
    assert ready.max_model_len == 48 == core.config.max_model_len
    assert (ready.num_blocks, ready.vocab_size, ready.eos_token_ids) == (3, 101, [2])
    assert "KV cache (3 blocks of 16)" in ready.memory_table
    assert [name for name, done in seen if done == 1.0][-2:] == ["memory", "rehearsal"]
    assert core.scheduler.pace.limit(10**9, 1, 16) < 10**9, "what prompts take is known"
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    core.add_request(EngineRequest(1, prompt(40), 40, params, seed=0))
    deltas = []
    while core.has_work():
        deltas += core.step()
    assert sum(len(delta.token_ids) for delta in deltas) == 8
    assert deltas[-1].finish == "length"


def test_on_the_cpu_a_step_brings_its_own_tokens(tmp_path: Path) -> None:
    """One batch ahead where a launch computes: each token waits for the step after its own."""
    core, _ = factory.build(config_of(folder(tmp_path)), lambda name, done: None)
    core.add_request(EngineRequest(1, prompt(8), 8, SamplingParams(temperature=0.0), seed=0))
    assert [len(delta.token_ids) for delta in core.step()] == [1]


def test_a_gpu_without_bfloat16_says_what_to_do(tmp_path: Path, monkeypatch) -> None:
    """Bug: a T4 loaded the weights in bfloat16, and the first kernel did not compile."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    path = folder(tmp_path)
    for capability, dtype, expected in (
        ((7, 5), "bfloat16", None),
        ((7, 5), "float16", torch.float16),
        ((8, 0), "bfloat16", torch.bfloat16),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        config = EngineConfig(model=str(path), device="cuda", dtype=dtype)
        if expected is None:
            with pytest.raises(ConfigError, match=r"Tesla T4 has no bfloat16.* dtype: float16"):
                resolve(config)
        else:
            assert resolve(config).dtype is expected
    assert resolve(EngineConfig(model=str(path), device="cpu")).dtype is torch.bfloat16


def test_a_gpu_acts_as_an_older_one(tmp_path: Path, monkeypatch) -> None:
    """Bug: kernels of an older device with settings that it has not, such as keys in fp8; a
    capability that the device's own code does not contain."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    path = str(folder(tmp_path))
    resolve(EngineConfig(model=path, device="cuda", kv_dtype="fp8"))
    resolve(EngineConfig(model=path, device="cuda", gpu_capability=8.0))
    with pytest.raises(ConfigError, match=r"H100 cannot hold 'fp8'|8\.9"):
        resolve(EngineConfig(model=path, device="cuda", gpu_capability=8.0, kv_dtype="fp8"))
    with pytest.raises(ConfigError, match="set dtype: float16"):
        resolve(EngineConfig(model=path, device="cuda", gpu_capability=7.5, dtype="bfloat16"))
    for capability in (7.0, 8.1, 10.0):
        with pytest.raises(ConfigError, match=r"gpu_capability: .* give one of 7\.5, 8\.0, 8\.6"):
            resolve(EngineConfig(model=path, device="cuda", gpu_capability=capability))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    with pytest.raises(ConfigError, match=r"H100 has compute capability 7\.0.* device: cpu"):
        resolve(EngineConfig(model=path, device="cuda", dtype="float16"))


def test_planning_refuses_what_cannot_be(tmp_path: Path) -> None:
    """Too small a cache, or more than the machine has, is found when the first prompt comes."""
    path = folder(tmp_path)
    model = ModelConfig.from_folder(path)
    assert kv_groups(model).bytes_per_block(16, KVFormat()) == 2 * 2 * 2 * 8 * 16 * 2
    with pytest.raises(ConfigError, match="graph_sizes: 64 is more than can run at once"):
        resolve(config_of(path, max_num_seqs=32, graph_sizes=(8, 64)))
    with pytest.raises(ConfigError, match="Ways out"):
        factory.build(config_of(path, kv_cache_bytes=15 * 2048))
    with pytest.raises(ConfigError, match="of memory are free"):
        factory.build(config_of(path, kv_cache_bytes=1 << 60))
    _, ready = factory.build(config_of(path, kv_cache_bytes=16 * 2048))
    assert (ready.num_blocks, ready.max_model_len) == (16, 256)


def test_other_weights_at_the_same_path_have_another_key(tmp_path: Path) -> None:
    """After a redeploy, prefixes computed with the old weights are taken for the new model's."""

    def key(**changes: Any) -> str:
        return model_key(resolve(config_of(path, **changes)))

    path = folder(tmp_path)
    weights = path / "model.safetensors"
    weights.write_bytes(b"x" * 100)
    os.utime(weights, ns=(1, 1))
    keys = [key(load_format="auto")]
    os.utime(weights, ns=(1, 2))  # as on another machine
    assert keys == [key(load_format="auto")]
    weights.write_bytes(b"x" * 99 + b"y")
    keys.append(key(load_format="auto"))
    weights.write_bytes(b"x" * 101)
    keys.append(key(load_format="auto"))
    folder(path, rms_norm_eps=1e-6)
    keys.append(key(load_format="auto"))
    keys += [key(), key(seed=1)]
    assert len(set(keys)) == len(keys)
