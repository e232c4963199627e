"""find: finds the record of a config.json's architecture."""

from difflib import get_close_matches

from engine.architectures import ARCHITECTURES, TEXT_TYPES, WRAPPERS, Architecture, Wrapper
from engine.architectures.class_defaults import class_defaults
from engine.architectures.refused import REFUSED
from engine.config_reader import CLASSIFIER, Reader


def find(config: Reader) -> tuple[Architecture, str, Reader]:
    """Return (the architecture's record, the wrapper's name or "", the text model's config).

    Raises ConfigError for an architecture that is not supported; the message names the nearest one.
    """
    names = config.get("architectures", [])
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise config.error("architectures", f"must be a list of one name, got {names!r}")
    (name,) = names
    wrapper = WRAPPERS.get(name)
    if wrapper is not None:
        config = _text_of(config, wrapper)
        match = _by_model_type(config, wrapper)
    elif (record := _record_of(name)) is not None:
        match = record
    elif name in REFUSED:
        raise config.error("architectures", f"{name!r} is not supported: {REFUSED[name]}")
    else:
        known = [
            *WRAPPERS,
            *(record.name for record in ARCHITECTURES.values() if record.models),
        ]
        families = {_family(class_name): class_name for class_name in known}
        near = families[get_close_matches(_family(name), families, 1, cutoff=0.0)[0]]
        raise config.error(
            "architectures",
            f"{name!r} is not supported, and code of a model folder is never run; the nearest that "
            f"is: {near}. All that are: docs/models.md",
        )
    if match.variant is not None:
        match = ARCHITECTURES[match.variant(match.filled(config))]
    return match, "" if wrapper is None else wrapper.name, config


def _family(name: str) -> str:
    """Return a class name without suffixes such as ForCausalLM, which unrelated models share."""
    for ending in ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "Model"):
        name = name.removesuffix(ending)
    return name


def _record_of(name: str) -> Architecture | None:
    """Return the record for a class name, with or without a head suffix; None if there is none.

    For example, Qwen3Model is Qwen3ForCausalLM without a head, and BertForMaskedLM is BertModel
    with one.
    """
    base = name.removesuffix("Model").removesuffix("ForMaskedLM").removesuffix(CLASSIFIER)
    names = [name]
    if base != name:
        names += [f"{base}Model", f"{base}ForCausalLM", f"{base}LMHeadModel"]
    return next(
        (ARCHITECTURES[class_name] for class_name in names if class_name in ARCHITECTURES), None
    )


def _text_of(config: Reader, wrapper: Wrapper) -> Reader:
    """Return the text model's config: text_config, with the outer keys that also apply to it."""
    known = class_defaults(wrapper.name)
    key = wrapper.text_key
    inner = config.inner(key).values
    if config.get(key) is None:
        if wrapper.flat:
            flat = {key: value for key, value in config.values.items() if key not in _OF_WRAPPER}
            return Reader({**flat, "model_type": known.text or wrapper.flat}, config.path)
        if not known.text:
            raise config.error(key, "is missing")
        inner = dict(known.values)
    values = {key: config.values[key] for key in _OF_BOTH if config.get(key) is not None}
    tied = values.pop(_TIED, None)
    values |= {key: value for key, value in inner.items() if key not in values or value is not None}
    if tied is not None:
        values[_TIED] = bool(tied) or (known.either and bool(values.get(_TIED)))
    elif known.text and not known.tied and not known.either:
        values.setdefault(_TIED, False)
    if known.only_text or values.get("model_type") is None:
        values["model_type"] = known.text
    return Reader(values, f"{config.path}: {key}")


# Outer keys that do not apply to the text model.
_OF_WRAPPER = ("architectures", "model_type", "text_config", "vision_config", "audio_config")
_TIED = "tie_word_embeddings"
# Outer keys that also apply to the text model.
_OF_BOTH = ("bos_token_id", "dtype", "eos_token_id", "torch_dtype", _TIED, "quantization_config")


def _by_model_type(config: Reader, wrapper: Wrapper) -> Architecture:
    kind = str(config.get("model_type", wrapper.flat))
    kind = TEXT_TYPES.get(kind, kind)
    decoders = [record for record in ARCHITECTURES.values() if not record.encoder]
    for architecture in decoders:
        if kind and architecture.model_type == kind:
            return architecture
    known = sorted({record.model_type for record in decoders} - {""})
    raise config.error(
        "model_type",
        f"{kind!r} is not supported in a {wrapper.name}; supported: {', '.join(known)}",
    )
