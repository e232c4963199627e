"""BatchFolder: the files and batches of /v1/files and /v1/batches, in one folder that all routers
of an application see.

    files/file-<hex>.json       the file's object of OpenAI's API, and its owner
    files/file-<hex>.data       the file's content
    files/<hex>.part            an upload that is under way
    batches/batch_<hex>.json    the batch's object of OpenAI's API, and its owner
    batches/batch_<hex>.cancel  an empty file: the batch is to be cancelled
    batches/batch_<hex>.output  answers so far, a line each
    batches/batch_<hex>.errors  failures so far, a line each
    worker.lock                 locked by the router that runs batches

All functions block. A JSON file is replaced as a whole, so that a reader never sees half of one.
"""

import contextlib
import os
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from deployments.api.http.json_body import JsonObject

_ID = re.compile(r"(file-|batch_)[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """The settings of the batch folder, as BatchConfig has them.

    in_flight: maximum number of concurrent requests of batches
    file_bytes: maximum bytes of a file
    key_bytes: maximum bytes of all files of an API key
    key_batches: maximum number of unfinished batches of an API key
    keep_seconds: the time for which files and results are kept
    """

    folder: str
    in_flight: int = 32
    file_bytes: int = 200 * 2**20
    key_bytes: int = 10 * 2**30
    key_batches: int = 100
    keep_seconds: float = 30 * 86400.0


class Entry(msgspec.Struct):
    """The record of a stored file or batch in the batch folder.

    owner: the Caller.id of its key
    fields: the file's or batch's object of OpenAI's API
    keep: the seconds for which a batch's results are kept; None: the settings' keep_seconds
    """

    owner: str
    fields: JsonObject = msgspec.field(name="told")  # the name in stored files
    keep: float | None = None


class BatchFolder:
    """The folder of files and batches. Raises OSError if the folder cannot be made."""

    def __init__(self, settings: BatchSettings) -> None:
        self.settings = settings
        self.path = path = Path(settings.folder)
        self._files = path / "files"
        self._batches = path / "batches"
        for folder in (path, self._files, self._batches):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    # -- files

    def upload(self) -> Path:
        """Return a new path to which the body of an upload may be written."""
        return self._files / f"{secrets.token_hex(16)}.part"

    def add_file(
        self, source: Path, name: str, purpose: str, owner: str, keep: float | None, id: str = ""
    ) -> Entry:
        """Store the file at `source` under an id, and return its record.

        With an `id` the call is idempotent, for example after a crash: `source` may have been moved
        already.

        source: a path in this folder
        owner: the Caller.id of its key
        keep: the seconds for which the file is kept, at most the settings' keep_seconds; None:
            as long as this maximum
        id: the file's id; "": a new one
        """
        id = id or new_file_id()
        with contextlib.suppress(FileNotFoundError):
            source.rename(self.data(id))
        now, most = int(time.time()), self.settings.keep_seconds
        fields = {
            "id": id,
            "object": "file",
            "bytes": self.data(id).stat().st_size,
            "created_at": now,
            "expires_at": int(now + (most if keep is None else min(keep, most))),
            "filename": name,
            "purpose": purpose,
            "status": "processed",
        }
        entry = Entry(owner, fields)
        _write(self._files / f"{id}.json", entry)
        return entry

    def data(self, id: str) -> Path:
        """Return the path of a file's content."""
        return self._files / f"{id}.data"

    def file(self, id: str, owner: str) -> Entry | None:
        return _read(self._files, id, owner)

    def files(self, owner: str) -> list[Entry]:
        """Return the owner's files, the newest first."""
        return _list(self._files, owner)

    def remove_file(self, id: str) -> None:
        self.data(id).unlink(missing_ok=True)
        (self._files / f"{id}.json").unlink(missing_ok=True)

    # -- batches

    def add_batch(self, fields: JsonObject, owner: str, keep: float | None) -> Entry:
        entry = Entry(owner, {"id": f"batch_{secrets.token_hex(16)}", **fields}, keep)
        self.save(entry)
        return entry

    def save(self, entry: Entry) -> None:
        _write(self._batches / f"{entry.fields['id']}.json", entry)

    def open_batches(self, ended: set[str]) -> list[Entry]:
        """Return the unfinished batches of all keys, the oldest first.

        ended: ids of ended batches, which are not read; newly ended ones are added
        """
        entries = []
        for path in self._batches.glob("*.json"):
            if path.stem not in ended and (entry := _load(path)) is not None:
                if entry.fields["status"] in RUNNING:
                    entries.append(entry)
                else:
                    ended.add(path.stem)
        entries.sort(key=lambda entry: (entry.fields["created_at"], entry.fields["id"]))
        return entries

    def batch(self, id: str, owner: str) -> Entry | None:
        entry = _read(self._batches, id, owner)
        return None if entry is None else self._with_cancel(entry)

    def batches(self, owner: str) -> list[Entry]:
        """Return the owner's batches, the newest first."""
        return [self._with_cancel(entry) for entry in _list(self._batches, owner)]

    def _with_cancel(self, entry: Entry) -> Entry:
        if entry.fields["status"] in RUNNING:
            since = self.cancelled_at(entry.fields["id"])
            if since is not None:
                entry.fields |= {"status": "cancelling", "cancelling_at": since}
        return entry

    def cancel(self, id: str) -> None:
        """Order the worker to cancel a batch; `cancelled_at` is the time of the first call."""
        with contextlib.suppress(FileExistsError):
            self.part(id, "cancel").touch(mode=0o600, exist_ok=False)

    def cancelled_at(self, id: str) -> int | None:
        """Return the Unix time at which a batch was cancelled; None if it was not."""
        try:
            return int(self.part(id, "cancel").stat().st_mtime)
        except FileNotFoundError:
            return None

    def part(self, id: str, kind: str) -> Path:
        """Return the path of one of a batch's files. kind: "output", "errors" or "cancel"."""
        return self._batches / f"{id}.{kind}"

    def in_use(self) -> set[str]:
        """Return the ids of the files that unfinished batches still read."""
        return {entry.fields["input_file_id"] for entry in self.open_batches(set())}

    def sweep(self) -> None:
        """Remove expired files, batches that ended keep_seconds ago, and remains of abandoned
        uploads.

        Input files of running batches are kept.
        """
        now, keep = time.time(), self.settings.keep_seconds
        used = self.in_use()
        for entry in _list(self._files, None):
            if entry.fields["expires_at"] < now and entry.fields["id"] not in used:
                self.remove_file(entry.fields["id"])
        ended: set[str] = set()
        self.open_batches(ended)
        for id in ended:
            if _changed(self._batches / f"{id}.json") + keep < now:
                for path in self._batches.glob(f"{id}.*"):
                    path.unlink(missing_ok=True)
        for path in self._files.glob("*.part"):
            if _changed(path) + _CUT < now:
                path.unlink(missing_ok=True)

    @property
    def lock(self) -> Path:
        return self.path / "worker.lock"


RUNNING = ("validating", "in_progress", "finalizing")
_CUT = 3600.0  # seconds without a received byte after which an upload counts as abandoned


def new_file_id() -> str:
    return f"file-{secrets.token_hex(16)}"


def _changed(path: Path) -> float:
    """Return the Unix time of a file's last change; the present time if the file is missing."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return time.time()


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
    if not _ID.fullmatch(id):
        # The id becomes part of a path, so it may have safe characters only.
        return None
    entry = _load(folder / f"{id}.json")
    return entry if entry is not None and entry.owner == owner else None


def _list(folder: Path, owner: str | None) -> list[Entry]:
    entries = [
        entry
        for path in folder.glob("*.json")
        if (entry := _load(path)) is not None and owner in (None, entry.owner)
    ]
    entries.sort(key=lambda entry: (-entry.fields["created_at"], entry.fields["id"]))
    return entries


def whole_lines(path: Path) -> Iterator[JsonObject]:
    """Yield the objects of a file of JSON lines.

    An incomplete last line, left by a crash, is removed from the file.
    """
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
