"""HostLora: a LoRA adapter read from PEFT's files, in the layout of a device slot.

A model's linear layers are numbered parts (`LoraLayout`). One tensor (blob) has A [rank, in] and
then B [out, rank] of each part that the adapter changes. Ranks are padded with zeros to multiples
of 16, and B includes the scale. So an upload is one copy of the adapter's actual size, even if
slots have room for larger ranks.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from engine.errors import AdapterError
from engine.lora.files import check_finite, list_tensors, read_tensors
from engine.lora.peft_config import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    PeftConfig,
    file_in,
    read_peft_config,
    stamp,
)
from engine.lora.tiers.adapter import AdapterDescription, LoadedAdapter
from engine.quantization.method import LinearSpec, Part
from engine.weights.parameter import num_rows, take_rows
from engine.weights.stored import StoredTensor
from kernels.metadata import LoraLinear

UNIT = 16  # padded ranks are multiples of this, which is also the unit of offsets
PREFIX = "base_model.model."  # beginning of PEFT's tensor names


def padded(rank: int) -> int:
    return -(-rank // UNIT) * UNIT


class LoraLayout:
    """The parts of a model: parts[i] is a checkpoint matrix, or this rank's shard of it."""

    def __init__(self, specs: Iterable[LinearSpec]) -> None:
        self.parts: list[Part] = []
        self.layers: list[LoraLinear] = []  # the linear layers with their positions in `parts`
        for spec in specs:
            outs = tuple(_height(part) for part in spec.parts)
            self.layers.append(LoraLinear(len(self.parts), spec.in_features, outs))
            self.parts += spec.parts

    def num_elements(self, rank: int) -> int:
        """Return the number of elements of an adapter that changes all parts. rank: its rank."""
        return padded(rank) * sum(_width(part) + _height(part) for part in self.parts)


def _module_of(tensor: StoredTensor) -> str:
    """Return the name of a tensor's module in the adapter's base model, for matching patterns."""
    return tensor.name.removeprefix(PREFIX).rpartition(".lora_")[0]


def _width(part: Part) -> int:
    return part.columns[1] - part.columns[0]


def _height(part: Part) -> int:
    return num_rows(part.rows)


@dataclass(frozen=True, slots=True)
class HostLora:
    """An adapter's matrices in host memory.

    blob: all matrices, 1-D in the model's activation dtype.
    table: [num_parts, 4] int32, the format of `LoraStep.table`.
    parts: part number -> views (A, B) of the blob.
    """

    blob: Tensor
    table: Tensor
    parts: dict[int, tuple[Tensor, Tensor]]


