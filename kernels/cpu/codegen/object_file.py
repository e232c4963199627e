"""load_object: link a relocatable ELF object into executable memory of this process."""

import ctypes
import mmap
import struct

from kernels.cpu.codegen.processor import CompilerUnavailable, aarch64

_SHF_ALLOC = 2
_SHT_RELA, _SHT_NOBITS, _SHT_SYMTAB = 4, 8, 2

# Relocations of x86-64.
_R_64, _R_PC32, _R_PLT32 = 1, 2, 4

# Relocations of AArch64: data, calls, and the two parts of an address. These are its page, and a
# 12-bit offset in the page, which loads of n bytes encode divided by n.
_ABS64, _PREL64, _PREL32 = 257, 260, 261
_JUMP26, _CALL26 = 282, 283
_PAGE21 = 275
_LOW12 = {277: 0, 278: 0, 284: 1, 285: 2, 286: 3, 299: 4}  # relocation: dropped low bits

_code: list[mmap.mmap] = []  # never freed: functions are used until the process ends


def load_object(elf: bytes) -> dict[str, int]:
    """Load a relocatable ELF object and return the addresses of its global functions.

    Raises CompilerUnavailable where memory cannot be made executable.
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
    relocate = _relocate_aarch64 if aarch64() else _relocate_x86
    for _, kind, _, _, offset, size, _, target, _, _ in sections:
        if kind != _SHT_RELA or target not in places:
            continue
        for i in range(size // 24):
            where, info, addend = struct.unpack_from("<QQq", elf, offset + 24 * i)
            symbol, address = symbols[info >> 32][0], symbols[info >> 32][2]
            assert address is not None, f"kernels call nothing outside: {symbol}"
            place = places[target] + where
            relocate(memory, place, info & 0xFFFFFFFF, address + addend, base + place)
    if aarch64():
        _show_to_instruction_fetch(base, at)
    return {
        name: address for name, info, address in symbols if info == 0x12 and address is not None
    }


def _relocate_x86(memory: mmap.mmap, place: int, kind: int, value: int, here: int) -> None:
    """Write a relocation's value into code for x86-64.

    place: offset in memory. kind: ELF relocation type. here: address of that place.
    """
    if kind == _R_64:
        struct.pack_into("<Q", memory, place, value)
    else:
        assert kind in (_R_PC32, _R_PLT32), f"relocation {kind}"
        struct.pack_into("<i", memory, place, value - here)


def _relocate_aarch64(memory: mmap.mmap, place: int, kind: int, value: int, here: int) -> None:
    """Write a relocation's value into code for AArch64, mostly into bits of an instruction.

    Parameters are those of `_relocate_x86`.
    """
    if kind == _ABS64:
        struct.pack_into("<Q", memory, place, value)
        return
    if kind == _PREL64:
        struct.pack_into("<q", memory, place, value - here)
        return
    if kind == _PREL32:
        struct.pack_into("<i", memory, place, value - here)
        return
    (instruction,) = struct.unpack_from("<I", memory, place)
    if kind in (_JUMP26, _CALL26):
        instruction |= (value - here) >> 2 & 0x3FFFFFF
    elif kind == _PAGE21:
        pages = (value >> 12) - (here >> 12)
        instruction |= (pages & 3) << 29 | (pages >> 2 & 0x7FFFF) << 5
    else:
        assert kind in _LOW12, f"relocation {kind}"
        instruction |= (value & 0xFFF) >> _LOW12[kind] << 10
    struct.pack_into("<I", memory, place, instruction)


def _show_to_instruction_fetch(begin: int, size: int) -> None:
    """Make written code visible to the instruction cache, which AArch64 does not keep coherent."""
    try:
        clear = getattr(ctypes.CDLL("libgcc_s.so.1"), "__clear_cache")
    except (OSError, AttributeError) as error:
        raise CompilerUnavailable(f"libgcc_s is needed on AArch64: {error}") from error
    clear.restype, clear.argtypes = None, (ctypes.c_void_p, ctypes.c_void_p)
    clear(begin, begin + size)
