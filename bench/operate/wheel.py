"""`wheel/first-token`: the time from a wheel and an empty environment to the first streamed token.

A round makes a virtual environment, installs Manta's wheel, starts `manta serve` with the default
model in an empty folder with its own cache, and sends a request. Downloads are excluded:
dependencies come from this process's environment, and the default model is fetched and unpacked
before. `peer` is the target.
"""

import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from bench.report.result_file import Line

ROOT = Path(__file__).parents[2]
PACKAGES = ("deployments", "engine", "kernels", "loadtest")
PROMISE_S = 60.0
READY_S = 180.0


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this checkout in `folder`, including uncommitted changes.

    Raises CalledProcessError.
    """
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in PACKAGES:  # copy them, because a build writes next to its sources
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-cache-dir")
    _run(sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(folder), str(source))
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    """Make a virtual environment with the wheel; return the path of its `manta`.

    Dependencies come from this process's environment. Raises CalledProcessError.
    """
    _run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    paths = {"base": str(folder), "platbase": str(folder)}
    own = Path(sysconfig.get_path("purelib", "venv", vars=paths))
    # Python ignores .pth files in folders that a .pth file lists, so this environment's editable
    # install is not found.
    ours = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    (own / "dependencies.pth").write_text("".join(f"{path}\n" for path in sorted(ours)))
    python = folder / "bin" / "python"
    options = ("--quiet", "--no-deps", "--no-index", "--no-warn-script-location")
    _run(sys.executable, "-m", "pip", "--python", str(python), "install", *options, str(wheel))
    return folder / "bin" / "manta"


def environment(**values: str) -> dict[str, str]:
    """Return this process's environment without the variables that lead to the checkout."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**inherited, "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1", **values}


def _run(*command: str, **options: object) -> None:
    done = subprocess.run(command, capture_output=True, text=True, **options)  # type: ignore[call-overload]
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
        done.check_returncode()


def round_(wheel: Path, folder: Path, cache: Path) -> Line:
    """Measure the seconds until `manta` is installed, the server is ready, and a token comes."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shutil.copytree(cache, folder / "cache")
    (folder / "empty").mkdir()
    began = time.monotonic()
    manta = install(wheel, folder / "venv")
    installed = time.monotonic() - began
    process = subprocess.Popen(
        [manta, "serve", "default", "--port", str(port), "--address", "local"],
        cwd=folder / "empty",
        env=environment(MANTA_CACHE=str(folder / "cache")),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        output = ""
        while "Serving" not in output:
            line = process.stdout.readline()
            if not line or time.monotonic() - began > READY_S:
                raise SystemExit(f"the server did not start:\n{output}")
            output += line
        ready = time.monotonic() - began
        text, first = _ask(port)
        if not text:
            raise SystemExit("the answer is empty")
        result = {"installed_s": installed, "ready_s": ready, "first_token_s": first - began}
        return {name: round(seconds, 2) for name, seconds in result.items()} | {"text": text}
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def _ask(port: int) -> tuple[str, float]:
    """Send a request; return the streamed answer, and the time of its first token."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=30) as answer:
        model = json.load(answer)["data"][0]["id"]
    question = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": model, "messages": question, "max_tokens": 16, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps({**body, "stream": True}).encode(),
        {"content-type": "application/json"},
    )
    text, first = "", 0.0
    with urllib.request.urlopen(request, timeout=60) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    if piece := choice["delta"].get("content"):
                        first = first or time.monotonic()
                        text += piece
    return text, first


def lines(rounds: int) -> Iterator[Line]:
    """Yield a line for each round."""
    with tempfile.TemporaryDirectory(prefix="op") as text:
        folder = Path(text)
        (folder / "build").mkdir()
        wheel = build_wheel(folder / "build")
        manta = install(wheel, folder / "first")
        cache = folder / "cache"
        fetch = (str(manta.with_name("python")), "-m", "deployments.cli.models.fetch", "default")
        _run(*fetch, env=environment(MANTA_CACHE=str(cache)), cwd=text)
        for number in range(rounds):
            (folder / str(number)).mkdir()
            yield {"case": "wheel/first-token", **round_(wheel, folder / str(number), cache)}


def rows(lines: list[Line]) -> list[Line]:
    ours = round(statistics.median(line["first_token_s"] for line in lines), 2)
    ratio = round(ours / PROMISE_S, 3)
    return [
        {"case": "wheel/first-token", "ours": ours, "peer": PROMISE_S, "unit": "s", "ratio": ratio}
    ]
