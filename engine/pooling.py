"""Pooling: how one vector is made of a text's hidden states. No torch here, and no files:
`engine.pooled_checkpoint` reads what a checkpoint says of it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.errors import InvalidRequest

Vector = NDArray[np.float32]

_erf = np.frompyfunc(math.erf, 1, 1)
ACTIVATIONS: Mapping[str, Callable[[Vector], Vector]] = {
    "Identity": lambda x: x,
    "Tanh": np.tanh,
    "ReLU": lambda x: np.maximum(x, 0),
    "GELU": lambda x: (x * (1 + _erf(x / math.sqrt(2)).astype(np.float64)) / 2).astype(np.float32),
}


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer over the pooled vector.

    folder: of its weights. activation: its name in torch.nn. name: of its tensors.
    """

    folder: Path
    in_features: int
    out_features: int
    bias: bool
    activation: str
    name: str = "linear"


@dataclass(frozen=True, slots=True)
class Norm:
    """A LayerNorm over the pooled vector. folder: of its weights. name: of its tensors."""

    folder: Path
    size: int
    bias: bool
    eps: float
    name: str


@dataclass(frozen=True, slots=True)
class Pooling:
    """The pooling of a text's hidden states into one vector.

    mode: "last" = the last token's hidden state behind the final norm, "mean" = the mean of all,
        "cls" = the first token's.
    steps: over the pooled vector, in order; None = division by its length.
    prompts: texts that are put before a text, by the name that a caller gives.
    matryoshka: the first elements of a vector are a vector; dimensions: these many, () = any.
    max_tokens: of a text; 0 = the model's context.
    labels: of a classifier, one for each number of its "vector"; () = of an embedder.
    independent: the labels do not exclude each other, so each has a sigmoid and not all a softmax.
    raw: "relevance" = the number of a reranker is its score as it is, without a sigmoid;
        "labels" = so are those of each label.
    pairs: whether a text of two parts can be computed; a BERT tells them by its separator, which
        its tokenizer.json has.
    """

    mode: str
    steps: tuple[Dense | Norm | None, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    matryoshka: bool = False
    dimensions: tuple[int, ...] = ()
    max_tokens: int = 0
    labels: tuple[str, ...] = ()
    independent: bool = False
    raw: tuple[str, ...] = ()
    pairs: bool = True

    def size(self, hidden_size: int) -> int:
        """Return the number of elements of a vector."""
        dense = [step.out_features for step in self.steps if isinstance(step, Dense)]
        return dense[-1] if dense else hidden_size

    @property
    def scaled(self) -> bool:
        """Whether vectors are divided by their length."""
        return bool(self.steps) and self.steps[-1] is None

    def relevance(self, vector: Vector, *, raw: bool = False) -> float:
        """Return a reranker pair's relevance; higher is nearer. raw: the number without a
        sigmoid."""
        score = vector if raw or "relevance" in self.raw else _sigmoid(vector)
        return float(score[0])

    def probabilities(self, vector: Vector, *, raw: bool = False) -> Vector:
        """Return each label's probability, as transformers' text-classification pipeline: [labels].

        raw: the numbers that the probabilities are made of.
        """
        if raw or "labels" in self.raw:
            return vector
        if self.independent or len(self.labels) == 1:
            return _sigmoid(vector)
        powers = np.exp(vector - vector.max())
        return powers / powers.sum()

    def cut(self, vector: Vector, dimensions: int) -> Vector:
        """Return the first `dimensions` elements, scaled to the length that the whole vector would
        have."""
        cut = vector[:dimensions]
        return normalized(cut) if self.scaled else cut

    def check_dimensions(self, dimensions: int, size: int, name: str = "dimensions") -> None:
        """Raise InvalidRequest if a vector of `size` elements has no shorter one of so many
        dimensions.

        name: of the request field.
        """
        if not self.matryoshka:
            raise InvalidRequest(
                f"{name}: this model's vectors cannot be cut; its config.json would say so by "
                "is_matryoshka or matryoshka_dimensions",
                param=name,
                code="not_supported",
            )
        if self.dimensions and dimensions not in self.dimensions:
            allowed = ", ".join(map(str, self.dimensions))
            raise InvalidRequest(f"{name} must be one of {allowed}", param=name)
        if not 1 <= dimensions <= size:
            raise InvalidRequest(f"{name} must be between 1 and {size}", param=name)

    def prompt(self, name: str) -> str:
        """Return the prompt of this name. Raises InvalidRequest for a name that the checkpoint
        lacks."""
        try:
            return self.prompts[name]
        except KeyError:
            known = ", ".join(self.prompts) or "none"
            raise InvalidRequest(
                f"prompt_name: the model has no such prompt; it has: {known}", param="prompt_name"
            ) from None


class PoolingHead:
    """The steps of a Pooling, with weights. size: elements of its vectors."""

    def __init__(
        self, pooling: Pooling, size: int, steps: Sequence[Callable[[Vector], Vector]] = ()
    ) -> None:
        self.pooling = pooling
        self.size = size
        self._steps = steps

    def __call__(self, pooled: Vector, *, unscaled: bool = False) -> Vector:
        """Apply the steps to a pooled vector. unscaled: leave out a last division by its length."""
        steps = self._steps[:-1] if unscaled and self.pooling.scaled else self._steps
        for step in steps:
            pooled = step(pooled)
        return pooled


class PooledText:
    """The pooled hidden states of one text, collected chunk by chunk."""

    def __init__(self, head: PoolingHead, num_tokens: int, *, unscaled: bool = False) -> None:
        self._head = head
        self._unscaled = unscaled
        self._mean = head.pooling.mode == "mean"
        self._num_tokens = num_tokens
        self._pooled: Vector | None = None

    def add(self, start: int, part: Vector) -> None:
        """Add a chunk of the text; a preempted text begins again.

        part: the sum of the chunk's hidden states, or the one hidden state that is asked for.
        start: where the chunk begins.
        """
        if self._mean and start > 0:
            assert self._pooled is not None, "a chunk's hidden states were lost"
            self._pooled = self._pooled + part
        else:
            self._pooled = part

    def vector(self) -> bytes:
        """Return the pooled vector, float32, little-endian. Legal when all chunks are in."""
        assert self._pooled is not None, "nothing was pooled"
        pooled = self._pooled / np.float32(self._num_tokens) if self._mean else self._pooled
        return self._head(pooled, unscaled=self._unscaled).astype("<f4").tobytes()


def as_array(vector: bytes) -> Vector:
    """Return the array of the bytes that `PooledText.vector` wrote."""
    return np.frombuffer(vector, dtype="<f4")


def normalized(x: Vector) -> Vector:
    return x / np.maximum(np.linalg.norm(x), np.float32(1e-12))  # as torch's normalize


def _sigmoid(x: Vector) -> Vector:
    sigmoid: Vector = (1 / (1 + np.exp(-x.astype(np.float64)))).astype(np.float32)
    return sigmoid
