"""calibrate: runs a calibration text through a model layer by layer, and records matrices' inputs.

A matrix is rounded for the inputs that it will have in the rounded model: all earlier matrices,
also those of the same layer, are already rounded. Its inputs in the unrounded model are recorded
too, so that the matrix can compensate for errors of earlier matrices.

Memory holds the embedding, the current layer, one Hessian, and the text's activations: those
between layers twice, unrounded and rounded, and those inside one layer in bfloat16.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
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
from engine.models.decoder import Decoder
from engine.models.decoder_layer import DecoderLayer
from engine.models.registry import build_model
from engine.quantization.method import Dense, DenseState, ExpertsSpec, LinearSpec
from engine.text.tokenizer import Tokenizer
from engine.weights.huge_pages import give_back
from engine.weights.load import fill_parameters, read_named
from engine.weights.parameter import Parameter
from kernels.dispatch import Kernels, kernels_for
from kernels.metadata import AttentionMeta

PIECE = 512  # tokens of a piece of the text, which is a separate context
PIECES = 64  # maximum number of pieces, taken at equal distances from a longer text
LEAST = 1024  # minimum tokens of a text, for useful statistics
BLOCK = 16


class Inputs(NamedTuple):
    """Matrices of a layer with the same input, and statistics of this input.

    matrices: names of the matrices in the model.
    hessian: float32 [in, in], the sum of x x^T over inputs x.
    tokens: the number of inputs x.
    missing: float32 [in, in], the sum of x (x' - x)^T, where x' is the unrounded model's input;
        None if the inputs of the two models could not be paired.
    owed: float32 [in, out], the sum of x (r' - r)^T, where r is the residual to which the matrices'
        output is added, and r' the unrounded model's; None without a residual.
    """

    matrices: tuple[str, ...]
    hessian: Tensor
    tokens: int
    missing: Tensor | None
    owed: Tensor | None


# A function that rounds the matrices of Inputs, and returns {matrix's name: rounded values} for the
# computation of later layers.
Take = Callable[[Inputs], dict[str, Tensor]]


def read_pieces(file: Path, folder: Path) -> list[Tensor]:
    """Read a calibration text as pieces of token ids, each with the tokenizer's initial tokens.

    folder: the model's folder, with its tokenizer.
    Raises ConfigError for a file that is unreadable or too short.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--calibrate {file}: cannot be read: {error}", param="calibrate"
        ) from None
    tokenizer = Tokenizer.load(str(folder))
    first = tokenizer.encode("", add_special_tokens=True)
    # limits the work for a large file, as tokens have fewer than 16 characters on average
    ids = tokenizer.encode(text[: 16 * PIECE * PIECES])
    if len(ids) < LEAST:
        raise ConfigError(
            f"--calibrate {file}: has {len(ids):,} tokens, and {LEAST:,} are the least; take a "
            "longer text",
            param="calibrate",
        )
    step = PIECE - len(first)
    pieces = [first + ids[begin : begin + step] for begin in range(0, len(ids), step)]
    count = min(len(pieces), PIECES)
    return [torch.tensor(pieces[at * len(pieces) // count]) for at in range(count)]


def calibrate(
    config: ModelConfig,
    folder: Path,
    pieces: Sequence[Tensor],
    take: Take,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Run pieces of a text through the layers of a model, and call `take` with matrices' inputs.

    config: the configuration of the folder's model, whose weights have 16 or 32 bits.
    pieces: token ids, each of at most PIECE tokens.
    progress: called after each layer with (number of finished layers, number of all layers).
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
        run.exact(layer)
        for state in observer.states:
            _replace(owners, take(run.inputs_of(layer, state)))
        run.rounded(layer)
        for parameter in parameters:
            give_back(parameter.tensor)
        if progress is not None:
            progress(number + 1, len(model.layers))


class _Seen(Exception):
    """The exception that ends a layer's run after the last matmul of the watched matrices."""


class _Sums:
    """The sums of Inputs for the matrices of one state, over all calls of its matmul.

    A state is the weights of a linear layer or of a layer's experts; see `_Observer`.
    """

    def __init__(self, calls: list[list[tuple[Tensor, Tensor | None]]]) -> None:
        """Set up the sums.

        calls: for each piece of the text and each call the unrounded model's (input, residual).
        """
        self._calls = calls
        self._piece, self._call = -1, 0
        self._paired = True
        self._tokens = 0
        self._sums: dict[str, Tensor] = {}

    def begin_piece(self) -> None:
        self._piece, self._call = self._piece + 1, 0

    def add(self, x: Tensor, residual: Tensor | None) -> None:
        """Add the inputs of a call. Raises _Seen after the last call of a piece."""
        calls, x = self._calls[self._piece], x.float()
        self._tokens += len(x)
        self._add("hessian", x, x)
        exact, exact_residual = calls[self._call] if self._call < len(calls) else (None, None)
        if exact is None or exact.shape != x.shape:
            self._paired = False  # the rounded model's router has sent other tokens to this expert
        elif self._paired:
            self._add("missing", x, exact.float() - x)
            if residual is not None and exact_residual is not None:
                self._add("owed", x, exact_residual.float() - residual)
        self._call += 1
        if self._call >= len(calls):
            raise _Seen

    def _add(self, what: str, x: Tensor, y: Tensor) -> None:
        total = self._sums.get(what)
        if total is None:
            total = self._sums[what] = torch.zeros(x.shape[1], y.shape[1])
        total.addmm_(x.t(), y)

    def inputs(self, matrices: tuple[str, ...]) -> Inputs:
        sums = self._sums
        missing, owed = sums.get("missing"), sums.get("owed")
        if not self._paired:
            missing = owed = None
        return Inputs(matrices, sums["hessian"], self._tokens, missing, owed)


class _Observer(Dense):
    """The dense linear method in float32, which records the inputs of its matrices.

    Weights have memory only while their layer runs. A state is the result of `LinearMethod.create`
    for a linear layer, or for a layer's experts.

    states: ids of the states of the last layer that ran, in the order of their first calls.
    """

    def __init__(self, kernels: Kernels) -> None:
        super().__init__(kernels)
        self._names: dict[int, tuple[str, ...]] = {}  # id of a state -> names of its matrices
        # id of a state -> for each piece of the text and each call the unrounded (input, residual)
        self._exact: dict[int, list[list[tuple[Tensor, Tensor | None]]]] = {}
        self._pieces = 0  # number of pieces that the unrounded layer has processed
        self._records = False
        self._watched: tuple[int, _Sums] | None = None

    @property
    def states(self) -> list[int]:
        return list(self._exact)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the matrices' inputs in the `with` block as those of the unrounded model."""
        self._exact.clear()
        self._pieces, self._records = 0, True
        yield
        self._records = False

    def begin_piece(self) -> None:
        self._pieces += 1
        if self._watched is not None:
            self._watched[1].begin_piece()

    @contextmanager
    def watching(self, state: int) -> Iterator[Callable[[], Inputs]]:
        """Sum the inputs of a state in the `with` block; yield a function that returns the sums.

        This frees the unrounded model's recorded inputs of the state.
        """
        sums = _Sums(self._exact.pop(state))
        self._watched = state, sums
        yield lambda: sums.inputs(self._names[state])
        self._watched = None

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

    def apply_add(self, state: DenseState, x: Tensor, residual: Tensor) -> Tensor:
        self._watch(state, x, residual)
        return residual.add_(linear(x, state.weight, state.bias))

    def create_experts(self, spec: ExpertsSpec) -> tuple[Any, Sequence[Parameter]]:
        state, parameters = super().create_experts(spec)
        self._names[id(state)] = tuple(
            source.name.removesuffix(".weight") for source in spec.gate_up
        )
        return state, parameters

    def apply_experts(
        self, state: Any, x: Tensor, weights: Tensor, ids: Tensor, residual: Tensor | None
    ) -> Tensor:
        # one Hessian of all tokens for all experts, as one for each would take too much memory
        self._watch(state, x)
        return super().apply_experts(state, x, weights, ids, residual)

    def _watch(self, state: Any, x: Tensor, residual: Tensor | None = None) -> None:
        key = id(state)
        if self._records:
            pieces = self._exact.setdefault(key, [])
            pieces.extend([] for _ in range(self._pieces - len(pieces)))
            # residuals stay in float32, as small errors beside their largest numbers would be lost
            # in 16 bits
            pieces[-1].append((x.bfloat16(), None if residual is None else residual.clone()))
        elif self._watched is not None and self._watched[0] == key:
            self._watched[1].add(x, residual)


class _Run:
    """The run of a text through a model's layers, unrounded and rounded side by side.

    Of both models only the activations between two layers are kept.

    pieces: the text's token ids.
    """

    def __init__(self, model: Decoder, observer: _Observer, pieces: Sequence[Tensor]) -> None:
        self._model, self._observer = model, observer
        longest = max(len(piece) for piece in pieces)
        self._paged = Paged(model, -(-longest // BLOCK), BLOCK)
        self._pieces = pieces
        self._residuals = [model.enter(ids, self._metas(ids)[0].positions) for ids in pieces]
        self._exact = [residual.clone() for residual in self._residuals]

    def _metas(self, ids: Tensor) -> Sequence[AttentionMeta]:
        return self._paged.metas([(ids, range(-(-len(ids) // BLOCK)), 0)])

    def exact(self, layer: DecoderLayer) -> None:
        """Run an unrounded layer on the output of the earlier unrounded layers."""
        with self._observer.recording():
            for at in range(len(self._pieces)):
                self._exact[at] = self._through(layer, at, self._exact[at])

    def inputs_of(self, layer: DecoderLayer, state: int) -> Inputs:
        """Run a layer on the output of the rounded layers, up to the matrices of one state.

        Returns the statistics of these matrices' inputs.

        state: the id of the state, whose matrices have the same input.
        """
        with self._observer.watching(state) as inputs:
            for at in range(len(self._pieces)):
                with suppress(_Seen):
                    self._through(layer, at, self._residuals[at])
            return inputs()

    def rounded(self, layer: DecoderLayer) -> None:
        """Run a rounded layer on the output of the earlier rounded layers."""
        for at in range(len(self._pieces)):
            self._residuals[at] = self._through(layer, at, self._residuals[at])

    @torch.inference_mode()
    def _through(self, layer: DecoderLayer, at: int, residual: Tensor) -> Tensor:
        """Return a layer's output for a residual. at: the index of the text's piece."""
        self._observer.begin_piece()
        alone, ids = copy(self._model), self._pieces[at]
        alone.layers = [layer]
        metas, inputs = self._metas(ids), None
        if self._model.layer_inputs is not None:
            entered = self._model.enter(ids, metas[0].positions)
            inputs = self._model.layer_inputs(ids, entered, None)
        return alone.through(residual.clone(), metas, self._paged.kv.layers, inputs)


def _replace(owners: Sequence[Linear | Stack], values: dict[str, Tensor]) -> None:
    """Write rounded matrices into the linear layers and experts that have them.

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
