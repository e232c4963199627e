"""The rule of programmatic dependent launch (kernels/launch/pdl.py), read off every kernel's
source."""

import ast
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

import kernels

pytest.importorskip("triton")

CALLS = ["gdc_wait", "gdc_launch_dependents"]
WRITES = {"store", "atomic_add", "atomic_xchg"}


def early_kernels() -> dict[str, ast.FunctionDef]:
    """Return the kernels that may start before the previous one has ended: those with a PDL
    flag."""
    trees = {}
    for module in pkgutil.walk_packages(kernels.__path__, "kernels."):
        for name, value in vars(importlib.import_module(module.name)).items():
            function: Any = getattr(value, "fn", None)
            if name.endswith("_kernel") and function is not None:
                tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
                assert isinstance(tree, ast.FunctionDef)
                if any(argument.arg == "PDL" for argument in tree.args.args):
                    tree.body = list(statements(tree, function.__globals__))
                    trees[name] = tree
    return trees


def statements(tree: ast.FunctionDef, names: dict[str, Any]) -> Iterator[ast.stmt]:
    """Yield the statements of a kernel; a call that gets PDL is replaced by those of its
    function."""
    for node in tree.body:
        call = node.value if isinstance(node, ast.Assign) else None
        arguments = (
            [ast.unparse(argument) for argument in call.args] if isinstance(call, ast.Call) else []
        )
        if not isinstance(call, ast.Call) or "PDL" not in arguments:
            yield node
            continue
        called = names[ast.unparse(call.func)].fn
        inner = ast.parse(textwrap.dedent(inspect.getsource(called))).body[0]
        assert isinstance(inner, ast.FunctionDef)
        flag = inner.args.args[arguments.index("PDL")].arg
        for child in ast.walk(inner):
            if isinstance(child, ast.Name) and child.id == flag:
                child.id = "PDL"
        yield from inner.body


def is_fetch(node: ast.stmt) -> bool:
    """Return whether a statement is an `if` that prefetches memory and writes nothing."""
    calls = [child.func for child in ast.walk(node) if isinstance(child, ast.Call)]
    names = {
        function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)
        for function in calls
    }
    return isinstance(node, ast.If) and "fetch" in names and not names & WRITES


def ends_having_waited(node: ast.AST) -> list[ast.Return]:
    """Return the `return` statements of a block that waits by itself before it ends."""
    body = getattr(node, "body", [])
    waited = [
        i
        for i, child in enumerate(body)
        if isinstance(child, ast.If)
        and ast.unparse(child.test) == "PDL"
        and [ast.unparse(call) for call in child.body] == [f"{call}()" for call in CALLS]
    ]
    return [child for child in body[waited[0] :] if isinstance(child, ast.Return)] if waited else []


def test_every_program_waits_before_it_writes_or_ends() -> None:
    """A program that ends without waiting: its kernel may end before its predecessor has, and the
    next kernel, which waits for this one alone, reads what is not there yet. And a write before the
    wait, into what the predecessor still reads."""
    kernels_found = early_kernels()
    assert len(kernels_found) >= 9
    for name, tree in kernels_found.items():
        at = [
            i
            for i, node in enumerate(tree.body)
            if isinstance(node, ast.If) and ast.unparse(node.test) == "PDL"
        ]
        assert at, f"{name}: not where every program comes by"
        # In one place or, where what comes next must not take others' room, in two.
        guarded = [node for i in at for node in getattr(tree.body[i], "body", ())]
        # What nobody writes may be asked for before the wait.
        fetched = [node for node in guarded if getattr(node, "test", None) and is_fetch(node)]
        guarded = [node for node in guarded if node not in fetched]
        assert [ast.unparse(node) for node in guarded] == [f"{call}()" for call in CALLS], name
        before = [node for top in tree.body[: at[0]] for node in ast.walk(top)]
        ends = [
            end for node in before if isinstance(node, ast.If) for end in ends_having_waited(node)
        ]
        for node in before:
            bad = isinstance(node, ast.Return) and node not in ends
            assert not bad, f"{name} may end before it waits"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                assert node.func.attr not in WRITES, f"{name} writes before it waits"
