"""Each architecture against transformers: tiny random checkpoints in float32, paged cache."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.architectures import ARCHITECTURES
from engine.config.model_config import ModelConfig
from engine.errors import ConfigError
from engine.models.registry import MODELS, build_model
from engine.parallel.group import TensorParallelGroup
from engine.weights import load_weights
from kernels.dispatch import kernels_for
from tests.engine.models.checkpoints import SIZES, Paged, load_model, save_checkpoint

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0}
MODELS_UNDER_TEST: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, one key head": ("llama", {"num_key_value_heads": 1, "hidden_act": "gelu_pytorch_tanh"}),
    "llama, all key heads": ("llama", {"num_key_value_heads": 4, "head_dim": 8}),
    "llama, nine heads": (
        "llama",
        {
            "hidden_size": 36,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 8,
        },
    ),
    "llama, llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama, yarn rope": ("llama", {"rope_parameters": YARN}),
    "llama, linear rope": ("llama", {"rope_parameters": LINEAR}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"head_dim": 8}),
    "qwen2, tied": ("qwen2", {"head_dim": 8, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3, tied": ("qwen3", {"tie_word_embeddings": True}),
}


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", list(MODELS_UNDER_TEST))
@torch.inference_mode()
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    """Whole prefill, chunks of 7, decode, and a prefix read through another request's blocks."""
    model_type, changes = MODELS_UNDER_TEST[name]
    theirs = save_checkpoint(tmp_path, model_type, **changes)
    model = load_model(tmp_path)
    assert model.num_parameters == sum(p.numel() for p in theirs.parameters())
    assert model.config.head_dim == theirs.model.layers[0].self_attn.head_dim
    ids = torch.randint(3, 101, (40,))
    want = theirs(ids[None]).logits[0]
    assert want.std() > 0.5, "logits too flat to tell right from wrong"
    paged = Paged(model)

    close(paged.run((ids, [3, 1, 9, 4, 8, 2, 0, 5, 7, 6], 0))[0], want)  # whole

    chunked = [12, 18, 11, 13, 19, 14, 10, 16, 15, 17]
    for end in range(7, 36, 7):
        close(paged.run((ids[:end], chunked, end - 7))[0], want[end - 7 : end])
    for end in range(36, 41):
        close(paged.run((ids[:end], chunked, end - 1))[0], want[end - 1 : end])

    # A second request reuses the first 8 tokens' blocks, beside a decode of the first.
    other = torch.cat((ids[:8], torch.randint(3, 101, (9,))))
    decode, chunk = paged.run((ids, chunked, 39), (other, [12, 18, 20, 21, 22], 8))
    close(decode, want[39:])
    close(chunk, theirs(other[None]).logits[0, 8:])


@torch.inference_mode()
def test_16_bit_weights_stay_close(tmp_path: Path) -> None:
    """Storage in bfloat16 costs its rounding and no more: activations are float32 on the CPU."""
    theirs = save_checkpoint(tmp_path, "qwen3", tie_word_embeddings=True)
    ids = torch.randint(3, 101, (40,))
    want = theirs(ids[None]).logits[0]
    ours = Paged(load_model(tmp_path, torch.bfloat16)).run((ids, list(range(10)), 0))[0]
    their_error = (theirs.bfloat16()(ids[None]).logits[0].float() - want).norm()
    assert (ours - want).norm() < their_error


