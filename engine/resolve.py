"""Resolves automatic settings before anything is loaded: device, dtype, step limits, threads,
speculation. `engine.runner.memory` resolves byte counts of 0 later.
"""

import logging
import os
from dataclasses import dataclass, replace
from itertools import combinations
from math import gcd
from pathlib import Path

import torch

from engine.config.engine_config import BFLOAT16, NO_BFLOAT16, EngineConfig
from engine.config.feature_checks import (
    check_capability,
    check_drafter,
    check_growth,
    check_images,
    check_regions,
    check_tiers,
)
from engine.config.kv_groups import kv_groups
from engine.config.model_config import ModelConfig, no_folder
from engine.config.rank_checks import (
    check_data_parallel_attention,
    check_ranks,
    check_stages,
    spreads_experts,
)
from engine.errors import ConfigError
from engine.speculation.settings import (
    SpeculationSettings,
    check_speculation,
    read_speculation,
)
from kernels.kv.format import FORMATS, KVFormat
from kernels.launch.device import LEAST, SHARED_MEMORY, Capability
from kernels.packed import FLOAT8

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Default max_num_seqs for recurrent models, where each request has states of dozens of MiB.
_ROWS_OF_STATES = {"cuda": 128, "cpu": 32}
# Number of decodes whose updates of a delta-rule state are kept pending, on CUDA. With states of
# 128 x 128 float32 numbers, each pending update reads 1 KiB a head and saves writing 64 KiB.
_PENDING_UPDATES = 3
_ALIKE = 0.95  # minimum ratio of the memory of two GPUs that count as equal
# default maximum number of image embeddings on the device
_IMAGE_TOKENS = {"cuda": 16384, "cpu": 4096}
_CUDA_THREADS = 2  # number of torch's CPU threads on a GPU


logger = logging.getLogger("manta.engine")


@dataclass(frozen=True, slots=True)
class Resolved:
    """The settings of an engine, with all automatic values decided."""

    config: EngineConfig
    folder: Path
    model: ModelConfig
    device: torch.device
    dtype: torch.dtype
    kv: KVFormat
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    num_threads: int
    async_scheduling: bool
    speculation: SpeculationSettings | None  # None = no step has drafts

    @property
    def ranks(self) -> int:
        """The number of ranks that divide each layer."""
        return self.config.tensor_parallel

    @property
    def head_ranks(self) -> int:
        """The number of ranks that divide attention heads."""
        return self.ranks // self.kv_ranks

    @property
    def kv_ranks(self) -> int:
        """The number of ranks among which requests and their KV are divided (data-parallel
        attention)."""
        return self.ranks if self.config.attention_data_parallel else 1

    @property
    def stages(self) -> int:
        return self.config.pipeline_parallel

    @property
    def captures(self) -> bool:
        """Whether steps are captured as CUDA graphs."""
        wanted = self.device.type == "cuda" and self.config.cuda_graphs
        return wanted and not self.model.whole_texts

    @property
    def image_cache_tokens(self) -> int:
        """The maximum number of image embeddings on the device; 0 = the engine takes no images."""
        if self.model.vision is None:
            return 0
        return self.config.image_cache_tokens or _IMAGE_TOKENS[self.device.type]

    @property
    def encodes_ahead(self) -> bool:
        """Whether images for later steps are encoded in parallel to steps with decodes."""
        beside = self.device.type == "cuda" and self.async_scheduling
        return beside and self.model.vision is not None

    @property
    def spread_experts(self) -> bool:
        return spreads_experts(self.model, self.ranks, self.config.expert_parallel)

    @property
    def ranks_here(self) -> int:
        """The number of ranks that share this device's memory."""
        return 1 if self.device.type == "cuda" else self.config.ranks_per_node


