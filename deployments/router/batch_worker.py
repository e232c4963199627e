"""BatchWorker: answers the requests of batches, one router of an application at a time.

The router that holds the folder's lock works. The system gives the lock back when its process
ends, and another router goes on: answers are appended to a file as they come, and what is in it
is not asked again.
"""

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import IO, Any

import msgspec

from deployments.api.batches.folder import RUNNING, BatchFolder, Entry, whole_lines

logger = logging.getLogger("manta.router")

LOOK_SECONDS = 1.0
SAVE_SECONDS = 1.0  # between two words of the counts
MAX_REQUESTS = 50_000  # of a batch: OpenAI's
MAX_ERRORS = 100  # of a bad file that are told
PRIORITY = 16  # behind all others: the last of the steps that a queue tells apart

# (owner, path, body, request id) -> status, headers, answer
Ask = Callable[[str, str, bytes, str], Awaitable[tuple[int, dict[bytes, bytes], bytes]]]


class BatchWorker:
    """in_flight: requests at once."""

    def __init__(self, folder: BatchFolder, ask: Ask, in_flight: int) -> None:
        self._folder = folder
        self._ask = ask
        self._in_flight = in_flight
        self._lock: IO[bytes] | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._watch())

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    async def _watch(self) -> None:
        while True:
            try:
                if self._take_lock():
                    await self.look()
            except Exception:
                logger.exception("the work on batches failed; another try follows")
            await asyncio.sleep(LOOK_SECONDS)

    def _take_lock(self) -> bool:
        if self._lock is None:
            lock = open(os.open(self._folder.lock, os.O_RDWR | os.O_CREAT, 0o600), "r+b")  # noqa: SIM115
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                lock.close()
                return False
            self._lock = lock
        return True

    async def look(self) -> None:
        """Work until no batch is left, the oldest first."""
        while True:
            entries = await asyncio.to_thread(self._folder.batches, None)
            open_ = [entry for entry in entries if entry.told["status"] in RUNNING]
            if not open_:
                return
            await self._work(open_[-1])

    async def _work(self, entry: Entry) -> None:
        told, folder = entry.told, self._folder
        id = told["id"]
        if told["status"] == "validating":
            total, errors = await asyncio.to_thread(self._validate, entry)
            told["request_counts"]["total"] = total
            if errors:
                told["errors"] = {"object": "list", "data": errors}
                await self._becomes(entry, "failed")
                return
            await self._becomes(entry, "in_progress")
        if told["status"] == "in_progress":
            done = await asyncio.to_thread(self._done, entry)
            run = _Run(self, entry, done)
            try:
                await run.all()
            finally:
                run.close()
            told["cancelling_at"] = int(time.time()) if folder.cancelled(id) else None
            await self._becomes(entry, "finalizing")
        await asyncio.to_thread(self._publish, entry)
        await self._becomes(entry, "cancelled" if told["cancelling_at"] else "completed")
        logger.info("batch %s: %s, %s", id, told["status"], told["request_counts"])

    async def _becomes(self, entry: Entry, status: str) -> None:
        entry.told["status"] = status
        entry.told[f"{status}_at"] = int(time.time())
        await asyncio.to_thread(self._folder.save, entry)

    def _validate(self, entry: Entry) -> tuple[int, list[dict[str, Any]]]:
        """How many requests there are, and what is wrong with them, in OpenAI's form."""
        told = entry.told
        errors: list[dict[str, Any]] = []
        seen: set[str] = set()
        total = 0

        def wrong(code: str, message: str, line: int | None, param: str | None = None) -> None:
            errors.append({"code": code, "message": message, "line": line, "param": param})

        try:
            with self._folder.data(told["input_file_id"]).open("rb") as file:
                for number, raw in enumerate(file, 1):
                    if len(errors) >= MAX_ERRORS:
                        break
                    if not raw.strip():
                        continue
                    total += 1
                    if total > MAX_REQUESTS:
                        wrong("too_many_tasks", f"at most {MAX_REQUESTS} requests", number)
                        break
                    _check_line(raw, told["endpoint"], seen, number, wrong)
        except OSError:
            wrong("invalid_file", "the input file is gone", None, "input_file_id")
        if not total and not errors:
            wrong("empty_file", "the input file has no request", None, "input_file_id")
        return total, errors

    def _done(self, entry: Entry) -> set[str]:
        """custom_ids that were answered before this worker began; the counts follow."""
        counts = entry.told["request_counts"]
        found: set[str] = set()
        for kind, name in (("output", "completed"), ("errors", "failed")):
            ids = [line["custom_id"] for line in whole_lines(self._part(entry, kind))]
            counts[name] = len(ids)
            found.update(ids)
        return found

    def _part(self, entry: Entry, kind: str) -> Path:
        return self._folder.part(entry.told["id"], kind)

    def _publish(self, entry: Entry) -> None:
        """What has been written becomes files. Done again after a crash, it goes on."""
        for kind, field in (("output", "output_file_id"), ("errors", "error_file_id")):
            path = self._part(entry, kind)
            if path.exists() and path.stat().st_size:
                name = f"{entry.told['id']}_{kind}.jsonl"
                file = self._folder.add_file(path, name, "batch_output", entry.owner)
                entry.told[field] = file.told["id"]
                self._folder.save(entry)
        self._part(entry, "cancel").unlink(missing_ok=True)


