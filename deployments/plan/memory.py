"""plan(model, config, device) -> Plan: what an engine will do with its memory, without loading it.

The sum is the engine's own (`engine.runner.memory.plan_memory`), over a model of the same parts
that takes no memory. What the engine measures at its start is estimated.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from engine.config.engine_config import EngineConfig
from engine.config.kv_groups import kv_groups
from engine.config.model_config import ModelConfig
from engine.config.quantized import KEY
from engine.errors import ConfigError

if TYPE_CHECKING:  # torch takes seconds, and `manta --help` needs none
    from engine.models.registry import Model
    from engine.resolve import Resolved
    from engine.runner.memory import MemoryPlan

GIB = 1 << 30

# Bytes that the driver reports as total, not the ones on the box.
GPUS = {
    "b200": int(178.4 * GIB),
    "h200": int(139.8 * GIB),
    "h100": int(79.2 * GIB),
    "a100": int(79.2 * GIB),
    "a100-40g": int(39.4 * GIB),
    "l40s": int(44.4 * GIB),
    "a10g": int(22.0 * GIB),
    "l4": int(22.0 * GIB),
    "t4": int(14.6 * GIB),
}
# Compute capability of CUDA.
_CAPABILITIES = {
    "b200": (10, 0),
    "h200": (9, 0),
    "h100": (9, 0),
    "a100": (8, 0),
    "a100-40g": (8, 0),
    "l40s": (8, 9),
    "a10g": (8, 6),
    "l4": (8, 9),
    "t4": (7, 5),
}

_CUDA_CONTEXT = ("CUDA context (estimated)", int(0.55 * GIB))  # and libraries' workspaces
_CPU_PROCESS = ("Python process (estimated)", int(0.7 * GIB))  # torch and the other modules


@dataclass(frozen=True, slots=True)
class Hardware:
    """A GPU of `memory` bytes, or a CPU machine with so much free."""

    name: str
    kind: str  # "cuda" or "cpu"
    memory: int  # bytes
    cores: int = 0  # of a CPU machine; 0 = unknown
    capability: tuple[int, int] | None = None  # of CUDA; None = unknown

    @classmethod
    def gpu(cls, name: str) -> "Hardware":
        """Return the hardware of a GPU that GPUS names."""
        return cls(name.upper(), "cuda", GPUS[name], capability=_CAPABILITIES[name])


class DoesNotFit(ConfigError):
    """A device has less memory than a model, or one request of full length, needs."""


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """The memory of one replica's engine on a device.

    memory: bytes by purpose, as the engine's own table; on GPUs, those of the rank with the least
        room; on the CPU, those of all ranks of the node with the least.
    dtype: dtype of what is not quantised.
    weights_kind: what weights are kept in, in words.
    products: the GEMM of quantised weights on the device, a line for each format.
    active_parameters: parameters that a token meets, fewer than all in a mixture of experts.
    kv_per_token: (what is kept, layers, bytes) of each kind of layers, of the same rank on GPUs and
        of all ranks on the CPU; a token that has left a window takes nothing there.
    ranks: number of ranks that the model is divided among.
    stages: number of pipeline stages that the ranks form.
    nodes: number of nodes that a replica has equally many ranks on.
    states: number of recurrent layers, and bytes of a request's state in all of them.
    snapshots: number of snapshots of states, with which prefixes are found.
    """

    device: Hardware
    dtype: str
    weights_kind: str
    products: tuple[str, ...]
    parameters: int
    active_parameters: int
    memory: "MemoryPlan"
    kv_per_token: tuple[tuple[str, int, int], ...]
    max_model_len: int
    max_num_seqs: int
    devices_per_node: int
    ranks: int = 1
    stages: int = 1
    nodes: int = 1
    states: tuple[int, int] = (0, 0)
    snapshots: int = 0
    prefix_caching: bool = True

    @property
    def weights(self) -> int:
        return dict(self.memory.rows)["weights"]

    @property
    def num_blocks(self) -> int:
        return self.memory.num_blocks

    @property
    def block_bytes(self) -> int:
        return self.memory.block_bytes

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def kv_tokens(self) -> int:
        """The number of tokens of typical requests the KV cache holds."""
        return self.memory.positions * self.memory.block_size

    @property
    def full_length_requests(self) -> float:
        """The number of requests of max_model_len tokens fit at once."""
        groups, size = self.memory.groups, self.memory.block_size
        assert groups is not None
        if groups.num_whole == len(groups.groups):
            return self.kv_tokens / self.max_model_len
        return self.memory.kv_ranks * self.num_blocks / groups.blocks(self.max_model_len, size)

    @property
    def used(self) -> int:
        return sum(size for _, size in self.memory.rows) + self.kv_bytes

    @property
    def ranks_per_node(self) -> int:
        return self.ranks // self.nodes

    @property
    def replicas_per_node(self) -> int:
        """Return how many replicas a node holds: by its GPUs, or on a CPU by its memory and a core
        for each rank. Where a replica is on several nodes, as many nodes hold this number."""
        if self.device.kind == "cuda":
            return self.devices_per_node // self.ranks_per_node
        by_memory = self.device.memory // self.used
        cores = self.device.cores // self.ranks_per_node or by_memory
        return max(1, min(by_memory, cores))


def plan(
    model: ModelConfig,
    config: EngineConfig,
    device: Hardware,
    *,
    devices_per_node: int | None = None,
) -> EnginePlan:
    """Plan the memory of an engine on a device. Raises DoesNotFit, with the bytes needed and the
    ways out, and ConfigError for what the engine would refuse there.

    devices_per_node: GPUs of a node; None = as many as a replica has there.
    """
    import torch

    from engine.quantization.products import products
    from engine.resolve import decide
    from engine.runner.memory import check_weights, lora_host_bytes, parts_here, plan_memory

    cuda = device.kind == "cuda"
    check_quantization(model, config, device.kind)
    resolved = decide(config, model, torch.device(device.kind), device.name, device.capability)
    try:
        others = _CUDA_CONTEXT if cuda else _CPU_PROCESS
        host_bytes = lora_host_bytes(config, device.memory)
        kinds = []
        # A GPU holds a rank's, the CPU all those of a node.
        for stage in range(0, resolved.stages, 1 if cuda else config.stages_per_node):
            part = _outline(resolved, stage)
            check_weights(parts_here(resolved, part), device.memory - others[1])
            memory = plan_memory(
                resolved, part, device.name, device.memory, others, host_bytes=host_bytes
            )
            kinds.append((memory, part))
        memory, part = min(kinds, key=lambda each: each[0].num_blocks)
        groups = part.kv if cuda else kv_groups(resolved.model)
    except ConfigError as error:
        if error.param == KEY:  # a matrix that its format cannot have, whatever the memory
            raise
        raise DoesNotFit(
            f"does not fit on {device.name}: {error.message}", param=error.param
        ) from None
    ranks, whole, key, said = config.num_ranks, part, config.ranks_key, config.ranks_said
    here = config.ranks_per_node
    devices_per_node = here if devices_per_node is None else devices_per_node
    if cuda and devices_per_node < here:
        raise ConfigError(
            f"{said}: so many ranks need as many GPUs of one node, and this one has "
            f"{devices_per_node}; lower it, take another node, or put stages on several nodes "
            "(pipeline_nodes)",
            param=key,
        )
    if device.cores and device.cores < here:
        raise ConfigError(
            f"{said}: so many ranks on the CPU need as many cores, and this machine has "
            f"{device.cores}; lower it",
            param=key,
        )
    if ranks > 1:
        whole = _outline(replace(resolved, config=_on_one_rank(config)))
    linears, experts = _matrices(whole)
    quantized = model.quantized
    if quantized is not None:
        # Only of GGUF blocks is an embedding kept as linear layers are.
        table = [whole.config.record.tensors["embedding"].names[0]] * (quantized.method == "gguf")
        quantized = quantized.of((*linears, *experts, *table))
    dtype = str(resolved.dtype).removeprefix("torch.")
    weights_kind = dtype if config.quantization in ("auto", "none") else config.quantization
    return EnginePlan(
        device=device,
        dtype=dtype,
        weights_kind=weights_kind if quantized is None else quantized.name,
        products=tuple(
            products(
                config.quantization,
                quantized,
                device.capability,
                cuda,
                linears,
                experts,
                config.deterministic,
            )
        ),
        parameters=whole.num_parameters,
        active_parameters=whole.num_active_parameters,
        memory=memory,
        kv_per_token=tuple(
            (kind.describe(), layers, taken)
            for kind, (layers, taken) in groups.token_bytes(resolved.kv).items()
            if not resolved.model.whole_texts
        ),
        max_model_len=resolved.max_model_len,
        max_num_seqs=resolved.max_num_seqs,
        devices_per_node=devices_per_node,
        ranks=ranks,
        stages=resolved.stages,
        nodes=config.pipeline_nodes,
        states=(len(groups.recurrent), groups.state_bytes),
        snapshots=min((memory.snapshots for memory, part in kinds if part.kv.recurrent), default=0),
        prefix_caching=config.prefix_caching,
    )


def _matrices(model: "Model") -> tuple[list[str], list[str]]:
    """The checkpoint names of linear layers and of experts, without ".weight"."""
    linears = [part.name for spec in model.matrices() for part in spec.parts]
    experts = [
        source.name.removesuffix(".weight")
        for spec in model.expert_specs()
        for source in (*spec.gate_up, *spec.down)
    ]
    return linears, experts


def ranks_that_fit(model: ModelConfig, config: EngineConfig, device: Hardware) -> int | None:
    """Return the least tensor_parallel with which a model fits, of 2, 4 and 8 times the configured
    one; None if it fits with none."""
    for factor in (2, 4, 8):
        ranks = factor * config.tensor_parallel
        try:
            plan(model, msgspec.structs.replace(config, tensor_parallel=ranks), device)
        except ConfigError:
            continue
        return ranks
    return None


def check_files(model: ModelConfig, config: EngineConfig, device: Hardware, folder: Path) -> None:
    """Check that the engine would take the weights in a folder. Only headers are read: a NaN is
    found when the weights are loaded. Raises ConfigError, naming file and tensor."""
    import torch

    from engine.resolve import decide
    from engine.weights import check_headers

    where, alone = torch.device(device.kind), _on_one_rank(config)
    check_headers(_outline(decide(alone, model, where, device.name, device.capability)), folder)


def _on_one_rank(config: EngineConfig) -> EngineConfig:
    return msgspec.structs.replace(
        config,
        tensor_parallel=1,
        pipeline_parallel=1,
        pipeline_nodes=1,
        expert_parallel=None,
        attention_data_parallel=False,
    )


@lru_cache(maxsize=8)  # a price list has some dozens of node types for one configuration
def _outline(resolved: "Resolved", stage: int = 0) -> "Model":
    from engine.runner.memory import outline

    return outline(resolved, stage)


def check_quantization(model: ModelConfig, config: EngineConfig, kind: str) -> None:
    """Check that there is such a quantisation for this model and kind of device. Raises
    ConfigError."""
    if config.quantization in ("auto", "none") and model.quantized is None:
        return
    from engine.quantization import registry  # with torch

    registry.check_quantization(config.quantization, kind, model.quantized)
