"""Gated DeltaNet in plain torch (arXiv 2412.06464), as `kernels.reference.Kernels.gated_delta` says
it: the oracle of every back end.

A head's state is a matrix from keys to values. Each token lets it decay, and puts right what it
gives for the token's key. Tokens of one request follow each other; decodes of several are one
batch. A prompt is computed 64 tokens at a time: what each of these corrects depends on those before
it by a triangular system, whose solution needs no loop over tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from kernels.metadata import AttentionMeta

CHUNK = 64
_EPS = 1e-6  # of the length that queries and keys are divided by


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """key_heads of key_size elements, for queries too; value_heads of value_size, several of which
    share a key head. conv [channels, taps] float32: of queries, keys and values, in this order.
    decay, bias [value_heads] float32: A_log and dt_bias."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    conv: Tensor
    decay: Tensor
    bias: Tensor


def gated_delta(
    x: Tensor, a: Tensor, b: Tensor, heads: DeltaHeads, tail: Tensor, state: Tensor,
    meta: AttentionMeta,
) -> Tensor:  # fmt: skip
    """See `Kernels.gated_delta`."""
    assert meta.rows is not None
    starts = meta.query_start_host or meta.query_start.tolist()
    lengths = meta.kv_len_host or meta.kv_len.tolist()
    rows = meta.rows
    out = x.new_empty(len(x), heads.value_heads, heads.value_size, dtype=torch.float32)
    log_decay = -heads.decay.exp() * softplus(a.float() + heads.bias)
    beta = b.float().sigmoid()
    count = meta.num_decodes
    if count:
        first = meta.kv_len[:count] == 1
        step = _decodes(
            x[:count].float(), log_decay[:count], beta[:count], heads, tail, state, rows[:count],
            first,
        )  # fmt: skip
        out[:count] = step
    for entry in range(count, len(lengths)):
        begin, end = starts[entry], starts[entry + 1]
        if begin == end:
            continue
        row = int(rows[entry])
        if lengths[entry] == end - begin:  # the request begins
            tail[row] = 0
            state[row] = 0
        mixed = torch.cat((tail[row], x[begin:end].float()))
        tail[row] = mixed[len(mixed) - tail.shape[1] :]
        q, k, v = _heads(_convolved(mixed, heads.conv), heads)
        q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        g, weight = log_decay[begin:end].t(), beta[begin:end].t()
        for at in range(0, end - begin, CHUNK):
            some = slice(at, at + CHUNK)
            found, state[row] = chunk_rule(
                q[:, some], k[:, some], v[:, some], g[:, some], weight[:, some], state[row]
            )
            out[begin + at : begin + at + found.shape[1]] = found.transpose(0, 1)
    out[starts[-1] :] = 0
    return out


def _convolved(mixed: Tensor, conv: Tensor) -> Tensor:
    """mixed [taps - 1 + n, channels] -> [n, channels]; the last tap is the token's own."""
    taps = conv.shape[1]
    count = len(mixed) - (taps - 1)
    total = mixed[:count] * conv[:, 0]
    for tap in range(1, taps):
        total.addcmul_(mixed[tap : tap + count], conv[:, tap])
    return silu(total)


def _heads(mixed: Tensor, heads: DeltaHeads) -> tuple[Tensor, Tensor, Tensor]:
    """[n, channels] -> queries and keys of length 1 (queries less by the root of their size) and
    values, [n, value_heads, size] each."""
    keys = heads.key_heads * heads.key_size
    q, k, v = mixed.split((keys, keys, heads.value_heads * heads.value_size), dim=1)
    shared = heads.value_heads // heads.key_heads

    def unit(x: Tensor) -> Tensor:
        x = x.unflatten(1, (heads.key_heads, heads.key_size))
        x = x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _EPS)
        return x.repeat_interleave(shared, dim=1)

    q = unit(q) * heads.key_size**-0.5
    return q, unit(k), v.unflatten(1, (heads.value_heads, heads.value_size))


def _decodes(
    x: Tensor, log_decay: Tensor, beta: Tensor, heads: DeltaHeads, tail: Tensor, state: Tensor,
    rows: Tensor, first: Tensor,
) -> Tensor:  # fmt: skip
    """A token of each of several requests. first [n]: it is the request's first."""
    before = tail.index_select(0, rows)
    before[first] = 0
    mixed = torch.cat((before, x[:, None]), dim=1)
    tail[rows] = mixed[:, 1:]
    q, k, v = _heads(silu((mixed * heads.conv.t()).sum(1)), heads)
    own = state.index_select(0, rows)
    own[first] = 0
    own *= log_decay.exp()[..., None, None]
    wrong = (v - (k[..., None, :] @ own)[..., 0, :]) * beta[..., None]
    own.addcmul_(k[..., None], wrong[..., None, :])
    state[rows] = own
    return (q[..., None, :] @ own)[..., 0, :]


def chunk_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Some tokens of one request, float32. q, k [heads, n, key_size]; v [heads, n, value_size];
    log_decay, beta [heads, n]; state [heads, key_size, value_size] before them.

    Returns what they read, as v, and the state behind them.
    """
    total = log_decay.cumsum(-1)
    # From token j to a later token i: exp(total_i - total_j), at most 1.
    between = (total[:, :, None] - total[:, None, :]).tril_().exp_().tril_()
    weighed = k * beta[..., None]
    overlap = (weighed @ k.transpose(1, 2)).mul_(between).tril_(-1)
    since = total.exp()[..., None]
    wanted = torch.cat((v * beta[..., None], weighed * since), dim=-1)
    solved = torch.linalg.solve_triangular(overlap, wanted, upper=False, unitriangular=True)
    values, keys = solved.split((v.shape[2], k.shape[2]), dim=-1)
    corrections = values - keys @ state
    read = (q * since) @ state + (q @ k.transpose(1, 2)).mul_(between) @ corrections
    until = (total[:, -1:] - total).exp()[..., None]
    left = state * since[:, -1:] + (k * until).transpose(1, 2) @ corrections
    return read, left
