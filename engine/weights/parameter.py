"""Parameter: one tensor of the model, and the checkpoint tensors that fill it."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Fill = Callable[[Tensor, torch.Generator], None]

# Some rows of a matrix: a half-open range, or an array of row numbers.
Rows = tuple[int, int] | NDArray[np.int64]


def as_rows(numbers: NDArray[np.int64]) -> Rows:
    """Return row numbers as a range if they are consecutive, as a range is read faster."""
    if len(numbers) and bool((np.diff(numbers) == 1).all()):
        return int(numbers[0]), int(numbers[-1]) + 1
    return numbers


def num_rows(rows: Rows) -> int:
    return rows[1] - rows[0] if isinstance(rows, tuple) else len(rows)


def some_rows(rows: Rows, begin: int, end: int) -> Rows:
    """Return the slice [begin, end) of the given rows."""
    if isinstance(rows, tuple):
        return rows[0] + begin, min(rows[0] + end, rows[1])
    return rows[begin:end]


def span(rows: Rows) -> tuple[int, int]:
    """Return the smallest range that contains the rows."""
    return rows if isinstance(rows, tuple) else (int(rows.min()), int(rows.max()) + 1)


def take_rows(tensor: Tensor, rows: Rows) -> Tensor:
    """Return the given rows of a tensor, as a view if the rows are a range."""
    if isinstance(rows, tuple):
        return tensor[rows[0] : rows[1]]
    return tensor.index_select(0, torch.from_numpy(rows).to(tensor.device))


@dataclass(frozen=True, slots=True)
class Source:
    """The part of a checkpoint tensor that is loaded into a parameter.

    Several sources of a parameter are concatenated along rows. Rows and columns split a fused
    tensor, reorder its rows, or select one rank's shard.

    shape: the shape that the checkpoint's tensor ``name`` must have.
    rows, columns: the rows and columns to load, after ``transpose``; None = all.
    transpose: whether the checkpoint stores [in, out] where the engine stores [out, in].
    flat: whether a tensor of any shape is loaded as a vector of its elements, which rows index.
    at: the index of this matrix in a checkpoint tensor that stacks several along its first axis.
        shape is then the whole tensor's shape; on disk its first two axes may be joined into one,
        and its last may be split in two.
    shorter: whether the tensor on disk may have fewer bytes; the remaining bytes of the parameter
        are not written.
    """

    name: str
    shape: tuple[int, ...]
    rows: Rows | None = None
    columns: tuple[int, int] | None = None
    transpose: bool = False
    flat: bool = False
    at: int | None = None
    shorter: bool = False

    def part_of(self, tensor: Tensor) -> Tensor:
        """Return the part of the checkpoint tensor to load, a view unless the row order changes."""
        if self.transpose:
            tensor = tensor.t()
        if self.rows is not None:
            tensor = take_rows(tensor, self.rows)
        if self.columns is not None:
            tensor = tensor[:, self.columns[0] : self.columns[1]]
        return tensor

    def fits(self, stored: tuple[int, ...]) -> bool:
        """Whether a checkpoint tensor of shape `stored` has the shape that this source expects."""
        if self.shorter:
            return math.prod(stored) <= math.prod(self.shape)
        if self.flat:
            return math.prod(stored) == math.prod(self.shape)
        if self.at is None:
            return stored == self.shape
        joined = (math.prod(self.shape[:2]), *self.shape[2:])
        # rows may be stored as [blocks, block bytes]
        blocks = (*stored[:2], math.prod(stored[2:]))
        return stored in (self.shape, joined) or (len(stored) > 3 and blocks == self.shape)

    @property
    def num_rows(self) -> int:
        if self.rows is not None:
            return num_rows(self.rows)
        if self.flat:
            return math.prod(self.shape)
        shape = self.shape if self.at is None else self.shape[1:]
        return shape[1] if self.transpose else shape[0]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A tensor of the model, and the checkpoint tensors that fill it.

    tensor: the tensor to fill, allocated.
    sources: the sources, stacked along rows in this order; together they have the tensor's exact
        shape.
    std: the standard deviation of normally distributed random weights; 0 = ones (norms).
    fill: a function that fills the tensor with random weights instead, where not every number is a
        weight. The function must not refer to the object that has the parameter: such a reference
        cycle would keep packed weights in memory twice until garbage collection.
    offset, scale: each value becomes (value + offset) * scale.
    changed: a function that changes the tensor in place, after offset and scale.
    """

    name: str
    tensor: Tensor
    sources: tuple[Source, ...]
    std: float = 0.02
    fill: Fill | None = None
    offset: float = 0.0
    scale: float = 1.0
    changed: Callable[[Tensor], object] | None = None

    def release(self) -> None:
        """Free the tensor's memory until `allocate`; the tensor must fill its storage.

        The tensor keeps its shape and dtype. Until then neither the tensor nor its views may be
        sliced by rows.
        """
        storage = self.tensor.untyped_storage()
        assert storage.nbytes() == self.tensor.nbytes, self.name
        storage.resize_(0)

    def allocate(self) -> None:
        """Allocate uninitialised memory after `release`, for the tensor and all its views."""
        storage = self.tensor.untyped_storage()
        if not storage.nbytes():
            storage.resize_(self.tensor.nbytes)

    def settle(self) -> None:
        """Apply offset, scale and `changed` to the filled tensor."""
        if self.offset:
            self.tensor.add_(self.offset)
        if self.scale != 1.0:
            self.tensor.mul_(self.scale)
        if self.changed is not None:
            self.changed(self.tensor)


@dataclass(frozen=True, slots=True)
class Unit:
    """A group of parameters that are packed together.

    parameters: the parameters; the packing thread empties this list first.
    finish: packs the parameters, once all are filled.
    transient: whether the parameters have memory only from `allocate` to `finish`.
    """

    parameters: list[Parameter]
    finish: Callable[[], None]
    transient: bool

    @property
    def num_bytes(self) -> int:
        return sum(parameter.tensor.nbytes for parameter in self.parameters)
