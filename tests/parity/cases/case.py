"""Case: a tiny random checkpoint of an architecture, and the model of transformers that is its
oracle."""

import json
import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

Tensors = dict[str, Tensor]
Logits = Callable[["PreTrainedModel", Tensor], Tensor]


def plainly(model: "PreTrainedModel", ids: Tensor) -> Tensor:
    """Return the logits [n, vocab] of ids [n]."""
    logits: Tensor = model(ids[None]).logits[0]
    return logits


@dataclass(frozen=True)
class Case:
    """A tiny random checkpoint of an architecture, and its oracle in transformers.

    model_type: transformers' model_type of the oracle. changes: keys of its configuration, beside
        SIZES without the keys in `drop`.
    architecture: the name in config.json, if it is not the one that transformers writes.
    rewrite: converts the oracle's tensors and config.json to those of the architecture.
    logits: computes the oracle's logits. attention: transformers' implementation of attention.
    calm: factor of the weights of queries' norms, for models that do not scale scores; large scores
        would magnify rounding errors.
    network: transformers' class, if a text model's configuration does not determine it.
    """

    model_type: str
    changes: dict[str, Any] = field(default_factory=dict)
    drop: tuple[str, ...] = ()
    architecture: str = ""
    rewrite: Callable[[Tensors, dict[str, Any]], Tensors] | None = None
    logits: Logits = plainly
    attention: str = "eager"
    calm: float = 1.0
    network: str = ""


def save(case: Case, folder: Path) -> "PreTrainedModel":
    """Write the checkpoint of a case, and return its oracle, a model of transformers."""
    torch.manual_seed(0)
    sizes = {key: value for key, value in SIZES.items() if key not in case.drop}
    # transformers writes into rope_parameters, which several cases share.
    config = AutoConfig.for_model(case.model_type, **deepcopy({**sizes, **case.changes}))
    options = {"dtype": torch.float32, "attn_implementation": case.attention}
    if case.network:
        model = getattr(transformers, case.network)._from_config(config, **options)
    else:
        model = AutoModelForCausalLM.from_config(config, **options)
    randomise(model, case.calm)
    model.eval().save_pretrained(folder)
    if case.rewrite is not None or case.architecture:
        rewrite_folder(folder, case)
    return model


@torch.no_grad()
def randomise(model: "PreTrainedModel", calm: float = 1.0) -> None:
    """Randomise all parameters, because norms of ones and biases of zeros hide mistakes."""
    for name, parameter in model.named_parameters():
        if "act_fn" in name:  # parameters of an activation, which other values make steep
            parameter.add_(torch.randn_like(parameter) * 0.1)
        elif parameter.dim() > 1 and "norm" not in name:
            parameter.copy_(torch.randn_like(parameter) * 0.15)
        else:
            parameter.add_(torch.randn_like(parameter) * 0.3)
        if "q_norm" in name:
            parameter.mul_(calm)
    for name, buffer in model.named_buffers():
        if "correction_bias" in name or "layer_scalar" in name:
            buffer.add_(torch.randn_like(buffer) * 0.3)


def rewrite_folder(folder: Path, case: Case) -> None:
    file, settings = folder / "model.safetensors", folder / "config.json"
    tensors, config = load_file(file), json.loads(settings.read_text())
    if case.rewrite is not None:
        tensors = case.rewrite(tensors, config)
    if case.architecture:
        config["architectures"] = [case.architecture]
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    settings.write_text(json.dumps(config))


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference of two logits relative to the largest logit; infinite if any
    logit is not finite."""
    difference = float((ours - theirs).abs().max() / theirs.abs().max())
    return difference if math.isfinite(difference) else math.inf
