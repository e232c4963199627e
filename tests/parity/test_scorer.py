"""The trainer's side of a rollout: a Scorer gives the log-probabilities that deterministic engines
report, bit by bit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams, Scorer
from engine.errors import ConfigError, InvalidRequest, UpdateFailed
from tests.parity.engine_driver import Output, engine, run
from tests.parity.test_deterministic import SIZES

PROCESSED = "processed_logprobs"
PARAMS: list[dict[str, Any]] = [
    {"logprobs_mode": "raw_logprobs"},
    {"logprobs_mode": PROCESSED, "temperature": 0.7},
    {"logprobs_mode": PROCESSED, "top_p": 0.8, "top_k": 40},
    {"logprobs_mode": PROCESSED, "temperature": 1.3, "min_p": 0.02},
    {"logprobs_mode": PROCESSED, "repetition_penalty": 1.3, "frequency_penalty": 0.3},
    {"logprobs_mode": PROCESSED, "temperature": 0.0, "logit_bias": {7: 3.0}},
    {"logprobs_mode": PROCESSED, "min_tokens": 9, "stop_token_ids": [5, 6, 7]},
]
SAMPLING = [
    SamplingParams(max_tokens=20, logprobs=0, **{"ignore_eos": True, **fields}) for fields in PARAMS
]


def save(folder: Path, seed: int) -> Path:
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=False)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "first", 0)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = [1, 17, 90, 64, 33, 65, 40]
    prompts = [torch.randint(1, 512, (n,), generator=generator).tolist() for n in lengths]
    prompts[3][:32] = prompts[5][:32] = prompts[2][:32]  # something for the prefix cache
    return prompts


def differences(scorer: Scorer, prompts: list[list[int]], outputs: list[Output]) -> list[float]:
    """Return the largest difference of each answer's log-probabilities from the scorer's."""
    largest = []
    for prompt, params, output in zip(prompts, SAMPLING, outputs, strict=True):
        scores = scorer.logprobs(prompt, output.token_ids, params)
        reported = torch.tensor([item.logprob for item in output.logprobs])
        assert scores.shape == reported.shape == (20,)
        largest.append(float((scores - reported).abs().max()))
    return largest


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bit_for_bit(folder: Path, prompts: list[list[int]], dtype: str) -> None:
    """A ratio that is not 1 before the first step of a trainer: another order of sums, another
    history of a penalty, a filter's cut. Over prefix hits, preemptions, chunks of the scorer."""
    fields: dict[str, Any] = {"dtype": dtype, "num_threads": 1, "device": "cpu"}
    threads = torch.get_num_threads()
    scorer = Scorer(folder, max_model_len=192, max_num_batched_tokens=48, **fields)
    assert torch.get_num_threads() == threads  # a trainer's own matmuls keep its threads
    core = engine(folder, deterministic=True, **fields)
    for _ in range(2):  # the second finds prefixes
        assert differences(scorer, prompts, run(core, prompts, SAMPLING)) == [0.0] * len(prompts)
    few = engine(folder, deterministic=True, num_blocks=14, max_model_len=192, **fields)
    assert differences(scorer, prompts, run(few, prompts, SAMPLING)) == [0.0] * len(prompts)
    assert few.stats().preemptions
    free = engine(folder, **fields)
    assert dtype == "float32" or any(differences(scorer, prompts, run(free, prompts, SAMPLING)))


def test_with_an_engine_process_and_new_weights(folder: Path, tmp_path: Path) -> None:
    """Weights that only one side has taken, or that the two round differently."""
    import safetensors.torch

    other = save(tmp_path / "other", 1)
    state = safetensors.torch.load_file(other / "model.safetensors")
    fields: dict[str, Any] = {"device": "cpu", "num_threads": 1, "max_model_len": 128}
    fields["logprobs_mode"] = PROCESSED
    scorer = Scorer(folder, **fields)
    params = SamplingParams(n=4, max_tokens=12, logprobs=0, temperature=0.9, ignore_eos=True)
    with LLM(str(folder), deterministic=True, **fields) as llm:
        for update in (None, state.items()):
            if update is not None:
                llm.update_weights(state.items())
                scorer.update_weights(update)
            (answer,) = llm.generate([[3, 5, 8]], params)
            for choice in answer.outputs:
                assert choice.logprobs is not None
                scores = scorer.logprobs([3, 5, 8], choice.token_ids, params)
                assert scores.tolist() == [item.logprob for item in choice.logprobs]
    ids = [3, 5, 8, *answer.outputs[0].token_ids]
    logits = scorer.forward(torch.tensor(ids))
    assert logits.shape == (15, 512) and logits.dtype == torch.float32
    raw = logits[2:-1].log_softmax(-1).gather(1, torch.tensor(ids[3:])[:, None])[:, 0]
    named = SamplingParams(logprobs_mode="raw_logprobs")
    torch.testing.assert_close(raw, scorer.logprobs(ids[:3], ids[3:], named), atol=1e-5, rtol=0)
    with pytest.raises(UpdateFailed, match="lm_head"):
        scorer.update_weights((name, state[name]) for name in state if name != "lm_head.weight")
    with pytest.raises(UpdateFailed, match="state_dict"):
        scorer.update_weights(state)
    assert torch.equal(scorer.forward(ids), logits)


def test_a_mode_that_nobody_names(folder: Path) -> None:
    """A scorer's default is another than an engine's, or its field is without effect."""
    fields: dict[str, Any] = {"device": "cpu", "num_threads": 1, "dtype": "float32"}
    unnamed = SamplingParams(max_tokens=6, logprobs=0, temperature=0.5, ignore_eos=True)
    for default in ({}, {"logprobs_mode": PROCESSED}, {"logprobs_mode": "raw_logprobs"}):
        scorer = Scorer(folder, max_model_len=64, **fields, **default)
        core = engine(folder, deterministic=True, **fields, **default)
        (output,) = run(core, [[3, 5, 8]], [unnamed])
        scores = scorer.logprobs([3, 5, 8], output.token_ids, unnamed)
        assert scores.tolist() == [item.logprob for item in output.logprobs], default


def test_what_a_scorer_refuses(folder: Path) -> None:
    """A setting without effect, and a failure in the middle of a kernel."""
    fields: dict[str, Any] = {"device": "cpu", "num_threads": 1, "max_model_len": 64}
    for name, value in (("tensor_parallel", 2), ("max_loras", 1), ("speculation", "auto")):
        with pytest.raises(ConfigError, match=f"{name}: a scorer runs"):
            Scorer(folder, **fields, **{name: value})
    scorer = Scorer(folder, **fields)
    with pytest.raises(InvalidRequest, match="below 512"):
        scorer.forward([512])
    with pytest.raises(InvalidRequest, match="65"):
        scorer.logprobs([1] * 60, [1] * 5)
    with pytest.raises(InvalidRequest, match="no grammars"):
        scorer.logprobs([1], [2], SamplingParams(allowed_token_ids=[2]))
    assert scorer.logprobs([1], []).shape == (0,)
    scores = scorer.logprobs([1], [2, 3], SamplingParams(top_k=1, logprobs_mode=PROCESSED))
    assert (scores == 0).logical_or(scores == -torch.inf).all()
