"""Pooling: how a checkpoint makes one vector of a text, as sentence-transformers' files beside its
weights say. No torch here.

    modules.json                            Transformer, Pooling, Dense and Normalize, in order
    1_Pooling/config.json                   which hidden states are pooled, and how
    2_Dense/                                a linear layer over the pooled vector
    config_sentence_transformers.json       texts to put before a text, by name ("query")
    sentence_bert_config.json               tokens of a text at most
    config.json                             is_matryoshka, matryoshka_dimensions

A sequence classifier (*ForSequenceClassification) says it in config.json, and has the layers of its
head among its weights. Its "vector" has a number for each label, before any softmax or sigmoid.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.architectures import ARCHITECTURES, HeadLayer
from engine.config_reader import MODULES, Reader
from engine.errors import ConfigError, InvalidRequest
from engine.model_config import ModelConfig

Vector = NDArray[np.float32]

MODES = ("last", "mean", "cls")
# As files spell them -> ours. Older files have a flag for each, newer ones name one.
_FLAGS = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
}
_NAMES = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_erf = np.frompyfunc(math.erf, 1, 1)
_ACTIVATIONS: Mapping[str, Callable[[Vector], Vector]] = {
    "Identity": lambda x: x,
    "Tanh": np.tanh,
    "ReLU": lambda x: np.maximum(x, 0),
    "GELU": lambda x: (x * (1 + _erf(x / math.sqrt(2)).astype(np.float64)) / 2).astype(np.float32),
}
# As config.json writes an activation -> as torch.nn does.
_WRITTEN = {"gelu": "GELU", "relu": "ReLU", "tanh": "Tanh"}


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer over the pooled vector. folder: of its weights. activation: in torch.nn.
    name: of its tensors."""

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
    """mode: "last" = the last token's hidden state behind the final norm, "mean" = the mean of all,
        "cls" = the first token's.
    steps: over the pooled vector, in order; None = division by its length.
    prompts: texts that are put before a text, by the name that a caller gives.
    matryoshka: the first elements of a vector are a vector; dimensions: these many, () = any.
    max_tokens: of a text; 0 = the model's context.
    labels: of a classifier, one for each number of its "vector"; () = of an embedder.
    independent: the labels do not exclude each other, so each has a sigmoid and not all a softmax.
    raw: "relevance" = the number of a reranker is its score as it is, without a sigmoid;
        "labels" = so are those of each label.
    pairs: whether a text of two parts can be computed; a BERT tells them by learned token types.
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

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Pooling | None":
        """None of a checkpoint that says nothing of vectors. Raises ConfigError naming file and
        key."""
        folder = Path(folder)
        config = _optional(folder / "config.json")
        if config.classifies():
            return _classifier(cls, folder, config)
        if not (folder / MODULES).is_file():
            return None
        mode = ""
        steps: list[Dense | Norm | None] = []
        for kind, path in _modules(folder):
            if kind == "Pooling":
                mode = _mode(Reader.from_file(path / "config.json"))
            elif kind == "Dense":
                steps.append(_dense(path))
            elif kind == "Normalize":
                steps.append(None)
            elif kind != "Transformer":
                raise ConfigError(
                    f"{folder / MODULES}: {kind} is not supported; supported: Transformer, "
                    "Pooling, Dense, Normalize",
                    param="model",
                )
        if not mode:
            raise ConfigError(f"{folder / MODULES}: there is no Pooling", param="model")
        sizes = config.get("matryoshka_dimensions") or ()
        return cls(
            mode,
            tuple(steps),
            _prompts(_optional(folder / "config_sentence_transformers.json")),
            bool(sizes) or config.flag("is_matryoshka"),
            tuple(sizes),
            _optional(folder / "sentence_bert_config.json").size_or_none("max_seq_length") or 0,
        )

    def size(self, hidden_size: int) -> int:
        """Elements of a vector."""
        dense = [step.out_features for step in self.steps if isinstance(step, Dense)]
        return dense[-1] if dense else hidden_size

    def relevance(self, vector: Vector) -> float:
        """Of a reranker's pair: higher is nearer."""
        score = vector if "relevance" in self.raw else _sigmoid(vector)
        return float(score[0])

    def probabilities(self, vector: Vector) -> Vector:
        """Of each label, as transformers' text-classification pipeline has them: [labels]."""
        if "labels" in self.raw:
            return vector
        if self.independent or len(self.labels) == 1:
            return _sigmoid(vector)
        powers = np.exp(vector - vector.max())
        return powers / powers.sum()

    def cut(self, vector: Vector, dimensions: int) -> Vector:
        """The first `dimensions` elements, of the length that the whole would have."""
        cut = vector[:dimensions]
        return _normalized(cut) if self.steps and self.steps[-1] is None else cut

    def check_dimensions(self, dimensions: int, size: int) -> None:
        """Raises InvalidRequest if a vector of `size` elements has no shorter one of so many."""
        if not self.matryoshka:
            raise InvalidRequest(
                "dimensions: this model's vectors cannot be cut; its config.json would say so by "
                "is_matryoshka or matryoshka_dimensions",
                param="dimensions",
                code="not_supported",
            )
        if self.dimensions and dimensions not in self.dimensions:
            allowed = ", ".join(map(str, self.dimensions))
            raise InvalidRequest(f"dimensions must be one of {allowed}", param="dimensions")
        if not 1 <= dimensions <= size:
            raise InvalidRequest(f"dimensions must be between 1 and {size}", param="dimensions")

    def prompt(self, name: str) -> str:
        """Raises InvalidRequest for a name that the checkpoint does not have."""
        try:
            return self.prompts[name]
        except KeyError:
            known = ", ".join(self.prompts) or "none"
            raise InvalidRequest(
                f"prompt_name: the model has no such prompt; it has: {known}", param="prompt_name"
            ) from None


