"""Divergence: how much next-token distributions differ from exact ones, such as KL divergence."""

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class Divergence:
    """The divergence over the tokens of texts, from running sums.

    kl: the mean of sum(p * log(p / q)), where p is exact, in nats (Kullback and Leibler 1951).
    same_token: the share of positions at which both distributions have the same most likely token.
    largest: the largest difference of log-probabilities of the texts' own tokens, in nats.
    perplexities: (exact, other) exp of the mean negative log-probability of each token of the
        texts, except each text's first.
    """

    tokens: int = 0
    predicted: int = 0
    divergence: float = 0.0
    same: int = 0
    losses: tuple[float, float] = (0.0, 0.0)
    largest: float = 0.0

    def add_text(self, ids: Tensor, exact: Tensor, other: Tensor) -> None:
        """Add the tokens of one text to the sums.

        ids: the text's token ids [n].
        exact, other: log-probabilities of the token after each of the ids [n, vocab_size], float32.
        """
        self.tokens += len(ids)
        self.predicted += len(ids) - 1
        # Where p is 0, p log p is 0, but the difference of infinities would be NaN.
        terms = exact.exp() * (exact - other)
        self.divergence += float(terms.masked_fill_(exact.isneginf(), 0).sum())
        self.same += int((exact.argmax(-1) == other.argmax(-1)).sum())
        if len(ids) < 2:
            return
        next_ids = ids[1:, None].long()
        own, others = (logprobs[:-1].gather(1, next_ids) for logprobs in (exact, other))
        self.losses = (self.losses[0] - float(own.sum()), self.losses[1] - float(others.sum()))
        self.largest = max(self.largest, float((own - others).abs().max()))

    @property
    def kl(self) -> float:
        return self.divergence / max(1, self.tokens)

    @property
    def same_token(self) -> float:
        return self.same / max(1, self.tokens)

    @property
    def perplexities(self) -> tuple[float, float]:
        exact, other = (math.exp(loss / max(1, self.predicted)) for loss in self.losses)
        return exact, other
