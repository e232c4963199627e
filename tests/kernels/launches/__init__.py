"""Every Triton kernel, launched at the sizes of models on unfilled tensors, for test_compile.py."""

from collections.abc import Callable

from tests.kernels.launches.attention import (
    attention,
    latent,
    quantized_attention,
)
from tests.kernels.launches.experts import (
    experts,
    experts_in_fewer_bits,
    experts_in_floats,
    experts_in_fragments,
)
from tests.kernels.launches.gemm import layers, packed, plain
from tests.kernels.launches.lora import adapters
from tests.kernels.launches.ranks import moved_blocks, peers
from tests.kernels.launches.recurrent import (
    convolution,
    delta,
    kimi,
    mamba,
    mamba_1,
)
from tests.kernels.launches.sampling import assembly, sampling

# By name; each is called with the name of a model (sizes.py).
PARTS: dict[str, Callable[[str], None]] = {
    part.__name__: part
    for part in (
        *(layers, packed, plain, attention, quantized_attention, latent),
        *(sampling, assembly, adapters),
        *(experts, experts_in_fewer_bits, experts_in_floats, experts_in_fragments),
        *(delta, kimi, mamba, mamba_1, convolution, peers, moved_blocks),
    )
}
