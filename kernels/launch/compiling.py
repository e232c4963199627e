"""Compilers: processes that compile Triton kernels in parallel, before their first launch.

If kernels are compiled one after the other, this takes most of an engine's first start on a
machine. So the engine runs its warm-up steps twice:

    with compilers.collecting():    nothing is launched; needed kernels are sent to the processes
    every later launch              waits for its kernel, and loads it from Triton's cache
    compilers.close()

The processes write Triton's cache on disk (TRITON_CACHE_DIR), and the engine reads it. A kernel
that was not sent or could not be compiled is compiled at its launch, as usual. If a launch has to
wait and many kernels are not yet compiled, the engine compiles some itself, the last ones first, so
that its core is not idle.

The processes are forks of `python -m kernels.launch.compiling`. This program imports torch and
Triton while the engine does, and computes the hash that is a part of every kernel's cache key. It
reads a job per line from stdin, and writes an answer per line, in any order. It ends when stdin has
ended and all jobs are done, or when the engine ends.
"""

import contextlib
import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

logger = logging.getLogger("manta.kernels")

PATIENCE = 60.0  # maximum seconds that a launch waits; a kernel usually takes less than one
_MOST = 16  # maximum processes: with few kernels each, the slowest kernel determines the time
_PIPE_BYTES = 1 << 20  # holds all jobs of a start, so that writing them never blocks
_ROOT = Path(__file__).resolve().parents[2]
_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # microseconds of CPU time, and the period
_PR_SET_PDEATHSIG = 1
# Modules that the main process imports once for all workers: torch, Triton, Gluon, and the kernels
# that are compiled first.
_COMMON = ("kernels.cuda", "kernels.attention.decode", "kernels.attention.specialized_prefill")
# Packages of Triton that it imports while it hashes its compiler's files.
_HASHED = ("triton.backends.nvidia.driver", "triton.backends.amd", "triton.language.extra.cuda")
_COLLECTED = object()  # placeholder of a kernel that is being compiled

_Key = tuple[str, str, Any]  # module and name of a kernel, Triton's specialisation key
# A constant that is a NamedTuple: its index path among the constants, its class's module and name.
_Struct = tuple[list[int], str, str]


class _Unsent(NamedTuple):
    """A collected kernel that has not been sent to a process yet."""

    job: _Key
    line: bytes
    kernel: Any
    specialization: str
    structs: list[_Struct]


