"""Weights rounded at load for CUDA, with the plain kernels on the CPU; and all of it on a GPU."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.nn.functional import silu

from deployments.plan.memory import Hardware, plan
from engine import LLM, SamplingParams
from engine.config.engine_config import EngineConfig
from engine.config.model_config import ModelConfig
from engine.config.quant_formats import QUANT_FORMATS
from engine.errors import ConfigError
from engine.layers.build import Builder
from engine.layers.mlp import Mlp
from engine.layers.norm import RMSNorm
from engine.library.outputs import CompletionOutput
from engine.parallel.group import TensorParallelGroup
from engine.quantization.method import DenseState
from engine.quantization.registry import check_quantization, linear_method
from engine.quantization.rounded.cuda import RoundedCuda
from engine.quantization.rounded.quantize_rows import rounded
from kernels.kv.quantized import KV
from kernels.metadata import AttentionMeta, LoraStep
from kernels.packed import PackedWeight, unpacked
from kernels.reference import Kernels

NAMES = [name for name, quant in QUANT_FORMATS.items() if "cuda" in quant.devices]


def method_of(name: str) -> RoundedCuda:
    method = linear_method(name, Kernels(), "cuda")
    assert isinstance(method, RoundedCuda)
    return method


def packed(name: str, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedWeight:
    state = method_of(name).finish(DenseState(weight, bias, "layers.0.qkv"))
    assert isinstance(state, PackedWeight)
    return state


@pytest.mark.parametrize("name", NAMES)
def test_rounded_to_the_nearest(name: str) -> None:
    """A scale of the neighbouring group, codes that are cut instead of rounded, an end of the range
    that wraps around, zeros that become NaN."""
    torch.manual_seed(0)
    weight = torch.randn(96, 256) * torch.rand(96, 1)
    weight[5] = 0
    form = method_of(name).form("layers.0.qkv", 256)
    assert form is not None and form.group == {"int4": 128, "nf4": 64}.get(name, 256)
    codes, scale, offset = rounded(form, weight)
    decoded = unpacked(form, (codes, scale, offset))
    half = scale.repeat_interleave(form.group, 1) / 2
    if name == "fp8":  # three bits of mantissa
        half = (weight.abs() / 16).maximum(half * 2**-9)
    elif name == "nf4":  # half of the widest gap of its numbers
        half = half * 0.304
    elif name == "int4":  # float16 rounds the ends; outliers are cut by a tenth of the range
        half = half + weight.abs().amax() * 2**-11
        groups = weight.unflatten(1, (-1, form.group))
        cut = 0.12 * (groups.amax(-1) - groups.amin(-1)).repeat_interleave(form.group, 1)
        error = (decoded - weight).abs()
        assert (error <= half * 1.001 + cut).all() and (error > half * 1.001).float().mean() < 0.05
        half = half + cut
    assert ((decoded - weight).abs() <= half * 1.001 + 1e-6).all()
    assert torch.equal(packed(name, weight).dense(torch.float32), decoded)


@pytest.mark.parametrize("name", NAMES)
def test_what_stands_around_a_product(name: str) -> None:
    """A norm, a gate, a bias or a residual that is forgotten or taken twice."""
    torch.manual_seed(0)
    state = packed(name, torch.randn(64, 128) / 8, torch.randn(64))
    method, x, norm = method_of(name), torch.randn(3, 128), torch.randn(128)
    weight = state.dense(torch.float32)
    plain = x @ weight.T + state.bias
    normed = torch.nn.functional.rms_norm(x, (128,), norm, 1e-5) @ weight.T + state.bias
    residual = torch.randn(3, 64)
    added = plain + residual
    gate, up = normed.chunk(2, -1)
    torch.testing.assert_close(method.apply(state, x), plain)
    torch.testing.assert_close(method.apply_norm(state, x, norm, 1e-5), normed)
    gated = method.apply_norm_gated(state, x, norm, 1e-5, "silu")
    torch.testing.assert_close(gated, silu(gate) * up)
    assert method.apply_add(state, x, residual) is residual
    torch.testing.assert_close(residual, added)
    both = torch.randn(3, 256)
    behind = (silu(both[:, :128]) * both[:, 128:]) @ weight.T + state.bias
    torch.testing.assert_close(method.apply_inner(state, both, "silu", None), behind)
    again = residual.clone()
    assert method.apply_inner(state, both, "silu", again) is again
    torch.testing.assert_close(again, residual + behind)


class GatesBehind(Kernels):
    """The plain kernels, which leave each gate to the GEMM after it."""

    def takes_gate(self, x: torch.Tensor, weight: PackedWeight) -> bool:
        return True


def test_the_gate_of_an_mlp_may_wait(tmp_path: Path) -> None:
    """A norm, a gate or a residual that is lost or taken twice where the second product computes
    the gate; an adapter, which reads what the gate gives."""
    small = {**MODEL, "hidden_size": 64, "intermediate_size": 96}
    (tmp_path / "config.json").write_text(json.dumps(small))
    config = ModelConfig.from_folder(tmp_path)
    outputs = []
    for kernels in (Kernels(), GatesBehind()):
        torch.manual_seed(0)
        method = RoundedCuda(kernels, QUANT_FORMATS["w8a8"])
        build = Builder(
            config, kernels, method, TensorParallelGroup(), *[torch.float32] * 2,
            torch.device("cpu"), layer=0,
        )  # fmt: skip
        mlp, norm = Mlp(build), RMSNorm(kernels, torch.rand(64), 1e-5)
        for linear in mlp.linears:
            linear.parameters[0].allocate()
            linear.state.weight.normal_(std=0.1)
            linear.finish()
        x = torch.randn(3, 64)
        assert mlp.down.takes_gate(x, None) is isinstance(kernels, GatesBehind)
        assert not mlp.down.takes_gate(x, cast(LoraStep, object()))
        meta = cast(AttentionMeta, SimpleNamespace(lora=None))
        for residual in (None, torch.randn(3, 64)):
            outputs.append(mlp.forward(x, cast(KV, None), meta, norm=norm, residual=residual))
    assert len(outputs) == 4 and not torch.allclose(outputs[0], outputs[1])
    torch.testing.assert_close(outputs[:2], outputs[2:], rtol=0, atol=0)


def test_what_stays_as_it_is() -> None:
    """A row that no group divides; a head in 4 bits."""
    method = method_of("int4")
    odd = DenseState(torch.randn(8, 40), None, "layers.0.qkv")
    assert method.finish(odd) is odd
    head = method.form("head", 256)
    assert head is not None and head.bits == 8
    assert [method_of("int4").form("layers.0.out", width).group for width in (576, 96)] == [64, 32]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "device", "there"),
    [("uint4-128", "cuda", "fp8, w8a8, int4, nf4"), ("fp8", "cpu", "w8a8, uint8-64, .*uint4-128")],
)
def test_a_device_that_has_no_kernel_is_named(name: str, device: str, there: str) -> None:
    """Bug: a KeyError, or a method of the other device; or no word of what runs here."""
    with pytest.raises(
        ConfigError, match=f"'{name}' does not run on {device}; there: none, int8, {there}$"
    ):
        check_quantization(name, device, None)


def test_whose_activations_are_rounded() -> None:
    """x rounded where the name says weights alone; weights alone where it says both."""
    forms = {name: method_of(name).form("layers.0.qkv", 256) for name in NAMES}
    activations = {name: form.activations for name, form in forms.items() if form is not None}
    assert activations == {"fp8": 8, "w8a8": 8, "int8": 16, "int4": 16, "nf4": 16}


def test_a_gpu_without_products_of_whole_numbers(tmp_path: Path) -> None:
    """Bug: 8-bit weights and 16-bit activations where both were asked for, without a word; or a
    kernel that fails to compile in the first step."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    config = EngineConfig(model=str(tmp_path), quantization="w8a8", dtype="float16")
    model = ModelConfig.from_folder(tmp_path)
    message = r"T4 has compute capability 7\.5, .* from 8\.0 on; set quantization: int8"
    with pytest.raises(ConfigError, match=message) as error:
        plan(model, config, Hardware.gpu("t4"))
    assert error.value.param == "quantization"
    assert plan(model, config, Hardware.gpu("a100")).num_blocks


