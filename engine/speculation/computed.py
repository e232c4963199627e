"""ComputedDrafts, ComputedDrafter: drafts that a model computes on the device after a step.

They continue the text of that step, so only the next step can verify them. It is launched before
the host knows the tokens, which `ComputedDrafts.read` has when its result is there.
"""

from collections.abc import Callable, Sequence

ON_DEVICE = -1  # a draft that the drafter has left in its row, and that the host does not know yet


class ComputedDrafts:
    """The drafts of one request, as the last step computed them.

    Steps set the fields for each request, without a call.

    continued: the length of the text that the drafts continue.
    count: the number of drafts.
    read, place: `read()[place]` has the drafts, once they are computed.
    """

    __slots__ = ("continued", "count", "num_tokens", "place", "read")

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.continued = -1
        self.count = self.place = 0
        self.read: Callable[[], Sequence[Sequence[int]]] = tuple

    def extend(self, tokens: Sequence[int]) -> None:
        """Append accepted tokens to the text."""
        self.num_tokens += len(tokens)

    def propose(self, most: int) -> list[int]:
        """Return ON_DEVICE for each of at most `most` drafts; [] if the text has grown since."""
        return [ON_DEVICE] * min(most, self.count if self.continued == self.num_tokens else 0)

    def end(self) -> None:
        """Do nothing, as a model learns from no answer."""


class ComputedDrafter:
    """The drafter of an engine whose drafts a model computes."""

    def begin(
        self, token_ids: Sequence[int], num_prompt: int, prediction: Sequence[int], key: bytes
    ) -> ComputedDrafts:
        """Return the drafts of a request; see `engine.speculation.drafter.Drafter`."""
        return ComputedDrafts(len(token_ids))
