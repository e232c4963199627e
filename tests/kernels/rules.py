"""Reference recurrences of recurrent layers, token by token, in the dtype of their inputs.

Each function computes the tokens of one request, and overwrites its states."""

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from kernels.recurrent.delta_rule import DeltaHeads
from kernels.recurrent.mamba2 import Mamba2Heads


def convolution(x: Tensor, conv: Tensor, bias: Tensor | None, tail: Tensor) -> Tensor:
    taps, padded = conv.shape[1], torch.cat((tail, x))
    tail.copy_(padded[len(x) :])
    parts = [padded[tap : tap + len(x)] * conv[:, tap].to(x) for tap in range(taps)]
    return sum(parts, torch.zeros_like(x)) + (0 if bias is None else bias.to(x))


def delta(
    x: Tensor, z: Tensor, a: Tensor, b: Tensor, how: DeltaHeads, tail: Tensor, state: Tensor
) -> Tensor:
    """Return the output of the gated delta rule. state: [heads, key size, value size],
    overwritten."""
    keys = how.key_heads * how.key_size
    mixed = silu(convolution(x, how.conv, None, tail))
    q, k, v = (
        group_heads.unflatten(1, (heads, -1)).repeat_interleave(how.value_heads // heads, 1)
        for group_heads, heads in zip(
            mixed.split((keys, keys, mixed.shape[1] - 2 * keys), 1),
            (how.key_heads, how.key_heads, how.value_heads),
            strict=True,
        )
    )
    outputs = []
    for t in range(len(x)):
        key = k[t] * (k[t].square().sum(-1, keepdim=True) + 1e-6).rsqrt()
        query = q[t] * (q[t].square().sum(-1, keepdim=True) + 1e-6).rsqrt() / how.key_size**0.5
        step = softplus(a[t] + how.bias).unflatten(0, (how.value_heads, -1))
        state *= (-how.decay.to(x).exp()[:, None] * step).exp()[:, :, None]
        wrong = v[t] - torch.einsum("hk,hkv->hv", key, state)
        state += torch.einsum("hk,hv->hkv", key, wrong * how.most * b[t].sigmoid()[:, None])
        read = torch.einsum("hk,hkv->hv", query, state)
        normed = read / (read.square().mean(-1, keepdim=True) + how.eps).sqrt() * how.norm
        gate = torch.sigmoid if how.by_key else silu
        outputs.append(normed.flatten() * gate(z[t]))
    return torch.stack(outputs)


def mamba2(x: Tensor, dt: Tensor, how: Mamba2Heads, tail: Tensor, state: Tensor) -> Tensor:
    """Return the output of Mamba-2's scan. state: [heads, head_size, state_size], overwritten."""
    mixed = silu(convolution(x, how.conv, how.conv_bias, tail))
    shared = how.groups * how.state_size
    inner, b, c = mixed.split((how.heads * how.head_size, shared, shared), dim=1)
    outputs = []
    group_heads = how.heads // how.groups
    for t in range(len(x)):
        u = inner[t].view(how.heads, -1)
        b_t, other = (y[t].view(how.groups, -1).repeat_interleave(group_heads, 0) for y in (b, c))
        size = softplus(dt[t] + how.bias).clamp(*how.limits)
        state *= (-how.decay.to(x).exp() * size).exp()[:, None, None]
        state += (size[:, None] * u)[..., None] * b_t[:, None]
        outputs.append((state * other[:, None]).sum(-1) + how.skip[:, None] * u)
    return torch.stack(outputs)


def mamba1(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, rates: Tensor, skip: Tensor, state: Tensor
) -> Tensor:
    """Return the output of Mamba-1's scan. state: [channels, state_size], overwritten."""
    outputs = []
    for u, size, b_t, other in zip(x, softplus(dt), b, c, strict=True):
        state *= (rates.to(x) * size[:, None]).exp()
        state += (size * u)[:, None] * b_t
        outputs.append(state @ other + skip.to(x) * u)
    return torch.stack(outputs)