def resolve(config: EngineConfig, rank: int = 0) -> Resolved:
    """Resolve a configuration for this machine; of the model only config.json is read.

    rank: the rank of this process.
    Raises ConfigError naming the key at fault.
    """
    folder = Path(config.model)
    if not folder.is_dir():
        raise no_folder(folder)
    model = ModelConfig.from_folder(folder, config.rope_scaling)
    device = _device(config, rank)
    if device.type == "cpu":
        resolved, cores = decide(config, model, device), len(os.sched_getaffinity(0))
        if config.numa == "none" and config.ranks_per_node > cores:
            raise ConfigError(
                f"{config.ranks_said}: so many ranks on the CPU need as many cores, "
                f"and this process may use {cores}; lower it",
                param=config.ranks_key,
            )
        return resolved
    name = torch.cuda.get_device_name(device)
    able = acting(config, name, torch.cuda.get_device_capability(device))
    return decide(config, model, device, name, able)


def acting(config: EngineConfig, name: str, own: Capability) -> Capability:
    """Return the compute capability for which kernels are chosen: `gpu_capability` if it is set.

    name: the GPU's name, for messages.
    own: the GPU's compute capability.

    Raises ConfigError if kernels do not compile for `gpu_capability`, or it exceeds the GPU's own.
    """
    if config.gpu_capability is None:
        return own
    tenths = round(10 * config.gpu_capability)
    wanted = divmod(tenths, 10)
    known = [capability for capability in SHARED_MEMORY if LEAST <= capability <= own]
    if wanted not in known or wanted[0] > own[0]:
        raise ConfigError(
            f"gpu_capability: {config.gpu_capability:g} is not one that {name} can act as; give "
            f"one of {', '.join(f'{major}.{minor}' for major, minor in known)}, or leave it out",
            param="gpu_capability",
        )
    return wanted


def decide(
    config: EngineConfig,
    model: ModelConfig,
    device: torch.device,
    name: str = "",
    capability: tuple[int, int] | None = None,
) -> Resolved:
    """Resolve a configuration for a device that need not be present.

    name: the device's name, for messages.
    capability: the GPU's compute capability; None = any, so no setting is refused for lack of it.
    """
    cuda = device.type == "cuda"
    if capability is not None:
        if capability < LEAST:
            raise ConfigError(
                f"device: {name} has compute capability {capability[0]}.{capability[1]}, for which "
                f"the assembler makes no code; use device: cpu, or a GPU of {LEAST[0]}.{LEAST[1]} "
                "(T4, RTX 20) or later",
                param="device",
            )
        for quantization in {config.quantization, *(config.quantization_layers or {}).values()}:
            check_capability(quantization, name, capability)

    if config.images == "off":
        model = replace(model, vision=None)
    check_images(config, model, cuda)
    check_regions(config, model)

    def without(least: tuple[int, int]) -> str | None:
        return None if capability is None or capability >= least else name

    data_parallel_attention = config.attention_data_parallel
    if data_parallel_attention:
        check_data_parallel_attention(model)
    check_ranks(model, config.tensor_parallel, config.expert_parallel, data_parallel_attention)
    check_stages(model, config.pipeline_parallel)
    if cuda and config.deterministic and any(layer.latent for layer in model.attention):
        raise ConfigError(
            f"deterministic: {model.architecture} has latent attention, whose CUDA kernels split "
            "keys by what else runs; leave it out, or use device: cpu",
            param="deterministic",
        )
    max_model_len = model.max_positions
    if config.max_model_len is not None:
        if config.max_model_len > model.max_positions:
            raise ConfigError(
                f"max_model_len {config.max_model_len} exceeds the model's "
                f"{model.max_positions} positions; lower it, or stretch them: rope_scaling: "
                f"{{rope_type: yarn, factor: {-(-config.max_model_len // model.max_positions)}}}",
                param="max_model_len",
            )
        max_model_len = config.max_model_len
    check_tiers(config, model)
    check_growth(config, model)
    check_drafter(config, model.within(max_model_len))
    most = (1024 if cuda else 64) if not model.recurrent else _ROWS_OF_STATES[device.type]
    max_num_seqs = config.max_num_seqs or most
    if config.graph_sizes and max(config.graph_sizes) > max_num_seqs:
        raise ConfigError(
            f"graph_sizes: {max(config.graph_sizes)} is more than can run at once; leave it out or "
            f"raise max_num_seqs, which is {max_num_seqs}",
            param="graph_sizes",
        )
    # Encoders have no decodes that a long step would delay, and larger steps amortise launch costs.
    on_cpu = 2048 if model.whole_texts else 512
    budget = 8192 if cuda else on_cpu
    if model.vision is not None and model.vision.bidirectional:
        budget = max(budget, model.vision.largest + max_num_seqs)
    budget = config.max_num_batched_tokens or budget
    if model.whole_texts:
        budget = max(budget, max_model_len)
    budget = max(budget, max_num_seqs)  # each running request decodes one token in every step
    dtype = _dtype(config, model, cuda, without(BFLOAT16))
    # Results depend on how many updates of a delta-rule state are pending, so deterministic mode
    # keeps none.
    pending = _PENDING_UPDATES if cuda and not config.deterministic else 0
    return Resolved(
        config=config,
        folder=Path(config.model),
        # Tables of positions, and the scaling of rope, are made for the longest possible text.
        model=model.within(max_model_len).with_pending_updates(pending),
        device=device,
        dtype=dtype,
        kv=_kv_format(config, model, dtype, cuda, without(FLOAT8)),
        max_model_len=max_model_len,
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        num_threads=config.num_threads or _threads(config, cuda),
        async_scheduling=cuda if config.async_scheduling is None else config.async_scheduling,
        speculation=check_speculation(
            read_speculation(config.speculation),
            generates=model.generates,
            stages=config.pipeline_parallel,
            admission=config.admission,
            most=min(max_num_seqs, budget),
        ),
    )


