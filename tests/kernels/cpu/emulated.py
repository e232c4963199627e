"""Runs Python for AArch64 under qemu-user, with the wheels that generated kernels need.

Debian's packages and the wheels are only unpacked into a folder of `.cache`. Torch is the last
version whose AArch64 wheel on PyPI needs no CUDA; other versions are those of constraints.txt.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / ".cache" / "aarch64"

_DEBIAN = """
python3.11-minimal libpython3.11-minimal libpython3.11-stdlib libc6 libgcc-s1 libstdc++6 zlib1g
libexpat1 libffi8 libssl3 libsqlite3-0 libbz2-1.0 liblzma5 libuuid1 libdb5.3 libncursesw6 libtinfo6
libreadline8 libcrypt1
"""
_WHEELS = """
triton numpy sympy mpmath networkx jinja2 markupsafe filelock typing-extensions fsspec pytest pluggy
iniconfig packaging pygments hypothesis sortedcontainers msgspec pyyaml safetensors regex
pytest-timeout pillow
"""
_TORCH = "torch==2.10.0"
_TIMEOUT_S = 3000


class Unavailable(Exception):
    """Raised where the tools or packages are missing; the message says which."""


def prepare() -> None:
    """Make the folder with the emulated system, unless it exists. Raises Unavailable."""
    for tool, package in (("qemu-aarch64", "qemu-user"), ("apt-get", "apt"), ("dpkg", "dpkg")):
        if shutil.which(tool) is None:
            raise Unavailable(f"{tool} is missing; on Debian: apt-get install {package}")
    complete, contents = FOLDER / "complete", f"{_DEBIAN} {_TORCH} {_WHEELS}"
    if complete.exists() and complete.read_text() == contents:
        return
    shutil.rmtree(FOLDER, ignore_errors=True)
    debs, system = FOLDER / "debs", FOLDER / "root"
    for folder in (debs, system, FOLDER / "lists" / "partial", FOLDER / "archives" / "partial"):
        folder.mkdir(parents=True)
    (FOLDER / "status").touch()
    apt = [
        "apt-get", "-q", "-o", "APT::Architecture=arm64", "-o", "APT::Architectures=arm64",
        "-o", "APT::Sandbox::User=", "-o", f"Dir::State::lists={FOLDER / 'lists'}",
        "-o", f"Dir::State::status={FOLDER / 'status'}",
        "-o", f"Dir::Cache::archives={FOLDER / 'archives'}",
        "-o", "Dir::Cache::pkgcache=", "-o", "Dir::Cache::srcpkgcache=",
    ]  # fmt: skip
    _run([*apt, "update"], FOLDER)
    _run([*apt, "download", *_DEBIAN.split()], debs)
    for package in sorted(debs.glob("*.deb")):
        _run(["dpkg", "-x", str(package), str(system)], FOLDER)
    pins = dict(
        re.findall(r"^([\w.-]+)==([\w.+-]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    )
    wheels = [f"{name}=={pins[name]}" if name in pins else name for name in _WHEELS.split()]
    _run(
        [
            str(Path(sys.executable).parent / "uv"), "pip", "install", "--quiet", "--no-deps",
            "--target", str(FOLDER / "site"), "--python-platform", "aarch64-manylinux_2_31",
            "--python-version", "3.11", "--only-binary", ":all:", _TORCH, *wheels,
        ],
        FOLDER,
    )  # fmt: skip
    complete.write_text(contents)


def run(arguments: Sequence[str], processor: str) -> subprocess.CompletedProcess[str]:
    """Run the emulated Python in the repository. processor: as `qemu-aarch64 -cpu` names it."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{FOLDER / 'site'}:{ROOT}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "TRITON_CACHE_DIR": str(FOLDER / "triton"),
        "OMP_NUM_THREADS": "2",
    }
    return subprocess.run(
        [_python(processor), *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )


def _python(processor: str) -> Path:
    """Write and return a script that runs the emulated Python.

    It is also Python's own `sys.executable`, so that tests can start further processes.
    """
    system, script = FOLDER / "root", FOLDER / f"python-{processor}"
    command = ["qemu-aarch64", "-cpu", processor, "-L", system, "-0", script]
    words = shlex.join(map(str, [*command, system / "usr/bin/python3.11"]))
    script.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    script.chmod(0o755)
    return script


def _run(command: Sequence[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise Unavailable(f"{' '.join(command[:2])}: {(done.stderr or done.stdout)[-500:]}")
