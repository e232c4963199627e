"""The cases of measure.py for latent attention and recurrent layers.

Sizes are those of DeepSeek-V2-Lite, Qwen3-Next, Kimi Linear, Granite 4 H Small (Mamba-2) and LFM2
2.6B (short convolutions).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from bench.kernels.measure import OPERATIONS, KernelWork, copies_for
from bench.kernels.sizes import Sizes, meta_of
from kernels.dispatch import kernels_for
from kernels.metadata import AttentionMeta, KeptRun, KeptRuns, StateRuns
from kernels.recurrent.delta_rule import DeltaHeads, DeltaInputs
from kernels.recurrent.delta_rule_cuda import gated_delta
from kernels.recurrent.delta_verify_cuda import verify
from kernels.recurrent.delta_walk_cuda import verify_by_walks
from kernels.recurrent.mamba1 import Mamba1Inputs
from kernels.recurrent.mamba2 import Mamba2Heads

cuda = kernels_for("cuda")
HEADS, RANK, ROPE, NOPE, VALUE = 16, 512, 64, 128, 128
KEY_HEADS, VALUE_HEADS, SIZE, TAPS = 16, 32, 128, 4
MAMBA_HEADS, MAMBA_SIZE, STATE_SIZE = 128, 64, 128
MAMBA1_CHANNELS, MAMBA1_STATE = 8192, 16
LATE = 3  # maximum deferred updates of a delta rule's state; the next decode writes the state
SHORT, SHORT_TAPS = 2048, 3
# KV lengths of the requests
DECODES = {"64 x 4096": [4096] * 64, "1 x 32768": [32768]}


def latent_decode(s: Sizes, kv_len: list[int]) -> KernelWork:
    """Make a case of latent decodes with absorbed queries, and with the surrounding GEMMs.

    Bytes count each latent once for all heads.
    """
    num_bytes = float(sum(kv_len)) * (RANK + ROPE) * s.dtype.itemsize
    meta, num_blocks = meta_of(s, kv_len, [1] * len(kv_len), len(kv_len), 16)
    caches = [s.random(num_blocks, 1, 16, RANK + ROPE) for _ in range(copies_for(num_bytes))]
    cuda.prepare(meta, HEADS, caches[0], RANK)
    q, up = s.random(len(kv_len), HEADS, NOPE + ROPE), s.random(HEADS, NOPE + VALUE, RANK)
    calls = [partial(cuda.latent_attention, q, cache, up, 0.1, meta) for cache in caches]
    return KernelWork(calls, num_bytes)


def latent_prefill(s: Sizes, length: int) -> KernelWork:
    """Make a case of latent prefill.

    Operations count the expansion of latents to each head's keys and values, and attention.
    """
    meta, num_blocks = meta_of(s, [length], [length], 0, 16)
    meta.query_start_host, meta.kv_len_host = [0, length], [length]
    caches = [s.random(num_blocks, 1, 16, RANK + ROPE) for _ in range(2)]
    cuda.prepare(meta, HEADS, caches[0], RANK)
    q, up = s.random(length, HEADS, NOPE + ROPE), s.random(HEADS, NOPE + VALUE, RANK)
    calls = [partial(cuda.latent_attention, q, cache, up, 0.1, meta) for cache in caches]
    seen = length * (length + 1) / 2
    num_elements = length * RANK * (NOPE + VALUE)
    amount = 2.0 * HEADS * (num_elements + seen * (NOPE + ROPE + VALUE))
    return KernelWork(calls, amount, OPERATIONS)


def latent_chunk(s: Sizes, length: int, before: int) -> KernelWork:
    """Make a case of a chunk with absorbed queries, as in a CUDA graph.

    A CUDA graph cannot expand keys, because it does not know their number.
    """
    meta, num_blocks = meta_of(s, [before + length], [length], 0, 16)
    caches = [s.random(num_blocks, 1, 16, RANK + ROPE) for _ in range(2)]
    cuda.prepare(meta, HEADS, caches[0], RANK)
    q, up = s.random(length, HEADS, NOPE + ROPE), s.random(HEADS, NOPE + VALUE, RANK)
    calls = [partial(cuda.latent_attention, q, cache, up, 0.1, meta) for cache in caches]
    seen = length * before + length * (length + 1) / 2
    num_elements = length * RANK * (NOPE + VALUE)
    return KernelWork(calls, 2.0 * HEADS * (num_elements + seen * (2 * RANK + ROPE)), OPERATIONS)


def latent_write(s: Sizes, rows: int) -> KernelWork:
    meta, num_blocks = meta_of(s, [rows], [rows], 0, 16)
    width = (HEADS * (NOPE + ROPE) + RANK + ROPE) * s.dtype.itemsize
    q, latents = s.random(rows, HEADS, NOPE + ROPE), s.random(rows, RANK + ROPE)
    norm, cache = s.random(RANK), s.random(num_blocks, 1, 16, RANK + ROPE)
    angles = torch.randn(rows, ROPE, device=s.device)
    call = partial(cuda.latent_write, q, latents, norm, 1e-6, angles, cache, meta)
    return KernelWork([call] * 4, 2.0 * rows * width)


def _with_rows(s: Sizes, kv_len: list[int], query_len: list[int]) -> AttentionMeta:
    """Return a step's metadata with a separate state row for each request."""
    count, tokens = len(kv_len), sum(query_len)
    meta, _ = meta_of(s, kv_len, query_len, count if tokens == count else 0, 16)
    meta = replace(meta, rows=torch.arange(count, device=s.device))
    cuda.prepare(meta, 1, s.random(1, 1, 16, 16))
    return meta


