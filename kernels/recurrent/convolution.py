"""Depthwise causal convolutions and helpers over a step's entries (a request's sequence each), in
plain torch, for all recurrent layers. `kernels.reference.Kernels.causal_conv` defines the
convolution.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.metadata import AttentionMeta


def chunks_of(meta: AttentionMeta) -> Iterator[tuple[int, int, int, bool]]:
    """Yield (row of the state, first token, end token, whether its request begins) of each entry.

    Decodes and entries without tokens are left out.
    """
    assert meta.rows is not None
    starts = meta.query_start_host or meta.query_start.tolist()
    lengths = meta.kv_len_host or meta.kv_len.tolist()
    for entry in range(meta.num_decodes, len(lengths)):
        begin, end = starts[entry], starts[entry + 1]
        if begin < end:
            yield int(meta.rows[entry]), begin, end, lengths[entry] == end - begin


def decoded(meta: AttentionMeta, kept: Tensor) -> Tensor:
    """Return a copy of the decodes' rows of `kept` [rows, ...], which are states or tails.

    For a request's first token, the row is zero.
    """
    assert meta.rows is not None
    count = meta.num_decodes
    own = kept.index_select(0, meta.rows[:count])
    own[meta.kv_len[:count] == 1] = 0
    return own


def causal_conv(
    x: Tensor, conv: Tensor, bias: Tensor | None, tail: Tensor, meta: AttentionMeta
) -> Tensor:
    """Return the causal convolution [num_tokens, channels] float32; write the last inputs to tail.

    Arguments are those of `Kernels.causal_conv`.
    """
    out = torch.zeros(len(x), conv.shape[0], dtype=torch.float32, device=x.device)
    count = meta.num_decodes
    if count:
        assert meta.rows is not None
        mixed = torch.cat((decoded(meta, tail), x[:count, None].float()), dim=1)
        tail[meta.rows[:count]] = mixed[:, 1:]
        out[:count] = _summed(mixed.transpose(0, 1), conv, 1)[0]
    for row, begin, end, begins in chunks_of(meta):
        if begins:
            tail[row] = 0
        mixed = torch.cat((tail[row], x[begin:end].float()))
        tail[row] = mixed[len(mixed) - tail.shape[1] :]
        out[begin:end] = _summed(mixed, conv, end - begin)
    return out if bias is None else out.add_(bias)


def _summed(mixed: Tensor, conv: Tensor, count: int) -> Tensor:
    """Convolve mixed [taps - 1 + count, ..., channels] to [count, ..., channels].

    The last tap multiplies the token's own input.
    """
    total = mixed[:count] * conv[:, 0]
    for tap in range(1, conv.shape[1]):
        total.addcmul_(mixed[tap : tap + count], conv[:, tap])
    return total
