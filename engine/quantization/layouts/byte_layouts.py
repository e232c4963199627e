"""Layouts with codes in bytes or half bytes, row by row: 8-bit and 4-bit floats, integers, NF4.

A weight is code * scale, with a scale for each output, block or group. NVFP4's scales are 8-bit
floats, which are divided or (ModelOpt) multiplied by one float32 of the matrix. MXFP4's scales are
powers of two (OCP Microscaling Formats 1.0). NF4 is QLoRA's (arXiv 2305.14314), with bitsandbytes'
bytes.
"""

import json
from functools import partial
from math import gcd
from typing import Any

import torch
from torch import Tensor

from engine.config.quantized import KEY, Scheme
from engine.errors import ConfigError, TensorError
from engine.quantization.layouts.layout import Layout, joined, of_stack, paired
from engine.quantization.layouts.sparse import SparseRows
from engine.quantization.method import Part
from engine.weights.parameter import Parameter, Source, take_rows
from kernels.packed import BLOCK, E2M1, Decoded, Format

# 16 quantiles of a normal distribution, scaled to at most 1 (bitsandbytes, functional.py).
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_STATE = "weight.quant_state.bitsandbytes__nf4"
_STATE_BYTES = 1024  # maximum bytes of the JSON text that bitsandbytes stores with a matrix
_NAN = 127  # the code of NaN in e4m3, without the sign bit


def eight_bit_form(scheme: Scheme, group: int, rows: int) -> Format:
    """Return the format of an 8-bit matrix.

    group: number of inputs that share a scale.
    rows: number of outputs that share a scale.
    """
    if scheme.kind == "fp8":
        return Format(
            8, group, torch.float32, code="e4m3", rows=rows, activations=scheme.activations
        )
    return Format(8, group, torch.float32, zero=128, activations=scheme.activations)


