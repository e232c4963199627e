"""Launches of the kernels of recurrent layers."""

from dataclasses import replace

import torch

from kernels.metadata import AttentionMeta, KeptRun, KeptRuns, StateRuns
from kernels.norm import gated_norm
from kernels.recurrent.chunks_cuda import ENTRIES
from kernels.recurrent.convolution_cuda import causal_conv
from kernels.recurrent.delta_rule import DeltaHeads, DeltaInputs
from kernels.recurrent.delta_rule_cuda import gated_delta, kimi_delta
from kernels.recurrent.delta_verify_cuda import verify
from kernels.recurrent.delta_walk_cuda import verify_by_walks
from kernels.recurrent.mamba1 import Mamba1Inputs
from kernels.recurrent.mamba1_cuda import mamba1
from kernels.recurrent.mamba2 import Mamba2Heads
from kernels.recurrent.mamba2_cuda import mamba2
from tests.kernels.launches.sizes import int32, int64

# (key heads, value heads, key size, value size) of Qwen3.5-27B, Qwen3.5-0.8B and OLMo Hybrid 7B.
_DELTAS = {
    "llama-8b": (16, 48, 128, 128),
    "qwen3-0.6b": (16, 16, 128, 128),
    "smollm2-135m": (30, 30, 96, 192),
}
# (heads, head size, groups, elements of B) of Granite 4 H Small, Nemotron-H 8B and Falcon-H1 0.5B.
_MAMBAS = {
    "llama-8b": (128, 64, 1, 128),
    "qwen3-0.6b": (128, 64, 8, 128),
    "smollm2-135m": (24, 64, 1, 128),
}


def _meta(entries: int = 2) -> AttentionMeta:
    return AttentionMeta(
        int32(20), int64(20), int32(entries + 1), int32(entries), int32(entries, 40), 0, 600,
        counts=int32(2), rows=int32(entries),
    )  # fmt: skip


def _verify(inputs: DeltaInputs) -> None:
    """Launch steps that verify drafts of few and of many runs, and settle accepted tokens."""
    for count in (1, 10):
        runs = StateRuns(
            *(
                int64(20),
                replace(_meta(20), num_decodes=20),
                int64(20),
                replace(_meta(), by_token=True),
            ),
            *(int32(2), int64(20)),
            in_place=True,
            kept=KeptRuns(20, 10),
            numbers=int32(count, len(KeptRun._fields)),
        )
        verify(inputs, runs)
        assert runs.numbers is not None
        runs.settles[0](runs.numbers)
    if inputs.pending_updates is None:  # in deterministic mode
        verify_by_walks(inputs, runs)
        runs.replays[0](replace(_meta(4), by_token=True))


def delta(model: str) -> None:
    """Launch a step of Gated DeltaNet."""
    keys, values, key, value = _DELTAS[model]
    channels, inner = 2 * keys * key + values * value, values * value
    vector = torch.empty(values)
    conv, norm = torch.empty(channels, 4), torch.empty(value)
    heads = DeltaHeads(keys, values, key, value, conv, vector, vector, norm, 1e-6)
    whole = torch.empty(20, channels + inner + 2 * values, dtype=torch.bfloat16)
    x, z, b, a = whole.split((channels, inner, values, values), dim=1)
    tail, state = torch.empty(5, 3, channels), torch.empty(5, values, key, value)
    late = torch.empty(5, values, 3, key + value + 4)
    for decodes in (1, 19):  # several programs per head, and one with the head in several pieces
        some = replace(_meta(20), num_decodes=decodes)
        gated_delta(DeltaInputs(x, z, a, b, heads, tail, state, late), some)
    for prompts in range(1, ENTRIES + 1):
        gated_delta(DeltaInputs(x, z, a, b, heads, tail, state, late), _meta(prompts))
    gated_delta(DeltaInputs(x, z, a, b, heads, tail, state, late), replace(_meta(), by_token=True))
    gated_delta(DeltaInputs(x, z, a, b, heads, tail, state), _meta(), deterministic=True)
    for own in (None, late):
        _verify(DeltaInputs(x, z, a, b, heads, tail, state, own))


def kimi(model: str) -> None:
    """Launch a step of Kimi Delta Attention, with the heads of Kimi Linear."""
    heads, (_, _, key, value) = 32, _DELTAS[model]
    channels = heads * (2 * key + value)
    conv, vector, bias = torch.empty(channels, 4), torch.empty(heads), torch.empty(heads * key)
    how = DeltaHeads(
        heads, heads, key, value, conv, vector, bias, torch.empty(value), 1e-5, by_key=True
    )
    x, b = torch.empty(20, channels + heads, dtype=torch.bfloat16).split((channels, heads), 1)
    z, a = (torch.empty(20, heads * size, dtype=torch.bfloat16) for size in (value, key))
    tail, state = torch.empty(5, 3, channels), torch.empty(5, heads, key, value)
    late = torch.empty(5, heads, 3, 2 * key + value)
    for decodes in (1, 20):  # with prompts, and without
        some = replace(_meta(20), num_decodes=decodes)
        kimi_delta(DeltaInputs(x, z, a, b, how, tail, state, late), some)
    for prompts in range(1, ENTRIES + 1):
        kimi_delta(DeltaInputs(x, z, a, b, how, tail, state, late), _meta(prompts))
    kimi_delta(DeltaInputs(x, z, a, b, how, tail, state), _meta(), deterministic=True)
    _verify(DeltaInputs(x, z, a, b, how, tail, state, late))


def mamba(model: str) -> None:
    """Launch a step of Mamba-2."""
    heads, size, groups, elements = _MAMBAS[model]
    channels = heads * size + 2 * groups * elements
    vector = torch.empty(heads)
    conv, bias = torch.empty(channels, 4), torch.empty(channels)
    limits = (0.0, float("inf"))
    how = Mamba2Heads(heads, size, groups, elements, conv, bias, vector, vector, vector, limits)
    whole = torch.empty(20, channels + heads, dtype=torch.bfloat16)
    tail, state = torch.empty(5, 3, channels), torch.empty(5, heads, size, elements)
    for weight in (torch.empty(heads * size), None):
        gated_norm(torch.empty(3, heads * size), whole[:3, : heads * size], weight, groups, 1e-5)
    some = replace(_meta(), num_decodes=1)
    mamba2(whole[:, :channels], whole[:, channels:], how, tail, state, some)
    mamba2(whole[:, :channels], whole[:, channels:], how, tail, state, _meta(), deterministic=True)


def mamba_1(model: str) -> None:
    """Launch a step of Mamba-1, with 16 elements a channel, at the channels of Jamba's models."""
    channels = {"llama-8b": 16384, "qwen3-0.6b": 8192, "smollm2-135m": 5120}[model]
    dt = torch.empty(20, channels, dtype=torch.bfloat16)
    b = torch.empty(20, 16, dtype=torch.bfloat16)
    rates, skip = torch.empty(channels, 16), torch.empty(channels)
    mamba1(
        Mamba1Inputs(dt.float(), dt, b, b.clone(), rates, skip, dt, torch.empty(5, channels, 16)),
        _meta(),
    )


def convolution(model: str) -> None:
    """Launch LFM2's short convolution for a step with a prompt and for decodes, with and without a
    bias."""
    x, tail = torch.empty(20, 2048, dtype=torch.bfloat16), torch.empty(5, 2, 2048)
    conv = torch.empty(2048, 3)
    causal_conv(x, conv, None, tail, _meta())
    causal_conv(x[:2], conv, conv[:, 0].contiguous(), tail, _meta())
