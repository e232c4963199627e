"""The AArch64 back end: its code without another architecture's instructions, its linking, and on
emulated processors its numbers against the references.
"""

import mmap
import os
import struct

import pytest

from kernels.cpu import argmax, meeting
from kernels.cpu.codegen import object_file, processor
from kernels.cpu.codegen.ir import IRWriter, module
from kernels.cpu.codegen.products import dot_bytes, dot_pairs, look_up, pause, pause_declaration
from tests.kernels.cpu import emulated

LANES = 8


@pytest.fixture
def on_aarch64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "aarch64", lambda: True)


def body(dot: str, wide: bool) -> str:
    writer = IRWriter(LANES)
    words = writer.load(writer.argument(2, "ptr"), writer.integers)
    total = dot_bytes(writer, words, words, words, wide)
    whole = f"<{4 * LANES} x i8>"
    raw = writer.op(f"bitcast {writer.integers} {total} to {whole}")
    looked = look_up(writer, 4 * LANES, raw, raw)
    writer.store(looked, writer.argument(3, "ptr"), whole)
    pairs = writer.load(writer.argument(2, "ptr"), f"<{2 * LANES} x bfloat>")
    writer.store(dot_pairs(writer, writer.all(0.0), pairs, pairs), writer.argument(3, "ptr"))
    return module([(writer, "void @body(ptr %args)")])


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dot", ["i8mm", "dotprod", ""])
def test_own_instructions(
    dot: str, wide: bool, on_aarch64: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: x86's instructions, which LLVM's AArch64 ends the process for."""
    monkeypatch.setattr(processor, "byte_dot", lambda: dot)
    text = body(dot, wide) + pause() + pause_declaration() + module([argmax._argmax(LANES)])
    assert "llvm.x86" not in text and "@llvm.aarch64.neon.tbl1" in text
    instruction = {"i8mm": "usdot", "dotprod": "sdot", "": "saddlp"}[dot]
    # Two registers a vector; signed dot products take x times -128 off again.
    calls = {"i8mm": 2, "dotprod": 4 if wide else 2, "": 4}[dot]
    assert text.count(f"call <4 x i32> @llvm.aarch64.neon.{instruction}") == calls


def test_pause_of_an_all_reduce() -> None:
    """Bug: text that names the pause, as it stands in no format string."""
    assert pause() in meeting._function("sum", False, LANES)


# Each instruction as an assembler writes it with a zero address, and with its relocation's value.
BASE = 0x7F0000001000


@pytest.mark.parametrize(
    ("kind", "value", "before", "after"),
    [
        (275, BASE + 0x3000 + 0x123, 0x90000000, 0xF0000000),  # adrp x0, three pages on
        (275, BASE - 0x1000, 0x90000001, 0xF0FFFFE1),  # adrp x1, a page back
        (277, BASE + 0x123, 0x91000000, 0x91048C00),  # add x0, x0, 0x123
        (286, BASE + 0x120, 0xFD400000, 0xFD409000),  # ldr d0, [x0, 0x120]
        (299, BASE + 0x120, 0x3DC00000, 0x3DC04800),  # ldr q0, [x0, 0x120]
        (283, BASE + 0x40, 0x94000000, 0x94000010),  # bl 0x40 on
        (282, BASE - 0x40, 0x14000000, 0x17FFFFF0),  # b 0x40 back
    ],
)
def test_relocations(kind: int, value: int, before: int, after: int) -> None:
    """Bugs: an address of data that is pages off, a call backwards, bits of a load's size kept."""
    memory = mmap.mmap(-1, 16)
    struct.pack_into("<I", memory, 8, before)
    object_file._relocate_aarch64(memory, 8, kind, value, BASE)
    assert f"{struct.unpack_from('<I', memory, 8)[0]:08x}" == f"{after:08x}"


def test_unknown_relocation() -> None:
    """Bug: an unknown relocation is skipped, and the code jumps anywhere."""
    with pytest.raises(AssertionError, match="relocation 279"):
        object_file._relocate_aarch64(mmap.mmap(-1, 16), 0, 279, BASE, BASE)


def test_neither_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: another processor that is sent to x86's code generator, and not to torch."""
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    processor.lanes.cache_clear()
    try:
        with pytest.raises(processor.CompilerUnavailable, match=r"AArch64 Linux only.*riscv64"):
            processor.lanes()
    finally:
        processor.lanes.cache_clear()


PYTEST = (
    "-m", "pytest", "-q", "-x", "-c", "/dev/null", "--rootdir", str(emulated.ROOT),
    "--noconftest", "-p", "no:cacheprovider", "-m", "not slow and not nightly",
)  # fmt: skip
PROCESSORS = {
    # an emulated processor: its byte dot product, whether it multiplies pairs of bfloat16, tests
    "neoverse-n1": ("dotprod", False, ["tests/kernels/cpu/test_blocks.py"]),
    "max": ("i8mm", True, ["tests/kernels/cpu"]),
}


@pytest.mark.nightly
@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", PROCESSORS)
def test_emulated(name: str) -> None:
    """The tests of generated kernels on an emulated processor.

    Bug: numbers that only an x86 processor computes right. Those of blocks run once more without
    dot products, which no emulated processor lacks that torch's wheel runs on.

    Skipped without qemu-user, or where Debian's and PyPI's packages cannot be fetched.
    """
    try:
        emulated.prepare()
    except emulated.Unavailable as error:
        pytest.skip(str(error))
    dot, pairs, tests = PROCESSORS[name]
    probe = "from kernels.cpu.codegen.processor import *; print([byte_dot(), dot_bf16(), lanes()])"
    assert emulated.run(["-c", probe], name).stdout.strip() == str([dot, pairs, LANES])
    if name == "max":
        os.environ["MANTA_TEST_VNNI"] = "none"
        try:
            plain = emulated.run([*PYTEST, "tests/kernels/cpu/test_blocks.py"], name)
        finally:
            del os.environ["MANTA_TEST_VNNI"]
        assert plain.returncode == 0, plain.stdout[-3000:] + plain.stderr[-1000:]
    done = emulated.run([*PYTEST, *tests], name)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert int(done.stdout.rpartition(" passed")[0].split()[-1]) > 20, done.stdout[-300:]
