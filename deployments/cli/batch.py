"""`manta batch`: run a JSON Lines file of requests and write the answers to another file."""

import json
import secrets
import shutil
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from deployments.cli.chat import ServerError, read_key
from deployments.cli.console import err
from deployments.error_text import reason
from engine.errors import ConfigError

POLL_SECONDS = 1.0
_PATIENCE = 60  # number of polls in a row for which the server may be unreachable
_ENDED = ("completed", "failed", "cancelled", "expired")
_UPLOAD_SECONDS = 600.0


def run(source: Path, output: Path, url: str, key: Path | None, resume: str | None) -> int:
    """Run a batch, download its files, and return the exit code.

    The code is 0 if every request was answered, 1 if some failed. Failures are written to
    OUTPUT.errors.

    resume: id of a batch that was started earlier; None: start a new one.

    Raises ConfigError, ServerError.
    """
    server = _Server(url, read_key(key))
    if resume is None:
        file, endpoint = server.upload(source), _endpoint(source)
        asked = {"input_file_id": file, "endpoint": endpoint, "completion_window": "24h"}
        batch = server.json("/batches", asked)
    else:
        batch = server.json(f"/batches/{resume}")
    err.print(f"{batch['id']}: --resume {batch['id']} looks at it again")
    batch = _wait(server, batch)
    for kind, path in (
        ("output_file_id", output),
        ("error_file_id", output.with_name(f"{output.name}.errors")),
    ):
        if batch[kind]:
            server.download(f"/files/{batch[kind]}/content", path)
            err.print(f"{path}")
    for error in (batch["errors"] or {}).get("data", []):
        where = source if error["line"] is None else f"{source}:{error['line']}"
        err.print(f"{where}: {error['message']}", markup=False)
    counts = batch["request_counts"]
    err.print(
        f"{batch['status']}: {counts['completed']} of {counts['total']} answered, "
        f"{counts['failed']} failed"
    )
    return 0 if batch["status"] == "completed" and not counts["failed"] else 1


def _endpoint(source: Path) -> str:
    """Return the `url` of the file's first request, the batch's endpoint. Raises ConfigError."""
    try:
        with source.open(encoding="utf-8") as file:
            return str(json.loads(file.readline())["url"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{source}: the first line is no request with `url` ({type(error).__name__})",
            param=str(source),
        ) from None


def _wait(server: "_Server", batch: dict[str, Any]) -> dict[str, Any]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=err) as bars:
        bar, away = bars.add_task(batch["status"], total=None), 0
        while True:
            counts = batch["request_counts"]
            done = counts["completed"] + counts["failed"]
            bars.update(
                bar, completed=done, total=counts["total"] or None, description=batch["status"]
            )
            if batch["status"] in _ENDED:
                return batch
            time.sleep(POLL_SECONDS)
            try:
                batch, away = server.json(f"/batches/{batch['id']}"), 0
            except ServerError as error:
                away += 1
                if error.status not in (0, 502, 503) or away > _PATIENCE:
                    raise


class _Server:
    def __init__(self, url: str, key: str | None) -> None:
        base = url.rstrip("/")
        self._base = base if base.endswith("/v1") else f"{base}/v1"
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def json(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        return dict(json.loads(self.get(path, data)))

    def upload(self, source: Path) -> str:
        """Upload a batch's input file and return the file's id."""
        boundary = secrets.token_hex(16)
        try:
            content = source.read_bytes()
        except OSError as error:
            raise ConfigError(f"{source}: {error.strerror or error}", param=str(source)) from None
        head = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="batch.jsonl"'
            "\r\nContent-Type: application/jsonl\r\n\r\n"
        )
        form = head.encode() + content + f"\r\n--{boundary}--\r\n".encode()
        kind = f"multipart/form-data; boundary={boundary}"
        return str(json.loads(self.get("/files", form, kind))["id"])

    def get(self, path: str, data: bytes | None = None, kind: str = "application/json") -> bytes:
        with self._open(path, data, kind) as answer:
            return bytes(answer.read())

    def download(self, path: str, target: Path) -> None:
        try:
            with self._open(path) as answer, target.open("wb") as file:
                shutil.copyfileobj(answer, file)
        except OSError as error:
            raise ConfigError(f"{target}: {error.strerror or error}", param=str(target)) from None

    def _open(self, path: str, data: bytes | None = None, kind: str = "") -> Any:
        headers = {**self._headers, **({"Content-Type": kind} if data is not None else {})}
        try:
            request = urllib.request.Request(self._base + path, data, headers)
            return urllib.request.urlopen(request, timeout=_UPLOAD_SECONDS)
        except urllib.error.HTTPError as error:
            try:
                message = json.loads(error.read())["error"]["message"]
            except (ValueError, LookupError, TypeError):
                message = f"HTTP {error.code}"
            raise ServerError(f"{self._base}{path}: {message}", status=error.code) from None
        except (OSError, ValueError) as error:
            why = reason(getattr(error, "reason", error))
            raise ServerError(
                f"{self._base} cannot be reached ({why}); is `manta serve` running there? "
                "--url says where"
            ) from None
