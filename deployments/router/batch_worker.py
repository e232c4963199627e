"""BatchWorker: runs the requests of batches (/v1/batches), at one router of an application at a
time.

The router that holds the lock of the batch folder does the work. The kernel releases the lock when
that process ends, and another router continues. Answers are appended to files as they arrive, and
answered requests are not sent again.
"""

import asyncio
import errno
import fcntl
import json
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Generator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import IO, Any

import msgspec

from deployments.api.auth import known_caller
from deployments.api.batch_folder import BatchFolder, Entry, new_file_id, whole_lines
from deployments.api.fields.pooled import BYTES, BYTES_ONLY
from deployments.api.http.errors import ApiError, internal
from deployments.api.http.json_body import parse_json
from deployments.api.options import ApiOptions
from deployments.router.serve.handle_call import AsgiApp, post, wait_of
from engine.messages import BATCH_PRIORITY

logger = logging.getLogger("manta.router")

POLL_SECONDS = 1.0
SAVE_SECONDS = 1.0  # seconds between two writes of a batch's counts
SWEEP_SECONDS = 3600.0
AGAIN_SECONDS = 30.0  # seconds until the next try after the work on a batch has raised an error
MAX_AT_ONCE = 64  # batches that run at once; they share `batch.in_flight`
MAX_REQUESTS = 50_000  # maximum of requests in a batch, as OpenAI's limit
MAX_ERRORS = 100  # maximum of errors listed for an invalid file
MAX_TRIES = 5  # failed tries in a row after which a batch is given up

_PARTS = (("output", "output_file_id", "completed"), ("errors", "error_file_id", "failed"))
_REST = {
    "expired": ("batch_expired", "the batch's completion_window was over before this request"),
    "cancelled": ("batch_cancelled", "the batch was cancelled before this request"),
}

# (owner, path, body, request id, seconds allowed) -> status, headers, body
Answer = tuple[int, dict[bytes, bytes], bytes]
Ask = Callable[[str, str, dict[str, Any], str, float], Awaitable[Answer]]


def asker(app: AsgiApp, options: Callable[[], ApiOptions]) -> Ask:
    """Return a function that sends a batch's request to our own HTTP API, without a socket.

    The request has the present rights and limits of the API key that created the batch.

    options: returns the API's present options, including the API keys.
    """

    async def ask(owner: str, path: str, body: dict[str, Any], id: str, seconds: float) -> Answer:
        caller = known_caller(owner, options())
        if caller is None:
            return 401, {}, ApiError(401, "invalid_api_key", "the batch's key is gone").body()
        # Batches use a separate tenant, so that the key's other requests do not queue behind them.
        caller = replace(caller, tenant=f"{owner}/batch")
        priority = max(BATCH_PRIORITY, caller.least_priority)
        # json is used because msgspec refuses integers beyond 64 bits and writes infinity as null.
        payload = json.dumps({**body, "priority": priority}).encode()
        return await post(app, path, payload, caller, id, seconds)

    return ask


