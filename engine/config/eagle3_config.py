"""Eagle3Config: the configuration of an EAGLE-3 drafter, read from its config.json. No torch here.

Two formats are read: LlamaForCausalLMEagle3, whose keys are flat, and that of the speculators
library, which has the layer's keys in transformer_layer_config.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from engine.architectures.dense.llama import one_llama_layer
from engine.config.model_config import ModelConfig
from engine.config_reader import Reader
from engine.errors import ConfigError

_FLAT = ("LlamaForCausalLMEagle3",)
_NESTED = ("Eagle3Speculator", "Eagle3DraftModel")
_LAYER = "transformer_layer_config"


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """The sizes and switches of an EAGLE-3 drafter.

    layer: the drafter's layer, as a Llama of one layer with the drafter's hidden size.
    vocab_size: the size of the drafter's output vocabulary.
    taps: the target model's layers whose inputs the drafter reads, ascending. The number of layers
        stands for the output of the last layer.
    norm_before_residual: whether the residual begins with the normed state.
    norm_before_fc: whether the joined inputs have one norm before the matmul that fuses them.
    fc_norm: whether each input has a separate norm before that matmul.
    norm_output: whether the next pass reads the drafter's hidden state after its final norm.
    """

    layer: ModelConfig
    vocab_size: int
    taps: tuple[int, ...]
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool

    @classmethod
    def from_folder(cls, folder: str | Path, model: ModelConfig) -> "Eagle3Config":
        """Read the config.json of a drafter for a target model.

        Raises ConfigError naming file and key if the folder has no EAGLE-3 drafter, or one of
        another model.
        """
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise ConfigError(
                f"speculation: model {folder}: there is no such folder with a config.json; give "
                "the folder of the EAGLE-3 drafter, or a hub name where a server is started",
                param="speculation",
            )
        config = Reader.from_file(path)
        names = config.listed("architectures", str) or []
        nested = config.get("speculators_model_type") == "eagle3" or {*names} & {*_NESTED}
        if not nested and not {*names} & {*_FLAT}:
            known = ", ".join((*_FLAT, *_NESTED))
            raise config.error("architectures", f"{names} is no EAGLE-3 drafter, which is {known}")
        layer = config.inner(_LAYER) if nested else config
        own = config.inner("eagle_config")

        def flag(key: str, default: bool = False) -> bool:
            return config.flag(key, own.flag(key, default))

        for key, needed in (("use_aux_hidden_state", True), ("parallel_drafting", False)):
            if flag(key, needed) != needed:
                raise config.error(key, f"{not needed} is not supported")
        values = one_llama_layer(layer.values)
        body = ModelConfig.from_dicts(Reader(values, layer.path), Reader({}, layer.path))
        if body.vocab_size != model.vocab_size:
            raise layer.error(
                "vocab_size",
                f"{body.vocab_size} is not the model's {model.vocab_size}, so that the drafter is "
                "another model's",
            )
        target = config.size_or_none("target_hidden_size") or model.hidden_size
        if target != model.hidden_size:
            raise config.error(
                "target_hidden_size", f"{target} is not the model's {model.hidden_size}"
            )
        vocab = config.size("draft_vocab_size", model.vocab_size)
        if vocab > model.vocab_size:
            raise config.error("draft_vocab_size", f"{vocab} exceeds vocab_size {model.vocab_size}")
        key, layers = "eagle_aux_hidden_state_layer_ids", model.num_layers
        taps = config.listed(key, int) or own.listed(key, int)
        taps = sorted(taps or (2, layers // 2, layers - 3))
        if not all(0 <= tap <= layers for tap in taps) or len({*taps}) < len(taps):
            raise config.error(key, f"{taps} must be different layers of the model's {layers}")
        return cls(
            replace(body, max_positions=model.max_positions),
            vocab,
            tuple(taps),
            flag("norm_before_residual"),
            flag("norm_before_fc"),
            flag("fc_norm"),
            flag("norm_output"),
        )
