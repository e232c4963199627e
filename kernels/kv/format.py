"""KVFormat: the number format of keys and values in the cache. Needs no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVFormat:
    """The number format of cached keys and values.

    name: "int8", "fp8", "int4", or "" for the model's dtype.
    bits: size of an element.
    words: bfloat16 numbers (scale, offset) per token and head, see `kernels.kv.quantized`.
    hadamard: size of the Hadamard matrix by which queries and keys are multiplied before keys are
        written, a power of two; 0 = no rotation (`quantized.by_hadamard`).
    """

    name: str = ""
    bits: int = 16
    words: int = 0
    hadamard: int = 0

    def token_bytes(self, heads: int, dim: int) -> int:
        """Return the bytes of one token's keys, or values, in one layer."""
        return heads * (dim * self.bits // 8 + 2 * self.words)


FORMATS = {
    form.name: form
    for form in (
        KVFormat("int8", 8, 1),
        KVFormat("fp8", 8, 1),
        KVFormat("int4", 4, 2),
    )
}