def _check_line(
    raw: bytes, endpoint: str, seen: set[str], number: int, wrong: Callable[..., None]
) -> None:
    try:
        line = json.loads(raw)
    except ValueError:
        line = None
    if not isinstance(line, dict):
        wrong("invalid_json_line", "the line is not a JSON object", number)
        return
    custom_id, body = line.get("custom_id"), line.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        wrong("missing_required_parameter", "custom_id must be a string", number, "custom_id")
    elif custom_id in seen:
        wrong("duplicate_custom_id", "custom_id was there before", number, "custom_id")
    else:
        seen.add(custom_id)
    if line.get("method") != "POST":
        wrong("invalid_method", "method must be POST", number, "method")
    if line.get("url") != endpoint:
        wrong("mismatched_endpoint", f"url must be the batch's endpoint, {endpoint}", number, "url")
    if not isinstance(body, dict):
        wrong("missing_required_parameter", "body must be an object", number, "body")
    elif body.get("stream"):
        wrong("invalid_request", "answers of a batch are not streamed", number, "body.stream")


class _Run:
    """The requests of one batch that are not yet answered."""

    def __init__(self, worker: BatchWorker, entry: Entry, done: set[str]) -> None:
        self._worker = worker
        self._folder = worker._folder
        self._entry = entry
        self._done = done
        self._counts = entry.told["request_counts"]
        self._files = {
            kind: open(  # noqa: SIM115
                os.open(worker._part(entry, kind), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
                "ab",
            )
            for kind in ("output", "errors")
        }
        self._saved = 0.0
        self._running: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        for task in self._running:
            task.cancel()
        for file in self._files.values():
            file.close()

    async def all(self) -> None:
        told = self._entry.told
        with self._folder.data(told["input_file_id"]).open("rb") as file:
            while raw := await asyncio.to_thread(file.readline):
                if not raw.strip():
                    continue
                line = msgspec.json.decode(raw)
                if line["custom_id"] in self._done:
                    continue
                while len(self._running) >= self._worker._in_flight:
                    await self._some()
                if self._folder.cancelled(told["id"]):
                    break
                self._running.add(asyncio.create_task(self._one(line)))
        while self._running:
            await self._some()

    async def _some(self) -> None:
        done, self._running = await asyncio.wait(
            self._running, timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        for task in done:
            task.result()
        now = time.monotonic()
        if now - self._saved > SAVE_SECONDS:
            self._saved = now
            await asyncio.to_thread(self._folder.save, self._entry)
        if self._folder.cancelled(self._entry.told["id"]):
            for task in self._running:
                task.cancel()
            if self._running:
                await asyncio.wait(self._running)
            self._running = set()

    async def _one(self, line: dict[str, Any]) -> None:
        body = {**line["body"], "priority": PRIORITY}
        raw = msgspec.json.encode(body)
        wait, id = 1.0, f"batch_req_{secrets.token_hex(12)}"
        while True:
            status, headers, answer = await self._worker._ask(
                self._entry.owner, line["url"], raw, id
            )
            # No room now, or no replica, or the key's minute is used up: there is time.
            later = status in (429, 503) and headers.get(b"x-should-retry") != b"false"
            if not later:
                break
            with contextlib.suppress(ValueError):
                wait = min(60.0, max(1.0, float(headers.get(b"retry-after", b"1"))))
            await asyncio.sleep(wait * (1 + secrets.randbelow(256) / 1024))
        kind = "output" if status == 200 else "errors"
        response = {
            "status_code": status,
            "request_id": id,
            "body": msgspec.Raw(answer or b"{}"),
        }
        told = {
            "id": id,
            "custom_id": line["custom_id"],
            "response": response,
            "error": None,
        }
        self._files[kind].write(msgspec.json.encode(told) + b"\n")
        self._files[kind].flush()
        self._counts["completed" if status == 200 else "failed"] += 1
