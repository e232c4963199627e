"""Keys that a config.json leaves to its class: read as transformers' class reads them."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig

from engine.architectures import ARCHITECTURES, WRAPPERS
from engine.architectures.class_defaults import FILE
from engine.config.model_config import ModelConfig
from engine.errors import ConfigError
from tests.parity.cases import save
from tests.parity.class_defaults import class_of, generated
from tests.parity.published import PUBLISHED
from tests.parity.test_architectures import ALL
from tests.pins import CONSTRAINTS

Config = dict[str, Any]
(_PIN,) = re.findall(r"^transformers==(\S+)", CONSTRAINTS.read_text(), re.MULTILINE)
pinned = pytest.mark.skipif(
    transformers.__version__ != _PIN, reason=f"transformers {_PIN} is what the table is made of"
)
TIED = "tie_word_embeddings"
# What is not of the network's computation, and whether a wrapper's head is its embedding: that is
# for the checkpoint too (test_ties_of_wrappers).
_KEPT = {"architectures", "transformers_version", "dtype", "torch_dtype", "vision_config"}
_KEPT |= {"bos_token_id", "eos_token_id", "pad_token_id"}


def read(folder: Path, config: Config) -> ModelConfig | None:
    """Return the model configuration that Manta derives; None for a file that it refuses."""
    (folder / "config.json").write_text(json.dumps(config))
    try:
        model = ModelConfig.from_folder(folder)
    except ConfigError:
        return None
    return replace(model, eos_token_ids=(), dtype="")


def class_of_file(config: Config) -> type[PreTrainedConfig] | None:
    """Return transformers' class of a file; None if the class is in its own repository alone."""
    (name,) = config["architectures"]
    if name in WRAPPERS:
        return class_of(name)
    kind = config["model_type"]
    if kind not in CONFIG_MAPPING:  # which has no other way to ask: its get finds nothing
        return None
    return CONFIG_MAPPING[kind]


def expanded(folder: Path, config: Config) -> Config | None:
    """Return the file with every key that transformers' class has; None if it refuses the file."""
    cls = class_of_file(config)
    assert cls is not None
    file = folder / "shortened.json"
    file.write_text(json.dumps(config))
    try:
        whole = cls.from_json_file(file)
    except Exception:  # of as many types as there are checks in transformers
        return None
    return json.loads(whole.to_json_string(use_diff=False)) | {
        "architectures": config["architectures"]
    }


def shortened(config: Config) -> Iterator[tuple[str, Config]]:
    """Yield the file without each of its keys in turn, and without each key of its inner
    objects."""
    places = [(key,) for key in config if key not in {*_KEPT, "model_type"}]
    places += [
        (key, inner)
        for key, value in config.items()
        if isinstance(value, dict) and key != "vision_config"
        for inner in value
        if inner not in _KEPT
    ]
    for place in places:
        if place[-1] == TIED and config["architectures"][0] in WRAPPERS:
            continue
        shorter = json.loads(json.dumps(config))
        inside = shorter
        for key in place[:-1]:
            inside = inside[key]
        del inside[place[-1]]
        yield f"less {'.'.join(place)}", shorter


def otherwise(config: Config) -> Iterator[tuple[str, Config]]:
    """Yield the file with other names of its keys, and with those of transformers 4."""
    (name,) = config["architectures"]
    cls = CONFIG_MAPPING[config["model_type"]]
    for alias, key in cls.attribute_map.items():
        if key in config and alias not in config:
            changed = {
                alias if config_key == key else config_key: value
                for config_key, value in config.items()
            }
            yield f"{alias} for {key}", changed
    rope = config.get("rope_parameters")
    if rope and not any(isinstance(value, dict) for value in rope.values()):
        flat = {key: value for key, value in config.items() if key != "rope_parameters"}
        scaling = dict(rope)
        for key, name in _NAMES_BEFORE.get(config["model_type"], _NAMES).items():
            if key in scaling:
                flat[name] = scaling.pop(key)
        if scaling.get("rope_type", "default") != "default":
            scaling["type"] = scaling.pop("rope_type")
            flat["rope_scaling"] = scaling
        yield "rope_scaling of transformers 4", flat


