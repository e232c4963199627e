"""A model in stages of layers: its texts are those of one rank, and several steps are in flight."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engine import LLM, SamplingParams
from engine.config.engine_config import EngineConfig
from engine.errors import ConfigError, EngineDead
from engine.parallel.stages import Stage, divide
from engine.process import rank as rank_process
from engine.resolve import resolve
from tests.engine.harness_tasks import write_model
from tests.engine.models.checkpoints import save_checkpoint
from tests.engine.process.ranked import (
    add_adapters,
    children,
    config_of,
    everything,
    logprobs_of,
    model_and_adapters,
    serve,
    start,
    told,
)
from tests.engine.process.test_process import running, wait_until
from tests.engine.text import small_tokenizers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folders of a model with three layers and of adapters for it, by name."""
    return model_and_adapters(tmp_path_factory.mktemp("model"), num_hidden_layers=3)


@pytest.mark.parametrize(
    ("stages", "per_stage", "ahead"),
    [
        (2, 2, True),
        pytest.param(2, 1, True, marks=pytest.mark.slow),
        pytest.param(2, 2, False, marks=pytest.mark.nightly),
        pytest.param(3, 1, False, marks=pytest.mark.slow),
    ],
)
def test_texts_are_those_of_one_rank(
    model: dict[str, Path],
    two_cores: None,
    monkeypatch: pytest.MonkeyPatch,
    stages: int,
    per_stage: int,
    ahead: bool,
) -> None:
    """Bugs: a stage computes with the keys of another step's requests; an adapter, or a prefix, is
    on one stage's layers only; a token is read before it is there; a preempted request's blocks
    are written by a step that is still on its way; the prefix cache finds what one stage has. Where
    each stage has two ranks: they meet in different orders, or in another stage's memory; logits
    are gathered of different steps; masks are waited for on a rank that gets none."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(per_stage * stages)))
    requests = everything(model)
    outputs = []
    for count, divided in ((1, 1), (stages, per_stage)):
        options: dict[str, Any] = {"pipeline_parallel": count, "tensor_parallel": divided}
        options["async_scheduling"] = ahead and count > 1  # as on GPUs
        core, others = start(config_of(model["model"], **options))
        add_adapters(core, model)
        sizes: list[int] = []
        schedule = core.scheduler.schedule

        def watched(schedule: Any = schedule, core: Any = core, sizes: Any = sizes) -> Any:
            sizes.append(len(core.scheduler.in_flight))
            return schedule()

        core.scheduler.schedule = watched  # type: ignore[method-assign]
        first = serve(core, requests)
        assert core.stats().preemptions > 0
        assert max(sizes) == core.config.depth - 1, "fewer are in flight than may be"
        again = serve(core, requests[-3:])
        assert any(output.cached for output in again.values())
        assert told(again).items() <= told(first).items()
        outputs.append(first)
        if others is not None:
            others.close()
    assert told(outputs[0]) == told(outputs[1])
    for id, output in outputs[0].items():
        close = pytest.approx(logprobs_of(output), abs=1e-4)
        assert logprobs_of(outputs[1][id]) == close


@pytest.mark.parametrize(
    ("stages", "per_stage"), [(3, 1), pytest.param(2, 2, marks=pytest.mark.slow)]
)
def test_a_failed_step_costs_the_requests_that_are_to_blame(
    model: dict[str, Path],
    two_cores: None,
    monkeypatch: pytest.MonkeyPatch,
    stages: int,
    per_stage: int,
) -> None:
    """Bugs: a step that raises on one rank leaves others of its stage, or of other stages, waiting
    for it; it fails a step that was before it on a later stage, whose requests are then suspected;
    what was sent of it is taken for the next one's."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    runners: dict[tuple[int, int], Any] = {}
    init = rank_process.RankLoop.__init__

    def noted(self: Any, runner: Any, *given: Any) -> None:
        runners[runner.model.stage.number, runner.model.group.rank] = runner
        init(self, runner, *given)

    monkeypatch.setattr(rank_process.RankLoop, "__init__", noted)
    options = {"pipeline_parallel": stages, "tensor_parallel": per_stage}
    core, ranks = start(config_of(model["model"], max_loras=0, **options))
    runners[0, 0] = core._runner._runner  # type: ignore[attr-defined]
    requests = [message for message in everything(model) if not message.adapter][:4]
    want = told(serve(core, requests))
    assert ranks is not None
    poison = msgspec.structs.replace(requests[0], id=9, seed=99)
    assert len(runners) == stages * per_stage
    moments = [(runner, "begin") for runner in runners.values()]
    if per_stage > 1:  # behind the last sum of a stage; and at the end of a step
        moments += [(runners[1, 1], "send"), (runners[0, 1], "conclude")]
    for runner, moment in moments:
        launch, send = runner.launch, runner.link.send

        def fail(*given: Any) -> Any:
            raise ValueError("planted")

        def launch_or_fail(
            batch: Any,
            launch: Any = launch,
            send: Any = send,
            runner: Any = runner,
            moment: str = moment,
        ) -> Any:
            poisoned = any(new.seed == 99 for new in batch.new_rows)
            if poisoned and moment == "begin":
                fail()
            runner.link.send = fail if poisoned and moment == "send" else send
            launched = launch(batch)
            if poisoned and moment == "conclude":
                launched.take_back = fail
            return launched

        runner.launch = launch_or_fail
        outputs = serve(core, [*requests, poison])
        assert outputs[9].finish == "error"
        assert {id: output for id, output in told(outputs).items() if id != 9} == want
        runner.launch = launch
    ranks.close()


