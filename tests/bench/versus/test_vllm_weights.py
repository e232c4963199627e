"""The peer's random weights."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from bench.versus import vllm_weights

LOADER = "vllm.model_executor.model_loader.dummy_loader"


class _Mixture(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(16, bias=False)
        self.router = torch.nn.Linear(16, 8)
        self.weight_scale = torch.nn.Parameter(torch.ones(3))


def test_each_token_has_experts_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a peer that reads a few experts is compared with an engine that reads all of them."""

    def own(module: torch.nn.Module, config: Any) -> None:
        for parameter in module.parameters():
            torch.nn.init.uniform_(parameter, -1e-3, 1e-3)

    loader = ModuleType(LOADER)
    monkeypatch.setattr(loader, "initialize_dummy_weights", own, raising=False)
    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.model_loader", LOADER):
        monkeypatch.setitem(sys.modules, name, loader if name == LOADER else ModuleType(name))
    monkeypatch.setattr(
        sys.modules["vllm.model_executor.model_loader"], "dummy_loader", loader, raising=False
    )
    model = _Mixture()

    def experts() -> int:
        x = model.norm(torch.randn(64, 16, generator=torch.Generator().manual_seed(0)))
        return len(set(model.router(x).topk(2).indices.flatten().tolist()))

    own(model, None)
    assert experts() == 2  # what vLLM's own weights do
    vllm_weights.draw_as_manta()
    for module in model.modules():  # as vLLM goes over them
        loader.initialize_dummy_weights(module, None)
    assert experts() == 8
    assert bool((model.weight_scale < 1e-2).all())  # vLLM's business


def test_another_interpreter_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: vLLM starts its engine anew, with its own weights, and the file says they were ours."""
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    with pytest.raises(RuntimeError, match="does not know the weights"):
        vllm_weights.check_forked()
