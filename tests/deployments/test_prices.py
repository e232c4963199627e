"""What a configuration costs: memory with adapters, node types that hold it, dollars."""

import json
from pathlib import Path

import pytest

from deployments.config import PoolConfig
from deployments.planning import GIB, GPUS, Device, lora_elements, plan
from deployments.prices import NodeType, Prices, offers
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.model_config import ModelConfig


def llama(folder: Path, **changes: object) -> ModelConfig:
    """Llama 3.1 8B by its sizes."""
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "dtype": "bfloat16",
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(fields))
    return ModelConfig.from_folder(folder)


def config(**fields: object) -> EngineConfig:
    return EngineConfig(model="", max_model_len=8192, **fields)  # type: ignore[arg-type]


def test_slots_are_as_large_as_the_engine_makes_them(tmp_path: Path) -> None:
    """A plan that forgets the slots promises KV blocks that the start does not find."""
    import torch

    from engine.lora.weights import LoraLayout
    from engine.models.registry import build_model
    from kernels.dispatch import kernels_for

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}
    model = llama(tmp_path, **sizes, **heads)
    built = build_model(model, torch.float32, torch.device("cpu"), kernels_for("cpu"))
    layout = LoraLayout(linear.spec for linear in built.linears())
    for rank in (8, 16, 64):
        assert lora_elements(model, rank) == layout.num_elements(rank)


def test_adapters_take_memory_from_the_kv_cache(tmp_path: Path) -> None:
    """64 slots of rank 64 are ten gigabytes: a plan without them fits where the engine does not."""
    model, device = llama(tmp_path), Device("H100", "cuda", GPUS["h100"])
    without = plan(model, config(), device)
    assert without.adapters == 0
    some = plan(model, config(max_loras=16, max_lora_rank=64), device)
    assert some.adapters > 16 * 2 * lora_elements(model, 64)
    lost = (without.num_blocks - some.num_blocks) * some.block_bytes
    assert lost == pytest.approx(some.adapters + GIB, rel=0.02)  # and graphs for both
    with pytest.raises(ConfigError, match="max_loras"):
        plan(model, config(max_loras=256, max_lora_rank=256), device)
    cpu = Device("CPU", "cpu", 64 * GIB)
    assert plan(model, config(max_loras=16), cpu).adapters == 4 * GIB
    assert plan(model, config(max_loras=16, lora_host_bytes=GIB), cpu).adapters == GIB


def test_price_list_is_whole(tmp_path: Path) -> None:
    """A GPU that the planner does not know drops its nodes from every table without a word."""
    prices = Prices.load()
    assert {node.gpu for node in prices.nodes if node.gpu} == set(GPUS)
    assert prices.date.startswith("20") and prices.source
    for text, where in (
        (
            "nodes: [{name: x, gpu: voodoo, gpus: 1, cpus: 1, memory_gib: 1, hour: 1}]",
            "voodoo|x: gpu",
        ),
        ("nodes: [{name: x, cpus: 1, memory_gib: 1, hour: free}]", "nodes.0.hour"),
        ("nodes: {", ":"),
    ):
        path = tmp_path / "prices.yaml"
        path.write_text(f'date: "2026-01-01"\nsource: mine\n{text}\n')
        with pytest.raises(ConfigError, match=where):
            Prices.load(path)


def test_offers(tmp_path: Path) -> None:
    """What fits, how many a node, and what is cheapest; tokens only where somebody measured."""
    results = tmp_path / "results"
    results.mkdir()
    written = {
        "device": "NVIDIA H200",
        "date": "2026-01-02",
        "config": {"ours": {"dtype": "bfloat16"}},
        "rows": [{"case": "llama-8b/dialogue", "ours": 10_000.0}],
    }
    (results / "versus-engine-2026-01-02.json").write_text(json.dumps(written))
    written |= {"date": "2026-01-01", "rows": [{"case": "llama-8b/dialogue", "ours": 1.0}]}
    (results / "versus-engine-llama-8b-2026-01-01.json").write_text(json.dumps(written))
    model, prices = llama(tmp_path), Prices.load()
    found = {
        offer.node.name: offer
        for offer in offers("gpu", PoolConfig(num_cpus=4.0), model, config(), prices, results)
    }
    assert "g4dn.xlarge" not in found  # 16 GB of weights in 15 of memory
    hours = [offer.replica_hour for offer in found.values()]
    assert hours == sorted(hours)
    h200 = found["p5en.48xlarge"]
    assert h200.replicas == 8
    assert h200.million_tokens == pytest.approx(63.296 / 8 / (10_000 * 3600) * 1e6)
    assert h200.hour(9) == pytest.approx(2 * 63.296)
    assert found["p5.4xlarge"].million_tokens is None  # not what was measured
    other = offers("gpu", PoolConfig(), model, config(dtype="float32"), prices, results)
    assert all(offer.million_tokens is None for offer in other)
    two = offers("gpu", PoolConfig(num_gpus=0.5), model, config(num_blocks=2048), prices, results)
    assert {o.node.name: o.replicas for o in two}["p5.4xlarge"] == 2
    cpus = offers("cpu", PoolConfig(num_cpus=8.0), model, config(), prices, results)
    assert {o.node.name: o.replicas for o in cpus} == {
        "m7i.4xlarge": 2,
        "m7i.8xlarge": 4,
        "m7i.2xlarge": 1,
    }
    assert not offers("cpu", PoolConfig(num_cpus=64.0), model, config(), prices, results)


def test_measured_results_are_found(tmp_path: Path) -> None:
    """The results' files and names belong to somebody else, and a change there must not take the
    prices of tokens away."""
    found = offers("gpu", PoolConfig(), llama(tmp_path), config(), Prices.load())
    measured = [offer.node.gpu for offer in found if offer.million_tokens is not None]
    assert measured == ["h200"]


def test_node_is_a_device() -> None:
    """A CPU node's memory is not all the replicas': Ray and the system live there too."""
    node = NodeType(name="c", cpus=8, memory_gib=32, hour=1)
    assert node.device().memory < 32 * GIB and node.device().cores == 8
