"""Two ranks of a model, as threads whose sums meet in memory, against one rank."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.model_config import ModelConfig
from engine.models.registry import build_model
from engine.parallel.group import TensorParallelGroup
from engine.weights import load_weights
from kernels.dispatch import kernels_for
from tests.engine.checkpoints import Paged, load_model, save_checkpoint

RANKS = 2
PATIENCE = 60.0  # seconds for the other rank, so that one that fails does not hold up the test
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "a key head a rank": ("qwen3", {}),
    "fewer key heads than ranks": ("qwen3", {"num_key_value_heads": 1}),
    "norms behind the rotation": ("hunyuan_v1_dense", {"head_dim": 16}),
    "projections beside the embedding": (
        "opt",
        {
            "ffn_dim": 96,
            "head_dim": 8,
            "num_key_value_heads": 4,
            "word_embed_proj_dim": 16,
            "do_layer_norm_before": False,
        },
    ),
}


class _Meeting:
    """Where the ranks leave what the others take."""

    def __init__(self) -> None:
        self.barrier = Barrier(RANKS, timeout=PATIENCE)
        self.left: dict[int, Tensor] = {}

    def all_of(self, rank: int, x: Tensor) -> list[Tensor]:
        self.left[rank] = x.clone()
        self.barrier.wait()
        found = [self.left[each] for each in range(RANKS)]
        self.barrier.wait()
        return found


class _Thread(TensorParallelGroup):
    """process_group: a _Meeting."""

    def all_reduce(self, x: Tensor) -> Tensor:
        first, second = self.process_group.all_of(self.rank, x)
        return x.copy_(first + second)

    def all_gather_columns(self, x: Tensor) -> Tensor:
        return torch.cat(self.process_group.all_of(self.rank, x), 1)


@pytest.mark.parametrize("name", list(CASES))
@torch.inference_mode()
def test_ranks_compute_what_one_does(name: str, tmp_path: Path) -> None:
    """Bugs: a product is divided among the ranks and never put together; a rank takes the whole
    model's heads for its own."""
    model_type, changes = CASES[name]
    save_checkpoint(tmp_path, model_type, vocab_size=102, **changes)
    ids = torch.randint(3, 101, (20,))
    blocks = [3, 1, 4, 0, 2]
    whole = Paged(load_model(tmp_path))
    want = [whole.run((ids[:end], blocks, start))[0] for start, end in ((0, 19), (19, 20))]
    config, meeting = ModelConfig.from_folder(tmp_path), _Meeting()

    def rank(number: int) -> list[Tensor]:
        group = _Thread(number, RANKS, meeting)
        model = build_model(config, torch.float32, "cpu", kernels_for("cpu"), group=group)
        load_weights(model, tmp_path)
        paged = Paged(model)
        for layer, pair in enumerate(paged.kv.layers):
            count, heads, size, dim = pair[0].shape
            begin, end = group.part_or_copy(heads, "num_key_value_heads")
            mine = (count, end - begin, size, dim)
            paged.kv.layers[layer] = (torch.zeros(mine), torch.zeros(mine))
        return [paged.run((ids[:end], blocks, start))[0] for start, end in ((0, 19), (19, 20))]

    with ThreadPoolExecutor(RANKS) as pool:
        for found in pool.map(rank, range(RANKS)):
            for ours, theirs in zip(found, want, strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
