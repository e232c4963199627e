"""rounded: quantises rows of 16-bit weights to a packed format."""

import torch
from torch import Tensor

from kernels.packed import Decoded, Format

# Shares of a group's range that are tried for 4-bit scales, besides the whole range, as clipping
# outliers makes the steps finer.
_SHARES = (0.92, 0.84, 0.76)
_REFITS = 3  # how often 4-bit scales and offsets are fitted again to their codes


def nearest(values: Tensor, table: tuple[float, ...]) -> Tensor:
    """Return the index, as uint8, of each value's nearest number in an ascending table."""
    ends = torch.tensor(table, dtype=values.dtype, device=values.device)
    return torch.bucketize(values, (ends[1:] + ends[:-1]) / 2).to(torch.uint8)


def rounded(form: Format, weight: Tensor) -> Decoded:
    """Quantise a weight [n, in]; return codes, scales and offsets for `PackedWeight.fill`.

    Symmetric codes cover the largest magnitude of a group. 8-bit codes with an offset cover the
    group's range, except for the rounding of scale and offset, which are rounded before the codes.
    """
    rows, width = weight.shape
    groups = weight.float().view(rows, width // form.group, form.group)
    offset = None
    if form.code == "e4m3":
        scale = (groups.abs().amax(-1) / 448).clamp_(min=1e-12)
        values = (groups / scale.unsqueeze(-1)).clamp_(-448, 448)
        codes = values.to(torch.float8_e4m3fn).view(torch.uint8)
    elif form.offset == "none" and not form.table:
        top = (1 << (form.bits - 1)) - 1
        scale = (groups.abs().amax(-1) / top).clamp_(min=1e-12)
        codes = (groups / scale.unsqueeze(-1)).round_().add_(form.zero).to(torch.uint8)
    elif form.table:
        scale = groups.abs().amax(-1)
        codes = nearest(groups / scale.clamp(min=1e-30).unsqueeze(-1), form.table)
    else:
        codes, scale, offset = _with_offset(form, groups)
    codes = codes.view(rows, width)
    if form.bits == 4:
        both = codes.view(rows, -1, 2, 16)
        codes = (both[:, :, 0] | (both[:, :, 1] << 4)).flatten(1)
    return codes, scale, offset


def _with_offset(form: Format, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes of groups [n, groups, inputs], with a scale and an offset for each group.

    Several grids (scale and offset) are tried; each group gets the one with the least squared
    error.
    """
    top = (1 << form.bits) - 1
    # Groups of equal weights get the smallest positive scale of the dtype.
    least = 6e-8 if form.scale == torch.float16 else 1e-30

    def attempt(scale: Tensor, offset: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Quantise with a grid; return (squared errors, codes, stored scales, stored offsets)."""
        scale = scale.clamp(min=least).to(form.scale).float()
        offset = offset.to(form.scale).float()
        codes = (groups - offset.unsqueeze(-1)) / scale.unsqueeze(-1)
        codes = codes.round_().clamp_(0, top)
        off = torch.addcmul(offset.unsqueeze(-1), codes, scale.unsqueeze(-1)).sub_(groups)
        return off.square_().sum(-1), codes.to(torch.uint8), scale, offset

    low, high = groups.aminmax(dim=-1)
    best = attempt((high - low) / top, low)
    if form.bits == 4:
        for share in _SHARES:
            cut = (high - low) * ((1 - share) / 2)
            best = _better(best, attempt((high - low) * (share / top), low + cut))
        mean = groups.mean(-1)
        for _ in range(_REFITS):
            # the best scale and offset for these codes, by least squares
            codes = best[1].float()
            middle = codes.mean(-1)
            codes -= middle.unsqueeze(-1)
            scale = (codes * groups).sum(-1) / codes.square().sum(-1).clamp_(min=1e-30)
            best = _better(best, attempt(scale, mean - middle * scale))
    return best[1:]


def _better(
    best: tuple[Tensor, Tensor, Tensor, Tensor], other: tuple[Tensor, Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return, for each group, the one of two results of `attempt` with the smaller error."""
    smaller = other[0] < best[0]
    of_groups = smaller.unsqueeze(-1)
    return (
        torch.where(smaller, other[0], best[0]),
        torch.where(of_groups, other[1], best[1]),
        torch.where(smaller, other[2], best[2]),
        torch.where(smaller, other[3], best[3]),
    )
