"""GGUF files of each family that we read, against the checkpoints that they are of: the same
logits."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from deployments.checkpoints.gguf import convert, write_outline
from deployments.checkpoints.gguf_config import config_of
from deployments.checkpoints.gguf_file import GGUFFile
from engine.architectures import GGUFS
from engine.config.model_config import ModelConfig
from engine.errors import ConfigError
from engine.models.decoder import Decoder
from engine.quantization.stored.base import StoredState
from tests.engine.models.checkpoints import Paged, load_model
from tests.parity.cases import ALIBI, CASES, EXPERTS, LATENT, WINDOWS, relative, save
from tests.parity.gguf_files import Written, write
from tests.parity.gguf_tower_files import PAIRS

IDS = torch.randint(3, 96, (40,), generator=torch.Generator().manual_seed(7))
CASES = {**CASES, **WINDOWS, **ALIBI, **EXPERTS, **LATENT}
_FULL = {"sliding_window": None}
_EVERY_SIXTH = {"num_hidden_layers": 7, "layer_types": None, "query_pre_attn_scalar": 24}
_EPS = {"rms_norm_eps": 1e-5}
# Files have one mscale for both of config.json.
_MLA_YARN = {**LATENT["deepseek v3"].changes["rope_parameters"], "mscale": 0.7}
_MLA_YARN["mscale_all_dim"] = 0.7

FAMILIES: dict[str, Written] = {
    "llama": Written("llama"),
    "llama, biases, tied": Written("llama"),
    "mixtral": Written("llama", _FULL),
    "mixtral, experts apart": Written("llama", _FULL, experts_apart=True),
    "ministral 3": Written("mistral3"),
    "qwen 2": Written("qwen2"),
    "qwen 3": Written("qwen3"),
    "qwen 1": Written("qwen", more={"feed_forward_length": 192}),
    "qwen 2 moe": Written("qwen2moe", {"mlp_only_layers": []}),
    "qwen 3 moe": Written("qwen3moe"),
    "seed-oss": Written("seed_oss"),
    "ernie 4.5": Written("ernie4_5"),
    "ernie 4.5 moe": Written("ernie4_5-moe"),
    "hunyuan": Written("hunyuan-dense"),
    "hunyuan moe": Written("hunyuan-moe", more={"expert_shared_count": 1}),
    "granite": Written("granite"),
    "granite moe": Written("granitemoe"),
    "granite moe, shared": Written("granitemoe"),
    "smollm 3": Written("smollm3", {"no_rope_layer_interval": 4, "num_hidden_layers": 5}),
    "arcee": Written("arcee"),
    "nemotron": Written("nemotron"),
    "jais 2": Written("jais2"),
    "gemma 1": Written("gemma"),
    "gemma 2": Written("gemma2", {"query_pre_attn_scalar": 24}),
    "gemma 3": Written("gemma3", _EVERY_SIXTH, drop=("attention.sliding_window_pattern",)),
    "phi 2": Written("phi2"),
    "phi 3": Written("phi3"),
    "phi 3, windows": Written("phi3"),
    "phi 4 mini": Written("phi3"),
    "phi 3.5 moe": Written("phimoe", {"router_jitter_noise": 0.01}),
    "stablelm": Written("stablelm"),
    "stablelm 2 12b": Written("stablelm"),
    "starcoder 2": Written("starcoder2"),
    "glm 4 hf": Written("chatglm", _EPS),
    "chatglm": Written("chatglm", _EPS),
    "glm 4 0414": Written("glm4"),
    "glm 4.5": Written("glm4moe"),
    "glm 4.6": Written("glm4moe"),
    "dots": Written("dots1"),
    "deepseek v2 lite": Written("deepseek2", {"rope_parameters": _MLA_YARN}),
    "deepseek v2": Written("deepseek2"),
    "deepseek v3": Written("deepseek2", {"rope_parameters": _MLA_YARN}),
    "deepseek v3, fused": Written(
        "deepseek2",
        {"rope_parameters": _MLA_YARN},
        drop=("attention.key_length_mla", "attention.value_length_mla"),
        more={"attention.key_length": 20, "attention.value_length": 10},
        fused=True,
    ),
    "glm 4.7 flash": Written("deepseek2", drop=("expert_group_count", "expert_group_used_count")),
    "minimax m2": Written("minimax-m2"),
    "olmo 1": Written("olmo", more={"attention.layer_norm_epsilon": 1e-5}),
    "olmo 2": Written("olmo2"),
    "olmo 3": Written("olmo2"),
    "olmoe": Written("olmoe"),
    "exaone 4": Written("exaone4"),
    "cohere": Written("command-r"),
    "cohere r+": Written("command-r"),
    "cohere 2": Written("cohere2"),
    "gpt-oss": Written("gpt-oss"),
    "internlm 2": Written("internlm2"),
    "minicpm": Written("minicpm"),
    "xverse": Written("xverse"),
    "baichuan 7b": Written("baichuan"),
    "baichuan 13b": Written("baichuan"),
    "exaone 3": Written("exaone"),
    "gpt-2": Written("gpt2"),
    "starcoder": Written("starcoder", more={"attention.head_count_kv": 1}),
    "gpt-neox": Written("gptneox"),
    "gpt-neox, in turns": Written("gptneox"),
    "falcon 7b": Written("falcon", more={"attention.head_count_kv": 1}),
    "falcon 11b": Written("falcon"),
    "falcon 40b": Written("falcon"),
    "bloom": Written("bloom"),
    "mpt": Written(
        "mpt",
        {"attn_config": {"clip_qkv": 0.7, "alibi_bias_max": 4}},
        more={"attention.max_alibi_bias": 4.0, "attention.clamp_kqv": 0.7},
    ),
}
# One of each kind of change between the formats; the others differ in names.
_QUICK = ("llama", "gemma 2", "phi 4 mini", "qwen 3 moe", "gpt-oss", "falcon 40b", "gpt-2")
_MARKED = [
    pytest.param(name, marks=() if name in _QUICK else pytest.mark.nightly) for name in FAMILIES
]


def saved(name: str, folder: Path) -> Written:
    """Save the case's checkpoint as the format can hold it; return the differences."""
    written = FAMILIES[name]
    case = CASES[name.removesuffix(", experts apart").removesuffix(", fused")]
    folder.mkdir()
    save(replace(case, changes={**case.changes, **written.changes}), folder)
    return written


