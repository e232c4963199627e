"""Weights that checkpoints keep as 8-bit or 4-bit numbers: each layout bit for bit against its
method's formula, faults that must show, and files that are refused."""

import contextlib
import gc
import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.config.model_config import ModelConfig
from engine.config.quantized import Quantized, Scheme
from engine.config.quantized_config import read_quantized
from engine.config_reader import Reader
from engine.errors import ConfigError
from engine.evaluation.transformers_model import NoReference, _load
from engine.models.registry import build_model
from engine.quantization.layouts import byte_layouts
from engine.quantization.layouts.layout import Layout
from engine.quantization.method import Part
from engine.quantization.stored.base import layout_of
from engine.weights import load_weights
from kernels.cpu.gemm.blocks import PackedBlocks
from kernels.dispatch import kernels_for
from kernels.packed import PackedWeight
from tests.engine.test_memory import held
from tests.engine.weights.quantized_files import (
    FILES,
    POWERS,
    compressed,
    matrix,
    one_order,
)
from tests.engine.weights.test_stored_weights import build_on, logits, stored_config
from tests.kernels.cpu.test_blocks import bound
from tests.kernels.cpu.test_generated import able

OUT, WIDTH = 192, 320  # blocks of 128 divide neither
NAME = "model.layers.0.mlp.up_proj"
CPU = torch.device("cpu")


def quantized(values: dict[str, Any]) -> Quantized:
    read = read_quantized(Reader({"quantization_config": values}, "config.json"))
    assert read is not None
    return read


def scheme(name: str) -> Scheme:
    read = quantized(FILES[name])
    assert read.keeps("lm_head")
    of_matrix = read.scheme(NAME)
    assert of_matrix is not None
    return of_matrix


def made(kept: Scheme, part: Part) -> Layout:
    layout = layout_of(Quantized("test", (((".*",), kept),)), part, CPU)
    assert layout is not None
    return layout


def filled(
    kept: Scheme,
    tensors: dict[str, Tensor],
    rows: Any = (0, OUT),
    columns: tuple[int, int] = (0, WIDTH),
) -> Layout:
    layout = made(kept, Part("w", OUT, WIDTH, rows, columns))
    for parameter in layout.parameters.values():
        (source,) = parameter.sources
        tensor = tensors[parameter.name].flatten() if source.flat else tensors[parameter.name]
        tensor = tensor.unsqueeze(0) if not tensor.ndim else tensor
        if source.shorter:
            parameter.tensor[: len(tensor)] = tensor
        else:
            parameter.tensor.copy_(source.part_of(tensor))
    return layout


def weights(
    kept: Scheme,
    tensors: dict[str, Tensor],
    rows: Any = (0, OUT),
    columns: tuple[int, int] = (0, WIDTH),
) -> Tensor:
    layout = filled(kept, tensors, rows, columns)
    return torch.cat([*layout.values(128)])


@pytest.mark.parametrize("name", FILES)
def test_a_layout_goes_with_its_last_reference(name: str) -> None:
    """Else what was read is there beside what it is packed into."""
    made_once = made(scheme(name), Part("w", OUT, WIDTH, (0, OUT), (0, WIDTH)))
    gone = weakref.ref(made_once)
    gc.disable()
    try:
        del made_once
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("name", FILES)
def test_layouts_are_read_exactly(name: str) -> None:
    """Halves of bytes exchanged, a scale of the neighbour, divided where files multiply."""
    stored = scheme(name)
    tensors, want = matrix(stored, "w", OUT, WIDTH, name in POWERS)
    decoded = weights(stored, tensors)
    if name == "llm-int8":  # a product of three numbers, in another order
        torch.testing.assert_close(decoded, want, rtol=2e-7, atol=0)
    else:
        assert torch.equal(decoded, want)


