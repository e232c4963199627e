"""Generated kernels of recurrent layers against their rules in float64, and bit by bit the same
however a prompt was cut and whoever else is in the step."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, randn
from torch.nn.functional import silu

from kernels.cpu.codegen.processor import CompilerUnavailable, lanes
from kernels.dispatch import kernels_for
from kernels.metadata import AttentionMeta
from kernels.recurrent.delta_rule import DeltaHeads, DeltaInputs
from kernels.recurrent.mamba1 import Mamba1Inputs
from kernels.recurrent.mamba2 import Mamba2Heads
from kernels.reference import Kernels
from tests.kernels import rules

try:
    lanes()
except CompilerUnavailable as why:
    pytest.skip(f"no compiler: {why}", allow_module_level=True)

ROWS = 4
LIMITS = (0.1, 1.5)


@dataclass
class Layer:
    """A recurrent layer. widths: of a token's inputs. states: shapes of a row's states."""

    widths: tuple[int, ...]
    states: tuple[tuple[int, ...], ...]
    run: Callable[[Kernels, list[Tensor], list[Tensor], AttentionMeta], Tensor]
    rule: Callable[[list[Tensor], list[Tensor]], Tensor]


def delta(keys: int, values: int, key_size: int, value_size: int, taps: int) -> Layer:
    channels = 2 * keys * key_size + values * value_size
    how = DeltaHeads(
        keys, values, key_size, value_size, randn(channels, taps), randn(values), randn(values),
        randn(value_size), 1e-5, 2.0,
    )  # fmt: skip
    return Layer(
        (channels, values * value_size, values, values),
        ((taps - 1, channels), (values, key_size, value_size)),
        lambda kernels, rows, kept, meta: kernels.gated_delta(DeltaInputs(*rows, how, *kept), meta),
        lambda rows, kept: rules.delta(*rows, how, *kept),
    )


def kimi(heads: int, key_size: int, value_size: int, taps: int) -> Layer:
    channels = heads * (2 * key_size + value_size)
    how = DeltaHeads(
        heads, heads, key_size, value_size, randn(channels, taps), randn(heads),
        randn(heads * key_size), randn(value_size), 1e-5, by_key=True,
    )  # fmt: skip
    return Layer(
        (channels, heads * value_size, heads * key_size, heads),
        ((taps - 1, channels), (heads, key_size, value_size)),
        lambda kernels, rows, kept, meta: kernels.kimi_delta(DeltaInputs(*rows, how, *kept), meta),
        lambda rows, kept: rules.delta(*rows, how, *kept),
    )


def mamba2(heads: int, groups: int, size: int, state: int, biased: bool) -> Layer:
    channels = heads * size + 2 * groups * state
    bias = randn(channels) if biased else None
    how = Mamba2Heads(
        heads, size, groups, state, randn(channels, 4), bias, *randn(3, heads).unbind(), LIMITS
    )
    return Layer(
        (channels, heads),
        ((3, channels), (heads, size, state)),
        lambda kernels, rows, kept, meta: kernels.mamba2(*rows, how, *kept, meta).flatten(1),
        lambda rows, kept: rules.mamba2(*rows, how, *kept).flatten(1),
    )


def mamba1(channels: int, size: int) -> Layer:
    rates, skip = -randn(channels, size).exp(), randn(channels)
    return Layer(
        (channels, channels, size, size, channels),
        ((channels, size),),
        lambda kernels, rows, kept, meta: kernels.mamba1(
            Mamba1Inputs(*rows[:4], rates, skip, rows[4], *kept), meta
        ),
        lambda rows, kept: rules.mamba1(*rows[:4], rates, skip, *kept) * silu(rows[4]),
    )


def causal_conv(channels: int, taps: int, biased: bool) -> Layer:
    conv, bias = randn(channels, taps), randn(channels) if biased else None
    return Layer(
        (channels,),
        ((taps - 1, channels),),
        lambda kernels, rows, kept, meta: kernels.causal_conv(
            *rows, conv, bias, *kept, meta, silu=biased
        ),
        lambda rows, kept: (silu if biased else lambda x: x)(
            rules.convolution(*rows, conv, bias, *kept)
        ),
    )


def short_conv(channels: int, taps: int) -> Layer:
    conv = randn(channels, taps)
    return Layer(
        (channels,) * 3,
        ((taps - 1, channels),),
        lambda kernels, rows, kept, meta: kernels.short_conv(*rows, conv, None, *kept, meta),
        lambda rows, kept: rules.convolution(rows[0] * rows[1], conv, None, *kept) * rows[2],
    )


LAYERS: dict[str, Callable[[], Layer]] = {
    "delta": lambda: delta(2, 4, 32, 128, 4),
    "delta, odd": lambda: delta(1, 3, 13, 37, 2),
    "delta, wide": lambda: delta(1, 1, 6, 300, 4),
    "kimi": lambda: kimi(2, 32, 128, 4),
    "kimi, odd": lambda: kimi(3, 13, 37, 2),
    "mamba 2": lambda: mamba2(4, 2, 32, 64, True),
    "mamba 2, odd": lambda: mamba2(3, 1, 21, 12, False),
    "mamba 1": lambda: mamba1(64, 16),
    "mamba 1, odd": lambda: mamba1(37, 6),
    "mamba 1, wide": lambda: mamba1(21, 37),
    "convolution": lambda: causal_conv(530, 4, True),
    "convolution, odd": lambda: causal_conv(7, 2, False),
    "short convolution": lambda: short_conv(130, 3),
}


def step(rows: list[int], kv_len: list[int], query_len: list[int]) -> AttentionMeta:
    starts = torch.tensor([0, *query_len], dtype=torch.int32).cumsum(0).int()
    nothing = torch.zeros(1, dtype=torch.int32)
    decodes = next((at for at, count in enumerate(query_len) if count > 1), len(query_len))
    return AttentionMeta(
        positions=nothing, slots=nothing, query_start=starts,
        kv_len=torch.tensor(kv_len, dtype=torch.int32), block_table=nothing, num_decodes=decodes,
        max_kv_len=max(kv_len), rows=torch.tensor(rows),
    )  # fmt: skip


def brought(layer: Layer, tokens: int) -> list[Tensor]:
    """Return a layer's inputs as views of the rows of one tensor, as a GEMM gives them."""
    return list(randn(tokens, sum(layer.widths)).split(layer.widths, dim=1))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_cuts(name: str, deterministic: bool) -> None:
    """Bug: a state that is lost, or rounded otherwise, where a prompt was cut; a request that
    begins in another's state; a tail shorter than a chunk, or longer; lanes behind the last
    element; another entry's row."""
    torch.manual_seed(0)
    layer, kernels = LAYERS[name](), kernels_for("cpu", deterministic)
    rows = brought(layer, 135)
    want_kept = [torch.zeros(shape, dtype=torch.float64) for shape in layer.states]
    want = layer.rule([tensor.double() for tensor in rows], want_kept)

    def run(cuts: list[int], beside: bool) -> tuple[Tensor, list[Tensor]]:
        states = [torch.full((ROWS, *shape), torch.nan) for shape in layer.states]
        outputs, at = [], 0
        for count in cuts:
            own = [tensor[at : at + count] for tensor in rows]
            at += count
            if not beside:
                outputs.append(layer.run(kernels, own, states, step([2], [at], [count])))
                continue
            for tensor in states:
                tensor[0] = randn(tensor.shape[1:])
            inputs = [torch.cat(pair) for pair in zip(brought(layer, 1), own, strict=True)]
            other = brought(layer, 70)
            inputs = [torch.cat(pair) for pair in zip(inputs, other, strict=True)]
            meta = step([0, 2, 3], [9, at, 70], [1, count, 70])
            outputs.append(layer.run(kernels, inputs, states, meta)[1 : 1 + count])
        return torch.cat(outputs), [tensor[2] for tensor in states]

    whole, left = run([135], False)
    assert row_error(whole, want) < 1e-5
    for state, other in zip(left, want_kept, strict=True):
        assert row_error(state.flatten()[None], other.flatten()[None]) < 1e-6
    for cuts in ([135], [64, 71], [1, 2, 60, 65, 1, 1, 5]):
        for beside in (False, True):
            again, final_states = run(cuts, beside)
            assert torch.equal(again, whole), (cuts, beside)
            assert all(map(torch.equal, final_states, left)), (cuts, beside)


def row_error(found: Tensor, want: Tensor) -> float:
    error = (found.double() - want).norm(dim=-1) / want.norm(dim=-1)
    return float(error.nan_to_num(nan=float("inf")).max())


@pytest.mark.parametrize(("groups", "gate_last"), [(0, False), (1, True), (3, False), (3, True)])
def test_gated_norm(groups: int, gate_last: bool) -> None:
    """A part's mean that has another's elements; a gate of rows in longer ones; no norm at all."""
    torch.manual_seed(0)
    x, gate = randn(5, 300), randn(5, 400)[:, 20:320]
    weight = randn(300) if groups else None
    want = x.double() if gate_last else x.double() * silu(gate.double())
    parts = want.unflatten(1, (max(groups, 1), -1))
    if weight is not None:
        want = (parts / (parts.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(1) * weight
    want = want * silu(gate.double()) if gate_last else want
    output = kernels_for("cpu").gated_norm(x, gate, weight, max(groups, 1), 1e-5, gate_last)
    assert row_error(output, want) < 1e-6
