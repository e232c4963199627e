"""ComputedDrafts, ComputedDrafter: drafts that a model computes on the device after a step.

They come with the step's result and continue the text of that step, so only the next step can
verify them.
"""

from collections.abc import Sequence


class ComputedDrafts:
    """The drafts of one request, as the last step computed them."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._continued = -1  # length of the text that `_tokens` continue
        self._tokens: Sequence[int] = ()

    def extend(self, tokens: Sequence[int]) -> None:
        """Append accepted tokens to the text."""
        self.num_tokens += len(tokens)

    def receive(self, num_tokens: int, tokens: Sequence[int]) -> None:
        """Take the drafts that continue the text of its first num_tokens tokens."""
        self._continued, self._tokens = num_tokens, tokens

    def propose(self, most: int) -> list[int]:
        """Return at most `most` of the drafts; [] if the text has grown since their computation."""
        return list(self._tokens[:most]) if self._continued == self.num_tokens else []

    def end(self) -> None:
        """Do nothing, as a model learns from no answer."""


class ComputedDrafter:
    """The drafter of an engine whose drafts a model computes."""

    def begin(
        self, token_ids: Sequence[int], num_prompt: int, prediction: Sequence[int], key: bytes
    ) -> ComputedDrafts:
        """Return the drafts of a request; see `engine.speculation.drafter.Drafter`."""
        return ComputedDrafts(len(token_ids))
