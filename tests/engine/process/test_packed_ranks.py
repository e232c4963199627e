"""Checkpoints in fewer bits in several ranks: their texts are those of one rank."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from safetensors.torch import save_file
from torch import Tensor

from engine import SamplingParams
from engine.config.engine_config import EngineConfig
from engine.config.model_config import ModelConfig
from engine.errors import ConfigError
from engine.messages import EngineRequest
from engine.models.registry import build_model
from engine.resolve import resolve
from engine.runner.memory import outline
from kernels.cpu.gemm.blocks import PackedBlocks
from kernels.dispatch import kernels_for
from tests.engine.process.ranked import config_of, logprobs_of, serve, start, told
from tests.engine.weights.quantized_files import FILES, matrix
from tests.engine.weights.test_stored_weights import SCHEMES, able, integers

SIZES = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 384,
    "max_position_embeddings": 256,
}
GGUF = "gguf"
TYPES = {"q_proj": "Q4_0", "k_proj": "Q4_0", "v_proj": "Q8_0", "down_proj": "Q4_1"}
KEPT = ("gptq", "awq", "compressed-zeros", "compressed-w8a8", "compressed-mxfp4", "llm-int8", GGUF)
EXPANDED = ("gptq-ordered", "fp8-block", "nf4-nested")  # on the CPU
QUICK = ("awq", "compressed-zeros", GGUF)


def description(name: str) -> dict[str, Any]:
    if name != GGUF:
        return {**FILES, **SCHEMES}[name]
    names = [f"model.layers.{layer}.{module}" for layer in range(2) for module in (
        *(f"self_attn.{part}_proj" for part in "qkvo"), "mlp.gate_proj", "mlp.up_proj",
        "mlp.down_proj",
    )]  # fmt: skip
    types = {name: TYPES.get(name.rpartition(".")[2], "Q5_0") for name in names}
    types["model.embed_tokens"] = "Q8_0"
    return {"quant_method": GGUF, "types": types}


def made(folder: Path, name: str, kept_modules: tuple[str, ...] = (), **sizes: Any) -> Path:
    """Write a small model in files of this method; return its folder.

    kept_modules: modules in 16 bits. The head of a GGUF file is its embedding.
    """
    folder.mkdir()
    config = {**SIZES, **sizes, "tie_word_embeddings": name == GGUF}
    config["quantization_config"] = dict(description(name))  # which other tests have too
    if kept_modules:
        config["quantization_config"]["modules_to_not_convert"] = kept_modules
    (folder / "config.json").write_text(json.dumps(config))
    read = ModelConfig.from_folder(folder)
    quantized = read.quantized
    assert quantized is not None
    plain = build_model(
        replace(read, quantized=None), torch.bfloat16, "meta", kernels_for("cpu"), runs_on="cpu"
    )
    tensors: dict[str, Tensor] = {}
    torch.manual_seed(0)
    for parameter in plain.parameters():
        for source in parameter.sources:
            ours = source.name.removesuffix(".weight")
            values = torch.randn(source.shape) / 16
            if len(source.shape) == 1:
                tensors[source.name] = values + 1
            elif name == GGUF:
                kind = GGMLQuantizationType[quantized.types[ours]]
                tensors[source.name] = torch.from_numpy(quantize(values.numpy(), kind))
            elif quantized.keeps(ours) or "embed" in ours:
                tensors[source.name] = values.bfloat16()
            else:
                scheme = quantized.scheme(ours)
                assert scheme is not None
                make = matrix if name in FILES else integers
                tensors |= make(scheme, ours, *source.shape)[0]
    tensors = {key: tensor.contiguous() for key, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def requests() -> list[EngineRequest]:
    messages = []
    for number in range(1, 5):
        prompt = [3 + (number + i * i) % 300 for i in range(7 * number)]
        params = SamplingParams(
            temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1, prompt_logprobs=1
        )
        messages.append(EngineRequest(number, prompt, len(prompt), params, number))
    return messages


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in (*KEPT, *EXPANDED)
    ],
)
def test_texts_are_those_of_one_rank(name: str, two_cores: None, tmp_path: Path) -> None:
    """Bugs: a rank multiplies by the first rank's groups, or by other rows of a head that is the
    embedding; a part is expanded although there is a product for it."""
    folder = made(tmp_path / "model", name)
    quantization = GGUF if name == GGUF else "auto"
    outputs = []
    for size in (1, 2):
        options = {"max_loras": 0, "num_blocks": 24, "quantization": quantization}
        core, others = start(config_of(folder, tensor_parallel=size, **options))
        if able() and name in KEPT:
            model: Any = core._runner.model if size == 1 else core._runner._runner.model
            states = [piece.state for linear in model.linears() for piece in linear.state.pieces]
            assert states and all(isinstance(state, PackedBlocks) for state in states)
        outputs.append(serve(core, requests()))
        if others is not None:
            others.close()
    assert told(outputs[0]) == told(outputs[1])
    for id, output in outputs[0].items():
        # A last bit may round an activation to its neighbour of 8 bits, or a query of bfloat16.
        assert logprobs_of(outputs[1][id]) == pytest.approx(logprobs_of(output), abs=4e-2)


def test_a_group_that_would_be_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: half of a group has the scale of its neighbour, or the start fails with a shape."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for name, heads, message in (
        ("nf4", 8, r"o_proj: a rank would have inputs 224 to 256 of 256, .* 64 together"),
        ("compressed-zeros", 8, r"inputs 224 to 256 of 256, .* 64 together; take fewer ranks"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        config = {**SIZES, "num_attention_heads": heads, "num_key_value_heads": heads}
        config["quantization_config"] = description(name)
        (folder / "config.json").write_text(json.dumps(config))
        outline(resolve(EngineConfig(model=str(folder), device="cpu", tensor_parallel=2)))
        config_of_8 = EngineConfig(model=str(folder), device="cpu", tensor_parallel=8)
        with pytest.raises(ConfigError, match=message) as error:
            outline(resolve(config_of_8))
        assert error.value.param == "tensor_parallel"
