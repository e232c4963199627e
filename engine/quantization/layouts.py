"""Layouts: how checkpoints keep a matrix in fewer bits, and the one form that all are read into
(`kernels.packed.Format`).

A layout names the tensors of a matrix and decodes some rows of them. To add one: subclass Layout,
and choose it in `layout_of`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.quantization.gguf import BLOCK_TYPES
from engine.quantized import KEY, Quantized
from engine.weights.parameter import Parameter, Rows, Source
from kernels.packed import BLOCK, Decoded, Format

_AWQ_SHIFTS = [4 * place for place in (0, 4, 1, 5, 2, 6, 3, 7)]  # of eight neighbours along out


class Layout(ABC):
    """Of one matrix [out, in] of the checkpoint. rows: those kept; parameters: what loading fills,
    by the name behind the matrix's."""

    form: Format
    parameters: dict[str, Parameter]

    def __init__(self, name: str, rows: int, width: int) -> None:
        self.name, self.rows, self.width = name, rows, width

    @abstractmethod
    def decode(self, begin: int, end: int) -> Decoded:
        """Of these rows."""

    def decoded(self, step: int) -> Iterator[Decoded]:
        """All rows, so many at a time. Raises ConfigError for a scale that is not finite."""
        for begin in range(0, self.rows, step):
            codes, scale, offset = self.decode(begin, min(begin + step, self.rows))
            for part in (scale, offset):
                if part is not None and not bool(part.isfinite().all()):
                    raise ConfigError(
                        f"tensor {self.name}: a scale is NaN or infinity", param="model"
                    )
            yield codes, scale, offset


class GgufLayout(Layout):
    """Blocks as in the file, row by row."""

    def __init__(
        self,
        name: str,
        kind: str,
        shape: tuple[int, int],
        rows: Rows | None,
        count: int,
        device: torch.device,
    ) -> None:
        super().__init__(name, count, shape[1])
        block = self._block = BLOCK_TYPES[kind]
        self.form = block.form
        if shape[1] % block.width:
            raise ConfigError(
                f"tensor {name}: {kind} needs rows of a multiple of {block.width}, not {shape[1]}",
                param="model",
            )
        width = shape[1] // block.width * block.num_bytes
        self._raw = torch.empty(count, width, dtype=torch.uint8, device=device)
        source = Source(f"{name}.weight", (shape[0], width), rows)
        self.parameters = {
            "weight": Parameter(f"{name}.weight", self._raw, (source,), fill=self._fill)
        }

    def _fill(self, generator: torch.Generator) -> None:
        """Any bytes are a block, but for its float16 numbers."""
        self._raw.random_(0, 256, generator=generator)
        blocks = self._raw.view(self.rows, -1, self._block.num_bytes)
        for number, at in enumerate(self._block.halves):
            value = torch.tensor([-0.01 if number else 0.002], dtype=torch.float16)
            blocks[..., at : at + 2] = value.view(torch.uint8)

    def decode(self, begin: int, end: int) -> Decoded:
        return self._block.decode(self._raw[begin:end].view(end - begin, -1, self._block.num_bytes))


