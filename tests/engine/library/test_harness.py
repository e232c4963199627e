"""Tasks of lm-evaluation-harness by an engine, beside the library's own model of transformers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from engine import LLM
from engine.errors import ConfigError, InvalidRequest
from engine.library.harness import HarnessModel
from tests.engine.harness_tasks import write_model, write_tasks
from tests.engine.text.small_tokenizers import byte_level

pytestmark = pytest.mark.slow

LENGTH = 96  # tokens of the context


def responses(model: Any, manager: TaskManager, *names: str) -> list[Any]:
    """Return what the model answers to each request of these tasks, with an example before it."""
    results = lm_eval.simple_evaluate(
        model=model, tasks=list(names), task_manager=manager, num_fewshot=1, bootstrap_iters=0
    )
    samples = [sample for name in names for sample in results["samples"][name]]
    return [answer for sample in samples for answers in sample["resps"] for answer in answers]


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> TaskManager:
    folder = tmp_path_factory.mktemp("tasks")
    write_tasks(folder)
    return TaskManager(include_path=str(folder), include_defaults=False)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "bos"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, bos=request.param)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[HarnessModel]:
    with LLM(folder, dtype="float32", device="cpu", max_num_seqs=8, max_model_len=LENGTH) as llm:
        yield HarnessModel(llm)


def test_answers_are_those_of_transformers(
    model: HarnessModel, folder: Path, manager: TaskManager
) -> None:
    """Bug: a score that leaves out a token, a text cut elsewhere, a BOS too many, a stop string
    that is kept."""
    # Theirs does not feed the last token of a text, and ours makes one more.
    peer = HFLM(str(folder), device="cpu", dtype="float32", max_length=LENGTH - 2)
    ours = responses(model, manager, "animals", "texts")
    want = responses(peer, manager, "animals", "texts")
    assert len(ours) == len(want) == 11
    for answer, peer_answer in zip(ours, want, strict=True):
        if isinstance(answer, tuple):
            (answer, greedy), (peer_answer, peer_greedy) = answer, peer_answer
            assert greedy == peer_greedy
        assert answer == pytest.approx(peer_answer, abs=1e-3)
    peer._max_length = LENGTH
    ours = responses(model, manager, "words")
    assert ours == responses(peer, manager, "words") and any(ours)


def test_a_continuation_may_be_the_greedy_one(model: HarnessModel) -> None:
    """Bug: `acc` of tasks that ask for the greedy answer is always 0 or 1."""
    ids = model.tok_encode("the cat")
    answer = model._generate([ids], [model._settings({"max_gen_toks": 2}, 0)])[0].outputs[0]
    (score, greedy), (other, other_greedy) = model._loglikelihood_tokens(
        [(None, ids, answer.token_ids), (None, ids, [answer.token_ids[0] ^ 1, 5])]
    )
    assert greedy and not other_greedy and other < score < 0


def test_what_has_no_room_is_refused(model: HarnessModel) -> None:
    """Bug: a score of a part, or an answer to nothing."""
    long = "the cat sat on the mat " * 20
    pair = Instance("loglikelihood", {}, ("the", long), 0)
    with pytest.raises(InvalidRequest, match="max_model_len allows 95"):
        model.loglikelihood([pair])
    question = Instance("generate_until", {}, ("the", {"max_gen_toks": LENGTH}), 0)
    with pytest.raises(InvalidRequest, match="max_gen_toks is 96"):
        model.generate_until([question])
    beams = Instance("generate_until", {}, ("the", {"num_beams": 4}), 0)
    with pytest.raises(ConfigError, match="the engine has no num_beams"):
        model.generate_until([beams])


def test_repeats_of_a_sampled_answer_differ() -> None:
    """Bug: pass@k of k equal answers."""
    with LLM("fake:vocab_size=390", tokenizer=byte_level()) as llm:
        model = HarnessModel(llm)
        first, second = (model._settings({"temperature": 0.8}, seed) for seed in (0, 1))
        assert first.temperature == second.temperature == 0.8 and first.seed != second.seed
        assert model._settings({"until": ["a", ""]}, 0).stop == ("a",)