class Compilers:
    """The processes that compile kernels; the constructor starts them.

    Only one instance may exist at a time, since Triton has only one compilation hook.
    """

    is_collecting: ClassVar[bool] = False  # whether kernels are collected and not launched

    def __init__(self, count: int = 0) -> None:
        """Start the processes. count: their number; 0: one per core, minus one for the engine."""
        self._count = count or max(1, min(_MOST, _cores() - 1))
        self.waited = 0.0  # seconds that launches waited for kernels
        self.own: list[str] = []  # names of kernels that this process itself compiled in `_help`
        self._jobs: dict[_Key, Future[None]] = {}
        self._numbers: list[_Key] = []
        self._lock = threading.Lock()  # for _unsent, _sent, and for writing to the processes
        self._unsent: deque[_Unsent] = deque()
        self._sent = 0  # number of jobs that were sent and are not finished
        self._collected: list[tuple[dict[Any, Any], Any]] = []  # (a kernel's cache, key in it)
        self._given_up = False
        self._warned = False
        # Suppress warnings, since the engine prints the same ones.
        command = [sys.executable, "-W", "ignore", "-m", "kernels.launch.compiling"]
        self._process = subprocess.Popen(
            [*command, str(self._count), os.getcwd(), str(os.getpid())],
            cwd=_ROOT,  # the folder that contains the package `kernels`
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pipesize=_PIPE_BYTES,
        )
        threading.Thread(target=self._read_answers, name="compilers", daemon=True).start()

    @property
    def jobs(self) -> int:
        """The number of kernels that were collected."""
        return len(self._jobs)

    @property
    def failed(self) -> bool:
        return self._warned

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect the Triton kernels that are needed within the context, without launching them.

        The results of launches are undefined, so they must not be used as indices.
        """
        from triton import knobs
        from triton.runtime.jit import JITFunction

        run = JITFunction.run

        def look(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            # warmup=True: launch nothing, even if the kernel was compiled before
            return run(kernel, *args, grid=grid, warmup=warmup or _ours(kernel.module), **options)

        knobs.runtime.jit_cache_hook = self._before_compiling
        JITFunction.run = look
        Compilers.is_collecting = True
        try:
            yield
        finally:
            Compilers.is_collecting = False
            JITFunction.run = run
            for cache, key in self._collected:
                cache.pop(key, None)
            self._collected.clear()

    def close(self) -> None:
        """Restore Triton's hook, so that launches no longer wait.

        The processes end once they have compiled the remaining jobs.
        """
        if "triton" in sys.modules:  # otherwise no hook was installed
            hash_callees_first()
        with self._lock:
            with contextlib.suppress(OSError):
                self._send(len(self._unsent))  # launches after the start may need them
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def _before_compiling(self, *, key: Any, fn: Any, compile: Any, **_: Any) -> bool:
        """Handle Triton's hook before this process compiles a kernel: collect the kernel, or wait
        for it.

        Returns True to stop the compilation.
        """
        if not _ours(fn.module):
            return False
        hash_callees(fn.jit_function)
        job = (fn.module, fn.name, key)
        if self.is_collecting:
            if job not in self._jobs and not self._given_up:
                structs = _structs(compile["constants"])
                self._hand_over(job, fn.jit_function, compile["specialization_data"], structs)
            # The kernel's next launch finds this placeholder and does not call the hook.
            cache = fn.jit_function.device_caches[compile["device"]][0]
            cache[key] = _COLLECTED
            self._collected.append((cache, key))
            return True
        future = self._jobs.get(job)
        if future is not None and not self._given_up:
            began = time.monotonic()
            try:
                self._help(future)
                future.result(PATIENCE)
            except TimeoutError:
                self._given_up = True
                self._warn(f"{fn.name} was not there after {PATIENCE:.0f} s")
            except Exception as error:  # after any error this process compiles the kernel
                self._warn(f"{fn.name}: {error}")
            self.waited += time.monotonic() - began
        return False

    def _hand_over(
        self, job: _Key, kernel: Any, specialization: str, structs: list[_Struct]
    ) -> None:
        from triton.runtime import driver

        target = driver.active.get_current_target()
        self._jobs[job] = Future()
        self._numbers.append(job)
        what = (
            len(self._numbers) - 1,
            *job[:2],
            [target.backend, target.arch, target.warp_size],
            specialization,
            structs,
        )
        line = json.dumps(what).encode() + b"\n"
        with self._lock:
            self._unsent.append(_Unsent(job, line, kernel, specialization, structs))
            self._send_next()

    def _send_next(self) -> None:
        """Send jobs until each process has one job and one more job is queued."""
        try:
            self._send(min(len(self._unsent), self._count + 1 - self._sent))
        except (OSError, ValueError) as error:  # the processes have ended, or stdin is closed
            self._given_up = True
            self._warn(str(error))

    def _send(self, jobs: int) -> None:
        for _ in range(jobs):
            self._process.stdin.write(self._unsent.popleft().line)
            self._sent += 1
        self._process.stdin.flush()

    def _help(self, wanted: "Future[None]") -> None:
        """Compile unsent kernels in this process until the wanted kernel is compiled.

        Returns earlier if the wanted kernel is itself unsent, because its launch then compiles it.
        Also returns once there are no more unsent kernels than processes: the processes then finish
        them sooner.
        """
        while not wanted.done():
            with self._lock:
                own = next((u for u in self._unsent if self._jobs[u.job] is wanted), None)
                if own is None and len(self._unsent) > self._count:
                    own = self._unsent[-1]
                if own is None:
                    return
                self._unsent.remove(own)
            self.own.append(own.job[1])
            self._jobs[own.job].set_result(None)
            if self._jobs[own.job] is not wanted:
                _preload(own.kernel, own.specialization, own.structs)

    def _read_answers(self) -> None:
        """Read the compiling processes' answers and set the futures of kernels.

        It runs in a thread, which ends when the processes end. Kernels without an answer then fail,
        and nothing more is sent.
        """
        with contextlib.suppress(OSError, ValueError):
            for line in self._process.stdout:
                number, error = json.loads(line)
                with self._lock:
                    self._sent -= 1
                    if not self._process.stdin.closed:
                        self._send_next()
                future = self._jobs[self._numbers[number]]
                if error:
                    future.set_exception(RuntimeError(error))
                else:
                    future.set_result(None)
        status = self._process.wait()
        self._given_up = True
        if not self._process.stdin.closed:
            self._warn(f"the compiling process ended with {status}")
        for future in list(self._jobs.values()):
            if not future.done():
                future.set_exception(RuntimeError("it never came"))

    def _warn(self, reason: str) -> None:
        """Log a warning with the reason, but only the first: if one kernel fails, many do."""
        if not self._warned:
            self._warned = True
            logger.warning("kernels that were not compiled ahead are compiled here: %s", reason)


def _cores() -> int:
    """Return the number of cores that this process may use, within its container's quota.

    With more processes the container would be throttled, and with it the engine, which times GEMMs
    meanwhile.
    """
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # not Linux, no cgroup v2, or no quota ("max")
        quota, period = map(int, _QUOTA.read_text().split())
        cores = min(cores, quota // period)
    return cores


def report_late() -> None:
    """Log a warning for each kernel that this process compiles or loads from now on.

    The engine should have compiled such a kernel at its start. The first request that needs it
    waits for seconds, and all concurrent requests wait, too.
    """
    if "triton" not in sys.modules:
        return
    from triton import knobs

    knobs.compilation.listener = _report_late


def _report_late(*, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
    """Log a warning for a kernel that was compiled or loaded late; Triton calls it as a listener.

    times: microseconds.
    """
    how = "read from the cache" if cache_hit else f"compiled in {times.total / 1e6:.2f} s"
    logger.warning("kernel %s %s while serving: the start did not launch it", src.name, how)


def _ours(module: str) -> bool:
    """Whether a kernel's module belongs to this project.

    Torch's Triton kernels run even while collecting, because other code may read their results.
    """
    return module.startswith("kernels.")


def hash_callees(kernel: Any) -> None:
    """Compute the cache keys of the functions that a kernel calls, before the kernel's own key.

    Up to Triton 3.7, a kernel's key includes the constants of only those callees whose keys are
    already known. So the key would depend on the kernels that a process has compiled before, and
    the engine would not find a worker's compiled kernel.
    """
    from triton.runtime.jit import JITFunction

    for name in kernel.fn.__code__.co_names:
        callee = kernel.fn.__globals__.get(name)
        if isinstance(callee, JITFunction) and callee.hash is None:
            hash_callees(callee)
            _ = callee.cache_key


def hash_callees_first() -> None:
    """Make this process compute the keys of kernels as a first start's workers do.

    Otherwise a later start would not find some of their kernels, and compile these again.
    """
    from triton import knobs

    knobs.runtime.jit_cache_hook = _hash_callees_of


def _hash_callees_of(*, fn: Any, **_: Any) -> bool:
    """Handle Triton's hook: hash a kernel's callees, and let Triton compile or load the kernel."""
    if _ours(fn.module):
        hash_callees(fn.jit_function)
    return False


def hash_compiler() -> threading.Thread:
    """Start a thread in which Triton hashes its compiler's files, and return it.

    The digest is a part of every kernel's key. It takes half a second, most of it without the GIL.
    Triton caches it, so forks need not read these files of 400 to 500 MB again. The calling thread
    imports Triton first: two threads that import a package and its modules may wait for each other.
    """
    key: Callable[[], object] = str
    # Without Triton no kernel is launched.
    with contextlib.suppress(ImportError):
        for module in _HASHED:
            import_module(module)
        from triton.runtime.cache import triton_key as key

    def compute() -> None:
        with contextlib.suppress(OSError):  # if files are unreadable, the first launch raises
            key()

    thread = threading.Thread(target=compute, name="hash-compiler", daemon=True)
    thread.start()
    return thread


class _Target:
    """A stub of Triton's driver with a given target, so that workers do not use the device."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0


