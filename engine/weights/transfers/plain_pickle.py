"""read_plain: reads the plain data of a pickle without executing the pickle.

Opcodes are interpreted one by one. Names that the caller does not list are refused, and so is every
opcode that does not build data. A call of a listed function becomes a `Call` and is not executed.
"""

import pickletools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from engine.errors import UpdateFailed

_SIZE, _ORDERED = "torch.Size", "collections.OrderedDict"


class Name(str):
    """The name of a function or type in a pickle, which is not imported."""


@dataclass(slots=True)
class Call:
    """A call, or the construction of an object, in a pickle, as data.

    state: attributes that the pickle sets on the result; None = none.
    """

    function: str
    arguments: tuple[Any, ...]
    state: Any = None


class _Mark:
    """A mark on the stack: the beginning of a tuple, a list or the items of a dictionary."""


def read_plain(raw: bytes, names: Collection[str], field: str, calls: Collection[str] = ()) -> Any:
    """Return the data of a pickle.

    names: functions and types that the pickle may name.
    field: the request's field that has the pickle, for errors.
    calls: functions and classes that the pickle may call.
    Raises UpdateFailed for a pickle that holds anything else.
    """
    reader = _Reader({*names, *calls, _SIZE, _ORDERED}, field, calls)
    try:
        return reader.read(raw)
    except (ValueError, IndexError, KeyError, TypeError, AssertionError) as error:
        raise refused(f"{field} cannot be read: {error!r}") from None


class _Reader:
    """Reads the plain data of one pickle."""

    def __init__(self, names: Collection[str], field: str, calls: Collection[str]) -> None:
        self._names = names
        self._field = field
        self._calls = calls
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def read(self, raw: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(raw):
            if opcode.name == "STOP":
                (value,) = self._stack
                return value
            self._do(opcode.name, argument)
        raise ValueError("no end")

    def _do(self, name: str, argument: Any) -> None:
        stack, memo = self._stack, self._memo
        if name in _LITERALS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name]())
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "GLOBAL":
            stack.append(self._name(*argument.split(" ", 1)))
        elif name == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            stack.append(self._name(module, attribute))
        elif name in ("REDUCE", "NEWOBJ"):
            arguments, function = stack.pop(), stack.pop()
            stack.append(self._call(function, arguments))
        elif name == "BUILD":
            state = stack.pop()
            assert isinstance(stack[-1], Call)
            stack[-1].state = state
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            stack[-count:] = [tuple(stack[-count:])]
        elif name == "TUPLE":
            stack.append(tuple(self._since_mark()))
        elif name in ("APPEND", "APPENDS"):
            items = self._since_mark() if name == "APPENDS" else [stack.pop()]
            assert isinstance(stack[-1], list)
            stack[-1].extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            many = name == "SETITEMS"
            items = self._since_mark() if many else [stack.pop(-2), stack.pop()]
            assert isinstance(stack[-1], dict)
            stack[-1].update(zip(items[::2], items[1::2], strict=True))
        elif name not in ("PROTO", "FRAME"):
            raise refused(f"{self._field} holds {name}, and nothing in it is run")

    def _since_mark(self) -> list[Any]:
        items: list[Any] = []
        while not isinstance(item := self._stack.pop(), _Mark):
            items.append(item)
        return items[::-1]

    def _name(self, module: Any, attribute: Any) -> Name:
        """Return "module.attribute" as a Name. Raises UpdateFailed for names that are not
        listed."""
        assert isinstance(module, str) and isinstance(attribute, str)
        name = f"{module}.{attribute}"
        if name not in self._names:
            raise refused(f"{self._field} names {name}; only tensors may be in it")
        return Name(name)

    def _call(self, function: Any, arguments: Any) -> Any:
        """Return the object that replaces a call. Raises UpdateFailed for other calls."""
        assert isinstance(function, Name) and isinstance(arguments, tuple)
        if function == _SIZE:
            (size,) = arguments
            return tuple(size)
        if function == _ORDERED and not arguments:
            return {}
        if function not in self._calls:
            raise refused(f"{self._field} calls {function}, and nothing in it is run")
        return Call(function, arguments)


_LITERALS = {
    "BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE", "BINBYTES",
    "SHORT_BINBYTES", "BINBYTES8",
}  # fmt: skip
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple,
    "MARK": _Mark,
}


def refused(message: str) -> UpdateFailed:
    return UpdateFailed(message, param="update_info")
