"""Meeting: an all-reduce between processes that share memory, as a generated kernel.

engine/parallel/shared_memory.py lays out the memory. One thread of each process copies its input
into its slot, increments its counter, waits until all counters have this value, and adds the slots
in the order of ranks. All state that changes between two calls is in memory, so a
`kernels.cpu.codegen.program.Program` can record the kernel.
"""

import ctypes
from functools import lru_cache

from torch import Tensor

from kernels.cpu.codegen.compiler import NativeFunction, compile_ir
from kernels.cpu.codegen.processor import CompilerUnavailable, lanes
from kernels.cpu.codegen.products import pause, pause_declaration

# Words of each rank's cache line, whose first word counts the rank's all-reduces. Rank 0's line
# also has the current round, the round of the last failure plus one, and the rank that failed.
LINE_WORDS = 8
ROUND, FAILED, FAILED_ON = 2, 3, 4

# Numbers of polls of another rank's counter before this thread yields its core, and before it
# sleeps. Running ranks arrive sooner. A thread that polls longer may occupy the core that the
# awaited rank needs.
_LOOKS, _YIELDS, _NAPS = 4000, 2000, 5000
_NAP_US, _LONG_NAP_US = 50, 5000

# Indices of the kernel's arguments in args.
_X, _COUNT, _ONTO, _LINES, _RANK, _SIZE, _SLOTS, _SLOT, _STATE, _YIELD, _SLEEP, _WORDS = range(
    2, 14
)
# Indices in `Meeting._state`, which is private to this process.
_MY_ROUND, _BROKEN = 0, 1


def _word(name: str, index: int, kind: str) -> str:
    return (
        f"  %at.{name} = getelementptr i64, ptr %args, i64 {index}\n"
        f"  %{name} = load {kind}, ptr %at.{name}\n"
    )


def _loop(name: str, step: int, end: str, before: str, then: str, body: str) -> str:
    """Return the LLVM IR of a loop that increments %{name} by step while it is below end.

    before: phi operand with the first value.
    then: label after the loop.
    """
    return f"""
{name}.head:
  %{name} = phi i64 [{before}], [%{name}.next, %{name}.last]
  %{name}.more = icmp slt i64 %{name}, {end}
  br i1 %{name}.more, label %{name}.body, label %{then}
{name}.body:
{body}
  br label %{name}.last
{name}.last:
  %{name}.next = add i64 %{name}, {step}
  br label %{name}.head
"""


def _sum(name: str, kind: str, onto: bool) -> str:
    """Return LLVM IR for out[i] = sum over ranks of slots[rank][i], plus onto[i] if `onto`."""
    out = "%onto" if onto else "%x"
    last = f"%{name}.sum"
    body = f"""
  %{name}.first = getelementptr float, ptr %slots.now, i64 %{name}
  %{name}.zero = load {kind}, ptr %{name}.first, align 4
  %{name}.out = getelementptr float, ptr {out}, i64 %{name}
  br label %{name}.rank.head
{name}.rank.head:
  %{name}.rank = phi i64 [1, %{name}.body], [%{name}.rank.next, %{name}.rank.body]
  %{name}.sum = phi {kind} [%{name}.zero, %{name}.body], [%{name}.more.sum, %{name}.rank.body]
  %{name}.rank.more = icmp slt i64 %{name}.rank, %size
  br i1 %{name}.rank.more, label %{name}.rank.body, label %{name}.store
{name}.rank.body:
  %{name}.far = mul i64 %{name}.rank, %slot
  %{name}.theirs = getelementptr i8, ptr %{name}.first, i64 %{name}.far
  %{name}.value = load {kind}, ptr %{name}.theirs, align 4
  %{name}.more.sum = fadd {kind} %{name}.sum, %{name}.value
  %{name}.rank.next = add i64 %{name}.rank, 1
  br label %{name}.rank.head
{name}.store:
"""
    if onto:
        body += f"""
  %{name}.before = load {kind}, ptr %{name}.out, align 4
  %{name}.added = fadd {kind} %{name}.before, %{name}.sum
"""
        last = f"%{name}.added"
    return body + f"  store {kind} {last}, ptr %{name}.out, align 4\n"


def _copy(name: str, kind: str) -> str:
    return f"""
  %{name}.from = getelementptr float, ptr %x, i64 %{name}
  %{name}.value = load {kind}, ptr %{name}.from, align 4
  %{name}.to = getelementptr float, ptr %mine, i64 %{name}
  store {kind} %{name}.value, ptr %{name}.to, align 4
"""


