"""Layout: decodes quantised matrices from checkpoints to the codes of a `kernels.packed.Format`.

A layout names the tensors of a matrix and decodes some of its rows. To add one: subclass Layout
here or in `byte_layouts`, and choose it in `stored.base.layout_of`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from engine.config.quantized import KEY, Scheme
from engine.errors import ConfigError, TensorError
from engine.quantization.layouts.gguf import BLOCK_TYPES, BlockType
from engine.quantization.method import Part
from engine.weights.parameter import Fill, Parameter, Source, num_rows
from kernels.packed import BLOCK, Decoded, Format, unpacked

# bit offsets of eight consecutive outputs
_AWQ_SHIFTS = [4 * place for place in (0, 4, 1, 5, 2, 6, 3, 7)]


class Layout(ABC):
    """The storage format of one matrix [out, in] in a checkpoint, or of a rank's part.

    rows, width: the numbers of outputs and inputs of this rank's part.
    parameters: suffix of a tensor's name -> the parameter that loading fills.
    """

    form: Format
    parameters: dict[str, Parameter]
    scale_name: str  # suffix of the scales' tensor, for errors
    zero_scales = False  # whether files may have groups of zeros with a scale of 0
    # whether no kernel supports the layout, so that the matrix is dequantised to 16 bits
    dequantises = False
    # whether inputs of a group need not be adjacent (act-order); see `grouped_order`
    ordered = False
    # [in], the stored index of each input that `decode` returns; None = the stored order
    order: Tensor | None = None

    def __init__(self, part: Part) -> None:
        begin, end = part.columns
        self.name, self.rows, self.width = part.name, num_rows(part.rows), end - begin
        self.part = part

    def inputs(self, unit: int) -> tuple[int, int]:
        """Return the range of inputs that this rank has, in multiples of `unit` inputs.

        unit: the number of inputs of a group or block, which cannot be split.
        Raises ConfigError if a rank's part begins or ends inside a group.
        """
        return self._cut(self.part.columns, self.part.in_features, unit, "inputs")

    def outputs(self, unit: int) -> tuple[int, int]:
        """Return the range of outputs that this rank has, in multiples of `unit` outputs.

        unit: the number of outputs that are stored together and cannot be split.
        Raises ConfigError if the outputs are not a range, or begin or end inside such a group.
        """
        rows = self.part.rows
        if not isinstance(rows, tuple):
            raise ConfigError(
                f"tensor {self.name}: outputs in another order than the file's are not supported "
                "for this format",
                param=KEY,
            )
        return self._cut(rows, self.part.out_features, unit, "outputs")

    def _cut(self, kept: tuple[int, int], total: int, unit: int, what: str) -> tuple[int, int]:
        begin, end = kept
        if kept != (0, total) and (begin % unit or end % unit):
            raise ConfigError(
                f"tensor {self.name}: a rank would have {what} {begin} to {end} of {total}, which "
                f"the format keeps {unit} together; take fewer ranks, or weights in 16 bits",
                param="tensor_parallel",
            )
        return begin // unit, -(-end // unit)

    @abstractmethod
    def decode(self, begin: int, end: int) -> Decoded:
        """Return the codes, scales and offsets of this rank's rows [begin, end)."""

    def grouped_order(self) -> Tensor | None:
        """Return an order of the inputs, int32 [in], in which the inputs of a group are adjacent.

        Returns None if groups differ in size. Only for loaded `ordered` layouts.
        """
        return None

    def decoded(self, step: int) -> Iterator[Decoded]:
        """Yield the codes, scales and offsets of all rows, `step` rows at a time.

        Raises TensorError for a scale that is not finite, or is zero without `zero_scales`.
        """
        for begin in range(0, self.rows, step):
            codes, scale, offset = self.decode(begin, min(begin + step, self.rows))
            for part in (scale, offset):
                if part is not None and not bool(part.isfinite().all()):
                    raise TensorError(
                        joined(self.name, self.scale_name), "a scale is NaN or infinity"
                    )
            if not self.zero_scales and not bool(scale.all()):
                raise TensorError(joined(self.name, self.scale_name), "a scale is zero")
            yield codes, scale, offset

    def values(self, step: int) -> Iterator[Tensor]:
        """Dequantise all rows to float32, and yield `step` rows at a time. Raises TensorError."""
        for decoded in self.decoded(step):
            yield unpacked(self.form, decoded)

    def add_parameter(
        self,
        key: str,
        dtype: torch.dtype,
        source: Source,
        shape: tuple[int, ...],
        device: torch.device,
        fill: float | Fill | None = None,
    ) -> Tensor:
        """Allocate a parameter and return its tensor.

        key: the suffix of the tensor's name.
        fill: the value for random weights, or the function that fills them; None = the default.
        """
        tensor = torch.empty(shape, dtype=dtype, device=device)
        if isinstance(fill, float):
            fill = partial(_fill_with, fill)
        name = joined(self.name, key)
        self.parameters[key] = Parameter(name, tensor, (source,), fill=fill)
        return tensor


