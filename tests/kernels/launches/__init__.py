"""Launches of every Triton kernel at the sizes of real models, for test_compile.py.

Tensors are not filled, as the kernels are only compiled.
"""

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

# Name -> a function that launches kernels with the sizes of a model, by its name in sizes.py.
PARTS: dict[str, Callable[[str], None]] = {
    part.__name__: part
    for part in (
        *(layers, packed, plain, attention, quantized_attention, latent),
        *(sampling, assembly, adapters),
        *(experts, experts_in_fewer_bits, experts_in_floats, experts_in_fragments),
        *(delta, kimi, mamba, mamba_1, convolution, peers, moved_blocks),
    )
}
