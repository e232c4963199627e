"""GrammarSandbox: tests in a child process whether a request's grammar compiles.

A compilation cannot be stopped and takes minutes for some grammars of a few kilobytes. A long chain
of rules overflows the stack, which ends the process. So a child process tries the compilation
first, with a time limit and half of a thread's stack. If that succeeds, the grammar is compiled
again where it is used.
"""

import contextlib
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue

import msgspec

from engine.errors import InvalidRequest
from engine.structured.grammar import Grammar
from engine.structured.json_schema import UnsupportedSchema

ROOT = Path(__file__).parents[2]
CHILDREN = 2  # maximum number of child processes, which are started on demand
START_SECONDS = 60.0  # maximum seconds of a child's start on a busy machine
KNOWN = 256  # maximum number of grammars whose outcome is remembered

_STACK = 4 << 20  # bytes; half of a thread's usual 8 MiB
_MEMORY = 8 << 30  # bytes of address space


class _Setup(msgspec.Struct):
    special: dict[int, str]
    num_tokens: int
    end_ids: list[int]


class _Outcome(msgspec.Struct):
    """The result of a grammar's trial compilation in a child process.

    code: "" if the grammar compiles.
    pointer: the pointer of an UnsupportedSchema; None for other refusals.
    """

    code: str = ""
    message: str = ""
    pointer: str | None = None


class GrammarSandbox:
    """A pool of child processes that compile grammars for `Vocabulary.outline`. Thread-safe."""

    def __init__(self, special: Mapping[int, str], num_tokens: int, end_ids: Sequence[int]) -> None:
        self._setup = _Setup(dict(special), num_tokens, list(end_ids))
        self._lock = threading.Lock()
        self._known: OrderedDict[Grammar, _Outcome] = OrderedDict()
        self._children: SimpleQueue[_Child | None] = SimpleQueue()
        for _ in range(CHILDREN):
            self._children.put(None)

    def check(self, grammar: Grammar, seconds: float) -> None:
        """Compile a grammar in a child process; blocks.

        seconds: the time limit.
        Raises the errors of `Compiler.compile`, and grammar_too_complex if time, memory or stack
        exceed the limits.
        """
        with self._lock:
            outcome = self._known.get(grammar)
            if outcome is not None:
                self._known.move_to_end(grammar)
        if outcome is None:
            outcome = self._tried(grammar, seconds)
            with self._lock:
                self._known[grammar] = outcome
                while len(self._known) > KNOWN:
                    self._known.popitem(last=False)
        if outcome.pointer is not None:
            raise UnsupportedSchema(outcome.message, outcome.pointer, code=outcome.code)
        if outcome.code:
            raise InvalidRequest(outcome.message, param="structured", code=outcome.code)

    def _tried(self, grammar: Grammar, seconds: float) -> _Outcome:
        child = self._children.get()
        try:
            if child is not None and child.ended():
                child.kill()
                child = None
            if child is None:
                child = _Child(self._setup)
            raw = child.ask(msgspec.json.encode(grammar), seconds)
            return msgspec.json.decode(raw, type=_Outcome)
        except (OSError, EOFError):
            if child is not None:
                child.kill()
                child = None
            message = f"the grammar takes more than {seconds:g} s, or too much memory, to compile"
            return _Outcome("grammar_too_complex", message)
        finally:
            self._children.put(child)


class _Child:
    """A child process that compiles grammars; it ends when its input closes, as on its parent's
    end."""

    def __init__(self, setup: _Setup) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "engine.structured.sandbox"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        # Without this, a garbage-collected Popen with a running child would go into
        # `subprocess._active`, and the child would run on.
        weakref.finalize(self, self._process.kill)
        self._rest = b""
        self.ask(msgspec.json.encode(setup), START_SECONDS)

    def ask(self, line: bytes, seconds: float) -> bytes:
        """Send a line to the child, and return the child's answer.

        Raises EOFError or OSError if the child has ended or takes longer than `seconds`.
        """
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"%d " % max(1, round(seconds)) + line + b"\n")
        process.stdin.flush()
        poller = select.poll()
        poller.register(process.stdout, select.POLLIN)
        deadline = time.monotonic() + seconds
        while b"\n" not in self._rest:
            seconds_left = deadline - time.monotonic()
            if seconds_left <= 0 or not poller.poll(seconds_left * 1000):
                raise EOFError
            data = os.read(process.stdout.fileno(), 65536)
            if not data:
                raise EOFError
            self._rest += data
        answer, _, self._rest = self._rest.partition(b"\n")
        return answer

    def ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        process = self._process
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def _serve() -> None:
    from engine.structured.compiler import Compiler, Vocabulary

    def line() -> bytes:
        """Return the next line, and set an alarm at its time limit, which ends the process even in
        Rust."""
        signal.alarm(0)
        seconds, _, content = sys.stdin.buffer.readline().partition(b" ")
        if not content:
            os._exit(0)
        signal.alarm(int(seconds) + 2)
        return content

    def answer(outcome: _Outcome) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(outcome) + b"\n")
        sys.stdout.buffer.flush()

    setup = msgspec.json.decode(line(), type=_Setup)
    compiler = Compiler(Vocabulary.outline(setup.special, setup.num_tokens, setup.end_ids))
    answer(_Outcome())
    while True:
        try:
            compiler.compile(msgspec.json.decode(line(), type=Grammar))
            answer(_Outcome())
        except UnsupportedSchema as error:
            answer(_Outcome(error.code, error.message, error.pointer))
        except InvalidRequest as error:
            answer(_Outcome(error.code, error.message))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(_STACK)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()
    os._exit(1)


if __name__ == "__main__":
    main()
