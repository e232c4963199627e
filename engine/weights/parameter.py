"""Parameter: one tensor of the model and the checkpoint tensors that fill it."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Source:
    """A rectangle of one checkpoint tensor.

    Several sources merge along rows; ranges split a fused tensor or keep one rank's shard of it.

    shape: what the checkpoint must hold under ``name``.
    rows, columns: the half-open ranges taken, after ``transpose``; None takes all.
    transpose: the checkpoint keeps [in, out] where we keep [out, in].
    """

    name: str
    shape: tuple[int, ...]
    rows: tuple[int, int] | None = None
    columns: tuple[int, int] | None = None
    transpose: bool = False

    def take(self, tensor: Tensor) -> Tensor:
        """The rectangle, as a view of the checkpoint tensor."""
        if self.transpose:
            tensor = tensor.t()
        if self.rows is not None:
            tensor = tensor[self.rows[0] : self.rows[1]]
        if self.columns is not None:
            tensor = tensor[:, self.columns[0] : self.columns[1]]
        return tensor

    @property
    def num_rows(self) -> int:
        if self.rows is not None:
            return self.rows[1] - self.rows[0]
        return self.shape[1] if self.transpose else self.shape[0]


@dataclass(frozen=True, slots=True)
class Parameter:
    """tensor: allocated, to be filled. sources: stacked along rows in this order; together its
    exact shape.

    std: of the normal distribution that dummy weights are drawn from; 0 makes ones (norms).
    """

    name: str
    tensor: Tensor
    sources: tuple[Source, ...]
    std: float = 0.02
