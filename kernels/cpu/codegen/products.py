"""Functions that write instructions whose names differ by architecture.

The instructions are dot products of bytes and of pairs of bfloat16, look-ups of bytes in a table,
and the pause of a polling thread. A vector of a kernel is two NEON registers, so AArch64's
instructions are written once for each half.
"""

from collections.abc import Callable, Sequence

from kernels.cpu.codegen import processor
from kernels.cpu.codegen.ir import IRWriter, Value

_BITS = {"i8": 8, "bfloat": 16, "float": 32, "i32": 32}
_REGISTER = 128  # bits of a NEON register
_SUMS, _BYTES = "<4 x i32>", "<16 x i8>"  # a NEON register of sums, and of bytes


def pause() -> str:
    """Return the line of IR with which a polling thread yields to the core's other hyperthread."""
    name = "aarch64.hint(i32 1)" if processor.aarch64() else "x86.sse2.pause()"
    return f"call void @llvm.{name}"


def pause_declaration() -> str:
    name = "aarch64.hint(i32)" if processor.aarch64() else "x86.sse2.pause()"
    return f"declare void @llvm.{name}"


def dot_pairs(writer: IRWriter, total: Value, a: Value, b: Value) -> Value:
    """Return total plus, in each lane, the dot product of a's and b's bfloat16 pairs.

    a, b: <2 * lanes x bfloat>. Needs `processor.dot_bf16`.
    """
    pairs = f"<{2 * writer.lanes} x bfloat>"
    if not processor.aarch64():
        operands = [(writer.vector, total), (pairs, a), (pairs, b)]
        return writer.call(writer.vector, "llvm.x86.avx512bf16.dpbf16ps.512", operands)

    def dot(total: Value, a: Value, b: Value) -> Value:
        operands = [("<4 x float>", total), ("<8 x bfloat>", a), ("<8 x bfloat>", b)]
        return writer.call("<4 x float>", "llvm.aarch64.neon.bfdot.v4f32.v8bf16", operands)

    operands = [("float", total), ("bfloat", a), ("bfloat", b)]
    return _by_register(writer, writer.lanes // 4, "float", operands, dot)


def fma_pairs(writer: IRWriter, a: Value, b: Value, c: Value) -> Value:
    """Return `dot_pairs` of float32 vectors, each lane of which has the bits of a bfloat16 pair."""
    pairs = f"<{2 * writer.lanes} x bfloat>"
    a, b = (writer.op(f"bitcast {writer.vector} {value} to {pairs}") for value in (a, b))
    return dot_pairs(writer, c, a, b)


def dot_bytes(writer: IRWriter, total: Value, codes: Value, x: Value, wide: bool) -> Value:
    """Return total plus, in each lane, the dot product of four unsigned codes and four signed x.

    total, codes, x: <lanes x i32>.
    wide: whether codes have more than 7 bits.
    """
    if not processor.aarch64():
        return _dot_bytes_x86(writer, total, codes, x, wide)
    dot = {"i8mm": _dot_i8mm, "dotprod": _dot_signed, "": _dot_neon}[processor.byte_dot()]
    whole = f"<{4 * writer.lanes} x i8>"
    codes, x = (writer.op(f"bitcast {writer.integers} {value} to {whole}") for value in (codes, x))

    def register(total: Value, codes: Value, x: Value) -> Value:
        return dot(writer, total, codes, x, wide)

    operands = [("i32", total), ("i8", codes), ("i8", x)]
    return _by_register(writer, writer.lanes // 4, "i32", operands, register)


def look_up(writer: IRWriter, count: int, table: Value, indices: Value) -> Value:
    """Return the entries of a table of 16 bytes for indices below 16.

    table: <count x i8>, repeated copies of the 16 bytes. indices: <count x i8>.
    """
    kind = f"<{count} x i8>"
    if not processor.aarch64():
        name = {16: "ssse3.pshuf.b.128", 32: "avx2.pshuf.b", 64: "avx512.pshuf.b.512"}[count]
        return writer.call(kind, f"llvm.x86.{name}", [(kind, table), (kind, indices)])

    def register(table: Value, indices: Value) -> Value:
        operands = [(_BYTES, table), (_BYTES, indices)]
        return writer.call(_BYTES, "llvm.aarch64.neon.tbl1.v16i8", operands)

    return _by_register(writer, count // 16, "i8", [("i8", table), ("i8", indices)], register)


def _dot_bytes_x86(writer: IRWriter, total: Value, codes: Value, x: Value, wide: bool) -> Value:
    size, integers, whole = writer.lanes, writer.integers, f"<{4 * writer.lanes} x i8>"
    if processor.byte_dot():
        name = f"llvm.x86.avx512.vpdpbusd.{32 * size}"
        return writer.call(integers, name, [(integers, value) for value in (total, codes, x)])
    # Sums of two products saturate at 16 bits, so 8-bit codes are split into two 4-bit halves.
    pairs = f"<{2 * size} x i16>"
    multiply, join = {
        8: ("llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd"),
        16: ("llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512"),
    }[size]
    x = writer.op(f"bitcast {integers} {x} to {whole}")
    parts = [(codes, 1)]
    if wide:
        low = writer.op(f"and {integers} {codes}, {writer.whole(0x0F0F0F0F)}")
        high = writer.op(f"lshr {integers} {codes}, {writer.whole(4)}")
        high = writer.op(f"and {integers} {high}, {writer.whole(0x0F0F0F0F)}")
        parts = [(low, 1), (high, 16)]
    for part, factor in parts:
        part = writer.op(f"bitcast {integers} {part} to {whole}")
        two = writer.call(pairs, multiply, [(whole, part), (whole, x)])
        four = writer.call(integers, join, [(pairs, two), (pairs, f"splat (i16 {factor})")])
        total = writer.op(f"add {integers} {total}, {four}")
    return total


def _dot_i8mm(writer: IRWriter, total: Value, codes: Value, x: Value, wide: bool) -> Value:
    operands = [(_SUMS, total), (_BYTES, codes), (_BYTES, x)]
    return writer.call(_SUMS, "llvm.aarch64.neon.usdot.v4i32.v16i8", operands)


def _dot_signed(writer: IRWriter, total: Value, codes: Value, x: Value, wide: bool) -> Value:
    """Return `dot_bytes` of NEON registers, by an instruction that takes only signed operands."""

    def dot(total: Value, a: Value) -> Value:
        operands = [(_SUMS, total), (_BYTES, a), (_BYTES, x)]
        return writer.call(_SUMS, "llvm.aarch64.neon.sdot.v4i32.v16i8", operands)

    if not wide:
        return dot(total, codes)
    # Codes minus 128 are signed. Subtract the products of x and -128 from the sum.
    total = dot(total, writer.op(f"xor {_BYTES} {codes}, splat (i8 -128)"))
    return writer.op(f"sub {_SUMS} {total}, {dot('zeroinitializer', 'splat (i8 -128)')}")


def _dot_neon(writer: IRWriter, total: Value, codes: Value, x: Value, wide: bool) -> Value:
    """Return `dot_bytes` of NEON registers, for a processor without dot-product instructions."""
    widened = [
        writer.op(f"{extend} {_BYTES} {value} to <16 x i16>")
        for extend, value in (("zext", codes), ("sext", x))
    ]
    # A product is at least -255 * 128, which fits into 16 bits.
    products = writer.op(f"mul <16 x i16> {widened[0]}, {widened[1]}")
    sums = []
    for begin in (0, 8):
        half = _part(writer, "i16", 16, products, begin, 8)
        name = "llvm.aarch64.neon.saddlp.v4i32.v8i16"
        sums.append(writer.call(_SUMS, name, [("<8 x i16>", half)]))
    operands = [(_SUMS, value) for value in sums]
    four = writer.call(_SUMS, "llvm.aarch64.neon.addp.v4i32", operands)
    return writer.op(f"add {_SUMS} {total}, {four}")


def _part(writer: IRWriter, kind: str, size: int, value: Value, begin: int, count: int) -> Value:
    """Return `count` elements of a vector of `size`, from `begin` on."""
    chosen = ", ".join(f"i32 {index}" for index in range(begin, begin + count))
    vector = f"<{size} x {kind}>"
    return writer.op(f"shufflevector {vector} {value}, {vector} poison, <{count} x i32> <{chosen}>")


def _by_register(
    writer: IRWriter,
    registers: int,
    result: str,
    operands: Sequence[tuple[str, Value]],
    instruction: Callable[..., Value],
) -> Value:
    """Apply an instruction to each NEON register of the operands; return the joined results.

    result: type of an element of the result. operands: (type of an element, vector).
    """
    parts = []
    for number in range(registers):
        operands_of_register = []
        for kind, value in operands:
            count = _REGISTER // _BITS[kind]
            operands_of_register.append(
                _part(writer, kind, registers * count, value, number * count, count)
            )
        parts.append(instruction(*operands_of_register))
    count = _REGISTER // _BITS[result]
    while len(parts) > 1:
        kind, indices = f"<{count} x {result}>", ", ".join(f"i32 {i}" for i in range(2 * count))
        parts = [
            writer.op(f"shufflevector {kind} {a}, {kind} {b}, <{2 * count} x i32> <{indices}>")
            for a, b in zip(parts[::2], parts[1::2], strict=True)
        ]
        count *= 2
    return parts[0]
