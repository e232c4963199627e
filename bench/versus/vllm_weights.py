"""Random weights for vLLM that make it do the same work as Manta.

vLLM's own (`--load-format dummy`) are between -0.001 and 0.001, norms and biases among them, and
equal in all layers. A router with a bias (gpt-oss) then gives every token the same few experts, as
its bias is a hundred times what its weight makes of so small an input: a step reads 4 of 32 experts
where a real model, and Manta's random one, read nearly all.
"""

import os
from typing import Any

import torch

STD = 0.02  # of a matrix, as `engine.weights.parameter.Parameter.std`
NOTE = "normal(0, 0.02), norms 1, biases 0, drawn for each layer"


def draw_as_manta() -> None:
    """Before an LLM is made. vLLM's engine process has to be a fork of this one."""
    from vllm.model_executor.model_loader import dummy_loader  # type: ignore[import-not-found]

    own = dummy_loader.initialize_dummy_weights

    def draw(module: torch.nn.Module, model_config: Any, *args: Any, **kwargs: Any) -> None:
        own(module, model_config, *args, **kwargs)  # scales, and what is in fewer bits
        redraw(module)

    dummy_loader.initialize_dummy_weights = draw


def check_forked() -> None:
    """Raises RuntimeError where vLLM has chosen to start its engine in a new interpreter."""
    if os.environ.get("VLLM_WORKER_MULTIPROC_METHOD") == "spawn":
        raise RuntimeError("vLLM's engine process does not know the weights that were asked for")


@torch.no_grad()
def redraw(module: torch.nn.Module) -> None:
    """Weights and biases in 16 or 32 bits, in place; those of modules inside have their own turn,
    which vLLM gives to every module of a model."""
    for name, parameter in module.named_parameters(recurse=False):
        if not parameter.is_floating_point() or parameter.itemsize < 2 or parameter.is_meta:
            continue
        if name.endswith("bias"):
            parameter.zero_()
        elif name.endswith("weight"):
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, STD)
