"""`python -m kernels.bench [lora [sweep]]`: each kernel's time, and its share of the device's best.

Times are of CUDA graphs that walk over enough layers' worth of data to leave the L2 cache behind,
as a model does.
"""

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from kernels import cuda
from kernels.metadata import AttentionMeta

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16  # llama-8b
COLD = 300e6  # bytes a graph touches before it comes back to the same data


def time_us(calls: list[Callable[[], object]], repeats: int = 20) -> float:
    """Microseconds of one call: a graph of all `calls`, replayed; the median of `repeats`."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2] * 1e3 / len(calls)


def copy_bandwidth() -> float:
    """Bytes a second, read plus written, of a large device-to-device copy."""
    source = torch.randn(2**29, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    times = []
    for _ in range(10):  # eagerly: in a graph a copy may go to the slower copy engine
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return 2 * source.nbytes / min(times) * 1e3


def matmul_rate() -> float:
    """Bfloat16 operations a second of a large matrix product."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / time_us([lambda: a @ b]) * 1e6


def layers_for(num_bytes: float) -> int:
    return max(1, min(16, int(COLD // num_bytes) + 1))


def caches(layers: int, num_blocks: int) -> list[tuple[Tensor, Tensor]]:
    shape = (num_blocks, KV_HEADS, BLOCK, DIM)
    return [
        (
            torch.randn(shape, device="cuda", dtype=torch.bfloat16),
            torch.randn(shape, device="cuda", dtype=torch.bfloat16),
        )
        for _ in range(layers)
    ]


def meta_of(kv_len: list[int], query_len: list[int], num_decodes: int) -> tuple[AttentionMeta, int]:
    blocks = [-(-n // BLOCK) for n in kv_len]
    order = torch.randperm(sum(blocks), device="cuda").int().split(blocks)
    table = torch.zeros(len(kv_len), max(blocks), dtype=torch.int32, device="cuda")
    for entry, own in enumerate(order):
        table[entry, : len(own)] = own
    starts = torch.tensor([0, *query_len]).cumsum(0).int().cuda()
    positions = torch.cat(
        [torch.arange(n - m, n) for n, m in zip(kv_len, query_len, strict=True)]
    ).cuda()
    entry = torch.repeat_interleave(torch.arange(len(kv_len)), torch.tensor(query_len)).cuda()
    slots = table[entry, positions // BLOCK].long() * BLOCK + positions % BLOCK
    meta = AttentionMeta(
        positions=positions.int(),
        slots=slots,
        query_start=starts,
        kv_len=torch.tensor(kv_len, dtype=torch.int32).cuda(),
        block_table=table,
        num_decodes=num_decodes,
        max_query_len=max(query_len),
        max_kv_len=max(kv_len),
    )
    return meta, sum(blocks)


def decode_us(kv_len: list[int]) -> tuple[float, float]:
    """(microseconds, bytes of keys and values) of one layer's decode attention."""
    num_bytes = 2 * sum(kv_len) * KV_HEADS * DIM * 2
    meta, num_blocks = meta_of(kv_len, [1] * len(kv_len), len(kv_len))
    q = torch.randn(len(kv_len), HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    cuda.prepare(meta, HEADS, (kv := caches(layers_for(num_bytes), num_blocks))[0][0])
    calls = [lambda k=k, v=v: cuda.attention(q, k, v, DIM**-0.5, meta) for k, v in kv]
    return time_us(calls), num_bytes


def prefill_us(kv_len: list[int], query_len: list[int]) -> tuple[float, float]:
    """(microseconds, operations) of one layer's prefill attention."""
    meta, num_blocks = meta_of(kv_len, query_len, 0)
    seen = sum(m * (n - m) + m * (m + 1) // 2 for n, m in zip(kv_len, query_len, strict=True))
    q = torch.randn(sum(query_len), HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    kv = caches(2, num_blocks)
    calls = [lambda k=k, v=v: cuda.attention(q, k, v, DIM**-0.5, meta) for k, v in kv]
    return time_us(calls, 10), 4.0 * seen * HEADS * DIM


def pointwise_us(rows: int) -> dict[str, tuple[float, float]]:
    """Name -> (microseconds, bytes) of the small kernels at a number of tokens."""

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    hidden, inner = 4096, 14336
    count = 8
    xs = [random(rows, hidden) for _ in range(count)]
    weight = random(hidden)
    gates = [random(rows, 2 * inner) for _ in range(count)]
    qkvs = [random(rows, (HEADS + 2 * KV_HEADS) * DIM) for _ in range(count)]
    meta, num_blocks = meta_of([rows], [rows], 0)
    kv = caches(1, num_blocks)[0]
    cos_sin = torch.randn(rows, DIM, device="cuda")
    norm = random(DIM)

    def rope(weights: Tensor | None, qkv: Tensor) -> Tensor:
        return cuda.rope_kv_write(qkv, cos_sin, weights, weights, 1e-6, *kv, HEADS, meta)

    return {
        "rms_norm": (
            time_us([lambda x=x: cuda.rms_norm(x, weight, 1e-5) for x in xs]),
            4.0 * rows * hidden,
        ),
        "silu_mul": (
            time_us([lambda x=x: cuda.silu_mul(x) for x in gates]),
            6.0 * rows * inner,
        ),
        "rope_kv_write": (
            time_us([lambda x=x: rope(None, x) for x in qkvs]),
            4.0 * rows * (HEADS + 2 * KV_HEADS) * DIM,
        ),
        "+ qk norm": (
            time_us([lambda x=x: rope(norm, x) for x in qkvs]),
            4.0 * rows * (HEADS + 2 * KV_HEADS) * DIM,
        ),
    }


def linear_us(tokens: int, size: int, width: int) -> tuple[float, float, float]:
    """(our microseconds, the library's, bytes of the weight)."""
    num_bytes = 2.0 * size * width
    weights = [
        torch.randn(size, width, device="cuda", dtype=torch.bfloat16)
        for _ in range(layers_for(num_bytes) + 1)
    ]
    x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    ours = time_us([lambda w=w: cuda.linear(x, w, None) for w in weights])
    library = time_us([lambda w=w: torch.nn.functional.linear(x, w) for w in weights])
    return ours, library, num_bytes


LINEARS = {
    "8b qkv": (6144, 4096),
    "8b o": (4096, 4096),
    "8b gate_up": (28672, 4096),
    "8b down": (4096, 14336),
    "8b lm_head": (128256, 4096),
    "0.6b gate_up": (6144, 1024),
    "0.6b down": (1024, 3072),
}
DECODES = {
    "1 x 1024": [1024],
    "1 x 8192": [8192],
    "1 x 32768": [32768],
    "16 x 1024": [1024] * 16,
    "64 x 512": [512] * 64,
    "64 x 4096": [4096] * 64,
    "256 x 512": [512] * 256,
    "256 x 1024": [1024] * 256,
    "256 x 100..1948": [100 + 1848 * i // 255 for i in range(256)],
    "32768 + 31 x 1024": [32768] + [1024] * 31,
}
PREFILLS = {
    "1 x 8192": ([8192], [8192]),
    "4 x 2048": ([2048] * 4, [2048] * 4),
    "2048 after 6144": ([8192], [2048]),
    "64 x 128": ([128] * 64, [128] * 64),
    "1 x 512": ([512], [512]),
}


def main() -> None:
    if "lora" in sys.argv[1:]:
        from kernels import bench_lora

        return bench_lora.main(time_us, sweep="sweep" in sys.argv[1:])
    bandwidth, rate = copy_bandwidth(), matmul_rate()
    print(torch.cuda.get_device_name(), f"copy {bandwidth / 1e12:.2f} TB/s,", end=" ")
    print(f"bf16 matmul {rate / 1e12:.0f} TFLOP/s; llama-8b shapes, block size {BLOCK}")
    for name, kv_len in DECODES.items():
        us, num_bytes = decode_us(kv_len)
        share = num_bytes / us * 1e6 / bandwidth
        print(
            f"attention_decode {name:18} {us:8.1f} us {num_bytes / us / 1e6:5.2f} TB/s {share:4.0%}"
        )
    for name, lengths in PREFILLS.items():
        us, ops = prefill_us(*lengths)
        share = ops / us * 1e6 / rate
        print(
            f"attention_prefill {name:17} {us:8.1f} us {ops / us / 1e6:5.0f} TFLOP/s {share:4.0%}"
        )
    for tokens in (1, 2, 4):
        for name, shape in LINEARS.items():
            us, library, num_bytes = linear_us(tokens, *shape)
            share = num_bytes / us * 1e6 / bandwidth
            print(
                f"linear {name:13} {tokens:3} rows {us:8.1f} us "
                f"{num_bytes / us / 1e6:5.2f} TB/s {share:4.0%}  (library {library:.1f} us)"
            )
    for rows in (1, 16, 256, 8192):
        for name, (us, num_bytes) in pointwise_us(rows).items():
            share = num_bytes / us * 1e6 / bandwidth
            print(
                f"{name:14} {rows:5} rows {us:8.2f} us "
                f"{num_bytes / us / 1e6:5.2f} TB/s {share:4.0%}"
            )


if __name__ == "__main__":
    main()
