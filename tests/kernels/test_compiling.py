"""Kernels compiled ahead by other processes; for Hopper, so that no GPU is needed."""

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("needs Triton's compiler", allow_module_level=True)

from triton.runtime import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

import kernels.cuda  # noqa: E402, F401  (the assembler that it chooses is a part of Triton's keys)
from kernels import norm  # noqa: E402
from kernels.gemm import deterministic  # noqa: E402
from kernels.gemm.packed import gemv4 as gemv4_module  # noqa: E402
from kernels.launch import compiling  # noqa: E402
from kernels.launch.compiling import Compilers  # noqa: E402
from kernels.norm import rms_norm  # noqa: E402
from kernels.packed import Format, PackedWeight  # noqa: E402
from tests.engine.process.test_process import running, wait_until  # noqa: E402
from tests.kernels.hopper import Hopper  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture
def compiled_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yield the names of the kernels that this process compiles, from an empty cache; nothing
    runs."""
    compiled: list[str] = []

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            compiled.append(src.name)

    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(kernel, *args, grid=grid, warmup=True, **options)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", Hopper())
    monkeypatch.setattr(JITFunction, "run", compile_only)
    for kernel in (norm._rms_norm_kernel, gemv4_module._gemv4_kernel):
        monkeypatch.setattr(kernel, "device_caches", _fresh(kernel))
    monkeypatch.setattr(triton.knobs.compilation, "listener", listen)
    yield compiled


def _fresh(kernel: Any) -> Any:
    """Return a kernel's caches as in a process that has launched nothing."""
    return type(kernel.device_caches)(kernel.create_binder)


def launch(*widths: int) -> None:
    for width in widths:
        rms_norm(bf16(3, width), bf16(width), 1e-5)


