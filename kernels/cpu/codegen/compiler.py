"""compile_ir: compile LLVM IR text to functions of this process, without a compiler on the machine.

Triton's library contains LLVM with the code generator of the machine's architecture, which returns
object code. `object_file` loads the object code into the process. `CompilerUnavailable` is raised
if Triton is missing or older than 3.7 (which hides LLVM's symbols), if libgomp is missing, if the
machine is neither AArch64 Linux nor x86-64 Linux with AVX2, or if executable memory is forbidden.
Callers then use plain torch.
"""

import contextlib
import ctypes
import platform
import re
import struct
import threading
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from kernels.cpu.codegen.object_file import load_object
from kernels.cpu.codegen.processor import CompilerUnavailable, byte_dot, lanes, target
from kernels.launch.object_cache import cached

_INITIALISERS = ("TargetInfo", "Target", "TargetMC", "AsmPrinter")  # LLVM's C names

# Threads that pack weights compile concurrently, but LLVM's registry of targets and its options are
# global: a thread would crash if another thread is still registering the target.
_compiling = threading.Lock()


def has_int8() -> bool:
    """Whether `gemm.PackedInt8` runs on this machine.

    The machine must have AVX512-VNNI, or AArch64's dot products.
    """
    try:
        check()
        return byte_dot() in ("avx512vnni", "i8mm", "dotprod")
    except CompilerUnavailable:
        return False


class _Recording(threading.local):
    calls: list[tuple[int, list[int]]] | None = None
    memories: list[object] | None = None


_recording = _Recording()


@contextlib.contextmanager
def recording(calls: list[tuple[int, list[int]]], memories: list[object]) -> Iterator[None]:
    """Record this thread's calls of native functions within the context.

    calls: receives each call's address and arguments, in order.
    memories: receives the memory that the calls use (`keep`).
    """
    _recording.calls, _recording.memories = calls, memories
    try:
        yield
    finally:
        _recording.calls = _recording.memories = None


def keep(memory: object) -> None:
    """Keep an object's memory alive by adding it to this thread's recording, if there is one."""
    if _recording.memories is not None:
        _recording.memories.append(memory)


def bits(number: float) -> int:
    """Return the bits of a float32 as an integer, to be passed to a native function."""
    return int(struct.unpack("<i", struct.pack("<f", number))[0])


class NativeFunction:
    """A generated function, void f(i64 *args), which all threads run at once.

    Threads divide the work by the counters args[0] and args[1], which are set to 0 at each call.
    The caller sets the other words of args: numbers and addresses.
    """

    def __init__(self, address: int) -> None:
        self.address = ctypes.c_void_p(address)
        self._alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)

    def __call__(self, args: "ctypes.Array[ctypes.c_int64]", threads: int) -> None:
        if _recording.calls is not None:
            _recording.calls.append((self.address.value or 0, list(args)))
        args[0] = args[1] = 0
        if threads == 1:
            self._alone(args)
        else:
            _parallel()(self.address, args, threads, 0)


@lru_cache(maxsize=1)
def openmp() -> ctypes.CDLL:
    """Return the OpenMP library that torch has loaded. Raises CompilerUnavailable."""
    with open("/proc/self/maps") as file:
        paths = sorted(set(re.findall(r"/\S*libgomp\S*", file.read())))
    for path in paths:
        return ctypes.CDLL(path)
    raise CompilerUnavailable("torch does not use libgomp here")


@lru_cache(maxsize=1)
def _parallel() -> "ctypes._NamedFuncPointer":
    """Return libgomp's GOMP_parallel(f, data, threads, flags), which uses torch's threads."""
    parallel = openmp().GOMP_parallel
    parallel.restype = None
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    return parallel


@lru_cache(maxsize=1)
def _triton() -> str:
    """Return the version of Triton, whose LLVM compiles. Raises CompilerUnavailable."""
    try:
        return version("triton")
    except PackageNotFoundError as error:
        raise CompilerUnavailable("Triton is not installed") from error


@lru_cache(maxsize=1)
def _initialise() -> None:
    """Register this processor's code generator in Triton's LLVM. Raises CompilerUnavailable.

    Triton itself is not imported: that takes longer than loading a model's compiled kernels."""
    try:
        package = find_spec("triton")
        if package is None or package.origin is None:
            raise OSError("Triton is not installed")
        path = Path(package.origin).parent
        library = ctypes.CDLL(str(next(path.glob("_C/libtriton*.so"), "libtriton.so")))
        for name in _INITIALISERS:
            getattr(library, f"LLVMInitialize{target().name}{name}")()
    except (OSError, AttributeError) as error:
        raise CompilerUnavailable(
            f"Triton's library has no code generator for {platform.machine()}: {error}"
        ) from error


def check() -> None:
    """Check that this machine can compile kernels. Raises CompilerUnavailable."""
    lanes(), openmp(), _initialise()


def _object_code(ir: str) -> bytes:
    """Return the object code of an LLVM IR module, compiled now or cached by an earlier process.

    Raises CompilerUnavailable.
    """
    machine = target()
    arguments = [ir, machine.triple, machine.processor, machine.features, [], True, True]

    def compile_code() -> bytes:
        _initialise()
        try:
            from triton._C.libtriton import llvm
        except ImportError as error:
            raise CompilerUnavailable(f"Triton cannot be imported: {error}") from error
        translate = llvm.translate_to_asm
        try:
            return bytes(translate(*arguments, False))  # Triton 3.9 has one more parameter
        except TypeError:
            return bytes(translate(*arguments))

    return cached("manta-cpu", "\0".join((_triton(), *map(str, arguments))), compile_code)


def compile_ir(ir: str) -> dict[str, NativeFunction]:
    """Compile an LLVM IR module; return {name: function} of its external functions.

    Raises CompilerUnavailable.
    """
    with _compiling:
        return _compiled(ir)


def compile_or_none(write: Callable[[int], str]) -> dict[str, NativeFunction] | None:
    """Compile the IR that `write` returns for this machine's vector width (float32 lanes).

    Returns None without a compiler; callers then use plain torch.
    """
    try:
        return compile_ir(write(lanes()))
    except CompilerUnavailable:
        return None


@lru_cache(maxsize=64)
def _compiled(ir: str) -> dict[str, NativeFunction]:
    _parallel()
    return {
        name: NativeFunction(address) for name, address in load_object(_object_code(ir)).items()
    }