def _device(config: EngineConfig, rank: int) -> torch.device:
    if config.device == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        if config.num_ranks == 1:
            return torch.device("cuda", torch.cuda.current_device())
        count = torch.cuda.device_count()
        if config.ranks_per_node > count:
            raise ConfigError(
                f"{config.ranks_said}: so many ranks need as many GPUs, and this "
                f"process sees {count}; lower it, or give the replica more (num_gpus)",
                param=config.ranks_key,
            )
        number = rank % config.ranks_per_node
        if not number:
            _check_devices(config)
        return torch.device("cuda", number)
    if config.device == "cuda":
        raise ConfigError(
            "device: cuda was asked for and torch sees no CUDA device; use device: cpu, or check "
            "the driver with `manta doctor`",
            param="device",
        )
    return torch.device("cpu")


def _check_devices(config: EngineConfig) -> None:
    """Check that the GPUs of this node's ranks are of one kind. Raises ConfigError if not.

    Otherwise the slowest GPU would limit every step, and the smallest the KV cache.
    """
    of_ranks = range(config.ranks_per_node)
    kinds = [torch.cuda.get_device_properties(number) for number in of_ranks]
    for number, kind in enumerate(kinds):
        least, most = sorted((kinds[0].total_memory, kind.total_memory))
        if kind.name != kinds[0].name or least < _ALIKE * most:
            raise ConfigError(
                f"{config.ranks_said}: ranks need GPUs of one kind, and GPU 0 is "
                f"{kinds[0].name} with {kinds[0].total_memory / 2**30:.0f} GiB, GPU {number} "
                f"{kind.name} with {kind.total_memory / 2**30:.0f} GiB; lower it, or choose others "
                "with CUDA_VISIBLE_DEVICES",
                param=config.ranks_key,
            )
    apart = [
        (gpu, other)
        for gpu, other in combinations(of_ranks, 2)
        if not torch.cuda.can_device_access_peer(gpu, other)
    ]
    if apart:
        logger.warning(
            "GPUs %s have no peer access to each other: what ranks send goes through host memory, "
            "slowly. Ways out: GPUs of one NVLink or PCIe switch (`nvidia-smi topo -m`), or "
            "pipeline_parallel, which sends less",
            ", ".join(f"{gpu} and {other}" for gpu, other in apart),
        )