def joined(name: str, key: str) -> str:
    """Return the name of a matrix's tensor; a suffix that begins with _ is appended without a
    dot."""
    return f"{name}{key}" if key.startswith("_") else f"{name}.{key}"


def of_stack(source: Source, stack: tuple[int, int] | None) -> Source:
    """Return the source of one matrix in a stacked tensor; without a stack the source is unchanged.

    source: the source for a matrix with separate tensors.
    stack: see `Part`.
    """
    if stack is None:
        return source
    number, count = stack
    return replace(source, shape=(count, *source.shape), at=number)


def _fill_with(value: float, tensor: Tensor, generator: torch.Generator) -> None:
    tensor.fill_(value)


def paired(codes: Tensor) -> Tensor:
    """Pack 4-bit codes [n, in] two a byte, [n, in / 2], in the order of `Decoded`."""
    both = codes.reshape(codes.shape[0], -1, 2, 16)
    return (both[:, :, 0] | (both[:, :, 1] << 4)).flatten(1)


class GgufLayout(Layout):
    """The layout of a matrix of GGUF blocks, stored row by row."""

    scale_name = "weight"
    zero_scales = True

    def __init__(
        self,
        part: Part,
        kind: str,
        device: torch.device,
    ) -> None:
        super().__init__(part)
        block = self._block = BLOCK_TYPES[kind]
        self.form = block.form
        out, width = part.out_features, part.in_features
        if width % block.width:
            raise ConfigError(
                f"tensor {part.name}: {kind} needs rows of a multiple of {block.width}, not "
                f"{width}",
                param="model",
            )
        first, last = (at * block.num_bytes for at in self.inputs(block.width))
        whole = width // block.width * block.num_bytes
        self._raw = torch.empty(self.rows, last - first, dtype=torch.uint8, device=device)
        source = Source(f"{part.name}.weight", (out, whole), part.rows, (first, last))
        fill = partial(_fill_blocks, block)
        self.parameters = {
            "weight": Parameter(f"{part.name}.weight", self._raw, (source,), fill=fill)
        }

    def decode(self, begin: int, end: int) -> Decoded:
        return self._block.decode(self._raw[begin:end].view(end - begin, -1, self._block.num_bytes))


def _fill_blocks(block: BlockType, raw: Tensor, generator: torch.Generator) -> None:
    """Fill blocks with random bytes, except their float16 numbers, which are fixed."""
    raw.random_(0, 256, generator=generator)
    blocks = raw.view(raw.shape[0], -1, block.num_bytes)
    for number, at in enumerate(block.halves):
        value = torch.tensor([-0.01 if number else 0.002], dtype=torch.float16)
        blocks[..., at : at + 2] = value.view(torch.uint8)


class _Axis(NamedTuple):
    """An axis of a tensor on disk: its size, and the half-open range that this rank keeps."""

    total: int
    begin: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.begin

    @property
    def kept(self) -> tuple[int, int]:
        return self.begin, self.end


