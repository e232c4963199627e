"""Gated DeltaNet (arXiv 2412.06464) and Kimi Delta Attention (arXiv 2510.26692), as two kernels
generated for a shape of heads.

    mix     convolutions, normalised queries and keys, decays and betas; a work item is a head
    walk    recurrent states, and norm and gate of the results; a work item is a value head

Columns of a head's state are independent. So `walk` processes a few columns of a prompt's state at
a time, which stay in the first-level cache. For each token it passes once over these columns: it
applies the decay, adds the correction, and multiplies the state by the token's query and by the
next token's key. Kimi has a decay per key element, that is, per row of the state. The decayed state
times a key equals the state times the decayed key.
"""

import ctypes
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kernels.cpu.codegen.compiler import NativeFunction, bits, compile_or_none
from kernels.cpu.codegen.ir import IRWriter, Value, constant, module
from kernels.cpu.codegen.processor import lanes
from kernels.cpu.codegen.scratch import scratch
from kernels.cpu.recurrent.convolution import OWN, Convolution, put_convolution
from kernels.cpu.recurrent.entries import (
    TOKENS,
    Entries,
    Entry,
    between,
    by_tokens,
    clear,
    clear_padding,
    inverse_root,
    own_scratch,
    parts,
    put_entries,
    rows_of,
    square_sum,
    threads_for,
    write_loop,
)
from kernels.metadata import AttentionMeta
from kernels.recurrent.delta_rule import EPS, DeltaInputs

# Indices of the kernels' arguments in args.
_MIXED, _A, _A_STRIDE, _B, _B_STRIDE, _DECAY, _DT_BIAS, _MOST = range(OWN, OWN + 8)
_STATE, _Z, _Z_STRIDE, _NORM, _EPS, _OUT, _SCRATCH, _WORDS = range(OWN + 8, OWN + 16)
_COLUMNS = 2  # vectors of a state's columns that are processed at once
_WIDE = 8  # vectors of columns that are processed at once in a decode


@dataclass(frozen=True)
class DeltaShape:
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    taps: int
    by_key: bool = False

    @property
    def sides(self) -> int:
        """The number of vectors that `mix` writes per token and key head.

        The vectors are a query and a key. With a decay per key element, decays and a decayed key
        are added.
        """
        return 4 if self.by_key else 2

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size

    @property
    def mixed(self) -> int:
        """The number of float32 numbers that `mix` writes per token."""
        more = (self.sides - 2) * self.key_heads * self.key_size
        return self.channels + more + 2 * self.value_heads

    def floats(self, size: int) -> int:
        """Return the size of a thread's scratch memory, in float32 elements."""
        return _COLUMNS * size * self.key_size + TOKENS * len(parts(self.value_size, size)) * size


class _Mixed:
    """The layout of the output of `mix` for all tokens of the step.

    In memory are first queries and keys, and with a decay per key element decays and decayed keys,
    each [heads, tokens, key_size]. Then come values by head, decays per head by token, and betas by
    token.
    """

    def __init__(self, w: IRWriter, shape: DeltaShape, tokens: Value) -> None:
        self._w, self._shape, self._tokens = w, shape, tokens
        self._keys = w.argument(_MIXED, "ptr")
        sides = w.mul(tokens, shape.sides * shape.key_heads * shape.key_size)
        self._values = w.at(self._keys, sides)
        every = w.mul(tokens, shape.value_heads * shape.value_size)
        self._decays = w.at(self._values, every)
        self._betas = w.at(self._decays, w.mul(tokens, shape.value_heads))

    def key(self, head: Value, token: Value, side: int = 0) -> Value:
        """Return the address of a vector of a token and head.

        side: 0: query, 1: key, 2: decays of the key's elements, 3: decayed key.
        """
        if side:
            head = self._w.add(head, side * self._shape.key_heads)
        row = self._w.add(self._w.mul(head, self._tokens), token)
        return self._w.at(self._keys, self._w.mul(row, self._shape.key_size))

    def value(self, head: Value, token: Value) -> Value:
        row = self._w.add(self._w.mul(head, self._tokens), token)
        return self._w.at(self._values, self._w.mul(row, self._shape.value_size))

    def decay(self, token: Value, head: Value | int) -> Value:
        return self._w.at(
            self._decays, self._w.add(self._w.mul(token, self._shape.value_heads), head)
        )

    def beta(self, token: Value, head: Value | int) -> Value:
        return self._w.at(
            self._betas, self._w.add(self._w.mul(token, self._shape.value_heads), head)
        )


