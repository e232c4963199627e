"""Mamba-1 in plain torch (arXiv 2312.00752): the oracle of all back ends.
`kernels.reference.Kernels.mamba1` defines the operation.

A channel's state is a vector whose elements decay at different rates. So several tokens cannot be
computed by one matmul, and prompts are computed token by token.
"""

from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import softplus

from kernels.metadata import AttentionMeta
from kernels.recurrent.convolution import chunks_of, decoded

CHUNK = 64  # tokens whose decays are computed at once


class Mamba1Inputs(NamedTuple):
    """The inputs of a Mamba-1 layer in one step; all except the gate are contiguous.

    x [num_tokens, channels] float32: results of the convolution.
    dt [num_tokens, channels]: the time steps before their softplus.
    b, c [num_tokens, state_size]: B and C, which all channels share.
    rates [channels, state_size] float32: -exp(A_log).
    skip [channels] float32: D.
    gate [num_tokens, channels]: gates of the results; results have the gate's dtype.
    state [rows, channels, state_size] float32: states, written at meta.rows.
    """

    x: Tensor
    dt: Tensor
    b: Tensor
    c: Tensor
    rates: Tensor
    skip: Tensor
    gate: Tensor
    state: Tensor


def mamba1(inputs: Mamba1Inputs, meta: AttentionMeta) -> Tensor:
    """Return the results of Mamba-1 without the gate; update states in place (`Kernels.mamba1`)."""
    rates, skip, state = inputs.rates, inputs.skip, inputs.state
    x, b, c = inputs.x.float(), inputs.b.float(), inputs.c.float()
    step = softplus(inputs.dt.float())
    stepped = x * step
    out = x * skip
    count = meta.num_decodes
    if count:
        assert meta.rows is not None
        decayed = decoded(meta, state)
        decayed *= (step[:count, :, None] * rates).exp_()
        decayed.addcmul_(stepped[:count, :, None], b[:count, None])
        state[meta.rows[:count]] = decayed
        out[:count] += (decayed @ c[:count, :, None])[..., 0]
    for row, begin, end, begins in chunks_of(meta):
        own = state[row]
        if begins:
            own.zero_()
        for first in range(begin, end, CHUNK):
            last = min(first + CHUNK, end)
            decays = (step[first:last, :, None] * rates).exp_()
            for token in range(first, last):
                own.mul_(decays[token - first]).addr_(stepped[token], b[token])
                out[token] += own @ c[token]
    starts = meta.query_start_host or meta.query_start.tolist()
    out[starts[-1] :] = 0
    return out
