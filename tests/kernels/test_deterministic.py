"""What keeps a token's numbers free of the step's other rows, operation by operation."""

from collections.abc import Mapping

import pytest
import torch

from kernels.cpu import norm
from kernels.cpu.deterministic import Deterministic
from kernels.reference import Kernels

# What the deterministic back ends take over from the ordinary ones, and why that is safe there.
_COMPOSED = "made of operations that are told here"
_ONE_ELEMENT = "an exactly rounded operation of each element, after one that is told here"
_GENERATED = "generated kernels walk each token alike; what is not generated goes by `_without`"
_ON_CUDA = "is called for weights that stay packed on CUDA alone"
_BY_ROW = "a program of the kernel has a row, or a part of one, and sums in one order"
_TOLD = "the kernel is told, and then cuts nothing by the step's sizes"
SAFE: Mapping[str, Mapping[str, str]] = {
    "Deterministic": {
        "prepare": "nothing is computed",
        "tune_linear": "does nothing on the CPU",
        "norm_add": _ONE_ELEMENT,
        "scale_columns": "an exactly rounded product of each element",
        "linear_add": _ONE_ELEMENT,
        "norm_linear": _COMPOSED,
        "norm_gated_linear": _COMPOSED,
        "add_opened": _COMPOSED,
        "router_logits": _COMPOSED,
        "norm_route": _COMPOSED,
        "lora_gated": _COMPOSED,
        "packed_linear": _ON_CUDA,
        "takes_gate": _ON_CUDA,
        "packed_experts": _ON_CUDA,
        "order_experts": _ON_CUDA,
        "gated_delta": _GENERATED,
        "kimi_delta": _GENERATED,
        "causal_conv": _GENERATED,
        "short_conv": _GENERATED,
        "mamba1": _GENERATED,
        "mamba2": _GENERATED,
    },
    "CudaDeterministic": {
        "rms_norm": _BY_ROW,
        "norm_add": _BY_ROW,
        "silu_mul": _BY_ROW,
        "gelu_tanh_mul": _BY_ROW,
        "gelu_mul": _BY_ROW,
        "relu_mul": _BY_ROW,
        "layer_norm": _BY_ROW,
        "gated_norm": _BY_ROW,
        "activation": _BY_ROW,
        "xielu": _BY_ROW,
        "add_opened": _BY_ROW,
        "scale_columns": "an exactly rounded product of each element",
        "sigmoid_mul": "a result is made of its own two numbers",
        "route": "as by row; where `topk` has no kernel, torch sums a few numbers of each row",
        "rope_kv_write": _BY_ROW,
        "latent_write": _BY_ROW,
        "latent_attention": "models that have it are refused (engine/resolve.py)",
        "gated_delta": _TOLD,
        "kimi_delta": _TOLD,
        "mamba2": _TOLD,
        "mamba1": "a program walks an entry's tokens one after the other",
        "whole_texts": "texts are computed one by one",
        "causal_conv": "each result is the sum of a token's own taps, in one order",
        "short_conv": _COMPOSED,
        "order_experts": "codes are moved, and none is changed",
        "lora_add": "`LoraStep` says it to the kernel",
        "lora_gated": "`LoraStep` says it to the kernel",
    },
}


def deterministic() -> list[type[Kernels]]:
    from kernels.cuda_deterministic import CudaDeterministic

    return [Deterministic, CudaDeterministic]


def test_no_operation_is_forgotten() -> None:
    """A new operation that is left to torch or to an ordinary kernel: a token's numbers then depend
    on how many rows the step has, and no model in the tests need show it."""
    pytest.importorskip("triton")
    operations = {name for name, it in vars(Kernels).items() if name[0] != "_" and callable(it)}
    assert len(operations) > 30
    for back_end in deterministic():
        overridden = operations & vars(back_end).keys()
        safe = SAFE[back_end.__name__].keys()
        assert overridden | safe == operations, back_end
        assert not overridden & safe, back_end


def test_gated_norms_that_are_not_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's silu over all rows at once: a row's last elements are rounded as vectors or alone,
    as its place among the others has it."""
    monkeypatch.setattr(norm, "gated_norm", lambda *_: None)
    generator = torch.Generator().manual_seed(5)
    x, gate = (torch.randn(9, 21, generator=generator) * 3 for _ in range(2))
    weight = torch.rand(21, generator=generator)
    kernels = Deterministic()
    for last in (False, True):
        whole = kernels.gated_norm(x.clone(), gate, weight, 3, 1e-6, last)
        alone = [
            kernels.gated_norm(row.clone(), own.clone(), weight, 3, 1e-6, last)
            for row, own in zip(x.split(1), gate.split(1), strict=True)
        ]
        assert torch.equal(whole, torch.cat(alone))
