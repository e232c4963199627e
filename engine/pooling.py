"""Pooling: how an embedding model pools a text's hidden states. No torch and no files here.

`engine.pooled_checkpoint` reads the pooling of a checkpoint from its files.
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

    folder: the folder of its weights.
    activation: the name of the activation in torch.nn.
    name: the name of its tensors.
    """

    folder: Path
    in_features: int
    out_features: int
    bias: bool
    activation: str
    name: str = "linear"


@dataclass(frozen=True, slots=True)
class Norm:
    """A LayerNorm over the pooled vector.

    folder: the folder of its weights.
    name: the name of its tensors.
    """

    folder: Path
    size: int
    bias: bool
    eps: float
    name: str


@dataclass(frozen=True, slots=True)
class Pooling:
    """The settings by which a model pools the hidden states of a text into one vector.

    mode: "last" = the last token's hidden state after the final norm, "mean" = the mean of all,
        "cls" = the first token's.
    steps: layers over the pooled vector, in order; None = L2 normalisation.
    prompts: name -> a prefix for texts.
    matryoshka: whether the first elements of a vector can be used as a shorter vector.
    dimensions: the allowed numbers of first elements; () = any.
    max_tokens: the maximum number of tokens of a text; 0 = the model's context.
    labels: the label of each logit of a classifier; () for an embedding model.
    independent: whether the classifier is multi-label: a sigmoid for each label, not a softmax over
        all.
    raw: "relevance" = a reranker's score is its logit, without a sigmoid; "labels" = a classifier's
        scores are its logits, without sigmoid or softmax.
    pairs: whether the model takes pairs of texts; a BERT needs a separator token in tokenizer.json.
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
        """Whether vectors are normalised to length 1."""
        return bool(self.steps) and self.steps[-1] is None

    def relevance(self, vector: Vector, *, raw: bool = False) -> float:
        """Return a reranker's relevance score of a pair of texts; higher is more relevant.

        vector: the pair's logits.
        raw: whether to return the logit, without a sigmoid.
        """
        score = vector if raw or "relevance" in self.raw else _sigmoid(vector)
        return float(score[0])

    def probabilities(self, vector: Vector, *, raw: bool = False) -> Vector:
        """Return the probability of each label [labels], as transformers' text-classification does.

        raw: whether to return the logits instead.
        """
        if raw or "labels" in self.raw:
            return vector
        if self.independent or len(self.labels) == 1:
            return _sigmoid(vector)
        powers = np.exp(vector - vector.max())
        return powers / powers.sum()

    def cut(self, vector: Vector, dimensions: int) -> Vector:
        """Return a vector's first `dimensions` elements, normalised to length 1 if `scaled`."""
        cut = vector[:dimensions]
        return normalized(cut) if self.scaled else cut

    def check_dimensions(self, dimensions: int, size: int, name: str = "dimensions") -> None:
        """Raise InvalidRequest if vectors of `size` elements cannot be cut to `dimensions`.

        name: the request field.
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
        """Return the prompt of this name. Raises InvalidRequest for an unknown name."""
        try:
            return self.prompts[name]
        except KeyError:
            known = ", ".join(self.prompts) or "none"
            raise InvalidRequest(
                f"prompt_name: the model has no such prompt; it has: {known}", param="prompt_name"
            ) from None


class PoolingHead:
    """The layers over pooled vectors (`Pooling.steps`), with their weights.

    size: the number of elements of an output vector.
    """

    def __init__(
        self, pooling: Pooling, size: int, steps: Sequence[Callable[[Vector], Vector]] = ()
    ) -> None:
        self.pooling = pooling
        self.size = size
        self._steps = steps

    def __call__(self, pooled: Vector, *, unscaled: bool = False) -> Vector:
        """Apply all layers to a pooled vector [hidden_size]; return a float32 vector [size].

        unscaled: whether to leave out the final normalisation to length 1, if there is one.
        """
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

    def add_chunk(self, start: int, part: Vector) -> None:
        """Add a chunk of the text; a chunk at position 0 restarts a preempted text.

        start: the position where the chunk begins.
        part: the sum of the chunk's hidden states, or the pooled hidden state, [hidden_size].
        """
        if self._mean and start > 0:
            assert self._pooled is not None, "a chunk's hidden states were lost"
            self._pooled = self._pooled + part
        else:
            self._pooled = part

    def vector(self) -> bytes:
        """Return the pooled vector as little-endian float32 bytes, once all chunks are added."""
        assert self._pooled is not None, "nothing was pooled"
        pooled = self._pooled / np.float32(self._num_tokens) if self._mean else self._pooled
        return self._head(pooled, unscaled=self._unscaled).astype("<f4").tobytes()


def as_array(vector: bytes) -> Vector:
    """Return the bytes of `PooledText.vector` as a float32 array [size]."""
    return np.frombuffer(vector, dtype="<f4")


def normalized(x: Vector) -> Vector:
    # as in torch.nn.functional.normalize
    return x / np.maximum(np.linalg.norm(x), np.float32(1e-12))


def _sigmoid(x: Vector) -> Vector:
    sigmoid: Vector = (1 / (1 + np.exp(-x.astype(np.float64)))).astype(np.float32)
    return sigmoid
