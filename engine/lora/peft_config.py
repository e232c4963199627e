"""PeftConfig: the supported part of an adapter's adapter_config.json. No torch here.

The fields are PEFT's. Unsupported fields that would change the result are refused.
"""

import json
import math
import os
import re
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from engine.errors import AdapterError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
NAME = re.compile(r"(?!\.+$)[A-Za-z0-9._-]{1,128}")  # safe in a path, a URL and a log line
PREFIX = "prefix_tuning"
KINDS = ("lora", "prompt_tuning", "p_tuning", PREFIX)  # PEFT's names of the kinds, in lower case


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The configuration of one adapter.

    kind: a value of KINDS.
    base: base_model_name_or_path; see `engine.lora.base_model`.
    rank, alpha: the values for layers without a matching pattern.
    rslora: whether the scale is alpha / sqrt(rank).
    rank_pattern, alpha_pattern: (pattern of module names, value) pairs; the first match applies.
    targets: the last parts of the names of the modules that the adapter may change ("q_proj"); None
        = the modules in its weights file.
    everywhere: whether the adapter must change all modules with these names.
    virtual_tokens: the number of virtual tokens; 0 for LoRA.
    layers, heads: the numbers of layers and heads of the model that the adapter was trained for; 0
        = unknown.
    """

    kind: str
    base: str = ""
    rank: int = 0
    alpha: float = 0.0
    rslora: bool = False
    rank_pattern: tuple[tuple[str, int], ...] = ()
    alpha_pattern: tuple[tuple[str, float], ...] = ()
    targets: tuple[str, ...] | None = None
    everywhere: bool = False
    virtual_tokens: int = 0
    layers: int = 0
    heads: int = 0

    def rank_of(self, module: str) -> int:
        """Return the LoRA rank of a module.

        module: its full name in the trained model, e.g.
            model.language_model.layers.0.self_attn.q_proj.
        """
        return int(_match(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """Return the factor by which the product of a module's two LoRA matrices is scaled."""
        rank = self.rank_of(module)
        alpha = _match(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    @property
    def max_rank(self) -> int:
        return max([self.rank, *(rank for _, rank in self.rank_pattern)])


def check_name(name: str) -> None:
    """Raise AdapterError for a name that could be a path or break a log line."""
    if not NAME.fullmatch(name):
        raise AdapterError(
            f"adapter name {name[:140]!r} is not allowed: 1 to 128 of A-Z a-z 0-9 . _ - and not "
            "dots alone",
            code="invalid_model_name",
        )


def file_in(folder: Path, name: str) -> Path:
    """Return the path of a regular file in the folder.

    Raises AdapterError if the file is missing, or is a link that leads out of the folder.
    """
    try:
        root = folder.resolve(strict=True)
        path = (folder / name).resolve(strict=True)
    except (OSError, ValueError, RuntimeError):
        pickled = (folder / name).with_suffix(".bin")
        what = f"{name} is missing"
        if name == WEIGHTS_FILE and pickled.exists():
            raise AdapterError(
                f"{folder}: {what}; {pickled.name} is a pickle, which can run code when it is read "
                "and is not supported: save the adapter as safetensors"
            ) from None
        raise AdapterError(
            f"{folder}: {what}; an adapter is a folder with {CONFIG_FILE} and {WEIGHTS_FILE}",
            code="adapter_not_found",
        ) from None
    if not path.is_relative_to(root):
        raise AdapterError(f"{folder}: {name} is a link out of the adapter's folder")
    if not path.is_file():
        raise AdapterError(f"{folder}: {name} is not a regular file")
    return path


def read_peft_config(folder: Path) -> PeftConfig:
    """Read an adapter's configuration.

    Raises AdapterError naming the field that is wrong or not supported.
    """
    path = file_in(folder, CONFIG_FILE)
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise AdapterError(f"{path}: cannot be read: {error.strerror}") from None
    if len(raw) > MAX_CONFIG_BYTES:
        raise AdapterError(f"{path}: larger than {MAX_CONFIG_BYTES} bytes")
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{path}: not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise AdapterError(f"{path}: not a JSON object")
    return _Reader(path, fields).read()


def stamp(folder: Path) -> str:
    """Return a string that changes when the adapter's files change, without reading the files.

    Raises AdapterError.
    """
    state = blake2b(digest_size=16)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        try:
            stat = os.stat(file_in(folder, name))
        except OSError as error:
            raise AdapterError(f"{folder}: {name}: {error.strerror}") from None
        state.update(f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ino}\0".encode())
    return state.hexdigest()


# Field that changes what an adapter computes -> the supported values, which include PEFT's default.
_ONLY: dict[str, tuple[Any, ...]] = {
    "bias": (None, "none"),
    "use_dora": (None, False),
    "use_bdlora": (None, False),
    "use_qalora": (None, False),
    "lora_bias": (None, False),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    # True is supported, as it transposes only the base matrix
    "fan_in_fan_out": (None, False, True),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "megatron_config": (None,),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "kasa_config": (None, {}),
    "loftq_config": (None, {}),
    # With other values PEFT changes the base model's weights first, so that the adapter alone is
    # wrong.
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal"),
    "corda_config": (None, {}),
}
_ONLY_PROMPT: dict[str, tuple[Any, ...]] = {
    "num_transformer_submodules": (None, 1),
    "modules_to_save": (None, []),
}
_REFUSED_TARGETS = ("embed_tokens", "lm_head")


class _Reader:
    def __init__(self, path: Path, fields: dict[str, Any]) -> None:
        self._path = path
        self._fields = fields

    def read(self) -> PeftConfig:
        fields = self._fields
        kind = str(fields.get("peft_type", "")).lower()
        if kind not in KINDS:
            supported = ", ".join(KINDS).upper()
            raise self._error("peft_type", f"{fields.get('peft_type')!r}; supported: {supported}")
        task = fields.get("task_type")
        if task not in (None, "CAUSAL_LM"):
            raise self._error("task_type", f"{task!r}; supported: CAUSAL_LM")
        for field, only in (_ONLY if kind == "lora" else _ONLY_PROMPT).items():
            value = fields.get(field)
            if value not in only:
                raise self._error(field, f"{str(value)[:80]!r} is not supported")
        base = str(fields.get("base_model_name_or_path") or "")
        if kind != "lora":
            return PeftConfig(
                kind,
                base,
                virtual_tokens=self._int("num_virtual_tokens"),
                layers=self._int("num_layers", 0),
                heads=self._int("num_attention_heads", 0),
            )
        return PeftConfig(
            kind,
            base,
            rank=self._int("r"),
            alpha=self._number("lora_alpha", fields.get("lora_alpha")),
            rslora=self._bool("use_rslora"),
            rank_pattern=tuple(
                (str(key), self._positive("rank_pattern", value))
                for key, value in self._dict("rank_pattern").items()
            ),
            alpha_pattern=tuple(
                (str(key), self._number("alpha_pattern", value))
                for key, value in self._dict("alpha_pattern").items()
            ),
            targets=self._targets(),
            everywhere=self._everywhere(),
        )

    def _targets(self) -> tuple[str, ...] | None:
        value = self._fields.get("target_modules")
        # for a pattern, the weights file shows which modules it matched
        if value is None or isinstance(value, str):
            return None
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self._error("target_modules", "must be names or a pattern")
        ends = tuple(sorted({name.rsplit(".", 1)[-1] for name in value}))
        for name in ends:
            if name in _REFUSED_TARGETS:
                raise self._error(
                    "target_modules", f"{name} is not supported; supported: linear layers"
                )
        return ends

    def _everywhere(self) -> bool:
        """Whether target_modules are names without a path, and no other field restricts them."""
        value = self._fields.get("target_modules")
        narrowed = ("layers_to_transform", "layers_pattern", "exclude_modules")
        return (
            isinstance(value, list)
            and not any("." in name for name in value)
            and not any(self._fields.get(field) for field in narrowed)
        )

    def _bool(self, field: str) -> bool:
        value = self._fields.get(field, False)
        if not isinstance(value, bool | None):
            raise self._error(field, f"{value!r} is not true or false")
        return bool(value)

    def _dict(self, field: str) -> dict[str, Any]:
        value = self._fields.get(field) or {}
        if not isinstance(value, dict):
            raise self._error(field, "must be an object")
        for key in value:
            try:
                re.compile(key)
                repeats = len(re.findall(r"[*+{]", key))
                simple = len(key) <= 1000 and repeats <= 3 and not re.search(r"\)[*+{]", key)
            except (re.error, RecursionError):
                simple = False
            # patterns with nested repeats are refused, as matching could take forever
            if not simple:
                raise self._error(field, f"{key[:80]!r} is not a pattern that is supported")
        return value

    def _int(self, field: str, default: int | None = None) -> int:
        value = self._fields.get(field)
        if value is None and default is not None:
            return default
        return self._positive(field, value)

    def _positive(self, field: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1 << 20:
            raise self._error(field, f"{value!r} is not a positive number")
        return value

    def _number(self, field: str, value: Any) -> float:
        if not _is_number(value):
            raise self._error(field, f"{value!r} is not a number")
        return float(value)

    def _error(self, field: str, what: str) -> AdapterError:
        return AdapterError(f"{self._path}: {field}: {what}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _match(pattern: tuple[tuple[str, float], ...], module: str, default: float) -> float:
    """Return the value of the first pattern that matches the end of a module's name, as PEFT does.

    default: the value if no pattern matches.
    """
    for key, value in pattern:
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default
