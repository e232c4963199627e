"""Quantized: what config.json says of weights that the checkpoint keeps in fewer bits. No torch
here."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from engine.config_reader import Reader

CHECKPOINT_FORMATS = ("gguf", "gptq", "awq", "compressed-tensors")
KEY = "quantization_config"
# Types of GGUF blocks that are kept as they are; others are expanded to 16 bits.
GGUF_BLOCKS = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"),
)


@dataclass(frozen=True, slots=True)
class Quantized:
    """method: one of CHECKPOINT_FORMATS, which says how tensors are laid out
        (`engine.quantization.stored`).

    bits, group, symmetric: of all matrices; group 0 is a whole row, and symmetric ones have no zero
        points. Not for "gguf".
    plain: patterns of matrices, without ".weight", that are kept as usual.
    types: "gguf": matrix -> its type, of those in blocks.
    zeros_less_one: "gptq": zero points are stored less one.
    """

    method: str
    bits: int = 4
    group: int = 0
    symmetric: bool = True
    plain: tuple[str, ...] = ()
    types: Mapping[str, str] = field(default_factory=dict, hash=False)
    zeros_less_one: bool = False

    @property
    def name(self) -> str:
        """For messages and tables: "awq, 4 bits"; "gguf Q4_K, Q6_K"."""
        if self.method == "gguf":
            return f"gguf {', '.join(sorted(set(self.types.values())))}"
        return f"{self.method}, {self.bits} bits"

    def keeps(self, name: str) -> bool:
        """Whether this matrix is kept as usual."""
        if self.method == "gguf":
            return name not in self.types
        return any(fnmatchcase(name, pattern) for pattern in self.plain)

    def ignores(self, name: str) -> bool:
        """Tensors that say what config.json does already."""
        return name.endswith((".g_idx", ".weight_g_idx", ".weight_shape"))


def read_quantized(config: Reader) -> Quantized | None:
    """Raises ConfigError naming what is not supported."""
    values = config.get(KEY)
    if values is None:
        return None
    if not isinstance(values, dict):
        raise config.error(KEY, f"must be an object, got {values!r}")
    read = Reader(values, f"{config.path}: {KEY}")
    method = read.one_of("quant_method", CHECKPOINT_FORMATS, "")
    if method == "gguf":
        types = read.get("types", {})
        if not isinstance(types, dict):
            raise read.error("types", f"must be an object, got {types!r}")
        return Quantized(method, types={str(name): str(kind) for name, kind in types.items()})
    if method == "compressed-tensors":
        return _compressed(read)
    bits, group = read.size("bits"), read.get("group_size", -1)
    plain = read.get("modules_to_not_convert", [])
    if method == "gptq":
        if read.flag("desc_act") and group != -1:
            raise read.error("desc_act", "groups of columns in another order are not supported")
        if read.get("dynamic"):
            raise read.error("dynamic", "bits that differ by layer are not supported")
        symmetric = bool(read.get("sym", True))
        head = bool(read.get("lm_head", False))
    else:
        read.one_of("version", ("gemm",), "gemm")
        symmetric, head = not read.get("zero_point", True), False
    return Quantized(
        method,
        _bits(read, "bits", bits, (4,) if method == "awq" else (4, 8)),
        _group(read, "group_size", group),
        symmetric,
        _patterns([*plain, *([] if head else ["lm_head"])]),
        zeros_less_one=method == "gptq" and read.get("checkpoint_format", "gptq") != "gptq_v2",
    )


def _compressed(read: Reader) -> Quantized:
    groups = read.get("config_groups", {})
    if not isinstance(groups, dict) or len(groups) != 1:
        raise read.error("config_groups", "exactly one group of layers is supported")
    (group,) = groups.values()
    within = Reader(group if isinstance(group, dict) else {}, f"{read.path}: config_groups")
    if within.get("input_activations") is not None:
        raise within.error("input_activations", "quantized activations are not supported")
    if within.get("targets", ["Linear"]) != ["Linear"]:
        raise within.error("targets", f"{within.get('targets')!r} is not supported, only Linear")
    read.one_of("format", ("pack-quantized",), "pack-quantized")
    weights = Reader(within.get("weights", {}), f"{within.path}: weights")
    weights.one_of("type", ("int",), "int")
    strategy = weights.one_of("strategy", ("group", "channel"), "group")
    if weights.get("actorder") not in (None, "weight", "static"):
        raise weights.error("actorder", "groups of columns in another order are not supported")
    return Quantized(
        "compressed-tensors",
        _bits(weights, "num_bits", weights.size("num_bits"), (4, 8)),
        0 if strategy == "channel" else _group(weights, "group_size", weights.get("group_size")),
        bool(weights.get("symmetric", True)),
        _patterns(read.get("ignore", [])),
    )


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


def _patterns(names: list[str]) -> tuple[str, ...]:
    """Of matrices, from names of modules, with all that is inside, or "re:" and an expression that
    says no more than a pattern can."""
    found = []
    for name in names:
        if name.startswith("re:"):
            name = name.removeprefix("re:").replace(".*", "*").replace("\\.", ".").rstrip("$")
        found += [name, f"{name}.*", f"*.{name}", f"*.{name}.*"]
    return tuple(found)
