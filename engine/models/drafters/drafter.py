"""ModelDrafter: the interface of networks that draft the next tokens of a model's texts.

Most drafters have a layer whose row i belongs to token i of a text, and reads the model's state of
token i and the embedding of token i + 1. Its keys lie in blocks of the same numbers as the model's:

 step     states of all its tokens, next tokens -> rows; the last true row gives the first draft
 pass     that row, the draft -> the next row, which gives the next draft; and so on

A draft model reads no states. Its row i reads token i, as the model's does, so that the first draft
takes a pass, too.
"""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from engine.config.kv_groups import KVGroups
from engine.weights.load import Loadable
from kernels.kv.quantized import KV
from kernels.metadata import AttentionMeta


class ModelDrafter(Loadable, Protocol):
    """The interface of a network that drafts the next tokens of a model."""

    taps: tuple[int, ...]  # layers whose inputs it reads, see `Decoder.taps`; () = final states
    reads_states: bool  # whether it reads states of the model
    kv: KVGroups  # the cache of the drafter's layers: one group that keeps all tokens

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

    def forward(
        self, token_ids: Tensor, states: Tensor, kv: Mapping[int, KV], meta: AttentionMeta
    ) -> Tensor:
        """Compute the tokens' hidden states [n, drafter's hidden size], the next pass's `states`.

        token_ids: [n] int64, the token after each row's own; its own without states.
        states: the result of `fused`, or the rows of the last pass; may be overwritten.
        kv: the layers' caches, written in place.
        """
        ...

    def logits(self, rows: Tensor) -> Tensor:
        """Compute logits [n, vocab_size] of the token after `token_ids`."""
        ...
