"""The peer's random weights."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bench.versus import vllm_weights

LOADER = "vllm.model_executor.model_loader.dummy_loader"
GPU_WORKER = "vllm.v1.worker.gpu_worker"


def _kept(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


class _Experts(nn.Module):
    """Experts as vLLM stores those of gpt-oss: packed (two codes a byte, a scale for 32), or
    whole."""

    def __init__(self, packed: bool) -> None:
        super().__init__()
        shapes = {"w13": (8, 12, 64), "w2": (8, 64, 32)}
        for name, (count, rows, width) in shapes.items():
            if packed:
                codes = torch.zeros(count, rows, width // 2, dtype=torch.uint8)
                self.register_parameter(f"{name}_weight", _kept(codes))
                scale = torch.zeros(count, rows, width // 32, dtype=torch.uint8)
                self.register_parameter(f"{name}_weight_scale", _kept(scale))
            else:
                self.register_parameter(f"{name}_weight", _kept(torch.empty(count, rows, width)))
            self.register_parameter(f"{name}_bias", _kept(torch.empty(count, rows)))


class _Runner(nn.Module):
    """A module with the experts and the router, which vLLM has filled before."""

    def __init__(self, router: nn.Module, packed: bool) -> None:
        super().__init__()
        self.gate, self.routed_experts = router, _Experts(packed)


class _Mixture(nn.Module):
    def __init__(self, packed: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64, bias=False)
        self.router = nn.Linear(64, 8)
        self.experts = _Runner(self.router, packed)
        self.sinks = _kept(torch.empty(2))

    def met(self) -> int:
        x = self.norm(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))
        return len(set(self.router(x).topk(2).indices.flatten().tolist()))


class _DummyLoader:
    """A copy of vLLM's dummy loader, which fills each module in turn with all its submodules."""

    def load_weights(self, model: nn.Module, config: Any) -> None:
        for module in model.modules():
            for tensor in module.state_dict().values():
                if tensor.is_floating_point():
                    nn.init.uniform_(tensor, -1e-3, 1e-3)


class _GpuWorker:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        loader = sys.modules[LOADER].DummyModelLoader()
        loader.load_weights(self.model, None)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install stand-ins for the modules of vLLM that the worker imports."""
    for name in (LOADER, GPU_WORKER):
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts)))
    monkeypatch.setattr(sys.modules[LOADER], "DummyModelLoader", _DummyLoader, raising=False)
    monkeypatch.setattr(sys.modules[GPU_WORKER], "Worker", _GpuWorker, raising=False)
    monkeypatch.delitem(sys.modules, vllm_weights.WORKER.rpartition(".")[0], raising=False)


def _worker(model: nn.Module) -> Any:
    """Return the worker that vLLM would make by its name."""
    module, _, name = vllm_weights.WORKER.rpartition(".")
    __import__(module)
    return getattr(sys.modules[module], name)(model)


@pytest.mark.parametrize("packed", [False, True])
def test_each_token_has_experts_of_its_own(vllm: None, packed: bool) -> None:
    """Bug: a peer that reads a few experts is compared with an engine that reads all of them; a
    router whose weight is filled again when the module that holds it has its turn; codes that are
    zeros, which take less power and so less time."""
    model, load = _Mixture(packed), _DummyLoader.load_weights
    _DummyLoader().load_weights(model, None)
    assert model.met() == 2  # what vLLM's own weights do
    worker = _worker(model)
    worker.load_model()
    assert model.met() == 8
    assert _DummyLoader.load_weights is load
    assert 0.015 < float(model.router.weight.detach().std()) < 0.025
    experts = dict(model.experts.routed_experts.named_parameters())
    for name in ("w13", "w2"):
        assert not experts[f"{name}_bias"].any()
        weight = experts[f"{name}_weight"]
        if packed:
            assert len(weight.unique()) > 200
            assert experts[f"{name}_weight_scale"].unique().tolist() == [120]  # 2**-7
        else:
            assert 0.015 < float(weight.std()) < 0.025
    assert bool((model.sinks.abs() < 1e-2).all())  # vLLM's business
    drawn, numbers = worker.count_drawn()
    assert numbers - drawn == model.sinks.numel()
    llm = SimpleNamespace(collective_rpc=lambda name: [getattr(worker, name)()])
    vllm_weights.check_drawn(llm)


def test_codes_become_numbers_of_the_same_size(vllm: None) -> None:
    """Bug: weights in eight bits that are all zeros, as vLLM's of +-0.001 round to; codes whose
    scales make them a hundred times too large."""
    for dtype in (torch.int8, torch.float8_e4m3fn):
        module = nn.Module()
        module.weight = _kept(torch.zeros(64, 64).to(dtype))
        module.weight_scale = _kept(torch.empty(64, 1))
        vllm_weights.draw(module)
        weight = module.weight.float() * module.weight_scale
        assert 0.015 < float(weight.std()) < 0.025


def test_weights_of_another_way_are_noticed() -> None:
    """Bug: vLLM has its own weights after all, and the file says they were ours."""
    for counts in ([0, 0], [90, 100]):
        llm = SimpleNamespace(collective_rpc=lambda name, counts=counts: [counts])
        with pytest.raises(RuntimeError, match="weights as they were asked for"):
            vllm_weights.check_drawn(llm)
