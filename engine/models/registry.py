"""architecture name -> model class.

To add a model:
1. ``model_config.ARCHITECTURES``: its name as config.json writes it, and any switch it needs in
   ModelConfig.
2. If it is the Llama family with other switches, name it below and you are done. Otherwise write
   one file here with a table from our names to the checkpoint's (see ``llama.CHECKPOINT``),
   layers made by ``LinearFactory``, and a class that fulfils ``Model``. Nothing in ``forward`` or
   ``logits`` may synchronise with the host or have a shape that depends on values, because decode
   steps are captured as CUDA graphs.
3. ``tests/engine/test_models.py``: add its transformers configuration to the list; the tests
   compare logits.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.layers.linear import Linear
from engine.model_config import ModelConfig
from engine.models.llama import Llama
from engine.parallel.group import TensorParallelGroup
from engine.quantization.method import linear_method
from engine.weights.parameter import Parameter
from kernels.dispatch import Kernels
from kernels.metadata import AttentionMeta


class Model(Protocol):
    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    # [vocab_size + virtual_tokens, hidden_size]: what token ids are looked up in. The rows behind
    # the vocabulary are the adapters'.
    lookup: Tensor

    def forward(
        self, token_ids: Tensor, meta: AttentionMeta, kv: Sequence[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """token_ids [num_tokens] int32 or int64 -> hidden [num_tokens, hidden_size] after the
        final norm.

        kv: (keys, values) of each layer, as AttentionMeta describes; written in place.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden_size] -> [n, vocab_size], float32 on the CPU, else in the model's
        dtype."""
        ...

    def tune(self, tokens: Sequence[int], samples: Sequence[int]) -> None:
        """Look for the fastest products for steps of these numbers of tokens, and of tokens that
        sample (CUDA; a no-op elsewhere)."""
        ...

    def one_layer(self) -> "Model":
        """The same weights without the layers that launch what others launch too."""
        ...

    def parameters(self) -> Iterator[Parameter]:
        """Every tensor that loading fills, with the checkpoint tensors it comes from."""
        ...

    def ignores(self, name: str) -> bool:
        """Whether a checkpoint tensor that no parameter asks for is harmless."""
        ...

    def linears(self) -> Iterator[Linear]:
        """Those that adapters may change: of the layers, not the head, in a fixed order."""
        ...

    def num_bytes(self) -> int:
        """Bytes of all weights and tables on the device."""
        ...

    def finish(self) -> None:
        """All parameters are filled: let the layers repack them. Called once, by the loader."""
        ...


MODELS: dict[str, type[Llama]] = {
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Llama,
    "Qwen2ForCausalLM": Llama,
    "Qwen3ForCausalLM": Llama,
}


def build_model(
    model_config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    kernels: Kernels,
    *,
    quantization: str = "none",
    group: TensorParallelGroup | None = None,
    virtual_tokens: int = 0,
) -> Model:
    """Allocate the model on its device; its weights are undefined until ``load_weights``."""
    device = torch.device(device)
    if str(device) == "cuda":  # streams and threads want to know which
        device = torch.device("cuda", torch.cuda.current_device())
    return MODELS[model_config.architecture](
        model_config,
        dtype,
        # The CPU computes in float32 and keeps 16 bits only where memory is read: weights and KV.
        torch.float32 if device.type == "cpu" else dtype,
        device,
        kernels,
        linear_method(quantization, kernels, device),
        # A head that is the embedding is loaded with it, as the checkpoint has it; int8 can be made
        # from that.
        linear_method(quantization if quantization == "int8" else "none", kernels, device),
        group or TensorParallelGroup(),
        virtual_tokens,
    )
