"""Quantised experts of mixtures: in files, and quantised on load."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.config.model_config import ModelConfig
from engine.errors import ConfigError
from engine.models.registry import Model, build_model
from engine.quantization.linear_experts import ExpertsApart
from engine.weights import load_weights
from kernels.cpu.gemm.blocks import PackedBlocks
from kernels.experts.reference import ExpertWeights, PackedExperts
from kernels.reference import Kernels
from tests.engine.models.checkpoints import Paged, load_model
from tests.engine.test_memory import held
from tests.engine.weights.quantized_files import FILES, matrix, one_order
from tests.engine.weights.test_stored_weights import build_on, logits
from tests.kernels.cpu.test_generated import able
from tests.parity.cases import EXPERTS, LATENT, save

COMMON = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 192, "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN = {
    **COMMON, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
}  # fmt: skip
GPT_OSS = {
    **COMMON, "architectures": ["GptOssForCausalLM"], "num_local_experts": 4,
    "num_experts_per_tok": 2, "intermediate_size": 96,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
            "lm_head",
        ],
    },
}  # fmt: skip


def config_of(folder: Path, values: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(values))
    return ModelConfig.from_folder(folder)


def plain(config: ModelConfig) -> Model:
    """Return the model in float32, with the plain kernels."""
    return build_model(
        replace(config, quantized=None), torch.float32, "cpu", Kernels(), runs_on="cuda"
    )


def fill(model: Model, exact: dict[str, Tensor]) -> Model:
    for parameter in model.parameters():
        at = 0
        for source in parameter.sources:
            whole = exact[source.name]
            part = source.part_of(whole if source.at is None else whole[source.at])
            parameter.tensor[at : at + source.num_rows] = part
            at += source.num_rows
    model.finish()
    return model


def kinds(model: Model) -> set[type]:
    state_types: set[type] = set()
    for stack in model._stacks():
        state_types.add(type(stack.state))
        if isinstance(stack.state, ExpertsApart):
            state_types |= {type(layer.pieces[0].state) for layer in stack.state.gate_up}
    return state_types


def agrees(config: ModelConfig, folder: Path, exact: dict[str, Tensor], runs_on: str) -> Model:
    """Assert that the model of the folder's files computes what its exact weights do; return it."""
    want = logits(fill(plain(config), exact))
    made_up = build_on(runs_on, config)
    load_weights(made_up, None)
    assert logits(made_up).isfinite().all()
    model = build_on(runs_on, config)
    load_weights(model, folder)
    got = logits(model)
    # On the CPU activations take 8 bits.
    bound = 2e-3 if runs_on == "cuda" else 0.15
    assert (got - want).norm() < bound * want.norm()
    assert model.num_bytes == held(model)
    return model


