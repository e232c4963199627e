"""The launch of `pass` (delta_chunks_cuda.py) for a number of states, their sizes and a device."""

import triton

from kernels.recurrent.chunks_cuda import CHUNK, PassLaunch

# Launches of `pass`, with tenths of microseconds per chunk on an H200 for keys and values of 128.
_PASSES = {PassLaunch(32, 4, 3): 20, PassLaunch(64, 4, 2): 25, PassLaunch(128, 8, 2): 49}


def pass_launch(
    walks: int, sms: int, keys: int, values: int, element_size: int, room: int
) -> PassLaunch:
    """Choose the launch of `pass` that fills the device's multiprocessors in the least time.

    walks: entries * heads. keys, values: padded sizes of a state. room: bytes of shared memory.
    A program occupies a multiprocessor, so cost is rounds of programs times seconds per chunk.
    """

    def cost(launch: PassLaunch) -> int:
        return triton.cdiv(walks * triton.cdiv(values, launch.columns), sms) * _PASSES[launch]

    def held(launch: PassLaunch) -> int:
        """Return the bytes of a state and of a chunk: W, keys, queries, their overlaps and U."""
        chunk = CHUNK * (3 * keys + CHUNK + launch.columns)
        return (keys * launch.columns + chunk) * element_size

    fitting = [shape for shape in _PASSES if held(shape) <= room] or [min(_PASSES, key=held)]
    narrow = [shape for shape in fitting if shape.columns <= values]
    best = min(narrow or fitting, key=cost) if element_size == 2 else PassLaunch(32, 4, 1)
    best = best._replace(columns=min(best.columns, values))
    # W, keys, queries, their overlaps and U of each chunk in the pipeline, and the state.
    chunk = CHUNK * (3 * keys + CHUNK + best.columns) * element_size
    most = (room - keys * best.columns * element_size) // chunk
    return best._replace(num_stages=max(1, min(best.num_stages, most)))