def _mix(shape: DeltaShape, size: int) -> tuple[IRWriter, str]:
    w = IRWriter(size)
    entries = Entries(w)
    conv = Convolution(w, shape.channels, shape.taps, biased=False)
    mixed = _Mixed(w, shape, entries.tokens)
    a, b = w.argument(_A, "ptr"), w.argument(_B, "ptr")
    a_stride, b_stride = w.argument(_A_STRIDE), w.argument(_B_STRIDE)
    decay, bias = w.argument(_DECAY, "ptr"), w.argument(_DT_BIAS, "ptr")
    most = w.spread(w.load(w.at("%args", _MOST, "i64"), "float"))
    heads = 2 * shape.key_heads
    key_parts, value_parts = parts(shape.key_size, size), parts(shape.value_size, size)

    def gates(entry: Entry) -> None:
        for at, count in parts(shape.value_heads, size):
            rate = shift = ""
            if not shape.by_key:
                rate = w.exp(w.load_some(w.at(decay, at), count))
                rate = w.op(f"fneg {w.vector} {rate}")
                shift = w.load_some(w.at(bias, at), count)

            def token(index: Value, at: int = at, count: int = count, rate: Value = rate,
                      shift: Value = shift) -> None:  # fmt: skip
                row = w.add(entry.begin, index)
                if not shape.by_key:
                    step = w.load_some(w.at(w.at(a, w.mul(row, a_stride)), at), count)
                    step = w.softplus(w.binary("fadd", step, shift))
                    factor = w.exp(w.binary("fmul", rate, step))
                    w.store_some(factor, mixed.decay(row, at), count)
                part = w.sigmoid(w.load_some(w.at(w.at(b, w.mul(row, b_stride)), at), count))
                w.store_some(w.binary("fmul", part, most), mixed.beta(row, at), count)

            write_loop(w, 0, entry.count, token)

    def key(entry: Entry, head: Value) -> None:
        query = w.op(f"icmp slt i64 {head}, {shape.key_heads}")
        length = constant(shape.key_size**-0.5)
        length = w.op(f"select i1 {query}, float {length}, float {constant(1.0)}")

        def found(token: Value, values: list[Value]) -> None:
            values = [w.silu(value) for value in values]
            total = w.op(f"fadd float {square_sum(w, values)}, {constant(EPS)}")
            scale = w.spread(w.op(f"fmul float {inverse_root(w, total)}, {length}"))
            target = mixed.key(head, token)
            values = [w.binary("fmul", value, scale) for value in values]
            for (at, count), value in zip(key_parts, values, strict=True):
                w.store_some(value, w.at(target, at), count)
            if shape.by_key:
                w.when(w.op(f"xor i1 {query}, true"), lambda: decayed(token, values))

        def decayed(token: Value, values: list[Value]) -> None:
            """Generate the store of the decay of each key element, and of the decayed key."""
            own = w.sub(head, shape.key_heads)
            first = w.mul(own, shape.key_size)
            line = w.at(a, w.add(w.mul(token, a_stride), first))
            rate = w.exp(w.spread(w.load(w.at(decay, own), "float")))
            rate = w.op(f"fneg {w.vector} {rate}")
            for (at, count), value in zip(key_parts, values, strict=True):
                shift = w.load_some(w.at(bias, w.add(first, at)), count)
                step = w.binary("fadd", w.load_some(w.at(line, at), count), shift)
                factor = w.exp(w.binary("fmul", rate, w.softplus(step)))
                w.store_some(factor, w.at(mixed.key(own, token, 2), at), count)
                value = w.binary("fmul", value, factor)
                w.store_some(value, w.at(mixed.key(own, token, 3), at), count)

        conv.run(entry, w.mul(head, shape.key_size), shape.key_size, found)

    def value(entry: Entry, head: Value) -> None:
        def found(token: Value, values: list[Value]) -> None:
            target = mixed.value(head, token)
            for (at, count), value in zip(value_parts, values, strict=True):
                w.store_some(w.silu(value), w.at(target, at), count)

        first = w.add(w.mul(head, shape.value_size), heads * shape.key_size)
        conv.run(entry, first, shape.value_size, found)

    def work(entry: Entry, item: Value) -> None:
        between(w, item, 0, 1, lambda _: gates(entry))
        between(w, item, 1, 1 + heads, lambda head: key(entry, head))
        end = 1 + heads + shape.value_heads
        between(w, item, 1 + heads, end, lambda head: value(entry, head))

    entries.claim(1 + heads + shape.value_heads, work)
    return w, "void @mix(ptr %args)"


