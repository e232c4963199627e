"""Mamba-2 in plain torch (arXiv 2405.21060): the oracle of all back ends.
`kernels.reference.Kernels.mamba2` defines the operation.

A head's state is a matrix, [head_size, state_size]. Each token multiplies the state by one factor,
its decay, and adds x B^T; the output is the state times C. Prompts are computed 64 tokens at a
time. Within a chunk, tokens affect each other like linear attention with decays; earlier chunks act
through the state.
"""

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import silu, softplus

from kernels.metadata import AttentionMeta
from kernels.recurrent.convolution import causal_conv, chunks_of, decoded

CHUNK = 64


@dataclass(frozen=True, slots=True)
class Mamba2Heads:
    """The sizes and parameters of Mamba-2 heads.

    heads, head_size: heads and their elements.
    groups, state_size: groups of heads that share B and C, and the elements of these.
    conv [channels, taps], conv_bias [channels] float32: for x, B and C, in this order.
    decay, skip, bias [heads] float32: A_log, D and dt_bias.
    limits: smallest and largest time step (dt after its softplus).
    """

    heads: int
    head_size: int
    groups: int
    state_size: int
    conv: Tensor
    conv_bias: Tensor | None
    decay: Tensor
    skip: Tensor
    bias: Tensor
    limits: tuple[float, float]


def mamba2(
    x: Tensor, dt: Tensor, heads: Mamba2Heads, tail: Tensor, state: Tensor, meta: AttentionMeta
) -> Tensor:
    """Return the results of Mamba-2; update tails and states in place (`Kernels.mamba2`)."""
    mixed = silu(causal_conv(x, heads.conv, heads.conv_bias, tail, meta))
    shared = heads.groups * heads.state_size
    inner, b, c = mixed.split((heads.heads * heads.head_size, shared, shared), dim=1)
    own = inner.unflatten(1, (heads.heads, heads.head_size))
    b = b.unflatten(1, (heads.groups, heads.state_size))
    c = c.unflatten(1, (heads.groups, heads.state_size))
    step = softplus(dt.float() + heads.bias).clamp(*heads.limits)
    log_decay = -heads.decay.exp() * step
    stepped = own * step[..., None]
    out = own * heads.skip[:, None]
    count, group_heads = meta.num_decodes, heads.heads // heads.groups
    if count:
        assert meta.rows is not None
        decayed = decoded(meta, state) * log_decay[:count].exp()[..., None, None]
        wide = b[:count].repeat_interleave(group_heads, dim=1)
        decayed.addcmul_(stepped[:count, ..., None], wide[:, :, None])
        state[meta.rows[:count]] = decayed
        out[:count] += (decayed @ c[:count].repeat_interleave(group_heads, dim=1)[..., None])[
            ..., 0
        ]
    for row, begin, end, begins in chunks_of(meta):
        if begins:
            state[row] = 0
        for first in range(begin, end, CHUNK):
            some = slice(first, min(first + CHUNK, end))
            outputs, state[row] = chunk_scan(
                stepped[some], b[some], c[some], log_decay[some], state[row]
            )
            out[some] += outputs
    starts = meta.query_start_host or meta.query_start.tolist()
    out[starts[-1] :] = 0
    return out


def chunk_scan(
    x: Tensor, b: Tensor, c: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute Mamba-2 of consecutive tokens of one request, in float32.

    x: [n, heads, head_size], already multiplied by the time steps. b, c: [n, groups, state_size].
    log_decay: [n, heads]. state: [heads, head_size, state_size], before these tokens.
    Returns the tokens' outputs, shaped like x, and the state after them.
    """
    heads, groups = x.shape[1], b.shape[1]
    group_heads = heads // groups
    total = log_decay.t().cumsum(-1)
    # Decay from token j to a later token i: exp(total_i - total_j), at most 1.
    between = (total[:, :, None] - total[:, None, :]).tril_().exp_().tril_()
    x, b, c = x.transpose(0, 1), b.transpose(0, 1), c.transpose(0, 1)
    overlap = (c @ b.transpose(1, 2)).repeat_interleave(group_heads, dim=0).mul_(between)
    old = state.unflatten(0, (groups, group_heads)).flatten(
        1, 2
    )  # [groups, group_heads * head_size, state_size]
    since = (c @ old.transpose(1, 2)).unflatten(2, (group_heads, -1)).transpose(1, 2).flatten(0, 1)
    read = overlap @ x + since * total.exp()[..., None]
    until = (total[:, -1:] - total).exp()[..., None]
    added = (x * until).unflatten(0, (groups, group_heads)).transpose(2, 3).flatten(1, 2) @ b
    new_state = state * total[:, -1].exp()[:, None, None] + added.view_as(state)
    return read.transpose(0, 1), new_state
