"""The routes under /v1/files and /v1/batches."""

import asyncio
import mmap
import re
import time
from collections.abc import Callable
from pathlib import Path

from deployments.api.batch_folder import RUNNING, BatchFolder, Entry
from deployments.api.body_fields import MAX_BATCH_WINDOW
from deployments.api.context import ApiContext
from deployments.api.fields.others import BATCH, EXPIRES_AFTER, FILE, WINDOW, Batch
from deployments.api.fields.schema import TEXT, integer
from deployments.api.http.errors import ApiError, invalid, shown
from deployments.api.http.exchange import ClientDisconnected, HttpExchange, closing
from deployments.api.http.json_body import JsonObject
from deployments.api.route import BYTES, LIST, NAMES, PAGES, READS, RouteTable, page_of

FILES = "/v1/files"
BATCHES = "/v1/batches"
ROUTES = RouteTable(NAMES)
UPLOAD_SECONDS = 600.0
_FILE = ("id", "object", "bytes", "filename", "purpose")
_BATCH = ("id", "object", "endpoint", "status", "input_file_id", "request_counts")

_BOUNDARY = re.compile(rb'multipart/form-data;.*boundary="?([^";,]{1,200})"?', re.I)
_NAME = re.compile(rb'[; ]name="([^"]*)"')
_FILENAME = re.compile(rb'[; ]filename="([^"]*)"')
_WINDOW = re.compile(r"(\d{1,3})([hd])")
_PART = 2**20
_BINARY = b"application/octet-stream"


def _folder(context: ApiContext) -> BatchFolder:
    folder = context.options.batches
    if folder is None:
        raise ApiError(404, "not_found", "batches are off here: the operator sets batch.folder")
    return folder


@ROUTES.get(
    FILES,
    "Files of batches",
    (*LIST, "has_more"),
    statuses=(400, 404),
    query={**PAGES, "purpose": TEXT, "limit": integer(1, 10_000)},
)
async def files(context: ApiContext, exchange: HttpExchange) -> object:
    owned = await asyncio.to_thread(_folder(context).files, exchange.caller.id)
    purpose = exchange.parameters().get("purpose")
    items = [entry.fields for entry in owned if purpose in (None, entry.fields["purpose"])]
    return page_of(items, exchange.parameters(), 10_000, 10_000)


@ROUTES.post(FILES, "A new file", answer=_FILE, statuses=(*READS, 404), form=FILE)
async def new_file(context: ApiContext, exchange: HttpExchange) -> object:
    return (await _upload(context, exchange, _folder(context))).fields


@ROUTES.get(
    BATCHES,
    "Batches",
    (*LIST, "has_more"),
    statuses=(400, 404),
    query={**PAGES, "limit": integer(1, 100)},
)
async def batches(context: ApiContext, exchange: HttpExchange) -> object:
    entries = await asyncio.to_thread(_folder(context).batches, exchange.caller.id)
    return page_of([entry.fields for entry in entries], exchange.parameters(), 20, 100)


@ROUTES.post(BATCHES, "A new batch", BATCH, _BATCH, statuses=(*READS, 404, 429))
async def new_batch(context: ApiContext, exchange: HttpExchange) -> object:
    """Add a batch to the folder, where the BatchWorker finds it."""
    folder, owner = _folder(context), exchange.caller.id
    body = await context.read_as(exchange, BATCH)
    fields, name = _new_batch(body), body.input_file_id
    if await asyncio.to_thread(folder.file, name, owner) is None:
        raise invalid(f"there is no file {shown(name)}", "input_file_id", "not_found")
    entries = await asyncio.to_thread(folder.batches, owner)
    most = folder.settings.key_batches
    if sum(entry.fields["status"] in RUNNING for entry in entries) >= most:
        message = f"{most} batches of this key have not ended (batch.key_batches)"
        raise ApiError(429, "rate_limit_exceeded", message, retry_after=60)
    expiry = body.output_expires_after
    keep = None if expiry is None else float(expiry.seconds)
    return (await asyncio.to_thread(folder.add_batch, fields, owner, keep)).fields