class _Walk:
    """The generator of the update of a value head's state by the tokens of a sequence (entry)."""

    def __init__(self, w: IRWriter, shape: DeltaShape, mixed: _Mixed, tile: Value) -> None:
        self._w, self._shape, self._mixed, self._tile = w, shape, mixed, tile

    def rows(self, start: list[Value], body) -> list[Value]:  # type: ignore[no-untyped-def]
        """Generate a loop of carried = body(row, carried) over the state's rows.

        The loop is unrolled by up to four. start: the initial values. Returns the final values.
        """
        w, keys = self._w, self._shape.key_size
        step = next(step for step in (4, 2, 1) if keys % step == 0)

        def keys_step(row: Value, *carried: Value) -> list[Value]:
            held = list(carried)
            for ahead in range(step):
                held = body(w.add(row, ahead) if ahead else row, held)
            return held

        return w.loop(0, keys, [(w.vector, value) for value in start], keys_step, step=step)

    def _number(self, line: Value, row: Value) -> Value:
        return self._w.spread(self._w.load(self._w.at(line, row), "float"))

    def _looking(self, key_head: Value, token: Value) -> Value:
        """Return the address of the vector to multiply by the state before the token's decay.

        The vector is the key, or with a decay per key element the decayed key. Its product with the
        state is the argument `known` of `_correction`.
        """
        return self._mixed.key(key_head, token, 3 if self._shape.by_key else 1)

    def _left(self, value: Value, row: Value, decay: Value) -> Value:
        """Return a row of the state after the decay.

        value: a vector of the row before the decay. decay: from `_correction`.
        """
        factor = self._number(decay, row) if self._shape.by_key else decay
        return self._w.binary("fmul", value, factor)

    def _correction(
        self, head: Value, token: Value, column: Value, counts: list[int], known: list[Value]
    ) -> tuple[Value, list[Value]]:
        """Return a token's decay and its correction, beta * (v - key @ decayed state).

        With a decay per key element, the decay is the address of a number per row, else a vector.

        column: first column of the state.
        counts: used lanes of each vector of columns.
        known: the product of `_looking`'s vector and the state, for each vector of columns.
        """
        w, mixed, by_key = self._w, self._mixed, self._shape.by_key
        if by_key:
            decay, negative = mixed.key(head, token, 2), w.all(-1.0)
        else:
            decay = w.spread(w.load(mixed.decay(token, head), "float"))
            negative = w.op(f"fneg {w.vector} {decay}")
        beta = w.spread(w.load(mixed.beta(token, head), "float"))
        value = w.at(mixed.value(head, token), column)
        wrong = []
        for number, count in enumerate(counts):
            wanted = w.load_some(w.at(value, number * w.lanes), count)
            apart = w.fma(negative, known[number], wanted)
            wrong.append(w.binary("fmul", apart, beta))
        return decay, wrong

    def lone(
        self, head: Value, key_head: Value, token: Value, state: Value, column: Value,
        counts: list[int], raw: Value,
    ) -> None:  # fmt: skip
        """Generate the update of the state's columns from `column` on for one token, in place.

        counts: used lanes of each vector of columns. raw: address of the results.
        """
        w, values = self._w, self._shape.value_size
        query = self._mixed.key(key_head, token)
        key, looking = self._mixed.key(key_head, token, 1), self._looking(key_head, token)
        zeros = ["zeroinitializer"] * len(counts)

        def line(row: Value) -> Value:
            return w.at(state, w.add(w.mul(row, values), column))

        def look(row: Value, sums: list[Value]) -> list[Value]:
            place, factor = line(row), self._number(looking, row)
            return [
                w.fma(w.load_some(w.at(place, n * w.lanes), count), factor, sums[n])
                for n, count in enumerate(counts)
            ]

        known = self.rows(zeros, look)
        decay, wrong = self._correction(head, token, column, counts, known)

        def change(row: Value, sums: list[Value]) -> list[Value]:
            place, factor, asked = line(row), self._number(key, row), self._number(query, row)
            out = []
            for n, count in enumerate(counts):
                at = w.at(place, n * w.lanes)
                new_state = self._left(w.load_some(at, count), row, decay)
                new_state = w.fma(factor, wrong[n], new_state)
                w.store_some(new_state, at, count)
                out.append(w.fma(asked, new_state, sums[n]))
            return out

        for n, value in enumerate(self.rows(zeros, change)):
            w.store(value, w.at(raw, w.add(column, n * w.lanes)))

    def compute_tokens(
        self, head: Value, key_head: Value, first: Value, end: Value, state: Value, column: Value,
        counts: list[int], raw: Value, wide: int,
    ) -> None:  # fmt: skip
        """Generate the update for tokens [first, end); for a single token see `lone`.

        raw: address of the results. wide: floats from a token's results to the next token's.
        Other arguments are those of `lone`.
        """
        w, values, tile = self._w, self._shape.value_size, self._tile
        mixed, width = self._mixed, len(counts) * w.lanes
        zeros = ["zeroinitializer"] * len(counts)

        def bring(row: Value, sums: list[Value]) -> list[Value]:
            place = w.at(state, w.add(w.mul(row, values), column))
            state_row, factor, out = w.at(tile, w.mul(row, width)), self._number(begin, row), []
            for n, count in enumerate(counts):
                value = w.load_some(w.at(place, n * w.lanes), count)
                w.store(value, w.at(state_row, n * w.lanes))
                out.append(w.fma(value, factor, sums[n]))
            return out

        begin = self._looking(key_head, first)
        known = self.rows(zeros, bring)

        def token(index: Value, *known: Value) -> list[Value]:
            decay, wrong = self._correction(head, index, column, counts, list(known))
            query, key = mixed.key(key_head, index), mixed.key(key_head, index, 1)
            # The last token has no next key. Read its own key; the product is not used.
            last = [("i64", w.add(index, 1)), ("i64", w.sub(end, 1))]
            following = self._looking(key_head, w.call("i64", "llvm.smin.i64", last))

            def change(row: Value, sums: list[Value]) -> list[Value]:
                state_row = w.at(tile, w.mul(row, width))
                factor, asked = self._number(key, row), self._number(query, row)
                after, corrections, seen = self._number(following, row), [], []
                for n in range(len(counts)):
                    at = w.at(state_row, n * w.lanes)
                    new_state = self._left(w.load(at), row, decay)
                    new_state = w.fma(factor, wrong[n], new_state)
                    w.store(new_state, at)
                    corrections.append(w.fma(asked, new_state, sums[n]))
                    seen.append(w.fma(after, new_state, sums[len(counts) + n]))
                return corrections + seen

            sums = self.rows(zeros * 2, change)
            place = w.at(raw, w.add(w.mul(w.sub(index, first), wide), column))
            for n in range(len(counts)):
                w.store(sums[n], w.at(place, n * w.lanes))
            return sums[len(counts) :]

        w.loop(first, end, [(w.vector, value) for value in known], token)

        def store_row(row: Value) -> None:
            place = w.at(state, w.add(w.mul(row, values), column))
            state_row = w.at(tile, w.mul(row, width))
            for n, count in enumerate(counts):
                w.store_some(w.load(w.at(state_row, n * w.lanes)), w.at(place, n * w.lanes), count)

        write_loop(w, 0, self._shape.key_size, store_row)


