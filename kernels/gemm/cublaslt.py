"""Matmuls by the fastest of cuBLASLt's algorithms, chosen by timing.

For one shape cuBLASLt's heuristic ranks several algorithms, and torch takes the first. On an H200
another one is up to 17 % faster at the sizes of a decode batch. A tile that the heuristic does not
offer, but that fills the multiprocessors evenly, is up to 20 % faster still (docs/performance.md).
So cublaslt_tune.py times algorithms on the model's own weights. `linear` and `linear_add_` use the
fastest algorithm for the number of rows, and torch for shapes that were not tuned. torch cannot add
both a bias and a residual in a matmul, so these matmuls take the heuristic's first algorithm.

The library is the one that torch has loaded, called through ctypes, so no extension module is
compiled. If it cannot be loaded, nothing is tuned, and a warning is logged. Choices depend on
timing, so results on two machines may differ in the last bits. In deterministic mode
(`EngineConfig.deterministic`) nothing is tuned.
"""

import ctypes
import logging
import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

logger = logging.getLogger("manta.kernels")

_WORKSPACE = 32 << 20  # bytes; NVIDIA's recommendation for Hopper
_CANDIDATES = 16  # algorithms to request; current libraries return at most eight
_MOST_BIASED = 512  # maximum number of shapes whose matmul with a bias is kept

# Constants of cublasLt.h, which are part of its ABI.
_COMPUTE_32F = 68
TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}  # cudaDataType_t
_DESC_TRANSA, _DESC_EPILOGUE, _DESC_BIAS = 3, 7, 8
_OP_T = 1
_EPILOGUE_BIAS = 4
_PREFERENCE_WORKSPACE = 1
_CONFIG_TILE, _CONFIG_SPLIT_K, _CONFIG_REDUCTION, _CONFIG_SWIZZLE, _CONFIG_CUSTOM = 1, 2, 3, 4, 5
_CONFIG_CLUSTER = 8
_REDUCE_IN_FLOAT32 = 2


_Attribute = ctypes.c_int32 | ctypes.c_uint32 | ctypes.c_void_p  # of a matmul's description


class CublasLtError(RuntimeError):
    """Raised when a call of cuBLASLt returns an error status."""


class Algorithm(ctypes.Structure):
    """cuBLASLt's struct cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algo", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class CublasLt:
    """A handle of libcublasLt on one device."""

    def __init__(self, lib: ctypes.CDLL, device: torch.device) -> None:
        self.lib = lib
        self.handle = ctypes.c_void_p()
        self.call("cublasLtCreate", ctypes.byref(self.handle))
        self.device = device
        self.version = int(lib.cublasLtGetVersion())
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        self.one, self.zero = ctypes.addressof(self._one), ctypes.addressof(self._zero)
        self.matmul = lib.cublasLtMatmul
        # With declared types ctypes accepts plain integers as pointers, which makes calls cheap.
        self.matmul.argtypes = [ctypes.c_void_p] * 14 + [ctypes.c_size_t, ctypes.c_void_p]

    def call(self, name: str, *args: object) -> None:
        status = getattr(self.lib, name)(*args)
        if status:
            raise CublasLtError(f"{name}: cuBLASLt status {status}")


@lru_cache
def library(device: torch.device) -> CublasLt | None:
    """Return a device's cuBLASLt handle; log a warning and return None if it is unusable."""
    major = (torch.version.cuda or "").partition(".")[0]
    try:
        return CublasLt(ctypes.CDLL(f"libcublasLt.so.{major}"), device)
    except (OSError, AttributeError, CublasLtError) as error:
        logger.warning("matrix products are not tuned, cuBLASLt cannot be called: %s", error)
        return None


