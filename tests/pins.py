"""Resolves the pinned sets of requirements, ignoring this machine's settings of pip and uv.

    python -m tests.pins check      every set, for each Python that pyproject.toml claims
    python -m tests.pins renew      write constraints.txt anew, keeping present versions if possible
    python -m tests.pins upgrade    write constraints.txt anew with the newest versions

MANTA_TEST_INDEX names a package index; the default is uv's. uv is used because it resolves for
other Python versions and machines than this one.
"""

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
MACHINES = ("x86_64-manylinux_2_31", "aarch64-manylinux_2_31")  # glibc of docs/install.md
# requirements of lm_eval for which indexes have no wheels
UNBUILT = ("rouge-score", "sqlitedict", "word2number")
BESIDE = ("openai-1", "clients")  # tests/NAME.txt, each installed into a separate folder
INDEX = "MANTA_TEST_INDEX"
_SYSTEM = {  # environment of markers, to which a Python version and a machine are added
    "implementation_name": "cpython",
    "os_name": "posix",
    "platform_python_implementation": "CPython",
    "platform_system": "Linux",
    "sys_platform": "linux",
}


@dataclass(frozen=True)
class PinnedSet:
    """A set of requirements that is resolved together.

    name: the name in messages. arguments: those of `uv pip compile`, after the common ones.
    machines: platforms for which it must resolve.
    """

    name: str
    arguments: tuple[str, ...]
    machines: tuple[str, ...] = MACHINES[:1]


def project() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return table


def pythons() -> list[str]:
    """Return the Python versions that the classifiers of pyproject.toml claim."""
    before = "Programming Language :: Python :: "
    return [line.removeprefix(before) for line in project()["classifiers"] if before in line]


def plain(name: str) -> str:
    """Return a package's name in the normal form of package indexes."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(path: Path) -> dict[str, list[str]]:
    """Return normalised package name -> the package's lines in a file of pins."""
    lines: dict[str, list[str]] = {}
    for line in path.read_text("utf-8").splitlines():
        if line and not line.startswith("#"):
            lines.setdefault(plain(re.split(r"[\[=<>; ]", line)[0]), []).append(line)
    return lines


def sets(folder: Path) -> Iterator[PinnedSet]:
    """Yield every set that this repository's Makefile, images or cluster files install.

    folder: a folder for files that a set needs.
    """
    everything = [f"--extra={extra}" for extra in project()["optional-dependencies"]]
    constrained = ("-c", str(CONSTRAINTS), str(ROOT / "pyproject.toml"))
    yield PinnedSet("what runs", constrained, MACHINES)
    yield PinnedSet("all extras", (*constrained, *everything), MACHINES)
    yield PinnedSet(
        "what runs, without CUDA", (*constrained, "--find-links", str(_without_cuda(folder)))
    )
    shared = pins(CONSTRAINTS)
    for name in BESIDE:
        path = ROOT / "tests" / f"{name}.txt"
        own = pins(path)
        others = [line for package in shared.keys() - own.keys() for line in shared[package]]
        beside = folder / f"beside-{name}.txt"
        beside.write_text("\n".join(sorted(others)) + "\n", "utf-8")
        yield PinnedSet(f"tests/{name}.txt", (str(path), "-c", str(beside)))


def lowest() -> PinnedSet:
    """Return the set of the lower bounds of pyproject.toml."""
    return PinnedSet(
        "lower bounds", ("--resolution", "lowest-direct", str(ROOT / "pyproject.toml"))
    )


