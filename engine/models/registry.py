"""Model: the interface of a network; build_model: creates the network for a config.json.

docs/adding-a-model.md says how to add a class.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from engine.config.kv_groups import KVGroups
from engine.config.model_config import ModelConfig
from engine.layers.build import Builder
from engine.layers.linear import Linear
from engine.layers.routes import RouteTap
from engine.models.decoder import Decoder
from engine.models.image_rows import ImageRows
from engine.models.vision.registry import build_tower
from engine.models.vision.tower import Tower
from engine.parallel.group import TensorParallelGroup
from engine.parallel.stages import Stage
from engine.quantization.method import ExpertsSpec, LinearMethod, LinearSpec
from engine.quantization.registry import linear_method, methods_by_layer
from engine.weights.parameter import Parameter, Unit
from kernels.dispatch import Kernels
from kernels.kv.quantized import KV
from kernels.metadata import AttentionMeta


class Model(Protocol):
    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    # the ranks that divide each layer; this model is one rank's part
    group: TensorParallelGroup
    head_group: TensorParallelGroup  # the ranks that divide attention heads
    # the pipeline stage; layers, num_parameters and bytes count only this stage
    stage: Stage
    layer_numbers: range
    kv: KVGroups  # the KV groups of these layers
    # layers whose inputs a drafter reads (see `Decoder`)
    taps: tuple[int, ...]
    tapped: list[Tensor]
    routes: RouteTap  # records the experts that routers choose, if a request asks for them
    modules_elsewhere: set[str]  # modules of other stages' layers that adapters may change
    num_parameters: int  # number of parameters on this rank
    num_active_parameters: int  # number of the parameters that one token uses
    # The peak bytes of weights and tables while loading: parameters that are never packed, all
    # packed ones, and open_bytes.
    loading_bytes: int
    # maximum bytes of parameters that wait to be packed; two layers always fit
    open_bytes: int
    num_bytes: int  # bytes of weights and tables after `finish`
    # [vocab_size + virtual_tokens, hidden_size]: the embedding table. The rows after the vocabulary
    # belong to adapters.
    lookup: Tensor
    tower: Tower | None  # the vision encoder, on the first stage of models with images

    @property
    def rotary_table(self) -> Tensor:
        """The rotary table of a layer with plain attention."""
        ...

    def forward(
        self,
        token_ids: Tensor,
        metas: Sequence[AttentionMeta],
        kv: Mapping[int, KV],
        images: ImageRows | None = None,
    ) -> Tensor:
        """Compute a step; return hidden states [num_tokens, hidden_size] after the final norm.

        token_ids: [num_tokens], int32 or int64.
        metas: the planned AttentionMeta of each view, in the order of `KVGroups.views`.
        kv: layer -> its KV or state tensors (see `KVCache.layers`); written in place.
        images: the embeddings of image tokens.
        """
        ...

    def enter(
        self, token_ids: Tensor, positions: Tensor, images: ImageRows | None = None
    ) -> Tensor:
        """Compute the first layer's input [num_tokens, hidden_size], the first part of
        `forward`."""
        ...

    def through(
        self,
        residual: Tensor,
        metas: Sequence[AttentionMeta],
        kv: Mapping[int, KV],
        *,
        images: ImageRows | None = None,
    ) -> Tensor:
        """Run this stage's layers, the middle part of `forward`; return the residual.

        The argument `residual` may be overwritten.
        """
        ...

    def leave(self, residual: Tensor) -> Tensor:
        """Compute the final norm of the last layer's output, the last part of `forward`."""
        ...

    def logits(self, hidden: Tensor, whole: bool = True) -> Tensor:
        """Compute logits [n, vocab_size] of hidden [n, hidden_size].

        Logits are float32 on the CPU, else in the model's dtype. Every rank has to call this
        method; only the first rank's result is valid.

        whole: whether to compute the whole vocabulary, or only this rank's shard [n, share]
            (`TensorParallelGroup.share`), which is valid on every rank.
        """
        ...

    def tune(self, tokens: Sequence[int], samples: Sequence[int]) -> None:
        """Find the fastest GEMMs for the given batch sizes; does nothing except on CUDA.

        tokens: numbers of tokens of a step.
        samples: numbers of sampling tokens, for the LM head.
        """
        ...

    def matrices(self) -> list[LinearSpec]:
        """Return the specs of all linear layers, except a tied LM head."""
        ...

    def expert_specs(self) -> list[ExpertsSpec]: ...

    def one_layer(self) -> "Model":
        """Return a view of the model with one layer of each kind.

        Layers of one kind launch the same kernels.
        """
        ...

    def parameters(self) -> Iterator[Parameter]:
        """Return every parameter that loading fills."""
        ...

    def units(self) -> Iterator[Unit]:
        """Return the groups of parameters that any loading thread may pack, before `finish`.

        Parameters outside of units are packed by `finish`, and allocated before any is filled.
        """
        ...

    def tensor_name(self, stored: str) -> str:
        """Return the name that parameters use (`Source.name`) for the files' tensor `stored`."""
        ...

    def ignores(self, stored: str) -> bool:
        """Whether loading skips the checkpoint's tensor `stored`, as the model has no such
        parameter."""
        ...

    def linears(self) -> Iterator[Linear]:
        """Return the linear layers that adapters may change, in a fixed order, without the LM
        head."""
        ...

    def step_bytes(self, tokens: int, samples: int) -> int:
        """Return an estimate of the peak bytes of activations in a step.

        tokens: the number of the step's tokens.
        samples: the number of tokens whose logits are computed.
        """
        ...

    def finish(self) -> None:
        """Pack the remaining layers, after all parameters are filled."""
        ...

    def parts(self, most_bytes: int) -> "Iterator[tuple[Decoder, Decoder]]":
        """Yield, for each part of the model, (an unloaded copy of the part, a view of the model's
        part).

        most_bytes: the maximum bytes of the layers in one part, which has at least one layer.
        """
        ...