@torch.inference_mode()
def logits(folder: Path) -> torch.Tensor:
    return Paged(load_model(folder)).run((IDS, list(range(10)), 0))[0]


@pytest.mark.parametrize("name", _MARKED)
def test_logits_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    """Rows that were turned twice or not at all, norms that are one too large, a key that has
    another name in one family: each is a model that answers fluently and wrongly."""
    written = saved(name, tmp_path / "checkpoint")
    write(tmp_path / "checkpoint", tmp_path / "m.gguf", written)
    (tmp_path / "made").mkdir()
    convert(tmp_path / "m.gguf", tmp_path / "made")
    assert relative(logits(tmp_path / "made"), logits(tmp_path / "checkpoint")) < 1e-6


# What the file says beside its name and base -> what the folder's config.json says.
_LINEAR = {"rope_type": "linear", "factor": 4.0}
_PLAIN = {"rope_type": "default"}
_YARN = {"rope_type": "yarn", "factor": 4.0}
SCALINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, _PLAIN),
    "a factor alone": ({"rope.scaling.factor": 4.0}, _LINEAR),
    "the first name": ({"rope.scale_linear": 4.0}, _LINEAR),
    "both names": ({"rope.scaling.factor": 4.0, "rope.scale_linear": 2.0}, _LINEAR),
    "no stretch": ({"rope.scaling.factor": 0.0, "rope.scaling.type": "linear"}, _PLAIN),
    "linear without a factor": ({"rope.scaling.type": "linear"}, _PLAIN),
    "linear": ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, _LINEAR),
    "none": ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, _PLAIN),
    "yarn": ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, _YARN),
    "yarn without a factor": ({"rope.scaling.type": "yarn"}, _PLAIN),
    "yarn of the first name": ({"rope.scaling.type": "yarn", "rope.scale_linear": 4.0}, _YARN),
    "yarn that keeps no frequency": (
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.yarn_ext_factor": 0.0,
        },
        _LINEAR,
    ),
    "yarn with a multiplier": (
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.yarn_log_multiplier": 0.5,
            "rope.scaling.original_context_length": 64,
        },
        {
            **_YARN,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
            "original_max_position_embeddings": 64,
        },
    ),
    "yarn with a factor of attention": (
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.attn_factor": 0.5,
        },
        {**_YARN, "attention_factor": pytest.approx(0.5 * (1 + 0.1 * math.log(4)))},
    ),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama") / "checkpoint"
    saved("llama", folder)
    return folder


