"""Steps of drafts of Gated DeltaNet and Kimi Delta Attention on CUDA, without copies of states.

A run is a request's decode and its drafts. A step's launch reads the state of each run once and
writes it once. First it applies the accepted tokens of the request's last run, and writes that
state. Then it computes this step's tokens on the state in registers, and keeps their updates in
memory of the layer (`kernels.metadata.KeptRuns`). So a rejected token is never part of a state in
memory. An update is a normalised key, a correction and a decay, so it is applied without the
convolution and without sums over a state.

The inputs of the convolution are kept with the updates: the last inputs before the run, and the
run's own. The launch reads what the last step has kept, and writes to the memory's other half.
Programs that share a head or a key head therefore need not wait for each other, except for the norm
of results.

If a request has no drafts in the next step, `settle` applies its accepted tokens before the step.
"""

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from kernels.launch.pdl import gdc_launch_dependents, gdc_wait, num_sms, pdl
from kernels.metadata import KeptRuns, StateRuns
from kernels.recurrent.chunks_cuda import softplus
from kernels.recurrent.convolution_cuda import comes_last, tickets
from kernels.recurrent.delta_rule import DeltaHeads, DeltaInputs
from kernels.recurrent.delta_rule_cuda import by_token, weights_of
from kernels.recurrent.delta_walk_cuda import applied, decay_of, head_channels, normed_result
from kernels.recurrent.sizes import delta_sizes, late_sizes


class VerifyLaunch(NamedTuple):
    columns: int  # columns of a state that a program has in registers
    num_warps: int


def verify_launch(programs: int, sms: int, values: int) -> VerifyLaunch:
    """Return a verification's launch parameters, those of decodes (`decode_launch`).

    programs: runs * heads. values: padded columns of a state.
    """
    if 2 * programs <= sms:
        return VerifyLaunch(min(16, values), 1)
    return VerifyLaunch(min(32, values), 2)


@triton.jit
def _inputs_before(
    tail, inputs, behind, accepted, begun, channels, mask, CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
):  # fmt: skip
    """Load the convolution's inputs before a run, one vector per tap but the last, oldest first.

    With accepted tokens these are rows of `inputs` from `behind` on, else rows of the tail.

    inputs: the kept inputs of all runs.
    begun: positive if the tail has inputs of the request; else it counts as zeros.
    """
    seen = ()
    from_run = mask & (accepted + channels * 0 > 0)
    old = mask & (accepted + channels * 0 == 0) & (begun + channels * 0 > 0)
    for place in tl.static_range(TAPS - 1):
        before = tl.load(tail + place * CHANNELS + channels, mask=old, other=0.0)
        own = tl.load(inputs + (behind + place) * CHANNELS + channels, mask=from_run, other=0.0)
        seen += (before + own.to(tl.float32),)
    return seen


@triton.jit
def _store_rows(rows, into, channels, mask, CHANNELS: tl.constexpr, TAPS: tl.constexpr):
    """Store vectors of some channels as rows of a matrix with CHANNELS columns."""
    for place in tl.static_range(TAPS - 1):
        at = into + place * CHANNELS + channels
        tl.store(at, rows[place].to(into.dtype.element_ty), mask=mask)


@triton.jit
def _mixed(before, own, weights, TAPS: tl.constexpr):
    """Return SiLU of some channels' convolution.

    before: the inputs of all taps but the last. own: the token's inputs.
    """
    total = own * weights[TAPS - 1]
    if TAPS > 1:
        total = before[0] * weights[0]
        for tap in tl.static_range(1, TAPS - 1):
            total += before[tap] * weights[tap]
        total += own * weights[TAPS - 1]
    return total * tl.sigmoid(total)


@triton.jit
def _moved(before, own, TAPS: tl.constexpr):
    """Return the inputs before the next token: those before this one but the oldest, and its
    own."""
    moved = ()
    for place in tl.static_range(1, TAPS - 1):
        moved += (before[place],)
    if TAPS > 1:
        moved += (own,)
    return moved


