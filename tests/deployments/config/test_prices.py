"""What a configuration costs: memory with adapters, node types that hold it, dollars."""

import json
from pathlib import Path

import msgspec
import pytest

from deployments.config.load import PoolConfig
from deployments.plan.gpus import GIB, GPUS, abilities
from deployments.plan.memory import EnginePlan, Hardware, plan
from deployments.plan.prices import NodeType, Prices, offers
from engine.config.engine_config import EngineConfig
from engine.config.model_config import ModelConfig
from engine.errors import ConfigError


def llama(folder: Path, **changes: object) -> ModelConfig:
    """Return a model configuration with the sizes of Llama 3.1 8B."""
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


def adapters(planned: EnginePlan) -> int:
    words = ("LoRA", "adapters")
    return sum(size for purpose, size in planned.memory.rows if purpose.startswith(words))


def test_adapters_take_memory_from_the_kv_cache(tmp_path: Path) -> None:
    """64 slots of rank 64 are ten gigabytes: a plan without them fits where the engine does not."""
    model, device = llama(tmp_path), Hardware("H100", "cuda", GPUS["h100"].memory)
    without = plan(model, config(), device)
    assert adapters(without) == 0
    some = plan(model, config(max_loras=16, max_lora_rank=64), device)
    sides = 2 * 4096 + 2 * (4096 + 1024) + 2 * 4096 + 3 * (4096 + 14336)
    assert adapters(some) > 16 * 2 * 32 * 64 * sides
    lost = (without.num_blocks - some.num_blocks) * some.block_bytes
    assert lost == pytest.approx(adapters(some) + GIB, rel=0.02)  # and graphs for both
    with pytest.raises(ConfigError, match="max_loras"):
        plan(model, config(max_loras=256, max_lora_rank=256), device)
    cpu = Hardware("CPU", "cpu", 64 * GIB)
    assert adapters(plan(model, config(max_loras=16), cpu)) == 4 * GIB
    assert adapters(plan(model, config(max_loras=16, lora_host_bytes=GIB), cpu)) == GIB


def test_price_list_is_whole(tmp_path: Path) -> None:
    """A GPU that the planner does not know drops its nodes from every table without a word."""
    prices = Prices.load()
    priced = {node.gpu for node in prices.nodes if node.gpu}
    assert priced <= GPUS.keys() and len(priced) >= 9
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
    speeds = tmp_path / "speeds.yaml"
    row = "{model: llama-8b, device: NVIDIA H200, dtype: bfloat16, tokens_per_second: 10000.0}"
    speeds.write_text(f"speeds:\n  - {row}\n")
    model, prices = llama(tmp_path), Prices.load()
    by_name = {
        offer.node.name: offer
        for offer in offers("gpu", PoolConfig(num_cpus=4.0), model, config(), prices, speeds)
    }
    assert "g4dn.xlarge" not in by_name  # 16 GB of weights in 15 of memory
    hours = [offer.replica_hour for offer in by_name.values()]
    assert hours == sorted(hours)
    h200 = by_name["p5en.48xlarge"]
    assert h200.replicas == 8
    assert h200.million_tokens == pytest.approx(63.296 / 8 / (10_000 * 3600) * 1e6)
    assert h200.hour(9) == pytest.approx(2 * 63.296)
    assert by_name["p5.4xlarge"].million_tokens is None  # not what was measured
    other = offers("gpu", PoolConfig(), model, config(dtype="float32"), prices, speeds)
    assert all(offer.million_tokens is None for offer in other)
    ranks = offers("gpu", PoolConfig(), model, config(tensor_parallel=4), prices, speeds)
    by_name = {offer.node.name: offer for offer in ranks}
    assert by_name["p5en.48xlarge"].replicas == 2 and "p5.4xlarge" not in by_name  # 8 GPUs, and one
    assert by_name["p5en.48xlarge"].million_tokens is None
    assert by_name["p5en.48xlarge"].plan.weights < 0.35 * h200.plan.weights
    stages = offers("gpu", PoolConfig(), model, config(pipeline_parallel=4), prices, speeds)
    staged = {offer.node.name: offer for offer in stages}["p5en.48xlarge"]
    assert (staged.replicas, staged.plan.stages, staged.plan.ranks) == (2, 4, 4)
    assert 0.2 * h200.plan.weights < staged.plan.weights < 0.35 * h200.plan.weights
    assert staged.plan.parameters == h200.plan.parameters
    both = config(tensor_parallel=4, pipeline_parallel=2)
    by_name = {
        offer.node.name: offer for offer in offers("gpu", PoolConfig(), model, both, prices, speeds)
    }
    assert by_name["p5en.48xlarge"].replicas == 1 and by_name["p5en.48xlarge"].plan.ranks == 8
    assert 0.1 * h200.plan.weights < by_name["p5en.48xlarge"].plan.weights < 0.2 * h200.plan.weights
    apart = config(pipeline_parallel=2, pipeline_nodes=2)  # of nodes with one GPU too
    by_name = {o.node.name: o for o in offers("gpu", PoolConfig(), model, apart, prices, speeds)}
    assert (by_name["p5.4xlarge"].replicas, by_name["p5en.48xlarge"].replicas) == (1, 8)
    hour = by_name["p5.4xlarge"].node.hour
    assert by_name["p5.4xlarge"].hour(3) == 6 * hour == 3 * by_name["p5.4xlarge"].replica_hour
    two = offers("gpu", PoolConfig(num_gpus=0.5), model, config(num_blocks=2048), prices, speeds)
    assert {o.node.name: o.replicas for o in two}["p5.4xlarge"] == 2
    cpus = offers("cpu", PoolConfig(num_cpus=8.0), model, config(), prices, speeds)
    assert {o.node.name: o.replicas for o in cpus} == {
        "m7i.4xlarge": 2,
        "m7i.8xlarge": 4,
        "m7i.2xlarge": 1,
    }
    assert not offers("cpu", PoolConfig(num_cpus=64.0), model, config(), prices, speeds)


