"""Quantised weights as checkpoints store them: each layout against its own oracle, and whole
models against the same weights expanded."""

import contextlib
import ctypes
import gc
import json
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import save_file
from torch import Tensor

from deployments.checkpoints.gguf import convert
from deployments.plan.gpus import GIB
from deployments.plan.memory import Hardware, plan
from engine import factory
from engine.config.engine_config import EngineConfig
from engine.config.model_config import ModelConfig
from engine.config.quant_formats import QUANT_FORMATS, Quantization
from engine.config.quantized import GGUF_BLOCKS, Scheme
from engine.config.quantized_config import read_quantized
from engine.config_reader import Reader
from engine.errors import ConfigError
from engine.models.registry import Model, build_model
from engine.quantization.layouts.gguf import BLOCK_TYPES, BlockType
from engine.quantization.layouts.layout import GgufLayout, IntegerLayout
from engine.quantization.method import DenseState, LinearSpec, Part
from engine.quantization.registry import AS_STORED, METHODS
from engine.quantization.rounded.cpu import RoundedCpu
from engine.quantization.rounded.quantize_rows import rounded
from engine.weights import load_weights
from kernels.cpu.codegen.processor import CompilerUnavailable
from kernels.cpu.gemm import blocks
from kernels.cpu.gemm.blocks import PackedBlocks
from kernels.dispatch import kernels_for
from kernels.packed import INT8_PRODUCTS, PackedWeight, unpacked
from kernels.reference import Kernels
from tests.deployments.config.test_models import tiny
from tests.engine.models.checkpoints import Paged
from tests.engine.test_memory import held
from tests.kernels.cpu.test_blocks import bound
from tests.kernels.cpu.test_generated import able

OUT, WIDTH = 128, 512
M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


