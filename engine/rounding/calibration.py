"""Runs a calibration text through a model, layer by layer, and hands out each matrix's inputs.

Memory holds the embedding, the layer that runs, the Hessians of its matrices, and the text's
activations. Later layers read what the rounded layers before them compute, as they will when they
serve.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from engine.config.model_config import ModelConfig
from engine.errors import ConfigError
from engine.evaluation.paged import Paged
from engine.layers.experts import Stack
from engine.layers.linear import Linear
from engine.models.decoder import Decoder, DecoderLayer
from engine.models.registry import build_model
from engine.quantization.method import Dense, DenseState, ExpertsSpec, LinearSpec
from engine.text.tokenizer import Tokenizer
from engine.weights.huge_pages import give_back
from engine.weights.load import fill_parameters, read_named
from engine.weights.parameter import Parameter
from kernels.dispatch import Kernels, kernels_for
from kernels.metadata import AttentionMeta

PIECE = 512  # tokens of the text that attend to each other
PIECES = 64  # of a longer text the first are taken
LEAST = 1024  # tokens; fewer say little of how large inputs are
BLOCK = 16


class Inputs(NamedTuple):
    """The matrices of a layer, and the inputs that the calibration text gave them.

    matrices: their names in the model.
    hessian: float32 [in, in], the sum of x x^T over inputs x; zeros where no token came.
    tokens: the number of inputs x.
    """

    matrices: tuple[str, ...]
    hessian: Tensor
    tokens: int


# Rounds the matrices of Inputs; returns the rounded values by name, for the layers after them.
Take = Callable[[Inputs], dict[str, Tensor]]


def read_pieces(file: Path, folder: Path) -> list[Tensor]:
    """Tokenise a calibration text and cut it into pieces, each with the model's first tokens.

    folder: the model's folder, with its tokenizer.
    Raises ConfigError for a file that cannot be read or is too short.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--calibrate {file}: cannot be read: {error}", param="calibrate"
        ) from None
    tokenizer = Tokenizer.load(str(folder))
    first = tokenizer.encode("", add_special_tokens=True)
    # tokens have fewer than 16 characters on average; the rest of a large file is not tokenised
    ids = tokenizer.encode(text[: 16 * PIECE * PIECES])
    if len(ids) < LEAST:
        raise ConfigError(
            f"--calibrate {file}: has {len(ids):,} tokens, and {LEAST:,} are the least; take a "
            "longer text",
            param="calibrate",
        )
    step = PIECE - len(first)
    pieces = [first + ids[begin : begin + step] for begin in range(0, len(ids), step)]
    return [torch.tensor(piece) for piece in pieces[:PIECES]]


