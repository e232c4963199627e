"""Random adapters, made and saved by peft for tiny models of transformers."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Its import takes three seconds, which no process needs that only collects tests.
if find_spec("peft") is None:
    pytest.skip("peft is not installed", allow_module_level=True)

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def save_adapter(model: "PreTrainedModel", folder: Path, seed: int = 0, **fields: Any) -> Path:
    """Save a random LoRA adapter for `model`, which is not changed; return its folder.

    fields: fields of LoraConfig.
    """
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(**({"r": 8, "lora_alpha": 16, "target_modules": ALL} | fields))
    config.task_type = "CAUSAL_LM"
    adapted = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:  # B begins as zeros, so that the adapter would change nothing
            values = torch.randn(parameter.shape, generator=generator)
            parameter.data = values * parameter.shape[1] ** -0.5
    adapted.save_pretrained(folder)
    adapted.unload()
    return folder


def with_adapter(model: "PreTrainedModel", folder: Path) -> Any:
    """Return a PEFT model of a base model with the adapter of a folder."""
    from peft import PeftModel

    return PeftModel.from_pretrained(model, folder)


# Names of PEFT's classes.
PROMPTS = {
    "prompt_tuning": "PromptTuningConfig",
    "p_tuning": "PromptEncoderConfig",
    "prefix_tuning": "PrefixTuningConfig",
}


def save_prompt(
    model: "PreTrainedModel", folder: Path, kind: str, count: int, seed: int = 0, **fields: Any
) -> Path:
    """Save a random adapter of `count` virtual tokens for `model`, which is not changed.

    fields: fields of the kind's configuration.
    """
    import peft

    kind_config = getattr(peft, PROMPTS[kind])
    config = kind_config(task_type="CAUSAL_LM", num_virtual_tokens=count, **fields)
    adapted = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in adapted.prompt_encoder.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    adapted.save_pretrained(folder)
    return folder


def edit_tensors(folder: Path, **changes: Any) -> None:
    """Replace tensors of an adapter's file; None removes one. Names without PEFT's prefix, with
    "__" for dots."""
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    for name, value in changes.items():
        key = "base_model.model." + name.replace("__", ".")
        if value is None:
            del tensors[key]
        else:
            tensors[key] = value
    save_file(tensors, path)
