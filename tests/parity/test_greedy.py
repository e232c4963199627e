"""The default model in float32 says what transformers says, however the work is cut into steps."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.evaluation.prompts import SHIPPED
from engine.sampling_params import SamplingParams
from engine.scheduling.core import EngineCore
from engine.text.tokenizer import Tokenizer
from tests.parity.engine_driver import Output, engine, run

# Half a minute each on two idle cores; shared cores may take ten times as long.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROMPTS = SHIPPED.read_text().splitlines()
NUM_TOKENS = 40  # over two borders of blocks
TIE = 1e-4  # a gap in log-probability that float32 arithmetic in another order may turn around
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def prompts(default_model: Path) -> list[list[int]]:
    tokenizer = Tokenizer.load(default_model)
    return [tokenizer.encode(text) for text in PROMPTS]


@pytest.fixture(
    scope="module",
    params=[
        4,
        pytest.param(8, marks=pytest.mark.nightly),
        pytest.param(len(PROMPTS), marks=pytest.mark.long),
    ],
    ids=str,
)
def few(prompts: list[list[int]], request: pytest.FixtureRequest) -> list[list[int]]:
    return prompts[: request.param]


def in_one_piece(model: Path, prompts: list[list[int]]) -> list[Output]:
    """Return the outputs of prompts in one chunk, all together, without a prefix cache."""
    core = engine(model, prefix_caching=False, max_num_batched_tokens=2048)
    return run(core, prompts, GREEDY)


@pytest.fixture(scope="module")
def whole(default_model: Path, few: list[list[int]]) -> list[Output]:
    return in_one_piece(default_model, few)


def test_tokens_and_logprobs_equal_transformers(
    default_model: Path, few: list[list[int]], whole: list[Output]
) -> None:
    """A wrong rotation, mask, norm or weight changes a log-probability long before it changes a
    word. Teacher forcing: if transformers' argmax after our prefix is our token at every position,
    then its greedy text is ours."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(default_model, dtype=torch.float32)
    worst, ties = 0.0, []
    for number, (prompt, output) in enumerate(zip(few, whole, strict=True)):
        assert len(output.token_ids) == len(output.logprobs) == NUM_TOKENS
        ids = torch.tensor([prompt + output.token_ids])
        with torch.inference_mode():
            logits = model(ids).logits[0, len(prompt) - 1 : -1]
        theirs = torch.log_softmax(logits.double(), dim=-1)
        for position, ours in enumerate(output.logprobs):
            row = theirs[position]
            assert ours.token_id == output.token_ids[position]
            worst = max(worst, abs(float(row[ours.token_id]) - ours.logprob))
            best = int(row.argmax())
            if best != ours.token_id:
                gap = float(row[best] - row[ours.token_id])
                ties.append((number, position, gap))
    assert worst < TIE, f"log-probabilities differ by {worst:.2e}"
    explained = [f"prompt {n} token {p}: gap {gap:.1e}" for n, p, gap in ties if gap < TIE]
    assert len(explained) == len(ties), f"other tokens than transformers': {ties}"
    assert len(ties) <= 2, f"too many ties to be chance: {explained}"


CUTS: dict[str, dict[str, Any]] = {
    "chunk 7": {"max_num_batched_tokens": 39, "prefix_caching": False},
    "chunk 64": {"max_num_batched_tokens": 96, "prefix_caching": False},
    "prefix cache on": {"prefix_caching": True},
    "one ahead": {"async_scheduling": True},
    "token attention": {"block_size": 1, "num_blocks": 8192},
}


def near_tie(output: Output, other: Output) -> bool:
    """Return whether the first difference is between two tokens within TIE of each other."""
    for position, (a, b) in enumerate(zip(output.token_ids, other.token_ids, strict=True)):
        if a != b:
            first, second = output.logprobs[position].top_logprobs[:2]
            return first - second < TIE and b in output.logprobs[position].top_ids[:2]
    return False


def assert_same(outputs: list[Output], reference: list[Output]) -> None:
    different = [
        i
        for i, (a, b) in enumerate(zip(outputs, reference, strict=True))
        if a.token_ids != b.token_ids
    ]
    unexplained = [i for i in different if not near_tie(reference[i], outputs[i])]
    assert not unexplained, f"prompts {unexplained} give other text"
    assert len(different) <= 1, f"too many ties to be chance: prompts {different}"


# Chunks of 7 have all borders that those of 64 have; another test looks at hits of the cache.
MORE_CUTS = ("chunk 64", "prefix cache on")


@pytest.mark.parametrize(
    "cut",
    [pytest.param(cut, marks=[pytest.mark.nightly] if cut in MORE_CUTS else []) for cut in CUTS],
)
def test_text_does_not_depend_on_how_steps_are_cut(
    default_model: Path, few: list[list[int]], whole: list[Output], cut: str
) -> None:
    """A chunk border, a cached prefix or a late result that shifts a position by one."""
    core = engine(default_model, **CUTS[cut])
    assert_same(run(core, few, GREEDY), whole)


def test_text_alone_is_text_in_a_batch(
    default_model: Path, few: list[list[int]], whole: list[Output]
) -> None:
    """A neighbour's keys or rows read by mistake; the reference ran together."""
    core = engine(default_model, prefix_caching=False)
    half = len(few) // 2
    assert_same(run(core, few[:half], GREEDY, together=False), whole[:half])


def test_prefix_hit_gives_the_text_of_a_miss(
    default_model: Path, few: list[list[int]], whole: list[Output]
) -> None:
    """A hit that maps to the wrong block, or skips the token whose logits are needed."""
    core = engine(default_model, block_size=4, num_blocks=8192)
    missed = run(core, few, GREEDY)
    hit = run(core, few, GREEDY)
    assert all(output.cached == 0 for output in missed)
    long = [number for number, prompt in enumerate(few) if len(prompt) > 4]  # the last is computed
    assert long and all(hit[number].cached > 0 for number in long)
    assert_same(missed, whole)
    assert_same(hit, whole)


def test_preempted_requests_give_the_same_text(
    default_model: Path, few: list[list[int]], whole: list[Output]
) -> None:
    """Recomputing prompt and output after preemption with a stale block, row or counter."""
    core = engine(default_model, num_blocks=8, max_model_len=128, prefix_caching=False)
    outputs = run(core, few, GREEDY)
    assert core.stats().preemptions > 0, "8 blocks were meant to be too few"
    assert_same(outputs, whole)


@pytest.fixture(scope="module")
def sampling_core(default_model: Path) -> Iterator[EngineCore]:
    yield engine(default_model, prefix_caching=False)


def test_a_seed_gives_its_text_at_any_batch_size_and_after_preemption(
    default_model: Path, few: list[list[int]], sampling_core: EngineCore
) -> None:
    """Random numbers that depend on the step, the row or the neighbours."""
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=24, ignore_eos=True)
    together = run(sampling_core, few, params)
    alone = run(sampling_core, few, params, together=False)
    tight = engine(default_model, num_blocks=8, max_model_len=128, prefix_caching=False)
    preempted = run(tight, few, params)
    assert tight.stats().preemptions > 0
    assert [o.token_ids for o in alone] == [o.token_ids for o in together]
    assert [o.token_ids for o in preempted] == [o.token_ids for o in together]
    other = run(sampling_core, few, params, seed=2)
    assert [o.token_ids for o in other] != [o.token_ids for o in together]