@pytest.mark.parametrize("runs_on", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "name",
    [
        "fp8-block",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("compressed-mxfp4", "compressed-nvfp4", "gptq-ordered", "nf4")
        ),
    ],
)
def test_a_tensor_for_each(
    name: str, runs_on: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: up's codes after the next expert's gate, scales of the expert before, experts that no
    product takes left unfinished, a sum of memory that counts 16 bits."""
    monkeypatch.setattr(torch, "randperm", one_order)
    config = config_of(tmp_path, {**QWEN, "quantization_config": FILES[name]})
    assert config.quantized is not None
    torch.manual_seed(1)
    tensors: dict[str, Tensor] = {}
    exact: dict[str, Tensor] = {}
    for parameter in plain(config).parameters():
        for source in parameter.sources:
            ours = source.name.removesuffix(".weight")
            scheme = config.quantized.scheme(ours)
            if (
                len(source.shape) == 1
                or scheme is None
                or "embed" in ours
                or ours[-8:] == "mlp.gate"
            ):
                weight = torch.randn(source.shape) / source.shape[-1] ** 0.5
                tensors[source.name] = exact[source.name] = weight.bfloat16().float()
            else:
                encoded, weight = matrix(scheme, ours, *source.shape)
                # Sizes that a trained model has: else each rounding decides what a softmax chooses.
                exact[source.name] = weight
                tensors |= {key: tensor.contiguous() for key, tensor in encoded.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    model = agrees(config, tmp_path, exact, runs_on)
    if runs_on == "cuda":
        assert kinds(model) == {ExpertWeights if name == "gptq-ordered" else PackedExperts}
    elif able() and name not in ("nf4", "fp8-block"):
        assert kinds(model) == {ExpertsApart, PackedBlocks}


def gpt_oss(folder: Path) -> tuple[ModelConfig, dict[str, Tensor], dict[str, Tensor]]:
    """Write gpt-oss files; return the configuration, their tensors, and transformers' exact
    weights."""
    # Here, as it takes three seconds of every process that collects tests.
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = config_of(folder, GPT_OSS)
    torch.manual_seed(1)
    tensors: dict[str, Tensor] = {}
    exact: dict[str, Tensor] = {}
    for parameter in plain(config).parameters():
        for source in parameter.sources:
            if source.name in exact:
                continue
            if source.at is not None and not source.name.endswith("_bias"):
                count, width, rows = source.shape
                blocks = torch.randint(0, 256, (count, rows, width // 32, 16), dtype=torch.uint8)
                scales = torch.randint(121, 124, (count, rows, width // 32)).to(torch.uint8)
                tensors |= {f"{source.name}_blocks": blocks, f"{source.name}_scales": scales}
                exact[source.name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            else:
                weight = (torch.randn(source.shape) / source.shape[-1] ** 0.5).bfloat16()
                tensors[source.name], exact[source.name] = weight, weight.float()
    save_file(tensors, folder / "model.safetensors")
    return config, tensors, exact


@pytest.mark.parametrize("runs_on", ["cpu", "cuda"])
def test_all_experts_in_one_tensor(runs_on: str, tmp_path: Path) -> None:
    """gpt-oss: rows of gate and up that stay in turns, blocks read as [in, out], the high half
    first, biases of another expert."""
    config, _, exact = gpt_oss(tmp_path)
    model = agrees(config, tmp_path, exact, runs_on)
    if runs_on == "cuda":
        assert kinds(model) == {PackedExperts}
    elif able():
        assert kinds(model) == {ExpertsApart, PackedBlocks}
    in_16 = build_model(replace(config, quantized=None), torch.bfloat16, "cpu", Kernels())
    experts, dense = (
        sum(stack.num_bytes for stack in stacks._stacks()) for stacks in (model, in_16)
    )
    assert experts < 0.4 * dense


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda key, tensor: tensor[:, :-1], "has shape"),
        (lambda key, tensor: tensor.view(torch.int8), "dtype I8, config.json implies U8"),
        (lambda key, tensor: None, "is missing"),
        (
            lambda key, tensor: (
                tensor.index_fill(0, torch.tensor(2), 255) if "scales" in key else tensor
            ),
            r"gate_up_proj_scales: a scale is NaN",
        ),
    ],
)
def test_broken_stacks_are_named(change: Any, message: str, tmp_path: Path) -> None:
    """Bug: a reshape of another's bytes, or logits that are NaN."""
    config, tensors, _ = gpt_oss(tmp_path)
    for key in ("gate_up_proj_blocks", "gate_up_proj_scales"):
        name = f"model.layers.1.mlp.experts.{key}"
        broken = change(key, tensors[name])
        remaining = {
            tensor_name: tensor for tensor_name, tensor in tensors.items() if tensor_name != name
        }
        if broken is tensors[name]:
            continue
        if broken is not None:
            remaining[name] = broken.contiguous()
        save_file(remaining, tmp_path / "model.safetensors")
        with pytest.raises(ConfigError, match=rf"{key}.*{message}|{message}"):
            load_weights(build_on("cuda", config), tmp_path)


@pytest.mark.parametrize("name", ["fp8", "int8", "int4", "nf4"])
def test_rounded_at_load(name: str, tmp_path: Path) -> None:
    """Bug: experts, nearly all of a mixture's weights, stay in 16 bits."""
    config = config_of(tmp_path, QWEN)
    dense = build_model(config, torch.float32, "cpu", Kernels(), runs_on="cuda")
    model = build_model(config, torch.float32, "cpu", Kernels(), quantization=name, runs_on="cuda")
    for drawn in (dense, model):
        load_weights(drawn, None, seed=3)
    assert kinds(dense) == {ExpertWeights}
    assert kinds(model) == {PackedExperts}
    assert model.num_bytes == held(model)
    for mine, full in zip(model._stacks(), dense._stacks(), strict=True):
        assert isinstance(mine.state, PackedExperts)
        expanded = mine.state.dense(torch.float32)
        for what in ("gate_up", "down"):
            want = getattr(full.state, what)
            off = (getattr(expanded, what) - want).norm() / want.norm()
            assert off < (0.11 if name[-1] == "4" else 0.03)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["minimax m2", "deepseek v3"])
def test_families_whose_files_are_in_fp8(name: str, tmp_path: Path) -> None:
    """Scales are looked for under other names than the family's experts and latents have."""
    sizes = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
    case = {**EXPERTS, **LATENT}[name]
    more = {**sizes, "moe_intermediate_size": 32} if name in LATENT else {}
    folders = tmp_path / "coded", tmp_path / "exact"
    save(replace(case, changes={**case.changes, **more}), folders[0])
    save(replace(case, changes={**case.changes, **more}), folders[1])
    tensors = load_file(folders[0] / "model.safetensors")
    exact = dict(tensors)
    plain = ("embed_tokens", "lm_head", ".gate.weight", "norm")
    for key, weight in list(tensors.items()):
        if weight.dim() == 2 and not any(part in key for part in plain):
            scale = weight.abs().max() / 448
            tensors[key] = (weight / scale).to(torch.float8_e4m3fn)
            exact[key] = tensors[key].float() * scale
            blocks = [-(-size // 128) for size in weight.shape]
            tensors[f"{key}_scale_inv"] = scale.expand(blocks).contiguous()
    for folder, stored in zip(folders, (tensors, exact), strict=True):
        save_file(stored, folder / "model.safetensors")
    config = json.loads((folders[0] / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]
    }  # fmt: skip
    (folders[0] / "config.json").write_text(json.dumps(config))
    ids = torch.arange(3, 43)
    logits = [Paged(load_model(folder)).run((ids, list(range(10)), 0))[0] for folder in folders]
    assert torch.equal(*logits)
