"""read_quantized: reads the quantization_config of each method as a Quantized. No torch here."""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal

from engine.config.quantized import KEY, Kind, Quantized, Scheme, expression, modules
from engine.config_reader import Reader

_ALL = (".*",)
_HEAD = "lm_head"  # most methods leave the head in 16 bits unless config.json names it
_SPARSE = "sparse-24-bitmask"
Rules = tuple[tuple[tuple[str, ...], Scheme | None], ...]


def read_quantized(config: Reader) -> Quantized | None:
    """Read quantization_config; return None where config.json has none.

    Raises ConfigError naming the key whose value is not supported.
    """
    values = config.get(KEY)
    if values is None:
        return None
    if not isinstance(values, dict):
        raise config.error(KEY, f"must be an object, got {values!r}")
    read = Reader(values, f"{config.path}: {KEY}")
    method = read.one_of("quant_method", tuple(_METHODS), "")
    if method == "gguf":
        types = read.get("types", {})
        if not isinstance(types, dict):
            raise read.error("types", f"must be an object, got {types!r}")
        return Quantized(method, types={str(name): str(kind) for name, kind in types.items()})
    return Quantized(method, _METHODS[method](read))


# ---- GPTQ, AWQ, AutoRound ------------------------------------------------------------------------


def _gptq(read: Reader) -> Rules:
    scheme = _gptq_scheme(read, read)
    plain = list(_names(read, "modules_to_not_convert"))
    if not read.get("lm_head", False):
        plain.append(_HEAD)
    rules: list[tuple[tuple[str, ...], Scheme | None]] = []
    dynamic = read.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise read.error("dynamic", f"must be an object, got {dynamic!r}")
    for name, other in dynamic.items():
        pattern = _expression(read, "dynamic", name.removeprefix("-:").removeprefix("+:"))
        if name.startswith("-:"):
            rules.append(((pattern,), None))
        else:
            over = Reader({**read.values, **(other or {})}, f"{read.path}: dynamic: {name}")
            rules.append(((pattern,), _gptq_scheme(over, read)))
    return (*rules, (modules(*plain), None), (_ALL, scheme))


def _gptq_scheme(read: Reader, whole: Reader) -> Scheme:
    group = _group(read, "group_size", read.get("group_size", -1))
    version = _version(whole, "checkpoint_format", ("gptq", "gptq_v2"))
    return Scheme(
        "gptq",
        _bits(read, "bits", read.size("bits"), (4, 8)),
        group,
        symmetric=bool(read.get("sym", True)),
        zeros_less_one=version != "gptq_v2",
        ordered=bool(read.get("desc_act", False)) and group != 0,
    )


def _awq(read: Reader) -> Rules:
    _version(read, "version", ("gemm",))
    scheme = Scheme(
        "awq",
        _bits(read, "bits", read.size("bits"), (4,)),
        _group(read, "group_size", read.get("group_size", -1)),
        symmetric=not read.get("zero_point", True),
    )
    return (modules(*_names(read, "modules_to_not_convert"), _HEAD), None), (_ALL, scheme)


def _auto_round(read: Reader) -> Rules:
    packing = read.one_of(
        "packing_format",
        ("auto_round:auto_gptq", "auto_round:auto_awq"),
        "auto_round:auto_gptq",
    )
    kind: Kind = "awq" if packing.endswith("awq") else "gptq"

    def scheme(each: Reader) -> Scheme | None:
        if each.size("bits") >= 16:
            return None
        each.one_of("data_type", ("int",), "int")
        if each.get("act_bits", 16) < 16:
            raise each.error("act_bits", "quantised activations are not supported")
        return Scheme(
            kind,
            _bits(each, "bits", each.size("bits"), (4,) if kind == "awq" else (4, 8)),
            _group(each, "group_size", each.get("group_size", 128)),
            # AWQ's layout always has zero points, also for symmetric weights.
            symmetric=bool(each.get("sym", True)) and kind == "gptq",
            zeros_less_one=kind == "gptq",
        )

    rules: list[tuple[tuple[str, ...], Scheme | None]] = []
    extra = read.get("extra_config") or {}
    if not isinstance(extra, dict):
        raise read.error("extra_config", f"must be an object, got {extra!r}")
    regular = re.compile(r"[*\\^$+?\[(|]")
    for name, other in extra.items():
        over = Reader({**read.values, **(other or {})}, f"{read.path}: extra_config: {name}")
        patterns = modules(name)
        if regular.search(name):
            patterns = (_expression(read, "extra_config", f".*{name}"),)
        rules.append((patterns, scheme(over)))
    blocks = read.get("block_name_to_quantize") or []
    blocks = blocks.split(",") if isinstance(blocks, str) else blocks
    names = [name.strip() for name in blocks]
    inside = modules(*names) if names else _ALL
    return (*rules, (modules(_HEAD), None), (inside, scheme(read)))