@ROUTES.get(f"{FILES}/{{id}}", "A file", _FILE)
async def one_file(context: ApiContext, exchange: HttpExchange) -> object:
    return (await _own(_folder(context).file, "file", exchange)).fields


@ROUTES.delete(f"{FILES}/{{id}}", "Delete it", statuses=(400, *NAMES))
async def delete_file(context: ApiContext, exchange: HttpExchange) -> object:
    """Delete a file that no open batch reads."""
    folder = _folder(context)
    id = (await _own(folder.file, "file", exchange)).fields["id"]
    if id in await asyncio.to_thread(folder.in_use):
        raise invalid("a batch that has not ended reads this file", "id", "file_in_use")
    await asyncio.to_thread(folder.remove_file, id)
    return {"id": id, "object": "file", "deleted": True}


@ROUTES.get(f"{FILES}/{{id}}/content", "Its bytes", kinds=(BYTES,))
async def file_content(context: ApiContext, exchange: HttpExchange) -> None:
    folder = _folder(context)
    entry = await _own(folder.file, "file", exchange)
    await _send_file(exchange, folder.data(entry.fields["id"]))


@ROUTES.get(f"{BATCHES}/{{id}}", "A batch", _BATCH)
async def one_batch(context: ApiContext, exchange: HttpExchange) -> object:
    return (await _own(_folder(context).batch, "batch", exchange)).fields


@ROUTES.post(f"{BATCHES}/{{id}}/cancel", "Stop it", answer=_BATCH, statuses=(400, *NAMES))
async def cancel_batch(context: ApiContext, exchange: HttpExchange) -> object:
    """Mark a batch as cancelled for the BatchWorker, and answer with the batch."""
    folder = _folder(context)
    entry = await _own(folder.batch, "batch", exchange)
    id, status = entry.fields["id"], entry.fields["status"]
    if status not in (*RUNNING, "cancelling"):
        raise invalid(f"this batch is {status} already", "id")
    await asyncio.to_thread(folder.cancel, id)
    return (await asyncio.to_thread(folder.batch, id, exchange.caller.id) or entry).fields


async def _own(
    read: Callable[[str, str], Entry | None], what: str, exchange: HttpExchange
) -> Entry:
    """Return the caller's file or batch with the id in the path. Raises ApiError 404.

    read: returns the entry with (id, owner), or None. what: the noun for the entry in errors
    """
    id = exchange.path.split("/")[3]
    entry = await asyncio.to_thread(read, id, exchange.caller.id)
    if entry is None:
        raise _missing(what, id)
    return entry


def _missing(what: str, id: str) -> ApiError:
    return ApiError(404, "not_found", f"there is no {what} {shown(id)}", param="id")


def _new_batch(body: Batch) -> JsonObject:
    """Check a body, and return the object of a new batch in OpenAI's form. Raises ApiError 400."""
    window = _WINDOW.fullmatch(body.completion_window)
    seconds = int(window[1]) * (3600 if window[2] == "h" else 86400) if window else 0
    if not 0 < seconds <= MAX_BATCH_WINDOW:
        raise invalid(f"completion_window must be {WINDOW}", "completion_window")
    now = int(time.time())
    stamps = ("in_progress", "finalizing", "completed", "failed", "cancelling", "cancelled")
    return {
        "object": "batch",
        "endpoint": body.endpoint,
        "errors": None,
        "input_file_id": body.input_file_id,
        "completion_window": body.completion_window,
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now,
        "expires_at": now + seconds,
        **{f"{stamp}_at": None for stamp in stamps},
        "expired_at": None,
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": body.metadata,
    }


async def _send_file(exchange: HttpExchange, path: Path) -> None:
    try:
        file = await asyncio.to_thread(path.open, "rb")
    except OSError:
        raise _missing("file", path.stem) from None
    with file:
        if exchange.method == "HEAD":
            await exchange.answer(200, b"", _BINARY)
            return
        await exchange.start(_BINARY, (("x-content-type-options", "nosniff"),))
        while part := await asyncio.to_thread(file.read, _PART):
            await exchange.write(part)
        await exchange.write(b"", more=False)


