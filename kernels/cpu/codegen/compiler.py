"""compile_ir: compile LLVM IR text to functions of this process, without a compiler on the machine.

Triton's library contains LLVM with its x86 code generator, which returns object code. This module
links it: it lays out the sections, applies the relocations and makes the memory executable.
`CompilerUnavailable` says that this machine cannot: Triton is missing or older than 3.7, which
hides LLVM's symbols; libgomp is missing; it is not x86-64 Linux with AVX2; or executable memory is
forbidden. Callers then use plain torch.
"""

import contextlib
import ctypes
import mmap
import platform
import re
import struct
import threading
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version

import torch

from kernels.cpu.codegen.object_cache import cached

_INITIALISERS = ("TargetInfo", "Target", "TargetMC", "AsmPrinter")  # LLVM's C names
_TRIPLE = "x86_64-unknown-linux-gnu"
# Maps torch's name of an instruction set to (LLVM's processor, float32 lanes). By default LLVM
# prefers 256-bit registers on x86-64-v4; _FEATURES turns this off.
_PROCESSORS = {"AVX512": ("x86-64-v4", 16), "AVX2": ("x86-64-v3", 8)}
_FEATURES = {"AVX512": "-prefer-256-bit", "AVX2": ""}

_SHF_ALLOC = 2
_SHT_RELA, _SHT_NOBITS, _SHT_SYMTAB = 4, 8, 2
_R_64, _R_PC32, _R_PLT32 = 1, 2, 4

# Arguments of arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA). One call allows AMX for all
# threads of the process.
_ASK_FOR_TILES = (158, 0x1023, 18)

_code: list[mmap.mmap] = []  # never freed: functions are used until the process ends

# Threads that pack weights compile concurrently, but LLVM's registry of targets and its options are
# global. A second thread would crash while the first one still registers its target.
_compiling = threading.Lock()


class CompilerUnavailable(Exception):
    """Raised where this machine cannot compile kernels; the message says why."""


@lru_cache(maxsize=1)
def vnni() -> str:
    """Return LLVM's name of the processor's 8-bit dot-product instructions.

    Either avx512vnni, avxvnni, or "" where it has none. Raises CompilerUnavailable.
    """
    flag, name = ("avx512_vnni", "avx512vnni") if lanes() == 16 else ("avx_vnni", "avxvnni")
    return name if _has(flag) else ""


@lru_cache(maxsize=1)
def dot_bf16() -> bool:
    """Whether the processor multiplies pairs of bfloat16 (AVX512-BF16). Raises
    CompilerUnavailable."""
    return lanes() == 16 and _has("avx512_bf16")


@lru_cache(maxsize=1)
def amx_bf16() -> bool:
    """Whether the processor multiplies bfloat16 tiles (AMX) and Linux allows this process to.
    Raises CompilerUnavailable.
    """
    return dot_bf16() and _has("amx_bf16") and _tiles()


@lru_cache(maxsize=1)
def amx_int8() -> bool:
    """Whether the processor multiplies 8-bit tiles (AMX) and Linux allows this process to.

    AVX512-VNNI is needed, too. Raises CompilerUnavailable.
    """
    return vnni() == "avx512vnni" and _has("amx_int8") and _tiles()


@lru_cache(maxsize=1)
def _tiles() -> bool:
    if not _has("amx_tile"):
        return False
    call = ctypes.CDLL(None).syscall
    call.restype, call.argtypes = ctypes.c_long, (ctypes.c_long,) * 3
    return bool(call(*_ASK_FOR_TILES) == 0)


def _has(flag: str) -> bool:
    with open("/proc/cpuinfo") as file:
        return bool(re.search(rf"^flags\b.* {flag}\b", file.read(), re.MULTILINE))


def has_int8() -> bool:
    """Whether `gemm.PackedInt8` runs on this machine: it needs AVX512-VNNI."""
    try:
        check()
        return vnni() == "avx512vnni"
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
    """Keep this memory alive with the recording of this thread's calls, if there is one."""
    if _recording.memories is not None:
        _recording.memories.append(memory)


def bits(number: float) -> int:
    """Return the bits of a float32 as an integer word of a native function's arguments."""
    return int(struct.unpack("<i", struct.pack("<f", number))[0])


