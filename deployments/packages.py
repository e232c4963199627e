"""prefer_own, why_mixed: ensure that Python imports Manta's own packages.

Their names are plain words, which other distributions may also use.
"""

import contextlib
import hashlib
import importlib.util
import sys
import tomllib
from base64 import urlsafe_b64encode
from importlib import metadata
from pathlib import Path

PACKAGES = ("deployments", "engine", "kernels", "loadtest")
SOURCE = Path(__file__).resolve().parents[1]
_NAME = "manta-serve"


def prefer_own() -> None:
    """Put Manta's folder first in sys.path, if Python would import other packages with the same
    names.

    Such packages may be in a folder of PYTHONPATH.
    """
    if any(_folder(name) != SOURCE / name for name in PACKAGES):
        sys.path.insert(0, str(SOURCE))


def _folder(name: str) -> Path | None:
    module = sys.modules.get(name)
    spec = module.__spec__ if module is not None else importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).resolve().parent


def version() -> str:
    """Return Manta's version; in a source folder it is read from pyproject.toml."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(_NAME)
    project = tomllib.loads((SOURCE / "pyproject.toml").read_text("utf-8"))["project"]
    return f"{project['version']} (a source folder)"


def why_mixed(path: list[str] | None = None) -> str:
    """Return a text about the distribution that has overwritten Manta's files, with a suggestion;
    "" if none has.

    Installers do not report it if two distributions have a file of the same name.

    path: folders in which distributions are searched; None: sys.path.
    """
    where = sys.path if path is None else path
    ours = next(iter(metadata.distributions(name=_NAME, path=where)), None)
    for package in PACKAGES:
        file = SOURCE / package / "__init__.py"
        others = [*metadata.distributions(name=package, path=where)]
        if ours is not None and _overwritten(ours, file):
            others = [
                distribution
                for distribution in metadata.distributions(path=where)
                if distribution.name != _NAME
            ]
        elif not any(_brings(distribution, file) for distribution in others):
            continue
        named = [distribution for distribution in others if _brings(distribution, file)]
        whose = (
            " and ".join(f"{distribution.name} {distribution.version}" for distribution in named)
            or "something else"
        )
        remove = " ".join(distribution.name for distribution in named) or "that"
        return (
            f"Manta's package {package!r} and that of {whose} lie in the same folder "
            f"{file.parent}, and one has overwritten files of the other; uninstall {remove} "
            f"and install {_NAME} again, or give Manta an environment of its own"
        )
    return ""


def _brings(distribution: metadata.Distribution, file: Path) -> bool:
    names = f"{file.parent.name}/{file.name}"
    listed = distribution.read_text("RECORD") or ""
    if not any(line.startswith(f"{names},") for line in listed.splitlines()):
        return False
    return Path(str(distribution.locate_file(names))).resolve() == file


def _overwritten(ours: metadata.Distribution, file: Path) -> bool:
    """Return whether a file of Manta differs from the installed one; False in a source folder.

    ours: Manta's distribution.
    """
    names = f"{file.parent.name}/{file.name}"
    for path in ours.files or ():
        if str(path) == names and path.hash is not None:
            if Path(str(ours.locate_file(path))).resolve() != file:
                return False
            digest = hashlib.new(path.hash.mode, file.read_bytes()).digest()
            return urlsafe_b64encode(digest).decode().rstrip("=") != path.hash.value
    return False
