"""load_weights: a checkpoint or random numbers into a model. What is amiss fails by name."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Protocol

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.weights.index import CODES, read_index
from engine.weights.parameter import Parameter, Source
from engine.weights.stored import StoredTensor
from engine.weights.stream import Transfer, run_transfers
from kernels.cpu.huge_pages import collapse

# A model on the CPU of this size moves to large pages behind the start: a second of one core a GB.
HUGE_PAGES_FROM = 64 << 20


class Loadable(Protocol):
    """The part of models.registry.Model that loading needs."""

    @property
    def device(self) -> torch.device: ...
    def parameters(self) -> Iterator[Parameter]: ...
    def tensor_name(self, stored: str) -> str: ...
    def ignores(self, stored: str) -> bool: ...
    @property
    def num_bytes(self) -> int: ...
    def finish(self) -> None: ...


def load_weights(
    model: Loadable,
    folder: str | Path | None,
    *,
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
) -> None:
    """Fill every parameter from the folder's safetensors, or with random numbers if folder is None.

    progress: called with the fraction done, from this thread.
    Raises ConfigError naming file and tensor for one that is missing, unexpected, of the wrong
    shape or dtype, or holds a NaN or infinity.
    """
    parameters = list(model.parameters())
    if folder is None:
        _fill_randomly(parameters, model.device, seed)
    else:
        folder = Path(folder)
        stored = _named(model, read_index(folder))
        run_transfers(_match(model, parameters, stored, folder), model.device, progress)
        _check_finite(parameters, stored)
    _settle(parameters)
    del parameters  # else what is packed is there twice until the last one is
    model.finish()
    if model.device.type == "cpu" and model.num_bytes >= HUGE_PAGES_FROM:
        Thread(target=collapse, name="huge-pages", daemon=True).start()


def _settle(parameters: list[Parameter]) -> None:
    for parameter in parameters:
        parameter.settle()


def _named(model: Loadable, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """By the names of the model's record, without the tensors that it ignores."""
    found: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        if model.ignores(name):
            continue
        ours = model.tensor_name(name)
        if ours in found:
            raise ConfigError(
                f"{tensor.file}: tensor {name} is also there as {found[ours].name}", param="model"
            )
        found[ours] = tensor
    return found


def _match(
    model: Loadable, parameters: list[Parameter], stored: dict[str, StoredTensor], folder: Path
) -> list[Transfer]:
    """Pair each source with its tensor on disk."""
    transfers = []
    wanted = set()
    for parameter in parameters:
        for source, target in _targets(parameter):
            wanted.add(source.name)
            if source.name not in stored:
                raise ConfigError(
                    f"{folder}: tensor {source.name} is missing from the checkpoint", param="model"
                )
            found = stored[source.name]
            if found.shape != source.shape and not (
                source.flat and math.prod(found.shape) == math.prod(source.shape)
            ):
                raise ConfigError(
                    f"{found.file}: tensor {found.name} has shape {list(found.shape)}, "
                    f"config.json implies {list(source.shape)}",
                    param="model",
                )
            if found.dtype.is_floating_point != target.dtype.is_floating_point:
                raise ConfigError(
                    f"{found.file}: tensor {found.name}: dtype {CODES[found.dtype]}, config.json "
                    f"implies {CODES[target.dtype]}",
                    param="model",
                )
            if source.flat:
                found = replace(found, shape=(math.prod(found.shape),))
            if source.at is not None:
                found = found.one_of_stack(source.at, source.shape)
            transfers.append(Transfer(target, source, found))
    for name, tensor in stored.items():
        if name not in wanted:
            raise ConfigError(
                f"{tensor.file}: unexpected tensor {tensor.name}: the architecture has no use for "
                "it",
                param="model",
            )
    return transfers


def _targets(parameter: Parameter) -> Iterator[tuple[Source, Tensor]]:
    """Each source with the rows of the parameter that it fills."""
    at = 0
    for source in parameter.sources:
        yield source, parameter.tensor[at : at + source.num_rows]
        at += source.num_rows
    assert at == parameter.tensor.shape[0], parameter.name


def _check_finite(parameters: list[Parameter], stored: dict[str, StoredTensor]) -> None:
    """A sum reads each weight once, allocates nothing, and keeps any NaN or infinity. Integers
    have none; the scales among a block's bytes are looked at when they are decoded."""
    parameters = [each for each in parameters if each.tensor.is_floating_point()]
    if not parameters:
        return
    sums = torch.stack([p.tensor.sum(dtype=torch.float32) for p in parameters])
    for index in (~sums.isfinite()).nonzero().flatten().tolist():
        for source, target in _targets(parameters[index]):
            if not bool(target.isfinite().all()):
                raise ConfigError(
                    f"{stored[source.name].file}: tensor {source.name} holds NaN or infinity "
                    f"(as {_name(target.dtype)})",
                    param="model",
                )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _fill_randomly(parameters: list[Parameter], device: torch.device, seed: int) -> None:
    """Ones for norms, else normal numbers, made on the device."""
    generator = torch.Generator(device).manual_seed(seed)
    for parameter in parameters:
        if parameter.fill is not None:
            parameter.fill(generator)
        elif not parameter.tensor.is_floating_point():
            parameter.tensor.random_(generator=generator)
        elif parameter.std:
            parameter.tensor.normal_(0.0, parameter.std, generator=generator)
        else:
            parameter.tensor.fill_(1.0 - parameter.offset)
