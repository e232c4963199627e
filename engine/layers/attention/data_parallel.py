"""Data-parallel attention: each rank has all heads and attends for its own requests."""

from torch import Tensor

from engine.layers.block import Block
from engine.layers.norm import Norm
from engine.parallel.group import TensorParallelGroup
from kernels.kv.quantized import KV
from kernels.metadata import AttentionMeta, OwnTokens


class DataParallelAttention:
    """The attention of a rank that attends only for its own requests.

    For tokens of other ranks' requests, a rank contributes zeros to the all-reduce that ends the
    layer. The all-reduce is as large as with divided heads, and no other message is needed.
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
        # Where all tokens of a step are this rank's, their inputs and outputs exist twice.
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
        """Attend for this rank's tokens, `own`; return zeros for other tokens, in x's shape."""
        if own.others is not None:
            assert own.meta is not None
            return self.attention.forward(x, kv, own.meta, norm=norm).masked_fill_(own.others, 0)
        out = x.new_zeros(x.shape)
        if own.meta is not None:
            assert own.tokens is not None
            mine = x.index_select(0, own.tokens)
            out.index_copy_(0, own.tokens, self.attention.forward(mine, kv, own.meta, norm=norm))
        return out