def test_layers_are_divided_by_what_they_cost() -> None:
    """Bugs: a stage without a layer; the stage with the head is the slowest of all."""
    assert divide([1] * 32, 2, 4) == [0, 6, 14, 23, 32]
    assert divide([1] * 4, 10, 4) == [0, 1, 2, 3, 4]
    assert divide([9, 1, 1, 1], 0, 2) == [0, 1, 4]
    assert [Stage(n, 2).layers([1] * 4, 2) for n in range(2)] == [range(1), range(1, 4)]


@pytest.mark.parametrize(
    "changes, stages, why",
    [
        ({}, 4, "pipeline_parallel: 4: .* 3 layers, and a stage needs one"),
        ({}, 3, "pipeline_parallel 3: so many ranks on the CPU need as many cores"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    model: dict[str, Path], two_cores: None, tmp_path: Path,
    changes: dict[str, Any], stages: int, why: str,
) -> None:  # fmt: skip
    """Bug: an engine starts processes that have nothing to do, or for which there is no core."""
    with pytest.raises(ConfigError, match=why) as caught:
        resolve(EngineConfig(model=str(model["model"]), device="cpu", pipeline_parallel=stages))
    assert caught.value.param == "pipeline_parallel"
    with pytest.raises(ConfigError, match="tensor_parallel 2 x pipeline_parallel 2: so many"):
        resolve(
            EngineConfig(
                model=str(model["model"]), device="cpu", tensor_parallel=2, pipeline_parallel=2
            )
        )


# ---- processes -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "per_stage"), [(0, 1), (1, 1), (3, 2)])
def test_stages_die_together(
    model: dict[str, Path],
    real_cores: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    victim: int,
    per_stage: int,
) -> None:
    """Bugs: a request waits for ever for the rank that was killed; the error names no rank; a
    process stays behind."""
    if per_stage > 1:  # four ranks, and no more cores than there are
        patch = "import os; os.sched_getaffinity = lambda pid: {0, 1, 2, 3}\n"
        (tmp_path / "sitecustomize.py").write_text(patch)
        path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        monkeypatch.setenv("PYTHONPATH", path)
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "pipeline_parallel": 2}
    options["tensor_parallel"] = per_stage
    with LLM(model["model"], num_blocks=64, **options) as llm:
        pids = [llm.pid, *children(llm.pid)]
        assert len(pids) == 2 * per_stage
        params = SamplingParams(max_tokens=400, ignore_eos=True)
        handles = [llm.start_request([5, 6, 7 + number], params) for number in range(4)]
        handles[0].get(10)
        time.sleep(0.02 * victim)
        began = time.monotonic()
        os.kill(pids[victim], 9)
        named = f"rank {victim} of {2 * per_stage} of the engine was killed by signal 9"
        if not victim:
            named = "killed"
        with pytest.raises(EngineDead, match=named):
            handles[3].sync(10)
        assert time.monotonic() - began < 2.0  # a second, on a machine that has nothing else to do
        assert wait_until(lambda: not any(map(running, pids)), 1.0)


@pytest.mark.slow
def test_each_stage_reads_its_own_tensors(
    model: dict[str, Path],
    real_cores: None,
    tmp_path: Path,
) -> None:
    """Bugs: a stage reads, or asks for, what another one has; a file's fault on another stage than
    the first is lost."""
    theirs = tmp_path / "model"
    save_checkpoint(theirs, "llama", num_hidden_layers=2)
    small_tokenizers.byte_level().backend.save(str(theirs / "tokenizer.json"))
    weights = theirs / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    header = int.from_bytes(raw[:8], "little")
    tensors = msgspec.json.decode(bytes(raw[8 : 8 + header]))
    begin, _ = tensors["model.layers.1.mlp.down_proj.weight"]["data_offsets"]
    at = 8 + header + begin
    raw[at : at + 4] = torch.tensor([float("nan")]).numpy().tobytes()
    weights.write_bytes(raw)
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.down_proj.*rank 1 of 2"):
        LLM(theirs, dtype="float32", device="cpu", pipeline_parallel=2, num_blocks=64)


@pytest.mark.slow
def test_two_replicas_of_two_stages(real_cores: None, tmp_path: Path) -> None:
    """Data and pipeline parallel at once. Bugs: stages of one replica that meet those of another;
    shared memory of one name; requests of both replicas at once that get another's tokens."""
    write_model(tmp_path, bos=False)
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 64}
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    prompts = [[5 + (7 * at + number) % 90 for at in range(9 + number)] for number in range(8)]
    with LLM(tmp_path, **options) as llm:
        wanted = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    with (
        LLM(tmp_path, pipeline_parallel=2, **options) as first,
        LLM(tmp_path, pipeline_parallel=2, **options) as second,
        ThreadPoolExecutor(2) as pool,
    ):
        halves = pool.map(
            lambda replica, some: replica.generate(some, params),
            (first, second),
            (prompts[::2], prompts[1::2]),
        )
        even, odd = ([output.outputs[0].token_ids for output in outputs] for outputs in halves)
    assert (even, odd) == (wanted[::2], wanted[1::2])
    assert len({tuple(tokens) for tokens in wanted}) > 1
