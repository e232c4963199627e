"""Writes engine/architectures/class_defaults.json: python -m tests.parity.class_defaults"""

import json
import math
from dataclasses import MISSING, fields
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, AutoConfig

from engine.architectures import ARCHITECTURES, TEXT_TYPES, WRAPPERS
from engine.architectures.class_defaults import FILE

# Token ids, which come from the tokenizer, and keys that do not affect the network.
_OTHERS = {
    *("architectures", "transformers_version", "dtype", "id2label", "label2id", "problem_type"),
    *("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id", "sep_token_id"),
    *("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "classifier_dropout"),
    *("embd_pdrop", "embedding_dropout", "hidden_dropout", "hidden_dropout_prob", "resid_dropout"),
    *("resid_pdrop", "initializer_factor", "initializer_range", "router_aux_loss_coef"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
    *("chunk_size_feed_forward", "is_encoder_decoder", "pretraining_tp", "use_cache"),
}


def class_of(wrapper: str) -> type[Any] | None:
    """Return transformers' configuration class of a wrapper; None if it has none."""
    name = wrapper.removesuffix("ForConditionalGeneration")
    name = {"KimiK25": "Kimi_K25"}.get(name, name)
    return getattr(transformers, f"{name}Config", None)


def _values(cls: type[Any]) -> dict[str, Any]:
    values = {
        entry.name: entry.default
        for entry in fields(cls)
        if entry.default not in (MISSING, None)
        and entry.name not in _OTHERS
        and isinstance(entry.default, int | float | str | bool | list | tuple | dict)
    }
    if isinstance(cls.default_theta, dict):  # of layers without a window, and of those with one
        values.setdefault("rope_local_base_freq", cls.default_theta["local"])
    rope = getattr(cls(), "rope_parameters", None) or {}
    if rope.get("partial_rotary_factor") is not None:
        values.setdefault("partial_rotary_factor", rope["partial_rotary_factor"])
    if rope.get("rope_type", "default") != "default":  # its base goes with the scaling
        values.setdefault("rope_theta", cls.default_theta)
    rope = rope.get("full_attention", rope)
    if rope.get("rope_theta") is not None:
        values.setdefault("rope_theta", rope["rope_theta"])
    if rope.get("rope_type", "default") != "default":
        values["rope_parameters"] = rope
    return {cls.attribute_map.get(key, key): _plain(value) for key, value in values.items()}


def _plain(value: Any) -> Any:
    """Return a value as JSON can hold it: infinity becomes "inf"."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return "inf" if isinstance(value, float) and math.isinf(value) else value


def _described(cls: type[Any]) -> dict[str, Any]:
    described: dict[str, Any] = {"values": _values(cls)}
    if aliases := {theirs: ours for theirs, ours in cls.attribute_map.items() if theirs != ours}:
        described["aliases"] = aliases
    return described


def _wrapper(cls: type[Any]) -> dict[str, Any]:
    text = cls().text_config.model_type
    tied = cls(
        text_config={"model_type": text, "tie_word_embeddings": True}, tie_word_embeddings=False
    )
    described = {
        "text": text,
        "tied": cls().tie_word_embeddings,
        "either": tied.tie_word_embeddings,
    }
    part = cls.sub_configs_defaults["text_config"]
    described["only_text"] = part.config_class is not AutoConfig
    values = {key: value for key, value in part.init_kwargs.items() if key not in _OTHERS}
    return {**described, "values": values}


def generated() -> str:
    """Return the text of the whole file, a line for each class."""
    types = {record.model_type for record in ARCHITECTURES.values()} | {*TEXT_TYPES}
    classes = {name: _described(CONFIG_MAPPING[name]) for name in types if name in CONFIG_MAPPING}
    for name in WRAPPERS:
        if (cls := class_of(name)) is not None:
            classes[name] = _wrapper(cls)
    lines = [
        f"{json.dumps(key)}: {json.dumps(classes[key], sort_keys=True, allow_nan=False)}"
        for key in sorted(classes)
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(generated(), encoding="utf-8")
