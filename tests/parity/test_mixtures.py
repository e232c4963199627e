"""Mixtures of experts, and layers of unlike heads, through a whole engine: batches, chunks,
preemption, the prefix cache."""

from pathlib import Path

import pytest
import torch

from engine.sampling_params import SamplingParams
from tests.parity.cases import EXPERTS, LATENT, save
from tests.parity.engine_driver import engine, run

pytestmark = pytest.mark.slow
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


# Blocks: fewer than all requests want at once.
@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("qwen 2 moe", 24),
        ("gpt-oss", 38),
        ("mimo v2", 38),
        ("gemma 4 e2b", 38),
        ("deepseek v3", 24),
        ("longcat flash", 28),
    ],
)
def test_text_of_transformers_after_preemption(name: str, blocks: int, tmp_path: Path) -> None:
    """A token that gets another's experts where steps are cut otherwise."""
    theirs = save({**EXPERTS, **LATENT}[name], tmp_path)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 96, (n,), generator=generator).tolist() for n in (5, 20, 33, 18)]
    want = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(12):
            with torch.inference_mode():
                ids.append(int(theirs(torch.tensor([ids])).logits[0, -1].argmax()))
        want.append(ids[len(prompt) :])
    sizes = {"max_model_len": 64, "block_size": 4}
    # With how few of them a request is preempted depends on how steps happen to be cut.
    for fewer in range(blocks, blocks - 8, -1):
        tight = engine(tmp_path, num_blocks=fewer, prefix_caching=False, **sizes)
        assert [output.token_ids for output in run(tight, prompts, GREEDY)] == want
        if tight.stats().preemptions:
            break
    else:
        pytest.fail("nothing was preempted")
    cached = engine(tmp_path, num_blocks=400, max_num_batched_tokens=24, **sizes)
    for _ in range(2):
        again = run(cached, prompts, GREEDY)
        assert [output.token_ids for output in again] == want
    assert any(output.cached for output in again)
