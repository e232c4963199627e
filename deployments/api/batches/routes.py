"""The routes under /v1/files and /v1/batches."""

import asyncio
import mmap
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

import msgspec

from deployments.api.batches.folder import BatchFolder, Entry
from deployments.api.http.errors import NOT_FOUND, ApiError, invalid, shown
from deployments.api.http.exchange import ClientDisconnected, HttpExchange

if TYPE_CHECKING:
    from deployments.api.app import Api

FILES = "/v1/files"
BATCHES = "/v1/batches"
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
UPLOAD_SECONDS = 600.0
MAX_METADATA = 16  # OpenAI's

_BOUNDARY = re.compile(rb'multipart/form-data;.*boundary="?([^";,]{1,200})"?', re.I)
_NAME = re.compile(rb'[; ]name="([^"]*)"')
_FILENAME = re.compile(rb'[; ]filename="([^"]*)"')
_PART = 2**20
_BINARY = b"application/octet-stream"


def _folder(api: "Api") -> BatchFolder:
    folder = api.options.batches
    if folder is None:
        raise ApiError(
            404, "not_found", "batches are off here: the operator sets batch.folder", kind=NOT_FOUND
        )
    return folder


def _query(exchange: HttpExchange) -> dict[str, str]:
    return dict(parse_qsl(exchange.query.decode("latin-1"), max_num_fields=16))


async def files(api: "Api", exchange: HttpExchange) -> None:
    """GET and POST of /v1/files."""
    folder, owner = _folder(api), exchange.caller.id
    if exchange.method == "POST":
        entry = await _upload(api, exchange, folder)
        await exchange.answer(200, msgspec.json.encode(entry.told))
        return
    found = await asyncio.to_thread(folder.files, owner)
    purpose = _query(exchange).get("purpose")
    entries = [entry for entry in found if purpose in (None, entry.told["purpose"])]
    await _answer_list(exchange, entries, 10_000)


async def one_file(api: "Api", exchange: HttpExchange) -> None:
    """GET and DELETE of /v1/files/{id}, GET of /v1/files/{id}/content."""
    folder = _folder(api)
    id, _, rest = exchange.path[len(FILES) + 1 :].partition("/")
    entry = await asyncio.to_thread(folder.file, id, exchange.caller.id)
    if entry is None or rest not in ("", "content"):
        raise _missing("file", id)
    if exchange.method == "DELETE":
        await asyncio.to_thread(folder.remove_file, id)
        told = {"id": id, "object": "file", "deleted": True}
        await exchange.answer(200, msgspec.json.encode(told))
    elif rest:
        await _send_file(exchange, folder.data(id))
    else:
        await exchange.answer(200, msgspec.json.encode(entry.told))


async def batches(api: "Api", exchange: HttpExchange) -> None:
    """GET and POST of /v1/batches."""
    folder, owner = _folder(api), exchange.caller.id
    if exchange.method == "POST":
        told = _checked(await api.read(exchange))
        if await asyncio.to_thread(folder.file, told["input_file_id"], owner) is None:
            raise invalid(
                f"there is no file {shown(told['input_file_id'])}", "input_file_id", "not_found"
            )
        entry = await asyncio.to_thread(folder.add_batch, told, owner)
        await exchange.answer(200, msgspec.json.encode(entry.told))
        return
    await _answer_list(exchange, await asyncio.to_thread(folder.batches, owner), 100)


async def one_batch(api: "Api", exchange: HttpExchange) -> None:
    """GET of /v1/batches/{id}, POST of /v1/batches/{id}/cancel."""
    folder = _folder(api)
    id, _, rest = exchange.path[len(BATCHES) + 1 :].partition("/")
    entry = await asyncio.to_thread(folder.batch, id, exchange.caller.id)
    if entry is None or rest not in ("", "cancel"):
        raise _missing("batch", id)
    if rest:
        if entry.told["status"] in ("completed", "failed", "cancelled"):
            raise invalid(f"this batch is {entry.told['status']} already", "id")
        await asyncio.to_thread(folder.cancel, id)
        entry.told["status"] = "cancelling"
    await exchange.answer(200, msgspec.json.encode(entry.told))


def _missing(what: str, id: str) -> ApiError:
    return ApiError(404, "not_found", f"there is no {what} {shown(id)}", param="id", kind=NOT_FOUND)