class NativeFunction:
    """A generated function, void f(i64 *args), which all threads run at once.

    Threads share the work through the counters args[0] and args[1], which a call sets to 0. The
    caller sets the other words, among them addresses.
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
def lanes() -> int:
    """Return how many float32 lanes a vector register has. Raises CompilerUnavailable."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise CompilerUnavailable("kernels are generated for x86-64 Linux only")
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in _PROCESSORS:
        raise CompilerUnavailable(f"the processor offers {capability}, AVX2 is needed")
    return _PROCESSORS[capability][1]


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
    """Return GOMP_parallel(f, data, threads, flags), which uses the threads of torch's OpenMP."""
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
def _llvm() -> object:
    try:
        from triton._C import libtriton

        library = ctypes.CDLL(libtriton.__file__)
        for name in _INITIALISERS:
            getattr(library, f"LLVMInitializeX86{name}")()
        return libtriton.llvm
    except (ImportError, OSError, AttributeError) as error:
        raise CompilerUnavailable(
            f"Triton's library has no code generator for x86: {error}"
        ) from error


def check() -> None:
    """Check that this machine can compile kernels. Raises CompilerUnavailable."""
    lanes(), openmp(), _llvm()


def _object_code(ir: str) -> bytes:
    """Compile a module, or load what an earlier process compiled. Raises CompilerUnavailable."""
    lanes()
    capability = torch.backends.cpu.get_cpu_capability()
    optional = (
        vnni() and f"+{vnni()}",
        dot_bf16() and "+avx512bf16",
        amx_bf16() and "+amx-tile,+amx-bf16,+prfchw",
        amx_int8() and "+amx-tile,+amx-int8",
    )
    features = ",".join(filter(None, (_FEATURES[capability], *optional)))
    arguments = [ir, _TRIPLE, _PROCESSORS[capability][0], features, [], True, True]

    def compile_code() -> bytes:
        translate = _llvm().translate_to_asm  # type: ignore[attr-defined]
        try:
            return bytes(translate(*arguments, False))  # Triton 3.9: one more flag
        except TypeError:
            return bytes(translate(*arguments))

    return cached("\0".join((_triton(), *map(str, arguments))), compile_code)


def compile_ir(ir: str) -> dict[str, NativeFunction]:
    """Compile a module and return its external functions by name. Raises CompilerUnavailable."""
    with _compiling:
        return _compiled(ir)


def compile_or_none(write: Callable[[int], str]) -> dict[str, NativeFunction] | None:
    """Compile the IR that `write` returns for a vector width; None without a compiler.

    Callers then use plain torch.
    """
    try:
        return compile_ir(write(lanes()))
    except CompilerUnavailable:
        return None


@lru_cache(maxsize=64)
def _compiled(ir: str) -> dict[str, NativeFunction]:
    _parallel()
    return {name: NativeFunction(address) for name, address in _load(_object_code(ir)).items()}


def _load(elf: bytes) -> dict[str, int]:
    """Load a relocatable ELF object into executable memory, and return the addresses of its global
    functions.
    """
    table, count = struct.unpack_from("<Q", elf, 40)[0], struct.unpack_from("<H", elf, 60)[0]
    # (name, type, flags, address, offset, size, link, info, alignment, entry size)
    sections = [struct.unpack_from("<IIQQQQIIQQ", elf, table + 64 * i) for i in range(count)]
    at, places = 0, {}
    for index, (_, kind, flags, _, _, size, _, _, align, _) in enumerate(sections):
        if flags & _SHF_ALLOC:
            assert kind != _SHT_NOBITS, "no kernel has variables"
            at = -(-at // max(align, 1)) * max(align, 1)
            places[index] = at
            at += size
    try:
        memory = mmap.mmap(-1, at, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError as error:
        raise CompilerUnavailable(f"no executable memory: {error}") from error
    _code.append(memory)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for index, place in places.items():
        offset, size = sections[index][4:6]
        memory[place : place + size] = elf[offset : offset + size]

    symtab = next(section for section in sections if section[1] == _SHT_SYMTAB)
    strings = sections[symtab[6]][4]
    symbols = []
    for i in range(symtab[5] // 24):
        name, info, _, section, value, _ = struct.unpack_from("<IBBHQQ", elf, symtab[4] + 24 * i)
        address = base + places[section] + value if section in places else None
        end = elf.index(b"\0", strings + name)
        symbols.append((elf[strings + name : end].decode(), info, address))
    for _, kind, _, _, offset, size, _, target, _, _ in sections:
        if kind != _SHT_RELA or target not in places:
            continue
        for i in range(size // 24):
            where, info, addend = struct.unpack_from("<QQq", elf, offset + 24 * i)
            symbol, address = symbols[info >> 32][0], symbols[info >> 32][2]
            assert address is not None, f"kernels call nothing outside: {symbol}"
            place = places[target] + where
            if info & 0xFFFFFFFF == _R_64:
                struct.pack_into("<Q", memory, place, address + addend)
            else:
                assert info & 0xFFFFFFFF in (_R_PC32, _R_PLT32), f"relocation {info & 0xFFFFFFFF}"
                struct.pack_into("<i", memory, place, address + addend - (base + place))
    return {
        name: address for name, info, address in symbols if info == 0x12 and address is not None
    }