def _structs(constants: dict[Any, Any]) -> list[_Struct]:
    """Return the `_Struct` of each constant that is a NamedTuple.

    Triton's JSON turns these constants into lists; `_restore` reverses this.
    """
    return [
        (list(place), type(value).__module__, type(value).__name__)
        for place, value in constants.items()
        if hasattr(value, "_fields")
    ]


def _restore(constants: dict[Any, Any], structs: list[_Struct]) -> None:
    """Replace lists from Triton's JSON by their original NamedTuples, in place."""
    for place, module, name in structs:
        values = constants[tuple(place)]
        fields = (tuple(value) if isinstance(value, list) else value for value in values)
        constants[tuple(place)] = getattr(import_module(module), name)(*fields)


def _preload(function: Any, specialization: str, structs: list[_Struct]) -> Any:
    """Compile a kernel without launching it, and return it.

    specialization: the kernel's description from Triton's hook.
    """
    from triton.runtime import driver

    # reading this entry sets the function's `ASTSource`
    _ = function.device_caches[driver.active.get_current_device()]
    make_source = function.ASTSource

    def source(function: Any, signature: Any, constants: dict[Any, Any], attrs: Any) -> Any:
        _restore(constants, structs)
        return make_source(function, signature, constants, attrs)

    function.ASTSource = source
    try:
        return function.preload(specialization)
    finally:
        function.ASTSource = make_source


