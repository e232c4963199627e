"""Tiny random checkpoints, saved by transformers, and adapters for our models of them."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from engine.config.model_config import ModelConfig
from engine.evaluation.paged import Paged
from engine.lora.weights import LoraLayout
from engine.models.registry import Model, build_model
from engine.weights import load_weights
from kernels.dispatch import kernels_for
from kernels.metadata import LoraStep

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["NOTHING", "Paged", "RANK", "SIZES", "adapter_on", "load_model", "save_checkpoint"]

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
    "initializer_range": 0.3,  # large enough that errors of attention change the logits
}


def save_checkpoint(folder: Path, model_type: str, **changes: Any) -> "PreTrainedModel":
    """Save a random float32 model to a folder, and return it. changes: to SIZES."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SIZES, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:  # initialised to ones and zeros, which hide errors
            torch.nn.init.normal_(parameter, 0.7, 0.3)
    model.eval().save_pretrained(folder)
    return model


def load_model(folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Model:
    model = build_model(ModelConfig.from_folder(folder), dtype, device, kernels_for(device))
    load_weights(model, folder)
    return model


def adapter_on(model: Model, num_tokens: int) -> tuple[LoraStep, dict[str, Tensor]]:
    """Return a random adapter as a LoraStep of `num_tokens` tokens, and its change of each matrix.

    The changes have the names of the checkpoint's tensors.
    """
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
