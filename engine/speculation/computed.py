"""ComputedDrafts, ComputedDrafter: drafts that a model computes on the device after a step.

The drafts continue the text as of that step, so only the next step can verify them. The next step
is launched before the host knows the drafts' tokens, which `StepResult.drafts` returns.
"""

from collections.abc import Sequence

ON_DEVICE = -1  # a draft in its request's row on the device, which the host does not know yet


class ComputedDrafts:
    """The drafts of one request that a model computes; steps compute and verify them."""

    __slots__ = ("num_tokens",)

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def extend(self, tokens: Sequence[int]) -> None:
        """Append accepted tokens to the text."""
        self.num_tokens += len(tokens)

    def propose(self, most: int) -> list[int]:
        """Return no tokens, as drafts stay on the device."""
        return []

    def end(self) -> None:
        """Do nothing, as a draft model does not use earlier answers."""


class ComputedDrafter:
    """The drafter of an engine whose drafts a model computes."""

    def begin(
        self, token_ids: Sequence[int], num_prompt: int, prediction: Sequence[int], key: bytes
    ) -> ComputedDrafts:
        """Return the drafts of a request; see `engine.speculation.drafter.Drafter`."""
        return ComputedDrafts(len(token_ids))
