"""What config.json says wrongly, of each architecture: an error that names the file and the key."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.config.model_config import ModelConfig
from engine.errors import ConfigError
from tests.parity.cases import save
from tests.parity.test_architectures import ALL

WRONG: list[Any] = ["x", -1, 0, 1.5, True, [], {}, ["x"], None]


def places(config: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the paths of all keys, and of the keys of inner objects."""
    inner = [
        (key, subkey)
        for key, value in config.items()
        if isinstance(value, dict)
        for subkey in value
    ]
    return [(key,) for key in config] + inner


# One of each kind of mixer, and of a configuration in another.
_SLOW = (
    "llama",
    "gemma 3 4b",
    "gpt-oss",
    "deepseek v3",
    "qwen 3 next",
    "falcon h1",
    "mpt",
    "lfm 2",
)
_MARKED = [
    pytest.param(name, marks=pytest.mark.slow if name in _SLOW else pytest.mark.nightly)
    for name in ALL
]


@pytest.mark.parametrize("name", _MARKED)
def test_every_key_with_other_values(name: str, tmp_path: Path) -> None:
    """A list where a number is expected ends the engine with a TypeError that names neither."""
    save(ALL[name], tmp_path)
    file = tmp_path / "config.json"
    text = file.read_text()
    for path in places(json.loads(text)):
        for wrong in WRONG:
            config = json.loads(text)
            inside = config
            for key in path[:-1]:
                inside = inside[key]
            inside[path[-1]] = wrong
            file.write_text(json.dumps(config))
            try:
                ModelConfig.from_folder(tmp_path)
            except ConfigError as error:
                assert str(file) in error.message, (path, wrong)
            except Exception as error:
                raise AssertionError(f"{path} = {wrong!r}") from error


# Case -> changes of config.json, and what the error says of them.
CONTRADICTIONS: dict[str, list[tuple[dict[str, Any], str]]] = {
    "mpt": [({"attn_config": {"alibi": False}}, "alibi: must be true")],
    "mimo v2, hub": [
        ({"hybrid_layer_pattern": [0, 1]}, "hybrid_layer_pattern: has 2 layers, the model 3"),
        ({"v_head_dim": 32}, "v_head_dim: 32 is more than a key's 24 elements"),
        ({"swa_head_dim": 32}, "swa_head_dim: 32 is not supported"),
        ({"swa_num_key_value_heads": 3}, "swa_num_key_value_heads: 3 does not divide 4 heads"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok: 7 of 6 experts"),
    ],
    "longcat flash": [
        ({"zero_expert_type": "drop"}, "zero_expert_type: 'drop' is not supported"),
        ({"q_lora_rank": None}, "q_lora_rank: is missing"),
        ({"router_bias": True}, "router_bias: True is not supported"),
    ],
    "kimi linear, hub": [
        (
            {"linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1, 3]}},
            "kda_layers must name each of 4",
        ),
        ({"mla_use_nope": False}, "mla_use_nope: False is not supported"),
    ],
    "laguna": [
        ({"gating": False}, "gating: False is not supported"),
        ({"num_attention_heads_per_layer": [4, 3, 4]}, "3 is no multiple of 2 key heads"),
        ({"moe_router_logit_softcapping": 30.0}, "moe_router_logit_softcapping: 30.0"),
    ],
    "nemotron super": [
        ({"block_configs": []}, "block_configs: must be a list of 3 objects"),
        (
            {
                "block_configs": [
                    {"attention": {"replace_with_linear": True}, "ffn": {"no_op": True}}
                ]
                * 3
            },
            "block_configs: 0: attention: replace_with_linear: True is not supported",
        ),
    ],
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradictions(name: str, tmp_path: Path) -> None:
    """A model that loads and answers wrongly, or an error far behind the key at fault."""
    save(ALL[name], tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    for changes, message in CONTRADICTIONS[name]:
        file.write_text(json.dumps(config | changes))
        with pytest.raises(ConfigError) as caught:
            ModelConfig.from_folder(tmp_path)
        assert str(file) in caught.value.message and message in caught.value.message


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("Glm5vMoeForConditionalGeneration", "Glm4vMoeForConditionalGeneration"),
        ("Qwen3MoEForCausalLM", "Qwen3MoeForCausalLM"),
        ("MllamaForConditionalGeneration", "LlamaForCausalLM"),
    ],
)
def test_the_nearest_is_of_the_family(name: str, nearest: str, tmp_path: Path) -> None:
    """Bug: GLM-4.5V is told that Llama 4 is near, as both names end alike."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
    with pytest.raises(ConfigError, match=f"the nearest that is: {nearest}"):
        ModelConfig.from_folder(tmp_path)