def _walk(shape: DeltaShape, size: int) -> tuple[IRWriter, str]:
    w = IRWriter(size)
    entries = Entries(w)
    mixed = _Mixed(w, shape, entries.tokens)
    state, z, norm, out = (w.argument(word, "ptr") for word in (_STATE, _Z, _NORM, _OUT))
    z_stride, eps = w.argument(_Z_STRIDE), w.load(w.at("%args", _EPS, "i64"), "float")
    own = own_scratch(w, _SCRATCH, shape.floats(size))
    raw = w.at(own, _COLUMNS * size * shape.key_size)
    walk = _Walk(w, shape, mixed, own)
    every = parts(shape.value_size, size)
    wide = len(every) * size
    matrix = shape.key_size * shape.value_size

    def by_columns(most: int, body) -> None:  # type: ignore[no-untyped-def]
        """Generate body(first column, used lanes of each vector) for `most` vectors at a time.

        The calls cover all columns of the state.
        """
        full = shape.value_size // (most * size) * most * size

        def group(column: Value) -> list[Value]:
            body(column, [size] * most)
            return []

        w.loop(0, full, [], group, step=most * size)
        if full < shape.value_size:
            body(str(full), [count for at, count in every if at >= full])

    def work(entry: Entry, head: Value) -> None:
        key_head = w.op(f"udiv i64 {head}, {shape.value_heads // shape.key_heads}")
        row = w.add(w.mul(entry.row, shape.value_heads), head)
        mine = w.at(state, w.mul(row, matrix))
        w.when(entry.begins, lambda: clear(w, mine, matrix))

        def finish(token: Value, results: Value) -> None:
            """Generate the norm and gate of a token's results. results: their address."""
            values = [w.load(w.at(results, at)) for at, _ in every]
            mean = w.op(f"fdiv float {square_sum(w, values)}, {constant(shape.value_size)}")
            scale = w.spread(inverse_root(w, w.op(f"fadd float {mean}, {eps}")))
            gate = w.at(z, w.add(w.mul(token, z_stride), w.mul(head, shape.value_size)))
            place = w.add(w.mul(token, shape.value_heads), head)
            target = w.at(out, w.mul(place, shape.value_size))
            for (at, count), value in zip(every, values, strict=True):
                value = w.binary("fmul", value, scale)
                value = w.binary("fmul", value, w.load_some(w.at(norm, at), count))
                opened = w.load_some(w.at(gate, at), count)
                opened = w.sigmoid(opened) if shape.by_key else w.silu(opened)
                value = w.binary("fmul", value, opened)
                w.store_some(value, w.at(target, at), count)

        def tokens(first: Value, end: Value) -> None:
            first, end = w.add(entry.begin, first), w.add(entry.begin, end)
            alone = w.op(f"icmp eq i64 {w.sub(end, first)}, 1")
            w.when(alone, lambda: by_columns(_WIDE, lambda column, counts: walk.lone(
                head, key_head, first, mine, column, counts, raw)))  # fmt: skip
            more = w.op(f"xor i1 {alone}, true")
            w.when(more, lambda: by_columns(_COLUMNS, lambda column, counts: walk.compute_tokens(
                head, key_head, first, end, mine, column, counts, raw, wide)))  # fmt: skip

            def finish_token(token: Value) -> None:
                finish(token, w.at(raw, w.mul(w.sub(token, first), wide)))

            write_loop(w, first, end, finish_token)

        by_tokens(w, entry.count, tokens)

    entries.claim(shape.value_heads, work)
    return w, "void @walk(ptr %args)"


