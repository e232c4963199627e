"""Fragments: an order of 4-bit floats (e2m1) in which each thread loads its MMA operand directly.

A tile is 16 outputs by 64 inputs, in two groups of 32 inputs. It has four words of 32 bits for each
lane 4 * g + c. Words 0 and 1 have the codes of output g, words 2 and 3 those of output 8 + g. Of
the two, the first has inputs 8 * c to 8 * c + 7 of the first group, the other those of the second
group. The scales of a tile have the same order: for each g those of output g, then of output 8 + g.

The bits of a word are permuted. At most one shift and one logical operation move a pair of codes
to the fields of two bfloat16 numbers; the last of the four pairs takes two of each.
"""

import torch
from torch import Tensor

ROWS, INPUTS, GROUP = 16, 64, 32  # rows and inputs of a tile, inputs per scale
LANES, WORDS = 32, 4  # lanes of a warp, words per lane (16 bytes)

# For each pair of codes: the bit positions in a word of the even code's mantissa, the two bits of
# its exponent, and its sign. The positions of the odd code are 16 higher, modulo 32.
_PLACES = ((6, 7, 8, 15), (12, 13, 14, 21), (2, 3, 4, 11), (0, 9, 10, 17))


def arranged(codes: Tensor) -> Tensor:
    """Reorder codes to fragments: uint8 [rows, width] -> int32 [rows / 16, width / 64, 32, 4]."""
    rows, width = codes.shape
    eights = codes.view(rows, width // 8, 8)
    words = torch.zeros(rows, width // 8, dtype=torch.int64, device=codes.device)
    for code in range(8):
        for bit, place in enumerate(_PLACES[code // 2]):
            bits = ((eights[..., code] >> bit) & 1).to(torch.int64)
            words |= bits << ((place + 16 * (code % 2)) % 32)
    words = torch.where(words < 1 << 31, words, words - (1 << 32)).to(torch.int32)
    # [tile, half, g, tile of inputs, group, c]
    return _lanes(words.view(rows // ROWS, 2, 8, width // INPUTS, 2, 4))


def _lanes(words: Tensor) -> Tensor:
    """Permute words of codes to the order in which a warp's lanes read them.

    words: [tile, half, g, tile of inputs, group, c]. Returns [tile, tile of inputs, lane, word],
    with lane = (g, c) and word = (half, group).
    """
    tiles, _, _, steps, _, _ = words.shape
    return words.permute(0, 3, 2, 5, 1, 4).reshape(tiles, steps, LANES, WORDS).contiguous()


def restored(words: Tensor) -> Tensor:
    """Reorder fragments to row-major codes, uint8 [rows, width]; the inverse of `arranged`."""
    tiles, steps, _, _ = words.shape
    rows, width = tiles * ROWS, steps * INPUTS
    ordered = words.view(tiles, steps, 8, 4, 2, 2).permute(0, 4, 2, 1, 5, 3)
    ordered = ordered.reshape(rows, width // 8)
    codes = torch.zeros(rows, width // 8, 8, dtype=torch.uint8, device=words.device)
    for code in range(8):
        for bit, place in enumerate(_PLACES[code // 2]):
            bits = (ordered >> ((place + 16 * (code % 2)) % 32)) & 1
            codes[..., code] |= bits.to(torch.uint8) << bit
    return codes.view(rows, width)


def arranged_scales(scale: Tensor) -> Tensor:
    """Reorder scales [rows, width / 32] like fragments: [rows / 16, width / 64, 8, 4]."""
    rows, groups = scale.shape
    parts = scale.view(rows // ROWS, 2, 8, groups // 2, 2).permute(0, 3, 2, 1, 4)
    return parts.reshape(rows // ROWS, groups // 2, 8, WORDS).contiguous()


def restored_scales(scale: Tensor) -> Tensor:
    """Reorder fragments' scales to row-major order; the inverse of `arranged_scales`."""
    tiles, steps, _, _ = scale.shape
    parts = scale.view(tiles, steps, 8, 2, 2).permute(0, 3, 2, 1, 4)
    return parts.reshape(tiles * ROWS, 2 * steps)
