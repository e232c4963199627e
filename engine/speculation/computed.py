"""ComputedDrafts, ComputedDrafter: drafts that a model computes on the device after a step.

They continue the text of that step, so only the next step can verify them. It is launched before
the host knows the tokens, which `ComputedDrafts.read` returns when its result is there.
"""

from collections.abc import Callable, Sequence

ON_DEVICE = -1  # a draft that the drafter has left in its row, and that the host does not know yet


class ComputedDrafts:
    """The drafts of one request, as the last step computed them."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._continued = -1  # length of the text that the drafts continue
        self._count = 0
        self.read: Callable[[], Sequence[int]] = tuple

    def extend(self, tokens: Sequence[int]) -> None:
        """Append accepted tokens to the text."""
        self.num_tokens += len(tokens)

    def receive(self, num_tokens: int, count: int, read: Callable[[], Sequence[int]]) -> None:
        """Note that a step computes `count` drafts that continue the first num_tokens tokens.

        read: returns them, once they are computed.
        """
        self._continued, self._count, self.read = num_tokens, count, read

    def count_after(self, num_tokens: int) -> int:
        """Return how many drafts continue a text of so many tokens; 0 if it has grown since."""
        return self._count if self._continued == num_tokens else 0

    def propose(self, most: int) -> list[int]:
        """Return ON_DEVICE for each of at most `most` drafts; [] if the text has grown since."""
        return [ON_DEVICE] * min(most, self.count_after(self.num_tokens))

    def end(self) -> None:
        """Do nothing, as a model learns from no answer."""


class ComputedDrafter:
    """The drafter of an engine whose drafts a model computes."""

    def begin(
        self, token_ids: Sequence[int], num_prompt: int, prediction: Sequence[int], key: bytes
    ) -> ComputedDrafts:
        """Return the drafts of a request; see `engine.speculation.drafter.Drafter`."""
        return ComputedDrafts(len(token_ids))