@torch.inference_mode()
def test_shards_add_up(tmp_path: Path) -> None:
    """Two ranks' shards hold each weight once (key heads twice when there are fewer than ranks)."""
    save_checkpoint(tmp_path, "qwen3", num_key_value_heads=1, vocab_size=102)
    config = ModelConfig.from_folder(tmp_path)

    def parameters(rank: int, size: int) -> dict[str, Tensor]:
        group = TensorParallelGroup(rank, size)
        model = build_model(config, torch.float32, "cpu", kernels_for("cpu"), group=group)
        filled = {parameter.name: parameter.tensor for parameter in model.parameters()}
        load_weights(model, tmp_path)
        return filled

    whole, first, second = parameters(0, 1), parameters(0, 2), parameters(1, 2)
    dim, heads, inter = config.head_dim, config.num_heads, config.intermediate_size
    for name, full in whole.items():
        part, other = first[name], second[name]
        if ".qkv." in name:
            q, kv = full.split((heads * dim, 2 * dim))
            assert torch.equal(part, torch.cat((q[: heads // 2 * dim], kv)))
            assert torch.equal(other, torch.cat((q[heads // 2 * dim :], kv)))
        elif ".gate_up." in name:
            gate, up = full.split(inter)
            assert torch.equal(part, torch.cat((gate[: inter // 2], up[: inter // 2])))
            assert torch.equal(other, torch.cat((gate[inter // 2 :], up[inter // 2 :])))
        elif ".out." in name or ".down." in name:
            assert torch.equal(torch.cat((part, other), 1), full)
        elif name == "head.weight":
            assert torch.equal(part, full[:51]) and torch.equal(other, full[51:])
        else:
            assert torch.equal(part, full) and torch.equal(other, full)


def test_indivisible_shards_are_refused() -> None:
    """Three ranks and four heads must fail by name, not lose a head."""
    with pytest.raises(ConfigError, match="num_attention_heads: 4 cannot be divided"):
        TensorParallelGroup(0, 3).part(4, "num_attention_heads")
    with pytest.raises(ConfigError, match="num_key_value_heads: 3 cannot be divided"):
        TensorParallelGroup(3, 4).heads(12, 3)
    assert TensorParallelGroup(3, 4).heads(8, 2) == ((6, 8), (1, 2))  # two ranks have each
    heads = [TensorParallelGroup(rank, 2).heads(9, 3) for rank in range(2)]
    assert heads == [((0, 3), (0, 1)), ((3, 9), (1, 3))]  # key heads with all their readers


def test_every_architecture_has_a_model() -> None:
    """An architecture that the configuration accepts and the registry does not know fails late, and
    so does a switch that is none."""
    fields = ModelConfig.__dataclass_fields__.keys()
    for name, architecture in ARCHITECTURES.items():
        assert name == architecture.name
        assert architecture.network in MODELS
        assert set(architecture.switches) <= fields


def written(tmp_path: Path, drop: tuple[str, ...] = (), **changes: Any) -> Path:
    """Write a config.json as transformers 4 did, with rope_theta and torch_dtype at the top."""
    config = {
        **SIZES,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "rope_theta": 5e5,
        "rms_norm_eps": 1e-5,
        **changes,
    }
    for key in drop:
        del config[key]
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_reads_older_spellings(tmp_path: Path) -> None:
    """rope_scaling with "type", eos ids in both files, defaults of absent keys."""
    folder = written(
        tmp_path,
        drop=("num_key_value_heads", "head_dim"),
        rope_scaling={**LLAMA3, "type": "llama3"} | {"rope_type": None},
        eos_token_id=[2, 7],
    )
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    config = ModelConfig.from_folder(folder)
    assert config.dtype == "bfloat16"
    assert config.rope.type == "llama3" and config.rope.factor == 4.0
    assert config.eos_token_ids == (2, 7, 9)
    assert (config.num_kv_heads, config.head_dim) == (4, 8)
    assert config.kv_bytes_per_token(2) == 2 * 2 * 4 * 8 * 2
    assert not config.tie_embeddings and not config.qkv_bias
    assert ModelConfig.from_folder(written(tmp_path)).rope.theta == 5e5


@pytest.mark.parametrize("named", [None, "dtype", "torch_dtype"])
def test_the_dtype_of_weights_where_none_is_named(tmp_path: Path, named: str | None) -> None:
    """Qwen 1's config.json names no dtype: bfloat16 weights took twice their memory, in float32."""
    save_checkpoint(tmp_path, "llama")
    weights = load_file(tmp_path / "model.safetensors")
    few = {name: tensor for name, tensor in weights.items() if "norm" in name}
    halves = {name: tensor.bfloat16() for name, tensor in weights.items()}
    save_file({**halves, **few}, tmp_path / "model.safetensors")
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    for key in ("dtype", "torch_dtype"):
        config.pop(key, None)
    if named:
        config[named] = "float16"
    file.write_text(json.dumps(config))
    assert ModelConfig.from_folder(tmp_path).dtype == ("float16" if named else "bfloat16")
    (tmp_path / "model.safetensors").unlink()
    assert ModelConfig.from_folder(tmp_path).dtype == ("float16" if named else "float32")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["Llama9ForCausalLM"]}, "architectures.*'Llama9For.*: LlamaForCausalLM"),
        (
            {"architectures": ["LlavaForConditionalGeneration"], "text_config": "x"},
            "text_config: must be an object",
        ),
        (
            {
                "architectures": ["LlavaForConditionalGeneration"],
                "text_config": {"model_type": "bert"},
            },
            "text_config: model_type: 'bert' .*LlavaFor.*llama",
        ),
        ({"architectures": None}, "architectures"),
        ({"hidden_size": "32"}, "hidden_size.*positive integer"),
        ({"vocab_size": None}, "vocab_size.*missing"),
        ({"num_key_value_heads": 3}, "num_key_value_heads.*does not divide"),
        ({"hidden_size": 33, "head_dim": None}, "hidden_size.*multiple"),
        ({"head_dim": 7}, "head_dim.*odd"),
        ({"hidden_act": "mish"}, "hidden_act.*mish.*silu"),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "rope_type.*ntk.*yarn"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.*factor.*missing"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor.*18 of 12"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor.*3 of 12"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "short_factor.*list of 6"),
        ({"architectures": ["PhiForCausalLM"], "qk_layernorm": True}, "qk_layernorm.*only False"),
        ({"torch_dtype": "int8"}, "torch_dtype.*int8.*bfloat16"),
        ({"eos_token_id": "x"}, "eos_token_id"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
        (
            {"architectures": ["CwmForCausalLM"], "layer_types": ["full_attention"]},
            "layer_types.*each of 2",
        ),
    ],
    ids=str,
)
def test_refuses_by_file_and_key(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    """What would load and then answer wrongly must be refused before anything is loaded."""
    with pytest.raises(ConfigError, match=f"config.json: .*{words}"):
        ModelConfig.from_folder(written(tmp_path, **changes))


def test_refuses_a_folder_without_a_config(tmp_path: Path) -> None:
    """A traceback instead of the file's name."""
    with pytest.raises(ConfigError, match=r"config.json: no such file"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config.json: cannot be read as JSON"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"must hold a JSON object"):
        ModelConfig.from_folder(tmp_path)