class BatchWorker:
    def __init__(self, folder: BatchFolder, ask: Ask) -> None:
        self.folder = folder
        self.ask = ask
        # A semaphore serves its waiters in order, so batches share the slots fairly.
        self.slots = asyncio.Semaphore(folder.settings.in_flight)
        self._lock: IO[bytes] | None = None
        self._task: asyncio.Task[None] | None = None
        self._batches: dict[str, asyncio.Task[None]] = {}
        self._again: dict[str, float] = {}  # batch -> monotonic time of its next try
        self._failures: dict[str, int] = {}  # batch -> failed tries in a row
        self._ended: set[str] = set()
        self._swept = -SWEEP_SECONDS

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._watch())

    def close(self) -> None:
        """Stop the worker. The folder's lock is released once the running batches have stopped."""
        if self._task is not None:
            self._task.cancel()
        else:
            self.unlock()

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    async def _watch(self) -> None:
        try:
            while True:
                pause = POLL_SECONDS
                try:
                    if self.take_lock():
                        await self._sweep()
                        await self.work()
                except Exception:
                    logger.exception("the work on batches failed; another try follows")
                    pause = AGAIN_SECONDS
                await asyncio.sleep(pause)
        finally:
            self.unlock()

    def take_lock(self) -> bool:
        """Lock the folder if possible; return whether this router holds the lock.

        Raises OSError if the folder's file system has no locks.
        """
        if self._lock is None:
            lock = open(os.open(self.folder.lock, os.O_RDWR | os.O_CREAT, 0o600), "r+b")  # noqa: SIM115
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                lock.close()
                if error.errno in (errno.EAGAIN, errno.EACCES):
                    return False
                raise
            self._lock = lock
        return True

    async def _sweep(self) -> None:
        now = time.monotonic()
        if now - self._swept > SWEEP_SECONDS:
            self._swept = now
            await asyncio.to_thread(self.folder.sweep)

    async def work(self) -> None:
        """Run batches until none is left. Cancelling this coroutine leaves the batches
        resumable."""
        try:
            while True:
                await self._begin()
                if not self._batches:
                    return
                await asyncio.wait(
                    self._batches.values(),
                    timeout=POLL_SECONDS,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                self._reap()
                await self._sweep()
        finally:
            for task in self._batches.values():
                task.cancel()
            if self._batches:
                await asyncio.wait(self._batches.values())
            self._batches.clear()

    async def _begin(self) -> None:
        now = time.monotonic()
        for entry in await asyncio.to_thread(self.folder.open_batches, self._ended):
            id = entry.fields["id"]
            if len(self._batches) >= MAX_AT_ONCE:
                return
            if id not in self._batches and self._again.get(id, now) <= now:
                run = _Run(self, entry)
                hopeless = self._failures.get(id, 0) >= MAX_TRIES
                self._batches[id] = asyncio.create_task(run.give_up() if hopeless else run.all())

    def _reap(self) -> None:
        for id, task in list(self._batches.items()):
            if task.done():
                del self._batches[id]
                self._again.pop(id, None)
                error = None if task.cancelled() else task.exception()
                if error is None:
                    self._failures.pop(id, None)
                else:
                    # An OSError, such as a full disk, may be temporary; any other error would recur
                    # at each try.
                    if not isinstance(error, OSError):
                        self._failures[id] = self._failures.get(id, 0) + 1
                    self._again[id] = time.monotonic() + AGAIN_SECONDS
                    logger.error("batch %s: another try follows", id, exc_info=error)


class _Run:
    """The processing of one batch, from its present status to its end."""

    def __init__(self, worker: BatchWorker, entry: Entry) -> None:
        self._worker = worker
        self._folder = worker.folder
        self._entry = entry
        self._batch = entry.fields
        self._counts = entry.fields["request_counts"]
        self._files: dict[str, IO[bytes]] = {}
        self._saved = 0.0
        # Monotonic time before which no new request is sent, because a request was refused.
        self._resume_at = 0.0
        self._running: set[asyncio.Task[None]] = set()

    async def all(self) -> None:
        try:
            if self._batch["status"] == "validating":
                total, errors = await asyncio.to_thread(self._validate)
                self._counts["total"] = total
                if errors:
                    await self._fails(errors)
                    return
                await self._becomes("in_progress")
            if self._batch["status"] == "in_progress":
                await self._answer_all()
        except FileNotFoundError:
            if self._input.exists():
                raise
            await self._fails([_input_is_gone()])
            return
        await self._publish()

    @property
    def _input(self) -> Path:
        return self._folder.data(self._batch["input_file_id"])

    def _part(self, kind: str) -> Path:
        return self._folder.part(self._batch["id"], kind)

    async def _becomes(self, status: str) -> None:
        self._batch["status"] = status
        self._batch[f"{status}_at"] = int(time.time())
        await asyncio.to_thread(self._folder.save, self._entry)

    async def give_up(self) -> None:
        """End a batch whose processing has failed MAX_TRIES times in a row, and publish the answers
        so far."""
        message = f"the work on this batch failed {MAX_TRIES} times; the router's log says why"
        error = {"code": "internal_error", "message": message, "line": None, "param": None}
        self._batch["errors"] = {"object": "list", "data": [error]}
        await self._publish("failed")

    async def _fails(self, errors: list[dict[str, Any]]) -> None:
        self._batch["errors"] = {"object": "list", "data": errors}
        await self._becomes("failed")

    def _validate(self) -> tuple[int, list[dict[str, Any]]]:
        """Return the number of requests in the input file, and the input's errors in OpenAI's
        form."""
        errors: list[dict[str, Any]] = []
        seen: set[str] = set()
        total = 0

        def wrong(code: str, message: str, line: int | None, param: str | None = None) -> None:
            errors.append({"code": code, "message": message, "line": line, "param": param})

        for number, line in self._lines():
            if len(errors) >= MAX_ERRORS:
                break
            total += 1
            if total > MAX_REQUESTS:
                wrong("too_many_tasks", f"at most {MAX_REQUESTS} requests", number)
                break
            if isinstance(line, ApiError):
                wrong("invalid_json_line", line.message, number)
            else:
                _check_line(line, self._batch["endpoint"], seen, number, wrong)
        if not total and not errors:
            wrong("empty_file", "the input file has no request", None, "input_file_id")
        return total, errors

    def _done(self) -> set[str]:
        """Return the custom_ids of requests that have an answer or an error, and set the batch's
        counts of completed and failed requests."""
        done: set[str] = set()
        for kind, _, name in _PARTS:
            ids = [line["custom_id"] for line in whole_lines(self._part(kind))]
            self._counts[name] = len(ids)
            done.update(ids)
        return done

    def _lines(self) -> Generator[tuple[int, dict[str, Any] | ApiError]]:
        """Yield (line number from 1, parsed JSON object) for each non-blank line of the input file.

        For a line that the HTTP API would refuse, the second item is an ApiError.
        """
        with self._input.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if not raw.strip():
                    continue
                try:
                    line = parse_json(raw)
                except ApiError as error:
                    yield number, error
                    continue
                if not isinstance(line, dict):
                    line = ApiError(400, "invalid_type", "the line is not a JSON object")
                yield number, line

    def _open_lines(self) -> Generator[dict[str, Any]]:
        done = self._done()
        for _, line in self._lines():
            if isinstance(line, dict) and line["custom_id"] not in done:
                yield line

    def _stopped(self) -> str | None:
        """Return "cancelled" or "expired" if no more requests of the batch may be sent; None
        otherwise."""
        if self._folder.cancelled_at(self._batch["id"]) is not None:
            return "cancelled"
        return "expired" if time.time() >= self._batch["expires_at"] else None

    async def _answer_all(self) -> None:
        lines = self._open_lines()
        try:
            more = True
            while (stopped := await asyncio.to_thread(self._stopped)) is None:
                room = self._folder.settings.in_flight - len(self._running)
                if more and room > 0 and time.monotonic() >= self._resume_at:
                    read = await asyncio.to_thread(lambda most: list(islice(lines, most)), room)
                    more = bool(read)
                    self._running.update(asyncio.create_task(self._one(line)) for line in read)
                if not self._running:
                    break
                await self._some()
        finally:
            for task in self._running:
                task.cancel()
            if self._running:
                await asyncio.wait(self._running)
            lines.close()
            for file in self._files.values():
                file.close()
        if stopped is not None:
            await asyncio.to_thread(self._tell_rest, *_REST[stopped])
            if stopped == "expired":
                self._batch["expired_at"] = int(time.time())
        await self._becomes("finalizing")

    async def _some(self) -> None:
        done, self._running = await asyncio.wait(
            self._running, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        for task in done:
            task.result()
        now = time.monotonic()
        if now - self._saved > SAVE_SECONDS:
            self._saved = now
            await asyncio.to_thread(self._folder.save, self._entry)

    async def _one(self, line: dict[str, Any]) -> None:
        id = f"batch_req_{secrets.token_hex(12)}"
        while True:
            async with self._worker.slots:
                seconds_left = max(1.0, self._batch["expires_at"] - time.time())
                try:
                    status, headers, answer = await self._worker.ask(
                        self._entry.owner, line["url"], line["body"], id, seconds_left
                    )
                except Exception:
                    # If the exception were raised, each try of the whole batch would fail.
                    logger.exception("batch %s: the request %s failed", self._batch["id"], id)
                    status, headers, answer = 500, {}, internal().body()
            wait = wait_of(status, headers)
            if wait is None or wait > seconds_left:
                break
            self._resume_at = time.monotonic() + min(wait, 60.0)
            await asyncio.sleep(min(wait, 60.0) * (1 + secrets.randbelow(256) / 1024))
        response = {"status_code": status, "request_id": id, "body": msgspec.Raw(answer or b"{}")}
        kind = "output" if status == 200 else "errors"
        self._write(kind, _answer_line(id, line["custom_id"], response, None))
        self._counts["completed" if status == 200 else "failed"] += 1

    def _write(self, kind: str, line: bytes) -> None:
        file = self._files.get(kind)
        if file is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            file = self._files[kind] = open(os.open(self._part(kind), flags, 0o600), "ab")  # noqa: SIM115
        file.write(line)
        file.flush()

    def _tell_rest(self, code: str, message: str) -> None:
        """Write an error line for each request of the batch that has no answer yet."""
        error = {"code": code, "message": message}
        with open(
            os.open(self._part("errors"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab"
        ) as file:
            for line in self._open_lines():
                id = f"batch_req_{secrets.token_hex(12)}"
                file.write(_answer_line(id, line["custom_id"], None, error))
                self._counts["failed"] += 1

    async def _publish(self, ended: str = "completed") -> None:
        """Publish the written lines as output and error files, and end the batch.

        The ids of both files are saved first, so that publishing can be resumed after a crash.

        ended: the final status of a batch that neither expired nor was cancelled.
        """
        batch = self._batch
        batch["cancelling_at"] = self._folder.cancelled_at(batch["id"])
        for kind, field, _ in _PARTS:
            path = self._part(kind)
            if batch[field] is None and path.exists() and path.stat().st_size:
                batch[field] = new_file_id()
        await asyncio.to_thread(self._folder.save, self._entry)
        for kind, field, _ in _PARTS:
            if batch[field] is not None:
                await asyncio.to_thread(
                    self._folder.add_file,
                    self._part(kind),
                    f"{batch['id']}_{kind}.jsonl",
                    "batch_output",
                    self._entry.owner,
                    self._entry.keep,
                    batch[field],
                )
        if batch["expired_at"]:
            ended = "expired"
        elif batch["cancelling_at"] and ended == "completed":
            ended = "cancelled"
        await self._becomes(ended)
        self._part("cancel").unlink(missing_ok=True)
        logger.info("batch %s: %s, %s", batch["id"], ended, self._counts)


def _answer_line(
    id: str, custom_id: str, response: dict[str, Any] | None, error: dict[str, str] | None
) -> bytes:
    line = {"id": id, "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(line) + b"\n"


def _input_is_gone() -> dict[str, Any]:
    return {
        "code": "invalid_file",
        "message": "the input file is gone",
        "line": None,
        "param": "input_file_id",
    }


def _check_line(
    line: dict[str, Any], endpoint: str, seen: set[str], number: int, wrong: Callable[..., None]
) -> None:
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
    elif body.get("encoding_format") in (BYTES, BYTES_ONLY):
        message = "answers of a batch are JSON; base64 holds the same"
        wrong("invalid_request", message, number, "body.encoding_format")