def _checked(body: dict[str, Any]) -> dict[str, Any]:
    """A new batch. Raises ApiError 400."""
    for name in ("input_file_id", "endpoint", "completion_window"):
        if not isinstance(body.get(name), str):
            code = "missing_field" if body.get(name) is None else "invalid_type"
            raise invalid(f"{name} must be a string", name, code)
    if body["endpoint"] not in ENDPOINTS:
        raise invalid(f"endpoint must be one of {', '.join(ENDPOINTS)}", "endpoint")
    if body["completion_window"] != "24h":
        raise invalid("completion_window must be 24h", "completion_window")
    metadata = body.get("metadata")
    if metadata is not None and not (
        isinstance(metadata, dict)
        and len(metadata) <= MAX_METADATA
        and all(isinstance(text, str) and len(text) <= 512 for text in metadata.values())
    ):
        raise invalid("metadata must be up to 16 strings by name", "metadata")
    now = int(time.time())
    stamps = ("in_progress", "finalizing", "completed", "failed", "cancelling", "cancelled")
    return {
        "object": "batch",
        "endpoint": body["endpoint"],
        "errors": None,
        "input_file_id": body["input_file_id"],
        "completion_window": "24h",
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now,
        "expires_at": None,
        **{f"{stamp}_at": None for stamp in stamps},
        "expired_at": None,
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": metadata,
    }


async def _answer_list(exchange: HttpExchange, entries: list[Entry], most: int) -> None:
    """A page of them: `limit` and `after` of the query."""
    query = _query(exchange)
    limit, after = (
        query.get("limit", str(min(most, 20) if most <= 100 else most)),
        query.get("after"),
    )
    if not limit.isdecimal() or not 1 <= int(limit) <= most:
        raise invalid(f"limit must be 1 to {most}", "limit")
    ids = [entry.told["id"] for entry in entries]
    if after is not None:
        if after not in ids:
            raise invalid(f"there is no {shown(after)}", "after")
        entries = entries[ids.index(after) + 1 :]
    page = [entry.told for entry in entries[: int(limit)]]
    told = {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(entries) > len(page),
    }
    await exchange.answer(200, msgspec.json.encode(told))


async def _send_file(exchange: HttpExchange, path: Path) -> None:
    try:
        file = await asyncio.to_thread(path.open, "rb")
    except OSError:
        raise _missing("file", path.stem) from None
    with file:
        await exchange.start(_BINARY, (("x-content-type-options", "nosniff"),))
        while part := await asyncio.to_thread(file.read, _PART):
            await exchange.write(part)
        await exchange.write(b"", more=False)


async def _upload(api: "Api", exchange: HttpExchange, folder: BatchFolder) -> Entry:
    """multipart/form-data with `file` and `purpose`, to the disk as it comes."""
    kinds = exchange.values(b"content-type")
    found = _BOUNDARY.match(kinds[0]) if len(kinds) == 1 else None
    if found is None:
        raise ApiError(
            415,
            "unsupported_media_type",
            "content-type must be multipart/form-data, with the fields file and purpose",
            param="content-type",
        )
    raw = folder.upload()
    try:
        await _receive(exchange, raw, api.options.batch_file_bytes)
        content, name, purpose = await asyncio.to_thread(_take_form, raw, found[1], folder.upload())
        try:
            if purpose != "batch":
                raise invalid("purpose must be batch", "purpose")
            return await asyncio.to_thread(
                folder.add_file, content, name, purpose, exchange.caller.id
            )
        finally:
            content.unlink(missing_ok=True)
    finally:
        raw.unlink(missing_ok=True)


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
                        raise ApiError(
                            413,
                            "body_too_large",
                            f"the file is larger than {limit} bytes (batch.file_bytes)",
                            headers=(("connection", "close"),),
                        )
                    if part:
                        await asyncio.to_thread(file.write, part)
                    if not message.get("more_body", False):
                        return
        except TimeoutError:
            late = f"the file did not arrive within {UPLOAD_SECONDS:g} s"
            raise ApiError(408, "request_timeout", late) from None


def _take_form(raw: Path, boundary: bytes, target: Path) -> tuple[Path, str, str]:
    """The file's content at target, its name, the purpose. Raises ApiError 400."""
    fields: dict[str, bytes] = {}
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
                given = _FILENAME.search(headers)
                name = given[1].decode("utf-8", "replace")[:256] if given else "file"
                target.touch(mode=0o600)
                with target.open("wb") as into:
                    for begin in range(head + 4, end, _PART):
                        into.write(data[begin : min(end, begin + _PART)])
            elif field is not None and end - head < 1024:
                fields[field[1].decode("latin-1")] = data[head + 4 : end]
            at = end + 2
    if not name:
        raise invalid("the form has no whole field `file`", "file", "missing_field")
    return target, name, fields.get("purpose", b"").decode("latin-1")