# Architecture.network -> the model's class, which takes (builder, linear method of a tied LM head,
# number of embedding rows after the vocabulary).
MODELS: dict[str, Callable[[Builder, LinearMethod, int], Model]] = {"decoder": Decoder}


def build_model(
    model_config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    kernels: Kernels,
    *,
    quantization: str = "none",
    quantization_layers: Mapping[str, str] | None = None,
    group: TensorParallelGroup | None = None,
    stage: Stage = Stage(),  # noqa: B008, it is frozen
    spread_experts: bool = False,
    data_parallel_attention: bool = False,
    virtual_tokens: int = 0,
    runs_on: str | None = None,
    method: LinearMethod | None = None,
) -> Model:
    """Allocate the model on its device; its weights are undefined until ``load_weights``.

    quantization: the value in the configuration.
    quantization_layers: pattern of names of matrices -> quantization, where it differs.
    group: the ranks that divide each layer; None = a single rank.
    spread_experts: whether ranks of the group have whole experts instead of a part of each.
    data_parallel_attention: whether each rank has all heads, for its own requests.
    virtual_tokens: number of rows after the vocabulary in the embedding table.
    runs_on: the type of the device on which the model will run, if it differs from `device`. On
        torch's "meta" device a model takes no memory, but reports the memory that it would take.
    method: the method of all linear layers, instead of that of `quantization`.
    """
    build = _builder(model_config, dtype, torch.device(device), kernels, quantization, runs_on)
    build = replace(
        build,
        method=method or build.method,
        group=group or TensorParallelGroup(),
        stage=stage,
        spread_experts=spread_experts,
        data_parallel_attention=data_parallel_attention,
    )
    layer_methods = None
    if quantization_layers:
        layer_methods = methods_by_layer(
            build.method, quantization_layers, kernels, build.runs_on, model_config.quantized
        )
        build = replace(build, layer_methods=layer_methods)
    # A tied LM head is loaded with the embedding, unquantised if the method requires that.
    tied = build.method
    if not tied.FROM_DENSE:
        tied = linear_method("none", kernels, build.runs_on)
    model = MODELS[model_config.record.network](build, tied, virtual_tokens)
    if layer_methods is not None:
        layer_methods.check()
    return model


def build_tower_alone(
    model_config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels,
    *,
    runs_on: str | None = None,
) -> Tower | None:
    """Allocate a model's vision encoder without the text model; None if the model has none.

    runs_on: see `build_model`.
    """
    return build_tower(_builder(model_config, dtype, device, kernels, "none", runs_on))


def _builder(
    model_config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels,
    quantization: str,
    runs_on: str | None,
) -> Builder:
    """Return the builder of a whole model's layers on one rank."""
    if str(device) == "cuda":  # streams and threads need the device's index
        device = torch.device("cuda", torch.cuda.current_device())
    runs_on = runs_on or device.type
    return Builder(
        model_config,
        kernels,
        linear_method(quantization, kernels, runs_on, model_config.quantized),
        TensorParallelGroup(),
        dtype,
        # the dtype of activations: the CPU computes in float32, and uses 16 bits only for weights
        # and KV
        torch.float32 if runs_on == "cpu" else dtype,
        device,
        runs_on=runs_on,
    )
