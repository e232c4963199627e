"""Object code that an earlier process compiled."""

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.launch.object_cache import cached


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    return tmp_path / "triton" / "manta-cpu"


def never() -> bytes:
    raise AssertionError("it was compiled before")


def test_code_is_compiled_once(folder: Path) -> None:
    """A start that compiles what the last one compiled; code of other inputs that is returned."""
    assert cached("manta-cpu", "a", lambda: b"code of a") == b"code of a"
    assert cached("manta-cpu", "b", lambda: b"code of b") == b"code of b"
    assert cached("manta-cpu", "a", never) == b"code of a"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


@pytest.mark.parametrize("content", [b"", b"short", b"\0" * 100])
def test_a_damaged_file_is_compiled_again(folder: Path, content: bytes) -> None:
    """A process that runs half of a kernel, after a full disk or a crash."""
    cached("manta-cpu", "a", lambda: b"code")
    (path,) = folder.iterdir()
    path.write_bytes(content)
    assert cached("manta-cpu", "a", lambda: b"code") == b"code"
    assert cached("manta-cpu", "a", never) == b"code"


def test_a_cache_that_cannot_be_written_costs_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU replica that fails to start in a container with a read-only home."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    assert cached("manta-cpu", "a", lambda: b"code") == b"code"
    assert cached("manta-cpu", "a", lambda: b"code") == b"code"


def test_recording_a_program_does_not_import_dynamo() -> None:
    """A second and a half of each CPU start, for a compiler that is not used."""
    program = """
import sys, torch
from kernels.cpu.codegen.program import Buffers, _Memory
with _Memory(Buffers(4), 2):
    torch.empty(2, 8)
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_start_with_cached_kernels_does_not_import_triton(folder: Path) -> None:
    """Four tenths of a second of each CPU start, for a compiler that is not used."""
    program = """
import sys
from kernels.cpu.codegen.compiler import CompilerUnavailable, check, compile_ir
ir = "define void @f(ptr %args) { ret void }"
try:
    check(), compile_ir(ir)
except CompilerUnavailable:
    print("no compiler")
else:
    print("triton" in sys.modules)
"""
    command = [sys.executable, "-c", program]
    outputs = [subprocess.check_output(command, text=True).strip() for _ in range(2)]
    assert outputs[1] in ("False", "no compiler"), outputs
