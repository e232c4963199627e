"""CUDA C++ kernels: compiled by NVRTC, stored beside Triton's kernels, launched by the driver.

Triton cannot copy a tile to several multiprocessors at once, and its tiles have sizes that are
powers of two. Kernels that need more are written in CUDA C++. NVRTC is a library that torch depends
on. Like the driver it is called through ctypes, so neither a compiler nor an extension module is
needed.
"""

import ctypes
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from kernels.launch.compiling import Compilers
from kernels.launch.object_cache import cached

# Constants of cuda.h, which are part of its ABI.
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_PROGRAMMATIC_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_TENSOR_TYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}  # CUtensorMapDataType
_SWIZZLE_128_BYTES = 3  # CUtensorMapSwizzle
_PROMOTE_TO_256_BYTES = 3  # CUtensorMapL2promotion

# An argument passed by value: a struct of integers, or a CUtensorMap.
_Array = ctypes.Array[ctypes.c_int] | ctypes.Array[ctypes.c_uint64]


class CudaError(RuntimeError):
    """Raised when NVRTC or the driver returns an error."""


def _check(name: str, status: int) -> None:
    if status:
        raise CudaError(f"{name}: CUDA status {status}")


@cache
def _threads() -> ThreadPoolExecutor:
    """Return the threads that compile; NVRTC runs without the interpreter's lock."""
    return ThreadPoolExecutor(2, thread_name_prefix="nvrtc")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _compiler() -> ctypes.CDLL:
    """Return NVRTC of torch's CUDA release. Raises OSError if it cannot be loaded."""
    major = (torch.version.cuda or "").partition(".")[0]
    name = f"libnvrtc.so.{major}"
    try:
        return ctypes.CDLL(name)
    except OSError:
        folders = (f"cu{major}", "cuda_nvrtc")  # of the wheels of CUDA 13 and 12
        for path in (Path(p, "nvidia", f, "lib", name) for p in sys.path for f in folders):
            if path.exists():
                return ctypes.CDLL(str(path))
        raise


def _compile(source: str, architecture: str) -> bytes:
    """Compile CUDA C++ to a cubin. Raises CudaError with the compiler's messages."""
    nvrtc = _compiler()
    program = ctypes.c_void_p()
    status = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None
    )
    _check("nvrtcCreateProgram", status)
    try:
        options = (f"--gpu-architecture={architecture}".encode(), b"--std=c++17")
        words = (ctypes.c_char_p * len(options))(*options)
        status = nvrtc.nvrtcCompileProgram(program, len(options), words)
        size = ctypes.c_size_t()
        if status:
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise CudaError(f"nvrtcCompileProgram: {log.value.decode()}")
        _check("nvrtcGetCUBINSize", nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        code = ctypes.create_string_buffer(size.value)
        _check("nvrtcGetCUBIN", nvrtc.nvrtcGetCUBIN(program, code))
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return code.raw


def cubin_of(source: str, architecture: str) -> bytes:
    """Return the machine code of a CUDA C++ source, compiled now or cached by an earlier process.

    architecture: such as "sm_90a".
    Raises CudaError if the source is wrong, and OSError if NVRTC cannot be loaded.
    """
    inputs = "\0".join((str(torch.version.cuda), architecture, source))
    return cached("manta-cuda", inputs, lambda: _compile(source, architecture))


@lru_cache(maxsize=4096)
def _encode(
    address: int, dtype: torch.dtype, shape: tuple[int, int], box: tuple[int, int]
) -> ctypes.Array[ctypes.c_uint64]:
    rows, columns = shape
    memory = (ctypes.c_uint64 * 24)()  # a map's address is a multiple of 64
    words = (ctypes.c_uint64 * 16).from_buffer(memory, -ctypes.addressof(memory) % 64)
    status = _driver().cuTensorMapEncodeTiled(
        words,
        _TENSOR_TYPES[dtype],
        2,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * 2)(columns, rows),
        (ctypes.c_uint64 * 1)(columns * dtype.itemsize),
        (ctypes.c_uint32 * 2)(box[1], box[0]),
        (ctypes.c_uint32 * 2)(1, 1),
        0,
        _SWIZZLE_128_BYTES,
        _PROMOTE_TO_256_BYTES,
        0,
    )
    _check("cuTensorMapEncodeTiled", status)
    return words


def integers(*values: int) -> ctypes.Array[ctypes.c_int]:
    """Return a kernel's argument that is a struct of 32-bit integers."""
    return (ctypes.c_int * len(values))(*values)


def tensor_map(matrix: Tensor, box: tuple[int, int]) -> ctypes.Array[ctypes.c_uint64]:
    """Return a contiguous matrix's description for the tensor memory accelerator.

    box: rows and columns of a copied box, whose rows have 128 bytes and are swizzled in shared
    memory as wgmma reads them. What is beyond the matrix becomes zero.
    """
    rows, columns = matrix.shape
    return _encode(matrix.data_ptr(), matrix.dtype, (rows, columns), box)


class _Attribute(ctypes.Structure):
    """The driver's struct CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    """The driver's struct CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


class CudaKernel:
    """A kernel in CUDA C++ on one device, compiled in a thread.

    It is launched dependently: it may begin before its predecessor on the stream has ended, and
    follows the rules of `kernels.launch.pdl`.

    source, architecture: see `cubin_of`. name: the function's. threads: of a block.
    shared_bytes: dynamic shared memory of a block.
    """

    def __init__(
        self,
        source: str,
        architecture: str,
        name: str,
        device: torch.device,
        threads: int,
        shared_bytes: int,
    ) -> None:
        self._code = _threads().submit(cubin_of, source, architecture)
        self._name, self._device = name, device
        self._threads, self._shared_bytes = threads, shared_bytes
        self._function: ctypes.c_void_p | None = None
        self._dependent = _Attribute(_PROGRAMMATIC_SERIALIZATION)
        self._dependent.value[0] = 1

    def load(self) -> None:
        """Wait until the kernel is compiled, and load it.

        Raises CudaError if it is wrong, OSError if there is no NVRTC, and AttributeError if the
        driver is too old.
        """
        code = self._code.result()
        driver = _driver()
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(self._device):
            torch.cuda.current_stream().query()  # creates the device's context
            _check("cuModuleLoadData", driver.cuModuleLoadData(ctypes.byref(module), code))
        status = driver.cuModuleGetFunction(ctypes.byref(function), module, self._name.encode())
        _check("cuModuleGetFunction", status)
        status = driver.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, self._shared_bytes)
        _check("cuFuncSetAttribute", status)
        driver.cuLaunchKernelEx  # noqa: B018  # AttributeError
        self._function = function

    def __call__(self, blocks: int, *arguments: _Array | Tensor) -> None:
        """Launch the kernel on the current stream, with pointers to tensors, and arrays' values.

        Nothing is launched while kernels are collected (`Compilers.collecting`). Raises what `load`
        raises, if that was not called before.
        """
        if Compilers.is_collecting:
            return
        if self._function is None:
            self.load()
        values = [
            ctypes.c_void_p(value.data_ptr()) if isinstance(value, Tensor) else value
            for value in arguments
        ]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        config = _Config(
            (blocks, 1, 1),
            (self._threads, 1, 1),
            self._shared_bytes,
            torch.cuda.current_stream().cuda_stream,
            ctypes.pointer(self._dependent),
            1,
        )
        status = _driver().cuLaunchKernelEx(ctypes.byref(config), self._function, pointers, None)
        _check("cuLaunchKernelEx", status)
