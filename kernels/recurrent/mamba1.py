"""Mamba-1 in plain torch (arXiv 2312.00752): the oracle of all back ends.
`kernels.reference.Kernels.mamba1` defines it.

A channel's state is a vector whose elements decay at different rates. So no matmul covers several
tokens, and prompts are computed token by token, with states in the processor's cache.
"""

from torch import Tensor
from torch.nn.functional import softplus

from kernels.metadata import AttentionMeta
from kernels.recurrent.convolution import chunks_of, decoded

CHUNK = 64  # tokens whose decays are computed at once


def mamba1(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    rates: Tensor,
    skip: Tensor,
    state: Tensor,
    meta: AttentionMeta,
) -> Tensor:
    """Compute `Kernels.mamba1`, without the gate."""
    x, b, c = x.float(), b.float(), c.float()
    step = softplus(dt.float())
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
