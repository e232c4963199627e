"""The wheel and the sdist: they have what the checkout has, and run from anywhere."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PACKAGES = ("deployments", "engine", "kernels", "loadtest")


@pytest.fixture(scope="module")
def artefacts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the wheel, built of the sdist, and the sdist; both are built from a copy of the
    checkout."""
    folder = tmp_path_factory.mktemp("artefact")
    names = _tracked()
    for name in names:
        target = folder / "tree" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    command = [sys.executable, "-m", "build", "--no-isolation", "--skip-dependency-check"]
    done = subprocess.run(
        [*command, "--outdir", str(folder / "dist"), str(folder / "tree")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (wheel,), (sdist,) = (list((folder / "dist").glob(f"*{end}")) for end in (".whl", ".tar.gz"))
    return wheel, sdist


def _tracked() -> list[str]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a git checkout")
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def _ours() -> set[str]:
    return {name for name in _tracked() if name.split("/")[0] in PACKAGES}


def test_artefacts_have_every_file_of_the_packages(artefacts: tuple[Path, Path]) -> None:
    """A page, a configuration or a text that package-data does not name is missing where Manta was
    installed, and nowhere else."""
    wheel, sdist = artefacts
    with zipfile.ZipFile(wheel) as packed:
        inside = {name for name in packed.namelist() if ".dist-info/" not in name}
    assert inside == _ours()
    with tarfile.open(sdist) as packed_source:
        names = {name.partition("/")[2] for name in packed_source.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", *_ours()} <= names


def runs_from_a_wheel(python: Path, elsewhere: Path, environment: Mapping[str, str]) -> None:
    """Assert that an installed Manta reads nothing relative to the checkout.

    python: the interpreter of the environment that has the wheel. elsewhere: an empty folder.
    """
    code = """
import importlib, sys
from pathlib import Path
import deployments, engine, kernels, loadtest
root = Path(sys.argv[1])
for package in (deployments, engine, kernels, loadtest):
    assert root in Path(package.__file__).parents, package.__file__
from deployments.config.load import load_config
from deployments.demo import CONFIG
assert load_config(CONFIG, {}).model == "default"
import engine.evaluation.prompts
assert engine.evaluation.prompts.SHIPPED.exists()
import deployments.router.rpc.proto_file
deployments.router.rpc.proto_file.PROTO.read_text()
print(CONFIG)
"""

    def said(*command: str) -> str:
        done = subprocess.run(
            command, cwd=elsewhere, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (command, done.stderr[-2000:])
        return done.stdout.strip()

    manta = str(python.with_name("manta"))
    config = said(str(python), "-c", code, str(python.parents[1]))
    assert said(manta, "--help") and said(str(python), "-m", "loadtest", "--help")
    assert "import_path" in said(manta, "build", config)


def test_the_workflow_runs_what_is_here() -> None:
    """A step that names a file or a target that has gone fails where nobody looks."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))
    targets = (ROOT / "Makefile").read_text("utf-8")
    image = (ROOT / "deploy" / "Dockerfile").read_text("utf-8")
    jobs = workflow["jobs"]
    assert {"tests", "artefact", "image", "docs"} <= set(jobs)
    for job in jobs.values():
        for step in job["steps"]:
            for word in step.get("run", "").split():
                if word.startswith((".ci/", "deploy/", "docs/", "tests/")):
                    assert (ROOT / word).exists(), word
            words = step.get("run", "").split()
            if words[:1] == ["make"]:
                assert f"\n{words[1]}:" in targets, words
    for target in jobs["image"]["strategy"]["matrix"]["target"]:
        assert f" AS {target}\n" in image
    from tests.pins import pythons

    assert jobs["tests"]["strategy"]["matrix"]["python"] == pythons()