def test_transformers_reads_the_same() -> None:
    """Bug: our formula is wrong twice, in the layout and in the test's own."""
    # Here, as they take three seconds of every process that collects tests.
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stored = replace(scheme("fp8-block"), rows=64, group=64)
    tensors, want = matrix(stored, "w", OUT, WIDTH)
    reader = Fp8Dequantize(SimpleNamespace())
    theirs = reader._dequantize_one(
        tensors["w.weight"], tensors["w.weight_scale_inv"], torch.float32
    )
    assert torch.equal(weights(stored, tensors), theirs) and torch.equal(theirs, want)
    stored = scheme("compressed-mxfp4")
    tensors, want = matrix(stored, "w", OUT, WIDTH)
    blocks = tensors["w.weight_packed"].view(1, OUT, WIDTH // 32, 16)
    scales = tensors["w.weight_scale"].view(1, OUT, WIDTH // 32)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)[0].T
    assert torch.equal(weights(stored, tensors), theirs) and torch.equal(theirs, want)


@pytest.mark.parametrize("group", [48, 80, 160])
def test_blocks_that_no_product_has(group: int) -> None:
    """Bug: blocks of 80 inputs end in an assertion where 80 divides the matrix's width."""
    stored = replace(scheme("fp8-block"), rows=64, group=group)
    tensors, want = matrix(stored, "w", OUT, WIDTH)
    assert torch.equal(weights(stored, tensors), want)


def test_rows_of_a_matrix() -> None:
    """Bug: rows that are taken in another order have the scales of the first ones."""
    order = np.random.default_rng(0).permutation(OUT)[:96]
    for name in ("fp8-block", "compressed-fp8-dynamic", "compressed-nvfp4", "compressed-w8a8"):
        stored = scheme(name)
        tensors, want = matrix(stored, "w", OUT, WIDTH)
        assert torch.equal(weights(stored, tensors, order), want[torch.from_numpy(order)])
        assert torch.equal(weights(stored, tensors, (64, 192)), want[64:])


@pytest.mark.parametrize("name", FILES)
def test_a_rank_s_part(name: str) -> None:
    """Bugs: scales or zero points of the first rank's groups on all, a group's border off by one, a
    matrix whose whole rows are looked for in a part's tensors, inputs in another order that are of
    groups which this rank does not have."""
    stored = scheme(name)
    tensors, want = matrix(stored, "w", OUT, WIDTH, name in POWERS)
    width = next(at for at in (64, 96, 128) if at % (stored.group or 32) == 0)
    for rows, columns in (
        ((OUT // 2, OUT), (0, WIDTH)),
        ((0, OUT), (0, width)),
        ((0, OUT), (width, WIDTH)),
        ((8, 72), (width, WIDTH)),
    ):
        for parameter in filled(stored, tensors, rows, columns).parameters.values():
            assert parameter.sources[0].fits(tuple(tensors[parameter.name].shape)), parameter.name
        decoded = weights(stored, tensors, rows, columns)
        expected = want[slice(*rows), slice(*columns)]
        torch.testing.assert_close(decoded, expected, rtol=2e-7, atol=0)


@pytest.mark.parametrize(
    ("name", "rows", "columns", "message"),
    [
        ("auto-round", (0, OUT), (0, 48), "inputs 0 to 48 .* 32 together"),
        ("compressed-nvfp4", (0, OUT), (0, 48), "inputs 0 to 48 .* 32 together"),
        ("nf4", (0, OUT), (0, 96), "inputs 0 to 96 .* 64 together"),
        ("fp8-block", (0, OUT), (16, WIDTH), f"inputs 16 to {WIDTH} .* 32 together"),
        ("gptq-ordered", (0, 12), (0, WIDTH), "outputs 0 to 12 .* 8 together"),
    ],
)
def test_what_a_rank_cannot_have(
    name: str, rows: tuple[int, int], columns: tuple[int, int], message: str
) -> None:
    """Bug: a part that begins inside of a group has another group's scale, or fails with a
    shape."""
    part = Part("w", OUT, WIDTH, rows, columns)
    with pytest.raises(ConfigError, match=f"tensor w: a rank would have {message}") as error:
        made(scheme(name), part)
    assert error.value.param == "tensor_parallel"


def _exchanged(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    exchanged = {
        key: (tensor >> 4) | (tensor << 4)
        for key, tensor in tensors.items()
        if key.endswith(("weight", "weight_packed")) and tensor.dtype == torch.uint8
    }
    return {**tensors, **exchanged}


def _rolled(dim: int) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    def roll(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        rolled = dict(tensors)
        for key in ("weight_scale", "weight_scale_inv", "SCB", "weight.absmax", "qzeros"):
            scale = tensors.get(f"w.{key}")
            if scale is not None and scale.ndim:
                raw = scale.view(torch.uint8) if scale.itemsize == 1 else scale
                rolled[f"w.{key}"] = raw.roll(1, min(dim, scale.ndim - 1)).view(scale.dtype)
        return rolled

    return roll


def _signs(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    key = "w.weight" if "w.weight" in tensors else "w.weight_packed"
    raw = tensors[key]
    return {**tensors, key: (raw.view(torch.uint8) ^ 128).view(raw.dtype)}


Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]
FAULTS: dict[str, tuple[tuple[str, ...], Change]] = {
    "halves exchanged": (
        ("compressed-nvfp4", "modelopt-nvfp4", "compressed-mxfp4", "nf4", "nf4-nested"),
        _exchanged,
    ),
    "the next group's scale": (
        ("compressed-nvfp4", "compressed-mxfp4", "fp8-block", "nf4", "nf4-nested", "gptq-ordered"),
        _rolled(1),
    ),
    "the next row's scale": (
        ("compressed-w8a8", "compressed-fp8-dynamic", "llm-int8", "fp8-block-e8m0"),
        _rolled(0),
    ),
    "signs": (("compressed-w8a8", "modelopt-fp8", "fp8-tensor", "compressed-fp8-static"), _signs),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_shows(fault: str) -> None:
    """The comparison above would let it pass."""
    names, change = FAULTS[fault]
    for name in names:
        stored = scheme(name)
        tensors, want = matrix(stored, "w", OUT, WIDTH, name in POWERS)
        assert not torch.allclose(weights(stored, change(tensors)), want), name


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("compressed-nvfp4", {"divides": False}),
        ("modelopt-nvfp4", {"divides": True}),
        ("gptq-ordered", {"ordered": False}),
        ("gptq-ordered", {"zeros_less_one": False}),
        ("auto-round", {"zeros_less_one": False}),
        ("fp8-block", {"group": 64}),
        ("fp8-block", {"rows": 64}),
        ("compressed-mxfp4", {"group": 64}),
        ("compressed-w8a8", {"kind": "llm-int8"}),
    ],
)
def test_another_convention_shows(name: str, change: dict[str, Any]) -> None:
    """A convention that is not the file's, a group's border elsewhere."""
    stored = scheme(name)
    tensors, want = matrix(stored, "w", OUT, WIDTH)
    other = replace(stored, **change)
    with contextlib.suppress(RuntimeError, ConfigError, KeyError):  # shapes that do not fit
        assert not torch.allclose(weights(other, tensors), want)


def test_a_bias_of_powers_of_two_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """E8M0 with a bias of 128, and its NaN taken for a number."""
    mxfp4 = scheme("compressed-mxfp4")
    tensors, want = matrix(mxfp4, "w", OUT, WIDTH)
    right = byte_layouts.powers_of_two
    powers = right(torch.tensor([0, 1, 126, 127, 254, 255], dtype=torch.uint8))
    assert powers[:5].tolist() == [2.0**-127, 2.0**-126, 0.5, 1.0, 2.0**127]
    assert bool(powers[5].isnan())
    monkeypatch.setattr(byte_layouts, "powers_of_two", lambda stored: right(stored - 1))
    assert not torch.allclose(weights(mxfp4, tensors), want)


def broken() -> list[tuple[str, str, Callable[[Tensor], Tensor], str]]:
    """Return (name of the file, tensor, change of it, part of the message) of each damage."""

    def with_first(value: float) -> Callable[[Tensor], Tensor]:
        def change(tensor: Tensor) -> Tensor:
            flat = tensor.clone().flatten()
            flat[0] = value
            return flat.view(tensor.shape)

        return change

    nan = float("nan")
    return [
        (
            "fp8-block",
            "weight_scale_inv",
            with_first(nan),
            "weight_scale_inv: a scale is NaN",
        ),
        (
            "fp8-block",
            "weight_scale_inv",
            with_first(0.0),
            "weight_scale_inv: a scale is zero",
        ),
        ("fp8-block", "weight", with_first(nan), r"w\.weight: holds NaN"),
        ("compressed-w8a8", "weight_scale", with_first(0.0), "weight_scale: a scale is zero"),
        (
            "compressed-nvfp4",
            "weight_global_scale",
            with_first(0.0),
            "weight_global_scale: .* zero",
        ),
        ("modelopt-nvfp4", "weight_scale_2", with_first(nan), "weight_scale_2: .* NaN"),
        ("modelopt-nvfp4", "weight_scale", with_first(nan), "weight_scale: a scale is NaN"),
        ("compressed-mxfp4", "weight_scale", with_first(255), "weight_scale: a scale is NaN"),
        ("gptq-ordered", "g_idx", with_first(10), "g_idx: there are groups 0 to 9"),
        ("auto-round", "scales", with_first(0.0), "scales: a scale is zero"),
        ("nf4", "weight.quant_map", with_first(0.5), "quant_map: is not the table of NF4"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4", with_first(0), "cannot be read"),
    ]


@pytest.mark.parametrize(("name", "key", "change", "message"), broken())
def test_broken_tensors_are_named(
    name: str, key: str, change: Callable[[Tensor], Tensor], message: str
) -> None:
    """Bug: a damaged file is served, and its tokens are noise."""
    stored = scheme(name)
    tensors, _ = matrix(stored, "w", OUT, WIDTH)
    tensors[f"w.{key}"] = change(tensors[f"w.{key}"])
    with pytest.raises(ConfigError, match=message):
        weights(stored, tensors)


# ---- Whole models --------------------------------------------------------------------------------


def folder_of(folder: Path, name: str) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Write a small model in files of this method; return its configuration and exact weights."""
    stored_config(folder, FILES[name], tied=False)
    config = ModelConfig.from_folder(folder)
    quantization = config.quantized
    assert quantization is not None
    plain = build_model(
        replace(config, quantized=None), torch.bfloat16, "meta", kernels_for("cpu"), runs_on="cpu"
    )
    tensors: dict[str, Tensor] = {}
    exact: dict[str, Tensor] = {}
    torch.manual_seed(1)
    for parameter in plain.parameters():
        for source in parameter.sources:
            ours = source.name.removesuffix(".weight")
            if len(source.shape) == 1 or quantization.keeps(ours) or "embed" in ours:
                tensors[source.name] = torch.randn(source.shape).bfloat16()
                exact[ours] = tensors[source.name].float()
            else:
                how = quantization.scheme(ours)
                assert how is not None
                encoded, exact[ours] = matrix(how, ours, *source.shape, name in POWERS)
                tensors |= {key: tensor.contiguous() for key, tensor in encoded.items()}
    tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.tensor(1.0)
    save_file(tensors, folder / "model.safetensors")
    return config, exact


QUICK = ("fp8-block",)


@pytest.mark.parametrize("runs_on", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FILES],
)
def test_a_model(name: str, runs_on: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Tensors beside the weights that are taken for unexpected ones, a head looked for in bytes,
    sums of memory that do not know the format, made-up weights that are not finite."""
    config, exact = folder_of(tmp_path, name)
    stored = scheme(name)
    made_up = build_on(runs_on, config)
    load_weights(made_up, None)
    assert logits(made_up).isfinite().all()
    model = build_on(runs_on, config)
    load_weights(model, tmp_path)
    packed = orders = 0
    for linear in model.linears():
        want = torch.cat([exact[part.name] for part in linear.spec.parts])
        x = torch.randn(3, want.shape[1])
        off = (linear.forward(x) - x.double() @ want.double().T).abs()
        rounded = x.double().abs() @ want.double().abs().T / 128  # to bfloat16, where expanded
        assert (off <= bound(x, want.double()) + rounded).all()
        pieces = getattr(linear.state, "pieces", ())
        packed += sum(isinstance(piece.state, PackedBlocks | PackedWeight) for piece in pieces)
        if stored.ordered:  # parts with an order each are counted as if they had one
            orders += held(linear.state) - linear.num_bytes
    if runs_on == "cuda" or able():
        expanded = stored.kind == "sparse" or (runs_on == "cpu" and stored.kind in ("fp8", "nf4"))
        assert bool(packed) != expanded
        assert ("are dequantised to" in caplog.text) == expanded
    assert logits(model).isfinite().all()
    assert model.num_bytes + orders == held(model)


@pytest.mark.parametrize("runs_on", ["cpu", "cuda"])
@pytest.mark.parametrize("orders", ["alike", "unequal groups"])
def test_inputs_in_another_order(
    orders: str,
    runs_on: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Parts of a layer with the same order that are multiplied apart; a group that has more inputs
    than another one cut as if they were equal."""

    def unequal(width: int, generator: Any) -> Tensor:
        return torch.arange(width) // 2

    monkeypatch.setattr(torch, "randperm", one_order if orders == "alike" else unequal)
    config, exact = folder_of(tmp_path, "gptq-ordered")
    model = build_on(runs_on, config)
    load_weights(model, tmp_path)
    alike = orders == "alike" and (runs_on == "cuda" or able())
    assert ("are dequantised to" in caplog.text) != alike
    for linear in model.linears():
        want = torch.cat([exact[part.name] for part in linear.spec.parts])
        x = torch.randn(3, want.shape[1])
        off = (linear.forward(x) - x.double() @ want.double().T).abs()
        rounded = x.double().abs() @ want.double().abs().T / 128  # to bfloat16, where expanded
        assert (off <= bound(x, want.double()) + rounded).all()
        if pieces := getattr(linear.state, "pieces", ()):
            assert len(pieces) == 1 and (pieces[0].order is not None) == alike
    assert model.num_bytes == held(model) or not alike


def test_an_error_names_the_file(tmp_path: Path) -> None:
    """Bug: of fifty shards, which one is damaged is not said."""
    config, _ = folder_of(tmp_path, "fp8-block")
    from safetensors.torch import load_file

    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    key = "model.layers.1.mlp.down_proj.weight_scale_inv"
    tensors[key][0, 0] = float("inf")
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=rf"model\.safetensors: tensor {key} holds NaN or inf"):
        load_weights(build_on("cpu", config), tmp_path)
    tensors[key][0, 0] = 0
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=rf"model\.safetensors: tensor {key}: a scale is zero"):
        load_weights(build_on("cpu", config), tmp_path)
    tensors[key] = torch.ones(3, 3)
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=rf"model\.safetensors: tensor {key} has shape \[3, 3\]"):
        load_weights(build_on("cpu", config), tmp_path)
    del tensors[key]
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=rf"tensor {key} is missing"):
        load_weights(build_on("cpu", config), tmp_path)
    tensors[key.removesuffix("_scale_inv")] = torch.ones(64, 128).bfloat16()
    tensors[key] = torch.ones(1, 1)
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=r"dtype BF16, config\.json implies F8_E4M3"):
        load_weights(build_on("cpu", config), tmp_path)


def test_transformers_is_not_asked(tmp_path: Path) -> None:
    """Bug: `manta verify` ends in a traceback of transformers' products of two dtypes."""
    config, _ = folder_of(tmp_path, "fp8-block")
    with pytest.raises(NoReference, match="weights are fp8, FP8 by 128 x 128"):
        _load(tmp_path, config, torch.float32, "eager")


# ---- config.json ---------------------------------------------------------------------------------


def test_layers_that_differ() -> None:
    """Bug: one scheme for all layers, an ignored module quantised, a regular expression taken for a
    name, names of a model around the text model that match nothing."""
    int4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    values = compressed("pack-quantized", int4)
    values["config_groups"]["group_1"] = {
        "targets": ["re:.*down_proj$", "model.layers.3.self_attn.o_proj"],
        "format": "float-quantized",
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
    }
    values["ignore"] = ["lm_head", "re:.*layers\\.2\\..*", "model.language_model.layers.4.mlp"]
    checkpoint = quantized(values)

    def kind(name: str) -> str | None:
        stored = checkpoint.scheme(name)
        return None if stored is None else stored.kind

    assert kind("model.layers.0.mlp.up_proj") == "packed"
    assert kind("model.layers.0.mlp.down_proj") == "fp8"
    assert kind("model.layers.0.mlp.down_proj_b") == "packed"
    assert kind("model.layers.3.self_attn.o_proj") == "fp8"
    assert kind("model.layers.13.self_attn.o_proj") == "packed"
    assert kind("model.layers.2.mlp.down_proj") is None
    assert kind("model.layers.4.mlp.up_proj") is None
    assert kind("model.layers.14.mlp.up_proj") == "packed"
    assert checkpoint.name == "compressed-tensors, FP8, 4 bits"

    dynamic = {
        r"-:.*\.o_proj": {},
        r"+:.*\.layers\.1\..*": {"bits": 8, "group_size": 64},
    }
    checkpoint = quantized(
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": dynamic}
    )
    assert checkpoint.keeps("model.layers.1.self_attn.o_proj")
    eight = checkpoint.scheme("model.layers.1.mlp.up_proj")
    four = checkpoint.scheme("model.layers.11.mlp.up_proj")
    assert eight is not None and four is not None
    assert (eight.bits, eight.group, four.bits, four.group) == (8, 64, 4, 128)

    mixed = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {
            "model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
            "model.layers.0.mlp.down_proj": {"quant_algo": "FP8"},
        },
    }
    checkpoint = quantized(mixed)
    assert kind("model.layers.0.mlp.up_proj") == "nvfp4"
    assert kind("model.layers.0.mlp.down_proj") == "fp8"
    assert kind("model.layers.1.mlp.down_proj") is None


def test_other_names_of_the_same() -> None:
    """Bugs: a version that transformers 5 writes under another key is read as the first, whose zero
    points are one less; an order that has two names is taken for none; Meta's own FP8 files."""
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False}
    for key, version, less_one in (
        ("format", "gptq_v2", False),
        ("checkpoint_format", "GPTQ_V2", False),
        ("format", "gptq", True),
    ):
        stored = quantized({**gptq, key: version}).scheme("model.layers.0.mlp.up_proj")
        assert stored is not None and stored.zeros_less_one is less_one
    assert quantized({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "GEMM"})
    for actorder, ordered in (
        ("group", True), ("dynamic", True), ("weight", False), ("static", False), (None, False),
    ):  # fmt: skip
        int4 = {"num_bits": 4, "type": "int", "group_size": 128, "actorder": actorder}
        stored = quantized(compressed("pack-quantized", int4)).scheme("model.layers.0.mlp.up_proj")
        assert stored is not None and stored.ordered is ordered
    meta = {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["model.layers.0.mlp.up_proj"]}
    checkpoint = quantized({**meta, "activation_scale_ub": 1200.0})
    assert checkpoint.keeps("model.layers.0.mlp.up_proj") and checkpoint.keeps("lm_head")
    assert checkpoint.ignores("model.layers.1.mlp.up_proj.input_scale_ub")
    fp8 = checkpoint.scheme("model.layers.1.mlp.up_proj")
    assert fp8 is not None and (fp8.kind, fp8.rows, fp8.group, fp8.activations) == ("fp8", 1, 0, 8)


def test_rotations_that_weights_have() -> None:
    """Bug: a file whose activations go through a transform first is served without it."""
    values = compressed("pack-quantized", {"num_bits": 4, "group_size": 128})
    groups = {"R1": {"type": "hadamard", "apply": [{"location": "weight_output"}]}}
    assert quantized({**values, "transform_config": {"config_groups": groups}})
    groups["R4"] = {"type": "hadamard", "apply": [{"location": "input"}]}
    with pytest.raises(ConfigError, match="transform_config: R4: transforms at 'input' are not"):
        quantized({**values, "transform_config": {"config_groups": groups}})


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("compressed-w8a8", 8),
        ("compressed-w8a8-static", 8),
        ("compressed-fp8-dynamic", 8),
        ("compressed-fp8-block", 16),
        ("modelopt-fp8", 8),
        ("fp8-tensor", 8),
        ("llm-int8", 16),
    ],
)
def test_activations_are_as_the_file_says(name: str, bits: int) -> None:
    """Bug: inputs are rounded for a file of weights alone, whose makers took them as they come; or
    are not for one that was made so."""
    stored = scheme(name)
    assert stored.activations == bits
    assert made(stored, Part("w", 128, 256, (0, 128), (0, 256))).form.activations == bits


def test_floats_beside_whole_numbers() -> None:
    """Bug: weights in 8-bit floats, whose inputs are to be integers, are multiplied by floats."""
    inputs = {"num_bits": 8, "type": "int", "strategy": "token"}
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    checkpoint = quantized(compressed("float-quantized", weights, input_activations=inputs))
    stored = checkpoint.scheme("model.layers.0.mlp.up_proj")
    assert stored is not None and stored.activations == 16


def test_modelopt_beside_config(tmp_path: Path) -> None:
    """Bug: a folder whose config.json says nothing is read as 16 bits, and refused."""
    stored_config(tmp_path, "gguf")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ModelConfig.from_folder(tmp_path).quantized is None
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    checkpoint = ModelConfig.from_folder(tmp_path).quantized
    assert checkpoint is not None and checkpoint.name == "modelopt, FP8"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt.*e5m2"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size: \[128\]"),
    ({"quant_method": "fp8", "weight_block_size": [128, 24]}, "weight_block_size.*multiples of 16"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo.*W4A8_AWQ"),
    (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
        "bnb_4bit_quant_type.*fp4",
    ),
    ({"quant_method": "bitsandbytes"}, "load_in_4bit: neither"),
    (
        {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:exllamav2"},
        "packing_format.*exllamav2",
    ),
    (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"},
        "checkpoint_format.*marlin",
    ),
    (
        {
            **compressed("pack-quantized", {"num_bits": 4, "group_size": 128}),
            "sparsity_config": {"format": "sparse-24-bitmask"},
        },
        "sparse-24-bitmask' of weights in 4 bits is not supported",
    ),
    (
        {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-bitmask"}},
        "sparsity_config: format: .*sparse-bitmask",
    ),
    (
        {
            "quant_method": "compressed-tensors",
            "sparsity_config": {"format": "sparse-24-bitmask", "sparsity_structure": "8:16"},
        },
        "sparsity_structure: .*8:16",
    ),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version.*gemv"),
    ({"quant_method": "awq", "bits": 4, "format": "gemv_fast"}, "format.*gemv_fast"),
    ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "bits: 3 is not supported"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 48}, "group_size: 48 is not supported"),
    ({"quant_method": "hqq", "bits": 4}, "quant_method.*hqq"),
    (compressed("marlin-24", {"num_bits": 4, "group_size": 128}), "marlin-24.*sparse-24-bitmask"),
    (
        compressed("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
        "symmetric: zero points",
    ),
    (
        {**compressed("float-quantized", {"num_bits": 8, "type": "float"}), "ignore": ["re:("]},
        "strategy.*group|no regular expression",
    ),
]


@pytest.mark.parametrize(("values", "message"), REFUSED)
def test_what_is_not_supported_is_named(values: dict[str, Any], message: str) -> None:
    """Bug: a checkpoint whose numbers mean something else is read all the same."""
    with pytest.raises(ConfigError, match=message):
        quantized(values)
