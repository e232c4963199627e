"""ModelDrafter: the interface of networks that draft next tokens for a target model.

Most drafters have one layer. Row i of its input is the target model's hidden state of token i and
the embedding of token i + 1. The drafter's KV blocks have the same ids as the target model's:

 step     states and next tokens of all tokens -> rows; the last accepted row gives the first draft
 pass     previous row, last draft -> a row, which gives the next draft; and so on

A draft model reads no hidden states. Row i of its input is token i, so that its first draft takes a
pass too.
"""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from engine.config.kv_groups import KVGroups
from engine.weights.load import Loadable
from kernels.kv.quantized import KV
from kernels.metadata import AttentionMeta


class ModelDrafter(Loadable, Protocol):
    """The interface of a network that drafts the next tokens of a target model."""

    # the target model's layers whose inputs are read, see `Decoder.taps`; () = final hidden states
    taps: tuple[int, ...]
    reads_states: bool  # whether the drafter reads hidden states of the target model
    kv: KVGroups  # the KV groups of the drafter's layers: one group that keeps all tokens

    @property
    def loading_bytes(self) -> int:
        """The peak bytes of weights and tables while loading."""
        ...

    def fused(self, states: Tensor) -> Tensor:
        """Compute the argument `states` of a step's first pass, [n, drafter's hidden size].

        The result is in new memory.

        states: [n, taps * hidden_size], the concatenated inputs of the target model's layers
            `taps`; without taps [n, hidden_size], its hidden states after the final norm.
        """
        ...

    def forward(
        self, token_ids: Tensor, states: Tensor, kv: Mapping[int, KV], meta: AttentionMeta
    ) -> Tensor:
        """Compute the tokens' hidden states [n, drafter's hidden size], the next pass's `states`.

        token_ids: [n] int64, the token after that of each state; if `reads_states` is False, the
            tokens themselves.
        states: the result of `fused`, or of the previous pass; may be overwritten.
        kv: the layers' caches, written in place.
        """
        ...

    def logits(self, rows: Tensor) -> Tensor:
        """Compute logits [n, vocab_size] of the tokens after `token_ids`.

        rows: [n, drafter's hidden size], results of `forward`.
        """
        ...