async def _upload(context: ApiContext, exchange: HttpExchange, folder: BatchFolder) -> Entry:
    """Store the file in a request's form (multipart/form-data with `file` and `purpose`); return
    its entry.

    The body is written to disk as it arrives.
    """
    if b"content-encoding" in exchange.headers:
        raise _unsupported("an upload must not have a content-encoding", "content-encoding")
    kinds = exchange.headers.get(b"content-type", [])
    boundary = _BOUNDARY.match(kinds[0]) if len(kinds) == 1 else None
    if boundary is None:
        raise _unsupported(
            "content-type must be multipart/form-data, with the fields file and purpose",
            "content-type",
        )
    owner, most = exchange.caller.id, folder.settings.key_bytes
    held = sum(entry.fields["bytes"] for entry in await asyncio.to_thread(folder.files, owner))
    if held >= most:
        raise closing(
            413,
            "storage_full",
            f"this key's files take {held} of {most} bytes (batch.key_bytes): delete some",
        )
    raw, content = folder.upload(), folder.upload()
    try:
        await _receive(exchange, raw, min(folder.settings.file_bytes, most - held))
        name, fields = await asyncio.to_thread(_take_form, raw, boundary[1], content)
        purpose = fields.get("purpose", "")
        if purpose != "batch":
            raise invalid("purpose must be batch", "purpose")
        keep = None
        if "expires_after[seconds]" in fields:
            seconds = fields["expires_after[seconds]"]
            after = {
                "anchor": fields.get("expires_after[anchor]"),
                "seconds": int(seconds) if seconds.isdecimal() else None,
            }
            keep = float(EXPIRES_AFTER.read(after, "expires_after").seconds)
        return await asyncio.to_thread(folder.add_file, content, name, purpose, owner, keep)
    finally:
        for path in (raw, content):
            path.unlink(missing_ok=True)


def _unsupported(message: str, param: str) -> ApiError:
    return closing(415, "unsupported_media_type", message, param)


async def _receive(exchange: HttpExchange, path: Path, limit: int) -> None:
    size = 0
    with path.open("xb") as file:
        path.chmod(0o600)
        try:
            async with asyncio.timeout(UPLOAD_SECONDS):
                while True:
                    message = await exchange.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnected
                    part = message.get("body", b"")
                    size += len(part)
                    if size > limit:
                        raise closing(
                            413,
                            "body_too_large",
                            f"the form is larger than {limit} bytes (batch.file_bytes, or what "
                            "is left of batch.key_bytes)",
                        )
                    if part:
                        await asyncio.to_thread(file.write, part)
                    if not message.get("more_body", False):
                        return
        except TimeoutError:
            late = f"the file did not arrive within {UPLOAD_SECONDS:g} s"
            raise closing(408, "request_timeout", late) from None


def _take_form(raw: Path, boundary: bytes, target: Path) -> tuple[str, dict[str, str]]:
    """Extract the file of a form to `target`; return the file's name and the form's other fields.

    raw: file with the whole body of the form

    Raises ApiError 400.
    """
    fields: dict[str, str] = {}
    name = ""
    line = b"--" + boundary
    if not raw.stat().st_size:
        raise invalid("the form is empty", "file", "missing_field")
    with raw.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = data.find(line)
        while at >= 0:
            at += len(line)
            end = data.find(b"\r\n" + line, at)
            head = data.find(b"\r\n\r\n", at)
            if end < 0 or head < 0 or head > end:
                break
            headers = data[at : min(head, at + 4096)]
            field = _NAME.search(headers)
            if field is not None and field[1] == b"file":
                filename = _FILENAME.search(headers)
                name = filename[1].decode("utf-8", "replace")[:256] if filename else "file"
                target.touch(mode=0o600)
                with target.open("wb") as into:
                    for begin in range(head + 4, end, _PART):
                        into.write(data[begin : min(end, begin + _PART)])
            elif field is not None and end - head < 1024:
                fields[field[1].decode("latin-1")] = data[head + 4 : end].decode("latin-1")
            at = end + 2
    if not name:
        raise invalid("the form has no whole field `file`", "file", "missing_field")
    return name, fields