def mamba2(s: Sizes, kv_len: list[int], query_len: list[int]) -> KernelWork:
    """Make a case of Mamba-2.

    Bytes count states and convolution tails, each read and written, and tokens.
    """
    count, tokens = len(kv_len), sum(query_len)
    meta = _with_rows(s, kv_len, query_len)
    channels = MAMBA_HEADS * MAMBA_SIZE + 2 * STATE_SIZE
    numbers = (torch.randn(MAMBA_HEADS, device=s.device) for _ in range(3))
    conv = torch.randn(channels, TAPS, device=s.device)
    limits = (0.0, float("inf"))
    heads = Mamba2Heads(MAMBA_HEADS, MAMBA_SIZE, 1, STATE_SIZE, conv, None, *numbers, limits)
    x, dt = s.random(tokens, channels), s.random(tokens, MAMBA_HEADS)
    tail = torch.zeros(count, TAPS - 1, channels, device=s.device)
    state = torch.zeros(count, MAMBA_HEADS, MAMBA_SIZE, STATE_SIZE, device=s.device)
    moved = 2.0 * (state.nbytes + tail.nbytes) + x.nbytes + 4.0 * tokens * MAMBA_HEADS * MAMBA_SIZE
    return KernelWork([partial(cuda.mamba2, x, dt, heads, tail, state, meta)] * 4, moved)


def mamba1(s: Sizes, kv_len: list[int], query_len: list[int]) -> KernelWork:
    """Make a case of Mamba-1. Bytes count states, read and written, and tokens."""
    count, tokens = len(kv_len), sum(query_len)
    meta = _with_rows(s, kv_len, query_len)
    x, dt = (torch.randn(tokens, MAMBA1_CHANNELS, device=s.device) for _ in range(2))
    b, c = (torch.randn(tokens, MAMBA1_STATE, device=s.device) for _ in range(2))
    rates = -torch.randn(MAMBA1_CHANNELS, MAMBA1_STATE, device=s.device).exp()
    skip = torch.randn(MAMBA1_CHANNELS, device=s.device)
    state = torch.zeros(count, MAMBA1_CHANNELS, MAMBA1_STATE, device=s.device)
    moved = 2.0 * state.nbytes + 6.0 * x.nbytes + b.nbytes + c.nbytes  # the gate is a second launch
    inputs = Mamba1Inputs(x, dt, b, c, rates, skip, x.clone(), state)
    return KernelWork([partial(cuda.mamba1, inputs, meta)] * 4, moved)


def gated_norm(s: Sizes, rows: int) -> KernelWork:
    """Make a case of the gated norm after Mamba-2."""
    inner = MAMBA_HEADS * MAMBA_SIZE
    tensor = torch.randn(rows, inner, device=s.device)
    gate, weight = s.random(rows, inner), torch.randn(inner, device=s.device)
    moved = tensor.nbytes + 2.0 * gate.nbytes
    return KernelWork([partial(cuda.gated_norm, tensor, gate, weight, 1, 1e-5)] * 4, moved)


def short_convolution(s: Sizes, kv_len: list[int], query_len: list[int]) -> KernelWork:
    count, tokens = len(kv_len), sum(query_len)
    meta = _with_rows(s, kv_len, query_len)
    x, conv = s.random(tokens, SHORT), torch.randn(SHORT, SHORT_TAPS, device=s.device)
    tail = torch.zeros(count, SHORT_TAPS - 1, SHORT, device=s.device)
    moved = 2.0 * tail.nbytes + x.nbytes + 4.0 * tokens * SHORT
    return KernelWork([partial(cuda.causal_conv, x, conv, None, tail, meta)] * 4, moved)


