"""GPUS: the GPUs that `manta plan --gpu` knows by name, with figures from their data sheets."""

from typing import NamedTuple

GIB = 1 << 30


class Gpu(NamedTuple):
    """The figures of a GPU that estimates need.

    gib: memory in GiB as the driver reports it, which is less than advertised.
    capability: CUDA compute capability, (major, minor).
    bandwidth: bandwidth of its memory in GB/s.
    teraflops: TFLOP/s of dense 16-bit matmuls with float32 accumulation.
    """

    gib: float
    capability: tuple[int, int]
    bandwidth: int
    teraflops: int

    @property
    def memory(self) -> int:
        return int(self.gib * GIB)


GPUS = {
    "b200": Gpu(178.4, (10, 0), 8000, 2250),
    "h200": Gpu(139.8, (9, 0), 4800, 989),
    "h100": Gpu(79.2, (9, 0), 3350, 989),
    "a100": Gpu(79.2, (8, 0), 2039, 312),
    "a100-40g": Gpu(39.4, (8, 0), 1555, 312),
    "rtx-pro-6000": Gpu(95.0, (12, 0), 1792, 503),
    "l40s": Gpu(44.4, (8, 9), 864, 362),
    "a10": Gpu(22.0, (8, 6), 600, 125),
    "a10g": Gpu(22.0, (8, 6), 600, 70),
    "l4": Gpu(22.0, (8, 9), 300, 121),
    "rtx-5090": Gpu(31.4, (12, 0), 1792, 209),
    "rtx-5080": Gpu(15.5, (12, 0), 960, 113),
    "rtx-4090": Gpu(23.6, (8, 9), 1008, 165),
    "rtx-4080": Gpu(15.6, (8, 9), 717, 97),
    "rtx-3090": Gpu(23.6, (8, 6), 936, 71),
    "rtx-3080": Gpu(9.6, (8, 6), 760, 60),
    "t4": Gpu(14.6, (7, 5), 320, 65),
    "v100": Gpu(31.7, (7, 0), 900, 125),
}


def abilities(capability: tuple[int, int]) -> tuple[str, str]:
    """Return two texts for GPUs of a compute capability: the number formats and kernels that they
    support, and Manta's substitutes for the others."""
    from kernels.packed import FLOAT8, INT8_PRODUCTS, multiplies  # importing torch takes seconds

    native, others = ["float16"], []
    if capability >= INT8_PRODUCTS:
        native += ["bfloat16", "products of 8-bit integers"]
    else:
        others.append("no bfloat16: dtype: float16")
    if capability >= FLOAT8:
        native.append("keys in fp8")
    else:
        others.append("no keys in fp8: kv_dtype: int8")
    if multiplies("e4m3", capability):
        native += ["products of 8-bit floats", "kernels with specialised warps"]
    else:
        others.append("fp8 weights are decoded to 16 bits in each product")
    return ", ".join(native), "; ".join(others)
