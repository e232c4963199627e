"""Tower: the base class of vision encoders, with the common computations."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from engine.config.vision import VisionConfig
from engine.layers.build import Builder
from engine.layers.linear import Linear, RowParallelLinear
from engine.layers.norm import LayerNorm, RMSNorm
from engine.parallel.group import TensorParallelGroup
from engine.quantization.method import LinearSpec, Part
from engine.quantization.registry import linear_method
from engine.weights.parameter import Fill, Parameter, Rows, Source
from kernels.metadata import AttentionMeta, RotaryPlaces


class Tower(ABC):
    """A vision encoder, which is not divided among ranks and not quantised.

    Subclasses create their layers and parameters by its methods, which register them for loading.
    The argument `name` is Manta's name of a tensor (`VisionConfig.names`), without ".weight" or
    ".bias".
    """

    def __init__(self, build: Builder, config: VisionConfig) -> None:
        self.config, self.kernels = config, build.kernels
        self.dtype, self.activation_dtype = build.dtype, build.activation_dtype
        self.device = build.device
        self.linears: list[Linear] = []
        self._method = linear_method("none", build.kernels, build.runs_on)
        self._parameters: list[Parameter] = []
        self._mean = torch.tensor(config.mean)
        self._deviation = torch.tensor(config.deviation)

    @abstractmethod
    def encode(self, pixels: Sequence[Tensor]) -> Tensor:
        """Return the concatenated embeddings of pictures, in the model's dtype.

        The shape is [sum of sizes, out_size * (1 + deepstack)]. The last bits of a picture's
        embeddings may depend on the other pictures of the call.

        pixels: uint8 [tiles, height, width, 3] of each picture, on the device.
        """

    @abstractmethod
    def shape_of(self, size: int) -> tuple[int, int, int]:
        """Return the shape (tiles, height, width) of pixels that give at most `size` embeddings."""

    @abstractmethod
    def step_bytes(self, size: int) -> int:
        """Return an estimate of the peak bytes of activations for pictures of `size` embeddings."""

    def parameters(self) -> Iterator[Parameter]:
        yield from self._parameters
        for linear in self.linears:
            yield from linear.parameters

    def linear(
        self,
        names: str | Sequence[str],
        out: int,
        features: int,
        *,
        bias: bool = True,
        transposed: bool = False,
        rows: Sequence[Rows] = (),
    ) -> Linear:
        """Create a linear layer of one matrix, or of several matrices stacked along rows.

        out, features: the numbers of rows and columns of each matrix.
        transposed: whether the checkpoint stores the matrices as [in, out].
        rows: the order of rows of each matrix; () = as stored.
        """
        linear = Linear(self._spec(names, out, features, bias, transposed, rows), self._method)
        self.linears.append(linear)
        return linear

    def closing(
        self, name: str, out: int, features: int, *, bias: bool = True
    ) -> RowParallelLinear:
        """Create the last linear layer of a residual branch, which can add its output to the
        residual."""
        spec = self._spec(name, out, features, bias)
        linear = RowParallelLinear(spec, self._method, TensorParallelGroup())
        self.linears.append(linear)
        return linear

    def _spec(
        self,
        names: str | Sequence[str],
        out: int,
        features: int,
        bias: bool,
        transposed: bool = False,
        rows: Sequence[Rows] = (),
    ) -> LinearSpec:
        names = (names,) if isinstance(names, str) else tuple(names)
        parts = tuple(
            Part(name, out, features, order, (0, features), transposed)
            for name, order in zip(names, rows or [(0, out)] * len(names), strict=True)
        )
        return LinearSpec(names[0], parts, bias, self.dtype, self.device)

    def layer_norm(self, name: str, size: int, eps: float | None = None) -> LayerNorm:
        weight, bias = (
            self.vector(f"{name}.{part}", size, self.activation_dtype, std)
            for part, std in (("weight", 0.0), ("bias", 0.02))
        )
        return LayerNorm(self.kernels, weight, bias, self.config.norm_eps if eps is None else eps)

    def rms_norm(
        self, name: str, size: int, eps: float | None = None, *, offset: float = 0.0
    ) -> RMSNorm:
        """Create an RMS norm.

        eps: the norm's epsilon; None = the tower's.
        offset: a number that is added to the checkpoint's weights.
        """
        dtype = torch.float32 if offset else self.activation_dtype
        weight = self.vector(f"{name}.weight", size, dtype, 0.0, offset)
        return RMSNorm(self.kernels, weight, self.config.norm_eps if eps is None else eps)

    def vector(
        self,
        stored: str,
        size: int,
        dtype: torch.dtype = torch.float32,
        std: float = 0.02,
        offset: float = 0.0,
        fill: Fill | None = None,
    ) -> Parameter:
        """Create a vector of all elements of the checkpoint's tensor `stored`, of any shape.

        std, offset, fill: see `Parameter`.
        """
        tensor = torch.empty(size, dtype=dtype, device=self.device)
        source = Source(stored, (size,), flat=True)
        parameter = Parameter(stored, tensor, (source,), std=std, fill=fill, offset=offset)
        self._parameters.append(parameter)
        return parameter

    def matrix(self, stored: str, rows: int, *rest: int) -> Tensor:
        """Create a float32 tensor [rows, *rest] for the checkpoint's tensor `stored`, of any
        shape."""
        size = rows
        for length in rest:
            size *= length
        return self.vector(stored, size).tensor.view(rows, *rest)

    def normalised(self, pixels: Tensor) -> Tensor:
        """Return pixels [..., 3] as float32 with the checkpoint's mean and deviation.

        The mean is subtracted in float32, before anything is rounded to 16 bits.
        """
        if self._mean.device != pixels.device:
            self._mean = self._mean.to(pixels.device)
            self._deviation = self._deviation.to(pixels.device)
        return (pixels.float() * (1 / 255) - self._mean) / self._deviation

    def attend(self, qkv: Tensor, segments: AttentionMeta, scale: float | None = None) -> Tensor:
        """Compute bidirectional attention within each segment, with rotary embeddings if there are
        any.

        qkv: [n, 3 * num_heads * head_dim], which is overwritten.
        segments: the result of `segments_of`.
        scale: the factor on scores; None = 1 / sqrt(head_dim).
        Returns [n, num_heads * head_dim].
        """
        table = None if segments.rotary is None else segments.rotary.table
        scale = self.config.head_dim**-0.5 if scale is None else scale
        return self.kernels.whole_texts(
            qkv, table, self.config.num_heads, scale, 0, segments, self.dtype
        )


def segments_of(
    lengths: Sequence[int], device: torch.device, rotation: Tensor | None = None
) -> AttentionMeta:
    """Return the AttentionMeta of consecutive segments, for `Tower.attend`.

    rotation: float32 [n, head_dim], each token's cosines, then sines (rotate-half form); None = no
        rotary embedding.
    """
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    nothing = torch.empty(0, dtype=torch.int32, device=device)
    rotary = None
    if rotation is not None:
        rows = torch.arange(starts[-1], dtype=torch.int32, device=device)
        rotary = RotaryPlaces(rows, rotation)
    return AttentionMeta(
        positions=nothing,
        slots=nothing,
        query_start=torch.tensor(starts, dtype=torch.int32).to(device, non_blocking=True),
        kv_len=nothing,
        block_table=nothing,
        num_decodes=0,
        max_kv_len=max(lengths),
        query_start_host=starts,
        rotary=rotary,
    )


def patches_of(pixels: Tensor, size: int, merge: int = 1) -> Tensor:
    """Divide tiles [tiles, height, width, 3] into patches [n, size * size * 3].

    The order is by tile, then by rows of blocks of merge x merge patches; the patches of a block
    are consecutive.
    """
    tiles, height, width, _ = pixels.shape
    block = size * merge
    cut = pixels.reshape(tiles, height // block, merge, size, width // block, merge, size, 3)
    return cut.permute(0, 1, 4, 2, 5, 3, 6, 7).reshape(-1, size * size * 3)


def places(rows: int, columns: int, merge: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the row and column of each patch of a grid, in the order of `patches_of`."""
    grid = torch.arange(rows * columns, device=device).view(rows // merge, merge, -1, merge)
    order = grid.transpose(1, 2).flatten()
    return order // columns, order % columns


def turns(
    rows: Tensor, columns: Tensor, dim: int, theta: float = 1e4, *, apart: bool = False
) -> Tensor:
    """Return rotary cosines, then sines, for positions on two axes, [n, dim].

    The first half of the angles is for the row, the second half for the column.

    rows, columns: [n], positions.
    dim: the number of elements of a head.
    theta: the base of the frequencies.
    apart: whether columns have frequencies between those of rows; otherwise both have the same.
    """
    steps = torch.arange(0, dim // 2, 2, dtype=torch.float32, device=rows.device)
    frequencies = theta ** -(steps / (dim // 2))
    of_columns = theta ** -((steps + 1) / (dim // 2)) if apart else frequencies
    angles = torch.cat((rows[:, None] * frequencies, columns[:, None] * of_columns), -1)
    return torch.cat((angles.cos(), angles.sin()), -1)