@lru_cache(maxsize=16)
def _functions(shape: DeltaShape) -> tuple[NativeFunction, NativeFunction] | None:
    functions = compile_or_none(lambda size: module([_mix(shape, size), _walk(shape, size)]))
    return functions and (functions["mix"], functions["walk"])


def delta_rule(inputs: DeltaInputs, meta: AttentionMeta) -> Tensor | None:
    """Return the normed and gated results of a delta rule; update tails and states in place.

    The rule is `Kernels.kimi_delta` for heads with `by_key`, else `Kernels.gated_delta`.

    Returns None if no kernel can be generated.
    """
    x, z, a, b, heads, tail, state, _ = inputs
    shape = DeltaShape(
        heads.key_heads,
        heads.value_heads,
        heads.key_size,
        heads.value_size,
        heads.conv.shape[1],
        heads.by_key,
    )
    functions = _functions(shape)
    if functions is None or not rows_of(x, z, a, b):
        return None
    mix, walk = functions
    tokens, args = len(x), (ctypes.c_int64 * _WORDS)()
    put_entries(args, meta, tokens)
    put_convolution(args, x, heads.conv, None, tail)
    mixed = x.new_empty(tokens, shape.mixed)
    out = x.new_empty(tokens, heads.value_heads * heads.value_size)
    args[_MIXED], args[_OUT], args[_STATE] = mixed.data_ptr(), out.data_ptr(), state.data_ptr()
    for word, tensor in ((_A, a), (_B, b), (_Z, z)):
        args[word], args[word + 1] = tensor.data_ptr(), tensor.stride(0)
    args[_DECAY], args[_DT_BIAS] = heads.decay.data_ptr(), heads.bias.data_ptr()
    args[_NORM], args[_EPS] = heads.norm.data_ptr(), bits(heads.eps)
    args[_MOST] = bits(heads.most)
    args[_SCRATCH] = scratch(torch.get_num_threads() * shape.floats(lanes()))
    mix(args, threads_for(mixed.numel()))
    walk(args, threads_for(len(meta.kv_len) * state[0].numel()))
    return clear_padding(out, meta)
