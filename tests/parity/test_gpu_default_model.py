"""On a GPU: the default model in bfloat16 is as near to the truth as transformers is.

MANTA_TEST_MODEL=FILE.gguf python -m pytest -m gpu tests/parity/test_gpu_default_model.py
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.evaluation.prompts import SHIPPED
from tests.engine.models.checkpoints import Paged, load_model

pytestmark = pytest.mark.gpu

PROMPTS = SHIPPED.read_text().splitlines()
BLOCK = 16
BLOCKS_EACH = 4  # no prompt is longer than 64 tokens


def _errors(found: list[Tensor], truth: list[Tensor]) -> tuple[float, float]:
    """Return the mean KL(truth || found) in nats, and the mean absolute log-probability difference.

    Both are over all positions, the second over the whole vocabulary too.
    """
    divergence, difference = [], []
    for ours, exact in zip(found, truth, strict=True):
        ours, exact = ours.double().log_softmax(-1), exact.double().log_softmax(-1)
        divergence.append((exact.exp() * (exact - ours)).sum(-1))
        difference.append((exact - ours).abs().mean(-1))
    return torch.cat(divergence).mean().item(), torch.cat(difference).mean().item()


@torch.inference_mode()
def test_bfloat16_errs_no_more_than_transformers(
    default_model: Path, record_property: Callable[[str, object], None]
) -> None:
    """A sum kept in 16 bits, a scale rounded too early: small enough to pass a test on tiny models.

    The truth is transformers in float32 on the CPU. Transformers in bfloat16 on the GPU is some
    way from it, because that is what the type gives. Ours, by chunks and token by token, may be as
    far, and a quarter more, since roundings fall elsewhere.
    """
    tokenizer = AutoTokenizer.from_pretrained(default_model)
    ids = [tokenizer(text, return_tensors="pt").input_ids[0] for text in PROMPTS]
    exact = AutoModelForCausalLM.from_pretrained(default_model, dtype=torch.float32)
    truth = [exact(tokens[None]).logits[0].cuda() for tokens in ids]
    half = AutoModelForCausalLM.from_pretrained(default_model, dtype=torch.bfloat16).cuda()
    theirs = [half(tokens[None].cuda()).logits[0] for tokens in ids]
    model = load_model(default_model, torch.bfloat16, "cuda")

    def tables(count: int) -> list[list[int]]:
        scattered = torch.arange(count * BLOCKS_EACH).view(BLOCKS_EACH, count).t()  # scattered
        return [row.tolist() for row in scattered]

    entries = list(zip(ids, tables(len(ids)), strict=True))
    chunks = Paged(model, len(ids) * BLOCKS_EACH, BLOCK).run(*((t, b, 0) for t, b in entries))
    paged = Paged(model, len(ids) * BLOCKS_EACH, BLOCK)
    steps: list[list[Tensor]] = [[] for _ in ids]
    for at in range(max(map(len, ids))):  # all prompts side by side, a token each
        alive = [i for i, tokens in enumerate(ids) if at < len(tokens)]
        rows = paged.run(*((ids[i][: at + 1], entries[i][1], at) for i in alive))
        for i, logits in zip(alive, rows, strict=True):
            steps[i].append(logits)
    decodes = [torch.cat(rows) for rows in steps]

    kl, difference = _errors(theirs, truth)
    record_property("transformers", f"KL {kl:.2e}, mean absolute difference {difference:.2e}")
    ours = {
        name: _errors(of_way, truth) for name, of_way in (("chunks", chunks), ("steps", decodes))
    }
    for name, (our_kl, our_difference) in ours.items():
        record_property(name, f"KL {our_kl:.2e}, mean absolute difference {our_difference:.2e}")
    for name, (our_kl, our_difference) in ours.items():
        assert our_kl <= 1.25 * kl, name
        assert our_difference <= 1.25 * difference, name
