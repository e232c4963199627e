"""The order of codes for matrix instructions, on the CPU: what lanes and bits hold which code."""

import pytest
import torch
from torch import Tensor

from kernels import fragments
from kernels.packed import E2M1, Format, PackedWeight

NUMBERS = torch.tensor(E2M1, dtype=torch.float64) / 2 - 6
_SIGN_AND_REST = 0x81C081C0


def rotated(words: Tensor, by: int) -> Tensor:
    """Return 32-bit words in int64, rotated to the right."""
    return ((words >> by) | (words << (32 - by))) & 0xFFFFFFFF


def pairs(words: Tensor) -> list[Tensor]:
    """Return the four pairs of bfloat16 numbers of words, as kernels.experts.fragments.products
    does."""
    words = words.to(torch.int64) & 0xFFFFFFFF
    return [
        words & _SIGN_AND_REST,
        rotated(words, 6) & _SIGN_AND_REST,
        (words << 4) & _SIGN_AND_REST,
        (rotated(words, 2) & 0x81808180) | ((words << 6) & 0x00400040),
    ]


def number(pair: Tensor, high: int) -> Tensor:
    """Return the float64 value of a bfloat16 number's bits, times 2^126."""
    bits = ((pair >> (16 * high)) & 0xFFFF) << 16
    bits = torch.where(bits < 1 << 31, bits, bits - (1 << 32)).to(torch.int32)
    # By fields, as some processors take what is below float32's normal range for nothing.
    sign, exponent, mantissa = bits < 0, (bits >> 23) & 255, (bits & 0x7FFFFF).double() / (1 << 23)
    value = torch.where(exponent > 0, (1 + mantissa) * 2.0 ** (exponent - 1).double(), mantissa)
    return torch.where(sign, -value, value)


def test_bits_come_to_their_places() -> None:
    """A bit of a code's neighbour, a sign of the wrong half, a mantissa for an exponent; inputs of
    another lane, outputs of the other half of a tile."""
    torch.manual_seed(0)
    codes = torch.randint(0, 16, (32, 192), dtype=torch.uint8)
    words = fragments.arranged(codes)
    assert words.shape == (2, 3, 32, 4) and words.dtype == torch.int32
    weights = NUMBERS[codes.long()].view(2, 16, 3, 64)
    for lane in range(32):
        g, c = divmod(lane, 4)
        for at in range(4):
            half, group = divmod(at, 2)
            for pair, actual in enumerate(pairs(words[:, :, lane, at])):
                for high in range(2):
                    want = weights[:, g + 8 * half, :, 32 * group + 8 * c + 2 * pair + high]
                    assert torch.equal(number(actual, high), want), (lane, at, pair, high)


def test_nothing_is_lost() -> None:
    """Codes or scales that come back in another order."""
    torch.manual_seed(0)
    codes = torch.randint(0, 16, (48, 128), dtype=torch.uint8)
    scale = torch.rand(48, 4)
    assert torch.equal(fragments.restored(fragments.arranged(codes)), codes)
    arranged = fragments.arranged_scales(scale)
    assert torch.equal(fragments.restored_scales(arranged), scale)
    # Of lane 4 * g the scales of output g, then of output 8 + g.
    assert torch.equal(arranged[1, 1, 3], torch.cat((scale[19, 2:], scale[27, 2:])))


@pytest.mark.parametrize("tiles", [1, 512])
def test_weights_stay_what_they_are(tiles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the tiles that is left out, or put where another belongs."""
    torch.manual_seed(0)
    monkeypatch.setattr("kernels.packed._TILES", tiles)
    form = Format(4, 32, torch.bfloat16, zero=12, table=E2M1)
    weight = PackedWeight(form, 48, 192, None, torch.device("cpu"))
    codes = torch.randint(0, 256, (48, 96), dtype=torch.uint8)
    scale = 2.0 ** torch.randint(-9, -4, (48, 6))
    weight.fill(0, (codes, scale, None))
    before = weight.dense(torch.float32)
    size = weight.codes.nbytes + weight.scale.nbytes
    weight.to_fragments()
    assert weight.codes.nbytes + weight.scale.nbytes == size
    assert torch.equal(weight.dense(torch.float32), before)
    actual, scales, _ = weight.decoded()
    assert torch.equal(actual, codes)
    assert torch.equal(scales.float(), scale)
