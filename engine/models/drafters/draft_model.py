"""DraftModel: a smaller model with the same vocabulary as a drafter, with a separate KV cache."""

from collections.abc import Iterator, Mapping

from torch import Tensor

from engine.config.model_config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.registry import Model, build_model
from engine.weights.parameter import Parameter, Unit
from kernels.kv.quantized import KV
from kernels.metadata import AttentionMeta


class DraftModel:
    """A smaller model that drafts for the target model; implements drafter.ModelDrafter.

    A draft model reads only tokens, and no hidden states of the target model.
    """

    taps: tuple[int, ...] = ()
    reads_states = False

    def __init__(self, config: ModelConfig, model: Decoder, quantization: str) -> None:
        """Allocate the draft model on the device of its target model, `model`.

        quantization: the format for weights that are stored unquantised.
        """
        on_load = quantization if config.quantized is None and quantization != "gguf" else "none"
        build = model.build
        self.model: Model = build_model(
            config,
            build.dtype,
            build.device,
            build.kernels,
            quantization=on_load,
            runs_on=build.runs_on,
        )
        self.kv, self.device, self.dtype = self.model.kv, self.model.device, self.model.dtype
        self.num_bytes, self.open_bytes = self.model.num_bytes, self.model.open_bytes
        self.loading_bytes = self.model.loading_bytes

    def tensor_name(self, stored: str) -> str:
        """Return the name that parameters use (`Source.name`) for the files' tensor `stored`."""
        return self.model.tensor_name(stored)

    def ignores(self, stored: str) -> bool:
        """Whether loading skips the checkpoint's tensor `stored`, which the draft model lacks."""
        return self.model.ignores(stored)

    def parameters(self) -> Iterator[Parameter]:
        """Return every tensor that loading fills."""
        return self.model.parameters()

    def units(self) -> Iterator[Unit]:
        """Return the groups of parameters that any loading thread may pack."""
        return self.model.units()

    def finish(self) -> None:
        """Pack the remaining layers, after all parameters are filled."""
        self.model.finish()

    def fused(self, states: Tensor) -> Tensor:
        """Return the states unchanged, as a draft model reads only tokens."""
        return states

    def forward(
        self, token_ids: Tensor, states: Tensor, kv: Mapping[int, KV], meta: AttentionMeta
    ) -> Tensor:
        """Compute the tokens' hidden states; see `ModelDrafter.forward`."""
        # ids of virtual tokens are beyond the vocabulary
        known = token_ids.clamp(max=self.model.config.vocab_size - 1)
        return self.model.forward(known, [meta], kv)

    def logits(self, rows: Tensor) -> Tensor:
        """Compute logits by the draft model's head; see `ModelDrafter.logits`."""
        return self.model.logits(rows)
