"""Weights replaced and requests paused while an engine serves, as a trainer orders it."""

import runpy
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine import LLM
from engine.errors import InvalidRequest, UpdateFailed
from engine.library.handle import RequestHandle
from tests.engine.library.trainers import PROMPT, Trainer, answer, folders, greedy


def begun(llm: LLM, count: int) -> RequestHandle:
    """Return a running request that has given some tokens."""
    handle = llm.start_request(PROMPT, greedy(count))
    assert handle.get(10) is not None
    return handle


def test_from_memory_and_from_a_folder(llm: LLM, trainer: Trainer, tmp_path: Path) -> None:
    """An update reaches only some tensors, or another version is told than spoke."""
    assert answer(llm).token_ids == trainer.says(PROMPT, 8)
    llm.update_weights(trainer.train(), version="step 1")
    first = answer(llm)
    assert first.token_ids == trainer.says(PROMPT, 8)
    assert first.versions == [("step 1", 8)]
    trainer.train()
    trainer.model.save_pretrained(tmp_path)
    llm.update_weights(tmp_path)
    assert answer(llm).versions == [("2", 8)]
    assert answer(llm).token_ids == trainer.says(PROMPT, 8)
    stats = llm.stats()
    assert (stats.weight_updates, stats.weights_version) == (2, "2")


def test_no_prefix_outlives_its_weights(llm: LLM, trainer: Trainer) -> None:
    """A prompt starts from keys that other weights have computed."""
    for _ in range(2):
        llm.update_weights(trainer.train())
        out = llm.generate(PROMPT, greedy(2))[0]
        assert out.num_cached_tokens == 0
        assert out.outputs[0].token_ids == trainer.says(PROMPT, 2)
        assert llm.generate(PROMPT, greedy(2))[0].num_cached_tokens == 48


@pytest.mark.parametrize("recompute", [False, True])
def test_running_requests_go_on(llm: LLM, trainer: Trainer, recompute: bool) -> None:
    """Each token is of the version that is told. With `recompute` it is exactly that version's."""
    handle = begun(llm, 3000)
    before = trainer.says(PROMPT, 4)
    weights, version = trainer.train(), f"v{trainer.count}"
    llm.update_weights(weights, version=version, recompute=recompute)
    time.sleep(0.1)
    handle.stop()
    (out,) = handle.sync(10).outputs
    (old, count), (new, after) = out.versions
    assert new == version != old and count + after == len(out.token_ids)
    assert out.token_ids[: min(4, count)] == before[: min(4, count)]
    if recompute:
        assert out.token_ids[count:][:4] == trainer.says([*PROMPT, *out.token_ids[:count]], 4)
    # blocks that the request filled under two versions are in nobody's prefix
    again = llm.generate([*PROMPT, *out.token_ids], greedy(1))[0]
    if not recompute:
        assert again.num_cached_tokens == 0
    assert again.outputs[0].token_ids == trainer.says([*PROMPT, *out.token_ids], 1)


def test_pause_keeps(llm: LLM, trainer: Trainer) -> None:
    """A paused engine computes on, or forgets requests that come meanwhile."""
    handle = begun(llm, 60)
    llm.pause("keep")
    later = llm.start_request(PROMPT, greedy(4))
    assert llm.stats().paused
    before = llm.stats().output_tokens
    llm.update_weights(trainer.train(), version="kept")
    time.sleep(0.05)
    assert llm.stats().output_tokens == before
    llm.resume()
    assert handle.sync(20).outputs[0].versions[-1][0] == "kept"
    assert later.sync(20).outputs[0].token_ids == trainer.says(PROMPT, 4)
    assert not llm.stats().paused


def test_pause_aborts_with_partial_answers(llm: LLM) -> None:
    """Bug: the tokens from before an abort are lost, or a waiting request cannot be cancelled."""
    handle = begun(llm, 3000)
    llm.pause("abort")
    (out,) = handle.sync(10).outputs
    assert out.finish_reason == "abort" and 0 < len(out.token_ids) < 3000
    later = llm.start_request(PROMPT, greedy(2))
    with pytest.raises(TimeoutError):
        later.sync(0.1)
    later.stop()
    assert later.sync(10).outputs[0].finish_reason == "abort"
    llm.resume()


def test_pause_waits(llm: LLM) -> None:
    """Running requests are cut, or new ones begin before the end of the pause."""
    handle = begun(llm, 200)
    llm.pause("wait")
    assert len(handle.sync(0.5).outputs[0].token_ids) == 200
    later = llm.start_request(PROMPT, greedy(2))
    with pytest.raises(TimeoutError):
        later.sync(0.1)
    llm.resume()
    assert len(later.sync(10).outputs[0].token_ids) == 2
    with pytest.raises(InvalidRequest, match="mode is one of abort, wait, keep"):
        llm.pause("later")


def test_failures_leave_the_old_weights(llm: LLM, trainer: Trainer, tmp_path: Path) -> None:
    """A wrong tensor or a dead trainer changes weights, or leaves files in shared memory."""
    want, version = answer(llm).token_ids, llm.stats().weights_version
    tensors = load_file(trainer.folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    before = folders()

    def died() -> Iterator[tuple[str, Tensor]]:
        yield from list(tensors.items())[:3]
        raise ConnectionError("the trainer is gone")

    for wrong, message in (
        ({**tensors, name: tensors[name][1:]}, "has shape"),
        ({**tensors, "extra": tensors[name]}, "unexpected tensor extra"),
        ({**tensors, name: tensors[name] * torch.inf}, "NaN or infinity"),
        ({}, "no tensor was sent"),
    ):
        with pytest.raises(UpdateFailed, match=message):
            llm.update_weights(wrong.items())
    with pytest.raises(UpdateFailed, match="sent twice"):
        llm.update_weights([("a", tensors[name]), ("a", tensors[name])])
    with pytest.raises(UpdateFailed, match="no such folder"):
        llm.update_weights(tmp_path / "none")
    with pytest.raises(ConnectionError):
        llm.update_weights(died())
    assert answer(llm).token_ids == want
    assert llm.stats().weights_version == version
    assert folders() == before


@pytest.mark.slow
@pytest.mark.usefixtures("real_cores")
@pytest.mark.parametrize("parts", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}])
def test_every_rank_takes_its_part(parts: dict[str, int], trainer: Trainer) -> None:
    """Ranks have weights of different versions after an update, or after one that failed."""
    options = {"dtype": "float32", "device": "cpu", "max_num_seqs": 4, "max_model_len": 256}
    with LLM(trainer.folder, **options, **parts) as llm:
        llm.update_weights(trainer.train())
        assert answer(llm).token_ids == trainer.says(PROMPT, 8)
        with pytest.raises(UpdateFailed, match="is missing"):
            llm.update_weights(list(trainer.model.state_dict().items())[:-3])
        assert answer(llm).token_ids == trainer.says(PROMPT, 8)


@pytest.mark.slow
def test_the_example_learns() -> None:
    """Rollouts come from old weights, so that the reward of a loop stays where it began."""
    path = Path(__file__).parents[3] / "examples" / "rollout.py"
    rewards, mismatches = runpy.run_path(str(path))["main"](8)
    assert mismatches == [0.0] * 8
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15
