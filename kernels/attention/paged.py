"""The kernel for a cache: of the model's own numbers, or of codes."""

from typing import Any

from torch import Tensor

from kernels.attention.decode import attention_decode
from kernels.attention.prefill import attention_prefill
from kernels.attention.quantized_decode import quantized_decode
from kernels.attention.quantized_prefill import quantized_prefill
from kernels.kv.quantized import Cache, QuantizedKV


def attend_decodes(q: Tensor, k_cache: Cache, *others: Any) -> None:
    """See `decode.attention_decode`."""
    quantized = isinstance(k_cache, QuantizedKV)
    (quantized_decode if quantized else attention_decode)(q, k_cache, *others)


def attend_chunks(q: Tensor, k_cache: Cache, *others: Any) -> None:
    """See `prefill.attention_prefill`."""
    quantized = isinstance(k_cache, QuantizedKV)
    (quantized_prefill if quantized else attention_prefill)(q, k_cache, *others)
