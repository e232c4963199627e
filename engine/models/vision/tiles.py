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
    """A tower that encodes square tiles of one size, each as a separate attention segment.

    Subclasses create `blocks`, the layers. The patches of a tile are ordered so that the patches of
    an embedding are consecutive.
    """

    blocks: Sequence[Block]

    def __init__(self, build: Builder, config: TileVision, patch: str, *, bias: bool) -> None:
        """Create the patch projection.

        patch: the prefix of the projection's tensor names.
        bias: whether it has a bias.
        """
        super().__init__(build, config)
        self.tiles = config
        width, size = config.hidden_size, config.patch_size**2
        # [width, colours, pixels of a patch]
        self._patch = self.matrix(f"{patch}.weight", width, 3, size)
        self._patch_bias = self.vector(f"{patch}.bias", width).tensor if bias else None

    @abstractmethod
    def placed(self, x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Add positions to patches and, in families that have one, a class token.

        x: float32 [tiles, patches of a tile, hidden_size].
        rows, columns: the row and column of each patch in its tile.
        """

    def rotation(self, tiles: int, rows: Tensor, columns: Tensor) -> Tensor | None:
        """Return rotary cosines and sines for the result of `placed`; None = no rotary embedding.

        tiles: the number of tiles.
        rows, columns: see `placed`.
        """
        return None

    @abstractmethod
    def projected(self, x: Tensor) -> Tensor:
        """Project the last layer's output to embeddings [n, out_size].

        x: [tiles, patches of a tile and class token, hidden_size], the last layer's output.
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
        """Concatenate the patches of each embedding, [n, merge² * hidden_size]."""
        return x.reshape(-1, self.tiles.merge**2 * self.tiles.hidden_size)