class PoolingHead:
    """The steps of a Pooling, with weights. Raises ConfigError naming the file."""

    def __init__(self, pooling: Pooling, hidden_size: int) -> None:
        self.pooling = pooling
        self.size = hidden_size  # of a vector
        self._steps: list[Callable[[Vector], Vector]] = []
        for step in pooling.steps:
            if step is None:
                self._steps.append(_normalized)
                continue
            if isinstance(step, Norm):
                self._steps.append(_layer_norm(step))
                continue
            if step.in_features != self.size:
                raise ConfigError(
                    f"{step.folder}: in_features is {step.in_features}, its vectors have "
                    f"{self.size} elements",
                    param="model",
                )
            self._steps.append(_linear(step))
            self.size = step.out_features

    def __call__(self, pooled: Vector) -> Vector:
        for step in self._steps:
            pooled = step(pooled)
        return pooled


class PooledText:
    """What has been pooled of one text, chunk by chunk."""

    def __init__(self, head: PoolingHead, num_tokens: int) -> None:
        self._head = head
        self._mean = head.pooling.mode == "mean"
        self._num_tokens = num_tokens
        self._pooled: Vector | None = None

    def add(self, start: int, part: Vector) -> None:
        """part: of the chunk that begins at `start`: the sum of its hidden states, or the one that
        is asked for. A text that was preempted begins again."""
        if self._mean and start > 0:
            assert self._pooled is not None, "a chunk's hidden states were lost"
            self._pooled = self._pooled + part
        else:
            self._pooled = part

    def vector(self) -> bytes:
        """float32, little-endian. Legal when all chunks are in."""
        assert self._pooled is not None, "nothing was pooled"
        pooled = self._pooled / np.float32(self._num_tokens) if self._mean else self._pooled
        return self._head(pooled).astype("<f4").tobytes()


def as_array(vector: bytes) -> Vector:
    """What `PooledText.vector` wrote."""
    return np.frombuffer(vector, dtype="<f4")


def _normalized(x: Vector) -> Vector:
    return x / np.maximum(np.linalg.norm(x), np.float32(1e-12))  # as torch's normalize


def _linear(step: Dense) -> Callable[[Vector], Vector]:
    matrix = _tensor(step.folder, f"{step.name}.weight", (step.out_features, step.in_features))
    bias: Vector | np.float32 = np.float32(0)
    if step.bias:
        bias = _tensor(step.folder, f"{step.name}.bias", (step.out_features,))
    activation = _ACTIVATIONS[step.activation]
    return lambda x: activation(matrix @ x + bias)


def _layer_norm(step: Norm) -> Callable[[Vector], Vector]:
    weight = _tensor(step.folder, f"{step.name}.weight", (step.size,))
    bias: Vector | np.float32 = np.float32(0)
    if step.bias:
        bias = _tensor(step.folder, f"{step.name}.bias", (step.size,))
    eps = np.float32(step.eps)

    def normed(x: Vector) -> Vector:
        centred = x - x.mean()
        return centred / np.sqrt((centred * centred).mean() + eps) * weight + bias

    return normed


