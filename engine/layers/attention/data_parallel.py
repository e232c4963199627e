"""Data-parallel attention: each rank has all heads and computes attention for its requests."""

from torch import Tensor

from engine.layers.block import Block
from engine.layers.norm import Norm
from engine.parallel.group import TensorParallelGroup
from kernels.kv.quantized import KV
from kernels.metadata import AttentionMeta, OwnTokens


class DataParallelAttention:
    """Attention of a rank for its own requests only.

    For tokens of other ranks' requests, a rank contributes zeros to the all-reduce at the end of
    the block. The all-reduce is as large as with tensor parallelism, and no other communication is
    needed.
    """

    def __init__(self, attention: Block, group: TensorParallelGroup) -> None:
        """Wrap the attention of one rank.

        attention: attention with all heads.
        group: the ranks that divide the requests.
        """
        self.attention, self.group = attention, group
        self.linears, self.norms = attention.linears, attention.norms
        self.others, self.stacks = attention.others, attention.stacks

    @property
    def activations(self) -> int:
        # If all tokens of a step belong to this rank, their inputs and outputs are in memory twice.
        return self.attention.activations + 2 * self.linears[0].spec.in_features

    def forward(
        self,
        x: Tensor,
        kv: KV,
        meta: AttentionMeta,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Return self(norm(x)), [n, hidden], or add it to residual in place (`Block.forward`).

        meta: its field `own` has the tokens of this rank's requests.
        """
        assert meta.own is not None
        attended = self._attend(x, kv, meta.own, norm)
        if residual is None:
            return self.group.all_reduce(attended)
        return self.group.add_reduced(attended, residual)

    def _attend(self, x: Tensor, kv: KV, own: OwnTokens, norm: Norm | None) -> Tensor:
        """Compute attention for this rank's tokens, `own`; return x's shape with zeros for other
        tokens."""
        if own.others is not None:
            assert own.meta is not None
            return self.attention.forward(x, kv, own.meta, norm=norm).masked_fill_(own.others, 0)
        out = x.new_zeros(x.shape)
        if own.meta is not None:
            assert own.tokens is not None
            mine = x.index_select(0, own.tokens)
            out.index_copy_(0, own.tokens, self.attention.forward(mine, kv, own.meta, norm=norm))
        return out
