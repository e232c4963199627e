"""Prefixes of models with states, through a whole engine: a conversation's next turn goes on from a
snapshot, and every number is what it would be without."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engine.sampling_params import SamplingParams
from engine.scheduling.core import EngineCore
from tests.parity.cases import DELTA_NET, MIXED, save
from tests.parity.engine_driver import Output, engine, run
from tests.parity.test_deterministic import same

PARAMS = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=2)
SIZES: dict[str, Any] = {
    "max_model_len": 400, "block_size": 4, "num_blocks": 600, "num_threads": 1,
}  # fmt: skip


def made(name: str, folder: Path, **changes: Any) -> Path:
    case = {**DELTA_NET, **MIXED}[name]
    changes["max_position_embeddings"] = 512
    save(replace(case, changes={**case.changes, **changes}), folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made("qwen 3 next", tmp_path_factory.mktemp("model"))


def tokens(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(6)
    return [torch.randint(3, 96, (n,), generator=generator).tolist() for n in lengths]


def turns(core: EngineCore, count: int = 3, params: SamplingParams = PARAMS) -> list[Output]:
    """Return the outputs of two conversations at once, which begin alike."""
    system, *users = tokens(82, 31, 17)
    prompts, outputs = [system + user for user in users], []
    for _ in range(count):
        outputs += run(core, prompts, params)
        said = [output.token_ids for output in outputs[-2:]]
        prompts = [[*a, *b, *user] for a, b, user in zip(prompts, said, users, strict=True)]
    return outputs


def close(ours: list[Output], theirs: list[Output]) -> bool:
    """Return whether texts are equal, and log-probabilities equal but for rounding."""
    pairs = [
        (a.logprob, b.logprob)
        for own, other in zip(ours, theirs, strict=True)
        for a, b in zip(own.logprobs, other.logprobs, strict=True)
    ]
    texts = [own.token_ids for own in ours] == [other.token_ids for other in theirs]
    return texts and all(abs(a - b) < 1e-3 for a, b in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen 3 next", "qwen 3.5"])
def test_numbers_do_not_depend_on_what_was_found(name: str, tmp_path: Path) -> None:
    """A snapshot of another place, of another request, or of a state that a step has gone on from:
    log-probabilities differ in their last bit at least. Float32, bit for bit."""
    path = made(name, tmp_path, mlp_only_layers=[0, 1, 2, 3])  # experts have tests of their own
    fixed: dict[str, Any] = {**SIZES, "deterministic": True, "dtype": "float32"}
    want = turns(engine(path, **fixed, prefix_caching=False))
    assert not any(output.cached for output in want)
    for changes in (
        {},
        {"max_num_batched_tokens": 23},
        {"async_scheduling": True, "max_num_seqs": 1},
    ):
        core = engine(path, **fixed | changes)
        outputs = turns(core)
        assert all(map(same, outputs, want))
        for i, output in enumerate(outputs[2:]):
            known = (82 + 31, 82 + 17)[i % 2] + (9 + (31, 17)[i % 2]) * (i // 2)
            assert output.cached >= known - 64 - 4, "less than the last turn's prompt"
    # Two that do not fit beside each other to their ends: one is preempted in its answer.
    system, *users = tokens(82, 31, 17)
    prompts = [system + user for user in users]
    longer = msgspec.structs.replace(PARAMS, max_tokens=80)
    want = run(engine(path, **fixed, prefix_caching=False), prompts, longer)
    tight = {"num_blocks": 70, "max_model_len": 208, "snapshot_bytes": 1 << 20}
    core = engine(path, **fixed | tight)
    assert all(map(same, run(core, prompts, longer), want))
    assert core.stats().preemptions, "meant to preempt"


@pytest.mark.parametrize("name", ["falcon h1", "nemotron h"])
def test_layers_of_both_and_of_neither(name: str, tmp_path: Path) -> None:
    """A turn that finds a layer's keys and not its state, or another layer's."""
    path = made(name, tmp_path)
    want = turns(engine(path, **SIZES, prefix_caching=False), 2)
    outputs = turns(engine(path, **SIZES), 2)
    assert close(outputs, want)
    assert all(output.cached for output in outputs[2:])


def test_a_turn_computes_what_is_new(folder: Path) -> None:
    """Each turn computes the whole conversation, or the text is another one for it."""
    want = turns(engine(folder, **SIZES, prefix_caching=False))
    core = engine(folder, **SIZES)
    outputs = turns(core)
    assert close(outputs, want)
    computed, stats = core.stats().prompt_tokens, core.stats()
    prompts = 2 * 82 + 48 + 2 * (82 + 9) + 96 + 2 * (82 + 18) + 144
    cached = sum(output.cached for output in outputs)
    assert cached == 2 * (112 + 80), "the first prompt's end, and where the other leaves it"
    # A last token that is computed alone counts as a token of output.
    assert prompts - cached - 6 <= computed <= prompts - cached
    assert stats.snapshots == stats.snapshots_taken > 2 and not stats.snapshots_evicted


def test_a_long_answer_is_found_again(folder: Path) -> None:
    """The next turn computes a long answer, because snapshots are of prompts only."""
    core = engine(folder, **SIZES)
    (prompt,) = tokens(40)
    params = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
    (first,) = run(core, [prompt], params)
    (second,) = run(core, [[*prompt, *first.token_ids, 5, 6, 7]], PARAMS)
    assert 128 <= second.cached <= 189
    plain = engine(folder, **SIZES, prefix_caching=False)
    assert close([second], run(plain, [[*prompt, *first.token_ids, 5, 6, 7]], PARAMS))
