"""The speeds of simulated replicas.

GPU: Llama 3.1 8B in bfloat16 on an H200, fitted to bench/results of 2026-11-21: one stream at 4.2
ms per token, 256 streams at 11.5 ms, prompts at 35,600 tokens/s. The fit gives 6.0 ms for a step of
64 streams; 5.9 ms was measured.

CPU: assumed, similar to the default model's speed. `bench.simulate calibrate` measured 10 ms per
step, 0.75 ms per sequence and 1.1 ms per prompt token on two idle cores, and 26, 2.2 and 2.2 ms on
busy cores. An 8B model would be slower; with a small one both kinds of replicas are comparable.
"""

from deployments.simulation.speed import Speed

GPU = Speed(
    "gpu",
    base=0.0042,
    sequence=(0.0115 - 0.0042) / 255,
    token=1 / 35_600,
    kv_tokens=780_000,  # 85 % of 141 GB minus the weights, at 131 kB per token
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