def _without_cuda(folder: Path) -> Path:
    """Return a folder with an empty wheel that has the requirements of PyTorch's build without
    CUDA.

    So PyTorch's index is not needed, and 200 MB are not fetched.
    """
    (pinned,) = pins(CONSTRAINTS)["torch"]
    version = pinned.split("==")[1].split(";")[0].strip() + "+cpu"
    wheels = folder / "wheels"
    wheels.mkdir(exist_ok=True)
    needs = ("filelock", "typing-extensions", "sympy", "networkx", "jinja2", "fsspec", "setuptools")
    head = f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
    files = {
        "METADATA": head + "".join(f"Requires-Dist: {package}\n" for package in needs),
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(wheels / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(f"torch-{version}.dist-info/{name}", text)
    return wheels


def environment(before: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables of this process without settings of pip and uv.

    UV_CACHE_DIR is kept, and time-outs are set.
    """
    variables = {
        name: value for name, value in before.items() if not name.startswith(("PIP_", "UV_"))
    }
    variables |= {"UV_HTTP_TIMEOUT": "30", "UV_HTTP_RETRIES": "2"}
    if cache := before.get("UV_CACHE_DIR"):
        variables["UV_CACHE_DIR"] = cache
    return variables


def uv() -> str:
    """Return the path of uv, which the extra `dev` installs."""
    return str(Path(sysconfig.get_path("scripts")) / "uv")


def compile_pins(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `uv pip compile` without the machine's settings, and return the ended process.

    uv takes the best version of all indexes. Otherwise a version with a local part (+cpu) would not
    take precedence over the same version without.
    """
    command = [uv(), "pip", "compile", "--no-config", "--quiet", "--no-header", "--no-annotate"]
    if index := os.environ.get(INDEX):
        command += ["--default-index", index]
    command += ["--only-binary=:all:", *(f"--no-binary={name}" for name in UNBUILT)]
    command += ["--index-strategy=unsafe-best-match", *arguments]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)


def unreachable() -> str:
    """Return why uv cannot resolve anything on this machine; "" if it can."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder) / "wanted.txt"
        wanted.write_text("pip\n", "utf-8")
        asked = compile_pins("--no-deps", str(wanted))
    return asked.stderr.strip() if asked.returncode else ""


def faults(chosen: Sequence[PinnedSet], versions: Sequence[str]) -> list[str]:
    """Return a message for each set and Python version that does not resolve, with uv's reason."""

    def fault(case: tuple[PinnedSet, str, str]) -> str:
        pinned, version, machine = case
        done = compile_pins(
            "--python-version", version, "--python-platform", machine, *pinned.arguments
        )
        if done.returncode == 0:
            return ""
        return f"{pinned.name}, Python {version}, {machine}:\n{done.stderr.strip()}"

    cases = [
        (pinned_set, version, machine)
        for pinned_set in chosen
        for version in versions
        for machine in pinned_set.machines
    ]
    with ThreadPoolExecutor(4) as threads:
        return [fault for fault in threads.map(fault, cases) if fault]


def check(versions: Sequence[str]) -> list[str]:
    """Return a message for each of all sets, and for the lower bounds, that does not resolve."""
    with tempfile.TemporaryDirectory(prefix="manta-pins-") as folder:
        return faults([*sets(Path(folder)), lowest()], versions)


def renewed(upgrade: bool) -> str:
    """Return the new text of constraints.txt, for all Pythons and machines at once.

    upgrade: whether to take the newest versions; else present versions stay where they can.
    Raises RuntimeError if that does not resolve.
    """
    extras = [f"--extra={extra}" for extra in project()["optional-dependencies"]]
    head = [line for line in CONSTRAINTS.read_text("utf-8").splitlines() if line.startswith("#")]
    with tempfile.TemporaryDirectory(prefix="manta-pins-") as folder:
        output = Path(folder) / "constraints.txt"
        output.write_text("" if upgrade else CONSTRAINTS.read_text("utf-8"), "utf-8")
        done = compile_pins(
            *("--universal", "--python-version", pythons()[0], "--output-file", str(output)),
            *extras,
            str(ROOT / "pyproject.toml"),
        )
        if done.returncode:
            raise RuntimeError(done.stderr)
        lines = [line for text in output.read_text("utf-8").splitlines() if (line := _here(text))]
    return "\n".join([*head, *lines, ""])


def _here(line: str) -> str:
    """Return a pin's line for the supported systems: without its marker if that always holds, "" if
    it never does."""
    pin, _, condition = line.partition(" ; ")
    if not condition:
        return line
    from packaging.markers import Marker

    holds = {
        Marker(condition).evaluate(
            {
                "python_version": version,
                "python_full_version": f"{version}.0",
                "platform_machine": machine.partition("-")[0],
                **_SYSTEM,
            }
        )
        for version in pythons()
        for machine in MACHINES
    }
    if holds == {True}:
        return pin
    return line if True in holds else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("check", "renew", "upgrade"))
    if (what := parser.parse_args().what) != "check":
        CONSTRAINTS.write_text(renewed(upgrade=what == "upgrade"), "utf-8")
        return 0
    for fault in (unresolved := check(pythons())):
        print(fault, file=sys.stderr)
    return 1 if unresolved else 0


if __name__ == "__main__":
    sys.exit(main())
