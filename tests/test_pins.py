"""Pins are what a package index resolves on a machine without settings of its own."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests import pins

ROOT = pins.ROOT


@pytest.fixture(scope="module")
def index() -> None:
    """Skip the tests if no package index answers; CI must have one."""
    if reason := pins.unreachable():
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail(f"CI needs a package index ({pins.INDEX} names one): {reason}")
        pytest.skip(f"no package index ({pins.INDEX} names one): {reason.splitlines()[-1]}")


@pytest.mark.usefixtures("index")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "python",
    [
        pytest.param(python, marks=pytest.mark.slow if number == 0 else pytest.mark.nightly)
        for number, python in enumerate(pins.pythons())
    ],
)
def test_every_pinned_set_resolves(python: str) -> None:
    """constraints.txt pinned triton 3.9.0 beside a torch that requires 3.7.1: it had been written
    on a machine with a wheel of its own, and nobody else could install."""
    faults = pins.check([python])
    assert not faults, "\n\n".join(faults)


@pytest.mark.slow
@pytest.mark.usefixtures("index")
@pytest.mark.timeout(900)
def test_a_pin_that_does_not_fit_is_a_fault(tmp_path: Path) -> None:
    """A check that passes whatever is pinned would have passed the fault above."""
    wrong = tmp_path / "constraints.txt"
    wrong.write_text(
        re.sub(r"(?m)^triton==.*$", "triton==3.6.0", pins.CONSTRAINTS.read_text("utf-8")), "utf-8"
    )
    planted = pins.PinnedSet("planted", ("-c", str(wrong), str(ROOT / "pyproject.toml")))
    (fault,) = pins.faults([planted], pins.pythons()[:1])
    assert "triton" in fault


@pytest.mark.nightly
@pytest.mark.usefixtures("index")
@pytest.mark.timeout(900)
def test_pip_installs_what_is_pinned() -> None:
    """Images and nodes of clusters may have pip alone, whose resolver is another."""
    command = [sys.executable, "-m", "pip", "--isolated", "install", "--dry-run", "--quiet"]
    command += ["--ignore-installed", "--only-binary=:all:", "--disable-pip-version-check"]
    if index_url := os.environ.get(pins.INDEX):
        command += ["--index-url", index_url]
    if bundle := os.environ.get("SSL_CERT_FILE"):
        command += ["--cert", bundle]
    with tempfile.TemporaryDirectory() as folder:
        dependencies = Path(folder) / "dependencies.txt"
        dependencies.write_text("\n".join(pins.project()["dependencies"]) + "\n", "utf-8")
        command += ["-c", str(pins.CONSTRAINTS), "-r", str(dependencies)]
        # --isolated reads a machine's own pip.conf all the same.
        environment = pins.environment() | {"PIP_CONFIG_FILE": os.devnull}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_everything_pinned_has_one_version_that_anyone_can_get() -> None:
    """`torch==2.13.0+cpu` is on PyTorch's own index alone."""
    for path in (pins.CONSTRAINTS, *(ROOT / "tests" / f"{name}.txt" for name in pins.BESIDE)):
        for lines in pins.pins(path).values():
            assert len(lines) == 1 or all(";" in line for line in lines), lines
            for line in lines:
                assert re.fullmatch(r"[\w.-]+(\[[\w,]+\])?==[\w.]+( ; .+)?", line), line


def test_only_pinned_sets_are_installed() -> None:
    """A line of pip in a cluster file or an image is a set that nobody resolves."""
    known = (
        r"pip install \$\{PIP_ARGS\} -c /manta/constraints\.txt /manta",
        r"pip install -c /manta/constraints\.txt /manta",
        r"make install EXTRAS=(aws|gcp)",
    )
    installing = re.compile(r"(?:\buv )?\bpip3? install[^&|;\\\n]*|make (?:venv|install)[^&|;\n]*")
    unknown = []
    for path in (ROOT / "cluster.yaml", *sorted((ROOT / "deploy").iterdir())):
        if path.suffix in (".json", ".md", ".py") or not path.is_file():
            continue
        for line in path.read_text("utf-8").splitlines():
            if line.lstrip().startswith("#"):
                continue
            for command in installing.findall(line):
                if not any(re.fullmatch(pattern, command.strip()) for pattern in known):
                    unknown.append(f"{path.name}: {command}")
    assert not unknown


def test_lower_and_upper_bounds_are_said() -> None:
    """An untried release of Ray writes another configuration of HAProxy, which is refused."""
    bounds = {re.split(r"[\[><=]", line)[0]: line for line in pins.project()["dependencies"]}
    assert all(">=" in line for line in bounds.values())
    for name in ("ray", "torch", "transformers"):
        assert ",<" in bounds[name], bounds[name]
