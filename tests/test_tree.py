"""What must hold for every file of the tree, checked on its syntax."""

import ast
import functools
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("deployments", "engine", "kernels", "loadtest", "bench")
ENVIRONMENT_READERS = {
    "deployments/config/load.py",
    "deployments/environment.py",
    "engine/parallel/connections.py",  # whether gloo and NCCL were given an interface
    "kernels/launch/cache.py",  # where Triton's cache is; Triton tells only who imports it
}


def sources(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), _parsed(path)


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


@functools.cache
def _by_kind(tree: ast.Module) -> dict[type[ast.AST], list[ast.AST]]:
    nodes = defaultdict(list)
    for node in ast.walk(tree):
        nodes[type(node)].append(node)
    return nodes


def walk(tree: ast.Module, *kinds: type[ast.AST]) -> Iterator[Any]:
    """Yield a module's nodes of some kinds, the first kind first."""
    nodes = _by_kind(tree)
    return chain.from_iterable(nodes[kind] for kind in kinds)


@pytest.fixture(scope="module", autouse=True)
def _no_trees_afterwards() -> Iterator[None]:
    yield
    _parsed.cache_clear()
    _by_kind.cache_clear()


def dotted(node: ast.expr) -> str:
    """Return an expression of names and dots, such as "a.b.c"; "" for anything else."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in walk(tree, ast.Import):
        yield from ((node.lineno, alias.name) for alias in node.names)
    for node in walk(tree, ast.ImportFrom):
        if node.module:
            yield node.lineno, node.module


def test_no_pickle() -> None:
    """Unpickling what came from outside runs it."""
    banned = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}
    unsafe = [
        f"{path}:{line} {name}"
        for path, tree in sources(*PACKAGES)
        for line, name in imports(tree)
        if name.split(".")[0] in banned
    ]
    assert not unsafe


def test_no_code_from_data() -> None:
    """eval, exec, torch.load and remote code are how a model folder takes over a machine."""
    banned = {"eval", "exec", "torch.load", "os.system", "yaml.load", "yaml.unsafe_load"}
    calls = []
    for path, tree in sources(*PACKAGES):
        for node in walk(tree, ast.Call):
            weights_alone = any(  # torch.load then runs nothing that the file says
                keyword.arg == "weights_only" and getattr(keyword.value, "value", False)
                for keyword in node.keywords
            )
            if dotted(node.func) in banned and not weights_alone:
                calls.append(f"{path}:{node.lineno} {dotted(node.func)}")
            calls += [
                f"{path}:{node.lineno} {keyword.arg}"
                for keyword in node.keywords
                if keyword.arg == "trust_remote_code"
                or (keyword.arg == "shell" and getattr(keyword.value, "value", False))
            ]
    assert not calls


def test_environment_is_read_in_one_place() -> None:
    """A variable read deep inside is a setting that no document and no `--help` knows."""
    readers = []
    for path, tree in sources("deployments", "engine", "kernels"):
        if path in ENVIRONMENT_READERS:
            continue
        written = {  # `os.environ["X"] = ...` is for a library that knows no other way
            id(node.value) for node in walk(tree, ast.Subscript) if isinstance(node.ctx, ast.Store)
        }
        for node in walk(tree, ast.Attribute):
            if id(node) not in written and dotted(node) in (
                "os.environ",
                "os.getenv",
                "os.environb",
            ):
                readers.append(f"{path}:{node.lineno}")
    assert not readers


def test_loggers_are_below_ours() -> None:
    """What another logger says in an engine process is seen nowhere: `LogToParent` hangs on ours,
    and the process has no log of its own."""
    loggers = [
        f"{path}:{node.lineno}"
        for path, tree in sources("engine", "kernels")
        for node in walk(tree, ast.Call)
        if dotted(node.func).endswith("getLogger")
        and not re.match(r"'manta\b", ast.unparse(node.args[0]) if node.args else "")
    ]
    assert not loggers


def test_scheduling_code_runs_without_torch_and_ray() -> None:
    """A torch import there makes every scheduler test slow and ties it to a device."""
    folder = ROOT / "engine" / "scheduling"
    files = [path.relative_to(ROOT).with_suffix("") for path in sorted(folder.rglob("[!_]*.py"))]
    modules = [".".join(path.parts) for path in files]
    assert len(modules) > 30
    code = (
        f"import {', '.join(modules)}, engine.config, engine.messages, sys\n"
        "print(*[m for m in ('torch', 'ray', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def knows_an_architecture(tree: ast.Module) -> Iterator[int]:
    """Yield the lines that name an architecture, or compare `architecture` with a constant."""
    for node in walk(tree, ast.Constant, ast.Compare, ast.Call):
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str) and re.fullmatch(
                r"\w+(ForCausalLM|ForConditionalGeneration|LMHeadModel)", node.value
            ):
                yield node.lineno
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            constant = any(not isinstance(side, ast.Name | ast.Attribute) for side in sides)
            if constant and any(dotted(side).endswith("architecture") for side in sides):
                yield node.lineno
        elif isinstance(node, ast.Call) and dotted(node.func).endswith("architecture.startswith"):
            yield node.lineno


def test_one_record_of_an_architecture() -> None:
    """What an architecture is like was known in four tables and six conditions, and a new one was
    added to most of them."""
    for planted in (
        "if config.architecture == 'llama': pass",
        "x = file.architecture not in ('qwen2',)",
        "NAMES = {'MistralForCausalLM': 1}",
        "architecture.startswith('Qwen')",
    ):
        assert list(knows_an_architecture(ast.parse(planted))) == [1], planted
    records = [
        f"{path}:{line}"
        for path, tree in sources("deployments", "engine", "kernels")
        if not path.startswith("engine/architectures/")
        for line in knows_an_architecture(tree)
    ]
    assert not records


def test_architectures_are_read_without_torch() -> None:
    """`manta` reads them to convert a GGUF file, which took seconds where torch was imported."""
    code = (
        "import deployments.checkpoints.gguf, sys\n"
        "print(*[m for m in ('torch', 'ray') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def test_layers() -> None:
    """deployments -> engine -> kernels, as pyproject.toml's contracts have it."""
    pytest.importorskip("importlinter")
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_kernels_import_only_torch_and_triton() -> None:
    """A kernel that needs the rest of the tree cannot be tested or reused alone."""
    allowed = {*sys.stdlib_module_names, "torch", "triton", "numpy", "kernels"}
    foreign = [
        f"{path}:{line} {name}"
        for path, tree in sources("kernels")
        for line, name in imports(tree)
        if name.split(".")[0] not in allowed
    ]
    assert not foreign