def _tensor(folder: Path, name: str, shape: tuple[int, ...]) -> Vector:
    """Raises ConfigError naming file and tensor."""
    import torch  # which reads bfloat16, as NumPy does not
    from safetensors import safe_open

    path = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        path = folder / Reader.from_file(index).inner("weight_map").get(name, path.name)
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; save the model with safetensors", param="model")
    with safe_open(path, "pt") as file:
        found = file.get_tensor(name) if name in file.keys() else None  # noqa: SIM118
    if found is None or tuple(found.shape) != shape:
        has = None if found is None else list(found.shape)
        raise ConfigError(f"{path}: {name} must be {list(shape)}, is {has}", param="model")
    array: Vector = found.to(torch.float32).numpy()
    return array


def _sigmoid(x: Vector) -> Vector:
    found: Vector = (1 / (1 + np.exp(-x.astype(np.float64)))).astype(np.float32)
    return found


def _classifier(cls: type[Pooling], folder: Path, config: Reader) -> Pooling:
    model = ModelConfig.from_folder(folder)
    mode, layers = ARCHITECTURES[model.architecture].classifier(config)
    names = config.get("id2label")
    count = len(names) if names else config.size("num_labels", 2)
    labels = [str((names or {}).get(str(i), f"LABEL_{i}")) for i in range(count)]
    size = model.hidden_size
    steps: list[Dense | Norm | None] = []
    for layer in layers:
        out = count if layer is layers[-1] else size
        steps.append(_head_layer(config, folder, layer, size, out))
    kind = config.get("problem_type")
    raw = ["labels"] if kind == "regression" else []
    fitted = config.inner("sentence_transformers").get(
        "activation_fn", config.get("sbert_ce_default_activation_function", "Sigmoid")
    )
    last = str(fitted).rpartition(".")[2]
    if last not in ("Sigmoid", "Identity"):
        raise config.error(
            "sentence_transformers.activation_fn",
            f"{fitted!r} is not supported; supported: Sigmoid, Identity",
        )
    if last == "Identity":
        raw.append("relevance")
    return cls(
        mode,
        tuple(steps),
        labels=tuple(labels),
        independent=kind == "multi_label_classification",
        raw=tuple(raw),
        pairs=model.token_types <= 1,
    )


def _head_layer(
    config: Reader, folder: Path, layer: HeadLayer, size: int, out: int
) -> Dense | Norm:
    if layer.eps is not None:
        return Norm(folder, size, layer.bias, layer.eps, layer.name)
    activation = _WRITTEN.get(layer.activation, layer.activation)
    if activation not in _ACTIVATIONS:
        raise config.error(
            "classifier_activation",
            f"{layer.activation!r} is not supported; supported: {', '.join(_WRITTEN)}",
        )
    return Dense(folder, size, out, layer.bias, activation, layer.name)


def _modules(folder: Path) -> list[tuple[str, Path]]:
    """(the last part of its class, its folder) of each module."""
    path = folder / MODULES
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
        return [(each["type"].rpartition(".")[2], folder / each["path"]) for each in listed]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{path}: must be a list of modules, each with type and path: {error!r}", param="model"
        ) from None


def _mode(config: Reader) -> str:
    if not config.flag("include_prompt", True):
        raise config.error("include_prompt", "false is not supported")
    named = config.get("pooling_mode")
    if named is not None:
        return _NAMES[config.one_of("pooling_mode", tuple(_NAMES), "mean")]
    asked = [key for key in config.values if key.startswith("pooling_mode_") and config.flag(key)]
    if len(asked) != 1 or asked[0] not in _FLAGS:
        raise config.error(
            "pooling_mode",
            f"{' and '.join(asked) or 'nothing'} is not supported; supported: one of "
            f"{', '.join(_FLAGS)}",
        )
    return _FLAGS[asked[0]]


def _dense(folder: Path) -> Dense:
    config = Reader.from_file(folder / "config.json")
    activation = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        raise config.error(
            "activation_function",
            f"{activation!r} is not supported; supported: {', '.join(_ACTIVATIONS)}",
        )
    return Dense(
        folder,
        config.size("in_features"),
        config.size("out_features"),
        config.flag("bias", True),
        activation,
    )


def _optional(path: Path) -> Reader:
    return Reader.from_file(path) if path.is_file() else Reader({}, str(path))


def _prompts(config: Reader) -> dict[str, str]:
    values: Any = config.get("prompts", {})
    if not isinstance(values, dict):
        raise config.error("prompts", "must be an object")
    return {name: text for name, text in values.items() if isinstance(text, str)}
