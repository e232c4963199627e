"""Specs of the linear layers of quantised experts.

Each expert has two separate linear layers, or two linear layers have all experts of a layer.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from engine.quantization.method import ExpertsSpec, LinearSpec, Part
from engine.weights.parameter import Parameter, Source


class TwoLinears(NamedTuple):
    """The specs of the experts' two linear layers: gate and up together, and down."""

    gate_up: LinearSpec
    down: LinearSpec


def each_expert(spec: ExpertsSpec) -> list[TwoLinears]:
    """Return the two linear layers of each expert, with their biases."""
    all_of = (
        (spec.gate_up, bool(spec.gate_up_bias), "gate_up"),
        (spec.down, bool(spec.down_bias), "down"),
    )
    layers = []
    for number in range(spec.count):
        both = []
        for sources, bias, what in all_of:
            per_expert = len(sources) // spec.count
            parts = tuple(
                _part(source) for source in sources[number * per_expert : (number + 1) * per_expert]
            )
            name = f"{spec.name}.{number}.{what}"
            both.append(LinearSpec(name, parts, bias, spec.dtype, spec.device))
        layers.append(TwoLinears(*both))
    return layers


def all_experts(spec: ExpertsSpec) -> TwoLinears:
    """Return two linear layers, without biases, in which all experts are stacked along rows."""
    up, down = (tuple(_part(source) for source in sources) for sources in (spec.gate_up, spec.down))
    return TwoLinears(
        LinearSpec(f"{spec.name}.gate_up", up, False, spec.dtype, spec.device),
        LinearSpec(f"{spec.name}.down", down, False, spec.dtype, spec.device),
    )


def biases(
    spec: ExpertsSpec,
) -> tuple[tuple[Tensor | None, Tensor | None], Sequence[Parameter]]:
    """Allocate the biases [experts, rows] of gate and up, and of down; None without biases.

    Returns (biases, parameters that loading fills).
    """
    biases: list[Tensor | None] = []
    parameters = []
    for what, sources in (("gate_up_bias", spec.gate_up_bias), ("down_bias", spec.down_bias)):
        if not sources:
            biases.append(None)
            continue
        rows = spec.one_gate_up.out_features if what == "gate_up_bias" else spec.hidden
        tensor = torch.empty(spec.count, rows, dtype=spec.dtype, device=spec.device)
        parameters.append(Parameter(f"{spec.name}.{what}", tensor.flatten(), sources))
        biases.append(tensor)
    return (biases[0], biases[1]), parameters


def biases_bytes(spec: ExpertsSpec) -> int:
    rows = spec.one_gate_up.out_features * bool(spec.gate_up_bias)
    rows += spec.hidden * bool(spec.down_bias)
    return spec.count * rows * spec.dtype.itemsize


def apart(spec: LinearSpec) -> LinearSpec:
    """Return the spec of a layer without the bias, which is loaded separately."""
    return replace(spec, bias=False)


def _part(source: Source) -> Part:
    shape = source.shape if source.at is None else source.shape[1:]
    out, width = shape[::-1] if source.transpose else shape
    return Part(
        source.name.removesuffix(".weight"),
        out,
        width,
        (0, out) if source.rows is None else source.rows,
        source.columns or (0, width),
        source.transpose,
        None if source.at is None else (source.at, source.shape[0]),
    )
