"""Program: the generated kernels of a step, recorded once and then run by one call.

A step of a small model has about two hundred kernels of about ten microseconds. Python takes as
long to prepare each kernel, and OpenMP wakes its threads for each. A program stores the arguments
of a recorded step's calls, and one generated function runs them all, with a cheap barrier after
each call. A program is the CPU's counterpart of a CUDA graph: inputs are at fixed addresses, and a
replay computes the same results bit for bit.

Torch operations cannot be recorded, except allocations, views and copies of rows. A step with any
other operation raises NotRecordable, and the caller runs it as usual.
"""

import ctypes
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.cpu.codegen import compiler, elements
from kernels.cpu.codegen.compiler import NativeFunction, compile_ir
from kernels.cpu.codegen.processor import CompilerUnavailable
from kernels.cpu.codegen.products import pause, pause_declaration

_ALIGN = 64  # bytes
# Polls at the barrier before a thread yields its core. They take about 50 us, longer than any wait
# if each thread has a core. A longer wait means that the awaited thread has lost its core.
_LOOKS = 2000

# Indices of the function's arguments in args. The counter that threads write has its own cache
# line.
_STEPS, _COUNT, _YIELD, _TEAM, _ARRIVED, _WORDS = 2, 3, 4, 5, 16, 24

_PLAY = f"""
{pause_declaration()}

define void @play(ptr %args) {{
entry:
  %arrived = getelementptr i64, ptr %args, i64 {_ARRIVED}
  %at_steps = getelementptr i64, ptr %args, i64 {_STEPS}
  %steps = load ptr, ptr %at_steps
  %at_count = getelementptr i64, ptr %args, i64 {_COUNT}
  %count = load i64, ptr %at_count
  %at_yield = getelementptr i64, ptr %args, i64 {_YIELD}
  %give_way = load ptr, ptr %at_yield
  %at_team = getelementptr i64, ptr %args, i64 {_TEAM}
  %team_size = load ptr, ptr %at_team
  %team = call i32 %team_size()
  %threads = sext i32 %team to i64
  br label %next
next:
  %i = phi i64 [0, %entry], [%following, %after]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %step, label %done
step:
  %place = mul i64 %i, 2
  %at_function = getelementptr ptr, ptr %steps, i64 %place
  %function = load ptr, ptr %at_function
  %at_given = getelementptr ptr, ptr %at_function, i64 1
  %given = load ptr, ptr %at_given
  call void %function(ptr %given)
  %following = add i64 %i, 1
  %all = mul i64 %following, %threads
  %before = atomicrmw add ptr %arrived, i64 1 acq_rel
  br label %wait
wait:
  %looks = phi i64 [0, %step], [%looked, %again]
  %now = load atomic i64, ptr %arrived acquire, align 8
  %complete = icmp sge i64 %now, %all
  br i1 %complete, label %after, label %spin
spin:
  %looked = add i64 %looks, 1
  %long = icmp sgt i64 %looks, {_LOOKS}
  br i1 %long, label %yield, label %pause
pause:
  {pause()}
  br label %again
yield:
  %ignored = call i32 %give_way()
  br label %again
again:
  br label %wait
after:
  br label %next
done:
  ret void
}}
"""

_aten = torch.ops.aten
_ALLOCATIONS = {_aten.empty.memory_format, _aten.new_empty.default, _aten.empty_like.default}
_VIEWS = {
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.slice.Tensor,
    _aten.select.int,
    _aten.detach.default,
    _aten.alias.default,
    _aten.as_strided.default,
    _aten.unsqueeze.default,
    _aten.expand.default,
    _aten.split.Tensor,
    _aten.split_with_sizes.default,
}

_COPIES = {_aten.clone.default, _aten.cat.default}


class NotRecordable(Exception):
    """Raised when a step needs a torch operation that cannot be recorded; the message names it."""


@lru_cache(maxsize=1)
def _play() -> tuple[NativeFunction, int, int]:
    """Return the function that runs a program, and the addresses of sched_yield and
    omp_get_num_threads.
    """
    function = compile_ir(_PLAY)["play"]
    process = ctypes.CDLL(None)
    addresses = []
    for library, name in ((process, "sched_yield"), (compiler.openmp(), "omp_get_num_threads")):
        addresses.append(ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0)
    return function, addresses[0], addresses[1]


def _copied(func: Any, args: Any) -> list[Tensor] | None:
    """Return the tensors that a clone or cat call copies, if kernels can copy them, else None.

    A cat must be along the last dimension.
    """
    parts = [args[0]] if func is _aten.clone.default else list(args[0])
    beside = func is _aten.clone.default or (len(args) > 1 and args[1] in (1, -1))
    alike = len(parts) == 1 or all(part.dim() == 2 for part in parts)
    return parts if beside and alike and all(map(elements.fits, parts)) else None


