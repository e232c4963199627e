"""The choice of launch parameters for the kernel `pass` of delta_chunks_cuda.py."""

import triton

from kernels.recurrent.chunks_cuda import CHUNK, PassLaunch

# Launches of `pass` -> tenths of microseconds per chunk on an H200, for keys and values of 128.
_PASSES = {PassLaunch(32, 4, 3): 20, PassLaunch(64, 4, 2): 25, PassLaunch(128, 8, 2): 49}


def pass_launch(
    walks: int, sms: int, keys: int, values: int, element_size: int, room: int
) -> PassLaunch:
    """Choose the launch of `pass` with the shortest estimated time.

    walks: entries * heads. keys, values: padded sizes of a state. room: bytes of shared memory.

    A program occupies a whole multiprocessor. So the estimate is the number of waves of programs
    times the time per chunk.
    """

    def cost(launch: PassLaunch) -> int:
        return triton.cdiv(walks * triton.cdiv(values, launch.columns), sms) * _PASSES[launch]

    def held(launch: PassLaunch) -> int:
        """Return the bytes of a state and of a chunk's W, keys, queries, queries @ keys^T and U."""
        chunk = CHUNK * (3 * keys + CHUNK + launch.columns)
        return (keys * launch.columns + chunk) * element_size

    fitting = [shape for shape in _PASSES if held(shape) <= room] or [min(_PASSES, key=held)]
    narrow = [shape for shape in fitting if shape.columns <= values]
    best = min(narrow or fitting, key=cost) if element_size == 2 else PassLaunch(32, 4, 1)
    best = best._replace(columns=min(best.columns, values))
    # Bytes of a chunk's W, keys, queries, queries @ keys^T and U, for each pipeline stage.
    chunk = CHUNK * (3 * keys + CHUNK + best.columns) * element_size
    most = (room - keys * best.columns * element_size) // chunk
    return best._replace(num_stages=max(1, min(best.num_stages, most)))
