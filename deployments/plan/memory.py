"""plan: computes the memory that an engine needs on a device, without loading the model.

The engine's own function (`engine.runner.memory.plan_memory`) is applied to a model on the meta
device. Values that the engine measures at its start are estimated.
"""

from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from deployments.plan.gpus import GIB, GPUS
from engine.config.engine_config import EngineConfig
from engine.config.kv_groups import kv_groups
from engine.config.model_config import ModelConfig
from engine.config.quantized import KEY
from engine.errors import ConfigError
from engine.speculation.settings import SpeculationSettings

if TYPE_CHECKING:
    # torch is not imported here, which would take seconds that `manta --help` does not need.
    from engine.models.registry import Model
    from engine.resolve import Resolved
    from engine.runner.memory import MemoryPlan

CUDA_CONTEXT = ("CUDA context (estimated)", int(0.55 * GIB))  # including workspaces of libraries
CPU_PROCESS = ("Python process (estimated)", int(0.7 * GIB))  # torch and the other modules


@dataclass(frozen=True, slots=True)
class Hardware:
    """A GPU with `memory` bytes, or a CPU machine with `memory` free bytes."""

    name: str
    kind: str  # "cuda" or "cpu"
    memory: int  # bytes
    cores: int = 0  # cores of a CPU machine; 0: unknown
    capability: tuple[int, int] | None = None  # CUDA compute capability; None: unknown
    bandwidth: int = 0  # of the memory, GB/s; 0: unknown
    teraflops: int = 0  # of dense 16-bit matmuls, TFLOP/s; 0: unknown

    @classmethod
    def gpu(cls, name: str) -> "Hardware":
        """Return the hardware of the GPU that has this name in GPUS."""
        gpu = GPUS[name]
        return cls(
            name.upper(), "cuda", gpu.memory, 0, gpu.capability, gpu.bandwidth, gpu.teraflops
        )


