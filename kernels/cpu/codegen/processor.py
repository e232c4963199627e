"""The processor that kernels are generated for: its vector width, its dot-product and tile
instructions for 8- and 16-bit types, and LLVM's names of them.

x86-64 and AArch64 are supported. If kernels cannot be generated for a processor, the message of
`CompilerUnavailable` says why.
"""

import ctypes
import platform
import re
from dataclasses import dataclass
from functools import lru_cache

import torch

# Maps torch's name of an x86 instruction set to (LLVM's processor, float32 lanes, features). By
# default LLVM prefers 256-bit registers on x86-64-v4; a feature turns this off.
_X86 = {
    "AVX512": ("x86-64-v4", 16, ("-prefer-256-bit",)),
    "AVX2": ("x86-64-v3", 8, ()),
}
# A NEON register has four lanes. A vector of a kernel is two NEON registers, so the 32 registers
# hold 16 vectors, as many as AVX2 has.
_NEON_LANES = 8

# Arguments of syscall: 158 is arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA). One call allows
# AMX for all threads of the process.
_ASK_FOR_TILES = (158, 0x1023, 18)

# LLVM's name of an extension of AArch64 -> (entry of Linux's auxiliary vector, bit).
_AT_HWCAP, _AT_HWCAP2 = 16, 26
_HWCAPS = {
    "lse": (_AT_HWCAP, 8),
    "dotprod": (_AT_HWCAP, 20),
    "i8mm": (_AT_HWCAP2, 13),
    "bf16": (_AT_HWCAP2, 14),
}


class CompilerUnavailable(Exception):
    """Raised where this machine cannot compile kernels; the message says why."""


@dataclass(frozen=True)
class Target:
    """The machine that LLVM compiles for.

    name: LLVM's name of its code generator.
    """

    name: str
    triple: str
    processor: str
    features: str


def aarch64() -> bool:
    return platform.machine() in ("aarch64", "arm64")


@lru_cache(maxsize=1)
def lanes() -> int:
    """Return the number of float32 lanes of a kernel's vectors. Raises CompilerUnavailable."""
    if platform.system() == "Linux" and aarch64():
        return _NEON_LANES
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise CompilerUnavailable(
            "kernels are generated for x86-64 and AArch64 Linux only; this is "
            f"{platform.system()} on {platform.machine()}"
        )
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in _X86:
        raise CompilerUnavailable(f"the processor offers {capability}, AVX2 is needed")
    return _X86[capability][1]


@lru_cache(maxsize=1)
def byte_dot() -> str:
    """Return LLVM's name of the processor's 8-bit dot-product instructions.

    x86-64 has avx512vnni or avxvnni, AArch64 i8mm or dotprod; "" stands for none. Raises
    CompilerUnavailable.
    """
    size = lanes()
    if aarch64():
        return next((name for name in ("i8mm", "dotprod") if _has_extension(name)), "")
    flag, name = ("avx512_vnni", "avx512vnni") if size == 16 else ("avx_vnni", "avxvnni")
    return name if _has(flag) else ""


@lru_cache(maxsize=1)
def dot_bf16() -> bool:
    """Whether the processor multiplies pairs of bfloat16 (AVX512-BF16, or AArch64's BF16).

    Raises CompilerUnavailable.
    """
    if aarch64():
        return _has_extension("bf16")
    return lanes() == 16 and _has("avx512_bf16")


@lru_cache(maxsize=1)
def amx_bf16() -> bool:
    """Whether the processor multiplies bfloat16 tiles (AMX), and Linux lets this process use AMX.

    Raises CompilerUnavailable.
    """
    return not aarch64() and dot_bf16() and _has("amx_bf16") and _tiles()


@lru_cache(maxsize=1)
def amx_int8() -> bool:
    """Whether the processor multiplies 8-bit tiles (AMX), and Linux lets this process use AMX.

    The processor must also have AVX512-VNNI. Raises CompilerUnavailable.
    """
    return byte_dot() == "avx512vnni" and _has("amx_int8") and _tiles()


def target() -> Target:
    """Return LLVM's target for this machine: processor and features. Raises CompilerUnavailable."""
    lanes()
    if aarch64():
        extensions = (f"+{name}" for name in _HWCAPS if _has_extension(name))
        return Target(
            "AArch64", "aarch64-unknown-linux-gnu", "generic", ",".join(("+neon", *extensions))
        )
    processor, _, features = _X86[torch.backends.cpu.get_cpu_capability()]
    optional = (
        byte_dot() and f"+{byte_dot()}",
        dot_bf16() and "+avx512bf16",
        amx_bf16() and "+amx-tile,+amx-bf16,+prfchw",
        amx_int8() and "+amx-tile,+amx-int8",
    )
    return Target(
        "X86",
        "x86_64-unknown-linux-gnu",
        processor,
        ",".join(filter(None, (*features, *optional))),
    )


@lru_cache(maxsize=1)
def _tiles() -> bool:
    if not _has("amx_tile"):
        return False
    call = ctypes.CDLL(None).syscall
    call.restype, call.argtypes = ctypes.c_long, (ctypes.c_long,) * 3
    return bool(call(*_ASK_FOR_TILES) == 0)


def _has(flag: str) -> bool:
    """Whether /proc/cpuinfo lists a flag of an x86 processor."""
    with open("/proc/cpuinfo") as file:
        return bool(re.search(rf"^flags\b.* {flag}\b", file.read(), re.MULTILINE))


def _has_extension(name: str) -> bool:
    """Whether Linux reports an extension of an AArch64 processor. name: LLVM's name of it."""
    entry, bit = _HWCAPS[name]
    getauxval = ctypes.CDLL(None).getauxval
    getauxval.restype, getauxval.argtypes = ctypes.c_ulong, (ctypes.c_ulong,)
    return bool(getauxval(entry) >> bit & 1)
