"""ModelDrafter: the interface of networks that draft the next tokens of a model's texts.

Most drafters have one layer. Its row i reads the target model's hidden state of token i and the
embedding of token i + 1. Its keys lie in KV blocks with the same ids as the target model's:

 step     states and next tokens of all tokens -> rows; the last accepted one gives the first draft
 pass     the row before, the last draft -> a row, which gives the next draft; and so on

A draft model reads no states. Its row i reads token i, as the target model's does, so its first
draft takes a pass, too.
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

    taps: tuple[int, ...]  # layers whose inputs are read, see `Decoder.taps`; () = final states
    reads_states: bool  # whether it reads states of the model
    kv: KVGroups  # the cache of the drafter's layers: one group that keeps all tokens

    @property
    def loading_bytes(self) -> int:
        """The peak bytes of weights and tables while loading."""
        ...

    def fused(self, states: Tensor) -> Tensor:
        """Return the input `states` of a step's first pass [n, drafter's hidden size].

        The result is in new memory.

        states: [n, taps * hidden_size], the concatenated inputs of the target model's layers;
            without taps [n, hidden_size], its hidden states after the final norm.
        """
        ...

    def forward(
        self, token_ids: Tensor, states: Tensor, kv: Mapping[int, KV], meta: AttentionMeta
    ) -> Tensor:
        """Compute the tokens' hidden states [n, drafter's hidden size], the next pass's `states`.

        token_ids: [n] int64, the token after each row's own; the row's own if `reads_states` is
            False.
        states: the result of `fused`, or the result of the pass before; may be overwritten.
        kv: the layers' caches, written in place.
        """
        ...

    def logits(self, rows: Tensor) -> Tensor:
        """Compute logits [n, vocab_size] of the tokens after `token_ids`.

        rows: [n, drafter's hidden size], results of `forward`.
        """
        ...