class EightBitLayout(Layout):
    """The layout of e4m3 or int8 codes, with a scale for the matrix, each output or each block."""

    def __init__(self, part: Part, scheme: Scheme, device: torch.device) -> None:
        super().__init__(part)
        name, shape, rows = part.name, (part.out_features, part.in_features), part.rows
        count, width = self.rows, self.width
        self._scheme, self._rows = scheme, rows
        self._floats = scheme.kind == "fp8"
        if shape[1] % BLOCK:
            raise ConfigError(
                f"tensor {name}.weight: rows of {shape[1]} inputs are not supported, only "
                f"multiples of {BLOCK}",
                param=KEY,
            )
        self.inputs(BLOCK)
        # If blocks do not divide this rank's part, scales are repeated for smaller blocks that do.
        group = gcd(scheme.group, width, part.columns[0]) if scheme.group else width
        # smaller groups, as no kernel has groups such as 48
        group = gcd(group, 16) if group % BLOCK else group
        aligned = isinstance(rows, tuple) and rows[0] % max(1, scheme.rows) == 0
        band = scheme.rows if scheme.rows > 1 and aligned and count % scheme.rows == 0 else 1
        self.form = eight_bit_form(scheme, group, band)
        self.scale_name = scheme.scale
        self.parameters: dict[str, Parameter] = {}
        kind = torch.float8_e4m3fn if self._floats else torch.int8
        self._sparse: SparseRows | None = None
        if scheme.sparse:
            self._sparse = SparseRows(self, kind, device, _fill_codes)
        else:
            source = Source(f"{name}.weight", shape, rows, part.columns)
            codes = self.add_parameter("weight", kind, source, (count, width), device, _fill_codes)
            self._codes = codes.view(torch.uint8)
        key = scheme.scale
        if scheme.group:
            grid: tuple[int, ...] = (-(-shape[0] // scheme.rows), -(-shape[1] // scheme.group))
            scale = Source(f"{name}.{key}", grid)
        else:
            grid = (shape[0] if scheme.rows else 1,)
            scale = Source(f"{name}.{key}", grid, flat=True)
        self._scale = self.add_parameter(key, torch.float32, scale, grid, device, 2e-3)

    def decode(self, begin: int, end: int) -> Decoded:
        if self._sparse is None:
            codes = self._codes[begin:end]
        else:
            codes = self._sparse.dense(begin, end).view(torch.uint8)
        if not self._floats:
            return codes ^ 128, self._scales(begin, end), None
        if bool(((codes & _NAN) == _NAN).any()):
            raise TensorError(f"{self.name}.weight", "holds NaN")
        return codes, self._scales(begin, end), None

    def _scales(self, begin: int, end: int) -> Tensor:
        """Return the scales [ceil(n / form.rows), groups] of this rank's rows [begin, end)."""
        scheme, scale = self._scheme, self._scale
        if not scheme.group:
            if scheme.rows:
                scale = take_rows(scale, self._rows)[begin:end]
            if scheme.kind == "llm-int8":
                scale = scale * (1 / 127)
            return scale.view(-1, 1).expand(end - begin, 1).contiguous()
        band = self.form.rows
        if isinstance(self._rows, tuple):
            rows = torch.arange(self._rows[0] + begin, self._rows[0] + end, band)
        else:
            rows = torch.from_numpy(self._rows[begin:end])
        rows = (rows // scheme.rows).to(scale.device)
        first, last = self.part.columns
        columns = torch.arange(first, last, self.form.group, device=scale.device) // scheme.group
        return scale.index_select(0, rows).index_select(1, columns)


def _fill_codes(tensor: Tensor, generator: torch.Generator) -> None:
    """Fill a tensor with random bytes that are not NaN in e4m3."""
    tensor.view(torch.uint8).random_(0, 256, generator=generator).bitwise_and_(0xBF)


class FourBitFloats(Layout):
    """The layout of e2m1 codes, two a byte, the low half first."""

    zero_scales = True

    def __init__(self, part: Part, scheme: Scheme, device: torch.device) -> None:
        super().__init__(part)
        name, rows, stack = part.name, part.rows, part.stack
        count, width = self.rows, self.width
        out, whole = part.out_features, part.in_features
        if whole % BLOCK:
            raise ConfigError(
                f"tensor {joined(name, scheme.weight)}: rows of {whole} inputs are not supported, "
                f"only multiples of {BLOCK}",
                param=KEY,
            )
        self._scheme, group = scheme, scheme.group
        self.scale_name = scheme.scale
        self.form = Format(4, group, torch.float32, zero=E2M1[0], table=E2M1)
        self.parameters = {}
        key = joined(name, scheme.weight)
        first, last = self.inputs(BLOCK)
        half = (first * BLOCK // 2, last * BLOCK // 2)
        source = of_stack(Source(key, (out, whole // 2), rows, half), stack)
        self._codes = self.add_parameter(
            scheme.weight, torch.uint8, source, (count, width // 2), device
        )
        key = joined(name, scheme.scale)
        runs = (first * BLOCK // group, last * BLOCK // group)
        grid = of_stack(Source(key, (out, whole // group), rows, runs), stack)
        scale_shape = (count, width // group)
        if scheme.kind == "nvfp4":
            self._scale = self.add_parameter(
                scheme.scale, torch.float8_e4m3fn, grid, scale_shape, device, 1.0
            )
            total = Source(f"{name}.{scheme.total}", (1,), flat=True)
            some = 100.0 if scheme.divides else 0.01
            self._total = self.add_parameter(scheme.total, torch.float32, total, (1,), device, some)
        else:
            self._scale = self.add_parameter(
                scheme.scale, torch.uint8, grid, scale_shape, device, 120.0
            )

    def decode(self, begin: int, end: int) -> Decoded:
        codes = self._codes[begin:end]
        codes = torch.stack((codes & 15, codes >> 4), 2).flatten(1)
        # Halved, as the table E2M1 has integers that are twice the values of the floats.
        return paired(codes), self._scales(self._scale[begin:end]) * 0.5, None

    def _scales(self, stored: Tensor) -> Tensor:
        if self._scheme.kind == "mxfp4":
            return powers_of_two(stored)
        if not bool((self._total > 0).all()) or not bool(self._total.isfinite().all()):
            raise TensorError(
                f"{self.name}.{self._scheme.total}", "the scale is zero, negative, NaN or infinity"
            )
        scale = stored.float()
        return scale / self._total if self._scheme.divides else scale * self._total


def powers_of_two(stored: Tensor) -> Tensor:
    """Decode E8M0 bytes to float32 powers of two; 255 is NaN."""
    powers = torch.ldexp(torch.ones_like(stored, dtype=torch.float32), stored.int() - 127)
    return powers.masked_fill_(stored == 255, torch.nan)


class Nf4Layout(Layout):
    """The layout of NF4: groups of 64 inputs with one scale, two codes a byte, the high half first.

    The file stores the matrix as one vector, from which a rank reads whole rows. With
    `Scheme.nested` the scales are stored as bytes: indices into a table of 256 numbers, with a
    factor for each 256 scales and one offset.
    """

    zero_scales = True
    scale_name = "weight.absmax"

    def __init__(self, part: Part, scheme: Scheme, device: torch.device) -> None:
        super().__init__(part)
        name, out, width = part.name, part.out_features, part.in_features
        group = scheme.group
        self._inputs = self.inputs(group)
        first, last = self.outputs(1)
        if width % group:
            raise ConfigError(
                f"tensor {name}.weight: rows of {width} inputs are not supported, only multiples "
                f"of {group}, the numbers that share a scale",
                param=KEY,
            )
        self._nested = scheme.nested
        self.form = Format(4, group, torch.float32, table=NF4)
        self.parameters = {}
        self._first_run = first * width // group

        def tensor(
            key: str, dtype: torch.dtype, size: int, fill: Tensor | float = 0.0, row: int = 0
        ) -> Tensor:
            """Allocate the parameter for the tensor with the suffix `key`.

            size: the number of elements of the whole tensor on disk.
            fill: the values for random weights.
            row: elements of a matrix row, if only this rank's rows are read; 0 = all are read.
            """
            rows = (first * row, last * row) if row else None
            source = Source(f"{name}.{key}", (size,), rows, flat=True, shorter=key == _STATE)
            shape = (source.num_rows,)
            if isinstance(fill, Tensor):
                return self.add_parameter(key, dtype, source, shape, device, partial(_copy, fill))
            return self.add_parameter(key, dtype, source, shape, device, fill or None)

        half, run = width // 2, width // group
        runs = out * run
        self._codes = tensor("weight", torch.uint8, out * half, row=half)
        self._map = tensor("weight.quant_map", torch.float32, 16, torch.tensor(NF4))
        values = {"blocksize": group, "shape": [out, width], "nested_offset": 0.02}
        text = json.dumps(values).encode().ljust(_STATE_BYTES)
        made_up = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._state = tensor(_STATE, torch.uint8, _STATE_BYTES, made_up)
        self._state.zero_()
        if not self._nested:
            self._scale = tensor("weight.absmax", torch.float32, runs, 0.03, run)
            return
        self._scale = tensor("weight.absmax", torch.uint8, runs, row=run)
        table = torch.linspace(-1, 1, 256)
        self._table = tensor("weight.nested_quant_map", torch.float32, 256, table)
        self._outer = tensor("weight.nested_absmax", torch.float32, -(-runs // 256), 0.01)

    def decode(self, begin: int, end: int) -> Decoded:
        group = self.form.group
        first, last = (at * group // 2 for at in self._inputs)
        offset = self._values()["nested_offset"]
        codes = self._codes.view(self.rows, -1)[begin:end, first:last]
        codes = torch.stack((codes >> 4, codes & 15), 2).flatten(1)
        return paired(codes), self._runs(begin, end, offset), None

    def _runs(self, first: int, last: int, offset: float) -> Tensor:
        """Return the scales [n, groups] of rows [first, last).

        offset: a number that is added to nested scales.
        """
        groups = self.part.in_features // self.form.group
        begin, end = first * groups, last * groups
        scale = self._scale[begin:end]
        if self._nested:
            runs = torch.arange(begin, end, device=scale.device) + self._first_run
            scale = self._table[scale.int()] * self._outer[runs // 256] + offset
        return scale.view(-1, groups)[:, slice(*self._inputs)].contiguous()

    def _values(self) -> dict[str, Any]:
        """Parse the JSON that is stored with the matrix.

        Raises TensorError for unsupported values.
        """
        key = f"{self.name}.{_STATE}"
        try:
            state = json.loads(bytes(self._state.cpu().numpy()).rstrip(b"\0 "))
            state["nested_offset"] = float(state.get("nested_offset", 0.0))
        except (ValueError, TypeError, AttributeError) as error:
            raise TensorError(key, f"cannot be read: {error!r}") from None
        for what, want in (
            ("blocksize", self.form.group),
            ("shape", [self.part.out_features, self.part.in_features]),
        ):
            if state.get(what) != want:
                raise TensorError(key, f"{what} is {state.get(what)}, and only {want} is supported")
        if not torch.equal(self._map.cpu(), torch.tensor(NF4)):
            raise TensorError(f"{self.name}.weight.quant_map", "is not the table of NF4")
        return dict(state)


def _copy(values: Tensor, tensor: Tensor, generator: torch.Generator) -> None:
    tensor.copy_(values)
