"""Damaged quantised folders: each error names the tensor and the file, or the key."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.config.model_config import ModelConfig
from engine.errors import ConfigError
from engine.models.registry import build_model
from engine.quantization.layouts.layout import IntegerLayout
from engine.quantization.method import Part
from engine.quantization.stored.base import layout_of
from engine.weights import load_weights
from kernels.dispatch import kernels_for
from kernels.packed import unpacked
from tests.engine.process.test_packed_ranks import description, made
from tests.engine.weights.test_byte_layouts import quantized
from tests.engine.weights.test_stored_weights import integers, scheme, whole

UP = "model.layers.0.mlp.up_proj"
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "head_dim": 16}
Change = Callable[[Tensor], Tensor]


def value(number: float) -> Change:
    def change(tensor: Tensor) -> Tensor:
        flat = tensor.clone().flatten()
        flat[0] = number
        return flat.view(tensor.shape)

    return change


def cut(dim: int) -> Change:
    return lambda tensor: tensor.narrow(dim, 0, tensor.shape[dim] // 2).contiguous()


def load(folder: Path) -> None:
    config = ModelConfig.from_folder(folder)
    load_weights(build_model(config, torch.bfloat16, "cpu", kernels_for("cpu")), folder)


NAN = float("nan")
# format, tensor, what is done to it (None: it is gone), what is said of it
BROKEN: list[tuple[str, str, Change | None, str]] = [
    ("compressed-zeros", "weight_scale", None, "missing"),
    ("gptq", "scales", None, "missing"),
    ("compressed-w8a8", "weight_scale", None, "missing"),
    ("compressed-zeros", "weight_zero_point", None, "missing"),
    ("gptq", "scales", cut(0), "shape"),
    ("awq", "qzeros", cut(0), "shape"),
    ("compressed-zeros", "weight_scale", cut(1), "shape"),
    ("compressed-w8a8", "weight_scale", cut(0), "shape"),
    ("compressed-mxfp4", "weight_scale", cut(1), "shape"),
    ("nf4", "weight.absmax", cut(0), "shape"),
    ("gptq", "scales", value(0.0), "a scale is zero"),
    ("awq", "scales", value(NAN), "NaN or infinity"),
    ("compressed-w8a8", "weight_scale", value(0.0), "a scale is zero"),
    ("compressed-w8a8", "weight_scale", value(NAN), "NaN or infinity"),
    ("fp8-block", "weight_scale_inv", value(float("inf")), "NaN or infinity"),
]
QUICK = (0, 6, 12)


@pytest.mark.parametrize(
    ("name", "key", "change", "message"),
    [
        pytest.param(*case, marks=[] if number in QUICK else [pytest.mark.slow])
        for number, case in enumerate(BROKEN)
    ],
)
def test_the_tensor_and_the_file_are_named(
    name: str, key: str, change: Change | None, message: str, tmp_path: Path
) -> None:
    """Bug: a folder that was half copied, or made by a faulty tool, is served and answers with
    noise; or an error that says a shape and no name."""
    folder = made(tmp_path / "model", name, **SMALL)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    load(folder)
    broken = f"{UP}.{key}"
    if change is None:
        del tensors[broken]
    else:
        tensors[broken] = change(tensors[broken])
    save_file(tensors, file)
    with pytest.raises(ConfigError) as error:
        load(folder)
    said = error.value.message
    assert broken in said and message in said, said
    assert str(folder) in said, said


@pytest.mark.parametrize(
    ("name", "width", "message"),
    [
        ("gptq", 96, r"down_proj: a matrix of 64 times 96 with groups of 64 is not supported"),
        ("compressed-zeros", 96, "groups must divide rows"),
        ("compressed-w8a8", 72, "rows of 72 inputs are not supported, only multiples of 32"),
        ("compressed-nvfp4", 72, "rows of 72 inputs are not supported, only multiples of 32"),
        ("nf4", 96, "rows of 96 inputs are not supported, only multiples of 64"),
    ],
)
def test_rows_that_groups_do_not_divide(name: str, width: int, message: str) -> None:
    """Bug: the last inputs are left out, or read from the next row."""
    part = Part("model.layers.0.mlp.down_proj", 64, width, (0, 64), (0, width))
    with pytest.raises(ConfigError, match=message):
        layout_of(quantized(description(name)), part, torch.device("cpu"))


def _shifts(read: IntegerLayout, words: Tensor, shifts: list[int] | None) -> list[int]:
    bits = read._scheme.bits
    return shifts or list(range(0, 32, bits))


def _reversed(read: Any, words: Tensor, shifts: list[int] | None = None) -> Tensor:
    return UNPACKED(read, words, _shifts(read, words, shifts)[::-1])


def _neighbours(read: Any, words: Tensor, shifts: list[int] | None = None) -> Tensor:
    every = _shifts(read, words, shifts)
    return UNPACKED(read, words, [*every[1:], every[0]])


def _high_first(read: Any, words: Tensor, shifts: list[int] | None = None) -> Tensor:
    every = _shifts(read, words, shifts)
    pairs = [every[at ^ 1] for at in range(len(every))]
    return UNPACKED(read, words, pairs)


UNPACKED = IntegerLayout._unpacked


@pytest.mark.parametrize("fault", [_reversed, _neighbours, _high_first])
@pytest.mark.parametrize("name", ["gptq", "gptq-8", "awq", "compressed", "compressed-zeros"])
def test_an_order_of_fields_shows(name: str, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exact comparisons would let fields in another order pass."""
    stored = scheme(name)
    tensors, weight = integers(stored, "w", 64, 128)

    def read() -> Tensor:
        layout = IntegerLayout(whole(64, 128), stored, torch.device("cpu"))
        for parameter in layout.parameters.values():
            parameter.tensor.copy_(tensors[parameter.name])
        return torch.cat([unpacked(layout.form, decoded) for decoded in layout.decoded(20)])

    assert torch.equal(read(), weight)
    monkeypatch.setattr(IntegerLayout, "_unpacked", fault)
    assert not torch.equal(read(), weight)


@pytest.mark.parametrize("name", ["gptq", "awq", "compressed-zeros"])
@pytest.mark.parametrize("fault", ["transposed zeros", "a group's border off by one"])
def test_zeros_and_groups_show(name: str, fault: str) -> None:
    """The exact comparisons would let zero points of another output, or scales that begin an input
    late, pass."""
    stored = scheme(name)
    tensors, weight = integers(stored, "w", 64, 128)
    layout = IntegerLayout(whole(64, 128), stored, torch.device("cpu"))
    for parameter in layout.parameters.values():
        parameter.tensor.copy_(tensors[parameter.name])
    (codes, scale, offset) = next(layout.decoded(64))
    assert offset is not None
    if fault == "transposed zeros":
        offset = offset.t().reshape(offset.shape)
        wrong = unpacked(layout.form, (codes, scale, offset))
    else:
        per_input = [
            values.repeat_interleave(layout.form.group, 1).roll(1, 1) for values in (scale, offset)
        ]
        plain = unpacked(layout.form, (codes, torch.ones_like(scale), torch.zeros_like(offset)))
        wrong = (plain + per_input[1]) * per_input[0]
    assert not torch.equal(wrong, weight)