def calibrate(
    config: ModelConfig,
    folder: Path,
    pieces: Sequence[Tensor],
    take: Take,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Run pieces of a text through the layers of a model, and hand the matrices' inputs to `take`.

    config: the configuration of the folder's model, whose weights have 16 or 32 bits.
    pieces: token ids, each of at most PIECE tokens.
    progress: a function called after each layer with the number of layers done, and of all.
    """
    kernels = kernels_for("cpu")
    observer = _Observer(kernels)
    model = build_model(config, torch.float32, "cpu", kernels, method=observer)
    assert isinstance(model, Decoder)
    stored = read_named(model, folder, tell=False)
    inside = {
        id(parameter.tensor)
        for layer in model.layers
        for owner in layer.packed
        for parameter in owner.parameters
    }
    heads = {id(parameter.tensor) for end in model._ends() for parameter in end.parameters}
    fill_parameters(
        model,
        [
            parameter
            for parameter in model.parameters()
            if id(parameter.tensor) not in inside | heads
        ],
        stored,
        folder,
    )
    run = _Run(model, observer, pieces)
    for number, layer in enumerate(model.layers):
        owners = list(layer.packed)
        parameters = [parameter for owner in owners for parameter in owner.parameters]
        fill_parameters(model, parameters, stored, folder)
        run.layer(layer, observed=True)
        for inputs in observer.taken():
            _replace(owners, take(inputs))
        run.layer(layer, observed=False)
        for parameter in parameters:
            give_back(parameter.tensor)
        if progress is not None:
            progress(number + 1, len(model.layers))


class _Observer(Dense):
    """The dense method in float32, which sums x x^T of what its matrices multiply.

    Weights have memory only while their layer runs.
    """

    def __init__(self, kernels: Kernels) -> None:
        super().__init__(kernels)
        self.watches = False
        self._names: dict[int, tuple[str, ...]] = {}  # id of a state -> its matrices
        self._sums: dict[int, Tensor] = {}
        self._tokens: Counter[int] = Counter()

    def packed_bytes(self, spec: LinearSpec) -> int | None:
        return 0

    def packed_experts_bytes(self, spec: ExpertsSpec) -> int | None:
        return 0

    def create(self, spec: LinearSpec) -> tuple[DenseState, Sequence[Parameter]]:
        state, parameters = super().create(spec)
        self._names[id(state)] = tuple(part.name for part in spec.parts)
        return state, parameters

    def apply(self, state: DenseState, x: Tensor) -> Tensor:
        self._watch(state, x)
        return linear(x, state.weight, state.bias)

    def create_experts(self, spec: ExpertsSpec) -> tuple[Any, Sequence[Parameter]]:
        state, parameters = super().create_experts(spec)
        self._names[id(state)] = tuple(
            source.name.removesuffix(".weight") for source in spec.gate_up
        )
        return state, parameters

    def apply_experts(
        self, state: Any, x: Tensor, weights: Tensor, ids: Tensor, residual: Tensor | None
    ) -> Tensor:
        # all tokens count for all experts: a Hessian for each would take too much memory
        self._watch(state, x)
        return super().apply_experts(state, x, weights, ids, residual)

    def _watch(self, state: Any, x: Tensor) -> None:
        if not self.watches:
            return
        x = x.float()
        total = self._sums.get(id(state))
        if total is None:
            total = self._sums[id(state)] = torch.zeros(x.shape[1], x.shape[1])
        total.addmm_(x.t(), x)
        self._tokens[id(state)] += len(x)

    def taken(self) -> Iterator[Inputs]:
        """Return the sums since the last call, each of which is freed after its turn."""
        for key in list(self._sums):
            yield Inputs(self._names[key], self._sums.pop(key), self._tokens.pop(key))


class _Run:
    """The text's activations, which layers change in place of each other."""

    def __init__(self, model: Decoder, observer: _Observer, pieces: Sequence[Tensor]) -> None:
        self._model, self._observer = model, observer
        longest = max(len(piece) for piece in pieces)
        self._paged = Paged(model, -(-longest // BLOCK), BLOCK)
        self._pieces = pieces
        self._residuals = []
        for ids in pieces:
            metas = self._metas(ids)
            self._residuals.append(model.enter(ids, metas[0].positions))

    def _metas(self, ids: Tensor) -> Sequence[AttentionMeta]:
        return self._paged.metas([(ids, range(-(-len(ids) // BLOCK)), 0)])

    @torch.inference_mode()
    def layer(self, layer: DecoderLayer, observed: bool) -> None:
        """Run one layer over the text.

        observed: whether only the inputs of matrices are wanted; else the output goes to the next
            layer.
        """
        self._observer.watches = observed
        alone = copy(self._model)
        alone.layers = [layer]
        for at, (ids, residual) in enumerate(zip(self._pieces, self._residuals, strict=True)):
            inputs = None
            if self._model.layer_inputs is not None:
                entered = self._model.enter(ids, self._metas(ids)[0].positions)
                inputs = self._model.layer_inputs(ids, entered, None)
            output = alone.through(
                residual.clone(), self._metas(ids), self._paged.kv.layers, inputs
            )
            if not observed:
                self._residuals[at] = output
        self._observer.watches = False


def _replace(owners: Sequence[Linear | Stack], values: dict[str, Tensor]) -> None:
    """Write rounded matrices over those of the layers that have them.

    values: float32 [out, in] by the matrix's name.
    """
    for owner in owners:
        for parameter in owner.parameters:
            at = 0
            for source in parameter.sources:
                rounded = values.get(source.name.removesuffix(".weight"))
                if rounded is not None and source.name.endswith(".weight"):
                    parameter.tensor[at : at + source.num_rows] = source.part_of(rounded)
                at += source.num_rows