# ---- On a GPU ------------------------------------------------------------------------------------

MODEL = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 1024, "intermediate_size": 2816,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128,
    "vocab_size": 2048, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
ORDERED = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": False}
W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
            "input_activations": {"num_bits": 8, "type": "int", "strategy": "token"},
        }
    },
}
CASES: dict[str, dict[str, Any]] = {
    **{name: {"engine": {"quantization": name}} for name in NAMES},
    "awq": {"model": {"quantization_config": AWQ}},
    "gptq-ordered": {"model": {"quantization_config": ORDERED}},
    "w8a8-file": {"model": {"quantization_config": W8A8}},
    "w8a8-deterministic": {"engine": {"quantization": "w8a8", "deterministic": True}},
    "int4-deterministic": {"engine": {"quantization": "int4", "deterministic": True}},
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_graphs_and_eager_steps_agree(case: str, tmp_path: Path) -> None:
    """A product that launches something else, or leaves memory behind, inside of a graph. Forty
    prompts of 1 to 400 tokens take every kind of product: one token, a few, many."""
    options = CASES[case]
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, **options.get("model", {})}))
    prompts = [[(7 * i + j) % 2048 for j in range(1 + 10 * i)] for i in range(40)]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=20)
    answers = []
    for graphs in (True, False):
        with LLM(
            str(tmp_path), load_format="dummy", dtype="bfloat16", num_blocks=2048,
            cuda_graphs=graphs, max_num_seqs=64, prefix_caching=False, **options.get("engine", {}),
        ) as llm:  # fmt: skip
            alone = llm.generate([prompts[20]], params, detokenize=False)
            together = llm.generate(prompts, params, detokenize=False)
        answers.append([output.outputs[0] for output in (*alone, *together)])
    assert answers[0][0].token_ids == answers[1][0].token_ids
    # Products of several tokens differ in the last bit where a graph pads a step, and whether fp8
    # and w8a8 round activations depends on a step's tokens. Logits of random weights are near ties.
    gaps = [gap_where_they_part(first, other) for first, other in zip(*answers, strict=True)]
    assert max(gaps) <= (0.3 if case.startswith(("fp8", "w8a8")) else 0.05), sorted(gaps)[-8:]


def gap_where_they_part(first: CompletionOutput, other: CompletionOutput) -> float:
    """Return by how much `first` preferred its own token at the first place where two greedy texts
    differ; 0 for equal texts, infinity if the other's token was not among its alternatives.
    """
    assert first.logprobs is not None
    for mine, theirs in zip(first.logprobs, other.token_ids, strict=True):
        if mine.token_id != theirs:
            alternatives = dict(zip(mine.top_ids, mine.top_logprobs, strict=True))
            return mine.logprob - alternatives.get(theirs, -math.inf)
    return 0.0