def bf16(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def test_what_was_collected_is_there_when_it_is_launched(compiled_here: list[str]) -> None:
    """Bug: the processes compile for another key than a launch looks for, so that it is done
    twice; or all the same kernels are handed over again by each layer."""
    compilers = Compilers(2)
    try:
        with compilers.collecting():
            launch(64, 128, 64)
        assert compilers.jobs == 2 and compiled_here == []
        launch(64, 128, 64)
        assert compiled_here == [] and not compilers.failed and compilers.waited > 0
        launch(256)  # that nobody told of
        assert compiled_here == ["_rms_norm_kernel"] and not compilers.failed
    finally:
        compilers.close()
    assert compilers._process.wait(60) == 0


def test_a_kernel_is_looked_at_once(
    compiled_here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: each of a thousand launches of a start describes its kernel again, for nothing; or what
    stands for a kernel stays, and launches do nothing."""
    seen: list[str] = []
    before_compiling = Compilers._before_compiling

    def look(self: Compilers, **what: Any) -> bool:
        seen.append(what["key"])
        return before_compiling(self, **what)

    monkeypatch.setattr(Compilers, "_before_compiling", look)
    compilers = Compilers(1)
    try:
        with pytest.raises(RuntimeError), compilers.collecting():
            launch(64, 128, 64, 64)
            raise RuntimeError
        assert len(seen) == len(set(seen)) == compilers.jobs == 2
        launch(64, 128)
        assert len(seen) == 4 and not compilers.failed
    finally:
        compilers.close()
    assert compilers._process.wait(60) == 0


@pytest.mark.parametrize(
    ("quota", "processes"),
    [
        ("800000 100000", 7),
        ("max 100000", 15),
        ("50000 100000", 1),
        ("6400000 100000", 15),
        ("", 15),
    ],
)
def test_processes_fit_the_quota_of_a_container(
    quota: str, processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a container that may use 8 of a node's 128 cores has 16 processes, which spend its quota
    and stop the engine while it times GEMMs."""
    commands: list[list[str]] = []

    class Process:
        stdin, stdout = (tmp_path / "jobs").open("wb"), iter(())

        def __init__(self, command: list[str], **_: Any) -> None:
            commands.append(command)

        def wait(self) -> int:
            return 0

    if quota:
        (tmp_path / "cpu.max").write_text(quota + "\n")
    monkeypatch.setattr(compiling, "_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(16))
    monkeypatch.setattr(subprocess, "Popen", Process)
    Compilers().close()
    assert int(commands[0][5]) == processes


ENGINE = """
import time
from kernels.launch.compiling import Compilers
print(Compilers(2)._process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_processes_end_with_the_engine() -> None:
    """Bug: an engine that is killed at its first start leaves processes that wait for kernels."""
    engine = subprocess.Popen([sys.executable, "-c", ENGINE], stdout=subprocess.PIPE, text=True)
    processes: list[int] = []

    def forked() -> bool:
        processes[1:] = map(int, children.read_text().split())
        return len(processes) == 3

    try:
        assert engine.stdout is not None
        processes.append(int(engine.stdout.readline()))
        children = Path(f"/proc/{processes[0]}/task/{processes[0]}/children")
        assert wait_until(forked, 120)
    finally:
        engine.kill()
        engine.wait()
    assert wait_until(lambda: not any(map(running, processes)), 20)


WIDTHS = (64, 128, 256, 512, 1024, 2048)


def test_the_engine_compiles_while_it_waits(compiled_here: list[str], tmp_path: Path) -> None:
    """Bug: on two cores one compiles all kernels and the other waits; or what the engine compiled
    is compiled again, by a process or at its launch."""
    compilers = Compilers(1)
    try:
        with compilers.collecting():
            launch(*WIDTHS)
        launch(*WIDTHS)  # the process still imports torch
        assert compiled_here == compilers.own and not compilers.failed
        assert 2 < len(compiled_here) < len(WIDTHS)
    finally:
        compilers.close()
    assert compilers._process.wait(60) == 0
    assert len([*tmp_path.rglob("*.cubin")]) == len(WIDTHS)


def test_a_kernel_that_no_process_has_is_not_waited_for(compiled_here: list[str]) -> None:
    """Bug: a launch waits for a kernel behind all others, or compiles all others first."""
    compilers = Compilers(1)
    try:
        with compilers.collecting():
            launch(*WIDTHS)
        launch(WIDTHS[-1])
        assert compiled_here == compilers.own == ["_rms_norm_kernel"]
    finally:
        compilers.close()
    assert compilers._process.wait(60) == 0


def test_what_a_start_does_not_launch_is_compiled_all_the_same(compiled_here: list[str]) -> None:
    """Bug: kernels that wait for a process when the start is over are dropped, and the first
    request that needs one waits for the compiler."""
    compilers = Compilers(1)
    with compilers.collecting():
        launch(*WIDTHS)
    compilers.close()
    assert compilers._process.wait(120) == 0
    launch(*WIDTHS)
    assert compiled_here == [] and not compilers.failed


COUNTED = """
import os
from functools import lru_cache
from triton.runtime import cache

hashed = cache.triton_key

@lru_cache
def triton_key():
    with open(os.environ["HASHES"], "a") as file:
        file.write("hashed\\n")
    return hashed()

cache.triton_key = triton_key
from kernels.launch.compiling import main
main()
os._exit(0)
"""


def test_workers_do_not_hash_the_compiler_again(
    compiled_here: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: each worker reads Triton's library of 400 MB before its first kernel, and a first start
    waits half a second longer for the slowest kernel."""
    start = subprocess.Popen

    def counted(command: list[str], **options: Any) -> Any:
        at = command.index("-m")
        return start([*command[:at], "-c", COUNTED, *command[at + 2 :]], **options)

    monkeypatch.setenv("HASHES", str(tmp_path / "hashes"))
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", counted)
        compilers = Compilers(2)
    try:
        with compilers.collecting():
            launch(64, 128, 256)
        launch(64, 128, 256)
        assert compiled_here == [] and not compilers.failed
    finally:
        compilers.close()
    assert compilers._process.wait(60) == 0
    assert (tmp_path / "hashes").read_text() == "hashed\n"


def test_structs_of_constants_arrive(compiled_here: list[str]) -> None:
    """Bug: a NamedTuple of constants is a list in the process that compiles, whose kernel fails or
    has another key."""
    weight = PackedWeight(Format(4, 128, zero=8), 64, 256, None, torch.device("cpu"))
    compilers = Compilers(1)
    try:
        with compilers.collecting():
            gemv4_module.gemv4(bf16(1, 256), weight)
        gemv4_module.gemv4(bf16(1, 256), weight)
        assert compilers.jobs == 1 and compiled_here == [] and not compilers.failed
    finally:
        compilers.close()
    assert compilers._process.wait(60) == 0


def test_nothing_is_launched_while_collecting(
    compiled_here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: what was compiled before, by an engine of the same process, works on what another kernel
    should have written."""
    launch(64)
    warmups = []
    run = JITFunction.run

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        warmups.append(warmup)
        return run(kernel, *args, grid=grid, warmup=warmup, **options)

    monkeypatch.setattr(JITFunction, "run", note)
    compilers = Compilers(1)
    with compilers.collecting():
        launch(64)
    launch(64)
    compilers.close()
    assert warmups == [True, False] and compilers.jobs == 0


def test_tiles_are_not_compared_while_collecting(
    compiled_here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: tiles of the deterministic mode are said to agree, since no kernel has written what is
    compared."""
    monkeypatch.setattr(deterministic, "_agreeing", {})
    compilers = Compilers(1)
    with compilers.collecting():
        assert deterministic.agreeing(bf16(256, 128)) == deterministic.TILES[2][:1]
    compilers.close()
    assert compilers.jobs == len(deterministic.TILES[2]) and deterministic._agreeing == {}


@pytest.mark.parametrize("fault", ["killed", "no cache", "slow"])
def test_without_the_processes_it_goes_on(
    fault: str,
    compiled_here: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Bug: a start that fails, or hangs, over what should have made it faster."""
    with pytest.MonkeyPatch.context() as patch:
        if fault == "no cache":
            patch.setenv("TRITON_CACHE_DIR", "/dev/null/none")
        compilers = Compilers(1)
    if fault == "killed":
        compilers._process.kill()
    if fault == "slow":
        monkeypatch.setattr(compiling, "PATIENCE", 0.0)
    with caplog.at_level(logging.WARNING, "manta.kernels"):
        with compilers.collecting():
            launch(64, 128)
        launch(64, 128)
    assert compilers.failed and len(caplog.records) == 1
    # One that is slow may have come meanwhile.
    assert compiled_here == ["_rms_norm_kernel"] * 2 or fault == "slow"
    compilers.close()
    compilers._process.wait(60)


def test_a_kernel_that_the_start_left_out_is_a_warning(
    compiled_here: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Bug: all requests wait for a kernel, and nothing says so."""
    launch(64)
    monkeypatch.setattr(triton.knobs.compilation, "listener", None)  # put back at the end
    compiling.report_late()
    with caplog.at_level(logging.WARNING, "manta.kernels"):
        launch(64, 128)
    (record,) = caplog.records
    assert "_rms_norm_kernel compiled in" in record.message and "while serving" in record.message


START = """
import sys
import triton
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from kernels.launch.compiling import Compilers
from kernels.sampling.layout import NUM_WORDS
from kernels.sampling.logprobs import logprobs
from tests.kernels.hopper import Hopper
from tests.kernels.launches.sizes import bf16, int32, int64
import kernels.cuda

def launch():
    logprobs(bf16(2, 1000), int64(2), 1, int64(2), int32(3, NUM_WORDS))

def compile_only(kernel, *args, grid, warmup, **options):
    return run(kernel, *args, grid=grid, warmup=True, **options)

def listen(*, src, cache_hit, **_):
    if not cache_hit:
        print(src.name)

run, JITFunction.run = JITFunction.run, compile_only
driver._active = Hopper()
triton.knobs.compilation.listener = listen
if sys.argv[1] == "first":
    compilers = Compilers(1)
    with compilers.collecting():
        launch()
    compilers.close()
    compilers._process.wait()
else:
    launch()
"""


def test_a_later_start_finds_the_kernels_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a start without workers computes other keys, and compiles kernels of log-probabilities
    again, as their keys then lack the constants of the functions that they call."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    root = Path(__file__).parents[2]
    for start in ("first", "later"):
        command = [sys.executable, "-c", START, start]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
        assert done.stdout == "", start
    assert len([*tmp_path.rglob("*.cubin")]) == 2


def test_the_thread_that_hashes_imports_no_module_of_triton() -> None:
    """Bug: it imports a package while the main thread imports its modules, and either fails."""
    program = (
        "import sys; from importlib import import_module;"
        "from kernels.launch.compiling import _HASHED;"
        "[import_module(name) for name in _HASHED];"
        "from triton.runtime.cache import triton_key;"
        "before = set(sys.modules); triton_key();"
        "print([name for name in sys.modules if name not in before and name[:6] == 'triton'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
