"""Tiny random checkpoints, saved by transformers as users' are, and our model over them."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from engine.kv_groups import kv_groups
from engine.lora.weights import LoraLayout
from engine.model_config import ModelConfig
from engine.models.registry import Model, build_model
from engine.runner.kv_cache import KVCache
from engine.weights import load_weights
from kernels.dispatch import kernels_for
from kernels.metadata import LoraStep
from tests.kernels.layout import lay_out

NOTHING = torch.empty(0)
RANK = 16  # of the adapters here
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,  # not hidden_size / heads
    "vocab_size": 101,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,  # large enough that a wrong attention shows in the logits
}


def save_checkpoint(folder: Path, model_type: str, **changes: Any) -> PreTrainedModel:
    """A random float32 model of SIZES with changes; returned, and saved to the folder."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SIZES, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:  # made as ones and zeros, which hide mistakes
            torch.nn.init.normal_(parameter, 0.7, 0.3)
    model.eval().save_pretrained(folder)
    return model


def load_model(folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Model:
    model = build_model(ModelConfig.from_folder(folder), dtype, device, kernels_for(device))
    load_weights(model, folder)
    return model


class Paged:
    """Our model with a KV cache of its own: `run` steps give logits of every token."""

    def __init__(self, model: Model, num_blocks: int = 32, block_size: int = 4) -> None:
        self.model = model
        self.device = model.device
        self.kernels = kernels_for(self.device.type)
        self.block_size = block_size
        groups = kv_groups(model.config)
        # Each group has blocks of its own, since all share one pool.
        count = num_blocks * len(groups.groups)
        self.kv = KVCache.allocate(groups, count, block_size, model.dtype, self.device)

    @torch.inference_mode()
    def run(
        self, *entries: tuple[Tensor, list[int], int], lora: LoraStep | None = None
    ) -> list[Tensor]:
        """entries: (all token ids, block ids, start); computes from start to the end of each."""
        meta = lay_out(
            [(blocks, start, len(ids) - start) for ids, blocks, start in entries], self.block_size
        )
        for name in ("positions", "slots", "query_start", "kv_len", "block_table"):
            setattr(meta, name, getattr(meta, name).to(self.device))
        meta.lora = lora
        metas = []
        count, size = len(self.kv.groups.groups), self.block_size
        for number, group in enumerate(self.kv.groups.groups):
            block = meta.slots.div(size, rounding_mode="floor") * count + number
            slots = torch.where(meta.slots < 0, -1, block * size + meta.slots % size)
            metas.append(meta.elsewhere(slots, meta.block_table * count + number))
            metas[-1].window, metas[-1].chunk = group.attention.window, group.attention.chunk
            keys = self.kv.layers[group.layers[0]][0]
            self.kernels.prepare(metas[-1], group.attention.num_heads, keys)
        token_ids = torch.cat([ids[start:] for ids, _, start in entries]).int().to(self.device)
        logits = self.model.logits(self.model.forward(token_ids, metas, self.kv.layers))
        return list(logits.split([len(ids) - start for ids, _, start in entries]))


def adapter_on(model: Model, num_tokens: int) -> tuple[LoraStep, dict[str, Tensor]]:
    """One for so many tokens, as PEFT's files have it -> as a step has it; and what it adds to each
    matrix of the checkpoint."""
    layout = LoraLayout(linear.spec for linear in model.linears())
    for linear, place in zip(model.linears(), layout.layers, strict=True):
        linear.lora = place
    torch.manual_seed(2)
    parts, deltas = {}, {}
    for number, part in enumerate(layout.parts):
        a, b = torch.randn(RANK, part.in_features) / 8, torch.randn(part.out_features, RANK) / 8
        delta = b @ a
        deltas[f"{part.name}.weight"] = delta.t() if part.transposed else delta
        rows = part.rows
        b = b[rows[0] : rows[1]] if isinstance(rows, tuple) else b[torch.from_numpy(rows)]
        parts[number] = (a, b)
    segments = [(0, torch.arange(num_tokens))]
    step = LoraStep(
        NOTHING, NOTHING, 0, NOTHING, NOTHING, NOTHING, RANK, segments=segments, parts=[parts]
    )
    return step, deltas