def _positions(meta: AttentionMeta, decodes: bool) -> list[AttentionMeta]:
    """Return the metadata of LATE + 1 steps.

    Prompts get the same metadata each time. Decodes grow by a token from step to step, so that one
    of the LATE + 1 steps writes the deferred updates into the states.
    """
    return [replace(meta, kv_len=meta.kv_len + later * decodes) for later in range(LATE + 1)]


def _states(state: Tensor, late: Tensor, decodes: bool) -> float:
    """Return the mean bytes of states that a step of `_positions` reads and writes.

    Decodes read the state and deferred updates. Prompts read and write the state once.
    """
    if not decodes:
        return 2.0 * state.nbytes
    # Over LATE + 1 steps, 0, 1, ... LATE deferred updates are read, LATE updates are written, and
    # the state is written once.
    return state.nbytes * (1 + 1 / (LATE + 1)) + late.nbytes * (0.5 + 1 / (LATE + 1))


def delta(
    s: Sizes, kv_len: list[int], query_len: list[int], deterministic: bool = False
) -> KernelWork:
    """Make a case of gated delta rules.

    Bytes count states (see `_states`), and the tokens' inputs and outputs.
    deterministic: prompts are computed token by token, too.
    """
    count, tokens = len(kv_len), sum(query_len)
    meta = _with_rows(s, kv_len, query_len)
    inputs = _delta_inputs(s, count, tokens)
    _, _, _, _, _, tail, state, late = inputs
    assert late is not None
    if deterministic:
        inputs = inputs._replace(pending_updates=None)
    calls = [
        partial(gated_delta, inputs, positions, deterministic)
        for positions in _positions(meta, tokens == count)
    ]
    moved = _states(state, late, tokens == count) + 2.0 * tail.nbytes + _activations(inputs)
    return KernelWork(calls, moved)


def _delta_inputs(s: Sizes, rows: int, tokens: int) -> DeltaInputs:
    """Return a layer's inputs, and its states for a number of rows."""
    channels = (2 * KEY_HEADS + VALUE_HEADS) * SIZE
    heads = DeltaHeads(
        KEY_HEADS,
        VALUE_HEADS,
        SIZE,
        SIZE,
        torch.randn(channels, TAPS, device=s.device),
        torch.randn(VALUE_HEADS, device=s.device),
        torch.randn(VALUE_HEADS, device=s.device),
        torch.randn(SIZE, device=s.device),
        1e-6,
    )
    sizes = (channels, VALUE_HEADS * SIZE, VALUE_HEADS, VALUE_HEADS)
    x, z, a, b = s.random(tokens, sum(sizes)).split(sizes, dim=1)
    tail = torch.zeros(rows, TAPS - 1, channels, device=s.device)
    state = torch.zeros(rows, VALUE_HEADS, SIZE, SIZE, device=s.device)
    late = torch.zeros(rows, VALUE_HEADS, LATE, 2 * SIZE + 4, device=s.device)
    return DeltaInputs(x, z, a, b, heads, tail, state, late)


def _activations(inputs: DeltaInputs) -> float:
    """Return the bytes of a delta rule's activations and outputs."""
    read = sum(part.numel() for part in inputs[:4])
    return float(read + inputs.z.numel()) * inputs.x.element_size()


