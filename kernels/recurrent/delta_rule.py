"""Gated DeltaNet (arXiv 2412.06464) and Kimi Delta Attention (arXiv 2510.26692) in plain torch: the
oracle of all back ends. `kernels.reference.Kernels.gated_delta` and `Kernels.kimi_delta` define
them; the norm of results is not included here.

A head's state is a matrix that maps keys to values. Each token decays the state, and corrects the
value to which the state maps the token's key. Kimi decays each key element separately. Tokens of
one request are sequential; decodes of several requests are one batch. Prompts are computed 64
tokens at a time: a triangular system gives the corrections of all tokens of a chunk.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from kernels.metadata import AttentionMeta
from kernels.recurrent.convolution import causal_conv, chunks_of, decoded

CHUNK = 64
CHUNK_BY_KEY = 16  # smaller than CHUNK, as each pair of tokens has a decay per key element
EPS = 1e-6  # added to squared lengths when queries and keys are normalised


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """The sizes and parameters of a delta rule's heads.

    key_heads, key_size: heads of queries and keys, and their elements.
    value_heads, value_size: heads of values; several may share a key head.
    conv: [channels, taps] float32, for queries, keys and values in this order.
    decay: [value_heads] float32, A_log.
    bias: [value_heads], or [value_heads * key_size] with by_key, float32: dt_bias.
    norm, eps: RMS norm of each head's results; norm is [value_size] float32.
    most: maximum factor of a correction (beta).
    by_key: whether each key element decays separately. There are then as many key heads as value
        heads.
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    conv: Tensor
    decay: Tensor
    bias: Tensor
    norm: Tensor
    eps: float
    most: float = 1.0
    by_key: bool = False


class DeltaInputs(NamedTuple):
    """The inputs of a layer of the delta rule in one step; activations may have any row stride.

    x [num_tokens, channels]: queries, keys and values before their convolution.
    z [num_tokens, value_heads * value_size]: gates of the results.
    a [num_tokens, value_heads], or with a decay for each element of a key
        [num_tokens, value_heads * key_size]: decay is exp(-exp(A_log) softplus(a + dt_bias)).
    b [num_tokens, value_heads]: corrections are multiplied by DeltaHeads.most times its sigmoid.
    heads: sizes and parameters of the layer.
    tail [rows, taps - 1, channels] float32: last inputs of the convolution, written at meta.rows.
    state [rows, value_heads, key_size, value_size] float32: states, written at meta.rows.
    pending_updates [rows, value_heads, n, elements] float32: updates by up to n decodes since a
        state was written. None: each token writes its state.
    """

    x: Tensor
    z: Tensor
    a: Tensor
    b: Tensor
    heads: DeltaHeads
    tail: Tensor
    state: Tensor
    pending_updates: Tensor | None = None


def delta_rule(inputs: DeltaInputs, meta: AttentionMeta) -> Tensor:
    """Return the results of a delta rule before their norm; update tails and states in place.

    The rule is that of `Kernels.gated_delta`, or of `Kernels.kimi_delta` for heads with by_key.
    Returns [num_tokens, value_heads, value_size] float32.
    """
    x, _, a, b, heads, tail, state, _ = inputs
    mixed = silu(causal_conv(x, heads.conv, None, tail, meta))
    q, k, v = _heads(mixed, heads)
    out = torch.zeros_like(v)
    step = softplus(a.float() + heads.bias).unflatten(1, (heads.value_heads, -1))
    log_decay = -heads.decay.exp()[:, None] * step  # per head, or per element of its key
    beta = b.float().sigmoid().mul_(heads.most)
    count = meta.num_decodes
    if count:
        assert meta.rows is not None
        own = decoded(meta, state)
        some = slice(count)
        out[some] = _decode(q[some], k[some], v[some], log_decay[some], beta[some], own)
        state[meta.rows[:count]] = own
    q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
    g, weight = log_decay.transpose(0, 1), beta.t()
    rule, size = chunk_rule_by_key, CHUNK_BY_KEY
    if not heads.by_key:
        rule, size, g = chunk_rule, CHUNK, g[..., 0]
    for row, begin, end, begins in chunks_of(meta):
        if begins:
            state[row] = 0
        for first in range(begin, end, size):
            some = slice(first, min(first + size, end))
            outputs, state[row] = rule(
                q[:, some], k[:, some], v[:, some], g[:, some], weight[:, some], state[row]
            )
            out[some] = outputs.transpose(0, 1)
    return out


def _heads(mixed: Tensor, heads: DeltaHeads) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, [n, value_heads, size] each, from mixed [n, channels].

    Queries and keys are normalised to length 1, and queries divided by the square root of their
    size.
    """
    keys = heads.key_heads * heads.key_size
    q, k, v = mixed.split((keys, keys, heads.value_heads * heads.value_size), dim=1)
    shared = heads.value_heads // heads.key_heads

    def unit(x: Tensor) -> Tensor:
        x = x.unflatten(1, (heads.key_heads, heads.key_size))
        x = x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS)
        return x.repeat_interleave(shared, dim=1)

    q = unit(q) * heads.key_size**-0.5
    return q, unit(k), v.unflatten(1, (heads.value_heads, heads.value_size))


def _decode(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, own: Tensor
) -> Tensor:
    """Return the outputs of one token per request. own: the requests' states, updated in place."""
    own *= log_decay.exp()[..., None]
    wrong = (v - (k[..., None, :] @ own)[..., 0, :]) * beta[..., None]
    own.addcmul_(k[..., None], wrong[..., None, :])
    return (q[..., None, :] @ own)[..., 0, :]


def chunk_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply the gated delta rule to consecutive tokens of one request, in float32.

    q, k: [heads, n, key_size]. v: [heads, n, value_size]. log_decay, beta: [heads, n].
    state: [heads, key_size, value_size], before these tokens.
    Returns the tokens' outputs, shaped like v, and the state after them.
    """
    total = log_decay.cumsum(-1)
    # Decay from token j to a later token i: exp(total_i - total_j), at most 1.
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
    new_state = state * since[:, -1:] + (k * until).transpose(1, 2) @ corrections
    return read, new_state


def chunk_rule_by_key(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply `chunk_rule` with a decay per key element: log_decay is [heads, n, key_size].

    A token's effect on a later one is a sum over key elements, each decayed at its own rate.
    Returns the tokens' outputs and the state after them.
    """
    total = log_decay.cumsum(1)
    between = (total[:, :, None] - total[:, None, :]).clamp_(max=0.0).exp_()
    decayed_keys = between.mul_(k[:, None])  # at [i, j]: key j, decayed until token i
    weighed = k * beta[..., None]
    overlap = (decayed_keys @ weighed[..., None])[..., 0].tril_(-1)
    since = total.exp()
    wanted = torch.cat((v * beta[..., None], weighed * since), dim=-1)
    solved = torch.linalg.solve_triangular(overlap, wanted, upper=False, unitriangular=True)
    values, keys = solved.split((v.shape[2], k.shape[2]), dim=-1)
    corrections = values - keys @ state
    read = (q * since) @ state + (decayed_keys @ q[..., None])[..., 0].tril_() @ corrections
    until = k * (total[:, -1:] - total).exp()
    return read, state * since[:, -1, :, None] + until.transpose(1, 2) @ corrections
