"""The kernel for a cache: of the model's own numbers, or of codes."""

from typing import Any

from torch import Tensor

from kernels.attention.decode import attention_decode
from kernels.attention.prefill import attention_prefill
from kernels.attention.quantized_decode import quantized_decode
from kernels.attention.quantized_prefill import quantized_prefill
from kernels.attention.specialized_prefill import specialized_prefill, specialized_prefill_fits
from kernels.kv.quantized import Cache, QuantizedKV
from kernels.metadata import AttentionMeta


def attend_decodes(q: Tensor, k_cache: Cache, *others: Any) -> None:
    """See `decode.attention_decode`."""
    quantized = isinstance(k_cache, QuantizedKV)
    (quantized_decode if quantized else attention_decode)(q, k_cache, *others)


def attend_chunks(
    q: Tensor,
    k_cache: Cache,
    v_cache: Cache,
    out: Tensor,
    scale: float,
    meta: AttentionMeta,
    deterministic: bool = False,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> None:
    """Compute attention of chunks. See `prefill.attention_prefill` for shapes."""
    if specialized_prefill_fits(q, k_cache, deterministic, softcap, slopes):
        assert isinstance(k_cache, Tensor)
        assert isinstance(v_cache, Tensor)
        specialized_prefill(q, k_cache, v_cache, out, scale, meta, sinks)
        return
    prefill = quantized_prefill if isinstance(k_cache, QuantizedKV) else attention_prefill
    prefill(q, k_cache, v_cache, out, scale, meta, deterministic, softcap, sinks, slopes)