def delta_drafts(s: Sizes, streams: int, drafts: int = 1, walks: bool = False) -> KernelWork:
    """Make a case of a layer in a step that verifies drafts, of which the last step's all passed.

    Bytes count states, read and written once, and activations.
    walks: whether the layer walks over the step's tokens, then over the accepted ones, as in
        deterministic mode.
    """
    length, position = drafts + 1, 1000
    tokens = streams * length
    inputs = _delta_inputs(s, streams, tokens)
    num_bytes = 2.0 * (inputs.state.nbytes + inputs.tail.nbytes) + _activations(inputs)
    layers = [
        inputs._replace(
            tail=inputs.tail.clone(),
            state=inputs.state.clone(),
            pending_updates=torch.zeros_like(inputs.pending_updates),
        )
        for _ in range(copies_for(num_bytes))
    ]
    # No entry decodes alone. Tokens of a run are adjacent, as in a step the drafts alone are.
    lone = _with_rows(s, [1] * tokens, [1] * tokens)
    lone = replace(lone, kv_len=torch.zeros_like(lone.kv_len))
    entries = [length] * streams
    meta = replace(_with_rows(s, [position + length] * streams, entries), by_token=True)
    order = torch.arange(tokens, device=s.device)
    numbers = [
        KeptRun(row, position, length, *[row * length + late for late in range(2)], length, 1,
                row * length, row, tokens + row * length, streams + row)
        for row in range(streams)
    ]  # fmt: skip
    run_memory = KeptRuns(tokens, streams)
    assert meta.rows is not None
    runs = StateRuns(
        order, lone, order, meta, meta.rows, order, True,
        kept=run_memory,
        numbers=s.ints([number for run in numbers for number in run]).view(streams, -1),
    )  # fmt: skip

    def call(layer: DeltaInputs) -> Tensor:
        runs.settles.clear()
        runs.replays.clear()
        if not walks:
            return verify(layer, runs)
        out = verify_by_walks(layer, runs)
        runs.replays[0](meta)
        return out

    if not walks:  # what the last step has kept
        call(layers[0])
        for memory in run_memory.layers[0]:
            memory.fill_(0.5)
    return KernelWork([partial(call, layer) for layer in layers], num_bytes)


def kimi(s: Sizes, kv_len: list[int], query_len: list[int]) -> KernelWork:
    """Make a case of Kimi Linear's delta rule, with as many key heads as value heads.

    Bytes are counted as in `delta`.
    """
    count, tokens = len(kv_len), sum(query_len)
    meta = _with_rows(s, kv_len, query_len)
    inner = VALUE_HEADS * SIZE
    heads = DeltaHeads(
        VALUE_HEADS,
        VALUE_HEADS,
        SIZE,
        SIZE,
        torch.randn(3 * inner, TAPS, device=s.device),
        torch.randn(VALUE_HEADS, device=s.device),
        torch.randn(inner, device=s.device),
        torch.randn(SIZE, device=s.device),
        1e-6,
        by_key=True,
    )
    x, b = s.random(tokens, 3 * inner + VALUE_HEADS).split((3 * inner, VALUE_HEADS), dim=1)
    z, a = s.random(tokens, inner), s.random(tokens, inner)
    tail = torch.zeros(count, TAPS - 1, 3 * inner, device=s.device)
    state = torch.zeros(count, VALUE_HEADS, SIZE, SIZE, device=s.device)
    late = torch.zeros(count, VALUE_HEADS, LATE, 3 * SIZE, device=s.device)
    inputs = DeltaInputs(x, z, a, b, heads, tail, state, late)
    calls = [
        partial(cuda.kimi_delta, inputs, positions)
        for positions in _positions(meta, tokens == count)
    ]
    moved = _states(state, late, tokens == count) + 2.0 * tail.nbytes
    moved += tokens * (6 * inner + VALUE_HEADS) * s.dtype.itemsize
    return KernelWork(calls, moved)


RECURRENT = {
    "delta": delta,
    "kimi": kimi,
    "mamba1": mamba1,
    "mamba2": mamba2,
    "short convolution": short_convolution,
}


def mixer_cases(s: Sizes) -> dict[str, Callable[[], KernelWork]]:
    cases: dict[str, Callable[[], KernelWork]] = {
        f"latent decode/{name}": partial(latent_decode, s, kv_len)
        for name, kv_len in DECODES.items()
    }
    cases["latent prefill/1 x 8192"] = partial(latent_prefill, s, 8192)
    cases["latent chunk of a graph/256 after 4096"] = partial(latent_chunk, s, 256, 4096)
    for rows in (1, 64, 256):
        cases[f"gated norm/{rows}"] = partial(gated_norm, s, rows)
        cases[f"rope and latent write/{rows}"] = partial(latent_write, s, rows)
        for name, work in RECURRENT.items():
            cases[f"{name} decode/{rows}"] = partial(work, s, [1000] * rows, [1] * rows)
    for name, work in RECURRENT.items():
        cases[f"{name} prefill/1 x 8192"] = partial(work, s, [8192], [8192])
    for streams in (1, 8, 32, 64):
        for name, walks in (("delta drafts", False), ("delta drafts by walks", True)):
            cases[f"{name}/{streams} x 2"] = partial(delta_drafts, s, streams, walks=walks)
    for drafts in (3, 7):
        cases[f"delta drafts/32 x {drafts + 1}"] = partial(delta_drafts, s, 32, drafts)
    cases["deterministic delta prefill/1 x 1024"] = partial(delta, s, [1024], [1024], True)
    return cases
