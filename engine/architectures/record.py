"""Architecture, CheckpointTensor, Wrapper: records of model families and checkpoints. No torch."""

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

    from engine.architectures.moe import Experts
    from engine.config.model_config import LayerAttention, ModelConfig

# A function that returns the checkpoint's row number for each row in the engine's order, int64.
Rows = Callable[["ModelConfig"], "NDArray[np.int64]"]
Read = Callable[[Reader], Any]
# (config.json, a layer of full attention, number of layers) -> the attention of each layer
Attend = Callable[[Reader, "LayerAttention", int], Sequence["LayerAttention"]]
# (config.json, the model's config without experts) -> its experts; None if no layer has any
ReadExperts = Callable[[Reader, "ModelConfig"], "Experts | None"]
# config.json of a sequence classifier -> (Pooling.mode, layers of the head)
ReadClassifier = Callable[[Reader], tuple[str, "tuple[HeadLayer, ...]"]]
# (prefix of a name in the checkpoint, its replacement) pairs; the first match applies.
Renames = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """The location of one of the model's matrices, norms or tables in a checkpoint.

    names: the tensors' names without ".weight". "{i}" is the layer, "{h}" the head if each head has
        a tensor. If the checkpoint counts two decoder layers as one, "{pair}" is its number and
        "{half}" 0 or 1. A matrix of several parts (query, key and value; gate and up) is stored as
        one tensor for each part, or as one tensor. A norm without a name has no weight. Names of
        experts' tensors are complete, with "{e}" for the expert; without "{e}" all experts are
        stacked.
    rows: the stored order of rows over all parts, where it differs from Manta's. Rows stay within
        their tensor. Biases and adapters have the order of their matrix.
    transposed: whether the checkpoint stores [in, out].
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
    """A linear layer or a LayerNorm of a classifier's head, applied to one pooled hidden state.

    name: the name of the layer's tensors, without ".weight".
    activation: the activation after the layer, by the name in torch.nn or config.json.
    bias: whether the layer has a bias.
    eps: the epsilon of a LayerNorm; None = a linear layer.
    """

    name: str
    activation: str = "Identity"
    bias: bool = True
    eps: float | None = None


@dataclass(frozen=True, slots=True)
class Mtp:
    """The names of a multi-token-prediction layer in a checkpoint, without ".weight".

    In names "{layers}" is the model's number of layers, which is the MTP layer's number.

    layer: the prefix of the names of the decoder layer's tensors, up to "self_attn".
    embedding_norm, hidden_norm: norms of the next token's embedding and of the hidden state.
    project: the matrix from the concatenated embedding and hidden state to the layer's input.
    norm: the norm before the LM head.
    hidden_first: whether the hidden state comes before the embedding in the matrix's columns.
    copies: tensors that equal the target model's, and are not read.
    count: the key of config.json with the number of MTP layers.
    absent: the number of MTP layers if config.json lacks the key.
    """

    layer: str
    embedding_norm: str
    hidden_norm: str
    project: str
    norm: str
    hidden_first: bool = False
    copies: tuple[str, ...] = ()
    count: str = "num_nextn_predict_layers"
    absent: int = 0


_NEXT = "model.layers.{layers}."
# DeepSeek V3, and models with the same names
NEXTN = Mtp(
    _NEXT,
    f"{_NEXT}enorm",
    f"{_NEXT}hnorm",
    f"{_NEXT}eh_proj",
    f"{_NEXT}shared_head.norm",
    copies=(f"{_NEXT}embed_tokens", f"{_NEXT}shared_head.head"),
)


def score_of_last(config: Reader) -> tuple[str, tuple[HeadLayer, ...]]:
    """Return the head of a decoder's *ForSequenceClassification: a linear layer on the last
    token."""
    return "last", (HeadLayer("score", bias=False),)


@dataclass(frozen=True, slots=True)
class Architecture:
    """The record of an architecture: one value of "architectures" in config.json, or a variant.

    tensors: Manta's name -> location in the checkpoint. A decoder layer has the norms in this map,
        and a gated MLP if gate_up is in it, else a plain one (up).
    models: the models' names for users, for the list in the documentation.
    model_type: the value in config.json, by which wrappers name their text model.
    switches: field of ModelConfig -> the function that reads it from config.json, instead of the
        one in `model_config._SWITCHES`.
    keys: Manta's name of a config.json key -> the file's name (see Reader).
    defaults: the file's key -> value if config.json lacks the key and its transformers class has no
        default.
    attention: (config.json, the attention of a full-context layer without special features, number
        of layers) -> the attention of each layer.
    experts: the reader of the mixture of experts.
    computed: Manta's name of a config.json key -> the function that computes it from other keys.
    only: key -> supported values; the first is the value of a missing key.
    variant: config.json -> the name of the record to use; None = this record.
    renames: (alternative prefix of checkpoints' tensor names, usual prefix) pairs.
    ignored: patterns of the names of tensors that the model does not use. "{layers}" is the number
        of layers, and so the number of the first layer that is not part of the model.
    network: the key in `registry.MODELS` of the model's class.
    encoder: whether this is an embedding model with bidirectional attention.
    absent: (model config, layer) -> Manta's names in `tensors` that the layer does not have.
    classifier: for a sequence classifier, returns which hidden state is pooled (Pooling.mode) and
        the layers over it; the last one computes a logit for each label.
    mtp: the names of a multi-token-prediction layer, if checkpoints have one that is supported.
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
    mtp: Mtp | None = None

    def filled(self, config: Reader) -> Reader:
        """Return config.json with missing keys filled by defaults.

        The defaults are those of the transformers class, then those of this record.
        """
        known, kind = class_defaults(self.model_type), config.get("model_type")
        if kind is not None and (known.values or not self.model_type):
            # config.json may have the model_type of a related model, whose defaults have precedence
            known = class_defaults(str(kind), known)
        values, defaults = dict(config.values), {**self.defaults, **known.values}
        for alias, key in known.aliases.items():
            if alias in values:
                values.setdefault(key, values[alias])
        # a default must not hide rope_scaling, the older name
        if values.get("rope_scaling"):
            defaults.pop("rope_parameters", None)
        return Reader(values, config.path).renamed(self.keys, defaults)

    def ignores(self, name: str, layers: int) -> bool:
        """Whether the model ignores the checkpoint's tensor `name`.

        layers: the model's number of layers.
        """
        patterns = (pattern.replace("{layers}", str(layers)) for pattern in self.ignored)
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    def stored_name(self, name: str) -> str:
        """Return the name in `tensors` of a checkpoint's tensor.

        Checkpoints of a model without head omit the prefix: layers.0 for model.layers.0.
        """
        name = renamed(name, self.renames)
        network, dot, _ = self.tensors["embedding"].names[0].partition(".")
        inside = f"{network}.{name.partition('.')[0]}."
        stored = (stored_as for tensor in self.tensors.values() for stored_as in tensor.names)
        known = any(f"{stored_as}.".startswith(inside) for stored_as in stored)
        return f"{network}.{name}" if dot and known else name


@dataclass(frozen=True, slots=True)
class Wrapper:
    """The record of a multimodal model: how to find its text model, and the family of its images.

    config.json has the text model's keys in text_config, whose model_type selects the record. Flat
    files have these keys at the top level.

    models: the models' names for users.
    flat: the text model's model_type in flat files, which have no text_config.
    renames: the prefixes of the text model's tensor names.
    ignored: patterns of the names of tensors outside of the text model, such as the tower's.
    images: the family of vision encoder and image processor: a key of
        `engine.config.towers.FAMILIES`, `engine.images.processor.FAMILIES` and
        `engine.models.vision.registry.TOWERS`; "" = images are not supported.
    tower: the model_type that vision_config must have for `images`; "" = any.
    text_key: the key of config.json that has the text model's config.
    place: the image placeholder to write into chats whose template does not support images; "" =
        none.
    clip_place: the same for video clips.
    """

    name: str
    models: str
    renames: Renames
    ignored: tuple[str, ...]
    flat: str = ""
    images: str = ""
    tower: str = ""
    text_key: str = "text_config"
    place: str = ""
    clip_place: str = ""

    def family(self, config: Reader) -> str:
        """Return `images` for a config.json whose pictures are supported, else ""."""
        vision = config.inner("vision_config")
        if not vision.values or (self.tower and vision.get("model_type") != self.tower):
            return ""
        return self.images

    def ignores(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.ignored)


def renamed(name: str, renames: Renames) -> str:
    for begin, ours in renames:
        if name.startswith(begin):
            return ours + name[len(begin) :]
    return name


def always(value: Any) -> Read:
    """Return a reader that returns a fixed value for every config.json."""
    return lambda config: value