def _compile(
    module: str, name: str, target: list[Any], specialization: str, structs: list[_Struct]
) -> None:
    """Compile one kernel in a worker process."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    driver.set_active(_Target(GPUTarget(*target)))
    function = getattr(import_module(module), name)
    hash_callees(function)
    kernel = _preload(function, specialization, structs)
    if target[0] != "cuda":
        return
    from triton.backends.nvidia import driver as nvidia

    # Up to Triton 3.6 each signature has a launcher in C. gcc takes as long as ptxas: run it now.
    if hasattr(nvidia, "make_launcher"):
        nvidia.CudaLauncher(kernel.src, kernel.metadata)


def _build_driver() -> None:
    """Build the C module through which Triton calls CUDA, once per machine."""
    # If this fails, the engine will fail, too, and report it with a better message.
    with contextlib.suppress(Exception):
        from triton.backends.nvidia.driver import CudaUtils

        CudaUtils()


def _die_with(parent: int) -> None:
    """Let Linux kill this worker when its parent ends; exit at once if the parent has ended.

    The worker would not notice an end of file, as it has inherited both ends of the pipe.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    count, directory, parent = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    _die_with(parent)
    os.chdir(directory)  # the engine's working directory, so that relative paths are the same
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.dup(1)
    os.dup2(2, 1)  # libraries that write to stdout then write to the log
    hashing, driver = hash_compiler(), threading.Thread(target=_build_driver)
    driver.start()
    for module in _COMMON:
        import_module(module)
    for thread in (hashing, driver):
        thread.join()  # no other thread may run when the pool forks

    def answer(number: int, future: "Future[None]") -> None:
        error = future.exception()
        text = f"{type(error).__name__}: {error}"[:1000] if error else ""
        with contextlib.suppress(OSError):  # the engine has ended
            os.write(answers, json.dumps([number, text]).encode() + b"\n")

    with ProcessPoolExecutor(
        count, get_context("fork"), initializer=_die_with, initargs=(os.getpid(),)
    ) as pool:
        pool.submit(os.getpid)  # forks all workers before the first kernel comes
        for line in sys.stdin.buffer:
            number, *job = json.loads(line)
            pool.submit(_compile, *job).add_done_callback(
                lambda future, number=number: answer(number, future)
            )


if __name__ == "__main__":
    main()
    os._exit(0)  # skip the interpreter's cleanup, like the engine process
