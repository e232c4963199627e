"""BatchFolder: the files and batches of /v1/files and /v1/batches, in one folder that all routers
of an application see.

    files/file-<hex>.json       what OpenAI tells of a file, and whose it is
    files/file-<hex>.data
    batches/batch_<hex>.json    what OpenAI tells of a batch, and whose it is
    batches/batch_<hex>.cancel  it is to be cancelled
    batches/batch_<hex>.output  answers so far, a line each; .errors: failures so far
    worker.lock                 held by the router that works on batches

Everything here blocks. A JSON file is replaced as a whole, so that a reader never sees half of one.
"""

import contextlib
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

_ID = re.compile(r"(file-|batch_)[0-9a-f]{32}")


class Entry(msgspec.Struct):
    """told: the object as OpenAI has it. owner: of Caller.id."""

    owner: str
    told: dict[str, Any]


class BatchFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = path / "files"
        self._batches = path / "batches"
        for folder in (path, self._files, self._batches):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    # -- files

    def upload(self) -> Path:
        """Where the body of an upload may be written."""
        return self._files / f"{secrets.token_hex(16)}.part"

    def add_file(self, source: Path, name: str, purpose: str, owner: str) -> Entry:
        """The file at source, which is in this folder, under a name of its own."""
        id = f"file-{secrets.token_hex(16)}"
        told = {
            "id": id,
            "object": "file",
            "bytes": source.stat().st_size,
            "created_at": int(time.time()),
            "filename": name,
            "purpose": purpose,
            "status": "processed",
        }
        source.rename(self.data(id))
        entry = Entry(owner, told)
        _write(self._files / f"{id}.json", entry)
        return entry

    def data(self, id: str) -> Path:
        """The content of a file."""
        return self._files / f"{id}.data"

    def file(self, id: str, owner: str) -> Entry | None:
        return _read(self._files, id, owner)

    def files(self, owner: str) -> list[Entry]:
        """The newest first."""
        return _list(self._files, owner)

    def remove_file(self, id: str) -> None:
        self.data(id).unlink(missing_ok=True)
        (self._files / f"{id}.json").unlink(missing_ok=True)

    # -- batches

    def add_batch(self, told: dict[str, Any], owner: str) -> Entry:
        entry = Entry(owner, {"id": f"batch_{secrets.token_hex(16)}", **told})
        self.save(entry)
        return entry

    def save(self, entry: Entry) -> None:
        _write(self._batches / f"{entry.told['id']}.json", entry)

    def batch(self, id: str, owner: str) -> Entry | None:
        entry = _read(self._batches, id, owner)
        if entry is not None and self.cancelled(id) and entry.told["status"] in RUNNING:
            entry.told["status"] = "cancelling"
        return entry

    def batches(self, owner: str | None) -> list[Entry]:
        """The newest first; owner: None is everybody's."""
        return _list(self._batches, owner)

    def cancel(self, id: str) -> None:
        """The worker notices it."""
        self.part(id, "cancel").touch(mode=0o600)

    def cancelled(self, id: str) -> bool:
        return self.part(id, "cancel").exists()

    def part(self, id: str, kind: str) -> Path:
        """kind: "output", "errors" or "cancel"."""
        return self._batches / f"{id}.{kind}"

    @property
    def lock(self) -> Path:
        return self.path / "worker.lock"


RUNNING = ("validating", "in_progress", "finalizing")


def _write(path: Path, entry: Entry) -> None:
    new = path.with_suffix(".new")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(msgspec.json.encode(entry))
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def _load(path: Path) -> Entry | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Entry)
    except (OSError, msgspec.MsgspecError):
        return None


def _read(folder: Path, id: str, owner: str) -> Entry | None:
    if not _ID.fullmatch(id):  # it becomes a path
        return None
    entry = _load(folder / f"{id}.json")
    return entry if entry is not None and entry.owner == owner else None


def _list(folder: Path, owner: str | None) -> list[Entry]:
    found = [
        entry
        for path in folder.glob("*.json")
        if (entry := _load(path)) is not None and owner in (None, entry.owner)
    ]
    found.sort(key=lambda entry: (-entry.told["created_at"], entry.told["id"]))
    return found


def whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines. A last line that a crash has cut is taken off it."""
    with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
        end = 0
        for raw in file:
            try:
                line = msgspec.json.decode(raw) if raw.endswith(b"\n") else None
            except msgspec.MsgspecError:
                line = None
            if not isinstance(line, dict):
                file.truncate(end)
                return
            end += len(raw)
            yield line