@triton.jit
def _kept_update(at, dims, key_mask, of_decay, decay_mask, columns, value_mask, KEY: tl.constexpr,
                 VALUE: tl.constexpr, there):  # fmt: skip
    """Load a kept update: its key, correction and decay.

    there: positive if the update exists; otherwise zeros and a decay of 1 are returned.
    """
    key = tl.load(at + dims, mask=key_mask & (there + dims * 0 > 0), other=0.0)
    value = tl.load(at + KEY + columns, mask=value_mask & (there + columns * 0 > 0), other=0.0)
    decay = tl.load(at + KEY + VALUE + of_decay, mask=decay_mask & (there > 0), other=1.0)
    return key, value, decay


# 20 parameters or more: 25 are tensors and numbers of the launch, and constants are in a struct.
@triton.jit(
    do_not_specialize=["x_stride", "z_stride", "a_stride", "b_stride"],
    do_not_specialize_on_alignment=["runs", "a", "b"],
)
def _delta_verify_kernel(
    x,
    z,
    a,
    b,
    conv,
    decay,
    bias,
    norm,
    tail,
    state,
    late,  # pending updates, as in `_delta_decode_kernel`
    out,
    partial,  # [tokens, VALUE_HEADS, VALUES] float32: results before their norm, if PARTS > 1
    updates,  # [2 * KeptRuns.tokens, VALUE_HEADS, UPDATE] float32: key, correction and decay
    inputs,  # [rows, CHANNELS], inputs of the convolution: those before a run, and the run's
    arrived,  # [runs * VALUE_HEADS], from `tickets`
    runs,  # [runs, NUMBERS] int32, `KeptRuns.numbers`
    eps,
    x_stride,
    z_stride,
    a_stride,
    b_stride,
    SIZES: tl.constexpr,  # `DeltaSizes`
    COLUMNS: tl.constexpr,  # columns of a state that a program has
    LATE: tl.constexpr,
    ENTRY: tl.constexpr,
    UPDATE: tl.constexpr,  # elements of a kept update
    NUMBERS: tl.constexpr,
    WALKS: tl.constexpr,  # False: `settle`, with all columns of a state in one program
    PDL: tl.constexpr,
):
    PARTS: tl.constexpr = SIZES.value_columns // COLUMNS
    SHARED: tl.constexpr = SIZES.value_heads // SIZES.key_heads
    entry = tl.program_id(0)
    head = tl.program_id(1)
    part = tl.program_id(2)
    dims = tl.arange(0, SIZES.key_columns)
    columns = part * COLUMNS + tl.arange(0, COLUMNS)
    key_mask = dims < SIZES.key_dim
    value_mask = columns < SIZES.value_dim
    of_q, of_k, of_v = head_channels(
        head, dims, columns, SIZES.key_heads, SIZES.value_heads, SIZES.key_dim, SIZES.value_dim
    )
    rate, of_decay, decay_mask, shift = decay_of(
        decay, bias, head, dims, SIZES.key_dim, SIZES.by_key
    )
    of_kept_decay = dims * (1 if SIZES.by_key else 0)
    if not SIZES.by_key:
        of_kept_decay = 0
    if WALKS:
        q_weights = weights_of(conv, of_q, key_mask, SIZES.taps)
        k_weights = weights_of(conv, of_k, key_mask, SIZES.taps)
        v_weights = weights_of(conv, of_v, value_mask, SIZES.taps)
        scale = tl.load(norm + columns, mask=value_mask, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    runs += entry * NUMBERS
    row = tl.load(runs).to(tl.int64)
    position = tl.load(runs + 1)  # tokens of the request before this run
    length = tl.load(runs + 2)
    first = tl.load(runs + 3).to(tl.int64)  # the decode's token in the step
    drafts = tl.load(runs + 4).to(tl.int64)  # the first draft's
    accepted = tl.load(runs + 5)  # accepted tokens of the last run
    whole = tl.load(runs + 6)  # whether the state in memory has all pending updates
    last_update = tl.load(runs + 7).to(tl.int64)  # the last run's first update
    kept_inputs = last_update + tl.load(runs + 8).to(tl.int64) * (SIZES.taps - 1)
    own = tl.load(runs + 9).to(tl.int64)  # this run's first update
    own_inputs = own + tl.load(runs + 10).to(tl.int64) * (SIZES.taps - 1)
    if length + accepted == 0:  # no run
        return
    begun = position - accepted  # tokens in the state in memory and its pending updates
    tail += row * (SIZES.taps - 1) * SIZES.channels
    state += (row * SIZES.value_heads + head) * SIZES.key_dim * SIZES.value_dim
    tile = dims[:, None] * SIZES.value_dim + columns[None, :]
    tile_mask = key_mask[:, None] & value_mask[None, :]
    matrix = tl.load(state + tile, mask=tile_mask & (begun + tile * 0 > 0), other=0.0)
    at = updates + (last_update * SIZES.value_heads + head) * UPDATE
    key, value, factor = _kept_update(
        at, dims, key_mask, of_kept_decay, decay_mask, columns, value_mask, SIZES.key_dim,
        SIZES.value_dim, accepted,
    )  # fmt: skip
    behind = kept_inputs + accepted
    q_before = _inputs_before(
        tail, inputs, behind, accepted, begun, of_q, key_mask, SIZES.channels, SIZES.taps
    )
    k_before = _inputs_before(
        tail, inputs, behind, accepted, begun, of_k, key_mask, SIZES.channels, SIZES.taps
    )
    v_before = _inputs_before(
        tail, inputs, behind, accepted, begun, of_v, value_mask, SIZES.channels, SIZES.taps
    )
    if WALKS:
        q_own = tl.load(x + first * x_stride + of_q, mask=key_mask, other=0.0).to(tl.float32)
        k_own = tl.load(x + first * x_stride + of_k, mask=key_mask, other=0.0).to(tl.float32)
        v_own = tl.load(x + first * x_stride + of_v, mask=value_mask, other=0.0).to(tl.float32)
        step = tl.load(a + first * a_stride + of_decay, mask=decay_mask, other=0.0)
        step = step.to(tl.float32)
        beta = tl.load(b + first * b_stride + head).to(tl.float32)
    if LATE:
        late += (row * SIZES.value_heads + head) * LATE * ENTRY
        since = tl.where(whole > 0, 0, begun % (LATE + 1))
        matrix = applied(
            matrix, late, since, dims, columns, SIZES.key_dim, SIZES.value_dim, LATE, ENTRY,
            SIZES.by_key, not WALKS,
        )  # fmt: skip
    for replayed in range(accepted):
        at += SIZES.value_heads * UPDATE
        next_key, next_value, next_factor = _kept_update(
            at, dims, key_mask, of_kept_decay, decay_mask, columns, value_mask, SIZES.key_dim,
            SIZES.value_dim, accepted - 1 - replayed,
        )  # fmt: skip
        matrix = matrix * (factor[:, None] if SIZES.by_key else factor)
        matrix += key[:, None] * value[None, :]
        key, value, factor = next_key, next_value, next_factor
    tl.store(state + tile, matrix, mask=tile_mask & (accepted + tile * 0 > 0))
    if not WALKS:
        # nobody reads the old tail, as there are accepted tokens
        _store_rows(v_before, tail, of_v, value_mask, SIZES.channels, SIZES.taps)
        if head % SHARED == 0:
            _store_rows(q_before, tail, of_q, key_mask, SIZES.channels, SIZES.taps)
            _store_rows(k_before, tail, of_k, key_mask, SIZES.channels, SIZES.taps)
    else:
        writes_keys = (head % SHARED == 0) & (part == 0)
        inputs += own_inputs * SIZES.channels
        _store_rows(v_before, inputs, of_v, value_mask, SIZES.channels, SIZES.taps)
        if writes_keys:
            _store_rows(q_before, inputs, of_q, key_mask, SIZES.channels, SIZES.taps)
            _store_rows(k_before, inputs, of_k, key_mask, SIZES.channels, SIZES.taps)
        inputs += (SIZES.taps - 1) * SIZES.channels
        updates += (own * SIZES.value_heads + head) * UPDATE
        token = first
        for ago in range(length):
            # the next token's inputs are loaded while this one is computed
            following = drafts + ago
            more = ago + 1 < length
            key_next = key_mask & (more & (dims >= 0))
            value_next = value_mask & (more & (columns >= 0))
            q_next = tl.load(x + following * x_stride + of_q, mask=key_next, other=0.0)
            k_next = tl.load(x + following * x_stride + of_k, mask=key_next, other=0.0)
            v_next = tl.load(x + following * x_stride + of_v, mask=value_next, other=0.0)
            step_next = tl.load(
                a + following * a_stride + of_decay, mask=decay_mask & more, other=0.0
            )
            beta_next = tl.load(b + following * b_stride + head, mask=more, other=0.0)
            if PARTS == 1:
                gate = tl.load(
                    z + token * z_stride + head * SIZES.value_dim + columns, mask=value_mask,
                    other=0.0,
                )  # fmt: skip
            q = _mixed(q_before, q_own, q_weights, SIZES.taps)
            k = _mixed(k_before, k_own, k_weights, SIZES.taps)
            v = _mixed(v_before, v_own, v_weights, SIZES.taps)
            q = q * (tl.rsqrt(tl.sum(q * q, axis=0) + 1e-6) * SIZES.key_dim**-0.5)
            k = k * tl.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
            factor = tl.exp(-rate * softplus(step + shift))
            matrix = matrix * (factor[:, None] if SIZES.by_key else factor)
            by_k = tl.sum(matrix * k[:, None], axis=0)
            by_q = tl.sum(matrix * q[:, None], axis=0)
            wrong = (v - by_k) * (SIZES.most * tl.sigmoid(beta))
            results = by_q + tl.sum(q * k, axis=0) * wrong
            matrix += k[:, None] * wrong[None, :]
            tl.store(updates + SIZES.key_dim + columns, wrong, mask=value_mask)
            if part == 0:
                tl.store(updates + dims, k, mask=key_mask)
                tl.store(
                    updates + SIZES.key_dim + SIZES.value_dim + of_kept_decay, factor,
                    mask=decay_mask,
                )  # fmt: skip
            tl.store(inputs + of_v, v_own.to(inputs.dtype.element_ty), mask=value_mask)
            if writes_keys:
                tl.store(inputs + of_q, q_own.to(inputs.dtype.element_ty), mask=key_mask)
                tl.store(inputs + of_k, k_own.to(inputs.dtype.element_ty), mask=key_mask)
            inputs += SIZES.channels
            updates += SIZES.value_heads * UPDATE
            if PARTS == 1:
                normed = normed_result(
                    results[None, :], scale[None, :], gate[None, :], eps, SIZES.value_dim,
                    SIZES.by_key,
                )  # fmt: skip
                into = out + (token * SIZES.value_heads + head) * SIZES.value_dim + columns
                tl.store(into[None, :], normed.to(out.dtype.element_ty), mask=value_mask[None, :])
            else:
                into = partial + (token * SIZES.value_heads + head) * SIZES.value_columns
                tl.store(into + columns, results)
            q_before = _moved(q_before, q_own, SIZES.taps)
            k_before = _moved(k_before, k_own, SIZES.taps)
            v_before = _moved(v_before, v_own, SIZES.taps)
            q_own, k_own = q_next.to(tl.float32), k_next.to(tl.float32)
            v_own = v_next.to(tl.float32)
            step, beta = step_next.to(tl.float32), beta_next.to(tl.float32)
            token = following
        if PARTS > 1:  # noqa: SIM102
            if comes_last(arrived + entry * SIZES.value_heads + head, PARTS):
                every = tl.arange(0, SIZES.value_columns)[None, :]
                there = every < SIZES.value_dim
                scales = tl.load(norm + every, mask=there, other=0.0)
                token = first
                for ago in range(length):
                    at_head = token * SIZES.value_heads + head
                    # Bypass L1, which may not have other multiprocessors' writes.
                    results = tl.load(
                        partial + at_head * SIZES.value_columns + every, cache_modifier=".cg"
                    )
                    gates = tl.load(
                        z + token * z_stride + head * SIZES.value_dim + every, mask=there,
                        other=0.0,
                    )  # fmt: skip
                    normed = normed_result(
                        results, scales, gates, eps, SIZES.value_dim, SIZES.by_key
                    )
                    into = out + at_head * SIZES.value_dim + every
                    tl.store(into, normed.to(out.dtype.element_ty), mask=there)
                    token = drafts + ago


def verify(inputs: DeltaInputs, runs: StateRuns) -> Tensor:
    """Return the outputs of decodes and of runs of drafts, [num_tokens, value_heads * value_size].

    One launch computes decodes without drafts. Another launch advances the runs' states by their
    last accepted tokens, and computes the runs. A function that advances states without computing
    a run is added to `runs.settles`.
    """
    assert runs.kept is not None and runs.numbers is not None
    layer = _layer(runs.kept, len(runs.settles), inputs)
    out = inputs.x.new_empty(inputs.x.shape[0], inputs.heads.value_heads * inputs.heads.value_size)
    by_token(inputs, out, runs.others_meta, prompts=False)
    _launch(inputs, out, layer, runs.numbers)
    # The activations are not read again, so CUDA graphs may reuse their memory.
    heads, states = inputs.heads, inputs[5:]
    runs.settles.append(lambda numbers: settle(heads, states, layer, numbers))
    return out


def settle(
    heads: DeltaHeads,
    states: Sequence[Tensor | None],
    layer: tuple[Tensor, Tensor],
    numbers: Tensor,
) -> None:
    """Advance states by the accepted tokens of their last runs, and write tails.

    states: tails, states and pending updates.
    layer: the updates and inputs that the runs have kept, one of `KeptRuns.layers`.
    numbers: like `StateRuns.numbers`, with runs of length 0.
    """
    nothing = layer[1][:, :1]  # no element is read
    tail, state, late = states
    assert tail is not None and state is not None
    inputs = DeltaInputs(nothing, nothing, nothing, nothing, heads, tail, state, late)
    _launch(inputs, None, layer, numbers)


def _layer(kept: KeptRuns, number: int, inputs: DeltaInputs) -> tuple[Tensor, Tensor]:
    """Return a layer's memory for updates and inputs of runs, allocated at the first call."""
    heads = inputs.heads
    if number == len(kept.layers):
        decays = heads.key_size if heads.by_key else 4  # 4: a multiple of 16 bytes
        update = heads.key_size + heads.value_size + decays
        channels, taps = heads.conv.shape
        rows = 2 * (kept.tokens + kept.runs * (taps - 1))
        updates = inputs.state.new_empty(2 * kept.tokens, heads.value_heads, update)
        kept.layers.append((updates, inputs.x.new_empty(rows, channels)))
    return kept.layers[number]


def _launch(
    inputs: DeltaInputs, out: Tensor | None, layer: tuple[Tensor, Tensor], numbers: Tensor
) -> None:
    x, z, a, b, heads, tail, state, late = inputs
    values = triton.next_power_of_2(heads.value_size)
    sizes = delta_sizes(heads, triton.next_power_of_2(heads.key_size), values)
    runs = len(numbers)
    launch = VerifyLaunch(values, 4 if sizes.key_columns * values <= 128 * 128 else 16)
    if out is not None:
        launch = verify_launch(runs * heads.value_heads, num_sms(state.device), values)
    parts, partial = values // launch.columns, state
    if parts > 1:
        partial = state.new_empty(len(x), heads.value_heads, values)
    updates, kept_inputs = layer
    _delta_verify_kernel[(runs, heads.value_heads, parts)](
        x,
        z,
        a,
        b,
        *(heads.conv, heads.decay, heads.bias, heads.norm),
        tail,
        state,
        late,
        out,
        partial,
        updates,
        kept_inputs,
        tickets(state.device, runs * heads.value_heads),
        numbers,
        heads.eps,
        *(x.stride(0), z.stride(0), a.stride(0), b.stride(0)),
        SIZES=sizes,
        COLUMNS=launch.columns,
        **late_sizes(late),
        UPDATE=updates.shape[2],
        NUMBERS=numbers.shape[1],
        WALKS=out is not None,
        num_warps=launch.num_warps,
        **pdl(state.device),
    )
