"""bench.versus.ray_llm: the script serves with what its command says, in another environment."""

import os
import subprocess
import sys
from pathlib import Path

from bench.versus.ray_llm import SETTINGS, command_of

RAY = """\
import http.client, os
def init(address, **options):
    print("init", address, options["num_cpus"], os.environ["RAY_SERVE_ENABLE_HA_PROXY"])
def shutdown():
    print("ray ends")
"""
SERVE = """\
import os, signal, types
def start(http_options):
    print("port", http_options["port"])
def run(app, blocking):
    print("app", app)
    if "FAILS" in os.environ:
        raise RuntimeError("Failed to update the deployments")
    signal.pause = lambda: None
def status():
    deployment = types.SimpleNamespace(message="no module of this name")
    application = types.SimpleNamespace(deployments={"LLMServer": deployment})
    return types.SimpleNamespace(applications={"default": application})
def shutdown():
    print("serve ends")
"""
LLM = """\
LLMConfig = dict
def build_openai_app(arguments):
    return arguments["llm_configs"]
"""


def run(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script beside packages that only print their arguments."""
    (folder / "ray" / "serve").mkdir(parents=True)
    (folder / "ray" / "__init__.py").write_text(RAY)
    (folder / "ray" / "serve" / "__init__.py").write_text(SERVE)
    (folder / "ray" / "serve" / "llm.py").write_text(LLM)
    command = command_of(sys.executable, {"engine_kwargs": {"dtype": "x"}}, 81, {"num_cpus": 3})
    environment = {**os.environ, **SETTINGS, "PYTHONPATH": str(folder), **variables}
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)


def test_the_script_passes_everything_on(tmp_path: Path) -> None:
    """A setting that never reached the server; or our `http.py` in place of Python's package."""
    done = run(tmp_path)
    app = "app [{'engine_kwargs': {'dtype': 'x'}}]"
    assert done.stdout.splitlines() == ["init local 3 1", "port 81", app, "serve ends", "ray ends"]
    assert not done.returncode and not done.stderr


def test_a_failed_start_says_why(tmp_path: Path) -> None:
    """A replica lacked a module, and the log said only that deployments were not updated."""
    done = run(tmp_path, FAILS="1")
    assert "no module of this name\nserve ends\nray ends" in done.stdout
    assert done.returncode == 1 and "Failed to update the deployments" in done.stderr