def _threads(config: EngineConfig, cuda: bool) -> int:
    if cuda:
        return _CUDA_THREADS
    cores = len(os.sched_getaffinity(0))
    # A process bound to cores sees only its own share of them.
    return cores if config.numa == "bind" else max(1, cores // config.ranks_per_node)


def _dtype(
    config: EngineConfig, model: ModelConfig, cuda: bool, without_bfloat16: str | None
) -> torch.dtype:
    if not cuda:
        # bfloat16 halves the bytes that a decode step reads, and oneDNN has kernels for it on x86.
        return DTYPES.get(config.dtype, torch.bfloat16)
    dtype = DTYPES.get(model.dtype if config.dtype == "auto" else config.dtype, torch.bfloat16)
    if dtype is torch.bfloat16 and without_bfloat16 is not None:
        raise ConfigError(f"{without_bfloat16} {NO_BFLOAT16}", param="dtype")
    return dtype


def _kv_format(
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    cuda: bool,
    without_float8: str | None,
) -> KVFormat:
    name = config.kv_dtype
    if name == "bf16" and dtype is not torch.bfloat16:
        raise ConfigError(
            f"kv_dtype: bf16 is the type of keys and values where dtype is bfloat16, which is "
            f"{str(dtype).removeprefix('torch.')} here; leave kv_dtype out, or set dtype",
            param="kv_dtype",
        )
    if name not in FORMATS:
        return KVFormat(bits=8 * dtype.itemsize)
    if model.whole_texts:
        raise ConfigError(
            f"kv_dtype: {name} is of cached keys and values, and {model.architecture} keeps none; "
            "leave it out",
            param="kv_dtype",
        )
    if name == "fp8" and without_float8 is not None:
        raise ConfigError(
            f"kv_dtype: {without_float8} has no 8-bit floats, which begin at compute capability "
            "8.9; int8 keeps as many tokens",
            param="kv_dtype",
        )
    if any(layer.latent for layer in model.attention):
        raise ConfigError(
            f"kv_dtype: {name} is of keys and values, and {model.architecture} keeps latents, "
            "which are as small as that already; leave it out",
            param="kv_dtype",
        )
    head_shapes = {layer.kept for layer in model.attention if layer.attends}
    if len(head_shapes) > 1 or kv_groups(model).borrowed:
        raise ConfigError(
            f"kv_dtype: {name} is not supported where layers have other heads than others, or read "
            f"the keys of others, as {model.architecture}'s do; leave it out",
            param="kv_dtype",
        )
    for layer in model.attention:
        if not layer.attends:
            continue
        if layer.kept[1] % 4:
            raise ConfigError(
                f"kv_dtype: {name} needs heads of a multiple of 4 elements, and "
                f"{model.architecture} has {layer.kept[1]}; leave it out",
                param="kv_dtype",
            )
    form = kv_form(model, name)
    if cuda and form.hadamard % 2:
        raise ConfigError(
            f"kv_dtype: int4 needs heads whose rotated halves have an even number of elements on "
            f"CUDA, which {model.architecture} has not; int8 does not, and the CPU does not",
            param="kv_dtype",
        )
    # Kernels read a scale and an offset as one 32-bit word.
    odd = [layer.kept[1] for layer in model.attention if layer.attends and layer.kept[1] % 8]
    if cuda and form.name == "int4" and config.block_size % 2 and odd:
        raise ConfigError(
            f"kv_dtype: int4 needs an even block_size on CUDA where heads have {odd[0]} elements, "
            f"no multiple of 8, and block_size is {config.block_size}; give an even one, or int8",
            param="kv_dtype",
        )
    return form


def kv_form(model: ModelConfig, name: str) -> KVFormat:
    """Return the KV format with a name in FORMATS, for the sizes of this model's layers."""
    form = FORMATS[name]
    return replace(form, hadamard=_hadamard(model)) if name == "int4" else form


def _hadamard(model: ModelConfig) -> int:
    """Return the block size of the Hadamard transform of queries and keys.

    The block size is the largest power of two that divides the parts of a head that kernels
    transform. The parts are the two halves of the rotary elements, and the other elements.
    """
    pieces = 0
    for layer in model.attention:
        if not layer.attends:
            continue
        dim = layer.kept[1]
        rotary = (layer.rope.dim if layer.rope is not None else 0) or dim
        pieces = gcd(pieces, rotary // 2, dim - rotary)
    return pieces & -pieces
