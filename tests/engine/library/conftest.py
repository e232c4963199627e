from collections.abc import Iterator

import pytest

from engine import LLM
from tests.engine.library.trainers import Trainer


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    return Trainer(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def llm(trainer: Trainer) -> Iterator[LLM]:
    with LLM(
        trainer.folder, dtype="float32", device="cpu", max_num_seqs=8, max_model_len=4096
    ) as llm:
        yield llm
