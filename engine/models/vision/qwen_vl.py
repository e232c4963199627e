"""The towers of Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5 and Qwen3.6: pictures of any shape."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import grid_sample, linear

from engine.config.towers.qwen_vl import Qwen3Vision, Qwen25Vision, QwenVision
from engine.layers.build import Builder
from engine.layers.norm import Norm
from engine.models.vision.block import MLP, Block, GatedMLP, PlainMLP
from engine.models.vision.tower import Tower, patches_of, places, segments_of, turns


class Merger:
    """The layers that merge a block of patches into one embedding.

    name, up, down: names of the checkpoint's tensors.
    joined: whether the norm is over the whole block; otherwise over each patch.
    """

    def __init__(
        self, tower: "QwenTower", norm: Norm, up: str, down: str, *, joined: bool = False
    ) -> None:
        config = tower.vision
        self.width = config.hidden_size * config.merge**2
        self.joined, self.norm = joined, norm
        self.up = tower.linear(up, self.width, self.width)
        self.down = tower.linear(down, config.out_size, self.width)

    def forward(self, x: Tensor) -> Tensor:
        """Merge patches x [n, hidden_size] to embeddings [n / merge², out_size]."""
        x = self.norm(x.view(-1, self.width) if self.joined else x).view(-1, self.width)
        return self.down.forward(self.up.forward(x, act="gelu"))


@dataclass(slots=True)
class Entered:
    """The projected patches of pictures, ordered by blocks of merge x merge patches.

    Frames of a video that share patches count as one picture.

    x: [n, hidden_size] float32, projected patches.
    grids: rows and columns of patches of each picture.
    rows, columns: [n], the row and column of each patch in its picture.
    """

    x: Tensor
    grids: list[tuple[int, int]]
    rows: Tensor
    columns: Tensor

    @property
    def lengths(self) -> list[int]:
        return [height * width for height, width in self.grids]


class QwenTower(Tower):
    """The base class of Qwen's towers; subclasses define the layers of a version."""

    gated = False  # whether MLPs have a gate

    def __init__(self, build: Builder, config: QwenVision, *, bias: bool) -> None:
        """Create the patch projection, which all versions have. bias: whether it has a bias."""
        super().__init__(build, config)
        self.vision = config
        width, patch = config.hidden_size, config.patch_size
        # [width, colours, frames, patch²]
        self.patch = self.matrix(
            "visual.patch_embed.proj.weight", width, 3, config.frames, patch * patch
        )
        self.patch_bias = (
            self.vector("visual.patch_embed.proj.bias", width).tensor if bias else None
        )

    def shape_of(self, size: int) -> tuple[int, int, int]:
        side = self.vision.patch_size * self.vision.merge
        rows = max(1, math.isqrt(size))
        return 1, rows * side, size // rows * side

    def step_bytes(self, size: int) -> int:
        config = self.vision
        inner = config.intermediate_size * (2 if self.gated else 1)
        inside = 4 * config.hidden_size + 2 * max(2 * config.hidden_size, inner)
        return size * config.merge**2 * inside * self.activation_dtype.itemsize

    def enter(self, pixels: Sequence[Tensor]) -> Entered:
        """Project the patches of pictures.

        pixels: see `Tower.encode`; several tiles are the frames of a video.
        """
        patch, merge = self.vision.patch_size, self.vision.merge
        grids = [
            (picture.shape[1] // patch, picture.shape[2] // patch)
            for picture in pixels
            for _ in range(max(1, len(picture) // self.vision.frames))
        ]
        where = [places(*grid, merge, pixels[0].device) for grid in grids]
        rows, columns = (torch.cat(axis) for axis in zip(*where, strict=True))
        if all(len(picture) == 1 for picture in pixels):
            x = self._projected(pixels)
        else:
            x = torch.cat([self._projected([picture]) for picture in pixels])
        return Entered(x, grids, rows, columns)

    def _projected(self, pixels: Sequence[Tensor]) -> Tensor:
        """Return the projected patches [n, hidden_size] of still pictures, or of a video."""
        size, frames = self.vision.patch_size, self.vision.frames
        cut = [patches_of(self.normalised(picture), size, self.vision.merge) for picture in pixels]
        # [width, frames, patch² * 3]
        weight = self.patch.permute(0, 2, 3, 1).flatten(2)
        # a still picture has equal frames, so the weight is summed over frames
        if len(pixels[0]) == 1:
            return linear(torch.cat(cut), weight.sum(1), self.patch_bias)
        (patches,) = cut
        together = patches.unflatten(0, (-1, frames, len(patches) // len(pixels[0])))
        x = together.transpose(1, 2).flatten(0, 1).flatten(1)
        return linear(x, weight.flatten(1), self.patch_bias)

    def block(self, name: str, norms: tuple[Norm, Norm], mlp: MLP) -> Block:
        width = self.config.hidden_size
        qkv = self.linear(f"{name}.attn.qkv", 3 * width, width)
        return Block(self, norms, qkv, self.closing(f"{name}.attn.proj", width, width), mlp)


class Qwen2Tower(QwenTower):
    """The tower of Qwen2-VL."""

    def __init__(self, build: Builder, config: QwenVision) -> None:
        super().__init__(build, config, bias=False)
        width = config.hidden_size
        self.blocks = []
        for i in range(config.num_layers):
            name = f"visual.blocks.{i}"
            norms = (
                self.layer_norm(f"{name}.norm1", width),
                self.layer_norm(f"{name}.norm2", width),
            )
            mlp = PlainMLP(self, f"{name}.mlp.fc1", f"{name}.mlp.fc2")
            self.blocks.append(self.block(name, norms, mlp))
        norm = self.layer_norm("visual.merger.ln_q", width)
        self.merger = Merger(self, norm, "visual.merger.mlp.0", "visual.merger.mlp.2")

    def encode(self, pixels: Sequence[Tensor]) -> Tensor:
        entered = self.enter(pixels)
        residual = entered.x.to(self.activation_dtype)
        rotation = turns(entered.rows, entered.columns, self.vision.head_dim)
        segments = segments_of(entered.lengths, residual.device, rotation)
        for block in self.blocks:
            residual = block.forward(residual, segments)
        return self.merger.forward(residual).to(self.dtype)


class Qwen25Tower(QwenTower):
    """The tower of Qwen2.5-VL, most of whose layers have window attention.

    Patches are ordered by windows in all layers.
    """

    gated = True

    def __init__(self, build: Builder, config: Qwen25Vision) -> None:
        super().__init__(build, config, bias=False)
        self.windows = config
        width = config.hidden_size
        self.blocks = []
        for i in range(config.num_layers):
            name = f"visual.blocks.{i}"
            norms = self.rms_norm(f"{name}.norm1", width), self.rms_norm(f"{name}.norm2", width)
            self.blocks.append(self.block(name, norms, GatedMLP(self, f"{name}.mlp")))
        norm = self.rms_norm("visual.merger.ln_q", width)
        self.merger = Merger(self, norm, "visual.merger.mlp.0", "visual.merger.mlp.2")

    def encode(self, pixels: Sequence[Tensor]) -> Tensor:
        merge, device = self.vision.merge, pixels[0].device
        entered = self.enter(pixels)
        orders, lengths, before = [], [], 0
        for height, width in entered.grids:
            order, sizes = _windows(height // merge, width // merge, self.windows.window)
            orders.append(order + before)
            lengths += [size * merge**2 for size in sizes]
            before += len(order)
        units = torch.from_numpy(np.concatenate(orders)).to(device, non_blocking=True)

        def ordered(x: Tensor) -> Tensor:
            return x.unflatten(0, (-1, merge**2)).index_select(0, units).flatten(0, 1)

        residual = ordered(entered.x).to(self.activation_dtype)
        rotation = turns(ordered(entered.rows), ordered(entered.columns), self.vision.head_dim)
        inside, whole = (
            segments_of(sizes, device, rotation) for sizes in (lengths, entered.lengths)
        )
        for number, block in enumerate(self.blocks):
            segments = whole if number in self.windows.full_layers else inside
            residual = block.forward(residual, segments)
        merged = self.merger.forward(residual).to(self.dtype)
        return torch.empty_like(merged).index_copy_(0, units, merged)


def _windows(rows: int, columns: int, side: int) -> tuple[NDArray[np.int64], list[int]]:
    """Return (indices of a grid's elements, ordered by windows; number of elements of each window).

    rows, columns: the grid's size in elements.
    side: the side of a window in elements; windows at the right and bottom edge may be smaller.
    """
    row, column = np.divmod(np.arange(rows * columns), columns)
    window = row // side * -(-columns // side) + column // side
    return np.argsort(window, kind="stable"), np.bincount(window).tolist()


class Qwen3Tower(QwenTower):
    """The tower of Qwen3-VL and later: learned and rotary positions, and DeepStack."""

    def __init__(self, build: Builder, config: Qwen3Vision) -> None:
        super().__init__(build, config, bias=True)
        self.sizes = config
        width = config.hidden_size
        self.table = self.matrix("visual.pos_embed.weight", config.positions, width)
        self.blocks = []
        for i in range(config.num_layers):
            name = f"visual.blocks.{i}"
            norms = (
                self.layer_norm(f"{name}.norm1", width),
                self.layer_norm(f"{name}.norm2", width),
            )
            mlp = PlainMLP(self, f"{name}.mlp.linear_fc1", f"{name}.mlp.linear_fc2")
            self.blocks.append(self.block(name, norms, mlp))
        self.merger = self._merger("visual.merger", joined=False)
        self.levels = {
            layer: self._merger(f"visual.deepstack_merger_list.{level}", joined=True)
            for level, layer in enumerate(config.deepstack_layers)
        }

    def _merger(self, name: str, *, joined: bool) -> Merger:
        width = self.vision.hidden_size * (self.vision.merge**2 if joined else 1)
        norm = self.layer_norm(f"{name}.norm", width)
        return Merger(self, norm, f"{name}.linear_fc1", f"{name}.linear_fc2", joined=joined)

    def encode(self, pixels: Sequence[Tensor]) -> Tensor:
        entered = self.enter(pixels)
        residual = (entered.x + self._positions(entered)).to(self.activation_dtype)
        rotation = turns(entered.rows, entered.columns, self.vision.head_dim)
        segments = segments_of(entered.lengths, residual.device, rotation)
        levels = []
        for number, block in enumerate(self.blocks):
            residual = block.forward(residual, segments)
            if number in self.levels:
                levels.append(self.levels[number].forward(residual))
        return torch.cat((self.merger.forward(residual), *levels), 1).to(self.dtype)

    def _positions(self, entered: Entered) -> Tensor:
        """Return the learned position embeddings [n, width] of all patches."""
        lengths = entered.lengths
        pictures = zip(
            entered.grids, entered.rows.split(lengths), entered.columns.split(lengths), strict=True
        )
        return torch.cat(
            [self._learned(height, width, *place) for (height, width), *place in pictures]
        )

    def _learned(self, height: int, width: int, rows: Tensor, columns: Tensor) -> Tensor:
        """Return learned position embeddings [n, width] of patches at rows and columns of a grid.

        The table is stretched so that its corners are the grid's corners, and interpolated
        bilinearly.

        height, width: the grid's size in patches.
        """
        side = round(self.sizes.positions**0.5)
        above, below, down = _between(height, side, rows)
        left, right, across = _between(width, side, columns)
        top = torch.lerp(self.table[above * side + left], self.table[above * side + right], across)
        bottom = torch.lerp(
            self.table[below * side + left], self.table[below * side + right], across
        )
        return torch.lerp(top, bottom, down)


def _between(count: int, side: int, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return, along one axis, the two table entries around each patch, and the second's weight.

    count: the picture's number of patches along the axis.
    side: the table's number of entries along the axis.
    index: [n], positions of patches along the axis.
    Returns (entries before [n], entries after [n], weights of the latter [n, 1]).
    """
    lines = torch.linspace(0, side - 1, count, device=index.device)[index]
    before = lines.long()
    return before, (before + 1).clamp(max=side - 1), (lines - before)[:, None]


def sampled_positions(table: Tensor, entered: Entered, mode: str) -> Tensor:
    """Interpolate the learned position embeddings [n, width] of patches from a table.

    For each picture the table is stretched so that its outer edges are the picture's edges.

    table: [side * side, width] float32.
    mode: the interpolation, as in torch's `grid_sample`.
    """
    side = round(len(table) ** 0.5)
    counts = torch.tensor(entered.grids, dtype=torch.float32)
    sides = counts.repeat_interleave(torch.tensor(entered.lengths), 0)
    high, wide = sides.T.to(table.device, non_blocking=True)
    # coordinates for `grid_sample`: from -1 to 1, x first
    across = ((entered.columns + 0.5) / wide) * 2 - 1
    down = ((entered.rows + 0.5) / high) * 2 - 1
    places = torch.stack((across, down), -1)[None, :, None]
    lines = table.view(1, side, side, -1).permute(0, 3, 1, 2)
    sampled = grid_sample(lines, places, mode=mode, padding_mode="border", align_corners=False)
    return sampled[0, :, :, 0].T
