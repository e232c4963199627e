"""The request of docs/images.md and examples/images.py, as a user runs them."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from deployments.api.app import build_asgi
from deployments.api.options import ApiOptions
from tests.deployments.api.server import serve
from tests.deployments.fake_backend import MODEL
from tests.deployments.images.vision_backend import VisionBackend
from tests.engine.images.files import gradient, saved

pytest.importorskip("openai")
ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "images.md").read_text("utf-8")


@pytest.fixture
def backend() -> VisionBackend:
    backend = VisionBackend()
    backend.script = "A cat."
    return backend


@pytest.fixture
def port(backend: VisionBackend, tmp_path: Path) -> Iterator[int]:
    (tmp_path / "cat.png").write_bytes(saved(gradient(80, 80), "PNG"))
    with serve(build_asgi(backend, ApiOptions())) as port:
        yield port


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        command, cwd=folder, env={**os.environ}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def sizes(backend: VisionBackend) -> Sequence[int]:
    return [image.size for request in backend.requests for image in request.images]


def test_the_request_of_the_page(backend: VisionBackend, port: int, tmp_path: Path) -> None:
    """A request that a new user copies and that is refused."""
    if shutil.which("curl") is None:
        pytest.skip("there is no curl")
    block = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)[0]
    command = block.replace("8000", str(port)).replace("my-model", MODEL)
    assert "A cat." in run(tmp_path, "sh", "-c", command)
    assert sizes(backend) == [100]


def test_the_program(backend: VisionBackend, port: int, tmp_path: Path) -> None:
    """A sample that ends in a traceback."""
    program, url = str(ROOT / "examples" / "images.py"), f"http://127.0.0.1:{port}/v1"
    shown = run(tmp_path, sys.executable, program, "cat.png", "cat.png", url)
    assert shown.startswith("A cat.\n") and "tokens of question and pictures" in shown
    assert sizes(backend) == [4, 4]