class DoesNotFit(ConfigError):
    """An error: a model, or one request of full length, needs more memory than the device has."""


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """The memory of one replica's engine on a device.

    memory: bytes by purpose, as in the engine's own table; on GPUs for the rank with the least free
        memory, on CPUs for all ranks of the node with the least free memory.
    dtype: dtype of the tensors that are not quantised.
    weights_kind: description of the weights' format.
    products: descriptions of the GEMM kernels for quantised weights, one for each format.
    attention: descriptions of the attention kernels on CUDA, one per kind of layer.
    active_parameters: number of parameters that one token uses; fewer than all in a mixture of
        experts.
    kv_per_token: for each kind of layer: (description of the tokens that it keeps, number of
        layers, bytes of a token in all of them); on GPUs for the same rank as `memory`, on CPUs for
        all ranks.
    ranks: number of ranks among which the model is divided.
    stages: number of pipeline stages.
    nodes: number of nodes of a replica, each with equally many ranks.
    states: (number of recurrent layers, bytes of one request's state in all of them).
    snapshots: number of state snapshots that the prefix cache can hold.
    image_tokens: maximum embeddings of an image; 0: the engine takes none.
    speculation: settings of speculative decoding; None: the engine drafts nothing.
    """

    device: Hardware
    dtype: str
    weights_kind: str
    products: tuple[str, ...]
    attention: tuple[str, ...]
    parameters: int
    active_parameters: int
    memory: "MemoryPlan"
    kv_per_token: tuple[tuple[str, int, int], ...]
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    devices_per_node: int
    async_scheduling: bool = False
    ranks: int = 1
    stages: int = 1
    nodes: int = 1
    states: tuple[int, int] = (0, 0)
    snapshots: int = 0
    prefix_caching: bool = True
    image_tokens: int = 0
    speculation: SpeculationSettings | None = None

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
        """The number of tokens that the KV cache holds, for requests of typical length."""
        return self.memory.positions * self.memory.block_size

    @property
    def full_length_requests(self) -> float:
        """The number of requests of max_model_len tokens that the KV cache holds at once."""
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
        """The number of replicas that fit on a node, or on the group of nodes that a replica spans.

        The number is limited by the GPUs or, on CPUs, by memory and one core per rank.
        """
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
    """Return the memory plan of an engine on a device.

    devices_per_node: number of GPUs of a node; None: as many as a replica uses on a node.

    Raises DoesNotFit with the bytes needed and suggestions, and ConfigError for settings that the
    engine would refuse on this device.
    """
    import torch

    from engine.layers.attention.kernels_used import attention_kernels
    from engine.quantization.products import products
    from engine.resolve import decide
    from engine.runner.memory import (
        check_weights,
        host_kv_bytes,
        lora_host_bytes,
        parts_here,
        plan_memory,
    )

    cuda = device.kind == "cuda"
    check_quantization(model, config, device.kind)
    resolved = decide(config, model, torch.device(device.kind), device.name, device.capability)
    try:
        others = CUDA_CONTEXT if cuda else CPU_PROCESS
        host_bytes = lora_host_bytes(config, device.memory)
        # a size given as a share refers to the host's memory, which is unknown for a GPU
        host_kv = host_kv_bytes(config, 0 if cuda else device.memory)
        kinds = []
        # A GPU holds one rank; a CPU node holds all of its ranks.
        for stage in range(0, resolved.stages, 1 if cuda else config.stages_per_node):
            part = _outline(resolved, stage)
            check_weights(parts_here(resolved, part), device.memory - others[1])
            memory = plan_memory(
                resolved,
                part,
                device.name,
                device.memory,
                others,
                host_bytes=host_bytes,
                host_kv=host_kv,
            )
            kinds.append((memory, part))
        memory, part = min(kinds, key=lambda each: each[0].num_blocks)
        groups = part.kv if cuda else kv_groups(resolved.model)
    except ConfigError as error:
        # This error is not about memory: a matrix has a shape that its format does not support.
        if error.param == KEY:
            raise
        raise DoesNotFit(
            f"does not fit on {device.name}: {error.message}", param=error.param
        ) from None
    ranks, whole, key, ranks_text = config.num_ranks, part, config.ranks_key, config.ranks_said
    here = config.ranks_per_node
    devices_per_node = here if devices_per_node is None else devices_per_node
    if cuda and devices_per_node < here:
        raise ConfigError(
            f"{ranks_text}: so many ranks need as many GPUs of one node, and this one has "
            f"{devices_per_node}; lower it, take another node, or put stages on several nodes "
            "(pipeline_nodes)",
            param=key,
        )
    if device.cores and device.cores < here:
        raise ConfigError(
            f"{ranks_text}: so many ranks on the CPU need as many cores, and this machine has "
            f"{device.cores}; lower it",
            param=key,
        )
    if ranks > 1:
        whole = _outline(replace(resolved, config=_on_one_rank(config)))
    linears, experts = _matrices(whole)
    quantized = model.quantized
    if quantized is not None:
        # Only in GGUF files is the embedding stored in blocks, like the linear layers.
        table = [whole.config.record.tensors["embedding"].names[0]] * (quantized.method == "gguf")
        quantized = quantized.of((*linears, *experts, *table))
    dtype = str(resolved.dtype).removeprefix("torch.")
    by_format = _by_format(config, linears, experts)
    names = (dtype if name in ("auto", "none") else name for name in by_format)
    weights_kind = ", ".join(dict.fromkeys(names))
    return EnginePlan(
        speculation=resolved.speculation,
        device=device,
        dtype=dtype,
        weights_kind=weights_kind if quantized is None else quantized.name,
        products=tuple(
            line
            for quantization, (own_linears, own_experts) in by_format.items()
            for line in products(
                quantization,
                quantized,
                device.capability,
                cuda,
                own_linears,
                own_experts,
                config.deterministic,
            )
        ),
        attention=tuple(
            attention_kernels(
                resolved.model.attention,
                part.head_group,
                resolved.dtype,
                resolved.kv,
                config.block_size,
                device.capability,
                config.deterministic,
            )
            if cuda and device.capability
            else ()
        ),
        parameters=whole.num_parameters,
        active_parameters=whole.num_active_parameters,
        memory=memory,
        kv_per_token=tuple(
            (kind.describe(), layers, num_bytes)
            for kind, (layers, num_bytes) in groups.token_bytes(resolved.kv).items()
            if not resolved.model.whole_texts
        ),
        max_model_len=resolved.max_model_len,
        max_num_seqs=resolved.max_num_seqs,
        max_num_batched_tokens=resolved.max_num_batched_tokens,
        devices_per_node=devices_per_node,
        async_scheduling=resolved.async_scheduling,
        ranks=ranks,
        stages=resolved.stages,
        nodes=config.pipeline_nodes,
        states=(len(groups.recurrent), groups.state_bytes),
        snapshots=min((memory.snapshots for memory, part in kinds if part.kv.recurrent), default=0),
        prefix_caching=config.prefix_caching,
        image_tokens=resolved.image_cache_tokens,
    )


