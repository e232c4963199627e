"""GGUF files of each family that we read, against the checkpoints that they are of: the same
logits."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType

from deployments.checkpoints.gguf import convert
from engine.architectures import GGUFS
from engine.models.decoder import Decoder
from engine.quantization.stored.base import StoredState
from tests.engine.models.checkpoints import Paged, load_model
from tests.parity.cases import ALIBI, CASES, EXPERTS, WINDOWS, relative, save
from tests.parity.gguf_files import Written, write

IDS = torch.randint(3, 96, (40,), generator=torch.Generator().manual_seed(7))
CASES = {**CASES, **WINDOWS, **ALIBI, **EXPERTS}
_FULL = {"sliding_window": None}
_EVERY_SIXTH = {"num_hidden_layers": 7, "layer_types": None, "query_pre_attn_scalar": 24}
_EPS = {"rms_norm_eps": 1e-5}

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
    "minimax m2": Written("minimax-m2"),
    "olmo 1": Written("olmo"),
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
    pytest.param(name, marks=() if name in _QUICK else pytest.mark.slow) for name in FAMILIES
]


def saved(name: str, folder: Path) -> Written:
    """The case's checkpoint in the folder, as the format can hold it."""
    written = FAMILIES[name]
    case = CASES[name.removesuffix(", experts apart")]
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


def test_every_entry_has_a_case() -> None:
    """Qwen's models that see have Qwen's text models' tensors."""
    tested = {each.arch for each in FAMILIES.values()} | {"qwen2vl", "qwen3vl"}
    assert tested == {each.name for each in GGUFS}


@torch.inference_mode()
@pytest.mark.parametrize("name", ["qwen 3 moe", "gpt-oss"])
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
    found = []
    for blocks in (False, True):
        made = tmp_path / str(blocks)
        made.mkdir()
        convert(tmp_path / "m.gguf", made, blocks=blocks)
        model = load_model(made)
        assert isinstance(model, Decoder)
        assert hash(model.config)  # a key of the plan's cache
        stack = model._stacks()[1]
        found.append(stack.method.apply_experts(stack.state, x.clone(), weights, ids, None))
        assert model.config.quantized is None or type(stack.state.down[0]) is StoredState
    # Activations are rounded to 8 bits before they meet blocks, expanded weights to 16.
    assert relative(found[1], found[0]) < 0.03
