"""The documentation says what the code does, and its examples run."""

import ast
import fnmatch
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RESULTS = ROOT / "bench" / "results"


def examples(page: str) -> list[str]:
    """Return the python blocks of a page."""
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text("utf-8"), re.DOTALL)


def run(code: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def generate() -> Any:
    """Return docs/generate.py as a module."""
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.nightly
def test_the_list_of_modules_has_every_module() -> None:
    """A module that says nothing of itself, or is missing from the list, is found by nobody."""
    modules = dict(generate().modules())
    assert len(modules) > 500 and all(modules.values())
    assert len(dict(generate().modules("engine/sampling"))) < len(modules)


@pytest.mark.nightly
def test_map_names_functions_that_exist() -> None:
    """A request's way, told by functions that were renamed since."""
    page = (DOCS / "map.md").read_text("utf-8")
    stops = re.findall(r"`(\w+/[\w/]+\.py):([\w.]+)`", page)
    assert len(stops) > 20
    gone = []
    for path, name in stops:
        body: Any = ast.parse((ROOT / path).read_text("utf-8")).body
        for part in name.split("."):
            body = next((node.body for node in body if getattr(node, "name", None) == part), None)
            if body is None:
                gone.append(f"{path}:{name}")
                break
    files = re.findall(r"`(\w+/[\w/]+\.py)`", page)
    assert not gone and all((ROOT / file).is_file() for file in files), gone


def test_configuration_page_is_current() -> None:
    """A knob that the page does not know is a knob nobody finds."""
    module = generate()
    assert (DOCS / "configuration.md").read_text("utf-8") == module.render(), (
        "run: python docs/generate.py"
    )
    undocumented = re.findall(r"^\| `(\w+)` .*\|  \|$", module.render(), re.MULTILINE)
    assert not undocumented, f"name these on the page: {undocumented}"


@pytest.mark.nightly
def test_models_page_is_current() -> None:
    """A model that runs and is not on the page is one that nobody tries."""
    page = (DOCS / "models.md").read_text("utf-8")
    assert page == generate().render_models(), "run: python docs/generate.py"


def test_kernels_page_is_current() -> None:
    """A kernel in a table that the page leaves out, or a page that names one for other weights."""
    module = generate()
    assert (ROOT / "kernels" / "README.md").read_text("utf-8") == module.render_kernels(), (
        "run: python docs/generate.py"
    )


@pytest.mark.nightly
def test_http_page_names_every_field() -> None:
    """A field that is accepted and nowhere written is accepted for nobody."""
    from deployments.api.fields.anthropic import MESSAGES, MESSAGES_IGNORED, MESSAGES_REFUSED
    from deployments.api.fields.generation import CHAT, COMPLETION
    from deployments.api.fields.responses import (
        RESPONSES,
        RESPONSES_IGNORED,
        RESPONSES_REFUSED,
        RESPONSES_REPEATED,
    )

    page = (DOCS / "http.md").read_text("utf-8")
    missing = [name for name in sorted(CHAT.known | COMPLETION.known) if f"`{name}`" not in page]
    of_responses = page.split("\n## Responses\n")[1].split("\n## ")[0]
    others = {*RESPONSES_REPEATED, *RESPONSES_IGNORED, *RESPONSES_REFUSED}
    missing += [name for name in sorted(others) if f"`{name}`" not in of_responses]
    own = sorted(RESPONSES.known - CHAT.known)
    missing += [name for name in own if f"`{name}`" not in of_responses]
    of_messages = page.split("\n## Messages\n")[1].split("\n## ")[0]
    others = {*MESSAGES_IGNORED, *MESSAGES_REFUSED, *(MESSAGES.known - CHAT.known)}
    missing += [name for name in sorted(others) if f"`{name}`" not in of_messages]
    assert not missing, f"docs/http.md: name these in the table of their API's fields: {missing}"


@pytest.mark.nightly
def test_the_list_of_fields_has_every_field() -> None:
    """A route that the list lacks, or a field that is taken and not listed."""
    from deployments.api.fields.generation import CHAT

    text = generate().render_fields()
    assert all(f"`{name}`" in text for name in CHAT.known) and "`/v1/responses`" in text


def error_codes(tree: ast.AST) -> set[str]:
    """Return the codes that a module's errors of HTTP and of requests are made with."""
    places = {"ApiError": 1, "invalid": 2, "InvalidRequest": 99}  # of the code among the arguments
    codes = set()
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") in places:
            place = places[call.func.id]  # type: ignore[attr-defined]
            values = [word.value for word in call.keywords if word.arg == "code"]
            for value in (*values, *call.args[place : place + 1]):
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    codes.add(value.value)
    return codes


@pytest.mark.nightly
def test_http_page_names_every_error() -> None:
    """405 and the 503 of /ready were not in the table: a client cannot be written for them.
    Six codes of 400 were on no page, though a code is stable.
    `suffix` stood among the fields that are taken, and is always refused."""
    page = (DOCS / "http.md").read_text("utf-8")
    codes, named = {"not_ready", "draining"}, set()
    for folder in ("deployments/api", "engine/text"):
        for path in (ROOT / folder).rglob("*.py"):
            source = path.read_text("utf-8")
            errors = re.findall(r'ApiError\(\s*(\d+),\s*"(\w+)"', source)
            codes |= {code for status, code in errors if status != "400"}
            named |= error_codes(ast.parse(source))
    rows = "".join(line for line in page.splitlines() if re.match(r"\| [345]\d\d", line))
    assert len(codes) > 10 and not [code for code in sorted(codes) if f"`{code}`" not in rows]
    pages = page + (DOCS / "lora.md").read_text("utf-8")
    assert len(named) > 50 and not [code for code in sorted(named) if f"`{code}`" not in pages]
    taken, refused = page.split("## Fields of a generation")[1].split(
        "Refused without being looked into"
    )
    assert "`suffix`" in refused and "`suffix`" not in taken


@pytest.mark.nightly
def test_every_code_of_an_error_is_on_a_page() -> None:
    """Chats of a model without a template were refused with a code that no page had."""
    codes: set[str] = set()
    for folder in ("deployments", "engine"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                keyword = isinstance(node, ast.keyword) and node.arg == "code"
                field = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "code"
                value = getattr(node, "value", None) if keyword or field else None
                if isinstance(value, ast.Constant) and "_" in str(value.value):
                    codes.add(str(value.value))
    pages = "".join((DOCS / name).read_text("utf-8") for name in ("http.md", "lora.md"))
    assert len(codes) > 40 and not [code for code in sorted(codes) if f"`{code}`" not in pages]


def results_named() -> Iterator[tuple[str, str]]:
    """Yield (page, name) of each result file that a page names; <date> stands for any date."""
    speeds = ROOT / "deployments" / "configs" / "speeds.yaml"
    notes = (ROOT / "bench" / "notes").glob("*.md")
    faults = ROOT / "tests" / "faults" / "README.md"
    others = (ROOT / "README.md", ROOT / "CHANGELOG.md", speeds, faults)
    for page in (*others, *DOCS.glob("*.md"), *notes):
        text = page.read_text("utf-8")
        for name in re.findall(r"([\w.-]+-(?:\d{4}-\d\d-\d\d|<date>)(?:\.\w+)?)", text):
            yield page.name, name if "." in name.rpartition("-")[2] else f"{name}.json"


@pytest.mark.nightly
def test_figures_name_files_that_exist() -> None:
    """A figure whose file is gone, or was never committed, is a claim that nobody can check."""
    there = [path.name for folder in (RESULTS, DOCS / "img") for path in folder.iterdir()]
    named = list(results_named())
    missing = [(page, name) for page, name in named if not matching(there, name)]
    assert len(named) > 20 and not missing


def matching(there: list[str], name: str) -> list[str]:
    return fnmatch.filter(there, name.replace("<date>", "*"))


@pytest.mark.nightly
def test_results_are_named_by_their_figures() -> None:
    """Costs of routing stood in a table that named the command alone: which file they are from,
    and so of which commit and machine, was for the reader to guess."""
    there = [path.name for path in RESULTS.glob("*.json")]
    named = {file for _, name in results_named() for file in matching(there, name)}
    assert sorted(named) == sorted(there)


# Figures of a page are from a result, from a command that measures them, or held by a test.
FIGURE = re.compile(r"\d[\d,.]* (?:ms|us|tokens/s|requests/s|GB/s|times)\b")
SOURCE = re.compile(r"-(?:\d{4}-\d\d-\d\d|<date>)\b|python -m (?:bench|tests)\.|\btest_\w+")
UNFILED = re.compile(r"\bno\s+file\b")  # what a section of notes may say instead


@pytest.mark.nightly
def test_sections_with_figures_say_where_they_are_from() -> None:
    """A table of times without a file, a command or a test is true for ever or never."""
    pages = ("architecture", "deterministic", "lora", "parallel", "performance", "quantization",
             "recurrent", "reliability", "routing")  # fmt: skip
    assert not list(unfounded([DOCS / f"{page}.md" for page in pages]))


@pytest.mark.nightly
def test_sections_of_notes_say_where_they_are_from_or_that_no_file_has_them() -> None:
    """Floors of a CPU stood in the notes, and no reader could tell what had measured them."""
    notes = sorted((ROOT / "bench" / "notes").glob("*.md"))
    assert not [section for section, text in unfounded(notes) if not UNFILED.search(text)]


def unfounded(pages: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Yield the titles and texts of sections with figures that no file, command or test has."""
    sections = 0
    for page in pages:
        for section in re.split(r"^(?=##+ )", page.read_text("utf-8"), flags=re.MULTILINE):
            if len(FIGURE.findall(section)) >= 2:
                sections += 1
                if not SOURCE.search(section):
                    yield f"{page.stem}: {section.splitlines()[0]}", section
    assert sections > 3


def commits(value: Any, key: str = "") -> Iterator[str]:
    """Yield every commit that a result file names."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from commits(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from commits(inner)
    elif key == "commit":
        yield value


@pytest.mark.nightly
def test_results_name_commits_that_exist() -> None:
    """Two results were of commits that no clone has: what was measured is known to nobody."""

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()

    if git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("not a checkout with its history: which commits there are is not known")
    known = set(git("rev-list", "HEAD").split())
    files = RESULTS.glob("*.json")
    named = {path.name: list(commits(json.loads(path.read_text()))) for path in files}
    assert len(named) > 20 and all(named.values()), "a result that does not say what it measured"
    assert not {name for name, hashes in named.items() if not known.issuperset(hashes)}


@pytest.mark.nightly
def test_pages_name_tests_and_commands_that_exist() -> None:
    """Tests move and get other names, and a row of the page on faults is held by nothing."""
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py")]
    code = "".join((ROOT / file).read_text("utf-8") for file in files)
    named, gone = 0, []
    faults = ROOT / "tests" / "faults" / "README.md"
    for page in (ROOT / "README.md", faults, *DOCS.glob("*.md")):
        text = page.read_text("utf-8")
        for file in re.findall(r"[\w/]*test_\w+\.py", text):
            named += 1
            if not any(f"/{there}".endswith(f"/{file}") for there in files):
                gone.append(f"{page.name}: {file}")
        for test in re.findall(r"`(test_\w+?)(?:_?\.\.\.)?`", text):
            named += 1
            if f"def {test}" not in code:
                gone.append(f"{page.name}: {test}")
        for module in re.findall(r"python -m ((?:bench|deployments|loadtest|tests)[\w.]*\w)", text):
            named += 1
            path = ROOT.joinpath(*module.split("."))
            if not path.with_suffix(".py").is_file() and not (path / "__main__.py").is_file():
                gone.append(f"{page.name}: {module}")
    assert named > 100 and not gone


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page: those of its headings, and those written in HTML."""
    text = page.read_text("utf-8")
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.S), re.M)
    plain = (re.sub(r"\]\([^)]*\)", "", heading).lower() for heading in headings)
    named = re.findall(r'<a id="([^"]+)"', text)
    return {*named, *(re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain)}


def test_links_lead_somewhere() -> None:
    """Pages move and headings change; links stay."""
    broken = []
    others = (ROOT / folder / "README.md" for folder in ("", "tests/faults", "kernels"))
    for page in (*others, *DOCS.glob("*.md")):
        links = re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text("utf-8"))
        for target, anchor in links:
            other = page.parent / target if target else page
            if "://" not in target and not (
                other.exists() and (not anchor or other.suffix != ".md" or anchor in anchors(other))
            ):
                broken.append(f"{page.name}: {target}#{anchor}")
    assert not broken


def paragraphs(page: Path) -> Iterator[str]:
    """Yield the paragraphs and list items of a page, without tables, code and targets of links."""
    text = re.sub(r"```.*?```|^ *\|.*?$|^    .*?$", "", page.read_text("utf-8"), flags=re.S | re.M)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    yield from re.split(r"\n\s*\n|^ *(?:-|\d+\.) ", text, flags=re.M)


@pytest.mark.nightly
def test_paragraphs_have_at_most_80_words() -> None:
    """Walls of 150 words, which nobody reads (rule 5 of docs/development.md)."""
    pages = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md"))
    sizes = [
        (len(text.split()), page.name, text[:60]) for page in pages for text in paragraphs(page)
    ]
    assert len(sizes) > 500 and not [size for size in sizes if size[0] > 80]


@pytest.mark.nightly
def test_every_dependency_has_its_reason() -> None:
    """Each dependency is a thing that can break, be slow or be taken over; it needs a reason."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    names = [re.split(r"[\[><=;]", line)[0] for line in project["dependencies"]]
    core = {"torch", "ray", "transformers", "triton", "numpy", "pydantic"}
    page = (DOCS / "dependencies.md").read_text("utf-8")
    others = [name for name in names if name not in core]
    assert all(f"| {name} |" in page for name in others)
    assert f"**{len(others)}**" in page
    pinned = (ROOT / "constraints.txt").read_text("utf-8").lower().replace("_", "-")
    extras = itertools.chain(*project["optional-dependencies"].values())
    for line in (*names, *extras):
        name = re.split(r"[\[><=;]", line)[0].lower().replace("_", "-").replace(".", "-")
        if name != project["name"]:  # an extra that has another of ours
            assert f"\n{name}==" in pinned, f"{name} is not in constraints.txt"


def test_shipped_configuration_is_valid() -> None:
    """The file that `make demo` serves is the first that people copy."""
    from deployments.config.load import load_config
    from deployments.demo import CONFIG

    assert load_config(CONFIG, environment={}).model == "default"


@pytest.mark.slow
def test_library_examples(default_model: Path) -> None:
    """The first lines of Python that a new user types."""
    for code in examples("python.md")[:2]:
        assert len(run(code).strip()) > 20


@pytest.mark.slow
def test_training_examples(default_model: Path) -> None:
    """Weights that go nowhere, and a trainer's forward pass that differs from the rollout."""
    update, *_, exact = examples("rl.md")
    assert "('step 1'," in run(update)
    assert run(exact).strip() == "True"
