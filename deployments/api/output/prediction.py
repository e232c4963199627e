"""PredictionMatch: how much of the client's prediction an answer has."""

from collections.abc import Sequence


class PredictionMatch:
    """The count of output tokens that are those of the prediction, in its order.

    It follows from the text alone, so it is the same whatever the engine drafted, and after a
    takeover. The match ends at a token that differs, and goes on where two tokens in a row stand in
    the prediction.

    accepted: such tokens so far; at most as many as the prediction has
    """

    def __init__(self, prediction: Sequence[int]) -> None:
        self.accepted = 0
        self._prediction = prediction
        self._next = 0  # index of the token that would go on with the match; -1: there is none
        self._last = -1
        # the first place after each pair of tokens
        self._after: dict[tuple[int, int], int] = {}
        for place in range(len(prediction), 1, -1):
            self._after[prediction[place - 2], prediction[place - 1]] = place

    @property
    def rejected(self) -> int:
        """The number of the prediction's tokens that are not in the output."""
        return len(self._prediction) - self.accepted

    def feed(self, tokens: Sequence[int]) -> None:
        """Take the next output tokens."""
        prediction = self._prediction
        for token in tokens:
            place = self._next
            if 0 <= place < len(prediction) and prediction[place] == token:
                self.accepted = min(self.accepted + 1, len(prediction))
                self._next = place + 1
            else:
                self._next = self._after.get((self._last, token), -1)
            self._last = token
