"""ModelDrafter: the interface of networks that draft next tokens from a model's hidden states.

A drafter has a layer, whose row i belongs to token i of a text and reads the model's state of token
i and the embedding of token i + 1. Its keys lie beside the model's own, in the same blocks:

 step     states of all its tokens, next tokens -> rows; the last true row gives the first draft
 pass     that row, the draft -> the next row, which gives the next draft; and so on
"""

from typing import Protocol

from torch import Tensor

from engine.config.kv_groups import KVGroups
from engine.weights.load import Loadable
from kernels.kv.quantized import KV
from kernels.metadata import AttentionMeta


class ModelDrafter(Loadable, Protocol):
    """A network that drafts for a model."""

    taps: tuple[int, ...]  # layers whose inputs it reads, see `Decoder.taps`; () = final states
    layer_number: int  # the number that its layer has in `kv`
    kv: KVGroups  # what its layer keeps; a group of its own

    @property
    def loading_bytes(self) -> int:
        """The most bytes of weights and tables while loading."""
        ...

    def fused(self, states: Tensor) -> Tensor:
        """Return the states of a step's first pass [n, drafter's hidden size], in new memory.

        states: [n, taps * hidden_size] inputs of the model's layers, one beside the other; without
            taps [n, hidden_size], after the final norm.
        """
        ...

    def forward(self, token_ids: Tensor, states: Tensor, kv: KV, meta: AttentionMeta) -> Tensor:
        """Compute rows [n, drafter's hidden size], which are also the states of the next pass.

        token_ids: [n] int64, the token after each row's own.
        states: of `fused`, or rows of the last pass; may be overwritten.
        kv: the layer's caches, written in place.
        """
        ...

    def logits(self, rows: Tensor) -> Tensor:
        """Compute logits [n, vocab_size] of the token after `token_ids`."""
        ...