# ---- compressed-tensors --------------------------------------------------------------------------


def _compressed(read: Reader) -> Rules:
    sparse = _sparsity(read)
    _no_transforms(read)
    groups = read.get("config_groups", {})
    if not groups and sparse is not None:
        return _with_sparse(sparse, ((_ALL, None),))
    if not isinstance(groups, dict) or not groups:
        raise read.error("config_groups", "must have a group of layers at least")
    named: list[tuple[tuple[str, ...], Scheme | None]] = []
    others: list[tuple[tuple[str, ...], Scheme | None]] = []
    for key, group in groups.items():
        within = Reader(
            group if isinstance(group, dict) else {}, f"{read.path}: config_groups: {key}"
        )
        scheme = _compressed_scheme(within, within.get("format") or read.get("format"))
        targets = _names(within, "targets", ["Linear"])
        if "Linear" in targets:
            others.append((_ALL, scheme))
        if patterns := _patterns(
            within, "targets", [target for target in targets if target != "Linear"]
        ):
            named.append((patterns, scheme))
    if len(others) > 1:
        raise read.error("config_groups", "more than one group has all linear layers")
    rules: Rules = ((_patterns(read, "ignore", _names(read, "ignore")), None), *named, *others)
    return rules if sparse is None else _with_sparse(sparse, rules)


def _sparsity(read: Reader) -> Reader | None:
    """Return sparsity_config if matrices are stored in a sparse format, else None.

    Raises ConfigError for formats other than 2:4 with a bit mask.
    """
    file_format = str(read.get("format", ""))
    if file_format == "marlin-24":
        raise read.error(
            "format",
            "'marlin-24' is laid out for one kernel, which Manta lacks; take the model as "
            "'sparse-24-bitmask', or one that is not sparse",
        )
    sparse = read.inner("sparsity_config")
    stored = ("dense", _SPARSE)
    if sparse.one_of("format", stored, "dense") == "dense":
        if file_format.startswith("sparse"):
            raise read.error("format", f"{file_format!r} needs a sparsity_config")
        return None  # dense storage: zeros are stored like other weights
    sparse.one_of("sparsity_structure", ("2:4",), "2:4")
    return sparse


def _with_sparse(read: Reader, rules: Rules) -> Rules:
    """Return the rules with the matrices that sparsity_config names marked as sparse.

    read: sparsity_config.
    """
    targets = _names(read, "targets", ["Linear"])
    within = _ALL if "Linear" in targets else _patterns(read, "targets", targets)
    without = "|".join(_patterns(read, "ignore", _names(read, "ignore"))) or r"(?!)"
    both: list[tuple[tuple[str, ...], Scheme | None]] = []
    for patterns, scheme in rules:
        named = "|".join(patterns) or r"(?!)"
        sparse = rf"(?=(?:{named})\Z)(?!(?:{without})\Z)(?:{'|'.join(within)})"
        both += [((sparse,), _sparse_scheme(read, scheme)), (patterns, scheme)]
    return tuple(both)


def _sparse_scheme(read: Reader, scheme: Scheme | None) -> Scheme:
    if scheme is None:
        return Scheme("sparse", 16, sparse=True)
    if scheme.kind not in ("fp8", "int8"):
        raise read.error("format", f"{_SPARSE!r} of weights in {scheme.name} is not supported")
    return replace(scheme, sparse=True)


def _no_transforms(read: Reader) -> None:
    """Raise ConfigError for transforms of activations, which are not supported.

    Transforms of weights are already applied to the stored weights.
    """
    for name, scheme in read.inner("transform_config").inner("config_groups").values.items():
        for transform in scheme.get("apply", ()):
            if transform.get("location") not in ("weight_input", "weight_output"):
                raise read.error(
                    "transform_config",
                    f"{name}: transforms at {transform.get('location')!r} are not supported, "
                    "only those that are in the weights; take a checkpoint without",
                )