@pytest.mark.parametrize("name", SCALINGS)
def test_scalings_of_positions_as_llama_cpp_reads_them(
    name: str, llama: Path, tmp_path: Path
) -> None:
    """Keys that a file leaves out have llama.cpp's defaults: a factor without a type is linear."""
    keys, expected = SCALINGS[name]
    write(llama, tmp_path / "m.gguf", Written("llama", drop=("rope.freq_base",), more=keys))
    write_outline(tmp_path / "m.gguf", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rope_parameters"] == {"rope_theta": 10000.0, **expected}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rope.scaling.type": "cubic"}, "'cubic' is not supported"),
        ({"rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 2.0}, "attn_factor 2.0"),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.yarn_ext_factor": 0.5,
            },
            "yarn_ext_factor 0.5",
        ),
    ],
)
def test_scalings_that_are_refused(
    keys: dict[str, Any], message: str, llama: Path, tmp_path: Path
) -> None:
    """What llama.cpp computes and we do not: served, it would be another model."""
    write(llama, tmp_path / "m.gguf", Written("llama", more=keys))
    with pytest.raises(ConfigError, match=message):
        write_outline(tmp_path / "m.gguf", tmp_path)


def test_an_epsilon_that_is_missing_is_named(llama: Path, tmp_path: Path) -> None:
    """llama.cpp needs it too; a default would be another model's."""
    drop = ("attention.layer_norm_rms_epsilon",)
    write(llama, tmp_path / "m.gguf", Written("llama", drop=drop))
    with pytest.raises(ConfigError, match=r"no llama\.attention\.layer_norm_epsilon"):
        write_outline(tmp_path / "m.gguf", tmp_path)


@pytest.mark.parametrize(
    ("period", "windows"), [(0, [True] * 4), (1, [False] * 4), (2, [True, False] * 2)]
)
def test_periods_of_windows(period: int, windows: list[bool], tmp_path: Path) -> None:
    """A number says which layers have no window: every such one, and none for 0."""
    folder = tmp_path / "checkpoint"
    case = CASES["cohere 2"]
    folder.mkdir()
    save(
        replace(case, changes={**case.changes, "num_hidden_layers": 4, "layer_types": None}), folder
    )
    keys = {"attention.sliding_window_pattern": period}
    write(folder, tmp_path / "m.gguf", Written("cohere2", more=keys))
    write_outline(tmp_path / "m.gguf", tmp_path)
    model = ModelConfig.from_folder(tmp_path)
    assert [bool(layer.window) for layer in model.attention] == windows


