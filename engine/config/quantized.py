"""Quantized: the quantisation of a checkpoint, as config.json describes it. No torch here.

`engine.config.quantized_config` reads it.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import translate
from functools import lru_cache
from math import lcm
from typing import Literal

KEY = "quantization_config"
# GGUF block type that is kept quantised -> (weights, bytes) of a block. Other types are dequantised
# to 16 bits.
GGUF_BLOCKS: Mapping[str, tuple[int, int]] = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
}
Kind = Literal[
    "gptq", "awq", "packed", "int8", "fp8", "nvfp4", "mxfp4", "nf4", "llm-int8", "sparse"
]


@dataclass(frozen=True, slots=True)
class Scheme:
    """The format of a stored matrix [out, in] (`engine.quantization.layouts`).

    kind: the checkpoint's layout: a matrix's tensors, and how codes are packed in them.
    bits: bits of a code.
    group: number of inputs that share a scale; 0 = all.
    rows: number of outputs that share a scale; 0 = all.
    symmetric: whether there are no zero points.
    zeros_less_one: whether zero points are stored less one (kind "gptq").
    ordered: whether a tensor has the group index of each input (act-order).
    weight, scale, total: the suffixes of the tensor names of codes, scales and the scale of the
        whole matrix, which differ among files of one kind. total "" = the whole matrix has no
        scale.
    divides: whether weights are divided by the scale of the whole matrix (kind "nvfp4").
    nested: whether scales are quantised to 8 bits themselves (kind "nf4").
    activations: bits of matmul inputs; 8 = inputs are quantised, 16 = they are not.
    sparse: whether only two of each four weights are stored, with a bit mask (2:4 sparsity). With
        kind "sparse" the stored weights are numbers of 16 or 32 bits.
    """

    kind: Kind
    bits: int = 4
    group: int = 0
    rows: int = 1
    symmetric: bool = True
    zeros_less_one: bool = False
    ordered: bool = False
    weight: str = "weight"
    scale: str = "weight_scale"
    total: str = ""
    divides: bool = False
    nested: bool = False
    activations: Literal[8, 16] = 16
    sparse: bool = False

    @property
    def name(self) -> str:
        dense = self._dense_name
        return f"{dense} 2:4 sparse".strip() if self.sparse else dense

    @property
    def _dense_name(self) -> str:
        if self.kind == "sparse":
            return ""
        if self.kind in ("gptq", "awq", "packed"):
            return f"{self.bits} bits" + (", inputs in another order" if self.ordered else "")
        if self.kind == "fp8" and self.group:
            return f"FP8 by {self.rows} x {self.group}"
        return {"int8": "INT8", "llm-int8": "INT8"}.get(self.kind, self.kind.upper())


@dataclass(frozen=True, slots=True)
class Quantized:
    """The quantisation of a checkpoint: the format of each of its matrices.

    method: the name in config.json.
    rules: (patterns of names without ".weight", format or None for unquantised). The first rule
        with a matching pattern applies; a matrix without a rule is unquantised. `modules` and
        `expression` create patterns.
    types: name of a quantised matrix -> its GGUF block type (method "gguf").
    """

    method: str
    rules: tuple[tuple[tuple[str, ...], Scheme | None], ...] = ()
    types: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        """The name for messages and tables: "awq, 4 bits"; "gguf Q4_K, Q6_K"."""
        if self.method == "gguf":
            return f"gguf {', '.join(sorted(set(self.types.values())))}"
        names = dict.fromkeys(scheme.name for _, scheme in self.rules if scheme is not None)
        return ", ".join((self.method, *names))

    @property
    def unit(self) -> int:
        """The unit, in inputs, by which matrices can be divided among ranks."""
        if self.method == "gguf":
            return 256 if any("K" in kind or "XS" in kind for kind in self.types.values()) else 32
        schemes = [scheme for _, scheme in self.rules if scheme is not None]
        # FP8 blocks may be split among ranks, each of which keeps the block's scale.
        return lcm(32, *(scheme.group or 1 for scheme in schemes if scheme.kind != "fp8"))

    def scheme(self, name: str) -> Scheme | None:
        """Return the format of the matrix of this name; None = unquantised. Not for "gguf"."""
        for patterns, scheme in self.rules:
            if _any_of(patterns).fullmatch(name):
                return scheme
        return None

    def of(self, names: Iterable[str]) -> "Quantized":
        """Return this quantisation with only the formats that the named matrices use.

        A file may list formats that no matrix uses, such as for an LM head that is tied to the
        embedding. `scheme` and `keeps` return the same as before for the named matrices.
        """
        if self.method == "gguf":
            wanted = set(names)
            return replace(
                self, types={at: kind for at, kind in self.types.items() if at in wanted}
            )
        met = {self.scheme(name) for name in names}
        return replace(
            self, rules=tuple(rule for rule in self.rules if rule[1] is None or rule[1] in met)
        )

    @property
    def _sparse(self) -> bool:
        return any(scheme is not None and scheme.sparse for _, scheme in self.rules)

    def keeps(self, name: str) -> bool:
        """Whether this matrix is stored unquantised."""
        if self.method == "gguf":
            return name not in self.types
        return self.scheme(name) is None

    def canonical(self, name: str) -> str:
        """Return one common name for a tensor that files of the same method name differently."""
        if self.method == "fp8" and name.endswith(".weight_scale"):
            return f"{name}_inv"
        return name

    def ignores(self, name: str) -> bool:
        """Whether loading skips the checkpoint's tensor `name`.

        Such tensors repeat config.json, or are static activation scales from calibration.
        Activations are quantised dynamically, or not at all.
        """
        if name.endswith((".g_idx", ".weight_g_idx")):
            scheme = self.scheme(name.rpartition(".")[0])
            return scheme is None or not scheme.ordered
        return name.endswith(
            (
                *(".weight_shape", ".weight_format"),
                *((".shape",) if self._sparse else ()),
                *(".input_scale", ".input_zero_point", ".input_global_scale", ".activation_scale"),
                ".input_scale_ub",
                *(".output_scale", ".q_scale", ".k_scale", ".v_scale", ".kv_scale"),
            )
        )


def modules(*names: str) -> tuple[str, ...]:
    """Return regular expressions that match the named modules and their submodules.

    names: names of modules, with wildcards, and possibly with a prefix of the text model.
    """
    patterns = []
    for name in names:
        inner = name.replace("language_model.model.", "model.")
        inner = inner.replace("model.language_model.", "model.").removeprefix("language_model.")
        glob = translate(inner).replace("(?s:", "(?:").removesuffix("\\Z").removesuffix("\\z")
        patterns.append(rf"(?:.*\.)?{glob}(?:\..*)?")
    return tuple(patterns)


def expression(text: str) -> str:
    """Return a pattern that matches names that begin with a match of the regular expression `text`.

    Raises re.error.
    """
    prefix = r"^\^?(?:model\\?\.language_model|language_model\\?\.model)\\?\."
    pattern = f"(?:{re.sub(prefix, 'model.', text)}).*"
    re.compile(pattern)
    return pattern


@lru_cache(maxsize=256)
def _any_of(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns) or r"(?!)")