def stored(kind: str, seed: int = 0) -> np.ndarray[Any, Any]:
    """Return random bytes of OUT rows, whose float16 numbers are of both signs and moderate
    size."""
    block = BLOCK_TYPES[kind]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (OUT, WIDTH // block.width, block.num_bytes), dtype=np.uint8)
    for at in block.halves:
        values = (rng.standard_normal(raw.shape[:2]) * 0.02).astype(np.float16)
        raw[..., at : at + 2] = values[..., None].view(np.uint8)
    return raw.reshape(OUT, -1)


def whole(out: int, width: int) -> Part:
    return Part("w", out, width, (0, out), (0, width))


def layout(kind: str, raw: np.ndarray[Any, Any]) -> GgufLayout:
    gguf_layout = GgufLayout(whole(OUT, WIDTH), kind, torch.device("cpu"))
    (parameter,) = gguf_layout.parameters.values()
    parameter.tensor.copy_(torch.from_numpy(raw))
    return gguf_layout


def values(kind: str, raw: np.ndarray[Any, Any]) -> list[Tensor]:
    """Return our weights of the bytes: expanded, and packed if this machine can pack them."""
    (decoded,) = layout(kind, raw).decoded(OUT)
    form = BLOCK_TYPES[kind].form
    ways = [unpacked(form, decoded)]
    if able():
        packed = PackedBlocks(form, OUT, WIDTH, None)
        packed.fill(0, *decoded)
        ways.append(packed.rows(torch.arange(OUT)))
    return ways


def oracle(kind: str, raw: np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy(gguf.quants.dequantize(raw, GGMLQuantizationType[kind]))


def test_the_types_are_those_that_the_converter_keeps() -> None:
    """Bug: a type is kept that nothing decodes, or a block is read with another's size."""
    sizes = {name: (block.width, block.num_bytes) for name, block in BLOCK_TYPES.items()}
    assert sizes == GGUF_BLOCKS and list(BLOCK_TYPES) == list(GGUF_BLOCKS)
    for kind, block in BLOCK_TYPES.items():
        width, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
        assert (block.width, block.num_bytes) == (width, size)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_blocks_are_unpacked_bit_for_bit(kind: str) -> None:
    """Nibbles in another order, a fifth bit of the neighbour, scales that are not put together as
    ggml does: all give fluent nonsense."""
    raw = stored(kind)
    want = oracle(kind, raw)
    for decoded in values(kind, raw):
        assert torch.equal(decoded, want)


def _nibbles_exchanged(raw: Tensor, block: BlockType) -> Tensor:
    turned = (raw >> 4) | (raw << 4)
    for at in block.halves:
        turned[..., at : at + 2] = raw[..., at : at + 2]
    return turned


# What the decoder sees in a block's bytes is not what is stored.
FAULTS: dict[str, Callable[[Tensor, BlockType], Tensor]] = {
    "nibbles exchanged": _nibbles_exchanged,
    "one byte late": lambda raw, block: raw.roll(1, -1),
    "the next row's scale": lambda raw, block: _moved(raw, block, 0),
    "the next block's scale": lambda raw, block: _moved(raw, block, 1),
    "the highest bit lost": lambda raw, block: raw & 127,
}


def _moved(raw: Tensor, block: BlockType, dim: int) -> Tensor:
    raw, at = raw.clone(), block.halves[0]
    raw[..., at : at + 2] = raw[..., at : at + 2].roll(1, dim)
    return raw


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_a_planted_fault_shows(kind: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above would let it pass."""
    block = BLOCK_TYPES[kind]

    def wrong(raw: Tensor) -> Any:
        return block.decode(FAULTS[fault](raw, block))

    monkeypatch.setitem(BLOCK_TYPES, kind, replace(block, decode=wrong))
    raw = stored(kind)
    with contextlib.suppress(ConfigError):  # for a scale that is not finite
        assert not any(torch.equal(decoded, oracle(kind, raw)) for decoded in values(kind, raw))


@pytest.mark.skipif(not able(), reason="no compiler for this machine")
@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_products_of_blocks(kind: str) -> None:
    """Of the weights that gguf reads, in float64: no further off than 8 bits of x explain."""
    raw = stored(kind)
    weight = oracle(kind, raw).double()
    form = BLOCK_TYPES[kind].form
    packed = PackedBlocks(form, OUT, WIDTH, None)
    for first, decoded in zip((0, 64), layout(kind, raw).decoded(64), strict=True):
        packed.fill(first, *decoded)
    for rows in (1, 7, 33):
        x = torch.randn(rows, WIDTH)
        assert ((packed(x) - x.double() @ weight.T).abs() <= bound(x, weight)).all()


def test_a_scale_that_is_not_finite_is_refused() -> None:
    """Bug: a damaged file is served, and all of its tokens are NaN."""
    raw = stored("Q4_0")
    raw[3, :2] = np.array([np.inf], dtype=np.float16).view(np.uint8)
    with pytest.raises(ConfigError, match=r"tensor w\.weight: a scale is NaN or infinity"):
        list(layout("Q4_0", raw).decoded(64))


# ---- Packed integers -----------------------------------------------------------------------------

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight neighbours is at the next four bits
SCHEMES = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False},
    "gptq-v2": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 64,
        "sym": False,
        "checkpoint_format": "gptq_v2",
    },
    "gptq-symmetric": {"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": True},
    "gptq-8": {"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True},
    "compressed": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {"weights": {"num_bits": 4, "group_size": 32, "symmetric": True}}
        },
        "ignore": ["lm_head"],
    },
    "compressed-zeros": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {"weights": {"num_bits": 4, "group_size": 64, "symmetric": False}}
        },
        "ignore": ["lm_head"],
    },
}


def words(fields: np.ndarray[Any, Any], bits: int) -> Tensor:
    """Pack fields [n, m] into int32 [n, m * bits / 32], low bits first."""
    n, count = len(fields), 32 // bits
    split = fields.astype(np.uint64).reshape(n, -1, count)
    shifts = np.arange(0, 32, bits, dtype=np.uint64)
    return torch.from_numpy((split << shifts).sum(-1).astype(np.uint32).view(np.int32)).contiguous()


def integers(scheme: Scheme, name: str, out: int, width: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return a random matrix as the method's own files have it, and its float32 weights."""
    rng = np.random.default_rng(len(name))
    bits, group = scheme.bits, scheme.group or width
    top = 1 << bits
    codes = rng.integers(0, top, (out, width))
    zeros = rng.integers(1, top, (out, width // group))
    if scheme.symmetric:
        zeros[:] = top // 2
    scale = (rng.random((out, width // group)) * 0.02 + 0.001).astype(np.float16)
    whole = (codes.reshape(out, -1, group) - zeros[..., None]).astype(np.float32)
    weight = torch.from_numpy((scale.astype(np.float32)[..., None] * whole).reshape(out, width))
    if scheme.kind == "packed":
        tensors = {
            "weight_packed": words(codes, bits),
            "weight_scale": torch.from_numpy(scale),
            "weight_shape": torch.tensor([out, width]),
        }
        if not scheme.symmetric:
            tensors["weight_zero_point"] = words(zeros.T.copy(), bits).T.contiguous()
    elif scheme.kind == "gptq":
        tensors = {
            "qweight": words(codes, bits).T.contiguous(),
            "qzeros": words(zeros.T - scheme.zeros_less_one, bits),
            "scales": torch.from_numpy(scale.T.copy()),
            "g_idx": torch.arange(width, dtype=torch.int32) // group,
        }
    else:

        def ordered(fields: np.ndarray[Any, Any]) -> Tensor:
            eight = fields.reshape(len(fields), -1, 8)[:, :, list(AWQ_ORDER)]
            return words(eight.reshape(len(fields), -1), bits)

        tensors = {
            "qweight": ordered(codes.T),
            "qzeros": ordered(zeros.T),
            "scales": torch.from_numpy(scale.T.copy()),
        }
    return {f"{name}.{key}": tensor for key, tensor in tensors.items()}, weight


def scheme(name: str) -> Scheme:
    quantized = read_quantized(Reader({"quantization_config": SCHEMES[name]}, "config.json"))
    assert quantized is not None and quantized.keeps("lm_head")
    of_matrix = quantized.scheme("model.layers.0.mlp.up_proj")
    assert of_matrix is not None
    return of_matrix


def read(quantized: Scheme, tensors: dict[str, Tensor], out: int, width: int) -> Tensor:
    integers_read = IntegerLayout(whole(out, width), quantized, torch.device("cpu"))
    for parameter in integers_read.parameters.values():
        parameter.tensor.copy_(tensors[parameter.name])
    # In slices that begin inside a word.
    return torch.cat(
        [unpacked(integers_read.form, decoded) for decoded in integers_read.decoded(20)]
    )


@pytest.mark.parametrize("name", SCHEMES)
def test_packed_integers_are_read_exactly(name: str) -> None:
    """Fields in another order, zero points one off or of the neighbour, groups across the wrong
    dimension."""
    quantized = scheme(name)
    tensors, weight = integers(quantized, "w", 48, 128)
    assert torch.equal(read(quantized, tensors, 48, 128), weight)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gptq", {"zeros_less_one": False}),
        ("gptq-v2", {"zeros_less_one": True}),
        ("gptq", {"group": 32}),
        ("awq", {"kind": "gptq"}),
        ("compressed-zeros", {"symmetric": True}),
    ],
)
def test_another_convention_shows(name: str, change: dict[str, Any]) -> None:
    """The comparison above would let a convention pass that is not the file's."""
    quantized = scheme(name)
    tensors, weight = integers(quantized, "w", 64, 128)
    with contextlib.suppress(RuntimeError):  # shapes that do not fit
        assert not torch.equal(read(replace(quantized, **change), tensors, 64, 128), weight)


def test_zero_points_that_contradict_config(tmp_path: Path) -> None:
    """Bug: weights that are said to be symmetric and are not lose their zero points."""
    tensors, _ = integers(scheme("gptq"), "w", 64, 128)
    with pytest.raises(
        ConfigError, match=r"w\.qzeros: config.json says that weights are symmetric"
    ):
        read(replace(scheme("gptq"), symmetric=True), tensors, 64, 128)


@pytest.mark.parametrize("runs_on", ["cpu", "cuda"])
@pytest.mark.parametrize("name", SCHEMES)
def test_a_model_of_packed_integers(name: str, runs_on: str, tmp_path: Path) -> None:
    """Bug: parts of a merged layer exchanged, tensors that nobody needs refused, a head or an
    embedding in 16 bits looked for in words."""
    stored_config(tmp_path, SCHEMES[name], tied=False)
    config = ModelConfig.from_folder(tmp_path)
    assert config.quantized is not None
    tensors: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    plain = build_model(
        replace(config, quantized=None), torch.bfloat16, "meta", kernels_for("cpu"), runs_on="cpu"
    )
    for parameter in plain.parameters():
        for source in parameter.sources:
            matrix = source.name.removesuffix(".weight")
            if len(source.shape) == 1 or config.quantized.keeps(matrix) or "embed" in matrix:
                tensors[source.name] = torch.randn(source.shape).bfloat16()
                weights[matrix] = tensors[source.name].float()
            else:
                stored = config.quantized.scheme(matrix)
                assert stored is not None
                encoded, weights[matrix] = integers(stored, matrix, *source.shape)
                tensors |= encoded
    save_file(tensors, tmp_path / "model.safetensors")
    made_up = build_on(runs_on, config)
    load_weights(made_up, None)
    assert logits(made_up).isfinite().all()
    model = build_on(runs_on, config)
    load_weights(model, tmp_path)
    for linear in model.linears():
        want = torch.cat([weights[part.name] for part in linear.spec.parts]).double()
        x = torch.randn(3, want.shape[1])
        assert ((linear.forward(x) - x.double() @ want.T).abs() <= bound(x, want)).all()
        if runs_on == "cuda" and not isinstance(linear.state, DenseState):
            assert all(isinstance(piece.state, PackedWeight) for piece in linear.state.pieces)
    assert logits(model).isfinite().all()
    assert model.num_bytes == held(model)


def build_on(runs_on: str, config: ModelConfig) -> Model:
    """Build a model on the CPU, with the methods of the device `runs_on` and the plain kernels."""
    if runs_on == "cpu":
        return build_model(config, torch.bfloat16, "cpu", kernels_for("cpu"))
    return build_model(config, torch.float32, "cpu", Kernels(), runs_on="cuda")


# ---- Rounded at load -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in METHODS if name.startswith("uint")])
def test_groups_are_rounded_to_the_nearest(name: str) -> None:
    """Bug: an offset of the neighbouring group, codes that are cut instead of rounded, a group that
    reaches into the next row, 4 bits on the grid between a group's ends."""
    method = METHODS[name]["cpu"](kernels_for("cpu"))
    assert isinstance(method, RoundedCpu)
    bits, group = (int(number) for number in name.removeprefix("uint").split("-"))
    weight = torch.randn(128, 576) * torch.rand(128, 1) + torch.randn(128, 1)
    weight[5] = 0
    form = method.format(576)  # of which 128, 256 and 512 are no part
    assert form.bits == bits and form.group <= group and 576 % form.group == 0
    assert form.group == {32: 32, 64: 64, 128: 96, 256: 192, 512: 288}[group]
    codes, scale, low = rounded(form, weight)
    decoded = unpacked(form, (codes, scale, low))
    half = (scale / 2 * 1.001 + 1e-6).repeat_interleave(form.group, 1)
    off = (decoded - weight).abs()
    # outliers of 4 bits are cut by a tenth of the range at most
    groups = weight.unflatten(1, (-1, form.group))
    cut = (0.12 * (bits == 4) * (groups.amax(-1) - groups.amin(-1))).repeat_interleave(
        form.group, 1
    )
    assert (off <= half + cut).all() and (off > half).float().mean() < 0.05
    if bits == 4:
        ends = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        step = ((ends[1] - ends[0]) / 15).clamp(min=1e-30)
        between_ends = ((groups - ends[0]) / step).round() * step + ends[0]
        assert off.square().sum() < 0.89 * (between_ends - groups).square().sum()
    if able():
        state = method.finish(DenseState(weight.bfloat16(), None))
        want = unpacked(form, rounded(form, weight.bfloat16())).double()
        x = torch.randn(7, 576)
        assert ((method.apply(state, x) - x.double() @ want.T).abs() <= bound(x, want)).all()


def test_a_scale_an_output() -> None:
    """Bug: a matrix's largest number for all its rows, or a code that wraps around at the other end
    of the range."""
    method = METHODS["w8a8"]["cpu"](kernels_for("cpu"))
    assert isinstance(method, RoundedCpu)
    weight = torch.randn(128, 576) * torch.rand(128, 1)
    weight[5] = 0
    weight[:, 3] = -weight.abs().amax(1)
    form = method.format(576)
    codes, scale, offset = rounded(form, weight)
    assert offset is None and scale.shape == (128, 1)
    decoded = unpacked(form, (codes, scale, None))
    assert ((decoded - weight).abs() <= scale / 2 * 1.001).all()
    if able():
        bias = torch.randn(128)
        state = method.finish(DenseState(weight.bfloat16(), bias))
        want = unpacked(form, rounded(form, weight.bfloat16())).double()
        for rows in (1, 7, 40):
            x = torch.randn(rows, 576)
            got = method.apply(state, x)
            assert ((got - x.double() @ want.T - bias).abs() <= bound(x, want)).all()


def test_matrices_without_a_kernel_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """Bug: weights stay in 16 bits without a word, or with a line for each expert."""
    method = METHODS["uint4-32"]["cpu"](kernels_for("cpu"))
    for outputs, width in ((100, 576), (100, 576), (128, 100), (128, 576)):
        method.finish(DenseState(torch.zeros(outputs, width, dtype=torch.bfloat16), None))
    dense = [record.args for record in caplog.records if "no GEMM here" in record.message]
    bfloat16 = [("uint4-32", 100, 576, "bfloat16"), ("uint4-32", 128, 100, "bfloat16")]
    assert dense == bfloat16 if able() else dense[:2] == bfloat16


@pytest.mark.parametrize("name", ["w8a8", "uint4-32"])
def test_a_machine_that_cannot_compile(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: weights stay in 16 bits without a word, or a CompilerUnavailable that names no key."""

    def none() -> int:
        raise CompilerUnavailable("kernels are generated for x86-64 Linux only")

    monkeypatch.setattr("engine.quantization.rounded.cpu.check", none)
    method = METHODS[name]["cpu"](kernels_for("cpu"))
    part = Part("w", 64, 64, (0, 64), (0, 64))
    spec = LinearSpec("w", (part,), False, torch.bfloat16, torch.device("cpu"))
    with pytest.raises(ConfigError, match=f"quantization '{name}': kernels are.*: none") as error:
        method.create(spec)
    assert error.value.param == "quantization"


def test_every_setting_has_a_method() -> None:
    """Bug: a name of the configuration that nothing answers to, or that cannot be configured."""
    assert {*get_args(Quantization)} == {"auto", *METHODS, AS_STORED}
    assert all({*METHODS[name]} == {*quant.devices} for name, quant in QUANT_FORMATS.items())
    assert QUANT_FORMATS["w8a8"].min_capability == INT8_PRODUCTS


# ---- Whole models --------------------------------------------------------------------------------


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> Model:
    model = build_model(ModelConfig.from_folder(folder), dtype, "cpu", kernels_for("cpu"))
    load_weights(model, folder)
    return model


def logits(model: Model) -> Tensor:
    paged = Paged(model, num_blocks=16)
    return paged.run((torch.arange(3, 40), list(range(10)), 0))[0]


@pytest.fixture
def folders(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """Return a function that converts a GGUF file: expanded, and in blocks."""

    def make(arch: str, **options: Any) -> tuple[Path, Path]:
        source = tiny(tmp_path / "m.gguf", arch, **options)
        expanded, blocks = tmp_path / "expanded", tmp_path / "kept"
        for folder, keeps in ((expanded, False), (blocks, True)):
            folder.mkdir()
            convert(source, folder, blocks=keeps)
        return expanded, blocks

    return make


@pytest.mark.parametrize(
    ("arch", "quant", "untied"),
    [("llama", "Q4_1", False), ("qwen2", "Q8_0", True), ("qwen3", "Q5_0", False)],
)
def test_a_model_in_blocks_is_the_expanded_one(
    arch: str, quant: str, untied: bool, folders: Callable[..., tuple[Path, Path]]
) -> None:
    """Rows of query and key left interleaved, biases lost, gate and up exchanged. Vocabularies of
    odd sizes have no kernel and are expanded."""
    expanded, blocks = folders(arch, quant=GGMLQuantizationType[quant], untied=untied)
    ours, theirs = loaded(blocks), loaded(expanded)

    def apart(a: Tensor, b: Tensor) -> float:
        return float((a - b).norm() / b.norm())

    for linear, other in zip(ours.linears(), theirs.linears(), strict=True):
        x = torch.randn(5, linear.spec.in_features)
        a, b = linear.forward(x), other.forward(x)
        assert apart(a, b) < 0.01  # bfloat16 weights there, activations in 8 bits here
        assert apart(a.roll(1, -1), b) > 0.5  # what else there could be is far away
    hidden = torch.randn(5, ours.config.hidden_size)
    assert apart(ours.logits(hidden), theirs.logits(hidden)) < 0.01
    ids = torch.arange(ours.config.vocab_size)
    assert apart(ours.table.forward(ids), theirs.table.forward(ids)) < 0.003
    assert logits(ours).isfinite().all()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("vocab", [192, 200])
def test_the_sum_of_memory_knows_blocks(
    tied: bool, adapters: bool, vocab: int, tmp_path: Path
) -> None:
    """Bug: what was read is counted rather than what it is packed into, or a table twice."""
    stored_config(tmp_path, "gguf", tied=tied, vocab=vocab)
    options: dict[str, Any] = {}
    if adapters:
        options = {"max_loras": 2, "max_lora_rank": 8, "max_virtual_tokens": 3}
    config = engine_config(tmp_path, **options)
    core, _ = factory.build(config)
    runner: Any = core._runner
    model = runner.model
    memory = dict(plan(model.config, config, Hardware("here", "cpu", 64 * GIB)).memory.rows)
    assert memory["weights"] == model.num_bytes
    virtual = memory.get("virtual tokens (2 times 3)", 0)
    assert bool(virtual) == adapters
    # FBGEMM's copy of the head, of an odd size, is no tensor.
    unseen = 0 if vocab == 192 else 2 * vocab * 64
    assert memory["weights"] + virtual == held(model) + unseen


def stored_config(
    folder: Path,
    method: str | dict[str, Any],
    *,
    tied: bool = True,
    vocab: int = 192,
    layers: int = 2,
    **changed: int,
) -> None:
    """Write config.json of a small model with random weights in several block types.

    changed: keys of config.json.
    """
    layer = "model.layers.{}."
    names = {
        "self_attn.q_proj": "Q4_0",
        "self_attn.k_proj": "Q4_0",
        "self_attn.v_proj": "Q8_0",
        "self_attn.o_proj": "Q5_1",
        "mlp.gate_proj": "IQ4_NL",
        "mlp.up_proj": "IQ4_NL",
        "mlp.down_proj": "Q4_1",
    }
    types = {
        f"{layer.format(i)}{name}": kind for i in range(layers) for name, kind in names.items()
    }
    types["model.embed_tokens"] = "Q8_0"
    if not tied:
        types["lm_head"] = "Q5_0"
    sizes = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": vocab,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        **changed,
    }
    sizes["quantization_config"] = (
        {"quant_method": method, "types": types} if isinstance(method, str) else method
    )
    (folder / "config.json").write_text(json.dumps(sizes))


def engine_config(folder: Path, **options: Any) -> EngineConfig:
    values = {"device": "cpu", "load_format": "dummy", "num_threads": 1, **options}
    return EngineConfig(model=str(folder), max_num_seqs=4, kv_cache_bytes=1 << 22, **values)


@pytest.mark.skipif(not able(), reason="no compiler for this machine")
def test_a_third_of_the_memory(tmp_path: Path) -> None:
    """Bug: the embedding is kept in 16 bits beside the head in blocks."""
    stored_config(tmp_path, "gguf")
    model = build_model(
        ModelConfig.from_folder(tmp_path), torch.bfloat16, "cpu", kernels_for("cpu")
    )
    load_weights(model, None)
    tables = 256 * 16 * 4  # rotary
    assert model.num_bytes - tables < 0.45 * 2 * model.num_parameters
    assert blocks.fits(BLOCK_TYPES["Q8_0"].form, 192, 64)


@pytest.mark.own_process  # it changes malloc, and other tests' free pages would change its figures
@pytest.mark.skipif(not able(), reason="no compiler for this machine")
def test_the_most_memory_while_a_file_is_read(tmp_path: Path) -> None:
    """Bug: what was read lived on beside what it was packed into, until garbage was collected."""
    status, refs = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    # Each larger piece gets pages of its own, which go when it is freed.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 64 << 10)

    def resident(key: str) -> int:
        (line_of_key,) = (line for line in status.read_text().splitlines() if line.startswith(key))
        return int(line_of_key.split()[1]) << 10

    def built(folder: Path) -> Model:
        config = ModelConfig.from_folder(folder)
        return build_model(config, torch.bfloat16, "cpu", kernels_for("cpu"))

    stored_config(tmp_path, "gguf", layers=6, hidden_size=1024, intermediate_size=2560)
    load_weights(built(tmp_path), None)  # kernels of these sizes are compiled, once, in memory
    gc.collect()
    model = built(tmp_path)
    sources = [source for parameter in model.parameters() for source in parameter.sources]
    zeros = {
        source.name: torch.zeros(
            source.shape, dtype=torch.float32 if len(source.shape) == 1 else torch.uint8
        )
        for source in sources
    }
    save_file(zeros, tmp_path / "model.safetensors")
    del zeros
    before = resident("VmRSS")
    try:
        refs.write_text("5")  # the peak begins anew
    except OSError:
        pytest.skip("this system does not tell the most memory since a moment")
    gc.disable()
    try:
        load_weights(model, tmp_path)
        most = resident("VmHWM") - before
    finally:
        gc.enable()
    # What was read and what it is packed into are twice as much together.
    assert 0.8 * model.num_bytes < most < 1.5 * model.num_bytes


@pytest.mark.parametrize("name", ["gguf", *SCHEMES])
def test_a_layout_goes_with_its_last_reference(name: str) -> None:
    """Bug: it held itself, and with it all that was read, until the collector ran."""
    part, device = whole(64, 128), torch.device("cpu")
    dropped = (
        GgufLayout(part, "Q4_0", device)
        if name == "gguf"
        else IntegerLayout(part, scheme(name), device)
    )
    gone = weakref.ref(dropped)
    gc.disable()
    try:
        del dropped
        assert gone() is None
    finally:
        gc.enable()


def test_rows_of_a_step_do_not_see_each_other(tmp_path: Path) -> None:
    """A text would depend on who else is served, and go on differently on another replica."""
    stored_config(tmp_path, "gguf")
    model = build_model(
        ModelConfig.from_folder(tmp_path), torch.bfloat16, "cpu", kernels_for("cpu")
    )
    load_weights(model, None)
    ids = [torch.arange(at, at + 9) for at in range(6)]
    paged = Paged(model, num_blocks=24)
    alone = [paged.run((text, [0, 1, 2], 8))[0] for text in ids]
    entries = [(text, list(range(3 * at, 3 * at + 3)), 8) for at, text in enumerate(ids)]
    for text, (_, blocks_of_text, _) in zip(ids, entries, strict=True):
        paged.run((text[:8], blocks_of_text, 0))
    # Each decode reads its own keys; those of `alone` were another's first eight, so compute anew.
    alone = [paged.run(entry)[0] for entry in entries]
    together = paged.run(*entries)
    for lone, other in zip(alone, together, strict=True):
        assert torch.equal(lone, other)


@pytest.mark.parametrize("kind", ["gptq", "packed"])
def test_made_up_scales_could_be_a_files(kind: Any) -> None:
    """Drawn like weights, one of millions is zero, which no start with made-up weights survived;
    others were no numbers of float16, which the fastest kernels want."""
    layout = IntegerLayout(whole(64, 64), Scheme(kind, 4, 32), torch.device("cpu"))
    parameter = layout.parameters[layout.scale_name]
    assert parameter.fill is not None
    parameter.fill(parameter.tensor, torch.Generator())
    assert bool((parameter.tensor > 0).all())
    assert torch.equal(parameter.tensor.half().float(), parameter.tensor)


def refused() -> Iterator[tuple[dict[str, Any], str]]:
    yield {"quant_method": "quanto"}, "quant_method.*quanto.*gguf, gptq"
    yield {"quant_method": "gptq", "bits": 3, "group_size": 128}, "bits: 3 is not supported"
    yield {"quant_method": "awq", "bits": 4, "group_size": 48}, "group_size: 48"
    yield {"quant_method": "awq", "bits": 4, "version": "gemv", "group_size": 64}, "version.*gemv"


@pytest.mark.parametrize(("values", "message"), list(refused()))
def test_what_is_not_supported_is_named(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Bug: a checkpoint whose numbers mean something else is read all the same."""
    stored_config(tmp_path, "gguf")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = values
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_folder(tmp_path)


def test_settings_that_contradict_the_checkpoint(tmp_path: Path) -> None:
    """Bug: int8 of what is in 4 bits, blocks of what has none, a device that cannot."""
    stored_config(tmp_path, "gguf")
    model = ModelConfig.from_folder(tmp_path)
    for name, device, message in (
        ("int8", "cpu", "weights are gguf IQ4_NL, Q4_0, Q4_1, Q5_1, Q8_0 already"),
        ("fp8", "cuda", "weights are gguf IQ4_NL, Q4_0, Q4_1, Q5_1, Q8_0 already"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_model(
                model,
                torch.bfloat16,
                "meta",
                kernels_for("cpu"),
                quantization=name,
                runs_on=device,
            )
    plain = replace(model, quantized=None)
    with pytest.raises(ConfigError, match=r"keeps the blocks of a .gguf file"):
        build_model(
            plain, torch.bfloat16, "meta", kernels_for("cpu"), quantization="gguf", runs_on="cpu"
        )
