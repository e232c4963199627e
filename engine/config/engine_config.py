"""EngineConfig: all settings of one engine replica, with unit, default and reason.

It is frozen. `engine.resolve.resolve` decides the "auto", None and 0 values that do not depend on
loaded weights or free memory; the memory plan decides byte counts of 0.
"""

from typing import Literal, get_type_hints

import msgspec

from engine.config.quant_formats import LayerQuantization, Quantization
from engine.errors import ConfigError
from engine.sampling_params import LogprobsMode, read_defaults
from engine.speculation.settings import read_speculation
from engine.typecheck import fits, words

Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
KVDType = Literal["auto", "bf16", "fp8", "int8", "int4"]

BFLOAT16 = (8, 0)  # the minimum CUDA compute capability with bfloat16
NO_BFLOAT16 = "has no bfloat16, which begins at compute capability 8.0; set dtype: float16"


class _Hashable(dict[str, str | float | bool | None]):
    """A hashable dictionary, so that a frozen config with this field can be a cache key."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted(self.items())))


def ranks_said(tensor_parallel: int, pipeline_parallel: int, pipeline_nodes: int = 1) -> str:
    """Return the parallelism of an engine in words, for messages."""
    ranks_of = {"tensor_parallel": tensor_parallel, "pipeline_parallel": pipeline_parallel}
    ranks_text = " x ".join(f"{key} {ranks}" for key, ranks in ranks_of.items() if ranks > 1)
    if pipeline_nodes == 1:
        return ranks_text
    here = tensor_parallel * pipeline_parallel // pipeline_nodes
    return f"{ranks_text} on pipeline_nodes {pipeline_nodes}, {here} on each"


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of one engine.

    model: a local folder with config.json and safetensors; the caller makes such a folder of a
        .gguf file or a hub name.
    revision: the hub name's revision; the engine itself ignores it.
    device: "auto" takes a CUDA GPU if there is one.
    dtype: the type of weights and activations; "auto" = the checkpoint's on CUDA and bfloat16 on
        the CPU. GPUs below compute capability 8.0, such as a T4, have no bfloat16.
    quantization: "none" takes weights as the checkpoint has them, quantised ones included
        (docs/quantization.md), and dequantises a .gguf file, such as the default model, to 16 bits.
        "gguf" keeps the file's blocks: a third of the memory. "auto" is "gguf" for such a file
        where all replicas run on the CPU, dtype is "auto", deterministic is off and tensor_parallel
        is 1, else "none". The other values quantise 16-bit weights at load: the table below.
    quantization_layers: formats of single matrices: pattern of names -> format, as in
        {"*.down_proj": int8, lm_head: none}; the first match holds.
    kv_dtype: the type of cached keys and values: "auto" = dtype. "int8", "fp8" (e4m3, compute
        capability 8.9) and "int4" quantise them, for more tokens in the same memory. int4 loses the
        most accuracy, int8 the least. On the CPU attention is then much slower:
        docs/quantization.md.
    load_format: "auto" reads the checkpoint; "dummy" fills random weights from config.json alone
        (benchmarks).
    max_model_len: tokens a request may have, prompt and output; None = as many as the model's
        positions.
    rope_scaling: stretches rotary positions beyond those of the model, as config.json's
        rope_parameters do: {rope_type: yarn, factor: 4.0}; "yarn", "linear" and "llama3".
    max_num_batched_tokens: the token budget of a step; 0 = 8192 on CUDA, 512 on the CPU, and 2048
        for encoders on the CPU.
    max_num_seqs: requests running at once, i.e. slots of the device; 0 = 1024 on CUDA, 64 on the
        CPU; 128 and 32 for hybrid models.
    block_size: tokens per KV block. 16 wastes little and keeps tables short; 1 is token attention.
    allocation: "list" or "cumsum" (a mask on the device) gives a request blocks as it grows,
        "contiguous" a region of its whole length: docs/strategies.md.
    memory_fraction: share of device memory for weights, activations and KV together (CUDA).
    kv_cache_bytes: bytes for KV instead of a share; 0 = by memory_fraction on CUDA, and on the CPU
        the smaller of 2 GiB and a quarter of the free memory.
    num_blocks: KV blocks instead of bytes; 0 = as many as fit. For tests and comparisons.
    kv_memory: "growing" maps KV memory when requests need it, and gives unused memory to other
        engines of the device. It keeps kv_cache_bytes; 0 = memory for a request of max_model_len.
        docs/several-models.md.
    kv_shared_bytes: most KV bytes of all growing engines of a device together; 0 = as for one fixed
        engine alone.
    prefix_caching: reuse KV blocks of equal prefixes. A hybrid model finds a prefix up to a
        snapshot of its states.
    host_kv_bytes: host memory for KV blocks that leave the device's prefix cache, and come back on
        a hit; below 1 it is a share of the free memory, and 0 = none. docs/kv-tiers.md.
    host_kv_store: which blocks are copied to host memory: "reused", at their second use, or "all".
    disk_kv_bytes: most bytes of files with KV blocks, the tier below host memory, of all engines
        that use the folder together; 0 = none. docs/kv-tiers.md.
    disk_kv_folder: the folder of these files, an absolute path; below /dev/shm it is memory, which
        all replicas of the machine share. The files contain what users wrote.
    disk_kv_clear: delete these files when an engine starts or stops, unless others use the folder.
    disk_kv_key_file: a file with a key of 32 bytes that encrypts the files (AES-256-GCM); "" =
        none.
    kv_moves: whether replicas send each other KV blocks, through 256 MiB of host memory (64 on the
        CPU) and 1/128 of a GPU's memory. docs/kv-tiers.md.
    snapshot_bytes: bytes for snapshots of recurrent states, beside those in slots that no request
        has; 0 = a quarter of the memory that KV gets otherwise.
    images: "auto" takes images if the model sees them; "off" serves its text model alone.
    image_cache_tokens: image embeddings kept on the device, which also bounds the size of one
        image. 0 = 16384 on CUDA, 4096 on the CPU.
    async_scheduling: launch step n+1 before the tokens of n are known to the host; None = on CUDA.
    target_tpot_ms: the TPOT target: milliseconds between a request's tokens, which one step in a
        hundred may exceed. It bounds running requests and the prompt tokens beside them, by
        measured step times; 0 = no bound.
    cuda_graphs: capture whole steps as CUDA graphs (decodes, and mixed steps up to 2,048 tokens).
    graph_sizes: numbers of decodes to capture, up to max_num_seqs; empty = 1, 2, 4, then multiples
        of 8 up to 256, then of 32.
    admission: which waiting requests may start: "optimistic" when their prompts fit, preempting if
        memory runs out; the others never preempt. When to use which: docs/strategies.md.
    batching: "mixed" puts requests of all adapters into one step; "split" serves one adapter at a
        time. When to use which: docs/strategies.md.
    max_loras: adapters on the device at once; 0 = adapters are refused and cost nothing.
    max_lora_rank: the largest rank of one adapter, which each slot has room for.
    max_virtual_tokens: the most virtual tokens of one adapter (prompt tuning, p-tuning, prefix
        tuning); 0 = such adapters are refused and cost nothing.
    lora_host_bytes: host memory for adapters, those on the device included; 0 = the smaller of
        4 GiB and a quarter of the free memory.
    lora_disk_bytes: bytes of disk for adapters that came from object stores; 0 = the smaller of 16
        GiB and a quarter of the free space.
    lora_disk_folder: the folder of these adapters, an absolute path, shared by all engines of a
        user; "" = the machine's temporary folder.
    deterministic: a request's text and log-probabilities are the same bit by bit whatever else
        runs, and after a preemption; slower: docs/deterministic.md.
    logprobs_mode: log-probabilities of requests that name no mode: docs/rl.md#log-probabilities.
    num_threads: CPU threads of each rank's step; 0 = the process's share of cores, divided among
        the ranks, 2 on CUDA.
    numa: "bind" gives each rank a NUMA node of the machine, or a share of one: its cores and its
        memory. Needs device: cpu. "none" leaves both to the system. docs/parallel.md.
    tensor_parallel: ranks that divide heads, columns of matrices and the vocabulary. Each is a GPU
        of one machine, or a process on its CPU: docs/parallel.md.
    expert_parallel: with tensor_parallel, each rank has some experts of a mixture whole, instead of
        a part of each. None = where that is better: docs/parallel.md.
    attention_data_parallel: with tensor_parallel, data-parallel attention: each rank has attention
        whole, and keys and values of its own requests alone. num_blocks then counts blocks of each
        rank. docs/parallel.md.
    pipeline_parallel: stages that divide the layers, with their weights and KV. Each has
        tensor_parallel GPUs of one machine, or processes on its CPU: docs/parallel.md.
    pipeline_nodes: nodes of a Ray cluster that the stages of pipeline_parallel are on, equally many
        on each. docs/parallel.md.
    sleep_in_host_memory: the engine can sleep: its weights are then in host memory, and the device
        holds neither weights nor caches. docs/several-models.md, docs/rl.md.
    seed: gives each request without a seed one made of this seed and its prompt: the same request
        then has the same text from any router and replica. None = each request draws a seed. It is
        also the seed of random weights, where None is 0.
    gpu_capability: run what a GPU of this older compute capability would (7.5, 8.0, 8.6, 8.9, 9.0),
        without later features and within its shared memory. For tests and comparisons. None = the
        GPU's own.
    generation_config: "auto" takes what a request leaves out of temperature, top_p, top_k, min_p
        and repetition_penalty from the model's generation_config.json; "none" takes OpenAI's
        defaults. A mapping such as {temperature: 0.6} overrides the file's values.
    speculation: drafts of next tokens, which a step verifies together: fewer steps, the same text.
        "auto" drafts what followed the same tokens before, where measured step times gain by it;
        "off" never drafts. A mapping names a method, such as {method: eagle3, model: FOLDER}:
        docs/speculation.md.
    log_level: "debug" logs a line when a request is queued and when it has ended.
    """

    model: str
    revision: str | None = None
    device: Device = "auto"
    dtype: DType = "auto"
    quantization: Quantization = "auto"
    quantization_layers: dict[str, LayerQuantization] | None = None
    kv_dtype: KVDType = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    max_model_len: int | None = None
    rope_scaling: dict[str, str | float | bool] | None = None
    max_num_batched_tokens: int = 0
    max_num_seqs: int = 0
    block_size: int = 16
    allocation: Literal["list", "cumsum", "contiguous"] = "list"
    memory_fraction: float = 0.9
    kv_cache_bytes: int = 0
    num_blocks: int = 0
    kv_memory: Literal["fixed", "growing"] = "fixed"
    kv_shared_bytes: int = 0
    prefix_caching: bool = True
    host_kv_bytes: float = 0.0
    host_kv_store: Literal["reused", "all"] = "reused"
    disk_kv_bytes: int = 0
    disk_kv_folder: str = ""
    disk_kv_clear: bool = False
    disk_kv_key_file: str = ""
    kv_moves: bool = False
    snapshot_bytes: int = 0
    images: Literal["auto", "off"] = "auto"
    image_cache_tokens: int = 0
    async_scheduling: bool | None = None
    target_tpot_ms: float = 0.0
    cuda_graphs: bool = True
    graph_sizes: tuple[int, ...] = ()
    admission: Literal["optimistic", "sum", "reserved", "peak"] = "optimistic"
    batching: Literal["mixed", "split"] = "mixed"
    max_loras: int = 0
    max_lora_rank: int = 64
    max_virtual_tokens: int = 0
    lora_host_bytes: int = 0
    lora_disk_bytes: int = 0
    lora_disk_folder: str = ""
    deterministic: bool = False
    logprobs_mode: LogprobsMode = "raw_logprobs"
    num_threads: int = 0
    numa: Literal["none", "bind"] = "none"
    tensor_parallel: int = 1
    expert_parallel: bool | None = None
    attention_data_parallel: bool = False
    pipeline_parallel: int = 1
    pipeline_nodes: int = 1
    sleep_in_host_memory: bool = False
    seed: int | None = None
    gpu_capability: float | None = None
    generation_config: Literal["auto", "none"] | dict[str, int | float] = "auto"
    speculation: str | bool | dict[str, str | int | float | bool | None] = "off"
    log_level: Literal["info", "debug"] = "info"

    @property
    def num_ranks(self) -> int:
        """The number of ranks of one engine: processes, and on GPUs devices."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def ranks_per_node(self) -> int:
        """The number of ranks on one node, which are consecutive."""
        return self.num_ranks // self.pipeline_nodes

    @property
    def stages_per_node(self) -> int:
        return self.pipeline_parallel // self.pipeline_nodes

    @property
    def ranks_key(self) -> str:
        """The setting to name in messages about ranks: pipeline_parallel if above 1, else
        tensor_parallel."""
        return "pipeline_parallel" if self.pipeline_parallel > 1 else "tensor_parallel"

    @property
    def ranks_said(self) -> str:
        """The parallelism of the engine in words; see the function `ranks_said`."""
        return ranks_said(self.tensor_parallel, self.pipeline_parallel, self.pipeline_nodes)

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(EngineConfig).items():
            value = getattr(self, name)
            if not fits(value, kind):
                raise ConfigError(
                    f"{name} must be {words(kind)}, got {repr(value)[:64]}", param=name
                )
        msgspec.structs.force_setattr(self, "graph_sizes", tuple(self.graph_sizes))
        if self.rope_scaling is not None:
            msgspec.structs.force_setattr(self, "rope_scaling", _Hashable(self.rope_scaling))
        read_speculation(self.speculation)  # checks the setting; raises ConfigError
        if isinstance(self.speculation, dict):
            msgspec.structs.force_setattr(self, "speculation", _Hashable(self.speculation))
        if isinstance(self.generation_config, dict):
            msgspec.structs.force_setattr(
                self, "generation_config", _Hashable(read_defaults(self.generation_config))
            )
        if self.block_size < 1 or self.block_size > 256:
            raise ConfigError(
                f"block_size must be 1..256, got {self.block_size}", param="block_size"
            )
        if not 0.05 <= self.memory_fraction <= 0.98:
            raise ConfigError(
                f"memory_fraction must be in [0.05, 0.98], got {self.memory_fraction}",
                param="memory_fraction",
            )
        for name in (
            "max_num_batched_tokens",
            "max_num_seqs",
            "kv_cache_bytes",
            "num_blocks",
            "kv_shared_bytes",
            "host_kv_bytes",
            "disk_kv_bytes",
            "snapshot_bytes",
            "image_cache_tokens",
            "num_threads",
            "max_loras",
            "max_virtual_tokens",
            "lora_host_bytes",
            "lora_disk_bytes",
            "target_tpot_ms",
        ):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative", param=name)
        for name in ("tensor_parallel", "pipeline_parallel", "pipeline_nodes"):
            if not 1 <= getattr(self, name) <= 64:
                raise ConfigError(f"{name} must be 1..64, got {getattr(self, name)}", param=name)
        if self.pipeline_parallel % self.pipeline_nodes:
            raise ConfigError(
                f"pipeline_nodes: {self.pipeline_nodes} nodes cannot have equally many of "
                f"pipeline_parallel {self.pipeline_parallel} stages; set pipeline_parallel to a "
                "multiple of it, or lower it",
                param="pipeline_nodes",
            )
        if self.numa == "bind" and self.device != "cpu":
            raise ConfigError(
                f"numa: bind is of engines on the CPU, and device is {self.device}; set device: "
                "cpu, or numa under pools.cpu.engine alone",
                param="numa",
            )
        if self.kv_shared_bytes and self.kv_memory != "growing":
            raise ConfigError(
                "kv_shared_bytes: only KV memory that grows is shared; set kv_memory: growing, or "
                "leave it out",
                param="kv_shared_bytes",
            )
        if self.allocation == "contiguous" and self.prefix_caching:
            raise ConfigError(
                "allocation: contiguous gives each request a region of its own, so that no prefix "
                "is shared; set prefix_caching: false, or leave allocation out",
                param="allocation",
            )
        if self.allocation == "contiguous" and self.admission != "optimistic":
            raise ConfigError(
                "allocation: contiguous admits what a gap fits, and admission is "
                f"{self.admission}; leave one of them out",
                param="allocation",
            )
        if self.expert_parallel and self.tensor_parallel == 1:
            raise ConfigError(
                "expert_parallel: experts are spread over the ranks of tensor_parallel, which is "
                "1; raise that, or leave this out",
                param="expert_parallel",
            )
        if self.attention_data_parallel and self.tensor_parallel == 1:
            raise ConfigError(
                "attention_data_parallel: requests are divided among the ranks of tensor_parallel, "
                "which is 1; raise that, or leave this out",
                param="attention_data_parallel",
            )
        if self.attention_data_parallel and self.pipeline_parallel > 1:
            raise ConfigError(
                "attention_data_parallel: is not supported together with pipeline_parallel "
                f"{self.pipeline_parallel}; leave one of them out",
                param="attention_data_parallel",
            )
        if not 1 <= self.max_lora_rank <= 256:
            raise ConfigError(
                f"max_lora_rank must be 1..256, got {self.max_lora_rank}", param="max_lora_rank"
            )
        if self.disk_kv_bytes and not self.host_kv_bytes:
            raise ConfigError(
                "disk_kv_bytes: files are written from the host tier, and read into it; set "
                "host_kv_bytes too",
                param="disk_kv_bytes",
            )
        for name in ("disk_kv_folder", "disk_kv_clear", "disk_kv_key_file"):
            if getattr(self, name) and not self.disk_kv_bytes:
                raise ConfigError(
                    f"{name}: nothing is kept on disk without disk_kv_bytes; set it, or leave "
                    f"{name} out",
                    param=name,
                )
        if self.disk_kv_bytes and not self.disk_kv_folder.startswith("/"):
            raise ConfigError(
                "disk_kv_folder must be an absolute path where disk_kv_bytes is set, got "
                f"{self.disk_kv_folder!r}",
                param="disk_kv_folder",
            )
        if self.lora_disk_folder and not self.lora_disk_folder.startswith("/"):
            raise ConfigError(
                f"lora_disk_folder must be an absolute path, got {self.lora_disk_folder!r}",
                param="lora_disk_folder",
            )
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError("max_model_len must be at least 2", param="max_model_len")