def test_files_say_what_they_are_for() -> None:
    """A reader meets the file's name and first line before anything else."""
    silent = [
        path for path, tree in sources(*PACKAGES) if tree.body and not ast.get_docstring(tree)
    ]
    assert not silent


# What a docstring cannot begin with and say by itself what it describes.
_HANGING = re.compile(
    r"(?i)\W*(of|as|in|by|its|those|where|from|for|with|to|at|on|if|until|after|before|while|once|"
    r"without|beside|behind|instead|not|also|such|it|they|these|this|that|there|so|only|and|or|but|"
    r"then|than|both|the same|same)\b"
)


def test_docstrings_say_what_they_describe() -> None:
    """A reader stopped at "Of its lane.": no verb, no noun, and the code had to be read."""
    total, hanging = 0, []
    for path, tree in sources(*PACKAGES):
        for node in walk(tree, ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            total += bool(text)
            if _HANGING.match(text):
                hanging.append(f"{path}:{getattr(node, 'lineno', 1)} {text.splitlines()[0]}")
    assert len(hanging) <= total / 100, "\n".join(hanging)


def test_tests_name_their_bug() -> None:
    """A test without a docstring is deleted or bent by the next person whom it stops."""
    nameless = [
        f"{path}:{node.lineno} {node.name}"
        for path, tree in sources("tests")
        for node in walk(tree, ast.FunctionDef, ast.AsyncFunctionDef)
        if node.name.startswith("test_") and not ast.get_docstring(node)
    ]
    assert not nameless


def test_no_leftovers() -> None:
    """We ship no notes to ourselves, no path of one machine, no address of a package registry."""
    words = ["TO" + "DO", "FIX" + "ME", "pypi" + ".org", "pytorch" + ".org/whl"]
    paths = [r"/wo" + r"rk/", r"(?<![\w.])/ro" + r"ot/", r"/tm" + r"p/(?!ray\b)\w"]
    pattern = re.compile("|".join([*map(re.escape, words), *paths]))
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode != 0:
        pytest.skip("not a git checkout")
    leftovers = []
    for name in filter(None, tracked.stdout.split("\0")):
        if name.endswith((".json", ".jsonl", ".png", ".svg")) or not (ROOT / name).is_file():
            continue
        text = (ROOT / name).read_text("utf-8", "replace")
        for match in pattern.finditer(text):
            leftovers.append(f"{name}:{text.count(chr(10), 0, match.start()) + 1} {match[0]}")
    assert not leftovers