_NAMES = {key: key for key in ("rope_theta", "partial_rotary_factor")}
_NAMES_BEFORE = {"gpt_neox": dict(zip(_NAMES, ("rotary_emb_base", "rotary_pct"), strict=True))}


def config_of(name: str, folder: Path) -> Config:
    """Return the configuration of a tiny checkpoint, or a published one."""
    if name in PUBLISHED:
        return dict(PUBLISHED[name])
    save(ALL[name], folder)
    config: Config = json.loads((folder / "config.json").read_text())
    if config["architectures"][0] in WRAPPERS:
        config[TIED] = config["text_config"][TIED]
    return config


_QUICK = ("gpt-neox", "gemma 3 4b", "cohere 2", "nemotron h, by letters", "qwen 3 moe", "lfm 2")
_MARKED = [
    pytest.param(name, marks=() if name in (*_QUICK, *PUBLISHED) else pytest.mark.nightly)
    for name in (*PUBLISHED, *ALL)
]


@pinned
def test_table_is_of_transformers() -> None:
    """A pin is raised, or an architecture added, and the table is as before."""
    assert FILE.read_text() == generated(), "run python -m tests.parity.class_defaults"


@pinned
@pytest.mark.parametrize("name", _MARKED)
def test_missing_keys_as_transformers(name: str, tmp_path: Path) -> None:
    """Bug: LLaVA's text_config is refused, as it leaves hidden_size to its class; other files get
    other values than their class has, and the model answers fluently and wrongly."""
    config = config_of(name, tmp_path)
    cls = class_of_file(config)
    record = ARCHITECTURES.get(config["architectures"][0])
    if cls is None or (record and record.model_type and record.model_type not in CONFIG_MAPPING):
        pytest.skip("its class is in its repository alone")
    whole = expanded(tmp_path, config)
    assert whole is not None and read(tmp_path, config) == read(tmp_path, whole) is not None
    variants = [*shortened(config)]
    if config["architectures"][0] not in WRAPPERS:
        variants += otherwise(config)
    compared = 0
    for what, variant in variants:
        whole = expanded(tmp_path, variant)
        if whole is not None:
            assert read(tmp_path, variant) == read(tmp_path, whole), what
            compared += 1
    assert compared > 5


_OTHER_LOCAL = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 2.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
}
# Names of transformers' older classes, which its newer ones take beside their own.
OLDER: list[tuple[str, Config]] = [
    ("nemotron h", {"n_groups": ("mamba_n_groups", 1)}),
    ("nemotron h", {"conv_kernel": ("mamba_d_conv", 3)}),
    ("nemotron h", {"use_conv_bias": ("mamba_conv_bias", False)}),
    ("lfm 2", {"intermediate_size": ("block_ff_dim", 192)}),
    ("lfm 2", {TIED: ("tie_embedding", False)}),
    ("qwen 3.5", {"layer_types": ("full_attention_interval", 2)}),
    ("bloom", {"hidden_size": ("n_embed", 120)}),
    ("cohere 2", {"layer_types": ("sliding_window_pattern", 3)}),
    ("exaone 4", {"layer_types": ("sliding_window_pattern", 3)}),
    ("gemma 3", {"layer_types": ("sliding_window_pattern", 3)}),
    ("gemma 3", {"rope_parameters": ("rope_local_base_freq", 5e4)}),
    ("olmo 3", {"rope_parameters": ("rope_parameters", _OTHER_LOCAL)}),
    ("gte modernbert base", {"rope_parameters": ("local_rope_theta", 5e4)}),
]


