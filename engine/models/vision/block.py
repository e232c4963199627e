"""Block: a layer of a vision encoder, with bidirectional attention and an MLP."""

from typing import Protocol

from torch import Tensor

from engine.layers.linear import Linear, RowParallelLinear
from engine.layers.norm import Norm
from engine.models.vision.tower import Tower
from kernels.metadata import AttentionMeta


class MLP(Protocol):
    def forward(self, residual: Tensor, norm: Norm) -> Tensor:
        """Add MLP(norm(residual)) to the residual [n, hidden_size] in place, and return the
        residual."""
        ...


class PlainMLP(MLP):
    """The MLP down(activation(up(x))). up, down: names of the checkpoint's tensors."""

    def __init__(self, tower: Tower, up: str, down: str) -> None:
        width, inner = tower.config.hidden_size, tower.config.intermediate_size
        self.act = tower.config.activation
        self.up = tower.linear(up, inner, width)
        self.down = tower.closing(down, width, inner)

    def forward(self, residual: Tensor, norm: Norm) -> Tensor:
        return self.down.forward(self.inner(residual, norm), residual=residual)

    def inner(self, x: Tensor, norm: Norm) -> Tensor:
        """Return activation(up(norm(x))), [n, intermediate_size]."""
        return self.up.forward(x, norm=norm, act=self.act)


class GatedMLP(MLP):
    """The MLP down(activation(gate(x)) * up(x))."""

    def __init__(self, tower: Tower, name: str, *, bias: bool = True) -> None:
        width, inner = tower.config.hidden_size, tower.config.intermediate_size
        self.act = tower.config.activation
        both = f"{name}.gate_proj", f"{name}.up_proj"
        self.both = tower.linear(both, inner, width, bias=bias)
        self.down = tower.closing(f"{name}.down_proj", width, inner, bias=bias)

    def forward(self, residual: Tensor, norm: Norm) -> Tensor:
        inner = self.both.forward(residual, norm=norm, gate=self.act)
        return self.down.forward(inner, residual=residual)


class Block:
    """A layer of a vision encoder, with norms before attention and MLP.

    qkv: the projection to queries, keys and values, in this order.
    """

    def __init__(
        self,
        tower: Tower,
        norms: tuple[Norm, Norm],
        qkv: Linear,
        out: RowParallelLinear,
        mlp: MLP,
    ) -> None:
        self.tower, self.qkv, self.out, self.mlp = tower, qkv, out, mlp
        self.attention_norm, self.mlp_norm = norms

    def forward(self, residual: Tensor, segments: AttentionMeta) -> Tensor:
        """Add the layer to the residual [n, hidden_size] in place, and return the residual.

        segments: see `Tower.attend`.
        """
        qkv = self.qkv.forward(residual, norm=self.attention_norm)
        attended = self.tower.attend(qkv, segments)
        residual = self.out.forward(attended, residual=residual)
        return self.mlp.forward(residual, self.mlp_norm)
