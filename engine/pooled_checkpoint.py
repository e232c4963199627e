"""read_pooling, read_head: read how a checkpoint pools hidden states, from its own files.

Files of sentence-transformers in the checkpoint's folder:

 modules.json                            Transformer, Pooling, Dense and Normalize, in order
 1_Pooling/config.json                   which hidden states are pooled, and how
 2_Dense/                                a linear layer over the pooled vector
 config_sentence_transformers.json       prompts to put before a text, by name ("query")
 sentence_bert_config.json               the most tokens of a text, or else in
 tokenizer_config.json                   model_max_length
 config.json                             is_matryoshka, matryoshka_dimensions

A sequence classifier (*ForSequenceClassification) describes its head in config.json, and has the
head's layers among its weights. Its "vector" is the label logits, before any softmax or sigmoid.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from engine.architectures import ARCHITECTURES, HeadLayer
from engine.config.model_config import ModelConfig
from engine.config_reader import MODULES, Reader
from engine.errors import ConfigError
from engine.pooling import ACTIVATIONS, Dense, Norm, Pooling, PoolingHead, Vector, normalized

# Names in files -> Manta's. Older files have a flag for each mode, newer ones name the mode.
_FLAGS = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
}
_NAMES = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
# Activation in config.json -> its name in torch.nn.
_WRITTEN = {"gelu": "GELU", "relu": "ReLU", "tanh": "Tanh"}


def read_pooling(folder: str | Path) -> Pooling | None:
    """Read the pooling that a checkpoint's files describe; return None if they describe none.

    Raises ConfigError naming file and key.
    """
    folder = Path(folder)
    config = _optional(folder / "config.json")
    if config.classifies():
        return _classifier(folder, config)
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
    return Pooling(
        mode,
        tuple(steps),
        _prompts(_optional(folder / "config_sentence_transformers.json")),
        bool(sizes) or config.flag("is_matryoshka"),
        tuple(sizes),
        _max_tokens(folder),
    )


def _max_tokens(folder: Path) -> int:
    """Return the maximum number of tokens of a text; 0 if the files do not say.

    Version 6 of sentence-transformers leaves the limit to the tokenizer's file, where a huge number
    means no limit.
    """
    length = _optional(folder / "sentence_bert_config.json").size_or_none("max_seq_length")
    if length is not None:
        return length
    most = _optional(folder / "tokenizer_config.json").get("model_max_length", 0)
    return int(most) if isinstance(most, (int, float)) and 0 < most < 2**31 else 0


def read_head(pooling: Pooling, hidden_size: int) -> PoolingHead:
    """Read the weights of the pooling's steps. Raises ConfigError naming the file."""
    size = hidden_size
    steps: list[Callable[[Vector], Vector]] = []
    for step in pooling.steps:
        if step is None:
            steps.append(normalized)
        elif isinstance(step, Norm):
            steps.append(_layer_norm(step))
        elif step.in_features != size:
            raise ConfigError(
                f"{step.folder}: in_features is {step.in_features}, its vectors have {size} "
                "elements",
                param="model",
            )
        else:
            steps.append(_linear(step))
            size = step.out_features
    return PoolingHead(pooling, size, steps)


def _classifier(folder: Path, config: Reader) -> Pooling:
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
    return Pooling(
        mode,
        tuple(steps),
        labels=tuple(labels),
        independent=kind == "multi_label_classification",
        raw=tuple(raw),
        pairs=model.token_types <= 1 or model.separator >= 0,
    )


def _head_layer(
    config: Reader, folder: Path, layer: HeadLayer, size: int, out: int
) -> Dense | Norm:
    if layer.eps is not None:
        return Norm(folder, size, layer.bias, layer.eps, layer.name)
    activation = _WRITTEN.get(layer.activation, layer.activation)
    if activation not in ACTIVATIONS:
        raise config.error(
            "classifier_activation",
            f"{layer.activation!r} is not supported; supported: {', '.join(_WRITTEN)}",
        )
    return Dense(folder, size, out, layer.bias, activation, layer.name)


def _modules(folder: Path) -> list[tuple[str, Path]]:
    """Return (last part of the class name, folder) of each module in modules.json."""
    path = folder / MODULES
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
        return [(module["type"].rpartition(".")[2], folder / module["path"]) for module in listed]
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
    if activation not in ACTIVATIONS:
        raise config.error(
            "activation_function",
            f"{activation!r} is not supported; supported: {', '.join(ACTIVATIONS)}",
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


def _linear(step: Dense) -> Callable[[Vector], Vector]:
    matrix = _tensor(step.folder, f"{step.name}.weight", (step.out_features, step.in_features))
    bias: Vector | np.float32 = np.float32(0)
    if step.bias:
        bias = _tensor(step.folder, f"{step.name}.bias", (step.out_features,))
    activation = ACTIVATIONS[step.activation]
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
    """Read a tensor of this shape. Raises ConfigError naming file and tensor."""
    import torch  # torch reads bfloat16, which NumPy does not know
    from safetensors import safe_open

    path = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        path = folder / Reader.from_file(index).inner("weight_map").get(name, path.name)
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; save the model with safetensors", param="model")
    with safe_open(path, "pt") as file:
        tensor = file.get_tensor(name) if name in file.keys() else None  # noqa: SIM118
    if tensor is None or tuple(tensor.shape) != shape:
        has = None if tensor is None else list(tensor.shape)
        raise ConfigError(f"{path}: {name} must be {list(shape)}, is {has}", param="model")
    array: Vector = tensor.to(torch.float32).numpy()
    return array