@pinned
@pytest.mark.parametrize(("name", "changes"), OLDER, ids=str)
def test_older_names_before_defaults(name: str, changes: Config, tmp_path: Path) -> None:
    """Bug: Cohere 2's sliding_window_pattern is ignored. A class has a default by one name of a
    key, which must not count before what the file says by another."""
    config = config_of(name, tmp_path)
    plain = read(tmp_path, config)
    for key, (older, value) in changes.items():
        config.pop(key, None)
        config[older] = value
    whole = expanded(tmp_path, config)
    assert whole is not None
    model = read(tmp_path, config)
    assert model == read(tmp_path, whole) is not None
    assert model != plain


def test_published_llava(tmp_path: Path) -> None:
    """Bug: "text_config: hidden_size: is missing"."""
    model = read(tmp_path, PUBLISHED["llava 1.5 7b"])
    assert model is not None
    assert (model.hidden_size, model.num_layers, model.num_kv_heads) == (4096, 32, 32)
    assert (model.intermediate_size, model.vocab_size, model.norm_eps) == (11008, 32064, 1e-5)


@pytest.mark.parametrize(
    ("name", "outer", "inner", "tied"),
    [
        ("Llava", None, None, False),
        ("Llava", False, True, True),  # as transformers 4 wrote it
        ("Gemma3", None, None, True),
        ("Mistral3", None, None, False),  # its class says that they are, its checkpoints are not
        ("Mistral3", True, False, True),
        ("Qwen3VL", False, True, False),
        ("Qwen3VLMoe", None, None, False),
        ("Qwen3_5", None, True, True),
    ],
)
def test_ties_of_wrappers(
    name: str, outer: bool | None, inner: bool | None, tied: bool, tmp_path: Path
) -> None:
    """A model of text and pictures whose head is its embedding, or is not, by mistake."""
    config: Config = {"architectures": [f"{name}ForConditionalGeneration"], "text_config": {}}
    if outer is not None:
        config[TIED] = outer
    if inner is not None:
        config["text_config"][TIED] = inner
    model = read(tmp_path, config)
    assert model is not None and model.tie_embeddings is tied


def test_other_model_types(tmp_path: Path) -> None:
    """A type that transformers has not leaves the architecture's class, whose head_dim counts. A
    class in a repository has no values here, whatever the file calls itself."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = read(tmp_path, {"architectures": ["Qwen3ForCausalLM"], "model_type": "mine", **sizes})
    assert model is not None and model.head_dim == 128
    named = {"architectures": ["OrionForCausalLM"], "model_type": "stablelm"}
    assert read(tmp_path, {**named, **sizes}) is None
    sizes |= {"num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 96}
    model = read(tmp_path, {**named, **sizes, "max_position_embeddings": 64})
    assert model is not None and not model.rope.dim


def test_missing_text_config(tmp_path: Path) -> None:
    """Mistral 3 has values of its own for a text_config that is not there."""
    model = read(tmp_path, {"architectures": ["Mistral3ForConditionalGeneration"]})
    assert model is not None
    assert (model.hidden_size, model.num_layers, model.rope.theta) == (5120, 40, 1e9)


@pytest.mark.parametrize(
    ("pattern", "windows"),
    [("LLG", [True, True, False, True]), (2, [True, False, True, False])],
)
def test_patterns_of_windows(pattern: Any, windows: list[bool], tmp_path: Path) -> None:
    """EXAONE 4 writes a letter for each layer of a period, or how long it is."""
    config = {
        "architectures": ["Exaone4ForCausalLM"],
        "model_type": "exaone4",
        "num_hidden_layers": 4,
        "sliding_window_pattern": pattern,
    }
    model = read(tmp_path, config)
    assert model is not None
    assert [layer.window > 0 for layer in model.attention] == windows
    with pytest.raises(ConfigError, match="sliding_window_pattern: must be a number, or a text"):
        (tmp_path / "config.json").write_text(json.dumps({**config, "sliding_window_pattern": "X"}))
        ModelConfig.from_folder(tmp_path)
