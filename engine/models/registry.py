"""Model: the interface of a network to the engine, and the classes that fulfil it. How to add one:
docs/adding-a-model.md."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.config.kv_groups import KVGroups
from engine.config.model_config import ModelConfig
from engine.layers.build import Builder
from engine.layers.linear import Linear
from engine.models.decoder import Decoder
from engine.parallel.group import TensorParallelGroup
from engine.parallel.stages import Stage
from engine.quantization.method import ExpertsSpec, LinearMethod, LinearSpec
from engine.quantization.registry import linear_method
from engine.weights.parameter import Parameter, Unit
from kernels.dispatch import Kernels
from kernels.kv.quantized import KV
from kernels.metadata import AttentionMeta


class Model(Protocol):
    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    group: TensorParallelGroup  # its rank's part is what this model holds
    head_group: TensorParallelGroup  # of these, those that the heads of attention are divided among
    stage: Stage  # whose layers it holds; num_parameters and bytes are of these
    layer_numbers: range
    kv: KVGroups  # what these keep
    modules_elsewhere: set[str]  # that adapters may change, of layers that other stages have
    num_parameters: int  # of this rank
    num_active_parameters: int  # of these, those that a token meets
    # Of weights and tables at most while they are loaded: what is not packed, all that is, and
    # open_bytes.
    loading_bytes: int
    open_bytes: int  # of what is packed, at most at once before it is: of two layers, or more
    num_bytes: int  # of weights and tables once finished
    # [vocab_size + virtual_tokens, hidden_size]: what token ids are looked up in. The rows behind
    # the vocabulary are the adapters'.
    lookup: Tensor

    def forward(
        self,
        token_ids: Tensor,
        metas: Sequence[AttentionMeta],
        kv: Mapping[int, KV],
    ) -> Tensor:
        """Compute a step: token_ids [num_tokens] int32 or int64 -> hidden [num_tokens, hidden_size]
        after the final norm.

        metas: of each view, in the order of `KVGroups.views`, planned. kv: of each layer that
        keeps something (see `KVCache.layers`), as AttentionMeta describes; written in place.
        """
        ...

    def enter(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Compute the first layer's input, the first part of `forward`: [num_tokens,
        hidden_size]."""
        ...

    def through(
        self,
        residual: Tensor,
        metas: Sequence[AttentionMeta],
        kv: Mapping[int, KV],
    ) -> Tensor:
        """Run this stage's layers, the middle part of `forward`. residual may be overwritten."""
        ...

    def leave(self, residual: Tensor) -> Tensor:
        """Apply the final norm to the output of the last layer of all, the last part of
        `forward`."""
        ...

    def logits(self, hidden: Tensor, whole: bool = True) -> Tensor:
        """Compute logits: hidden [n, hidden_size] -> [n, vocab_size], float32 on the CPU, else in
        the model's dtype.

        Every rank has to call it; only the first rank's result has a meaning.
        whole: False for [n, share], of this rank's share of the vocabulary
            (`TensorParallelGroup.share`).
        """
        ...

    def tune(self, tokens: Sequence[int], samples: Sequence[int]) -> None:
        """Look for the fastest GEMMs for steps of these numbers of tokens, and of tokens that
        sample (CUDA; a no-op elsewhere)."""
        ...

    def matrices(self) -> list[LinearSpec]:
        """Return the specs of all linear layers; the head is left out where it is the embedding."""
        ...

    def expert_specs(self) -> list[ExpertsSpec]: ...

    def one_layer(self) -> "Model":
        """Return the model with one layer of each kind; layers of one kind launch the same
        kernels."""
        ...

    def parameters(self) -> Iterator[Parameter]:
        """Return every tensor that loading fills, with the checkpoint tensors it comes from."""
        ...

    def units(self) -> Iterator[Unit]:
        """Return the units of parameters that any thread may finish, before `finish`.

        Parameters of no unit wait for `finish`, and are allocated before any is filled.
        """
        ...

    def tensor_name(self, stored: str) -> str:
        """Return the name that parameters' sources have for the checkpoint's tensor of this
        name."""
        ...

    def ignores(self, stored: str) -> bool:
        """Whether the model does not use the checkpoint's tensor of this name."""
        ...

    def linears(self) -> Iterator[Linear]:
        """Return the linear layers that adapters may change, in a fixed order; the head is not
        one."""
        ...

    def step_bytes(self, tokens: int, samples: int) -> int:
        """Estimate the most bytes alive at once in a step. tokens: of the step. samples: of these,
        those that sample."""
        ...

    def finish(self) -> None:
        """Let the layers repack what is not yet repacked, after all parameters are filled.

        The loader calls it once.
        """
        ...


# Architecture.network -> the class. Arguments: what its parts are made with; the method for a head
# that is the embedding; rows behind the vocabulary.
MODELS: dict[str, Callable[[Builder, LinearMethod, int], Model]] = {"decoder": Decoder}


def build_model(
    model_config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    kernels: Kernels,
    *,
    quantization: str = "none",
    group: TensorParallelGroup | None = None,
    stage: Stage = Stage(),  # noqa: B008, it is frozen
    spread_experts: bool = False,
    data_parallel_attention: bool = False,
    virtual_tokens: int = 0,
    runs_on: str | None = None,
) -> Model:
    """Allocate the model on its device; its weights are undefined until ``load_weights``.

    spread_experts: the ranks of the group have whole experts each, and not a part of each expert.
    data_parallel_attention: each rank has all heads, for its own requests.
    runs_on: the type of the device that it is meant for, if that is another: on torch's "meta"
        device a model takes no memory, and its parts say what they would take.
    """
    device = torch.device(device)
    if str(device) == "cuda":  # streams and threads want to know which
        device = torch.device("cuda", torch.cuda.current_device())
    runs_on = runs_on or device.type
    method = linear_method(quantization, kernels, runs_on, model_config.quantized)
    build = Builder(
        model_config,
        kernels,
        method,
        group or TensorParallelGroup(),
        dtype,
        # The CPU computes in float32 and keeps 16 bits only where memory is read: weights and KV.
        torch.float32 if runs_on == "cpu" else dtype,
        device,
        stage,
        spread_experts=spread_experts,
        data_parallel_attention=data_parallel_attention,
        runs_on=runs_on,
    )
    # A head that is the embedding is loaded with it, as the checkpoint has it.
    tied = method if method.FROM_DENSE else linear_method("none", kernels, runs_on)
    return MODELS[model_config.record.network](build, tied, virtual_tokens)
