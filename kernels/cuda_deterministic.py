"""The CUDA back end of deterministic mode (`EngineConfig.deterministic`).

A token's results depend on its request alone. They depend neither on the step's other requests nor
on how the prompt was chunked, cached, or recomputed after a preemption.

So each operation has one algorithm. Matmuls add in the same order for any number of rows. One
attention kernel computes decodes and chunks. It processes keys from the first to the last, and
never splits them over programs. The other operations compute each row independently in any case.
"""

from collections.abc import Sequence

from torch import Tensor

from kernels.attention.candidates import FIXED_ATTENTION
from kernels.attention.inputs import AttentionInputs
from kernels.candidates import first_fit
from kernels.cuda import Cuda, _count
from kernels.experts.candidates import FIXED_EXPERTS, FIXED_PACKED_EXPERTS
from kernels.gemm.deterministic import linear_fixed
from kernels.gemm.packed.candidates import FIXED_LINEAR
from kernels.kv.quantized import Cache
from kernels.metadata import AttentionMeta
from kernels.reference import Kernels


class CudaDeterministic(Cuda):
    DETERMINISTIC = True
    PACKED_LINEAR = FIXED_LINEAR
    EXPERTS = FIXED_EXPERTS
    PACKED_EXPERTS = FIXED_PACKED_EXPERTS
    CHUNK_ATTENTION = FIXED_ATTENTION

    # Use the reference's methods, which call this class's matmuls. Cuda's methods are fused.
    linear_act = Kernels.linear_act
    norm_linear = Kernels.norm_linear
    norm_gated_linear = Kernels.norm_gated_linear
    norm_route = Kernels.norm_route
    router_logits = Kernels.router_logits

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear_fixed(x, weight, bias)

    def linear_add(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor
    ) -> Tensor:
        return linear_fixed(x, weight, bias, residual)

    def tune_linear(self, weights: Sequence[Tensor], sizes: Sequence[int], add: bool) -> None:
        """Do nothing: a kernel chosen by timing could change results after a restart."""

    def prepare(
        self, meta: AttentionMeta, num_heads: int, k_cache: Cache, latent_rank: int = 0
    ) -> None:
        _count(meta)

    def attention(self, inputs: AttentionInputs, meta: AttentionMeta) -> Tensor:
        """Return causal attention by the first kernel of CHUNK_ATTENTION that fits, which computes
        decodes, too.
        """
        num_tokens, num_heads, head_dim = inputs.q.shape
        out = inputs.q.new_empty((num_tokens, num_heads * head_dim))
        _count(meta)
        first_fit(self.CHUNK_ATTENTION, inputs, meta).run(inputs, meta, out)
        return out