class Matmul:
    """The matmul x[rows, k] @ weight[n, k].T, written to y[rows, n], or with `add` added to y.

    bias: a bias [n] that is added, too; `set_bias` replaces it.
    """

    def __init__(
        self, lib: CublasLt, rows: int, weight: Tensor, add: bool, bias: Tensor | None = None
    ) -> None:
        n, k = weight.shape
        kind = TYPES[weight.dtype]
        self._lib = lib
        self._beta = lib.one if add else lib.zero
        self._desc = ctypes.c_void_p()
        lib.call("cublasLtMatmulDescCreate", ctypes.byref(self._desc), _COMPUTE_32F, 0)
        self._set(_DESC_TRANSA, ctypes.c_int32(_OP_T))
        if bias is not None:
            self._set(_DESC_EPILOGUE, ctypes.c_uint32(_EPILOGUE_BIAS))
            self.set_bias(bias)
        # The library is column-major: y.T [n, rows] = (weight.T [k, n]).T @ x.T [k, rows].
        self._weight, self._x, self._y = (
            self._layout(kind, *size) for size in ((k, n), (k, rows), (n, rows))
        )

    def _set(self, attribute: int, value: _Attribute) -> None:
        self._lib.call(
            "cublasLtMatmulDescSetAttribute",
            self._desc,
            attribute,
            ctypes.byref(value),
            ctypes.c_size_t(ctypes.sizeof(value)),
        )

    def set_bias(self, bias: Tensor) -> None:
        """Use another bias [n] from the next `run` on."""
        self._set(_DESC_BIAS, ctypes.c_void_p(bias.data_ptr()))

    def free(self) -> None:
        """Destroy the library's descriptions; `run` must not be called again."""
        for layout in (self._weight, self._x, self._y):
            self._lib.call("cublasLtMatrixLayoutDestroy", layout)
        self._lib.call("cublasLtMatmulDescDestroy", self._desc)

    def offered(self) -> list[Algorithm]:
        """Return the algorithms that cuBLASLt's heuristic offers, best first; possibly none."""
        lib = self._lib
        preference = ctypes.c_void_p()
        lib.call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        limit = ctypes.c_size_t(_WORKSPACE)
        lib.call(
            "cublasLtMatmulPreferenceSetAttribute",
            preference,
            _PREFERENCE_WORKSPACE,
            ctypes.byref(limit),
            ctypes.c_size_t(8),
        )
        algorithms = (Algorithm * _CANDIDATES)()
        count = ctypes.c_int()
        layouts = (self._weight, self._x, self._y, self._y)
        status = lib.lib.cublasLtMatmulAlgoGetHeuristic(
            *(lib.handle, self._desc, *layouts, preference, _CANDIDATES, algorithms),
            ctypes.byref(count),
        )
        lib.call("cublasLtMatmulPreferenceDestroy", preference)
        if status:  # the library has no algorithm for this matmul
            return []
        return [algorithms[i] for i in range(count.value) if algorithms[i].state == 0]

    def fitted(self, algorithm: Algorithm) -> Algorithm | None:
        """Return an algorithm of another matmul, adapted to this matmul's shape.

        Returns None if cuBLASLt does not support the algorithm for this shape.
        """
        checked = Algorithm()
        if self._lib.lib.cublasLtMatmulAlgoCheck(
            *(self._lib.handle, self._desc, self._weight, self._x, self._y, self._y),
            ctypes.byref(algorithm.algo),
            ctypes.byref(checked),
        ):
            return None
        if checked.workspace > _WORKSPACE:
            return None
        checked.algo = algorithm.algo
        return checked

    def variant(self, base: Algorithm, tile: int, split_k: int, cluster: int) -> Algorithm | None:
        """Return the algorithm `base` with another tile, split of k and cluster.

        tile, cluster: values of cublasLt.h's enumerations.

        Returns None if cuBLASLt does not support the algorithm, or if the last wave would leave a
        fifth of the multiprocessors idle.
        """
        algorithm = Algorithm.from_buffer_copy(base)
        for name, value, kind in (
            (_CONFIG_TILE, tile, ctypes.c_uint32),
            (_CONFIG_SPLIT_K, split_k, ctypes.c_uint32),
            (_CONFIG_REDUCTION, _REDUCE_IN_FLOAT32 if split_k > 1 else 0, ctypes.c_uint32),
            (_CONFIG_SWIZZLE, 0, ctypes.c_uint32),
            (_CONFIG_CUSTOM, 0, ctypes.c_uint32),
            (_CONFIG_CLUSTER, cluster, ctypes.c_uint16),
        ):
            field = kind(value)
            if self._lib.lib.cublasLtMatmulAlgoConfigSetAttribute(
                ctypes.byref(algorithm.algo),
                name,
                ctypes.byref(field),
                ctypes.c_size_t(ctypes.sizeof(field)),
            ):
                return None
        fitted = self.fitted(algorithm)
        if fitted is None or 1 < fitted.waves < 0.8 * math.ceil(fitted.waves):
            return None
        return fitted

    def _layout(self, kind: int, rows: int, columns: int) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        self._lib.call(
            "cublasLtMatrixLayoutCreate",
            *(ctypes.byref(layout), kind, ctypes.c_uint64(rows), ctypes.c_uint64(columns)),
            ctypes.c_int64(rows),
        )
        return layout

    def run(self, algorithm: Algorithm, x: Tensor, weight: Tensor, y: Tensor) -> None:
        lib = self._lib
        at = y.data_ptr()
        workspace = None
        if algorithm.workspace:  # rare; the stream orders a later reuse of this memory
            workspace = torch.empty(algorithm.workspace, dtype=torch.uint8, device=lib.device)
        status = lib.matmul(
            lib.handle,
            self._desc,
            lib.one,
            weight.data_ptr(),
            self._weight,
            x.data_ptr(),
            self._x,
            self._beta,
            at,
            self._y,
            at,
            self._y,
            ctypes.addressof(algorithm),  # the struct's first field, `algo`, has this address
            None if workspace is None else workspace.data_ptr(),
            algorithm.workspace,
            torch.cuda.current_stream().cuda_stream,
        )
        if status:
            raise CublasLtError(f"cublasLtMatmul: cuBLASLt status {status}")


