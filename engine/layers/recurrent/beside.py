"""AttentionBesideMixer: attention and a recurrent mixer in parallel, after the same norm."""

from torch import Tensor

from engine.layers.block import Block
from engine.layers.norm import Norm
from kernels.kv.quantized import KV
from kernels.metadata import AttentionMeta


class AttentionBesideMixer:
    """The sum attention(norm(x)) + mixer(norm(x)).

    kv: keys and values, then the mixer's tensors.
    """

    def __init__(self, attention: Block, mixer: Block) -> None:
        self.attention, self.mixer = attention, mixer
        self.linears = (*attention.linears, *mixer.linears)
        self.norms = (*attention.norms, *mixer.norms)
        self.others = (*attention.others, *mixer.others)
        self.stacks = ()

    @property
    def activations(self) -> int:
        return self.linears[0].spec.in_features + max(
            self.attention.activations, self.mixer.activations
        )

    def forward(
        self,
        x: Tensor,
        kv: KV,
        meta: AttentionMeta,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Return self(norm(x)) of x [n, hidden], in the same shape.

        residual: if given, self(norm(x)) is added to it in place, and the residual is returned.
        """
        if norm is not None:
            x = norm(x)
        # attention needs a copy, as the mixer runs first and overwrites the residual
        elif residual is x:
            x = x.clone()
        mixed = self.mixer.forward(x, kv[2:], meta, residual=residual)
        return self.attention.forward(x, kv[:2], meta, residual=mixed)
