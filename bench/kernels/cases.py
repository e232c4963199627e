"""The cases of measure.py: every kernel at llama-8b's sizes, attention also at other sizes."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bench.kernels import lora as bench_lora
from bench.kernels.measure import OPERATIONS, Calls, KernelWork, copies_for
from bench.kernels.mixers import mixer_cases
from bench.kernels.sampling import sampling_cases
from bench.kernels.sizes import LLAMA, Sizes, meta_of
from kernels.attention.inputs import AttentionInputs
from kernels.attention.prefill import attention_prefill
from kernels.batch import apply_updates, assemble
from kernels.dispatch import kernels_for
from kernels.gemm.deterministic import linear_fixed
from kernels.gemm.gated import gated, plan_of
from kernels.gemm.packed.few import TOKENS as FEW
from kernels.gemm.packed.few import packed_few
from kernels.gemm.packed.gemv4 import gemv4
from kernels.gemm.packed.gemv8 import gemv8
from kernels.gemm.packed.mma4 import mma4
from kernels.gemm.packed.round_rows import E4M3, round_rows
from kernels.kv.format import FORMATS
from kernels.kv.inputs import RopeInputs
from kernels.kv.quantized import Cache, QuantizedKV
from kernels.launch.pdl import num_sms
from kernels.lora import lora_add, lora_gated
from kernels.metadata import AttentionMeta, RotaryPlaces
from kernels.packed import E2M1, Format, PackedWeight

Make = Callable[[], KernelWork]
cuda = kernels_for("cuda")


# Case of decode attention -> (KV lengths of the requests, target share of copy bandwidth).
DECODES: dict[str, tuple[list[int], float | None]] = {
    "64 x 4096": ([4096] * 64, 0.9),
    "256 x 1024": ([1024] * 256, 0.9),
    "16 x 1024": ([1024] * 16, 0.7),
    "1 x 32768": ([32768], 0.7),
    "256 x 512": ([512] * 256, None),
    "1 x 1024": ([1024], None),
    "256 x 100..1948": ([100 + 1848 * i // 255 for i in range(256)], None),
    "32768 + 31 x 1024": ([32768] + [1024] * 31, None),
}
# Name of DECODES that is measured with a quantised KV cache -> target for fp8.
CODED: dict[str, float | None] = {
    "64 x 4096": 0.85,
    "256 x 1024": 0.85,
    "16 x 1024": None,
    "1 x 32768": None,
    "256 x 512": None,
}
# Case of prefill attention -> (KV lengths, query lengths) of the requests.
PREFILLS = {
    "8 x 1024": ([1024] * 8, [1024] * 8),
    "4 x 2048": ([2048] * 4, [2048] * 4),
    "2048 after 6144": ([8192], [2048]),
    "64 x 128": ([128] * 64, [128] * 64),
}
# Case of a vision tower -> (patches of each picture, elements of each of the tower's 16 heads).
TOWERS = {
    "64 x 1040/heads of 72": ([1040] * 64, 72),
    "1 x 8160/heads of 72": ([8160], 72),
    "16 x 1024/heads of 64": ([1024] * 16, 64),
}
FAST = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
PREFILL_TARGET = 0.95  # share of FlashAttention 3's rate
# Prompts that are also computed by attention libraries: number of keys, and heads if not the
# model's.
PROMPTS = {
    "1 x 2048": (2048, {}),
    "1 x 32768": (32768, {}),
    "1 x 8192/16 and 8 heads of 256": (8192, {"heads": 16, "kv_heads": 8, "dim": 256}),
    "1 x 8192": (8192, {}),
}
# GEMM -> (outputs, inputs, numbers of rows of x).
# Sizes of the MLPs of llama-8b, llama-3b and qwen3-14b: outputs of gate and up, inputs.
GATED = {"8b": (28672, 4096), "3b": (16384, 3072), "14b": (34816, 5120)}
LINEARS = {
    "8b qkv": ((6144, 4096), (1, 2, 64, 128, 256, 512)),
    "8b o": ((4096, 4096), (1, 2, 64, 128, 256, 512)),
    "8b gate_up": ((28672, 4096), (1, 2, 64, 128, 256, 512)),
    "8b down": ((4096, 14336), (1, 2, 64, 128, 256, 512)),
    "8b lm_head": ((128256, 4096), (1, 256)),
    "0.6b gate_up": ((6144, 1024), (1, 2, 4)),
    "0.6b down": ((1024, 3072), (1, 2, 4)),
}


def caches(s: Sizes, count: int, num_blocks: int, block_size: int) -> list[tuple[Cache, Cache]]:
    shape = (num_blocks, s.kv_heads, block_size, s.dim)
    if s.kv:
        return [(codes(s, shape), codes(s, shape)) for _ in range(count)]
    return [(s.random(*shape), s.random(*shape)) for _ in range(count)]


def codes(s: Sizes, shape: tuple[int, int, int, int]) -> QuantizedKV:
    """Make a random quantised KV cache, whose elements are below 1."""
    form = FORMATS[s.kv]
    if form.name == "int4":
        form = replace(form, hadamard=s.dim // 2)
    cache = QuantizedKV.empty(form, shape, s.device)
    raw = cache.codes.view(torch.uint8)
    raw.copy_(torch.randint_like(raw, 127 if s.kv == "fp8" else 256))  # 127 is e4m3's NaN
    cache.numbers.fill_(2.0**-8)
    return cache


def kv_bytes(s: Sizes, tokens: int) -> float:
    """Return the bytes of keys, values and scales of this many tokens."""
    if s.kv:
        return 2.0 * tokens * FORMATS[s.kv].token_bytes(s.kv_heads, s.dim)
    return 2.0 * tokens * s.kv_heads * s.dim * s.dtype.itemsize


def decode(s: Sizes, kv_len: list[int], block_size: int, target: float | None) -> KernelWork:
    num_bytes = kv_bytes(s, sum(kv_len))
    meta, num_blocks = meta_of(s, kv_len, [1] * len(kv_len), len(kv_len), block_size)
    kv = caches(s, copies_for(num_bytes), num_blocks, block_size)
    cuda.prepare(meta, s.heads, kv[0][0])
    # Another kernel must run between plan and attention, as in a model, because attention reads the
    # plan before gdc_wait (kernels/launch/pdl.py).
    q = s.random(len(kv_len), s.heads, s.dim)
    calls = [partial(cuda.attention, AttentionInputs(q, k, v, s.dim**-0.5), meta) for k, v in kv]
    return KernelWork(calls, num_bytes, target=target)


# (q, k_cache, v_cache, meta) -> a function that computes the attention with a library
Library = Callable[[Tensor, Cache, Cache, AttentionMeta], Callable[[], object]]


def prefill(
    s: Sizes,
    kv_len: list[int],
    query_len: list[int],
    target: float | None = None,
    libraries: dict[str, Library] | None = None,
) -> KernelWork:
    """Make a case of prefill attention.

    target: the target share of the peer's speed.
    libraries: peers for a single prompt without a prefix.
    """
    meta, num_blocks = meta_of(s, kv_len, query_len, 0, 16)
    seen = sum(m * (n - m) + m * (m + 1) // 2 for n, m in zip(kv_len, query_len, strict=True))
    q = s.random(sum(query_len), s.heads, s.dim)
    kv = caches(s, 2, num_blocks, 16)
    cuda.prepare(meta, s.heads, kv[0][0])
    calls = [partial(cuda.attention, AttentionInputs(q, k, v, s.dim**-0.5), meta) for k, v in kv]
    others: dict[str, Calls] = {
        name: [make(q, k, v, meta) for k, v in kv] for name, make in (libraries or {}).items()
    }
    work = 4.0 * seen * s.heads * s.dim
    return KernelWork(calls, work, OPERATIONS, target, next(iter(others), ""), others)


def tower(s: Sizes, lengths: list[int], dim: int) -> KernelWork:
    """Make a case of a vision tower's rotary embedding and attention over whole pictures."""
    tokens, heads = sum(lengths), 16
    qkv = [s.random(tokens, 3 * heads * dim) for _ in range(2)]
    starts = s.ints([0, *accumulate(lengths)])
    none = s.ints([])
    places = RotaryPlaces(s.ints([*range(tokens)]), s.random(tokens, dim).float())
    meta = AttentionMeta(none, none, starts, none, none, 0, max(lengths), rotary=places)
    calls = [
        partial(cuda.whole_texts, x, places.table, heads, dim**-0.5, 0, meta, s.dtype) for x in qkv
    ]
    return KernelWork(calls, 4.0 * heads * dim * sum(n * n for n in lengths), OPERATIONS)


