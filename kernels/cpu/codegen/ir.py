"""IRWriter: writes LLVM IR text with loops, for kernels whose shapes are known at compile time.

Values and types are strings ("%7", "42"; "i64", "<16 x float>"). Vectors have ``lanes`` float32
elements, if a docstring names no other type. Addresses need no alignment.
"""

import struct
from collections.abc import Callable, Sequence
from itertools import count

Value = str


class IRWriter:
    """The body of one function, written instruction by instruction.

    Most functions have the signature void name(ptr %args), which is passed to `text`.
    """

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self.vector = f"<{lanes} x float>"
        self.integers = f"<{lanes} x i32>"
        self._lines: list[str] = []
        self._names = count()
        self._block = "entry"
        self._called: set[str] = set()

    # Text

    def text(self, signature: str) -> str:
        body = "\n".join(self._lines)
        return f"define {signature} {{\nentry:\n{body}\n  ret void\n}}\n"

    @property
    def declarations(self) -> set[str]:
        return self._called

    def op(self, text: str) -> Value:
        """Write an instruction and return the name of its result."""
        name = f"%v{next(self._names)}"
        self._lines.append(f"  {name} = {text}")
        return name

    def do(self, text: str) -> None:
        """Write an instruction that has no result."""
        self._lines.append(f"  {text}")

    def call(self, result: str, function: str, arguments: Sequence[tuple[str, Value]]) -> Value:
        """Write a call of an intrinsic and return its result.

        result: type of the result. arguments: (type, value) of each argument.
        """
        types = ", ".join(kind for kind, _ in arguments)
        self._called.add(f"declare {result} @{function}({types})")
        operands = ", ".join(f"{kind} {value}" for kind, value in arguments)
        return self.op(f"call {result} @{function}({operands})")

    # Control

    def label(self, name: str) -> None:
        self._lines.append(f"{name}:")
        self._block = name

    def loop(
        self,
        begin: Value | int,
        end: Value | int,
        carried: Sequence[tuple[str, Value]],
        body: Callable[..., Sequence[Value]],
        step: int = 1,
    ) -> list[Value]:
        """Write `for i in range(begin, end, step): carried = body(i, *carried)`.

        carried: (type, start value) of each carried value. Returns the carried values after the
        loop.
        """
        number = next(self._names)
        head, inside, done = f"head{number}", f"body{number}", f"done{number}"
        before = self._block
        self.do(f"br label %{head}")
        self.label(head)
        i = f"%i{number}"
        phis = [f"%c{number}.{j}" for j in range(len(carried))]
        first = len(self._lines)
        self._lines += [""] * (1 + len(carried))
        more = self.op(f"icmp slt i64 {i}, {end}")
        self.do(f"br i1 {more}, label %{inside}, label %{done}")
        self.label(inside)
        values = body(i, *phis)
        following = self.op(f"add nsw i64 {i}, {step}")
        self._lines[first] = f"  {i} = phi i64 [{begin}, %{before}], [{following}, %{self._block}]"
        for j, ((kind, start), value) in enumerate(zip(carried, values, strict=True)):
            self._lines[first + 1 + j] = (
                f"  {phis[j]} = phi {kind} [{start}, %{before}], [{value}, %{self._block}]"
            )
        self.do(f"br label %{head}")
        self.label(done)
        return phis

    def when(self, condition: Value, body: Callable[[], None]) -> None:
        """Write `if condition: body()`."""
        number = next(self._names)
        self.do(f"br i1 {condition}, label %then{number}, label %end{number}")
        self.label(f"then{number}")
        body()
        self.do(f"br label %end{number}")
        self.label(f"end{number}")

    def claim(
        self, counter: Value, chunk: Value, total: Value, body: Callable[[Value], None]
    ) -> None:
        """Write a loop of body(item) over [0, total); threads take `chunk` items at a time.

        counter: address of the i64 that threads share.
        """
        number = next(self._names)
        take, work, done = f"take{number}", f"work{number}", f"left{number}"
        self.do(f"br label %{take}")
        self.label(take)
        begin = self.op(f"atomicrmw add ptr {counter}, i64 {chunk} monotonic")
        some = self.op(f"icmp slt i64 {begin}, {total}")
        self.do(f"br i1 {some}, label %{work}, label %{done}")
        self.label(work)
        end = self.call("i64", "llvm.smin.i64", [("i64", self.add(begin, chunk)), ("i64", total)])

        def iteration(item: Value) -> list[Value]:
            body(item)
            return []

        self.loop(begin, end, [], iteration)
        self.do(f"br label %{take}")
        self.label(done)

    def claim_shares(
        self, counter: Value, threads: Value, total: Value, body: Callable[[Value], None]
    ) -> None:
        """Write a loop of body(item) over [0, total); threads take ranges of items.

        A thread's first range is 7/8 of an equal share of all items, so that it streams memory.
        Later ranges are half of an equal share of the remaining items, at least one item, so that
        threads end together (guided self-scheduling).

        counter: address of the i64 that threads share.
        """
        number = next(self._names)
        take, some = f"take{number}", f"some{number}"
        work, done = f"work{number}", f"left{number}"
        first = self.op(f"udiv i64 {self.mul(total, 7)}, {self.mul(threads, 8)}")
        self.do(f"br label %{take}")
        self.label(take)
        begin = self.op(f"load atomic i64, ptr {counter} monotonic, align 8")
        remaining = self.sub(total, begin)
        more = self.op(f"icmp sgt i64 {remaining}, 0")
        self.do(f"br i1 {more}, label %{some}, label %{done}")
        self.label(some)
        share = self.op(f"udiv i64 {remaining}, {self.mul(threads, 2)}")
        early = self.op(f"icmp slt i64 {begin}, {self.mul(first, threads)}")
        share = self.op(f"select i1 {early}, i64 {first}, i64 {share}")
        end = self.add(begin, self.call("i64", "llvm.smax.i64", [("i64", share), ("i64", "1")]))
        pair = self.op(f"cmpxchg ptr {counter}, i64 {begin}, i64 {end} monotonic monotonic")
        won = self.op(f"extractvalue {{ i64, i1 }} {pair}, 1")
        self.do(f"br i1 {won}, label %{work}, label %{take}")
        self.label(work)

        def iteration(item: Value) -> list[Value]:
            body(item)
            return []

        self.loop(begin, end, [], iteration)
        self.do(f"br label %{take}")
        self.label(done)

    # Integers and addresses

    def add(self, a: Value | int, b: Value | int) -> Value:
        return self.op(f"add nsw i64 {a}, {b}")

    def sub(self, a: Value | int, b: Value | int) -> Value:
        return self.op(f"sub nsw i64 {a}, {b}")

    def mul(self, a: Value | int, b: Value | int) -> Value:
        return self.op(f"mul nsw i64 {a}, {b}")

    def at(self, pointer: Value, index: Value | int, kind: str = "float") -> Value:
        """Return the address of the index-th element, of type `kind`, from `pointer` on."""
        return self.op(f"getelementptr {kind}, ptr {pointer}, i64 {index}")

    def argument(self, index: int, kind: str = "i64") -> Value:
        return self.op(f"load {kind}, ptr {self.at('%args', index, 'i64')}")

    # Numbers

    def load(self, pointer: Value, kind: str | None = None) -> Value:
        return self.op(f"load {kind or self.vector}, ptr {pointer}, align 1")

    def store(self, value: Value, pointer: Value, kind: str | None = None) -> None:
        self.do(f"store {kind or self.vector} {value}, ptr {pointer}, align 1")

    def load_some(self, pointer: Value, count: int) -> Value:
        """Load `count` floats into the first lanes of a vector, and zeros into the others.

        Memory after these floats is not read.
        """
        if count == self.lanes:
            return self.load(pointer)
        narrow = f"<{count} x float>"
        return self._picked(self.load(pointer, narrow), narrow, count, range(count))

    def store_some(self, value: Value, pointer: Value, count: int) -> None:
        """Store the first `count` lanes of a float32 vector."""
        if count < self.lanes:
            chosen = ", ".join(f"i32 {lane}" for lane in range(count))
            value = self.op(
                f"shufflevector {self.vector} {value}, {self.vector} poison, "
                f"<{count} x i32> <{chosen}>"
            )
        self.store(value, pointer, f"<{count} x float>")

    def load_columns(self, pointer: Value, columns: int, count: int) -> list[Value]:
        """Load a contiguous matrix [count, columns]; return a vector per column, zero-padded."""
        size = count * columns
        wide = f"<{size} x float>"
        rows = self.load(pointer, wide)
        return [
            self._picked(rows, wide, size, range(column, size, columns))
            for column in range(columns)
        ]

    def _picked(self, value: Value, kind: str, size: int, lanes: range) -> Value:
        """Return a vector with a range of lanes of `value`, padded with zeros.

        kind: type of value. size: number of value's lanes. lanes: the range.
        """
        chosen = [*lanes, *[size] * (self.lanes - len(lanes))]
        mask = ", ".join(f"i32 {lane}" for lane in chosen)
        return self.op(
            f"shufflevector {kind} {value}, {kind} zeroinitializer, <{self.lanes} x i32> <{mask}>"
        )

    def all(self, number: float) -> Value:
        """Return a float32 vector constant with the same number in all lanes."""
        return f"splat (float {constant(number)})"

    def whole(self, number: int) -> Value:
        return f"splat (i32 {number})"

    def spread(self, scalar: Value, kind: str = "float") -> Value:
        """Return a vector with a scalar of type `kind` in all lanes."""
        vector = f"<{self.lanes} x {kind}>"
        first_lane = self.op(f"insertelement {vector} poison, {kind} {scalar}, i64 0")
        zero = f"<{self.lanes} x i32> zeroinitializer"
        return self.op(f"shufflevector {vector} {first_lane}, {vector} poison, {zero}")

    def prefetch(self, pointer: Value, to_write: bool = False) -> None:
        """Prefetch a cache line into the second-level cache, or with `to_write` into the first.

        Early prefetches into the first-level cache would evict data that is being read.
        """
        self._called.add("declare void @llvm.prefetch.p0(ptr, i32, i32, i32)")
        how = "i32 1, i32 3" if to_write else "i32 0, i32 2"
        self.do(f"call void @llvm.prefetch.p0(ptr {pointer}, {how}, i32 1)")

    def binary(self, name: str, a: Value, b: Value) -> Value:
        return self.op(f"{name} {self.vector} {a}, {b}")

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        kind = self.vector
        return self.call(kind, f"llvm.fma.v{self.lanes}f32", [(kind, a), (kind, b), (kind, c)])

    def store_pairs(self, value: Value, pointer: Value) -> None:
        """Store a vector as bfloat16, for `products.dot_pairs`, in one instruction instead of nine.

        Rounding is that of `store_float`, but numbers below 1e-38 become 0. `processor.dot_bf16`
        must be true.
        """
        narrow = f"<{self.lanes} x bfloat>"
        self.store(self.op(f"fptrunc {self.vector} {value} to {narrow}"), pointer, narrow)

    def sum(self, vector: Value) -> Value:
        """Return the sum of a vector's lanes as a float, by pairwise summation."""
        name, kind = f"llvm.vector.reduce.fadd.v{self.lanes}f32", self.vector
        self._called.add(f"declare float @{name}(float, {kind})")
        return self.op(f"call reassoc float @{name}(float -0.0, {kind} {vector})")

    def sum_of_pairs(self, vector: Value) -> Value:
        """Return the sum of a vector's lanes as a float, with the same bits as from `sums`."""
        stride = 1
        while stride < self.lanes:
            other = self.swapped(vector, stride, self.vector)
            vector, stride = self.binary("fadd", vector, other), 2 * stride
        return self.op(f"extractelement {self.vector} {vector}, i64 0")

    def sums(self, vectors: Sequence[Value]) -> Value:
        """Return a vector whose lane i is the sum of the i-th vector's lanes, added pairwise.

        `sums` takes a few instructions per vector, `sum` a dozen that depend on each other.
        """
        rows, stride = list(vectors), 1
        while len(rows) > 1:
            # Lanes whose index has the stride's bit set come from the second vector, the others
            # from the first.
            halves = []
            for a, b in zip(rows[::2], rows[1::2], strict=True):
                parts = []
                for side in (0, stride):
                    lane = ", ".join(
                        f"i32 {(j & stride and self.lanes) + (j & ~stride | side)}"
                        for j in range(self.lanes)
                    )
                    parts.append(
                        self.op(
                            f"shufflevector {self.vector} {a}, {self.vector} {b}, "
                            f"<{self.lanes} x i32> <{lane}>"
                        )
                    )
                halves.append(self.binary("fadd", *parts))
            rows, stride = halves, 2 * stride
        return rows[0]

    def largest(self, vector: Value) -> Value:
        """Return a vector's maximum, broadcast to all lanes. NaN is handled as in `maximum`."""
        stride = self.lanes // 2
        while stride:
            vector = self.maximum(vector, self.swapped(vector, stride, self.vector))
            stride //= 2
        return vector

    def swapped(self, vector: Value, stride: int, kind: str) -> Value:
        """Return a vector with lanes permuted: lane j of the result is lane j ^ stride."""
        lane = ", ".join(f"i32 {j ^ stride}" for j in range(self.lanes))
        return self.op(
            f"shufflevector {kind} {vector}, {kind} poison, <{self.lanes} x i32> <{lane}>"
        )

    def maximum(self, a: Value, b: Value) -> Value:
        more = self.op(f"fcmp ogt {self.vector} {a}, {b}")
        return self.op(f"select <{self.lanes} x i1> {more}, {self.vector} {a}, {self.vector} {b}")

    def larger(self, a: Value, b: Value) -> Value:
        """Return the element-wise maximum of two i32 vectors."""
        operands = [(self.integers, a), (self.integers, b)]
        return self.call(self.integers, f"llvm.smax.v{self.lanes}i32", operands)

    def transpose(self, rows: Sequence[Value]) -> list[Value]:
        """Return the transpose of a square matrix. rows, result: one vector per row."""
        rows, size = list(rows), self.lanes
        stride = 1
        while stride < size:
            for i in (i for i in range(size) if not i & stride):
                a, b = rows[i], rows[i | stride]
                for to, keep in ((i, 0), (i | stride, stride)):
                    # Lane j comes from b if j has the stride's bit set, and from a otherwise.
                    lane = (
                        (j & stride and size) + (j ^ (stride ^ keep if j & stride else keep))
                        for j in range(size)
                    )
                    chosen = ", ".join(f"i32 {j}" for j in lane)
                    rows[to] = self.op(
                        f"shufflevector {self.vector} {a}, {self.vector} {b}, "
                        f"<{size} x i32> <{chosen}>"
                    )
            stride *= 2
        return rows

    def inverse(self, x: Value) -> Value:
        """Return 1 / x with an error of at most 2 ULP, for x neither huge nor tiny.

        With 512-bit registers a division takes as long as eight other instructions.
        """
        if self.lanes < 16:
            return self.binary("fdiv", self.all(1.0), x)
        kind = self.vector
        operands = [(kind, x), (kind, "zeroinitializer"), ("i16", "-1")]
        near = self.call(kind, "llvm.x86.avx512.rcp14.ps.512", operands)
        off = self.fma(self.op(f"fneg {kind} {x}"), near, self.all(1.0))
        return self.fma(near, off, near)

    def exp(self, x: Value, small: bool = False) -> Value:
        """Return e^x with an error of at most 2 ULP; below -87 the result is 0. NaN stays NaN.

        small: whether x is never above 88, which saves the test for an overflow.
        """
        kind, lanes = self.vector, self.lanes
        low = self.op(f"fcmp olt {kind} {x}, {self.all(-87.0)}")
        x = self.op(f"select <{lanes} x i1> {low}, {kind} {self.all(-87.0)}, {kind} {x}")
        if not small:
            high = self.op(f"fcmp ogt {kind} {x}, {self.all(88.0)}")
            x = self.op(f"select <{lanes} x i1> {high}, {kind} {self.all(88.0)}, {kind} {x}")
        # x = n ln 2 + r. Adding 1.5 * 2^23 rounds x / ln 2 to the integer n and leaves n in the low
        # bits.
        shifted = self.fma(x, self.all(1.4426950408889634), self.all(12582912.0))
        n = self.binary("fsub", shifted, self.all(12582912.0))
        r = self.fma(n, self.all(-0.693359375), x)
        r = self.fma(n, self.all(2.12194440e-4), r)
        p = self.all(1.9875691500e-4)
        for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5):
            p = self.fma(p, r, self.all(c))
        p = self.fma(self.binary("fmul", r, r), p, r)
        p = self.binary("fadd", p, self.all(1.0))
        bits = self.op(f"bitcast {kind} {shifted} to {self.integers}")
        bits = self.op(f"shl {self.integers} {bits}, {self.whole(23)}")
        bits = self.op(f"add {self.integers} {bits}, {self.whole(0x3F800000)}")
        power = self.binary("fmul", p, self.op(f"bitcast {self.integers} {bits} to {kind}"))
        # Underflows must be exactly 0: AArch64's BFDOT rounds to odd, so even the tiniest weight of
        # a hidden key would change a sum.
        return self.op(f"select <{lanes} x i1> {low}, {kind} zeroinitializer, {kind} {power}")

    def exp_below(self, x: Value) -> Value:
        """Return e^x for finite x <= 0, with an absolute error of 2e-7; underflow gives 0.

        With AVX-512 it costs half of `exp`. NaN stays NaN.
        """
        if self.lanes < 16:
            return self.exp(x)
        return self._power_of_two(
            x, (1.326469355e-3, 9.671514854e-3, 5.550733954e-2, 0.2402224243, 0.6931470037, 1.0)
        )

    def exp_of_weight(self, x: Value) -> Value:
        """Return e^x for a softmax weight that is then rounded to bfloat16.

        The relative error is 3e-6; x = 0 gives 1, and an underflow at most 1e-38. NaN stays NaN.
        """
        if self.lanes < 16:
            return self.exp(x, small=True)
        return self._power_of_two(
            x, (9.582853232e-3, 5.590642566e-2, 0.240240986, 0.693124193, 1.0)
        )

    def _power_of_two(self, x: Value, series: Sequence[float]) -> Value:
        """Return 2^(x / ln 2), which is e^x.

        series: polynomial of 2^r for r in [-1/2, 1/2], highest power first.
        """
        kind = self.vector
        power = self.binary("fmul", x, self.all(1.4426950408889634))
        whole = self.call(kind, f"llvm.roundeven.v{self.lanes}f32", [(kind, power)])
        r = self.binary("fsub", power, whole)
        p = self.all(series[0])
        for c in series[1:]:
            p = self.fma(p, r, self.all(c))
        operands = [
            (kind, p),
            (kind, whole),
            (kind, "zeroinitializer"),
            ("i16", "-1"),
            ("i32", "4"),
        ]
        return self.call(kind, "llvm.x86.avx512.mask.scalef.ps.512", operands)

    def tanh(self, x: Value) -> Value:
        """Return tanh(x) = 1 - 2 / (e^2x + 1), with an absolute error of 1e-7."""
        above = self.binary("fadd", self.exp(self.binary("fadd", x, x)), self.all(1.0))
        return self.binary("fsub", self.all(1.0), self.binary("fdiv", self.all(2.0), above))

    def counted(self, begin: Value) -> Value:
        """Return the float vector (begin, begin + 1, ...). begin: an i64 value."""
        numbers = ", ".join(f"float {constant(float(i))}" for i in range(self.lanes))
        first = self.spread(self.op(f"sitofp i64 {begin} to float"))
        return self.binary("fadd", first, f"<{numbers}>")

    def sigmoid(self, x: Value) -> Value:
        negative = self.op(f"fneg {self.vector} {x}")
        below = self.binary("fadd", self.exp(negative), self.all(1.0))
        return self.binary("fdiv", self.all(1.0), below)

    def silu(self, x: Value) -> Value:
        return self.binary("fmul", x, self.sigmoid(x))

    def softplus(self, x: Value) -> Value:
        """Return log(1 + e^x) with an error of at most 3 ULP."""
        zero = "zeroinitializer"
        negative = self.op(f"fneg {self.vector} {x}")
        over = self.op(f"fcmp ogt {self.vector} {x}, {zero}")
        kinds = f"<{self.lanes} x i1> {over}, {self.vector}"
        below = self.op(f"select {kinds} {negative}, {self.vector} {x}")
        above = self.op(f"select {kinds} {x}, {self.vector} {zero}")
        # log(1 + y) = 2 artanh(s) with s = y / (2 + y), which is at most 1/3 because y <= 1.
        y = self.exp(below, small=True)
        s = self.binary("fdiv", y, self.binary("fadd", y, self.all(2.0)))
        square = self.binary("fmul", s, s)
        series = self.all(2 / 15)
        for odd in (13, 11, 9, 7, 5, 3, 1):
            series = self.fma(series, square, self.all(2 / odd))
        return self.fma(s, series, above)

    # 16-bit numbers in memory; dtype is "bfloat", "half" or "float".

    def load_as_float(self, pointer: Value, dtype: str) -> Value:
        if dtype == "float":
            return self.load(pointer)
        if dtype == "half":
            narrow = self.load(pointer, f"<{self.lanes} x half>")
            return self.op(f"fpext <{self.lanes} x half> {narrow} to {self.vector}")
        narrow = self.load(pointer, f"<{self.lanes} x i16>")
        wide = self.op(f"zext <{self.lanes} x i16> {narrow} to {self.integers}")
        wide = self.op(f"shl {self.integers} {wide}, {self.whole(16)}")
        return self.op(f"bitcast {self.integers} {wide} to {self.vector}")

    def store_float(self, value: Value, pointer: Value, dtype: str) -> None:
        """Store a float32 vector as dtype, rounded to nearest, ties to even."""
        if dtype == "float":
            self.store(value, pointer)
            return
        if dtype == "half":
            narrow = self.op(f"fptrunc {self.vector} {value} to <{self.lanes} x half>")
            self.store(narrow, pointer, f"<{self.lanes} x half>")
            return
        kind = self.integers
        bits = self.op(f"bitcast {self.vector} {value} to {kind}")
        upper = self.op(f"lshr {kind} {bits}, {self.whole(16)}")
        odd = self.op(f"and {kind} {upper}, {self.whole(1)}")
        carry = self.op(f"add {kind} {odd}, {self.whole(0x7FFF)}")
        rounded = self.op(f"lshr {kind} {self.op(f'add {kind} {bits}, {carry}')}, {self.whole(16)}")
        # Rounding could turn a NaN's bits into another number.
        is_nan = self.op(f"fcmp uno {self.vector} {value}, {value}")
        rounded = self.op(
            f"select <{self.lanes} x i1> {is_nan}, {kind} {self.whole(0x7FC0)}, {kind} {rounded}"
        )
        narrow = self.op(f"trunc {kind} {rounded} to <{self.lanes} x i16>")
        self.store(narrow, pointer, f"<{self.lanes} x i16>")


def constant(number: float) -> str:
    """Return a float32 in LLVM's notation: the bits of the double with the same value."""
    (single,) = struct.unpack("<f", struct.pack("<f", number))
    return "0x" + struct.pack(">d", single).hex().upper()


def module(functions: Sequence[tuple[IRWriter, str]]) -> str:
    """Return the LLVM IR of a module of (function, signature) pairs, with their declarations."""
    declared = sorted(set().union(*(writer.declarations for writer, _ in functions)))
    return "\n".join([*(writer.text(signature) for writer, signature in functions), *declared])