def test_no_window(tmp_path: Path) -> None:
    """Bug: EXAONE 4 1.2B has none, and its file's class one of 4,096 tokens."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save(CASES["exaone 4"], folder)
    keys = ("attention.sliding_window", "attention.sliding_window_pattern")
    write(folder, tmp_path / "m.gguf", Written("exaone4", drop=keys))
    write_outline(tmp_path / "m.gguf", tmp_path)
    model = ModelConfig.from_folder(tmp_path)
    assert not any(layer.window for layer in model.attention)
    assert all(layer.rope for layer in model.attention)


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("latent")
    written = saved("deepseek v3", folder / "checkpoint")
    write(folder / "checkpoint", folder / "m.gguf", written)
    return folder


@pytest.mark.parametrize(
    ("lacking", "message"),
    [
        ("blk.1.attn_v_b.weight", r"tensor 'blk\.1\.attn_v_b\.weight' is missing"),
        ("blk.1.attn_kv_a_mqa.weight", r"unknown tensor 'blk\.1\.attn_kv_a_mqa\.weigh_'"),
        ("deepseek2.attention.value_length", r"has no deepseek2\.attention\.value_length"),
        ("deepseek2.rope.dimension_count", r"has no deepseek2\.rope\.dimension_count"),
    ],
)
def test_latents_that_lack_something(
    lacking: str, message: str, latent: Path, tmp_path: Path
) -> None:
    """Half of a matrix would stay random, and a size would be that of another model."""
    whole = (latent / "m.gguf").read_bytes()
    other = f"{lacking[:-1]}_"
    (tmp_path / "m.gguf").write_bytes(whole.replace(lacking.encode(), other.encode()))
    with pytest.raises(ConfigError, match=rf"m\.gguf: {message}"):
        write_outline(tmp_path / "m.gguf", tmp_path)


@pytest.mark.parametrize(("experts", "groups"), [(6, (1, 1)), (160, (8, 3)), (256, (8, 4))])
def test_groups_of_older_files(
    experts: int, groups: tuple[int, int], latent: Path, tmp_path: Path
) -> None:
    """Bug: Kimi's experts are routed by the groups of DeepSeek V3, whose class is theirs."""
    drop = ("expert_group_count", "expert_group_used_count")
    more = {"expert_count": experts}
    write(latent / "checkpoint", tmp_path / "m.gguf", Written("deepseek2", drop=drop, more=more))
    config = config_of(GGUFFile(tmp_path / "m.gguf"), "float32", {}, {})
    assert (config["n_group"], config["topk_group"]) == groups


def test_queries_that_are_scaled_by_position(latent: Path, tmp_path: Path) -> None:
    """Mistral Large 3 is of DeepSeek V3's architecture in these files, and computes more."""
    more = {"attention.temperature_scale": 0.1}
    write(latent / "checkpoint", tmp_path / "m.gguf", Written("deepseek2", more=more))
    with pytest.raises(ConfigError, match=r"attention\.temperature_scale is not supported"):
        write_outline(tmp_path / "m.gguf", tmp_path)


def test_every_entry_has_a_case() -> None:
    """Bug: an entry that no test reads. Entries of text models that only stand beside towers have
    their cases in `gguf_tower_files`."""
    entries = (*FAMILIES.values(), *(written for _, written in PAIRS.values()))
    assert {entry.arch for entry in entries} == {entry.name for entry in GGUFS}


@torch.inference_mode()
@pytest.mark.parametrize("name", ["qwen 3 moe", "gpt-oss", "deepseek v3"])
def test_experts_in_blocks(name: str, tmp_path: Path) -> None:
    """An expert with another's blocks, or an expert's scales for its neighbour, is noise that reads
    like text."""
    case = CASES[name]
    sizes = {"hidden_size": 128, "moe_intermediate_size": 64, "intermediate_size": 64}
    (tmp_path / "checkpoint").mkdir()
    save(replace(case, changes={**case.changes, **sizes}), tmp_path / "checkpoint")
    q8 = GGMLQuantizationType.Q8_0
    write(tmp_path / "checkpoint", tmp_path / "m.gguf", FAMILIES[name], q8)
    x = torch.randn(20, 128)
    weights, ids = torch.rand(20, 2), torch.randint(6, (20, 2))
    outputs = []
    for blocks in (False, True):
        target = tmp_path / str(blocks)
        target.mkdir()
        convert(tmp_path / "m.gguf", target, blocks=blocks)
        model = load_model(target)
        assert isinstance(model, Decoder)
        assert hash(model.config)  # a key of the plan's cache
        stack = model._stacks()[1]
        outputs.append(stack.method.apply_experts(stack.state, x.clone(), weights, ids, None))
        assert model.config.quantized is None or type(stack.state.down[0]) is StoredState
    # Activations are rounded to 8 bits before they meet blocks, expanded weights to 16.
    assert relative(outputs[1], outputs[0]) < 0.03