def _compressed_scheme(group: Reader, file_format: object) -> Scheme:
    weights = Reader(group.get("weights") or {}, f"{group.path}: weights")
    kind = weights.one_of("type", ("int", "float"), "int")
    bits = weights.size("num_bits")
    strategies = ("tensor", "channel", "group", "block", "tensor_group")
    strategy = weights.one_of("strategy", strategies, "group")
    symmetric = bool(weights.get("symmetric", True))
    activations = _activations(group, kind)
    if kind == "float":
        if bits == 4:
            return _fp4(weights, file_format)
        _bits(weights, "num_bits", bits, (4, 8))
        weights.one_of("strategy", ("tensor", "channel", "block"), strategy)
        if strategy == "block":
            rows, inputs = _block(weights, "block_structure")
            return Scheme("fp8", 8, inputs, rows, activations=activations)
        return Scheme("fp8", 8, 0, 0 if strategy == "tensor" else 1, activations=activations)
    if file_format in ("int-quantized", "naive-quantized"):
        _bits(weights, "num_bits", bits, (8,))
        weights.one_of("strategy", ("tensor", "channel"), strategy)
        if not symmetric:
            raise weights.error("symmetric", "zero points of int-quantized weights are not read")
        return Scheme("int8", 8, 0, 0 if strategy == "tensor" else 1, activations=activations)
    group.one_of("format", ("pack-quantized",), str(file_format or "pack-quantized"))
    if file_format not in (None, "pack-quantized"):
        raise group.error("format", f"{file_format!r} of whole numbers is not supported")
    weights.one_of("strategy", ("channel", "group"), strategy)
    inputs = (
        0 if strategy == "channel" else _group(weights, "group_size", weights.get("group_size"))
    )
    return Scheme(
        "packed",
        _bits(weights, "num_bits", bits, (4, 8)),
        inputs,
        symmetric=symmetric,
        ordered=weights.get("actorder") in ("group", "dynamic", True) and inputs != 0,
    )


def _activations(group: Reader, kind: str) -> Literal[8, 16]:
    """Return the bits of matmul inputs: 8 if they are quantised to 8 bits of type `kind`, else
    16."""
    inputs = group.get("input_activations")
    if not isinstance(inputs, dict):
        return 16
    return 8 if (inputs.get("type", "int"), inputs.get("num_bits", 8)) == (kind, 8) else 16


def _fp4(weights: Reader, file_format: object) -> Scheme:
    size = weights.get("group_size")
    if file_format == "nvfp4-pack-quantized" or (file_format is None and size == 16):
        return replace(_NVFP4, weight="weight_packed", total="weight_global_scale", divides=True)
    if file_format == "mxfp4-pack-quantized":
        return Scheme("mxfp4", 4, 32, weight="weight_packed")
    raise weights.error("group_size", f"4-bit floats of format {file_format!r} are not supported")


_NVFP4 = Scheme("nvfp4", 4, 16, total="weight_scale_2")


# ---- FP8, ModelOpt, MXFP4, bitsandbytes ----------------------------------------------------------


