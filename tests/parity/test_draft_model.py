"""A draft model of the same vocabulary: always right where it is the model itself, and texts that
stay what they are without."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from deployments.cli.plan import plans
from deployments.config.load import parse_config
from deployments.plan.gpus import GIB
from deployments.plan.memory import Hardware, check_files, plan
from engine.config.engine_config import EngineConfig
from engine.config.model_config import ModelConfig
from engine.errors import ConfigError
from engine.runner.drafts.graphs import Recorder, graph_bytes
from engine.runner.model_runner import ModelRunner
from engine.runner.warm_up import capture_drafts, warm_up
from engine.sampling_params import SamplingParams
from engine.scheduling.core import EngineCore
from tests.drafters import ListedLengths, use_chains
from tests.parity.engine_driver import Output, engine, run
from tests.parity.test_speculation import PROMPTS, SAMPLING
from tests.parity.test_speculation import model as make_model

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2048,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("models") / "llama")


def small(path: Path, **sizes: Any) -> Path:
    import transformers as t

    torch.manual_seed(1)
    config = t.LlamaConfig(**{**SMALL, "vocab_size": 512, **sizes})
    t.LlamaForCausalLM(config).save_pretrained(path)
    return path


def drafting(
    folder: Path, drafter: Path, *lengths: int, **fields: Any
) -> tuple[EngineCore, ListedLengths]:
    value = {"method": "draft_model", "model": str(drafter), "num_speculative_tokens": 7}
    core = engine(folder, speculation=value, num_threads=1, **fields)
    assert core.scheduler.drafts is not None
    controller = ListedLengths(lengths)
    core.scheduler.drafts.speculation._lengths = controller
    return core, controller


def plain(core: EngineCore) -> list[Output]:
    core.scheduler.speculate(None)
    core.reset_prefix_cache()
    return run(core, PROMPTS, SAMPLING)


@pytest.mark.parametrize("ahead", [False, True])
def test_the_model_itself_is_always_right(folder: Path, ahead: bool) -> None:
    """Bugs: a key of a draft is missing or one too many; the first token of a text, a chunk or a
    reused prefix has no key; a draft is drawn with other noise, penalties or filters."""
    fields = {"max_num_batched_tokens": 37, "async_scheduling": ahead}
    core, controller = drafting(folder, folder, 3, 7, 1, **fields)
    drafted = run(core, PROMPTS, SAMPLING)
    assert controller.accepted == controller.drafted > 50
    for some, other in zip(plain(core), drafted, strict=True):
        assert (some.token_ids, some.finish) == (other.token_ids, other.finish)


@pytest.mark.parametrize("ahead", [False, True])
def test_text_and_memory_with_another_model(folder: Path, tmp_path: Path, ahead: bool) -> None:
    """Bugs: wrong drafts change a text; the plan counts other bytes than the draft model takes."""
    drafter = small(tmp_path / "small")
    sizes = {"num_blocks": 40, "max_model_len": 256, "async_scheduling": ahead}
    core, controller = drafting(folder, drafter, 3, 0, 7, **sizes)
    drafted = run(core, PROMPTS, SAMPLING)
    assert controller.drafted > 100 and controller.accepted < controller.drafted / 2
    assert [o.token_ids for o in drafted] == [o.token_ids for o in plain(core)]
    runner = core._runner
    assert isinstance(runner, ModelRunner) and runner.drafting is not None
    value = {"method": "draft_model", "model": str(drafter)}
    config = EngineConfig(
        model=str(folder), dtype="float32", speculation=value, num_blocks=40, max_model_len=256
    )
    device = Hardware("CPU", "cpu", 8 * GIB)
    target = ModelConfig.from_folder(folder)
    planned = plan(target, config, device)
    assert dict(planned.memory.rows)["drafter"] == runner.drafting.passes.drafter.num_bytes
    keys = runner.kv.storage.nbytes + runner.drafting.kv.storage.nbytes
    assert planned.memory.block_bytes == keys // 40
    check_files(target, config, device, folder)
    for memory in ("fixed", "growing"):
        scarce = msgspec.structs.replace(
            config, num_blocks=0, kv_cache_bytes=1, kv_memory=memory, prefix_caching=True
        )
        with pytest.raises(ConfigError, match=r"small: .*request's are the drafter's"):
            plan(target, scarce, device)


def test_refusals(folder: Path, tmp_path: Path) -> None:
    """Bugs: a model of other tokens drafts, and is never right; positions end before the text."""

    def refusal(drafter: Path) -> str:
        with pytest.raises(ConfigError) as caught:
            drafting(folder, drafter, 3)
        return caught.value.message

    assert "vocab_size 500 is not the model's 512" in refusal(small(tmp_path / "a", vocab_size=500))
    short = small(tmp_path / "b", max_position_embeddings=100)
    assert "it has 100 positions, fewer than max_model_len 512" in refusal(short)
    drafter = small(tmp_path / "c")
    for path, token in ((folder, "x"), (drafter, "y")):
        (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {token: 3}}}))
    try:
        text = refusal(drafter)
        assert "its tokenizer has other tokens than the model's" in text
        speculation = {"method": "draft_model", "model": str(drafter)}
        options = {"model": str(folder), "engine": {"speculation": speculation}}
        config = parse_config(options, check_files=False)
        with pytest.raises(ConfigError) as planned:
            list(plans(config, folder / "config.json", Hardware("CPU", "cpu", 8 * GIB)))
        assert planned.value.message == text
    finally:
        (folder / "tokenizer.json").unlink()


def test_a_draft_model_at_rest_reads_no_decodes(folder: Path, monkeypatch: Any) -> None:
    """Bugs: steps without drafts cost a pass of the draft model; after a rest it lacks the keys of
    the tokens that came meanwhile."""
    core, controller = drafting(folder, folder, 0, 0, 0, 0, 0, 0, 3, 3)
    runner = core._runner
    assert isinstance(runner, ModelRunner) and runner.drafting is not None
    read: list[int] = []
    forward = runner.drafting.passes.drafter.forward

    def watched(token_ids: torch.Tensor, *others: Any) -> torch.Tensor:
        read.append(len(token_ids))
        return forward(token_ids, *others)

    monkeypatch.setattr(runner.drafting.passes.drafter, "forward", watched)
    params = SamplingParams(temperature=0.7, max_tokens=60, ignore_eos=True)
    (output,) = run(core, [PROMPTS[5]], params)
    assert controller.accepted == controller.drafted > 0
    tokens = len(PROMPTS[5]) + len(output.token_ids)
    assert len(read) < core.stats().step and tokens - 12 < sum(read) < 1.6 * tokens


def test_the_start_drafts_for_every_row(folder: Path) -> None:
    """Bug: behind the largest step the padding row seems to have read more than its text."""
    core, _ = drafting(folder, folder, 3)
    assert isinstance(core._runner, ModelRunner)
    warm_up(core._runner, 512)


@pytest.mark.parametrize("ahead", [False, True])
def test_chains_of_graphs_draft_as_passes_do(folder: Path, ahead: bool) -> None:
    """Bugs: padding writes into a request's row; a graph keeps the number of a draft, or a buffer
    of the graph before; drafts are taken for accepted that are not."""
    fields = {"max_num_batched_tokens": 37, "async_scheduling": ahead}
    core, controller = drafting(folder, folder, 3, 7, 1, **fields)
    counts = use_chains(core)
    params = SamplingParams(temperature=0.8, max_tokens=24, ignore_eos=True)
    drafted = run(core, PROMPTS, params)
    assert controller.accepted == controller.drafted > 50
    assert any(count & (count - 1) for count in counts), "some are padded"
    core.scheduler.speculate(None)
    core.reset_prefix_cache()
    for some, other in zip(run(core, PROMPTS, params), drafted, strict=True):
        assert some.token_ids == other.token_ids


def test_drafts_do_without_graphs_where_memory_is_short(folder: Path) -> None:
    """Bug: an engine whose steps fit does not start, as graphs of drafts do not fit."""
    core, _ = drafting(folder, folder, 3)
    runner = core._runner
    assert isinstance(runner, ModelRunner) and runner.drafting is not None

    def record(launch: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    capture_drafts(runner, runner.drafting, None, record)
    assert runner.drafting.graphs is None


@pytest.mark.gpu
@pytest.mark.parametrize("cut", [{}, {"cuda_graphs": False}, {"async_scheduling": False}], ids=str)
def test_on_a_gpu(folder: Path, cut: dict[str, Any]) -> None:
    """Bug: the draft model's inputs are those of a graph, or of a step in flight."""
    core, controller = drafting(folder, folder, 3, 7, 0, 1, device="cuda", dtype="float32", **cut)
    runner = core._runner
    assert isinstance(runner, ModelRunner) and runner.drafting is not None
    assert (runner.drafting.graphs is None) == (cut == {"cuda_graphs": False})
    run(core, PROMPTS, SAMPLING)
    run(core, PROMPTS, SamplingParams(temperature=0.8, max_tokens=40, ignore_eos=True))
    assert controller.accepted > 0.9 * controller.drafted > 50


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_graphs_of_drafts_are_planned(dtype: str, tmp_path: Path) -> None:
    """Bug: graphs of drafts take more memory than the plan reserves, and steps run out of it."""
    vocab = 150_000
    folder = small(tmp_path / "model", vocab_size=vocab)
    fields = {"device": "cuda", "dtype": dtype, "max_num_seqs": 256}
    core, _ = drafting(folder, folder, 3, **fields)
    runner = core._runner
    assert isinstance(runner, ModelRunner) and runner.drafting is not None
    graphs = runner.drafting.graphs
    assert graphs is not None and isinstance(graphs._record, Recorder)
    pool = graphs._record._pool
    pool_bytes = sum(
        segment["total_size"]
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment["segment_pool_id"]) == tuple(pool)
    )
    itemsize = getattr(torch, dtype).itemsize
    assert 256 * vocab * itemsize < pool_bytes <= graph_bytes(256, vocab, itemsize)
