"""in_wide_groups: chooses the 4-bit matrices that get fewer scales, to limit the copy's size."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engine.rounding.integers import searched
from engine.weights.stored import StoredTensor

GROUP = 32  # inputs that share a scale; 64 would cost small models several times as much accuracy
WIDE = 64
MOST = 4.6  # maximum average bits of a weight, including its scale and zero point
_ROWS = 32  # number of rows of each matrix that are rounded to compare group sizes
_BITS = {group: 4 + 20 / group for group in (GROUP, WIDE)}


def in_wide_groups(layers: Sequence[Sequence[str]], stored: Mapping[str, StoredTensor]) -> set[str]:
    """Choose matrices to round in groups of WIDE, so that weights have at most MOST bits on
    average.

    The chosen matrices are those whose squared error grows least relative to the saved bits, by a
    sample of rows.

    layers: sets of matrices that must have equal groups, as names of tensors [out, in].
    """
    sizes = [sum(_size(stored[name]) for name in names) for names in layers]
    to_save = (_BITS[GROUP] - MOST) * sum(sizes) / (_BITS[GROUP] - _BITS[WIDE])
    losses = {}
    for number, names in enumerate(layers):
        if all(stored[name].shape[1] % WIDE == 0 for name in names):
            # a sample of a layer's matrices, as experts are similar
            sample = names[:: max(1, len(names) // 4)]
            loss = sum(_growth(stored[name]) for name in sample) / len(sample)
            losses[number] = loss / sizes[number]
    chosen: set[str] = set()
    for number in sorted(losses, key=lambda number: losses[number]):
        if to_save <= 0:
            break
        to_save -= sizes[number]
        chosen.update(layers[number])
    return chosen


def _size(tensor: StoredTensor) -> int:
    return tensor.shape[0] * tensor.shape[1]


def _growth(tensor: StoredTensor) -> float:
    """Return how much a matrix's squared rounding error grows from groups of GROUP to WIDE.

    The growth is divided by the sum of the weights' squares. It is estimated from up to _ROWS rows.
    """
    rows = _some_rows(tensor)
    errors = [(searched(rows, group).dense() - rows).square().sum() for group in (WIDE, GROUP)]
    return float((errors[0] - errors[1]) / rows.square().sum().clamp(min=1e-30))


def _some_rows(tensor: StoredTensor) -> Tensor:
    count = min(_ROWS, tensor.shape[0])
    size = tensor.num_bytes // tensor.shape[0]
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset + (tensor.shape[0] - count) // 2 * size)
        data = bytearray(file.read(count * size))
    return torch.frombuffer(data, dtype=tensor.dtype).view(count, -1).float()