def _fp8(read: Reader) -> Rules:
    read.one_of("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    read.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
    scheme = Scheme("fp8", 8, 0, 0, scale="weight_scale_inv", activations=8)
    if read.get("weight_block_size") is not None:
        rows, inputs = _block(read, "weight_block_size")
        scheme = replace(scheme, rows=rows, group=inputs)
    plain = [*_names(read, "modules_to_not_convert"), *_names(read, "ignored_layers"), _HEAD]
    return (modules(*plain), None), (_ALL, scheme)


def _fbgemm(read: Reader) -> Rules:
    """Return the rules of fbgemm_fp8, the method of Meta's FP8 checkpoints of Llama 3.1.

    Weights have a scale for each output, activations one for each token.
    """
    plain = modules(*_names(read, "modules_to_not_convert"), _HEAD)
    return (plain, None), (_ALL, Scheme("fp8", 8, 0, 1, activations=8))


_MODELOPT: dict[str, Scheme] = {
    "FP8": Scheme("fp8", 8, 0, 0, activations=8),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme("fp8", 8, 0, 1, activations=8),
    "FP8_PB_WO": Scheme("fp8", 8, 128, 128),
    "NVFP4": _NVFP4,
    "W4A16_NVFP4": _NVFP4,
}


def _modelopt(read: Reader) -> Rules:
    inner = read.get("quantization")
    if isinstance(inner, dict):
        read = Reader(inner, f"{read.path}: quantization")

    def scheme(layer: Reader) -> Scheme:
        scheme_of_algo = _MODELOPT[layer.one_of("quant_algo", tuple(_MODELOPT), "")]
        if scheme_of_algo is _NVFP4 and layer.get("group_size") not in (None, 0, 16):
            raise layer.error("group_size", f"{layer.get('group_size')!r} of NVFP4 must be 16")
        return scheme_of_algo

    names = [*_names(read, "exclude_modules"), *_names(read, "ignore")]
    plain: tuple[tuple[str, ...], None] = (_patterns(read, "exclude_modules", names), None)
    if read.get("quant_algo") != "MIXED_PRECISION":
        return plain, (_ALL, scheme(read))
    layers = read.get("quantized_layers", {})
    if not isinstance(layers, dict) or not layers:
        raise read.error("quantized_layers", "must name layers of MIXED_PRECISION")
    rules = (
        (modules(name), scheme(Reader(values, f"{read.path}: quantized_layers: {name}")))
        for name, values in layers.items()
    )
    return plain, *rules


def _mxfp4(read: Reader) -> Rules:
    """Return the rules of mxfp4, the method of gpt-oss, where one tensor has a layer's experts."""
    scheme = Scheme("mxfp4", 4, 32, weight="_blocks", scale="_scales")
    plain = modules(*_names(read, "modules_to_not_convert"), _HEAD)
    return (plain, None), ((r".*\.experts\.(?:gate_up|down)_proj",), scheme)


def _bitsandbytes(read: Reader) -> Rules:
    plain = modules(*_names(read, "llm_int8_skip_modules"), _HEAD)
    if read.get("load_in_8bit") or read.get("_load_in_8bit"):
        return (plain, None), (_ALL, Scheme("llm-int8", 8, 0, 1, scale="SCB"))
    if not (read.get("load_in_4bit") or read.get("_load_in_4bit")):
        raise read.error("load_in_4bit", "neither load_in_4bit nor load_in_8bit is true")
    read.one_of("bnb_4bit_quant_type", ("nf4",), "fp4")
    nested = bool(read.get("bnb_4bit_use_double_quant", False))
    return (plain, None), (_ALL, Scheme("nf4", 4, 64, nested=nested))


_METHODS: dict[str, Callable[[Reader], Rules]] = {
    "gguf": lambda read: (),
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "intel/auto-round": _auto_round,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "mxfp4": _mxfp4,
    "bitsandbytes": _bitsandbytes,
}


# ---- Values --------------------------------------------------------------------------------------


def _names(read: Reader, key: str, default: Iterable[str] = ()) -> list[str]:
    names: Any = read.get(key)
    names = list(default) if names is None else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise read.error(key, f"must be a list of names, got {names!r}")
    return names


def _patterns(read: Reader, key: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return patterns that match the names; a name after "re:" is a regular expression.

    key: the key of `read` that has the names, for errors.
    """
    patterns: list[str] = []
    for name in names:
        if name.startswith("re:"):
            patterns.append(_expression(read, key, name.removeprefix("re:")))
        else:
            patterns += modules(name)
    return tuple(patterns)


def _expression(read: Reader, key: str, text: str) -> str:
    try:
        return expression(text)
    except re.error as error:
        raise read.error(key, f"{text!r} is no regular expression: {error}") from None


def _version(read: Reader, key: str, known: tuple[str, ...]) -> str:
    """Return the format's version in lower case, under `key` or, since transformers 5, "format".

    known: the supported versions.
    """
    key = next((name for name in (key, "format") if read.get(name) is not None), key)
    version = str(read.get(key, known[0])).lower()
    return Reader({key: version}, read.path).one_of(key, known, known[0])


def _bits(read: Reader, key: str, bits: int, allowed: tuple[int, ...]) -> int:
    if bits not in allowed:
        raise read.error(key, f"{bits} is not supported; supported: {', '.join(map(str, allowed))}")
    return bits


def _group(read: Reader, key: str, group: object) -> int:
    if group == -1:
        return 0
    if not isinstance(group, int) or (group != 16 and (group < 32 or group % 32)):
        raise read.error(key, f"{group!r} is not supported, only -1, 16 and multiples of 32")
    return group


def _block(read: Reader, key: str) -> tuple[int, int]:
    block: Any = read.get(key)
    sizes = isinstance(block, list) and len(block) == 2
    if not sizes or not all(isinstance(size, int) and size >= 16 for size in block):
        raise read.error(key, f"{block!r} is not supported, only two sizes such as [128, 128]")
    if block[1] % 16:
        raise read.error(key, f"{block[1]} inputs are not supported, only multiples of 16")
    return block[0], block[1]