def test_what_the_engine_refuses_is_not_planned(tmp_path: Path) -> None:
    """Bug: a T4, which has no bfloat16, was planned and priced in it, and uint8, which CPUs alone
    can, for an H200."""
    model, prices = llama(tmp_path, num_hidden_layers=8), Prices.load()
    with pytest.raises(ConfigError, match=r"T4 has no bfloat16.* set dtype: float16"):
        plan(model, config(max_num_seqs=16), Hardware.gpu("t4"))
    assert (
        plan(model, config(max_num_seqs=16, dtype="float16"), Hardware.gpu("t4")).dtype == "float16"
    )
    for dtype, there in (("auto", False), ("bfloat16", False), ("float16", True)):
        ranked = offers("gpu", PoolConfig(), model, config(max_num_seqs=16, dtype=dtype), prices)
        names = [offer.node.name for offer in ranked]
        assert ("g4dn.xlarge" in names) == there and "g6.xlarge" in names
    with pytest.raises(ConfigError, match="'uint8-64' does not run on cuda"):
        plan(model, config(max_num_seqs=16, quantization="uint8-64"), Hardware.gpu("h200"))
    assert not offers("gpu", PoolConfig(), model, config(quantization="uint8-64"), prices)


@pytest.mark.parametrize("tied", [False, True])
def test_int8_weights_are_counted_as_they_are_kept(tmp_path: Path, tied: bool) -> None:
    """Bug: the plan left `quantization` out, and counted two bytes a weight for one."""
    model = llama(tmp_path, tie_word_embeddings=tied)
    cpu = Hardware("CPU", "cpu", 64 * GIB)
    whole, half = (plan(model, config(quantization=name), cpu) for name in ("none", "int8"))
    table = model.vocab_size * model.hidden_size
    layers = whole.parameters - table * (1 if tied else 2)
    outputs = 32 * (6144 + 2 * 4096 + 2 * 14336) + 128256
    angles = 8192 * 128 * 4  # of the positions that are served
    # On the CPU the head is packed apart from the embedding, tied or not; norms are float32.
    assert whole.weights - angles == pytest.approx(2 * (layers + 2 * table), rel=1e-3)
    # The embedding as it was, a byte for each weight of the layers and the head; norms are small.
    rounded = 2 * table + layers + table + 8 * outputs
    assert half.weights - angles == pytest.approx(rounded, rel=1e-3)


def test_measured_results_are_found(tmp_path: Path) -> None:
    """Bug: the speeds were read from a folder that no wheel has, and plans of an installed Manta
    had no price of a token and no word of it."""
    ranked = offers("gpu", PoolConfig(), llama(tmp_path), config(), Prices.load())
    measured = [offer.node.gpu for offer in ranked if offer.million_tokens is not None]
    assert {*measured} == {"h100", "h200"}


def test_node_is_a_device() -> None:
    """A CPU node's memory is not all the replicas': Ray and the system live there too."""
    node = NodeType(name="c", cpus=8, memory_gib=32, hour=1)
    assert node.device().memory < 32 * GIB and node.device().cores == 8


def test_every_gpu_is_planned_or_refused(tmp_path: Path) -> None:
    """Bug: `--gpu v100` was not known, and a GPU of 7.0 would have failed at its first kernel."""
    model = llama(tmp_path)
    for name, gpu in GPUS.items():
        config = EngineConfig(model="x", dtype="float16", max_num_seqs=16)
        config = msgspec.structs.replace(config, quantization="int4", max_model_len=4096)
        if gpu.capability < (7, 5):
            with pytest.raises(ConfigError, match=r"7\.0.* use device: cpu"):
                plan(model, config, Hardware.gpu(name))
            continue
        result = plan(model, config, Hardware.gpu(name))
        native, otherwise = abilities(gpu.capability)
        assert result.device.bandwidth == gpu.bandwidth
        assert ("bfloat16" in native) == ("no bfloat16" not in otherwise) == (name != "t4")
        assert ("keys in fp8" in native) == (gpu.capability >= (8, 9))
        assert ("specialised" in native) == (gpu.capability == (9, 0))