class IntegerLayout(Layout):
    """The layout of GPTQ, AWQ and the packed integers of compressed-tensors.

    Each output and group has a scale, and a zero point unless the weights are symmetric. Tensors
    are int32 words of 4- or 8-bit fields, low bits first.
    """

    def __init__(self, part: Part, scheme: Scheme, device: torch.device) -> None:
        super().__init__(part)
        self._scheme, self.ordered = scheme, scheme.ordered
        # With act-order a rank's inputs may belong to any groups, for which no kernel exists.
        self.dequantises = scheme.ordered and part.columns != (0, part.in_features)
        name, out, width = part.name, part.out_features, part.in_features
        bits = scheme.bits
        assert bits in (4, 8)
        group = scheme.group or self.width
        if width % group or group % 16 or (group != 16 and group % BLOCK) or out % 8:
            raise ConfigError(
                f"tensor {name}: a matrix of {out} times {width} with groups of {group} is not "
                "supported; groups must divide rows of multiples of 32, and 8 the outputs",
                param=KEY,
            )
        middle = 1 << (bits - 1)
        self.form = (
            Format(bits, group, torch.float32, zero=middle)  # type: ignore[arg-type]
            if scheme.symmetric
            else Format(bits, group, torch.float32, offset="shift")  # type: ignore[arg-type]
        )
        fields = self._fields = 32 // bits
        # Axes of tensors on disk: along outputs, as elements or words; along inputs, as elements,
        # words or groups.
        along = _Axis(out, *self.outputs(1))
        words_along = along
        if scheme.kind != "packed" or not scheme.symmetric:
            words_along = _Axis(out // fields, *self.outputs(fields))
        word = 1 if scheme.kind == "awq" else fields
        inputs = _Axis(width // word, *self.inputs(word))
        if scheme.ordered:  # a rank's inputs may belong to any group
            groups = _Axis(width // group, 0, width // group)
        elif scheme.group:
            groups = _Axis(width // group, *self.inputs(group))
        else:
            groups = _Axis(1, 0, 1)
        shapes: Mapping[str, tuple[_Axis, _Axis]]
        if scheme.kind == "packed":
            shapes = {"weight_packed": (along, inputs), "weight_scale": (along, groups)}
            if not scheme.symmetric:
                shapes = {**shapes, "weight_zero_point": (words_along, groups)}
        else:
            weight = (inputs, words_along if scheme.kind == "awq" else along)
            shapes = {"qweight": weight, "scales": (groups, along)}
            # GPTQ files of symmetric weights also have zero points, all equal to the middle code.
            if not scheme.symmetric or scheme.kind == "gptq":
                shapes = {**shapes, "qzeros": (groups, words_along)}
        self.parameters = {}
        self.scale_name = "weight_scale" if scheme.kind == "packed" else "scales"
        if scheme.ordered:
            key = "weight_g_idx" if scheme.kind == "packed" else "g_idx"
            tensor = torch.empty(self.width, dtype=torch.int32, device=device)
            source = Source(f"{name}.{key}", (width,), part.columns)
            fill = partial(_fill_order, width // group, part.columns[0])
            self.parameters["order"] = Parameter(f"{name}.{key}", tensor, (source,), fill=fill)
        for key, (first, second) in shapes.items():
            scale = key in ("scales", "weight_scale")
            kind = torch.float32 if scale else torch.int32
            tensor = torch.empty(first.length, second.length, dtype=kind, device=device)
            size = (first.total, second.total)
            source = Source(f"{name}.{key}", size, first.kept, second.kept)
            made_up: Fill | None = None
            if key == "qzeros" and scheme.symmetric:
                made_up = partial(_fill_words, bits, middle - scheme.zeros_less_one)
            if scale:  # scales must not be zero; this value is exact in float16, which files use
                made_up = partial(_fill_with, 2.0**-9)
            self.parameters[key] = Parameter(f"{name}.{key}", tensor, (source,), fill=made_up)

    def _unpacked(self, words: Tensor, shifts: list[int] | None = None) -> Tensor:
        """Unpack the fields of int32 words [n, m]; return uint8 [n, m * fields].

        shifts: the bit offset of each field; None = fields in order, the first in the lowest bits.
        """
        bits = self._scheme.bits
        every = shifts or list(range(0, 32, bits))
        by = torch.tensor(every, dtype=torch.int32, device=words.device)
        return ((words.unsqueeze(-1) >> by) & ((1 << bits) - 1)).to(torch.uint8).flatten(1)

    def decode(self, begin: int, end: int) -> Decoded:
        codes, scale, zeros = self._fields_of(begin, end)
        if self.order is not None:
            codes = codes.index_select(1, self.order)
        if self.form.bits == 4:
            codes = paired(codes)
        if self.ordered and self.order is None:
            groups = self._groups(scale.shape[1])
            scale = scale.index_select(1, groups)
            zeros = zeros.index_select(1, groups) if zeros.numel() else zeros
        offset = None if self.form.offset == "none" else -zeros.float().contiguous()
        return codes.contiguous(), scale.contiguous(), offset

    def grouped_order(self) -> Tensor | None:
        groups, group = self.parameters["order"].tensor, self.form.group
        order = groups.argsort(stable=True)
        inputs = torch.arange(self.width, device=groups.device)
        alike = torch.equal(groups[order].long(), inputs.div(group, rounding_mode="floor"))
        return order.int() if alike else None

    def _groups(self, count: int) -> Tensor:
        """Return the group index of each input, below `count`. Raises TensorError for others."""
        order = self.parameters["order"]
        if bool((order.tensor < 0).any()) or bool((order.tensor >= count).any()):
            raise TensorError(order.name, f"there are groups 0 to {count - 1}, and it names others")
        return order.tensor

    def _fields_of(self, begin: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return codes [n, in], scales [n, groups] and zero points [n, groups] of rows [begin,
        end)."""
        tensor = {key: parameter.tensor for key, parameter in self.parameters.items()}
        fields, none = self._fields, torch.empty(0)
        if self._scheme.kind == "packed":
            codes = self._unpacked(tensor["weight_packed"][begin:end])
            zeros = none
            if "weight_zero_point" in tensor:  # in this tensor the codes are packed along outputs
                zeros = self._unpacked(tensor["weight_zero_point"].t())[:, begin:end].t()
            return codes, tensor["weight_scale"][begin:end], zeros
        scale = tensor["scales"][:, begin:end].t()
        whole = slice(begin // fields, -(-end // fields))
        cut = slice(begin - whole.start * fields, end - whole.start * fields)
        if self._scheme.kind == "awq":
            codes = self._unpacked(tensor["qweight"][:, whole], _AWQ_SHIFTS)[:, cut].t()
            zeros = none
            if "qzeros" in tensor:
                zeros = self._unpacked(tensor["qzeros"][:, whole], _AWQ_SHIFTS)[:, cut].t()
            return codes, scale, zeros
        codes = self._unpacked(tensor["qweight"][:, begin:end].t())
        zeros = self._unpacked(tensor["qzeros"][:, whole])[:, cut].t()
        if self._scheme.zeros_less_one:
            zeros = (zeros + 1) & ((1 << self._scheme.bits) - 1)
        if self._scheme.symmetric and not bool((zeros == self.form.zero).all()):
            raise TensorError(
                f"{self.name}.qzeros",
                "config.json says that weights are symmetric, and there are other zero points than "
                "the middle",
            )
        return codes, scale, zeros


def _fill_words(bits: int, field: int, tensor: Tensor, generator: torch.Generator) -> None:
    """Fill int32 words with fields of `bits` bits that all have the value `field`."""
    word = sum(field << at for at in range(0, 32, bits))
    tensor.fill_(word - (1 << 32) if word >> 31 else word)


def _fill_order(groups: int, first: int, tensor: Tensor, generator: torch.Generator) -> None:
    """Fill a table with the group of each input from `first` on: i % groups for input i."""
    tensor.copy_(torch.arange(first, first + len(tensor), device=tensor.device) % groups)
