"""TileTower: the base class of vision towers that encode square tiles of one size."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from engine.config.vision import TileVision
from engine.layers.build import Builder
from engine.models.vision.block import Block
from engine.models.vision.tower import Tower, patches_of, places, segments_of


class TileTower(Tower):
    """A tower that encodes the tiles of all pictures alike, each as a segment of its own.

    Subclasses make `blocks`, the layers. The patches of a tile are ordered so that the patches of
    one embedding are consecutive.
    """

    blocks: Sequence[Block]

    def __init__(self, build: Builder, config: TileVision, patch: str, *, bias: bool) -> None:
        """Make the layer from pixels to patches.

        patch: the beginning of the names of this layer's tensors.
        bias: whether this layer has a bias.
        """
        super().__init__(build, config)
        self.tiles = config
        width, size = config.hidden_size, config.patch_size**2
        self._patch = self.matrix(f"{patch}.weight", width, 3, size)  # colours, then pixels
        self._patch_bias = self.vector(f"{patch}.bias", width).tensor if bias else None

    @abstractmethod
    def placed(self, x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Return patches with their positions and, where the family has one, a class token.

        x: float32 [tiles, patches of a tile, hidden_size].
        rows, columns: the row and column of each patch in its tile.
        """

    def rotation(self, tiles: int, rows: Tensor, columns: Tensor) -> Tensor | None:
        """Return rotary cosines and sines for the result of `placed`; None = not rotary.

        tiles: the number of tiles.
        rows, columns: as in `placed`.
        """
        return None

    @abstractmethod
    def projected(self, x: Tensor) -> Tensor:
        """Return the embeddings [n, out_size] of x, the last layer's output.

        x: [tiles, patches of a tile and class token, hidden_size].
        """

    def shape_of(self, size: int) -> tuple[int, int, int]:
        return max(1, size // self.tiles.tile_size), self.tiles.tile, self.tiles.tile

    def step_bytes(self, size: int) -> int:
        config = self.tiles
        inside = 4 * config.hidden_size + 2 * max(2 * config.hidden_size, config.intermediate_size)
        tiles = -(-size // config.tile_size)
        return tiles * config.patches**2 * inside * self.activation_dtype.itemsize

    def encode(self, pixels: Sequence[Tensor]) -> Tensor:
        config = self.tiles
        tiles = torch.cat([*pixels])
        count, side = len(tiles), config.patches
        patches = patches_of(self.normalised(tiles), config.patch_size, config.merge)
        weight = self._patch.transpose(1, 2).flatten(1)
        x = linear(patches, weight, self._patch_bias).view(count, side**2, -1)
        rows, columns = places(side, side, config.merge, tiles.device)
        x = self.placed(x, rows, columns)
        rotation = self.rotation(count, rows, columns)
        segments = segments_of([x.shape[1]] * count, tiles.device, rotation)
        residual = x.to(self.activation_dtype).flatten(0, 1)
        for block in self.blocks:
            residual = block.forward(residual, segments)
        return self.projected(residual.view(x.shape)).to(self.dtype)

    def joined(self, x: Tensor) -> Tensor:
        """Return the patches of each embedding in one row [n, merge² * hidden_size]."""
        return x.reshape(-1, self.tiles.merge**2 * self.tiles.hidden_size)