class Buffers:
    """Buffers for intermediate tensors, which programs share because they run one at a time.

    rows: the rows (tokens) of the largest step, for which all buffers are sized.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._all: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._all)

    def unused(self) -> list[Tensor]:
        """Return all buffers, the smallest first."""
        return sorted(self._all, key=lambda buffer: buffer.nbytes)

    def more(self, size: int) -> Tensor:
        self._all.append(torch.empty(size, dtype=torch.uint8))
        return self._all[-1]


class _Memory(TorchDispatchMode):
    """A torch dispatch mode that takes a step's allocations from Buffers.

    A buffer is free again once no tensor uses it, as in eager mode, but it keeps its address.
    """

    def __init__(self, buffers: Buffers, rows: int) -> None:
        super().__init__()
        self._buffers, self._rows = buffers, rows
        self._free = buffers.unused()
        # number of tensors in each buffer, by the buffer's address
        self._users: dict[int, int] = {}
        self._in_use: dict[int, Tensor] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that torch's first dispatch does not import torch._dynamo.

        The import would take 1.4 s of a CPU engine's start, and dynamo is not used here.
        """
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ALLOCATIONS:
            out = self._allocate(func(*args, **{**kwargs, "device": "meta"}))
        elif func in _VIEWS:
            out = func(*args, **kwargs)
        elif func in _COPIES and (rows := _copied(func, args)) is not None:
            out = self._joined(rows)
        elif func is _aten.to.dtype and args[1] == args[0].dtype:
            return args[0]
        else:
            with self:  # In inference mode composite operations arrive whole: decompose them.
                out = func.decompose(*args, **kwargs)
            if out is NotImplemented:
                raise NotRecordable(str(func))
            return out
        for output in (out,) if isinstance(out, Tensor) else out:
            address = output.untyped_storage().data_ptr()
            if address in self._in_use:
                self._users[address] += 1
                weakref.finalize(output, self._release, address)
        return out

    def _joined(self, parts: list[Tensor]) -> Tensor:
        shape = list(parts[0].shape)
        if len(parts) > 1:
            shape[1] = sum(part.shape[1] for part in parts)
        out, at = self._allocate(torch.empty(shape, device="meta")), 0
        for part in parts:
            elements.apply("copy", part, out[:, at : at + part.shape[1]])
            at += part.shape[1]
        return out

    def _allocate(self, like: Tensor) -> Tensor:
        size = -(-max(1, like.nbytes) // _ALIGN) * _ALIGN
        fitting = (buffer for buffer in self._free if buffer.nbytes >= size)
        buffer = next(fitting, None)
        if buffer is None:
            buffer = self._buffers.more(-(-size * self._buffers.rows // self._rows // 64) * 64)
        else:
            self._free = [free for free in self._free if free is not buffer]
        address = buffer.untyped_storage().data_ptr()
        self._in_use[address], self._users[address] = buffer, 0
        return buffer[: like.nbytes].view(like.dtype).view(like.shape)

    def _release(self, address: int) -> None:
        self._users[address] -= 1
        if not self._users[address]:
            self._free.append(self._in_use.pop(address))
            self._free.sort(key=lambda buffer: buffer.nbytes)


class Program:
    """The recorded kernels that a function, `body`, launches.

    Tensors that `body` does not allocate itself must stay at their addresses.
    """

    def __init__(
        self, body: Callable[[], Tensor], buffers: Buffers, rows: int, threads: int
    ) -> None:
        """Run the body for `rows` rows and record its kernels.

        Raises CompilerUnavailable, and NotRecordable, possibly after a part of the body has run.
        """
        self._function, give_way, team = _play()
        calls: list[tuple[int, list[int]]] = []
        self._kept: list[object] = []
        with ExitStack() as stack:
            stack.enter_context(compiler.recording(calls, self._kept))
            stack.enter_context(_Memory(buffers, rows))
            self.out = body()
        if not calls:
            raise NotRecordable("nothing was launched")
        # Each call's arguments start at a cache line, as threads write the first two words.
        width = -(-max(len(words) for _, words in calls) * 8 // _ALIGN) * _ALIGN // 8
        memory = torch.zeros(len(calls) * width + 8, dtype=torch.int64)
        skip = -memory.data_ptr() % _ALIGN // 8
        self._kept.append(memory)
        words = memory.numpy()[skip : skip + len(calls) * width].reshape(len(calls), width)
        steps = torch.zeros(len(calls), 2, dtype=torch.int64)
        for index, (address, arguments) in enumerate(calls):
            words[index, : len(arguments)] = arguments
            steps[index, 0], steps[index, 1] = address, words[index].ctypes.data
        self._counters = words[:, :2]
        self._kept.append(steps)
        self._threads = threads
        self._args = (ctypes.c_int64 * _WORDS)()
        self._args[_STEPS], self._args[_COUNT] = steps.data_ptr(), len(calls)
        self._args[_YIELD], self._args[_TEAM] = give_way, team

    def __len__(self) -> int:
        return int(self._args[_COUNT])

    def play(self) -> Tensor:
        """Run the kernels on the current inputs and return the body's result."""
        self._counters[:] = 0
        self._args[_ARRIVED] = 0
        self._function(self._args, self._threads)
        return self.out


def can_record() -> bool:
    """Whether this machine can record and run programs."""
    try:
        _play()
    except (CompilerUnavailable, AttributeError):
        return False
    return True
