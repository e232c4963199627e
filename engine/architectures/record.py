"""The record of an architecture, and the places of its tensors in checkpoints. No torch here."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from engine.architectures.by_layer import alike
from engine.architectures.class_defaults import class_defaults
from engine.config_reader import Reader

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from engine.architectures.experts import Experts
    from engine.config.model_config import LayerAttention, ModelConfig

# The stored row of each of our rows, in our order: int64.
Rows = Callable[["ModelConfig"], "NDArray[np.int64]"]
Read = Callable[[Reader], Any]
# (config.json, a layer of full attention, how many layers) -> each layer's attention
Attend = Callable[[Reader, "LayerAttention", int], Sequence["LayerAttention"]]
# (config.json, the model without its experts) -> these, or None where no layer has any
ReadExperts = Callable[[Reader, "ModelConfig"], "Experts | None"]
# config.json of a sequence classifier -> Pooling.mode, and the layers of its head
ReadClassifier = Callable[[Reader], tuple[str, "tuple[HeadLayer, ...]"]]
# Beginnings of names -> what stands there in ours. The first that fits is taken.
Renames = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """The place of one of our matrices, norms or tables in a checkpoint.

    names: the tensors' names without ".weight". "{i}" is the layer, "{h}" the head where each head
        has a tensor. Where the checkpoint counts two layers of ours as one, "{pair}" is that one
        and "{half}" which of the two. A matrix of ours that has several pieces (query, key and
        value; gate and up) is stored as one tensor for each, or as one with all of them. A norm
        without a name has no weight. Names of experts' tensors are whole, with "{e}" for the
        expert; without it all experts are stacked.
    rows: how rows are ordered, where not as ours; of all pieces below each other. Rows of one
        tensor cannot go to another. Biases and adapters follow their matrix.
    transposed: whether the checkpoint keeps [in, out].
    """

    names: tuple[str, ...]
    rows: Rows | None = None
    transposed: bool = False

    def at(self, layer: int) -> "CheckpointTensor":
        numbers = {"{i}": layer, "{pair}": layer // 2, "{half}": layer % 2}
        names = []
        for name in self.names:
            for place, number in numbers.items():
                name = name.replace(place, str(number))
            names.append(name)
        return CheckpointTensor(tuple(names), self.rows, self.transposed)


@dataclass(frozen=True, slots=True)
class HeadLayer:
    """A linear layer or a LayerNorm of a classifier's head, over one pooled hidden state.

    name: the name of its tensors, without ".weight".
    activation: the activation behind it, as torch.nn or config.json name it.
    bias: whether it has a bias.
    eps: the epsilon of a LayerNorm; None = a linear layer.
    """

    name: str
    activation: str = "Identity"
    bias: bool = True
    eps: float | None = None


def score_of_last(config: Reader) -> tuple[str, tuple[HeadLayer, ...]]:
    """Return the head of transformers' *ForSequenceClassification of decoders."""
    return "last", (HeadLayer("score", bias=False),)


@dataclass(frozen=True, slots=True)
class Architecture:
    """One value of "architectures" in config.json, or a variant of one.

    tensors: our name -> its place in the checkpoint. A decoder layer has the norms that are named
        here, and a gated MLP if there is a gate_up, else a plain one (up).
    models: the models' names for users, for the list in the documentation.
    model_type: the value in config.json; wrappers name their text model by it alone.
    switches: field of ModelConfig -> its reader, where not as in `model_config`.
    keys: names of config.json that stand for others, ours -> theirs (see Reader).
    defaults: theirs -> the value where config.json leaves it out, beside those of its class.
    attention: how each layer attends, made of the plain one and config.json.
    experts: the reader of the mixture of experts.
    computed: keys of config.json that are computed from others, ours -> the function.
    only: keys that we compute for these values alone; the first is what absence means.
    variant: the name of the record that a config.json asks for, if not of this one.
    renames: other beginnings of names in checkpoints.
    ignored: patterns of tensors that the model does not use; "{layers}" is how many layers it has,
        which is the number of the first one that is not of the model.
    network: the class that computes it, a key of `registry.MODELS`.
    encoder: whether it is an embedding model with bidirectional attention.
    absent: (the model, a layer) -> our names of `tensors` that it does not have.
    classifier: for a sequence classifier's checkpoint, which hidden state is pooled (Pooling.mode)
        and the layers over it; the last one gives a number for each label.
    """

    name: str
    tensors: Mapping[str, CheckpointTensor]
    models: str = ""
    model_type: str = ""
    switches: Mapping[str, Read] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    attention: Attend = alike
    experts: ReadExperts | None = None
    computed: Mapping[str, Read] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    variant: Callable[[Reader], str] | None = None
    renames: Renames = ()
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq",)
    network: str = "decoder"
    encoder: bool = False
    absent: "Callable[[ModelConfig, int], Collection[str]]" = lambda model, layer: ()
    classifier: ReadClassifier = score_of_last

    def filled(self, config: Reader) -> Reader:
        """Return config.json with missing keys filled in.

        The values are those of its class of transformers, and those that the record adds.
        """
        known, kind = class_defaults(self.model_type), config.get("model_type")
        if kind is not None and (known.values or not self.model_type):
            known = class_defaults(str(kind), known)  # of a relative, or what a variant is of
        values, defaults = dict(config.values), {**self.defaults, **known.values}
        for alias, key in known.aliases.items():
            if alias in values:
                values.setdefault(key, values[alias])
        if values.get("rope_scaling"):  # the older name
            defaults.pop("rope_parameters", None)
        return Reader(values, config.path).renamed(self.keys, defaults)

    def ignores(self, name: str, layers: int) -> bool:
        """Whether the model does not use this tensor. layers: the number of the model's layers."""
        patterns = (pattern.replace("{layers}", str(layers)) for pattern in self.ignored)
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    def stored_name(self, name: str) -> str:
        """Return the name that `tensors` has for a tensor of the checkpoint.

        A network that was saved without its head leaves out its own name: layers.0 for
        model.layers.0.
        """
        name = renamed(name, self.renames)
        network, dot, _ = self.tensors["embedding"].names[0].partition(".")
        inside = f"{network}.{name.partition('.')[0]}."
        stored = (stored_as for tensor in self.tensors.values() for stored_as in tensor.names)
        known = any(f"{stored_as}.".startswith(inside) for stored_as in stored)
        return f"{network}.{name}" if dot and known else name


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A model of several kinds of input around a text model, of which only the text model is run.

    config.json has the text model's in text_config, where its model_type names the record; flat
    files have it among their own keys, as `flat` says.

    models: the models' names for users.
    flat: the text model's model_type, where there is no text_config.
    renames: the beginnings of the text model's names.
    ignored: patterns of the other parts' tensors, as the checkpoint names them.
    """

    name: str
    models: str
    renames: Renames
    ignored: tuple[str, ...]
    flat: str = ""

    def ignores(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.ignored)


def renamed(name: str, renames: Renames) -> str:
    for begin, ours in renames:
        if name.startswith(begin):
            return ours + name[len(begin) :]
    return name


def always(value: Any) -> Read:
    """Return a switch that no file sets."""
    return lambda config: value