@dataclass(frozen=True, slots=True)
class TunedMatmul:
    matmul: Matmul
    algorithm: Algorithm


Key = tuple[int, int, int, torch.dtype, bool, torch.device]  # rows, n, k, ..., add

# The tuner's choices, shared by the whole process like Triton's compiled kernels.
tuned_matmuls: dict[Key, TunedMatmul] = {}
# matmuls with a bias and a residual; None: cuBLASLt cannot compute the shape
_biased_matmuls: dict[Key, TunedMatmul | None] = {}


def key_of(rows: int, weight: Tensor, add: bool) -> Key:
    n, k = weight.shape
    return rows, n, k, weight.dtype, add, weight.device


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x [rows, k] @ weight [n, k].T + bias [n]: [rows, n]."""
    tuned = tuned_matmuls.get(key_of(x.shape[0], weight, False)) if bias is None else None
    if tuned is None:
        return torch.nn.functional.linear(x, weight, bias)
    y = x.new_empty((x.shape[0], weight.shape[0]))
    tuned.matmul.run(tuned.algorithm, x, weight, y)
    return y


def linear_add_(x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None = None) -> Tensor:
    """Add x [rows, k] @ weight [n, k].T + bias [n] to residual [rows, n] in place; return the
    residual."""
    if bias is not None:
        biased = _biased(x, weight, bias)
        if biased is not None:
            biased.matmul.set_bias(bias)
            biased.matmul.run(biased.algorithm, x, weight, residual)
            return residual
        residual += bias
    tuned = tuned_matmuls.get(key_of(x.shape[0], weight, True))
    if tuned is None:
        return residual.addmm_(x, weight.t())
    tuned.matmul.run(tuned.algorithm, x, weight, residual)
    return residual


def _biased(x: Tensor, weight: Tensor, bias: Tensor) -> TunedMatmul | None:
    """Return the matmul that adds to a residual and has a bias, for x's number of rows.

    Returns None if cuBLASLt cannot compute it, or if x is not contiguous.
    """
    key = key_of(x.shape[0], weight, True)
    if key not in _biased_matmuls:
        if len(_biased_matmuls) >= _MOST_BIASED:
            for old in _biased_matmuls.values():
                if old is not None:
                    old.matmul.free()
            _biased_matmuls.clear()
        _biased_matmuls[key] = _first_offered(x.shape[0], weight, bias)
    return _biased_matmuls[key] if x.is_contiguous() else None


def _first_offered(rows: int, weight: Tensor, bias: Tensor) -> TunedMatmul | None:
    lib = library(weight.device)
    if lib is None or weight.dtype not in TYPES or not weight.is_contiguous():
        return None
    matmul = Matmul(lib, rows, weight, add=True, bias=bias)
    offered = matmul.offered()
    return TunedMatmul(matmul, offered[0]) if offered else None