def _function(name: str, onto: bool, width: int) -> str:
    vector = f"<{width} x float>"
    pointers = {"x": _X, "onto": _ONTO, "lines": _LINES, "slots": _SLOTS, "state": _STATE}
    pointers |= {"give_way": _YIELD, "sleep": _SLEEP}
    numbers = {"count": _COUNT, "rank": _RANK, "size": _SIZE, "slot": _SLOT}
    words = "".join(_word(word_name, at, "ptr") for word_name, at in pointers.items())
    words += "".join(_word(word_name, at, "i64") for word_name, at in numbers.items())
    line = 8 * LINE_WORDS
    return f"""
define void @{name}(ptr %args) {{
entry:
  %ticket = atomicrmw add ptr %args, i64 1 acq_rel
  %alone = icmp eq i64 %ticket, 0
  br i1 %alone, label %begin, label %done
begin:
{words}
  %whole = and i64 %count, {-width}
  %my.far = mul i64 %rank, {line}
  %my.line = getelementptr i8, ptr %lines, i64 %my.far
  %met = load i64, ptr %my.line
  %odd = and i64 %met, 1
  %turn = mul i64 %size, %slot
  %turn.far = mul i64 %odd, %turn
  %slots.now = getelementptr i8, ptr %slots, i64 %turn.far
  %mine.far = mul i64 %rank, %slot
  %mine = getelementptr i8, ptr %slots.now, i64 %mine.far
  %wanted = add i64 %met, 1
  br label %copy.head
{_loop("copy", width, "%whole", "0, %begin", "rest.head", _copy("copy", vector))}
{_loop("rest", 1, "%count", "%whole, %copy.head", "meet", _copy("rest", "float"))}
meet:
  store atomic i64 %wanted, ptr %my.line release, align 8
  br label %other.head
other.head:
  %other = phi i64 [0, %meet], [%other.next, %other.last]
  %other.more = icmp slt i64 %other, %size
  br i1 %other.more, label %other.body, label %add.begin
other.body:
  %other.far = mul i64 %other, {line}
  %other.line = getelementptr i8, ptr %lines, i64 %other.far
  br label %look
look:
  %looks = phi i64 [0, %other.body], [%looked, %again]
  %now = load atomic i64, ptr %other.line acquire, align 8
  %there = icmp sge i64 %now, %wanted
  br i1 %there, label %other.last, label %wait
wait:
  %looked = add i64 %looks, 1
  %few = icmp slt i64 %looks, {_LOOKS}
  br i1 %few, label %pause, label %check
pause:
  {pause()}
  br label %again
check:
  %at.round = getelementptr i64, ptr %lines, i64 {ROUND}
  %round = load atomic i64, ptr %at.round acquire, align 8
  %at.failed = getelementptr i64, ptr %lines, i64 {FAILED}
  %failed = load atomic i64, ptr %at.failed acquire, align 8
  %my.round = load i64, ptr %state
  %other.round = icmp ne i64 %round, %my.round
  %failure = icmp sgt i64 %failed, %my.round
  %broken = or i1 %other.round, %failure
  br i1 %broken, label %give.up, label %patient
patient:
  %some = icmp slt i64 %looks, {_LOOKS + _YIELDS}
  br i1 %some, label %yield, label %nap
yield:
  %ignored = call i32 %give_way()
  br label %again
nap:
  %soon = icmp slt i64 %looks, {_LOOKS + _YIELDS + _NAPS}
  %long = select i1 %soon, i32 {_NAP_US}, i32 {_LONG_NAP_US}
  %slept = call i32 %sleep(i32 %long)
  br label %again
again:
  br label %look
other.last:
  %other.next = add i64 %other, 1
  br label %other.head
give.up:
  %at.broken = getelementptr i64, ptr %state, i64 {_BROKEN}
  store i64 1, ptr %at.broken
  br label %done
add.begin:
  br label %add.head
{_loop("add", width, "%whole", "0, %add.begin", "tail.head", _sum("add", vector, onto))}
{_loop("tail", 1, "%count", "%whole, %add.head", "done", _sum("tail", "float", onto))}
done:
  ret void
}}
"""


@lru_cache(maxsize=1)
def _functions() -> tuple[NativeFunction, NativeFunction, int, int]:
    """Return the two kernels (all-reduce in place, all-reduce added to a tensor) and the addresses
    of sched_yield and usleep.

    Raises CompilerUnavailable.
    """
    width = lanes()
    ir = f"{pause_declaration()}\n"
    functions = compile_ir(ir + _function("sum", False, width) + _function("sum_onto", True, width))
    process = ctypes.CDLL(None)
    yields, sleeps = (
        ctypes.cast(getattr(process, name), ctypes.c_void_p).value or 0
        for name in ("sched_yield", "usleep")
    )
    return functions["sum"], functions["sum_onto"], yields, sleeps


class Meeting:
    """One rank's all-reduce with the other ranks' processes over shared memory.

    rank, size: this rank and the number of ranks.
    lines: address of the ranks' counters, a cache line each.
    slots: address of the ranks' slots for inputs. slot: bytes of one slot.
    Raises CompilerUnavailable.
    """

    def __init__(self, rank: int, size: int, lines: int, slots: int, slot: int) -> None:
        self._in_place, self._onto, yields, sleeps = _functions()
        self._state = (ctypes.c_int64 * 2)()
        args = self._args = (ctypes.c_int64 * _WORDS)()
        args[_LINES], args[_RANK], args[_SIZE] = lines, rank, size
        args[_SLOTS], args[_SLOT] = slots, slot
        args[_STATE] = ctypes.addressof(self._state)
        args[_YIELD], args[_SLEEP] = yields, sleeps

    def all_reduce(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """All-reduce x over the processes in place, or add the result to `onto`, a tensor of the
        same size.

        x: float32, contiguous, no larger than a slot. The result is invalid if `broken` is true
        afterwards.
        """
        args = self._args
        args[_X], args[_COUNT] = x.data_ptr(), x.numel()
        if onto is None:
            self._in_place(args, 1)
            return x
        args[_ONTO] = onto.data_ptr()
        self._onto(args, 1)
        return onto

    @property
    def broken(self) -> bool:
        """Whether an all-reduce since the last call of `join` was abandoned.

        A rank abandons an all-reduce if a process has failed, or if rank 0 has begun another round,
        which ranks enter by `join`.
        """
        return bool(self._state[_BROKEN])

    def join(self, round: int) -> None:
        self._state[_MY_ROUND], self._state[_BROKEN] = round, 0


__all__ = ["FAILED", "FAILED_ON", "LINE_WORDS", "ROUND", "CompilerUnavailable", "Meeting"]
