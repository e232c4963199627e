"""What replicas can do, as measured.

GPU: Llama 3.1 8B in bfloat16 on an H200, from bench/results of 2026-11-21: one stream at 4.2 ms
a token, 256 streams at 11.5 ms, prompts at 35,600 tokens/s. A step of 64 streams is 6.0 ms by this
line and was 5.9 ms.

CPU: assumed, of the size of the default model's. `bench.simulate calibrate` found 10 ms a step,
0.75 ms a sequence and 1.1 ms a prompt token on two idle cores, and 26, 2.2 and 2.2 on busy ones. A
model of 8B would be slower still: a small one keeps the two kinds closer.
"""

from bench.simulate.fleet.replica import Speed

GPU = Speed(
    "gpu",
    base=0.0042,
    sequence=(0.0115 - 0.0042) / 255,
    token=1 / 35_600,
    kv_tokens=780_000,  # 0.85 of 141 GB less the weights, 131 kB a token
    max_num_seqs=256,
    chunk=2048,
    ahead=True,
)
CPU = Speed(
    "cpu",
    base=0.0200,
    sequence=0.0040,
    token=0.00080,
    kv_tokens=60_000,
    max_num_seqs=32,
    chunk=512,
    slots=4,
    adapter_seconds=0.3,
)
SLOW = GPU.slower(3)
