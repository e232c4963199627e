"""The formats of keys and values in 8 or 4 bits, read and written in plain torch.

Each token and head has its own scale (and offset), stored as bfloat16 `numbers` beside the codes,
so that a key is quantised independently of other keys. The memory of one block of a layer's keys,
or of its values:

    codes   [num_kv_heads, block_size, head_dim * bits / 8]
    numbers [num_kv_heads, block_size, words] bfloat16

    int8   scale * code, code -127 .. 127
    fp8    scale * code, code an e4m3 float of at most 448
    int4   scale * code + least, code 0 .. 15; byte j has element 2 j in its low half, and
           element 2 j + 1 in its high half

A scale is rounded up to a bfloat16, so that no code leaves its range.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kernels.kv.format import KVFormat

E4M3_MOST = 448.0


@dataclass(frozen=True, slots=True)
class QuantizedKV:
    """The quantised keys, or values, of one layer; kernels accept it in place of a plain cache.

    codes: [num_blocks, num_kv_heads, block_size, head_dim * bits / 8]: int8, float8_e4m3fn, uint8.
    numbers: [num_blocks, num_kv_heads, block_size, words] bfloat16.
    Codes and numbers are contiguous within a block, with any stride between blocks.
    """

    form: KVFormat
    codes: Tensor
    numbers: Tensor

    @classmethod
    def over(cls, form: KVFormat, raw: Tensor, heads: int, size: int, dim: int) -> "QuantizedKV":
        """Return a cache as views of raw memory.

        raw: uint8 [num_blocks, form.token_bytes(heads, dim) * size], with any stride between
            blocks.
        heads, size, dim: KV heads, tokens of a block, elements of a head.
        """
        split = heads * size * dim * form.bits // 8
        count = raw.shape[0]
        codes = raw[:, :split].unflatten(1, (heads, size, dim * form.bits // 8))
        numbers = raw[:, split:].view(torch.bfloat16).view(count, heads, size, form.words)
        return cls(form, codes.view(_CODES[form.name]), numbers)

    @classmethod
    def empty(
        cls, form: KVFormat, shape: tuple[int, int, int, int], device: torch.device | str = "cpu"
    ) -> "QuantizedKV":
        """Allocate a cache of zeros. shape: the value of the property `shape`."""
        count, heads, size, dim = shape
        raw = torch.zeros(
            count, form.token_bytes(heads, dim) * size, dtype=torch.uint8, device=device
        )
        return cls.over(form, raw, heads, size, dim)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of an unquantised cache of the same size: [num_blocks, num_kv_heads,
        block_size, head_dim].
        """
        count, heads, size, width = self.codes.shape
        return count, heads, size, width * 8 // self.form.bits

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the result of `read`."""
        return torch.float32

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def write(self, blocks: Tensor, heads: Tensor, places: Tensor, values: Tensor) -> None:
        """Quantise values and write them to the cache.

        values: [n, head_dim].
        blocks, heads, places: int64 [n] each: block, KV head, and token within the block.
        """
        codes, numbers = quantize(self.form, values.float())
        raw = self.codes.view(torch.uint8)
        raw[blocks, heads, places] = codes.view(torch.uint8)
        self.numbers[blocks, heads, places] = numbers

    def read(self, blocks: Tensor, heads: Tensor) -> Tensor:
        """Return the dequantised elements of n pairs (block, head): float32 [n, block_size,
        head_dim].

        blocks, heads: int64 [n].
        """
        raw = self.codes.view(torch.uint8)[blocks, heads]
        return dequantize(self.form, raw.view(self.codes.dtype), self.numbers[blocks, heads])


_CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.uint8}

Cache = Tensor | QuantizedKV  # the keys, or values, of a layer
# The tensors of a layer's cache: keys and values, a recurrent layer's two (tail, state), all four,
# or none.
KV = tuple[Cache, ...]


def quantize(form: KVFormat, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes and numbers of x, float32 [..., head_dim], see the module's docstring.

    The codes are [..., head_dim * bits / 8], the numbers [..., words].
    """
    if form.name == "int4":
        least = x.amin(-1, keepdim=True).bfloat16()
        above = x - least.float()
        scale = _up(above.amax(-1, keepdim=True) / 15.0)
        codes = (above * _inverse(scale)).round_().clamp_(0, 15).to(torch.uint8)
        return codes[..., ::2] | (codes[..., 1::2] << 4), torch.cat((scale, least), -1)
    most = 127.0 if form.name == "int8" else E4M3_MOST
    scale = _up(x.abs().amax(-1, keepdim=True) / most)
    scaled = x * _inverse(scale)
    if form.name == "int8":
        return scaled.round_().to(torch.int8), scale
    return scaled.to(torch.float8_e4m3fn), scale


def dequantize(form: KVFormat, codes: Tensor, numbers: Tensor) -> Tensor:
    """Return the dequantised result of `quantize`, float32 [..., head_dim]."""
    scale = numbers[..., :1].float()
    if form.name != "int4":
        return codes.float() * scale
    both = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    return both.float() * scale + numbers[..., 1:].float()


def _up(x: Tensor) -> Tensor:
    """Return non-negative float32 x, rounded up to numbers that bfloat16 represents."""
    bits = (x.contiguous().view(torch.int32) + 0xFFFF) & -0x10000
    return bits.view(torch.float32).bfloat16()


def _inverse(scale: Tensor) -> Tensor:
    """Return 1 / scale in float32, and 0 for a scale of 0."""
    scale = scale.float()
    return torch.where(scale > 0, 1.0 / scale, 0.0)


def by_hadamard(form: KVFormat, x: Tensor) -> Tensor:
    """Return queries or keys [..., head_dim] multiplied by a Hadamard matrix (QuaRot, arXiv
    2404.00456).

    The matrix is orthogonal, so no product of a query and a key changes; outliers are spread over
    all elements. It is block-diagonal, with blocks of the size form.hadamard.
    """
    if not form.hadamard:
        return x
    pieces = x.float().unflatten(-1, (-1, form.hadamard)) @ hadamard(form.hadamard, x.device)
    return pieces.flatten(-2).to(x.dtype)


@lru_cache(maxsize=8)
def hadamard(size: int, device: torch.device) -> Tensor:
    """Return Sylvester's Hadamard matrix, orthogonal and symmetric: float32 [size, size]."""
    index = torch.arange(size)
    common = index[:, None] & index[None, :]
    parity = torch.zeros_like(common)
    while common.any():
        parity ^= common & 1
        common >>= 1
    return ((1.0 - 2.0 * parity.float()) / size**0.5).to(device)
