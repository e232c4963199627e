"""ModelScopeModel: downloads a model's files from ModelScope, through its public HTTP API.

Cached files are named by their SHA-256, which is in the listing and is checked after each download.
A model's folder has links to these files, so a file that two revisions share is downloaded once.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from fnmatch import fnmatch
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import urlopen

from deployments.environment import modelscope_endpoint
from engine.errors import ConfigError

PREFIX = "modelscope:"
_BRANCH = "master"
_TIMEOUT_S = 60.0


class _File(NamedTuple):
    path: str
    sha256: str


class ModelScopeModel:
    """A model on ModelScope at a revision.

    name: owner/name. revision: a branch, tag or commit; None: master.
    cache: folder of our cached models.
    """

    def __init__(self, name: str, revision: str | None, cache: Path) -> None:
        self._name, self._revision = name, revision or _BRANCH
        self._folder = cache / "modelscope"
        self._endpoint = modelscope_endpoint()
        self._files = self._list()

    def fetch(self, patterns: Sequence[str]) -> Path:
        """Download the files that match one of the patterns, and return the folder of the model.

        Raises ConfigError.
        """
        key = hashlib.sha256("\0".join(f"{f.path}\0{f.sha256}" for f in self._files).encode())
        folder = self._folder / f"{self._name.replace('/', '--')}-{key.hexdigest()[:12]}"
        for file in self._files:
            if any(fnmatch(file.path, pattern) for pattern in patterns):
                target = folder / file.path
                if not target.exists():
                    self._link(self._blob(file), target)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _list(self) -> list[_File]:
        with self._open("/repo/files", Revision=self._revision, Recursive="true") as response:
            try:
                answer = json.load(response)
            except ValueError as error:
                raise self._unusable(error) from error
        files = []
        for entry in (answer.get("Data") or {}).get("Files") or []:
            path, sha256 = entry.get("Path"), entry.get("Sha256")
            if entry.get("Type") == "blob" and isinstance(path, str) and isinstance(sha256, str):
                parts = PurePosixPath(path).parts
                if path.startswith("/") or ".." in parts or len(sha256) != 64:
                    raise self._fault(f"the listing has a file that cannot be taken: {path!r}")
                files.append(_File(path, sha256.lower()))
        if not files:
            raise self._fault(f"revision {self._revision!r} has no files")
        return sorted(files)

    def _blob(self, file: _File) -> Path:
        """Return the cached file with the SHA-256 of a listed file, after downloading it if it is
        missing."""
        blobs = self._folder / "blobs"
        target = blobs / file.sha256
        if target.exists():
            return target
        blobs.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()
        descriptor, temporary = tempfile.mkstemp(dir=blobs)
        try:
            with os.fdopen(descriptor, "wb") as out:
                self._copy(file.path, out, digest)
            if digest.hexdigest() != file.sha256:
                raise self._fault(f"{file.path} is not the file that the listing names; try again")
            os.replace(temporary, target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        return target

    def _copy(self, path: str, out: BinaryIO, digest: Any) -> None:
        with self._open("/repo", Revision=self._revision, FilePath=path) as response:
            try:
                while chunk := response.read(1 << 20):
                    digest.update(chunk)
                    out.write(chunk)
            except (OSError, HTTPException) as error:
                raise self._unusable(error) from error

    def _open(self, route: str, **parameters: str) -> Any:
        """Send a GET request to ModelScope's API, and return the open response. Raises
        ConfigError."""
        url = f"{self._endpoint}/api/v1/models/{self._name}{route}?{urlencode(parameters)}"
        try:
            return urlopen(url, timeout=_TIMEOUT_S)
        except HTTPError as error:
            if error.code in (401, 403, 404):
                raise self._fault(
                    f"no such public model, or no revision {self._revision!r}; download a private "
                    "one by ModelScope's own tool and give its folder"
                ) from error
            raise self._unusable(error) from error
        except OSError as error:
            raise self._unusable(error) from error

    def _unusable(self, error: Exception) -> ConfigError:
        return self._fault(
            f"{self._endpoint} cannot be used ({error}); download the model elsewhere and give its "
            "folder, or set MODELSCOPE_DOMAIN"
        )

    def _fault(self, text: str) -> ConfigError:
        return ConfigError(f"model '{PREFIX}{self._name}': {text}", param="model")

    def _link(self, blob: Path, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        temporary.symlink_to(blob)
        os.replace(temporary, target)
