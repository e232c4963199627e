"""Refill: replaces the weights of a serving model in place.

A part of the model (some layers, or the embedding and the head) is loaded into new tensors, by the
same loader as at the start. These are then copied over the model's tensors. So fused, packed,
quantised and sharded weights need no code here. The addresses in CUDA graphs and recorded programs
stay valid.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FunctionType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.config.model_config import ModelConfig
from engine.errors import ConfigError, EngineDead, MantaError
from engine.quantization.method import LinearMethod
from engine.weights.converted import Manifest
from engine.weights.copies import Copies
from engine.weights.load import Loadable, fill_part, read_named
from engine.weights.parameter import Parameter
from engine.weights.staging import wait_until_written
from engine.weights.stored import StoredTensor
from engine.weights.stream import EXPONENTS, not_finite

logger = logging.getLogger("manta.engine")

PART_BYTES = 1 << 30  # maximum bytes of new layers in memory besides the model
_CHUNK = 16 << 20
_CHECKED = 1 << 26  # number of elements of tensors in memory that are checked at a time
# Packages whose objects may hold tensors of weights.
_OWNERS = ("engine.layers.", "engine.models.", "engine.quantization.", "kernels.")


class Refillable(Loadable, Protocol):
    """The interface of models.registry.Model that a refill of its weights needs."""

    @property
    def config(self) -> ModelConfig: ...
    def parts(self, most_bytes: int) -> Iterator[tuple[Any, Any]]: ...


class ChangingMemory(Protocol):
    """The interface of memory that must be told which weights an update changes."""

    def changing(self) -> None: ...
    def changed(self, ranges: Iterable[tuple[int, int]]) -> None: ...


class Refill:
    """The replacement of one model's weights. `check` may run on any thread while steps run.

    `load` does not check tensors in memory again, because steps wait meanwhile.

    model: this rank's part of the model, loaded.
    outline: returns the whole model on torch's meta device.
    memory: the memory of the weights; None = it need not be told of updates.
    """

    def __init__(
        self,
        model: Refillable,
        outline: Callable[[], Loadable],
        memory: "ChangingMemory | None" = None,
    ) -> None:
        self._model = model
        self._outline = outline
        self._memory = memory
        self._whole: Loadable | None = None
        self._held: dict[str, Mapping[str, Tensor]] = {}
        self._checked: tuple[str, dict[str, str]] | None = None  # see `_checked_tensors`

    def hold(self, folder: str, tensors: Mapping[str, Tensor]) -> None:
        """Use tensors as a folder's weights instead of its files, until the mapping is emptied.

        tensors: name in the checkpoint -> contiguous tensor on the model's device.
        """
        self._held = {key: value for key, value in self._held.items() if value}
        self._held[folder] = tensors

    def holds(self, folder: str) -> bool:
        """Whether tensors in memory are used as a folder's weights."""
        return bool(self._held.get(folder))

    def name_of(self, stored: str) -> str:
        """Return the model's name of a checkpoint's tensor; "" = the model ignores the tensor."""
        whole = self._outlined()
        return "" if whole.ignores(stored) else whole.tensor_name(stored)

    def names(self) -> set[str]:
        """Return the model's names of all tensors that a checkpoint must have."""
        parameters = self._outlined().parameters()
        return {source.name for parameter in parameters for source in parameter.sources}

    def _outlined(self) -> Loadable:
        """Return the model's outline, which the first call builds."""
        self._whole = self._whole or self._outline()
        return self._whole

    def check(self, folder: str) -> None:
        """Check the tensors of a folder: names, shapes, dtypes and finite values. Change nothing.

        Raises ConfigError, as load_weights does.
        """
        _refuse_ordered(self._model)
        self._checked = None
        stored = self._stored(Path(folder))
        held = [tensor for tensor in stored.values() if tensor.held is not None]
        for tensor in stored.values():
            if tensor.held is None:
                _check_finite(tensor, self._model.dtype)
        _check_held(held, self._model)
        if held:
            self._checked = folder, {name: tensor.name for name, tensor in stored.items()}
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()  # done here and not in `load`, for which steps wait

    @torch.inference_mode()
    def load(self, folder: str) -> None:
        """Replace the weights by those of a checked folder. No step may be in flight.

        Raises MantaError with the old weights in place, or EngineDead if some have changed.
        """
        stored = self._checked_tensors(folder) or self._stored(Path(folder))
        self._checked = None
        if self._memory is not None:
            self._memory.changing()
        changed = False
        written: list[tuple[int, int]] = []
        try:
            for part, original in self._model.parts(self._part_bytes()):
                fill_part(part, stored, Path(folder))
                changed = True
                if part.layers:
                    written += copy_tensors(original.layers, part.layers)
                else:
                    written += copy_tensors(original, part)
                del part, original
            if self._model.device.type == "cuda":
                torch.cuda.synchronize(self._model.device)
                torch.cuda.empty_cache()
            if self._memory is not None:
                self._memory.changed(written)
        except Exception as error:
            message = error.message if isinstance(error, MantaError) else repr(error)
            if isinstance(error, torch.OutOfMemoryError):
                message = "too little device memory is free beside it; lower memory_fraction"
            if not changed:
                raise ConfigError(
                    f"the weights were not changed: {message}", param="weights"
                ) from error
            raise EngineDead(
                f"the weights were being replaced and are mixed now: {message}",
                code="weights_mixed",
            ) from error

    def _part_bytes(self) -> int:
        """Return the maximum bytes to load at a time, at most a third of free memory."""
        if self._model.device.type != "cuda":
            return PART_BYTES
        return min(PART_BYTES, torch.cuda.mem_get_info(self._model.device)[0] // 3)

    def _checked_tensors(self, folder: str) -> dict[str, StoredTensor] | None:
        """Return a folder's tensors in memory that have passed `check`; None if there are none.

        `check` keeps only their names, so that tensors that are never loaded can be freed.
        """
        held = self._held.get(folder)
        if not held or self._checked is None or self._checked[0] != folder:
            return None
        where = Path(folder)
        return {
            name: StoredTensor.of(stored, held[stored], where)
            for name, stored in self._checked[1].items()
        }

    def _stored(self, folder: Path) -> dict[str, StoredTensor]:
        if not folder.is_dir():
            raise ConfigError(f"{folder}: no such folder on this node", param="weights")
        if Manifest.read(folder) is not None:
            raise ConfigError(
                f"{folder}: converted weights cannot replace those of a running engine; give the "
                "checkpoint that they were made of",
                param="weights",
            )
        held = dict(self._held.get(str(folder), {})) or None
        if held is None:
            wait_until_written(folder)
        try:
            return read_named(self._outlined(), folder, held=held)
        except ConfigError as error:
            quantized = self._model.config.quantized
            if quantized is None or quantized.method != "gguf":
                raise
            raise ConfigError(
                f"{error.message}; this engine keeps the blocks of a .gguf file, and takes weights "
                "of 16 bits if it serves the model with quantization: none",
                param=error.param,
            ) from None


def _refuse_ordered(model: Refillable) -> None:
    """Raise ConfigError for GPTQ weights with act-order, as the order decides their layout."""
    for layer in getattr(model, "layers", ()):
        for linear in layer.linears:
            for piece in getattr(linear.state, "pieces", ()):
                if piece.order is not None:
                    raise ConfigError(
                        f"{linear.spec.name}: GPTQ weights with desc_act cannot be replaced in a "
                        "running engine; serve a checkpoint without desc_act, or in 16 bits",
                        param="weights",
                    )


def _check_finite(stored: StoredTensor, dtype: torch.dtype) -> None:
    """Raise ConfigError if a tensor has a NaN or infinity.

    dtype: the model's dtype, in which numbers must be finite too.
    """
    if stored.dtype not in EXPONENTS or not stored.num_bytes:
        return
    raw = np.memmap(stored.file, np.uint8, "c", stored.offset, (stored.num_bytes,))
    for begin in range(0, stored.num_bytes, _CHUNK):
        values = torch.from_numpy(raw[begin : begin + _CHUNK]).view(stored.dtype)
        converted = values if dtype not in EXPONENTS else values.to(dtype)
        words, exponent = EXPONENTS[converted.dtype]
        bits: Any = converted.view(torch.uint8).numpy().view(words)
        if (bits & words(exponent)).max() == exponent:
            raise not_finite(stored, converted.dtype)


@torch.inference_mode()
def _check_held(tensors: list[StoredTensor], model: Refillable) -> None:
    """Raise ConfigError if a tensor in memory has a NaN or infinity, also in the model's dtype.

    The check uses sums, which propagate any NaN or infinity, read each number once, and wait for
    the device only at the end.
    """
    chunks, sums = [], []
    for tensor in tensors:
        if tensor.held is None or tensor.dtype not in EXPONENTS:
            continue
        dtype = model.dtype if model.dtype in EXPONENTS else tensor.dtype
        for chunk in tensor.held.reshape(-1).split(_CHECKED):
            if chunk.numel():
                chunks.append((tensor, chunk, dtype))
                sums.append(chunk.to(dtype).sum(dtype=torch.float32))
    if not sums:
        return
    for index in (~torch.stack(sums).isfinite()).nonzero().flatten().tolist():
        tensor, chunk, dtype = chunks[index]
        if not bool(chunk.to(dtype).isfinite().all()):
            raise not_finite(tensor, dtype)


def copy_tensors(old: object, new: object) -> list[tuple[int, int]]:
    """Copy each tensor that is reachable from `new` over the tensor in the same place of `old`.

    Returns the written ranges, as (address, number of bytes).
    Raises AssertionError if shapes or dtypes differ.
    """
    copy = _Copy()
    copy.pair("", old, new)
    copy.copies.run()
    return copy.written


class _Copy:
    """A walk over two objects of equal structure that pairs new tensors with old ones.

    copies: functions that copy new tensors to old ones.
    written: the ranges that the copies write, as (address, number of bytes).
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._copied: set[tuple[int, int, torch.Size]] = set()
        self.copies = Copies()
        self.written: list[tuple[int, int]] = []

    def pair(self, where: str, old: object, new: object) -> None:
        if new is old or new is None:
            return
        if isinstance(new, Tensor):
            self._copy(where, old, new)
        elif isinstance(new, Parameter):
            self.pair(where, getattr(old, "tensor", None), new.tensor)
        elif isinstance(new, (list, tuple)):
            assert isinstance(old, (list, tuple)) and len(old) == len(new), where
            for index, (old_item, new_item) in enumerate(zip(old, new, strict=True)):
                self.pair(f"{where}[{index}]", old_item, new_item)
        elif _owns(new) and id(new) not in self._seen:
            self._seen.add(id(new))
            for name, value in _attributes(new):
                # A function is a library's matmul that holds its packed weight. `lookup` has the
                # rows of `embedding`, which are copied, then those of adapters.
                if isinstance(value, FunctionType):
                    setattr(old, name, value)
                elif name not in ("lookup", "ahead"):
                    self.pair(f"{where}.{name}", getattr(old, name, None), value)

    def _copy(self, where: str, old: object, new: Tensor) -> None:
        if new.device.type == "meta" or not new.numel():
            return
        assert isinstance(old, Tensor), f"{where}: {old!r} has no tensor"
        assert old.shape == new.shape and old.dtype == new.dtype, where
        place = (old.data_ptr(), new.data_ptr(), new.shape)
        if place not in self._copied:
            self._copied.add(place)
            self.copies.add(old, new)
            if old.is_contiguous():
                self.written.append((old.data_ptr(), old.nbytes))


def _owns(value: object) -> bool:
    kind = type(value)
    return kind.__module__.startswith(_OWNERS) and not isinstance(value, LinearMethod | type)


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    if is_dataclass(value):
        for item in fields(value):
            yield item.name, getattr(value, item.name)
        return
    yield from vars(value).items() if hasattr(value, "__dict__") else ()
    for kind in type(value).__mro__:
        for name in getattr(kind, "__slots__", ()):
            if hasattr(value, name):
                yield name, getattr(value, name)
