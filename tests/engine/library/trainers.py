"""Trainer: a trainer for tests of weight updates."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine import LLM, SamplingParams
from engine.library.outputs import CompletionOutput
from engine.weights import staging
from tests.engine.models.checkpoints import save_checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SIZES = {"max_position_embeddings": 4096, "eos_token_id": None}
PROMPT = list(range(3, 53))


class Trainer:
    """A trainer that holds the engine's model in transformers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model: PreTrainedModel = save_checkpoint(folder, "qwen3", **SIZES)
        self.count = 0

    def train(self) -> list[tuple[str, Tensor]]:
        """Change the weights, and return all of them by name."""
        self.count += 1
        generator = torch.Generator().manual_seed(self.count)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        return list(self.model.state_dict().items())

    @torch.inference_mode()
    def says(self, tokens: list[int], count: int) -> list[int]:
        """Return the `count` tokens of a greedy continuation of `tokens`."""
        ids = [*tokens]
        for _ in range(count):
            ids.append(int(self.model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(tokens) :]


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)


def answer(llm: LLM, count: int = 8) -> CompletionOutput:
    return llm.generate(PROMPT, greedy(count))[0].outputs[0]


def folders() -> set[Path]:
    return {path for root in staging.temporary_folders() for path in root.glob("manta-weights-*")}
