"""plan(model, config, device) -> Plan: what an engine will do with its memory, without loading it.

Pure arithmetic over config.json; mirrors what engine/factory.py measures at the start.
"""

from dataclasses import dataclass, replace

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.model_config import ModelConfig

GIB = 1 << 30
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

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

_CUDA_CONTEXT = int(0.55 * GIB)  # driver context and libraries' workspaces
_CUDA_GRAPHS = 1 * GIB  # what the engine sets aside; twice as much with adapters
_CPU_PROCESS = int(0.7 * GIB)  # Python, torch and the other modules of one replica
_CPU_KV = 2 * GIB  # default on the CPU, or a quarter of the free memory
_LORA_HOST = 4 * GIB  # default of host memory for adapters, or a quarter of the free memory
_LORA_UNIT = 16  # ranks are filled up to multiples of it


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU of `memory` bytes, or a CPU machine with so much free."""

    name: str
    kind: str  # "cuda" or "cpu"
    memory: int  # bytes
    cores: int = 0  # of a CPU machine; 0 = unknown


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes in bytes."""

    device: Device
    dtype: str
    parameters: int
    weights: int
    request_rows: int
    activations: int
    adapters: int  # LoRA slots on a GPU; on the CPU, which has no second copy, the host's memory
    overhead: int  # CUDA context and graphs, or the Python process
    block_size: int
    block_bytes: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    replicas_per_node: int

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def kv_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def full_length_requests(self) -> float:
        """How many requests of max_model_len tokens fit at once."""
        return self.kv_tokens / self.max_model_len

    @property
    def used(self) -> int:
        fixed = self.weights + self.request_rows + self.activations + self.adapters
        return fixed + self.overhead + self.kv_bytes


def plan(
    model: ModelConfig, config: EngineConfig, device: Device, *, devices_per_node: int = 1
) -> Plan:
    """Raises ConfigError, with the bytes needed and the ways out, when the model does not fit."""
    cuda = device.kind == "cuda"
    if (config.max_model_len or 0) > model.max_positions:
        raise ConfigError(
            f"max_model_len {config.max_model_len} exceeds the model's {model.max_positions}",
            param="max_model_len",
        )
    max_model_len = config.max_model_len or model.max_positions
    dtype = config.dtype if config.dtype != "auto" else model.dtype if cuda else "bfloat16"
    width = BYTES[dtype]
    seqs = config.max_num_seqs or (1024 if cuda else 64)
    tokens = max(config.max_num_batched_tokens or (8192 if cuda else 512), seqs)
    parameters = model.num_parameters()
    weights = parameters * width
    blocks_per_row = -(-max_model_len // config.block_size)
    rows = 4 * (seqs + 1) * (max_model_len + 1 + blocks_per_row)
    activations = _activations(model, width, tokens, seqs)
    block_bytes = model.kv_bytes_per_token(width) * config.block_size
    adapters = 0
    if cuda:
        graphs = _CUDA_GRAPHS * (2 if config.max_loras else 1) if config.cuda_graphs else 0
        overhead = _CUDA_CONTEXT + graphs
        room = int(device.memory * config.memory_fraction)
        if config.max_loras:
            slot = width * lora_elements(model, config.max_lora_rank)
            virtual_token = width * model.hidden_size + model.kv_bytes_per_token(width)
            slot += config.max_virtual_tokens * virtual_token
            adapters = config.max_loras * slot + _lora_scratch(tokens, config.max_lora_rank)
    else:
        overhead = _CPU_PROCESS
        room = device.memory
        if config.max_loras:
            adapters = config.lora_host_bytes or min(_LORA_HOST, device.memory // 4)
    left = room - weights - rows - activations - adapters - overhead
    if config.num_blocks:
        num_blocks = config.num_blocks
    elif cuda:
        num_blocks = (config.kv_cache_bytes or left) // block_bytes
    else:
        num_blocks = (config.kv_cache_bytes or min(_CPU_KV, device.memory // 4)) // block_bytes
    needed = blocks_per_row * block_bytes
    if num_blocks < blocks_per_row or num_blocks * block_bytes > left:
        wanted = max(num_blocks, blocks_per_row) * block_bytes
        raise ConfigError(
            f"does not fit on {device.name}: {(room - left) / GIB:.2f} GiB for weights and "
            f"activations{f', {adapters / GIB:.2f} of them for adapters,' if adapters else ''} and "
            f"{wanted / GIB:.2f} GiB for KV (a request of max_model_len "
            f"{max_model_len} takes {needed / GIB:.2f} GiB), {room / GIB:.2f} GiB are there; "
            "lower max_model_len, lower max_num_seqs or max_num_batched_tokens"
            f"{', lower max_loras or max_lora_rank' if adapters else ''}, "
            "or take a larger device",
            param="max_model_len",
        )
    result = Plan(
        device=device,
        dtype=dtype,
        parameters=parameters,
        weights=weights,
        request_rows=rows,
        activations=activations,
        adapters=adapters,
        overhead=overhead,
        block_size=config.block_size,
        block_bytes=block_bytes,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        max_num_seqs=seqs,
        replicas_per_node=devices_per_node,
    )
    if cuda:
        return result
    by_memory = device.memory // result.used
    per_node = by_memory if not device.cores else min(by_memory, device.cores)
    return replace(result, replicas_per_node=max(1, per_node))


def lora_elements(model: ModelConfig, rank: int) -> int:
    """Of an adapter of this rank on every linear layer, which each slot has room for."""
    hidden, inter = model.hidden_size, model.intermediate_size
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    # A is [rank, in] and B [out, rank], of q, k, v, out, gate, up and down.
    sides = (hidden + q) + 2 * (hidden + kv) + (q + hidden) + 3 * (hidden + inter)
    return -(-rank // _LORA_UNIT) * _LORA_UNIT * model.num_layers * sides


def _lora_scratch(tokens: int, rank: int) -> int:
    """Bytes for the partial sums of the largest step; see kernels/lora.py."""
    try:
        from kernels.lora import partial_size
    except ImportError:  # no triton on this machine: a few MiB are left out
        return 0
    return 4 * int(partial_size(tokens, rank))


def _activations(model: ModelConfig, width: int, tokens: int, seqs: int) -> int:
    """The most that is alive at once in a step: inside an MLP, or at the logits."""
    qkv = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    attention = 2 * model.hidden_size + qkv + 2 * model.num_heads * model.head_dim
    mlp = 2 * model.hidden_size + 3 * model.intermediate_size
    layer = tokens * width * max(attention, mlp)
    logits = seqs * model.vocab_size * (width + 4)
    return layer + logits