def _by_format(
    config: EngineConfig, linears: list[str], experts: list[str]
) -> dict[str, tuple[list[str], list[str]]]:
    """Return {quantization: (names of its linear layers, names of its experts)}.

    linears, experts: names of all linear layers and experts.
    """
    from engine.quantization.by_layer import pattern_of  # imports torch

    formats: dict[str, tuple[list[str], list[str]]] = {config.quantization: ([], [])}
    layers = config.quantization_layers or {}
    for number, names in enumerate((linears, experts)):
        for name in names:
            pattern = pattern_of(layers, name)
            own = config.quantization if pattern is None else layers[pattern]
            formats.setdefault(own, ([], []))[number].append(name)
    return formats


def _matrices(model: "Model") -> tuple[list[str], list[str]]:
    """Return the names in checkpoints of a model's linear layers and of its experts, without
    ".weight"."""
    linears = [part.name for spec in model.matrices() for part in spec.parts]
    experts = [
        source.name.removesuffix(".weight")
        for spec in model.expert_specs()
        for source in (*spec.gate_up, *spec.down)
    ]
    return linears, experts


def ranks_that_fit(model: ModelConfig, config: EngineConfig, device: Hardware) -> int | None:
    """Return the smallest tensor_parallel with which a model fits on its devices; None if there is
    none.

    2, 4 and 8 times the configured value are tried.
    """
    for factor in (2, 4, 8):
        ranks = factor * config.tensor_parallel
        try:
            plan(model, msgspec.structs.replace(config, tensor_parallel=ranks), device)
        except ConfigError:
            continue
        return ranks
    return None


def check_files(model: ModelConfig, config: EngineConfig, device: Hardware, folder: Path) -> None:
    """Check from the headers of the weight files in a folder that the engine would accept them.

    NaN values are detected only when the weights are loaded. Raises ConfigError that names file and
    tensor.
    """
    import torch

    from engine.models.drafters.build import check_drafter
    from engine.resolve import decide
    from engine.runner.memory import outline_drafter
    from engine.speculation.settings import read_speculation
    from engine.weights import check_headers

    where, alone = torch.device(device.kind), _on_one_rank(config)
    resolved = decide(alone, model, where, device.name, device.capability)
    check_headers(_outline(resolved), folder)
    drafter = outline_drafter(resolved)
    settings = read_speculation(config.speculation)
    if drafter is not None and settings is not None:
        check_drafter(drafter, settings, folder)


def _on_one_rank(config: EngineConfig) -> EngineConfig:
    return msgspec.structs.replace(
        config,
        tensor_parallel=1,
        pipeline_parallel=1,
        pipeline_nodes=1,
        expert_parallel=None,
        attention_data_parallel=False,
    )


@dataclass(frozen=True, slots=True)
class _Asked:
    """The cache key of `_outline_of`: a pipeline stage of a model.

    text: `repr` of `resolved`, which is compared instead, because `resolved` has no hash.
    """

    text: str
    resolved: "Resolved" = field(compare=False)
    stage: int


def _outline(resolved: "Resolved", stage: int = 0) -> "Model":
    return _outline_of(_Asked(repr(resolved), resolved, stage))


# Cached, because price lists have dozens of node types for the same configuration.
@lru_cache(maxsize=8)
def _outline_of(asked: _Asked) -> "Model":
    from engine.runner.memory import outline

    return outline(asked.resolved, asked.stage)


def check_quantization(model: ModelConfig, config: EngineConfig, kind: str) -> None:
    """Check that the engine supports the quantisation for a model on a kind of device.

    kind: "cuda" or "cpu".

    Raises ConfigError.
    """
    if config.quantization in ("auto", "none") and model.quantized is None:
        return
    from engine.quantization import registry  # imports torch

    registry.check_quantization(config.quantization, kind, model.quantized)