def torch_attention(backend: SDPBackend) -> Library:
    """Return torch's attention with a backend, as a Library.

    Keys are contiguous, with one KV head per query head, which is fastest for a library.
    """

    def make(
        q: Tensor, k_cache: Cache, v_cache: Cache, meta: AttentionMeta
    ) -> Callable[[], object]:
        query = q.transpose(0, 1)[None].contiguous()
        key, value = torch.randn_like(query), torch.randn_like(query)

        def call() -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(query, key, value, is_causal=True)

        return call

    return make


def any_gpus_attention(
    q: Tensor, k_cache: Cache, v_cache: Cache, meta: AttentionMeta
) -> Callable[[], object]:
    """Return a call of the prefill kernel for all GPUs, instead of Hopper's kernel."""
    out = torch.empty_like(q)
    inputs = AttentionInputs(q, k_cache, v_cache, q.shape[2] ** -0.5)
    return partial(attention_prefill, inputs, meta, out)


def linear(s: Sizes, size: int, width: int, rows: int) -> KernelWork:
    """Make a case of a 16-bit GEMM, tuned for this number of rows as at an engine's start."""
    num_bytes = size * width * s.dtype.itemsize
    weights = [s.random(size, width) for _ in range(copies_for(num_bytes) + 1)]
    x = s.random(rows, width)
    cuda.tune_linear(weights, [rows], add=False)
    ours = [partial(cuda.linear, x, w, None) for w in weights]
    library = [partial(torch.nn.functional.linear, x, w) for w in weights]
    return KernelWork(ours, num_bytes, against="cublas", libraries={"cublas": library})


