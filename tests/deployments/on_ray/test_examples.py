"""examples/ and docs/python.md: the programs against a deployed application, and the configurations
as read. Those of Ray Data are in test_ray_data.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from deployments.config.load import parse_config
from tests.deployments.on_ray.serve_cluster import Cluster
from tests.test_docs import examples, run

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_each_file_is_in_the_list() -> None:
    """An example that nobody finds."""
    page = (EXAMPLES / "README.md").read_text("utf-8")
    files = [path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".yaml")]
    assert files and all(f"({name})" in page for name in files)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_configuration_is_read(path: Path) -> None:
    """A key that was renamed, and the example as it was."""
    data = yaml.safe_load(path.read_text("utf-8"))
    config = parse_config(data, {}, check_files=False)  # folders and a hub's model are elsewhere
    assert len(config.models or [""]) == len(data.get("models", [""]))


@pytest.mark.serve
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("chat", "60 tokens"),
        ("ray_job", "(40 tokens)"),
        ("batch", "question-9"),
    ],
)
def test_a_program_runs(shared_fleet: Cluster, name: str, shown: str) -> None:
    """A sample that ends in a traceback is the first thing that a new user sees."""
    url = f"http://127.0.0.1:{shared_fleet.port}/v1"
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), url],
        capture_output=True,
        text=True,
        env={**os.environ, "RAY_ADDRESS": shared_fleet.address, "PYTHONPATH": str(EXAMPLES.parent)},
        timeout=90,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert shown in done.stdout


@pytest.mark.serve
@pytest.mark.slow
@pytest.mark.parametrize("place", [-4, -3, -2], ids=["with Manta", "HTTP", "without Manta"])
def test_a_program_of_the_docs_runs(shared_fleet: Cluster, place: int) -> None:
    """Another Ray job with Manta installed and one without, and an openai client that goes on after
    a cut: a name that was changed in the code and not on the page."""
    program = examples("python.md")[place].replace("8000", str(shared_fleet.port))
    assert len(run(program, RAY_ADDRESS=shared_fleet.address).strip()) > 10
