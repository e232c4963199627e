"""load_weights: fills a model from a checkpoint or with random weights.

The errors name the tensor.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path
from threading import Thread
from typing import Protocol
from zlib import crc32

import torch
from torch import Tensor

from engine.errors import ConfigError, TensorError
from engine.weights.converted import Manifest, as_converted, named
from engine.weights.copies import copy_jobs
from engine.weights.huge_pages import collapse, give_back, trim
from engine.weights.index import CODES, read_index
from engine.weights.parameter import Parameter, Source, Unit
from engine.weights.stored import StoredTensor
from engine.weights.stream import Job, Loading, Transfer, not_finite, run_jobs

logger = logging.getLogger("manta.engine")

# Minimum bytes of a model on the CPU that is moved to large pages in the background after the
# start, which takes one core a second per GB.
HUGE_PAGES_FROM = 64 << 20

# On the CPU freed memory is returned to the system each time this many bytes were packed.
TRIM_EVERY = 32 << 20


class Loadable(Protocol):
    """The part of the interface `models.registry.Model` that loading needs."""

    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def parameters(self) -> Iterator[Parameter]: ...
    def units(self) -> Iterator[Unit]: ...
    @property
    def open_bytes(self) -> int: ...
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
    ranks: int = 1,
    progress: Callable[[Loading], None] | None = None,
    owns: Callable[[str], bool] | None = None,
) -> None:
    """Fill every parameter from the folder's files, or with random weights if folder is None.

    ranks: the number of ranks that divide this model. With several ranks a parameter's random
        weights depend only on its name, so that copies on all ranks are equal. A model on a single
        rank gets other random weights.
    progress: called from this thread some ten times a second.
    owns: returns whether a stored tensor belongs to this model, if the model is only a part of the
        folder's; None = all do.
    Raises ConfigError naming file and tensor for one that is missing, unexpected, of the wrong
    shape or dtype, or holds a NaN or infinity.
    """
    if folder is None:
        _fill_randomly(model, seed, by_name=ranks > 1)
    else:
        folder = Path(folder)
        manifest = Manifest.read(folder)
        stored = read_index(folder)
        if owns is not None:
            stored = {name: tensor for name, tensor in stored.items() if owns(name)}
        if manifest is not None:
            manifest.check(folder, model.device.type, str(model.dtype)[6:])
        else:
            stored = _named(model, stored)
        _fill(model, stored, folder, progress, converted=manifest is not None)
    model.finish()
    # packing leaves gaps in torch's memory that are too small for the KV cache
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
    if model.device.type == "cpu" and model.num_bytes >= HUGE_PAGES_FROM:
        Thread(target=collapse, name="huge-pages", daemon=True).start()


def _fill(
    model: Loadable,
    stored: dict[str, StoredTensor],
    folder: Path,
    progress: Callable[[Loading], None] | None,
    *,
    converted: bool = False,
) -> None:
    """Load every parameter of the model, and repack quantised ones for their kernels.

    stored: the tensors by the model's names.
    converted: whether the folder is a converted one, with packed parameters.
    """
    units = _units(model, stored if converted else None)
    in_memory = any(tensor.held is not None for tensor in stored.values())
    # Tensors in memory were checked before the refill, and on the CPU values are checked while
    # reading.
    checks = model.device.type == "cuda" and not in_memory
    jobs = _jobs(model, units, stored, folder, checks=checks)
    if in_memory:
        copy_jobs(jobs, model.device)
    else:
        run_jobs(jobs, model.device, progress, model.open_bytes)
    if checks:
        # Parameters that were packed during loading are no longer in the units' lists.
        _check_finite([parameter for unit in units for parameter in unit.parameters], stored)
    if model.device.type == "cuda":
        for job in jobs:
            job.then()


def read_named(
    model: Loadable,
    folder: Path,
    *,
    tell: bool = True,
    held: Mapping[str, Tensor] | None = None,
) -> dict[str, StoredTensor]:
    """Return a folder's tensors by the model's names.

    model: a whole model, on any device.
    tell: whether to log which of the folder's tensors the model does not use.
    held: tensors in memory to use instead of the folder's files.
    Raises ConfigError, as load_weights does, for errors that are visible in the headers.
    """
    if held is None:
        index = read_index(folder)
    else:
        index = {name: StoredTensor.of(name, tensor, folder) for name, tensor in held.items()}
    stored = _named(model, index, tell=tell)
    _match([list(model.parameters())], stored, folder)
    return stored


def fill_part(part: Loadable, stored: dict[str, StoredTensor], folder: Path) -> None:
    """Load and pack a part of a model.

    stored: the tensors of the whole model, from `read_named`. Values of tensors in memory are not
        checked.
    Raises ConfigError as load_weights does.
    """
    sources = {source.name for parameter in part.parameters() for source in parameter.sources}
    _fill(part, {name: stored[name] for name in sources if name in stored}, folder, None)
    part.finish()


def fill_parameters(
    model: Loadable, parameters: Sequence[Parameter], stored: dict[str, StoredTensor], folder: Path
) -> None:
    """Allocate and fill some parameters of a model, without packing them.

    stored: the tensors of the whole model, from `read_named`.
    Raises ConfigError as load_weights does.
    """
    sources = {source.name for parameter in parameters for source in parameter.sources}
    units = [Unit([parameter], _nothing, False) for parameter in parameters]
    _allocate([*parameters])
    used = {name: stored[name] for name in stored if name in sources}
    run_jobs(_jobs(model, units, used, folder), model.device, None)


def each_parameter(
    model: Loadable,
    folder: Path,
    take: Callable[[Parameter], None],
    progress: Callable[[Loading], None] | None = None,
) -> None:
    """Fill each parameter of a model on the CPU, pass it to `take`, and free its memory.

    The model cannot be used afterwards. Raises as load_weights does.

    take: called with each parameter, from any thread.
    """
    stored = _named(model, read_index(folder))

    def handing(parameter: Parameter) -> Callable[[], None]:
        def hand() -> None:
            take(parameter)
            give_back(parameter.tensor)

        return hand

    units = [Unit([filled], handing(filled), False) for filled in model.parameters()]
    for unit in units:
        # allocated pages take memory only from the first write until `give_back`
        unit.parameters[0].allocate()
    run_jobs(_jobs(model, units, stored, folder), model.device, progress)


def check_headers(model: Loadable, folder: Path) -> None:
    """Raise ConfigError, as load_weights does, for errors that are visible in the headers.

    Such errors are tensors or files that are missing, unexpected, truncated, or of another shape or
    dtype.

    model: a whole model, on any device.
    """
    if Manifest.read(folder) is None:
        read_named(model, folder)


def _units(model: Loadable, converted: dict[str, StoredTensor] | None) -> list[Unit]:
    """Return the model's units, and a unit for each parameter outside of these.

    This allocates the memory of the latter parameters.

    converted: the tensors of a converted folder, by unique names of parameters; None = the folder
        is not a converted one.
    """
    units = [*model.units()]
    inside = {id(parameter.tensor) for unit in units for parameter in unit.parameters}
    for parameter in model.parameters():
        if id(parameter.tensor) not in inside:
            parameter.allocate()
            units.append(Unit([parameter], _nothing, False))
    if converted is not None:
        names = {id(parameter.tensor): name for name, parameter in named(model.parameters())}
        for unit in units:
            unit.parameters[:] = [
                as_converted(parameter, names[id(parameter.tensor)], converted)
                for parameter in unit.parameters
            ]
    return units


def _jobs(
    model: Loadable,
    units: list[Unit],
    stored: dict[str, StoredTensor],
    folder: Path,
    *,
    checks: bool = False,
) -> list[Job]:
    """Return, for each unit, a job that reads and packs the unit's parameters.

    checks: whether transient units are checked for NaN and infinity before they are packed.
    """
    transfers = _match([unit.parameters for unit in units], stored, folder)
    freed = 0  # bytes freed since the last `trim`; inexact with several threads

    def then(unit: Unit) -> Callable[[], None]:
        def run() -> None:
            nonlocal freed
            if unit.transient and checks:
                _check_finite(unit.parameters, stored)
            _settle(unit.parameters)
            freed += unit.num_bytes
            unit.parameters.clear()  # else packed weights would be in memory twice
            try:
                unit.finish()
            except TensorError as error:
                file = stored[error.tensor].file if error.tensor in stored else folder
                raise ConfigError(f"{file}: {error}", param=error.param) from None
            if freed >= TRIM_EVERY and model.device.type == "cpu":
                freed = 0
                trim()

        return run

    def allocate(unit: Unit) -> Callable[[], None] | None:
        return partial(_allocate, unit.parameters) if unit.transient else None

    return [
        Job(parts, then(unit), allocate(unit), unit.num_bytes)
        for parts, unit in zip(transfers, units, strict=True)
    ]


def _allocate(parameters: list[Parameter]) -> None:
    for parameter in parameters:
        parameter.allocate()


def _nothing() -> None:
    pass


def _settle(parameters: list[Parameter]) -> None:
    for parameter in parameters:
        parameter.settle()


def _named(
    model: Loadable, stored: dict[str, StoredTensor], *, tell: bool = True
) -> dict[str, StoredTensor]:
    """Return the stored tensors, except ignored ones, by the model's names.

    tell: whether to log the ignored tensors.
    """
    tensors: dict[str, StoredTensor] = {}
    unread: Counter[str] = Counter()
    for name, tensor in stored.items():
        if model.ignores(name):
            unread[_part(name)] += 1
            continue
        ours = model.tensor_name(name)
        if ours in tensors:
            raise ConfigError(
                f"{tensor.file}: tensor {name} is also there as {tensors[ours].name}", param="model"
            )
        tensors[ours] = tensor
    del unread[""]
    if unread and tell:
        parts = ", ".join(f"{part} ({count})" for part, count in sorted(unread.items()))
        logger.info("not read, because the text model has no use for it: %s (tensors)", parts)
    return tensors


def _part(name: str) -> str:
    """Return the part of the model to which a tensor belongs, such as "model.layers.61".

    The result is "" for a precomputed table.
    """
    if name.endswith(".inv_freq"):
        return ""
    names = name.split(".")
    return ".".join(names[: 1 if names[0] != "model" else 3 if names[1:2] == ["layers"] else 2])


def _match(
    units: Sequence[Sequence[Parameter]],
    stored: dict[str, StoredTensor],
    folder: Path,
) -> list[list[Transfer]]:
    """Match the sources of each unit's parameters with stored tensors; return each unit's
    transfers.

    units: the parameters of each unit.
    """
    transfers: list[list[Transfer]] = []
    wanted = set()
    for parameters in units:
        transfers.append([])
        for source, target, at in chain.from_iterable(map(_targets, parameters)):
            wanted.add(source.name)
            if source.name not in stored:
                files = {entry.file for entry in stored.values()}
                raise ConfigError(
                    f"{files.pop() if len(files) == 1 else folder}: tensor {source.name} is "
                    f"missing, config.json implies it, of shape {list(source.shape)}",
                    param="model",
                )
            on_disk = stored[source.name]
            if not source.fits(on_disk.shape):
                raise ConfigError(
                    f"{on_disk.file}: tensor {on_disk.name} has shape {list(on_disk.shape)}, "
                    f"config.json implies {list(source.shape)}",
                    param="model",
                )
            if on_disk.dtype == torch.float8_e8m0fnu and target.dtype == torch.uint8:
                # read as bytes, which need no conversion
                on_disk = replace(on_disk, dtype=torch.uint8)
            # Unlike weights, quantised codes are not converted between dtypes.
            number = target.dtype.is_floating_point and target.dtype.itemsize > 1
            fits = on_disk.dtype.is_floating_point if number else on_disk.dtype == target.dtype
            if not fits:
                raise ConfigError(
                    f"{on_disk.file}: tensor {on_disk.name}: dtype {CODES[on_disk.dtype]}, "
                    f"config.json implies {CODES[target.dtype]}",
                    param="model",
                )
            if source.shorter:
                source = replace(source, shape=(prod(on_disk.shape),))
            if source.flat:
                on_disk = replace(on_disk, shape=(prod(on_disk.shape),))
            if source.at is not None:
                on_disk = on_disk.one_of_stack(source.at, source.shape)
            transfers[-1].append(Transfer(target, at, source, on_disk))
    for name, tensor in stored.items():
        if name not in wanted:
            raise ConfigError(
                f"{tensor.file}: unexpected tensor {tensor.name}: the architecture has no use for "
                "it",
                param="model",
            )
    return transfers


def _targets(parameter: Parameter) -> Iterator[tuple[Source, Tensor, int]]:
    """Yield (source, the tensor that it fills, the first row that it fills) of a parameter."""
    at = 0
    for source in parameter.sources:
        yield source, parameter.tensor, at
        at += source.num_rows
    assert at == parameter.tensor.shape[0], parameter.name


def _check_finite(parameters: list[Parameter], stored: dict[str, StoredTensor]) -> None:
    """Raise ConfigError for a NaN or infinity in parameters on CUDA.

    On the CPU they are checked while reading. The check is a sum, which reads each weight once,
    allocates nothing, and propagates any NaN or infinity. Integers have neither. 8-bit floats and
    the scales inside blocks are checked when they are decoded.
    """
    parameters = [
        parameter
        for parameter in parameters
        if parameter.tensor.is_floating_point() and parameter.tensor.dtype.itemsize > 1
    ]
    if not parameters:
        return
    sums = torch.stack([p.tensor.sum(dtype=torch.float32) for p in parameters])
    for index in (~sums.isfinite()).nonzero().flatten().tolist():
        for source, target, at in _targets(parameters[index]):
            if not bool(target[at : at + source.num_rows].isfinite().all()):
                raise not_finite(stored[source.name], target.dtype)


def _fill_randomly(model: Loadable, seed: int, *, by_name: bool) -> None:
    """Fill the model with random weights, generated on the device in the order of its parameters.

    Norms get ones and other parameters normal numbers. Each unit is packed as soon as it is filled.

    by_name: whether a parameter's numbers are independent of the other parameters.
    """
    generator = torch.Generator(model.device).manual_seed(seed)
    units = {}
    for unit in _units(model, None):
        units.update({id(parameter.tensor): unit for parameter in unit.parameters})
    inference = torch.is_inference_mode_enabled()
    packing: deque[tuple[int, Future[None]]] = deque()

    def pack(unit: Unit) -> None:
        with torch.inference_mode(inference):
            unit.finish()

    cuda = model.device.type == "cuda"
    size = 0  # bytes of the unit being filled
    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
        for parameter in model.parameters():
            unit = units.pop(id(parameter.tensor))
            if unit.transient and unit.parameters[0].tensor is parameter.tensor:
                size = unit.num_bytes
                while packing and size + sum(part for part, _ in packing) > model.open_bytes:
                    packing.popleft()[1].result()
                _allocate(unit.parameters)
            _draw(parameter, generator, seed, by_name=by_name)
            parameter.settle()
            if unit.parameters[-1].tensor is parameter.tensor:
                unit.parameters.clear()  # else packed weights would be in memory twice
                if not cuda:
                    packing.append((size if unit.transient else 0, pool.submit(pack, unit)))
                # transient memory is allocated now, on the thread that owns the device
                elif unit.transient:
                    pack(unit)
            del parameter, unit
        for _, packed in packing:
            packed.result()


def _draw(parameter: Parameter, generator: torch.Generator, seed: int, *, by_name: bool) -> None:
    if by_name:
        generator.manual_seed(seed + crc32(parameter.name.encode()))
    if parameter.fill is not None:
        parameter.fill(parameter.tensor, generator)
    elif not parameter.tensor.is_floating_point():
        parameter.tensor.random_(generator=generator)
    elif parameter.std:
        parameter.tensor.normal_(0.0, parameter.std, generator=generator)
    else:
        parameter.tensor.fill_(1.0 - parameter.offset)