class LoraReader:
    """A reader of LoRA adapters for one model; raises AdapterError for an invalid one.

    renamed: returns the name in the model's record of an adapter's module.
    elsewhere: the modules that are only on other ranks.
    ignored: returns whether a module, such as one of a vision encoder, is not supported for LoRA.
    """

    def __init__(
        self,
        layout: LoraLayout,
        dtype: torch.dtype,
        max_rank: int,
        renamed: Callable[[str], str] = str,
        elsewhere: Collection[str] = (),
        ignored: Callable[[str], bool] = lambda module: False,
    ) -> None:
        self._ignored = ignored
        self._elsewhere = elsewhere
        self._layout = layout
        self._renamed = renamed
        self._numbers = {part.name: number for number, part in enumerate(layout.parts)}
        self._dtype = dtype
        self._max_rank = max_rank
        # one thread at a time, as several would keep the GIL from the step loop
        self._filling = Lock()

    def describe(self, folder: Path, seen: str) -> AdapterDescription:
        """Return the description of an adapter, from its configuration alone. Raises AdapterError.

        seen: the stamp for the description.
        """
        return self._describe(folder, read_peft_config(folder), seen)

    def _describe(self, folder: Path, config: PeftConfig, seen: str) -> AdapterDescription:
        if config.max_rank > self._max_rank:
            raise AdapterError(
                f"{folder}: rank {config.max_rank} is over max_lora_rank {self._max_rank}",
                code="adapter_incompatible",
            )
        targets = sorted(config.targets or ())
        return AdapterDescription(config.kind, config.max_rank, 0, targets, seen)

    def read(self, folder: Path, seen: str) -> LoadedAdapter:
        """Read an adapter, and check its tensors' names, shapes, ranks, and that all numbers are
        finite.

        seen: the stamp for the description.
        """
        before = stamp(folder)
        config = read_peft_config(folder)
        described = self._describe(folder, config, seen)
        stored = list_tensors(folder)
        pairs = self._match(folder / WEIGHTS_FILE, stored, config)
        host = self._allocate(pairs)
        state = blake2b(digest_size=16)
        state.update(file_in(folder, CONFIG_FILE).read_bytes())
        self._fill(stored, pairs, host, config, state.update)
        if stamp(folder) != before:
            raise AdapterError(f"{folder}: was written to while it was read; add it again")
        targets = sorted({self._layout.parts[n].name.rsplit(".", 1)[-1] for n in pairs})
        num_bytes = host.blob.nbytes
        described = AdapterDescription("lora", described.rank, num_bytes, targets, described.stamp)
        return LoadedAdapter(described, state.hexdigest(), num_bytes, host)

    def _match(
        self, path: Path, stored: Sequence[StoredTensor], config: PeftConfig
    ) -> dict[int, dict[str, StoredTensor]]:
        """Match an adapter's tensors to the model's matrices, and check names, shapes and ranks.

        Returns index in `LoraLayout.parts` -> {"A": tensor, "B": tensor}. Raises AdapterError.
        """
        pairs: dict[int, dict[str, StoredTensor]] = {}
        used = [tensor for tensor in stored if not self._ignored(_module_of(tensor))]
        for tensor in used:
            theirs, kind = _module_of(tensor), tensor.name.rpartition(".lora_")[2]
            module = self._renamed(theirs)
            side = {"A.weight": "A", "B.weight": "B"}.get(kind)
            if side is None:
                raise AdapterError(
                    f"{path}: tensor {tensor.name} is not supported; supported: lora_A and lora_B "
                    "of linear layers"
                )
            number = self._numbers.get(module)
            if number is None and module in self._elsewhere:
                continue
            if number is None:
                raise AdapterError(
                    f"{path}: tensor {tensor.name}: this model has no such linear layer that an "
                    "adapter may change",
                    code="adapter_incompatible",
                )
            if config.targets is not None and module.rsplit(".", 1)[-1] not in config.targets:
                raise AdapterError(
                    f"{path}: tensor {tensor.name}: target_modules of {CONFIG_FILE} do not have it"
                )
            part, rank = self._layout.parts[number], config.rank_of(theirs)
            shape = (rank, part.in_features) if side == "A" else (part.out_features, rank)
            if tensor.shape != shape:
                raise AdapterError(
                    f"{path}: tensor {tensor.name} has shape {list(tensor.shape)}; rank {rank} and "
                    f"this model imply {list(shape)}",
                    code="adapter_incompatible",
                )
            sides = pairs.setdefault(number, {})
            if side in sides:
                raise AdapterError(f"{path}: {tensor.name} and {sides[side].name} are one layer's")
            sides[side] = tensor
        for number, sides in pairs.items():
            if len(sides) < 2:
                name = self._layout.parts[number].name
                raise AdapterError(f"{path}: {name} has lora_{next(iter(sides))} without the other")
        if not used:
            what = "no tensor of the text model" if stored else "no tensor"
            raise AdapterError(f"{path}: holds {what}")
        if config.everywhere:
            for part in self._layout.parts:
                if part.name.rsplit(".", 1)[-1] in (config.targets or ()):
                    number = self._numbers[part.name]
                    if number not in pairs:
                        raise AdapterError(f"{path}: the tensors of {part.name} are missing")
        return dict(sorted(pairs.items()))

    def _allocate(self, pairs: dict[int, dict[str, StoredTensor]]) -> HostLora:
        table = torch.zeros(len(self._layout.parts), 4, dtype=torch.int32)
        spans: dict[int, tuple[int, int, int]] = {}  # part -> (padded rank, start of A, start of B)
        at = 0
        for number, sides in pairs.items():
            part = self._layout.parts[number]
            rank = padded(sides["A"].shape[0])
            b = at + rank * _width(part)
            spans[number] = (rank, at, b)
            table[number, :3] = torch.tensor([rank, at // UNIT, b // UNIT])
            at = b + rank * _height(part)
        blob = torch.zeros(at, dtype=self._dtype)
        views = {}
        for number, (rank, a, b) in spans.items():
            part = self._layout.parts[number]
            end = b + rank * _height(part)
            views[number] = (blob[a:b].view(rank, _width(part)), blob[b:end].view(-1, rank))
        return HostLora(blob, table, views)

    def _fill(
        self,
        stored: Sequence[StoredTensor],
        pairs: dict[int, dict[str, StoredTensor]],
        host: HostLora,
        config: PeftConfig,
        digest: Callable[[memoryview], None],
    ) -> None:
        places = {
            pair[side].name: (number, side) for number, pair in pairs.items() for side in "AB"
        }
        read = read_tensors(stored, digest)
        with self._filling:
            for tensor, values in zip(stored, read, strict=True):
                if tensor.name not in places:
                    continue
                number, side = places[tensor.name]
                part = self._layout.parts[number]
                a, b = host.parts[number]
                if side == "A":
                    a[: tensor.shape[0]].copy_(values[:, part.columns[0] : part.columns[1]])
                else:
                    scale = config.scale_of(_module_of(tensor))
                    scaled = take_rows(values, part.rows).float() * scale
                    b[:, : tensor.shape[1]].copy_(scaled)
            check_finite(stored, read, host.blob)