class IntegerLayout(Layout):
    """GPTQ, AWQ and the packed integers of compressed-tensors: a scale for each output and group,
    and a zero point unless the weights are symmetric. As torch.int32 words of 4- or 8-bit fields,
    low bits first."""

    def __init__(
        self, name: str, quantized: Quantized, shape: tuple[int, int], device: torch.device
    ) -> None:
        super().__init__(name, *shape)
        self._quantized = quantized
        out, width = shape
        bits = quantized.bits
        assert bits in (4, 8)
        group = quantized.group or width
        if width % group or group % 16 or (group != 16 and group % BLOCK) or out % 8:
            raise ConfigError(
                f"tensor {name}: a matrix of {out} times {width} with groups of {group} is not "
                "supported; groups must divide rows of multiples of 32, and 8 the outputs",
                param=KEY,
            )
        middle = 1 << (bits - 1)
        self.form = (
            Format(bits, group, torch.float32, zero=middle)  # type: ignore[arg-type]
            if quantized.symmetric
            else Format(bits, group, torch.float32, offset="shift")  # type: ignore[arg-type]
        )
        fields, groups = 32 // bits, width // group
        self._fields = fields
        shapes: Mapping[str, tuple[int, int]]
        if quantized.method == "compressed-tensors":
            shapes = {"weight_packed": (out, width // fields), "weight_scale": (out, groups)}
            if not quantized.symmetric:
                shapes = {**shapes, "weight_zero_point": (out // fields, groups)}
        else:
            along_out = quantized.method == "awq"
            weight = (width, out // fields) if along_out else (width // fields, out)
            shapes = {"qweight": weight, "scales": (groups, out)}
            # GPTQ files of symmetric weights have zero points too, which say the middle.
            if not quantized.symmetric or quantized.method == "gptq":
                shapes = {**shapes, "qzeros": (groups, out // fields)}
        self.parameters = {}
        for key, size in shapes.items():
            scale = key in ("scales", "weight_scale")
            tensor = torch.empty(size, dtype=torch.float32 if scale else torch.int32, device=device)
            source = Source(f"{name}.{key}", size)
            fill = self._fill_zeros if key == "qzeros" and quantized.symmetric else None
            self.parameters[key] = Parameter(f"{name}.{key}", tensor, (source,), fill=fill)

    def _fill_zeros(self, generator: torch.Generator) -> None:
        stored = self.form.zero - self._quantized.zeros_less_one
        self.parameters["qzeros"].tensor.fill_(
            sum(stored << at for at in range(0, 32 - self.form.bits, self.form.bits))
            + ((stored - (1 << self.form.bits)) << (32 - self.form.bits))
            if stored >> (self.form.bits - 1)
            else sum(stored << at for at in range(0, 32, self.form.bits))
        )

    def _unpacked(self, words: Tensor, shifts: list[int] | None = None) -> Tensor:
        """int32 [n, m] -> uint8 [n, m * fields]."""
        bits = self._quantized.bits
        every = shifts or list(range(0, 32, bits))
        by = torch.tensor(every, dtype=torch.int32, device=words.device)
        return ((words.unsqueeze(-1) >> by) & ((1 << bits) - 1)).to(torch.uint8).flatten(1)

    def decode(self, begin: int, end: int) -> Decoded:
        codes, scale, zeros = self._fields_of(begin, end)
        if self.form.bits == 4:
            both = codes.reshape(end - begin, -1, 2, 16)
            codes = (both[:, :, 0] | (both[:, :, 1] << 4)).flatten(1)
        offset = None if self.form.offset == "none" else -zeros.float().contiguous()
        return codes.contiguous(), scale.contiguous(), offset

    def _fields_of(self, begin: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
        """Codes [n, in], scales [n, groups] and zero points of the same shape."""
        tensor = {key: parameter.tensor for key, parameter in self.parameters.items()}
        fields, none = self._fields, torch.empty(0)
        if self._quantized.method == "compressed-tensors":
            codes = self._unpacked(tensor["weight_packed"][begin:end])
            zeros = none
            if "weight_zero_point" in tensor:  # packed along outputs
                zeros = self._unpacked(tensor["weight_zero_point"].t())[:, begin:end].t()
            return codes, tensor["weight_scale"][begin:end], zeros
        scale = tensor["scales"][:, begin:end].t()
        whole = slice(begin // fields, -(-end // fields))
        cut = slice(begin - whole.start * fields, end - whole.start * fields)
        if self._quantized.method == "awq":
            codes = self._unpacked(tensor["qweight"][:, whole], _AWQ_SHIFTS)[:, cut].t()
            zeros = none
            if "qzeros" in tensor:
                zeros = self._unpacked(tensor["qzeros"][:, whole], _AWQ_SHIFTS)[:, cut].t()
            return codes, scale, zeros
        codes = self._unpacked(tensor["qweight"][:, begin:end].t())
        zeros = self._unpacked(tensor["qzeros"][:, whole])[:, cut].t()
        if self._quantized.zeros_less_one:
            zeros = (zeros + 1) & ((1 << self._quantized.bits) - 1)
        if self._quantized.symmetric and not bool((zeros == self.form.zero).all()):
            raise ConfigError(
                f"tensor {self.name}.qzeros: config.json says that weights are symmetric, and "
                "there are other zero points than the middle",
                param=KEY,
            )
        return codes, scale, zeros