def gated_linear(s: Sizes, size: int, width: int, rows: int) -> KernelWork:
    """Make a case of an MLP's gated GEMM, beside a tuned GEMM and an activation kernel.

    size: outputs of gate and up together.
    """
    operations = 2.0 * rows * size * width
    weights = [
        s.random(size, width) for _ in range(copies_for(size * width * s.dtype.itemsize) + 1)
    ]
    x = s.random(rows, width)
    cuda.tune_linear(weights, [rows], add=False)
    plan = plan_of(rows > 128, rows, size // 2, num_sms(x.device) // 2)
    ours = [partial(gated, x, w, "silu", plan) for w in weights]
    apart = [partial(_gemm_and_silu, x, w) for w in weights]
    return KernelWork(ours, operations, OPERATIONS, against="apart", libraries={"apart": apart})


def _gemm_and_silu(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return cuda.silu_mul(cuda.linear(x, weight, None))


def form_of(to: str, width: int) -> Format:
    """Return the weight format of this name, for weights with `width` inputs."""
    return {
        "int4": Format(4, min(width, 128), zero=8),
        "int4-add": Format(4, min(width, 128), offset="add"),
        "int8-128": Format(8, 128, zero=128),
        "int8": Format(8, width, torch.float32, zero=128),
        "fp8": Format(8, width, torch.float32, code="e4m3", activations=8),
        "fp8-block": Format(8, 128, torch.float32, code="e4m3", rows=128, activations=8),
        "w8a8": Format(8, width, torch.float32, zero=128, activations=8),
        "mxfp4": Format(4, 32, torch.bfloat16, zero=12, table=E2M1),
    }[to]


def random_weight(s: Sizes, form: Format, size: int, width: int) -> PackedWeight:
    """Make a packed weight with random codes, constant scales and constant offsets."""
    weight = PackedWeight(form, size, width, None, torch.device(s.device))
    codes = weight.codes.view(torch.uint8)
    codes.random_(0, 256)
    if form.code == "e4m3":
        codes.masked_fill_((codes & 127) == 127, 0)  # NaN
    weight.scale.fill_(2.0**-12)
    if weight.offset is not None:
        weight.offset.fill_(-(2.0**-9))
    return weight


def packed_linear(
    s: Sizes, size: int, width: int, rows: int, to: str, units: bool = False
) -> KernelWork:
    """Make a case of a GEMM with packed weights of random codes.

    Bytes count codes and scales. The library multiplies 16-bit weights.
    units: whether to use the kernel `mma4` even if its table of tiles has none for this case.
    """
    form = form_of(to, width)
    num_bytes = PackedWeight.num_bytes(form, size, width)
    copies = copies_for(num_bytes) + 1
    weights = [random_weight(s, form, size, width) for _ in range(copies)]
    x = s.random(rows, width)
    dense = [s.random(size, width) for _ in range(copies_for(2.0 * size * width) + 1)]
    # Choose by the number of rows, because without a device the check of packed_few fails, and
    # tests on the CPU should run the kernel that a device would run.
    other = to in ("mxfp4", "fp8-block")
    product = packed_few if rows <= FEW and not other else cuda.packed_linear
    if rows == 1 and form.code == "e4m3":
        product = gemv8
    elif rows == 1 and to == "int4":
        product = gemv4
    if units:
        product = mma4
    ours = [partial(product, x, weight) for weight in weights]
    library = [partial(torch.nn.functional.linear, x, weight) for weight in dense]
    return KernelWork(ours, num_bytes, against="cublas", libraries={"cublas": library})


def rounded_rows(s: Sizes, rows: int, to: torch.dtype) -> KernelWork:
    """Make a case of an RMS norm that quantises rows to 8 bits for the next GEMM."""
    num_bytes = rows * s.hidden * (s.dtype.itemsize + 1.0)
    xs = [s.random(rows, s.hidden) for _ in range(copies_for(num_bytes))]
    weight = s.random(s.hidden)
    return KernelWork([partial(round_rows, x, weight, 1e-5, to) for x in xs], num_bytes)


def rounded_gate(s: Sizes, rows: int, to: torch.dtype) -> KernelWork:
    """Make a case of a gate that quantises rows to 8 bits for the next GEMM.

    The peer computes gate and quantisation separately.
    """
    num_bytes = rows * s.inner * (2 * s.dtype.itemsize + 1.0)
    xs = [s.random(rows, 2 * s.inner) for _ in range(copies_for(num_bytes))]
    ours = [partial(round_rows, x, to=to, gate="silu") for x in xs]
    apart = [partial(_apart, x, to) for x in xs]
    return KernelWork(ours, num_bytes, libraries={"apart": apart})


def _apart(x: Tensor, to: torch.dtype) -> object:
    return round_rows(cuda.GATES["silu"](x), to=to)


def fixed_linear(s: Sizes, size: int, width: int, rows: int) -> KernelWork:
    """Make a case of deterministic mode's GEMM."""
    weights = [s.random(size, width) for _ in range(copies_for(2.0 * size * width) + 1)]
    x = s.random(rows, width)
    ours = [partial(linear_fixed, x, w) for w in weights]
    library = [partial(torch.nn.functional.linear, x, w) for w in weights]
    work = 2.0 * rows * size * width
    return KernelWork(ours, work, OPERATIONS, against="cublas", libraries={"cublas": library})


def norm(s: Sizes, rows: int) -> KernelWork:
    num_bytes = 2.0 * rows * s.hidden * s.dtype.itemsize
    xs = [s.random(rows, s.hidden) for _ in range(copies_for(num_bytes))]
    weight = s.random(s.hidden)
    calls = [partial(cuda.rms_norm, x, weight, 1e-5) for x in xs]
    return KernelWork(calls, num_bytes)


def layer_norm(s: Sizes, rows: int) -> KernelWork:
    num_bytes = 2.0 * rows * s.hidden * s.dtype.itemsize
    xs = [s.random(rows, s.hidden) for _ in range(copies_for(num_bytes))]
    weight, bias = s.random(s.hidden), s.random(s.hidden)
    return KernelWork([partial(cuda.layer_norm, x, weight, bias, 1e-5) for x in xs], num_bytes)


def plain_activation(s: Sizes, rows: int, name: str) -> KernelWork:
    """Make a case of an ungated MLP's activation."""
    num_bytes = 2.0 * rows * s.inner * s.dtype.itemsize
    xs = [s.random(rows, s.inner) for _ in range(copies_for(num_bytes))]
    calls: Calls
    if name == "xielu":
        parameters = torch.zeros(4, device=s.device)
        calls = [partial(cuda.xielu, x, parameters) for x in xs]
    else:
        calls = [partial(cuda.activation, x, name) for x in xs]
    return KernelWork(calls, num_bytes)


def shared_gate(s: Sizes, rows: int) -> KernelWork:
    """Make a case of a shared expert's gate: output * sigmoid(gate of the token) + residual."""
    num_bytes = 4.0 * rows * s.hidden * s.dtype.itemsize
    gate = s.random(1, s.hidden)
    inputs = [[s.random(rows, s.hidden) for _ in range(3)] for _ in range(copies_for(num_bytes))]
    return KernelWork([partial(cuda.add_opened, y, x, gate, r) for y, x, r in inputs], num_bytes)


def output_gate(s: Sizes, rows: int) -> KernelWork:
    """Make a case of output gates: attention output * sigmoid(gates interleaved with queries)."""
    width = s.heads * s.dim
    num_bytes = 3.0 * rows * width * s.dtype.itemsize
    inputs = [
        (s.random(rows, width), s.random(rows, s.heads, 2, s.dim)[:, :, 1])
        for _ in range(copies_for(num_bytes))
    ]
    return KernelWork([partial(cuda.sigmoid_mul, x, gate) for x, gate in inputs], num_bytes)


def residual_norm(s: Sizes, rows: int) -> KernelWork:
    """Make a case of the GEMM after attention with the residual, then the norm before the MLP.

    The residual addition is fused into the GEMM.
    """
    weights = [s.random(s.hidden, s.hidden) for _ in range(copies_for(2.0 * s.hidden**2) + 1)]
    x, residual, scale = s.random(rows, s.hidden), s.random(rows, s.hidden), s.random(s.hidden)
    cuda.tune_linear(weights, [rows], add=True)

    def call(weight: Tensor) -> Tensor:
        return cuda.rms_norm(cuda.linear_add(x, weight, None, residual), scale, 1e-5)

    return KernelWork([partial(call, w) for w in weights], weights[0].nbytes + 5 * x.nbytes)


def gate(s: Sizes, rows: int, name: str) -> KernelWork:
    num_bytes = 3.0 * rows * s.inner * s.dtype.itemsize
    xs = [s.random(rows, 2 * s.inner) for _ in range(copies_for(num_bytes))]
    return KernelWork([partial(cuda.GATES[name], x) for x in xs], num_bytes)


def rope(s: Sizes, rows: int, head_norm: bool, gated: bool = False) -> KernelWork:
    """Make a case of rotary embeddings: decodes for up to 256 rows, a prompt for more.

    gated: whether a gate follows each query.
    """
    width = ((1 + gated) * s.heads + 2 * s.kv_heads) * s.dim
    read = width - gated * s.heads * s.dim
    num_bytes = rows * (read + s.heads * s.dim) * s.dtype.itemsize + kv_bytes(s, rows)
    qkvs = [s.random(rows, width) for _ in range(copies_for(num_bytes))]
    lengths = ([rows], [rows], 0) if rows > 256 else ([1024] * rows, [1] * rows, rows)
    meta, num_blocks = meta_of(s, *lengths, 16)
    kv = caches(s, 1, num_blocks, 16)[0]
    cos_sin = torch.randn(meta.max_kv_len, s.dim, device=s.device)
    weight = s.random(s.dim) if head_norm else None
    calls = [
        partial(
            cuda.rope_kv_write,
            RopeInputs(qkv, cos_sin, weight, weight, 1e-6, *kv, s.heads, gated),
            meta,
        )
        for qkv in qkvs
    ]
    return KernelWork(calls, num_bytes)


def assembly(s: Sizes, rows: int, what: str) -> KernelWork:
    """Make a case of `assemble` or of updates of block tables, for decodes after 1,000 tokens."""
    blocks = 64
    tokens = torch.zeros(rows + 1, 1025, dtype=torch.int32, device=s.device)
    table = torch.zeros(rows + 1, blocks, dtype=torch.int32, device=s.device)
    if what == "updates":
        updates = s.ints([x for row in range(rows) for x in (row, blocks - 1, row)])
        call = partial(apply_updates, updates, tokens, table, 0, rows)
        return KernelWork([call] * 16, rows * 16)
    ids, positions, kv_len = (s.ints([0] * rows) for _ in range(3))
    call = partial(
        assemble,
        s.ints(list(range(rows))),
        s.ints([1000] * rows),
        s.ints(list(range(rows + 1))),
        tokens,
        table,
        ids,
        positions,
        torch.zeros(1, rows, dtype=torch.int64, device=s.device),  # one KV cache group
        kv_len,
        torch.zeros_like(table)[None],
        16,
        rows,
    )
    return KernelWork([call] * 16, rows * (2 * 63 * 4 + 44))


def adapters(s: Sizes, rows: int, part: int) -> KernelWork:
    """Make a case of LoRA shrink and expand with 16 adapters of rank 16, Zipf-distributed.

    The gate is included for layers that have one.
    """
    layer = bench_lora.LAYER[part]
    rank, count = 16, 16
    x, y = s.random(rows, layer.in_features), s.random(rows, sum(layer.outs))
    used = len(bench_lora.zipf_slots(rows, count).unique())
    matrices = used * rank * (len(layer.outs) * layer.in_features + sum(layer.outs)) * 2
    steps = [
        bench_lora.make_step(rows, count, rank, s.device, s.dtype)
        for _ in range(copies_for(matrices))
    ]
    if len(layer.outs) == 2:
        calls = [partial(lora_gated, y, x, layer, step, "silu") for step in steps]
        return KernelWork(calls, matrices + x.nbytes + 1.5 * y.nbytes)
    calls = [partial(lora_add, y, x, layer, step) for step in steps]
    return KernelWork(calls, matrices + x.nbytes + 2 * y.nbytes)


def all_cases(s: Sizes = LLAMA, libraries: dict[str, Library] | None = None) -> dict[str, Make]:
    """Return the case's name -> a function that makes the case.

    libraries: more peers for prompt attention; the ratio is relative to the first one.
    """
    cases: dict[str, Make] = {}
    for name, (kv_len, target) in DECODES.items():
        cases[f"decode/{name}"] = partial(decode, s, kv_len, 16, target)
    for block_size in (1, 128):
        for name in ("64 x 4096", "16 x 1024"):
            make = partial(decode, s, DECODES[name][0], block_size, None)
            cases[f"decode/{name}/blocks of {block_size}"] = make
    for dim in (64, 256):
        make = partial(decode, s._replace(dim=dim), DECODES["64 x 4096"][0], 16, None)
        cases[f"decode/64 x 4096/heads of {dim}"] = make
    for name, lengths in PREFILLS.items():
        cases[f"prefill/{name}"] = partial(prefill, s, *lengths)
    for name, pictures in TOWERS.items():
        cases[f"tower/{name}"] = partial(tower, s, *pictures)
    for kv in FORMATS:
        fewer = s._replace(kv=kv)
        for name, least in CODED.items():
            target = least if kv == "fp8" else None
            make = partial(decode, fewer, DECODES[name][0], 16, target)
            cases[f"{kv} decode/{name}"] = make
        for name in ("8 x 1024", "4 x 2048", "2048 after 6144"):
            cases[f"{kv} prefill/{name}"] = partial(prefill, fewer, *PREFILLS[name])
        for rows in (1, 256, 8192):
            cases[f"rope and {kv} KV write/{rows}"] = partial(rope, fewer, rows, False)
    for rows in (1, 256, 8192):
        cases[f"rope and KV write/{rows}"] = partial(rope, s, rows, False)
        cases[f"qk-norm, rope and KV write/{rows}"] = partial(rope, s, rows, True)
    next_sizes = s._replace(heads=16, kv_heads=2, dim=256)  # sizes of Qwen3-Next
    for rows in (1, 256, 8192):
        cases[f"qk-norm, rope and KV write beside gates/{rows}"] = partial(
            rope, next_sizes, rows, True, True
        )
        cases[f"gated output/{rows}"] = partial(output_gate, next_sizes, rows)
    for rows in (1, 16, 256, 8192):
        cases[f"norm/{rows}"] = partial(norm, s, rows)
        cases[f"silu/{rows}"] = partial(gate, s, rows, "silu")
    cases["gelu/256"] = partial(gate, s, 256, "gelu_pytorch_tanh")
    cases["layer norm/256"] = partial(layer_norm, s, 256)
    for name in ("gelu", "xielu"):
        cases[f"{name} without a gate/256"] = partial(plain_activation, s, 256, name)
    for rows in (1, 256):
        cases[f"shared expert's gate/{rows}"] = partial(shared_gate, s, rows)
        cases[f"product + residual, norm/{rows}"] = partial(residual_norm, s, rows)
    for name, ((size, width), counts) in LINEARS.items():
        for rows in counts:
            cases[f"product/{name}/{rows}"] = partial(linear, s, size, width, rows)
    for name, (size, width) in GATED.items():
        for rows in (96, 128, 256, 512, 1024, 4096):
            cases[f"gated product/{name}/{rows}"] = partial(gated_linear, s, size, width, rows)
    for to in ("int4", "int8", "w8a8", "fp8", "fp8-block"):
        for name in ("8b qkv", "8b o", "8b gate_up", "8b down"):
            for rows in (1, 2, 8, 16, 32, 64, 256, 1024, 8192):
                make = partial(packed_linear, s, *LINEARS[name][0], rows, to)
                cases[f"{to} product/{name}/{rows}"] = make
    for name in ("8b qkv", "8b o", "8b gate_up", "8b down"):
        for rows in (1, 2, 4, 8):
            make = partial(packed_linear, s, *LINEARS[name][0], rows, "int4", True)
            cases[f"int4 on matrix units/{name}/{rows}"] = make
    for rows in (1, 16, 256):
        down = LINEARS["8b down"][0]
        cases[f"mxfp4 product/8b down/{rows}"] = partial(packed_linear, s, *down, rows, "mxfp4")
    for rows in (32, 256, 8192):
        cases[f"norm to e4m3/{rows}"] = partial(rounded_rows, s, rows, E4M3)
        cases[f"norm to int8/{rows}"] = partial(rounded_rows, s, rows, torch.int8)
        cases[f"gate to e4m3/{rows}"] = partial(rounded_gate, s, rows, E4M3)
        cases[f"gate to int8/{rows}"] = partial(rounded_gate, s, rows, torch.int8)
    for rows in (256, 4096):
        make = partial(fixed_linear, s, *LINEARS["8b qkv"][0], rows)
        cases[f"deterministic product/8b qkv/{rows}"] = make
    cases |= sampling_cases(s)
    for what in ("updates", "layout"):
        cases[f"assembly/{what}/256"] = partial(assembly, s, 256, what)
    for rows in (64, 256):
        for part, name in enumerate(("qkv", "o", "gate_up", "down")):
            cases[f"adapters/{name}/{rows}"] = partial(adapters, s, rows, part)
    cases |= mixer_cases(s)
    # These cases come last, because a library may fail in any way.
    others = {**(libraries or {}), **{name: torch_attention(kind) for name, kind in FAST.items()}}
    others["any GPU's"] = any_gpus_attention
    for name, (keys, other) in PROMPTS.items():
        target = PREFILL_TARGET if name == "1 x 8192" else None
        make = partial(prefill, s._replace(**other), [keys], [keys], target, others)
        cases[f"prefill/{name}"] = make
    return cases
