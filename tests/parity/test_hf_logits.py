"""The default model in float32: log-probabilities of every position equal transformers'."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.engine.models.checkpoints import Paged, load_model

TEXTS = (
    "The harbour was quiet that morning, and the fishermen mended their nets on the stones.",
    "def greatest_common_divisor(a: int, b: int) -> int:\n    while b:\n        a, b = b, a % b\n",
    "Water boils at 100 degrees Celsius at sea level; on a mountain it boils at less, because "
    "the air presses on it less. That is why an egg takes longer to cook up there.",
)


@pytest.mark.slow
@torch.inference_mode()
def test_log_probabilities(default_model: Path) -> None:
    """A slip too small for tiny models: rope at real theta, nine heads on three, the real eps."""
    theirs = AutoModelForCausalLM.from_pretrained(default_model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(default_model)
    paged = Paged(load_model(default_model), block_size=16)
    prompts = [tokenizer(text, return_tensors="pt").input_ids[0] for text in TEXTS]
    want = [theirs(ids[None]).logits[0].log_softmax(-1) for ids in prompts]
    tables = [[3, 1, 7, 5], [2, 9, 0, 11], [12, 4, 8, 6]]
    batched = paged.run(*((ids, table, 0) for ids, table in zip(prompts, tables, strict=True)))
    for logits, expected in zip(batched, want, strict=True):
        torch.testing.assert_close(logits.log_softmax(-1), expected, atol=2e-4, rtol=0)
    steps = paged.run(*((ids, t, len(ids) - 1) for ids, t in zip(prompts, tables, strict=True)))
    for logits, expected in zip(steps, want, strict=True):
        torch.testing.assert_close(logits.log_softmax(-1), expected[-1:], atol=2e-4, rtol=0)
