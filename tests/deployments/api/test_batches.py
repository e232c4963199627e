"""/v1/files and /v1/batches, and the worker that answers them."""

import asyncio
import hashlib
import json
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.api.app import Api, build_asgi
from deployments.api.batch_folder import BatchFolder, BatchSettings
from deployments.api.caller import KeyRule
from deployments.api.key_limits import KeyLimits
from deployments.api.options import ApiOptions
from deployments.cli.batch import run
from deployments.router.batch_worker import BatchWorker, asker
from engine.messages import BATCH_PRIORITY
from tests.deployments.api.asgi import COMPLETION, Client, Reply
from tests.deployments.api.pooling.test_embeddings import POOLING
from tests.deployments.api.server import serve
from tests.deployments.fake_backend import MODEL, VECTOR, FakeBackend

URL = "/v1/completions"
GZIP = (b"content-encoding", b"gzip")


def api_of(path: Path, settings: dict[str, Any] | None = None, **options: Any) -> Api:
    folder = BatchFolder(BatchSettings(str(path), **{"in_flight": 4, **(settings or {})}))
    return build_asgi(FakeBackend(), ApiOptions(batches=folder, **options))


def worker_of(api: Api) -> BatchWorker:
    assert api.options.batches is not None
    return BatchWorker(api.options.batches, asker(api, lambda: api.options))


def form(content: bytes, purpose: str = "batch") -> tuple[bytes, list[tuple[bytes, bytes]]]:
    body = (
        b'--XX\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n%b\r\n--XX\r\n'
        b'Content-Disposition: form-data; name="file"; filename="a.jsonl"\r\n'
        b"Content-Type: application/jsonl\r\n\r\n%b\r\n--XX--\r\n" % (purpose.encode(), content)
    )
    return body, [(b"content-type", b"multipart/form-data; boundary=XX")]


def lines(count: int, **changes: Any) -> bytes:
    body = {**COMPLETION, "max_tokens": 4}
    line = {"method": "POST", "url": URL, "body": body, **changes}
    return b"".join(
        json.dumps({"custom_id": f"c{i}", **line}).encode() + b"\n" for i in range(count)
    )


async def upload(client: Client, content: bytes, *headers: tuple[bytes, bytes]) -> Reply:
    body, kinds = form(content)
    return await client.request("POST", "/v1/files", [body[:70], body[70:]], [*kinds, *headers])


async def begin(client: Client, content: bytes) -> dict[str, Any]:
    file = (await upload(client, content)).json()
    asked = {"input_file_id": file["id"], "endpoint": URL, "completion_window": "24h"}
    reply = await client.post("/v1/batches", asked)
    assert reply.status == 200, reply.body
    answer: dict[str, Any] = reply.json()
    return answer


async def look(client: Client, path: str) -> Any:
    reply = await client.request("GET", path)
    assert reply.status == 200, reply.body
    return reply.json()


async def content(client: Client, id: str) -> list[Any]:
    reply = await client.request("GET", f"/v1/files/{id}/content")
    return [json.loads(raw) for raw in reply.body.splitlines()]


def test_a_batch_is_answered_behind_all_others(tmp_path: Path) -> None:
    """A request that is lost or asked twice; one that goes before those of people who wait."""

    async def case() -> None:
        api = api_of(tmp_path)
        client = Client(api)
        bad = json.dumps(
            {"custom_id": "bad", "method": "POST", "url": URL, "body": {"model": "none"}}
        )
        batch = await begin(client, lines(9) + bad.encode() + b"\n")
        assert (batch["status"], batch["object"]) == ("validating", "batch")
        await worker_of(api).work()
        batch = await look(client, f"/v1/batches/{batch['id']}")
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 10, "completed": 9, "failed": 1}
        answers = await content(client, batch["output_file_id"])
        assert sorted(answer["custom_id"] for answer in answers) == [f"c{i}" for i in range(9)]
        first = answers[0]["response"]
        assert first["status_code"] == 200 and first["body"]["choices"][0]["text"]
        (failed,) = await content(client, batch["error_file_id"])
        assert failed["custom_id"] == "bad" and failed["response"]["status_code"] == 404
        assert {request.priority for request in api.context.backend.requests} == {BATCH_PRIORITY}
        assert {(request.key, request.owner) for request in api.context.backend.requests} == {
            ("/batch", "")
        }
        assert (await look(client, "/v1/batches"))["data"] == [batch]

    asyncio.run(case())


def test_a_restart_asks_nothing_again(tmp_path: Path) -> None:
    """A killed router whose batch begins anew, or never ends; a line that the kill has cut."""

    async def case() -> None:
        api = api_of(tmp_path)
        client = Client(api)
        batch = await begin(client, lines(8))
        folder = api.options.batches
        assert folder is not None
        first = worker_of(api)
        asked = 0
        whole = first.ask

        async def dies(*call: Any) -> Any:
            nonlocal asked
            asked += 1
            if asked >= 4:
                working.cancel()
            return await whole(*call)

        first.ask = dies
        working = asyncio.create_task(first.work())
        with pytest.raises(asyncio.CancelledError):
            await working
        assert not first._batches
        complete = folder.part(batch["id"], "output").read_bytes().count(b"\n")
        assert 1 <= complete < 8
        with folder.part(batch["id"], "output").open("ab") as file:
            file.write(b'{"custom_id": "c3", "resp')
        again = api_of(tmp_path)
        await worker_of(again).work()
        batch = await look(Client(again), f"/v1/batches/{batch['id']}")
        assert batch["request_counts"] == {"total": 8, "completed": 8, "failed": 0}
        answers = await content(client, batch["output_file_id"])
        assert sorted(answer["custom_id"] for answer in answers) == [f"c{i}" for i in range(8)]
        assert len(again.context.backend.requests) == 8 - complete

    asyncio.run(case())


def test_one_router_works(tmp_path: Path) -> None:
    """Two routers that answer the same requests."""
    first, second = worker_of(api_of(tmp_path)), worker_of(api_of(tmp_path))
    assert first.take_lock() and first.take_lock() and not second.take_lock()
    first.close()
    assert second.take_lock()
    second.close()


def test_no_room_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy minute that fails a batch of hours."""

    async def case() -> None:
        api = api_of(tmp_path)
        client = Client(api)
        batch = await begin(client, lines(1))
        worker = worker_of(api)
        whole, answers = worker.ask, [(503, {b"retry-after": b"1"}, b"{}")]

        async def busy(*call: Any) -> Any:
            return answers.pop() if answers else await whole(*call)

        worker.ask = busy
        await worker.work()
        assert not answers
        batch = await look(client, f"/v1/batches/{batch['id']}")
        assert batch["request_counts"]["completed"] == 1

    asyncio.run(case())


def test_a_cancelled_batch_keeps_what_it_has(tmp_path: Path) -> None:
    """A batch that cannot be stopped."""

    async def case() -> None:
        api = api_of(tmp_path, {"in_flight": 1})
        client = Client(api)
        batch = await begin(client, lines(50))
        path = f"/v1/batches/{batch['id']}"
        worker = worker_of(api)
        whole, asked = worker.ask, 0

        async def count(*call: Any) -> Any:
            nonlocal asked
            asked += 1
            if asked == 3:
                assert (await client.post(f"{path}/cancel", {})).json()["status"] == "cancelling"
                assert (await look(client, path))["status"] == "cancelling"
            return await whole(*call)

        worker.ask = count
        await worker.work()
        batch = await look(client, path)
        counts = batch["request_counts"]
        assert batch["status"] == "cancelled" and batch["cancelled_at"]
        assert 1 <= counts["completed"] <= 3 and counts["completed"] + counts["failed"] == 50
        assert len(await content(client, batch["output_file_id"])) == counts["completed"]
        rest = await content(client, batch["error_file_id"])
        assert {entry["error"]["code"] for entry in rest} == {"batch_cancelled"}
        assert [entry["response"] for entry in rest] == [None] * counts["failed"]
        assert (await client.post(f"{path}/cancel", {})).status == 400

    asyncio.run(case())


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (b"no json\n", "invalid_json_line"),
        (lines(1) + lines(1), "duplicate_custom_id"),
        (lines(1, url="/v1/embeddings"), "mismatched_endpoint"),
        (lines(1, method="GET"), "invalid_method"),
        (lines(1, body={"stream": True}), "invalid_request"),
        (lines(1, body={"encoding_format": "bytes"}), "invalid_request"),
        (lines(1, custom_id=None), "missing_required_parameter"),
        (b"", "empty_file"),
    ],
)
def test_a_bad_file_fails_with_its_lines(tmp_path: Path, bad: bytes, code: str) -> None:
    """A fault in line 40,000 that is found after hours."""

    async def case() -> None:
        api = api_of(tmp_path)
        batch = await begin(Client(api), bad)
        await worker_of(api).work()
        batch = await look(Client(api), f"/v1/batches/{batch['id']}")
        assert batch["status"] == "failed" and not api.context.backend.requests
        assert [error["code"] for error in batch["errors"]["data"]] == [code]

    asyncio.run(case())


def test_files_are_their_keys_own(tmp_path: Path) -> None:
    """Another key that reads, uses or removes a file; an id that leaves the folder."""
    owner, other = ((b"authorization", b"Bearer " + key) for key in (b"one", b"two"))
    keys = frozenset(hashlib.sha256(key).digest() for key in (b"one", b"two"))

    async def case() -> None:
        client = Client(api_of(tmp_path, api_keys=keys))
        file = (await upload(client, lines(1), owner)).json()
        path = f"/v1/files/{file['id']}"
        json_type = (b"content-type", b"application/json")
        for verb, where in (("GET", path), ("GET", f"{path}/content"), ("DELETE", path)):
            assert (await client.request(verb, where, headers=[other])).status == 404
        body = {"input_file_id": file["id"], "endpoint": URL, "completion_window": "24h"}
        data = json.dumps(body).encode()
        refused = await client.request("POST", "/v1/batches", data, [json_type, other])
        assert refused.status == 400
        assert (await client.request("GET", "/v1/files", headers=[other])).json()["data"] == []
        assert (await client.request("GET", "/v1/files/..%2f", headers=[owner])).status == 404
        assert (await client.request("GET", "/v1/files/../../x", headers=[owner])).status == 404
        assert (await client.request("GET", path, headers=[owner])).json()["filename"] == "a.jsonl"
        assert (await client.request("DELETE", path, headers=[owner])).json()["deleted"]
        assert (await client.request("GET", path, headers=[owner])).status == 404

    asyncio.run(case())


def test_what_is_over_time_is_told_by_line(tmp_path: Path) -> None:
    """A batch without an end; requests of it that are in neither file."""

    async def case() -> None:
        api = api_of(tmp_path)
        client = Client(api)
        batch = await begin(client, lines(6))
        folder = api.options.batches
        assert folder is not None
        assert batch["expires_at"] == batch["created_at"] + 86400
        worker = worker_of(api)
        whole = worker.ask

        async def slow(owner: str, path: str, body: Any, id: str, seconds: float) -> Any:
            if len(api.context.backend.requests) < 2:
                return await whole(owner, path, body, id, seconds)
            return await asyncio.Future()  # no replica has room until the end

        worker.ask = slow
        entry = folder.batch(batch["id"], "")
        assert entry is not None
        entry.fields["expires_at"] = int(time.time()) + 1
        folder.save(entry)
        (stored,) = (folder.path / "batches").glob("*.json")
        assert "told" in json.loads(stored.read_bytes())  # or an update loses batches
        await worker.work()
        batch = await look(client, f"/v1/batches/{batch['id']}")
        assert batch["status"] == "expired" and batch["expired_at"]
        assert batch["request_counts"] == {"total": 6, "completed": 2, "failed": 4}
        rest = await content(client, batch["error_file_id"])
        assert {failure["error"]["code"] for failure in rest} == {"batch_expired"}

    asyncio.run(case())


def test_a_batch_has_the_limits_of_its_key(tmp_path: Path) -> None:
    """A batch that goes around a key's rate, models or priority; one that a used-up minute fails;
    one that goes on when its key is gone."""
    digest = hashlib.sha256(b"one").digest()
    key = (b"authorization", b"Bearer one")

    async def case(rule: KeyRule, count: int) -> tuple[Any, list[Any], Api]:
        api = api_of(
            tmp_path,
            {"key_batches": 1},
            api_keys=frozenset({digest}),
            rules={digest: rule},
            limits=KeyLimits(),
        )
        client = Client(api)
        file = (await upload(client, lines(count), key)).json()
        body = {"input_file_id": file["id"], "endpoint": URL, "completion_window": "24h"}
        headers = [(b"content-type", b"application/json"), key]
        data = json.dumps(body).encode()
        batch = (await client.request("POST", "/v1/batches", data, headers)).json()
        again = await client.request("POST", "/v1/batches", data, headers)
        assert again.status == 429  # batch.key_batches
        if rule.name == "gone":
            api.change_options(api_keys=frozenset({bytes(32)}))
        await worker_of(api).work()
        folder = api.options.batches
        assert folder is not None
        entry = folder.batch(batch["id"], digest.hex()[:32])
        assert entry is not None
        failed = entry.fields["error_file_id"]
        failures = folder.data(failed).read_bytes().splitlines() if failed else []
        return entry.fields, [json.loads(raw)["response"] for raw in failures], api

    outcome, _, api = asyncio.run(case(KeyRule(requests=120, priority=40), 122))
    assert outcome["request_counts"]["completed"] == 122  # the last of them half a second late
    assert {request.priority for request in api.context.backend.requests} == {40}
    outcome, failed, _ = asyncio.run(case(KeyRule(models=("other",)), 1))
    assert [response["status_code"] for response in failed] == [403]
    outcome, failed, _ = asyncio.run(case(KeyRule(name="gone"), 1))
    assert [response["body"]["error"]["code"] for response in failed] == ["invalid_api_key"]
    assert outcome["status"] == "completed"


def test_openais_client_drives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A field that its models do not take; a route that is elsewhere."""
    monkeypatch.setattr("deployments.router.batch_worker.POLL_SECONDS", 0.1)
    api = api_of(tmp_path)
    card = replace(api.context.backend.cards[MODEL], pooling=POOLING, vector_size=VECTOR)
    api.context.backend.cards[MODEL] = card
    worker, started = worker_of(api), []

    async def working(scope: Any, receive: Any, send: Any) -> None:
        if not started and scope["type"] == "http":
            started.append(worker.start())
        await api(scope, receive, send)

    body = {"model": "tiny", "input": "hello"}
    source = b"".join(
        json.dumps(
            {"custom_id": id, "method": "POST", "url": "/v1/embeddings", "body": payload}
        ).encode()
        + b"\n"
        for id, payload in (("good", body), ("bad", {**body, "dimensions": -1}))
    )
    with (
        serve(working) as port,
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client,
    ):
        file = client.files.create(
            file=("a.jsonl", source),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 7200},
        )
        assert file.expires_at == file.created_at + 7200 and file.bytes == len(source)
        batch = client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/embeddings",
            completion_window="24h",
            metadata={"of": "a test"},
        )
        while batch.status != "completed":
            time.sleep(0.05)
            batch = client.batches.retrieve(batch.id)
        assert batch.request_counts and batch.request_counts.total == 2
        assert batch.output_file_id and batch.error_file_id
        (good,) = client.files.content(batch.output_file_id).iter_lines()
        assert len(json.loads(good)["response"]["body"]["data"][0]["embedding"]) == 8
        (bad,) = client.files.content(batch.error_file_id).iter_lines()
        assert json.loads(bad)["response"]["status_code"] == 400
        assert [item.id for item in client.batches.list(limit=1)] == [batch.id]
        assert client.files.delete(file.id).deleted
        assert {file.purpose for file in client.files.list()} == {"batch_output"}
        with pytest.raises(openai.BadRequestError, match="completed already"):
            client.batches.cancel(batch.id)
    assert {request.priority for request in api.context.backend.requests} == {BATCH_PRIORITY}


def test_what_is_old_goes(tmp_path: Path) -> None:
    """A disk that fills; the input of a batch that runs, gone under it."""

    async def case() -> None:
        api = api_of(tmp_path, {"keep_seconds": 0.0})
        client = Client(api)
        ended = await begin(client, lines(1))
        await worker_of(api).work()
        running = await begin(client, lines(1))
        cut = tmp_path / "files" / "0.part"
        cut.touch()
        os.utime(cut, (0, 0))
        for path in (tmp_path / "files").glob("*.json"):
            entry = json.loads(path.read_bytes())
            entry["told"]["expires_at"] = 1
            path.write_text(json.dumps(entry))
        refused = await client.request("DELETE", f"/v1/files/{running['input_file_id']}")
        assert refused.json()["error"]["code"] == "file_in_use"
        assert api.options.batches is not None
        api.options.batches.sweep()
        assert [item["id"] for item in (await look(client, "/v1/batches"))["data"]] == [
            running["id"]
        ]
        files = (await look(client, "/v1/files"))["data"]
        assert [file["id"] for file in files] == [running["input_file_id"]] and not cut.exists()
        assert ended["id"] not in str(list((tmp_path / "batches").iterdir()))
        api.options.batches.data(running["input_file_id"]).unlink()
        worker = worker_of(api)
        worker._swept = time.monotonic()
        await worker.work()
        failed = await look(client, f"/v1/batches/{running['id']}")
        assert (
            failed["errors"]["data"][0]["code"] == "invalid_file" and failed["status"] == "failed"
        )

    asyncio.run(case())


def test_uploads_are_bounded_and_leave_nothing(tmp_path: Path) -> None:
    """A disk that fills with refused uploads; a form that is cut short and taken."""

    async def case() -> None:
        client = Client(api_of(tmp_path, {"file_bytes": 2048, "key_bytes": 2500}))
        assert (await upload(client, b"x" * 4096)).status == 413
        body, kinds = form(lines(1))
        assert (await client.request("POST", "/v1/files", body[:-30], kinds)).status == 400
        assert (await client.request("POST", "/v1/files", body)).status == 415
        other, _ = form(lines(1), "fine-tune")
        assert (await client.request("POST", "/v1/files", other, kinds)).status == 400
        assert (await client.request("POST", "/v1/files", body, [*kinds, GZIP])).status == 415
        assert list((tmp_path / "files").iterdir()) == []
        assert (await upload(client, b"x" * 1500)).status == 200
        assert (await upload(client, b"x" * 900)).status == 413
        off = Client(build_asgi(FakeBackend()))
        assert (await off.request("GET", "/v1/files")).status == 404

    asyncio.run(case())


def test_manta_batch_waits_for_its_answers(tmp_path: Path, monkeypatch: Any) -> None:
    """A command that ends before its batch, or calls failures a success."""
    monkeypatch.setattr("deployments.cli.batch.POLL_SECONDS", 0.05)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    api = api_of(tmp_path / "batches")
    worker = worker_of(api)
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(lines(3))

    started: list[bool] = []

    async def working(scope: Any, receive: Any, send: Any) -> None:
        """Answer as the application does, and start its worker with the first request."""
        if not started and scope["type"] == "http":
            started.append(True)
            worker.start()
        await api(scope, receive, send)

    with serve(working) as port:
        assert run(source, output, f"http://127.0.0.1:{port}", None, None) == 0
    assert len(output.read_text().splitlines()) == 3


def line_of(body: bytes, id: str = '"c0"') -> bytes:
    head = b'{"custom_id": %b, "method": "POST", "url": "%b", "body": ' % (
        id.encode(),
        URL.encode(),
    )
    return head + body + b"}"


GOOD = b'{"model": "tiny", "prompt": "x", "max_tokens": 2}'
ODD = {
    "nan": line_of(b'{"model": "tiny", "prompt": "x", "temperature": NaN}'),
    "infinity": line_of(b'{"model": "tiny", "prompt": "x", "temperature": -Infinity}'),
    "too large": line_of(b'{"model": "tiny", "prompt": "x", "temperature": 1e999}'),
    "huge": line_of(b'{"model": "tiny", "prompt": "x", "seed": %b}' % (b"9" * 4000)),
    "64 bits": line_of(b'{"model": "tiny", "prompt": "x", "seed": 99999999999999999999}'),
    "twice": line_of(b'{"model": "tiny", "prompt": "x", "prompt": "y"}'),
    "two ids": line_of(GOOD)[:-1] + b', "custom_id": "c1"}',
    "half a character": line_of(b'{"model": "tiny", "prompt": "\\ud800"}'),
    "half an id": line_of(GOOD, '"\\udfff"'),
    "bom": b"\xef\xbb\xbf" + line_of(GOOD),
    "deep": line_of(b'{"model": "tiny", "prompt": "x", "user": %b}' % (b"[" * 99 + b"]" * 99)),
    "deeper": line_of(b'{"model": "tiny", "prompt": %b}' % (b"[" * 50000 + b"]" * 50000)),
    "crlf": line_of(GOOD) + b"\r\n\r",
    "blank": b" \t\r\n" + line_of(GOOD) + b"\n\x0c",
    "not utf-8": line_of(b'{"model": "tiny", "prompt": "\xff"}'),
    "utf-16": line_of(GOOD).decode().encode("utf-16"),
    "trailing": line_of(GOOD) + b" x",
    "comma": line_of(b'{"model": "tiny", "prompt": "x",}'),
    "control": line_of(b'{"model": "tiny", "prompt": "\x01"}'),
    "list": b"[1]",
}


def end_of(path: Path, source: bytes) -> dict[str, Any]:
    """Return the batch of a file, once its worker has nothing more to do.

    The worker runs in one go, as a second try comes only after 30 s.
    """
    api = api_of(path)

    async def through() -> dict[str, Any]:
        client = Client(api)
        batch = await begin(client, source)
        async with asyncio.timeout(20):
            await worker_of(api).work()
        outcome: dict[str, Any] = await look(client, f"/v1/batches/{batch['id']}")
        return outcome

    return asyncio.run(through())


@pytest.mark.parametrize("name", ODD)
def test_no_line_keeps_a_batch_open(tmp_path: Path, name: str) -> None:
    """A line that one reader of JSON takes and the next one does not: nothing is ever answered."""
    good = line_of(GOOD, '"good"')
    outcome = end_of(tmp_path, good + b"\n" + ODD[name] + b"\n")
    if outcome["status"] == "failed":
        assert outcome["errors"]["data"][0]["line"] in (2, 3)
        assert outcome["errors"]["data"][0]["message"]
    else:
        assert outcome["status"] == "completed"
        counts = outcome["request_counts"]
        assert counts["completed"] + counts["failed"] == counts["total"] == 2


ODD_PIECES = rb"""NaN 1e400 "\ud800" [ ] { } "custom_id" "a" : , null""".split()
PIECES = st.sampled_from(
    [*ODD_PIECES, GOOD, b"9" * 30, b"\xff", b"\xef\xbb\xbf", b" ", b"\r", b"\n", b"\x0c", b"\0"]
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(PIECES, st.just(line_of(GOOD))), max_size=6).map(b"".join))
def test_any_bytes_come_to_an_end(source: bytes) -> None:
    """Bytes that are valid in one place and not in the next."""
    with tempfile.TemporaryDirectory() as folder:
        outcome = end_of(Path(folder), line_of(GOOD, '"good"') + b"\n" + source)
    assert outcome["status"] in ("completed", "failed")


def test_work_that_fails_in_itself_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of ours that comes again with each try, for the 24 hours of a batch; and one of a
    single request that takes the others with it."""
    monkeypatch.setattr("deployments.router.batch_worker.AGAIN_SECONDS", 0.0)
    api = api_of(tmp_path)
    worker = worker_of(api)

    async def fails(*_: Any) -> Any:
        raise TypeError("a fault")

    async def through() -> None:
        client = Client(api)
        batch = await begin(client, lines(2))
        worker.ask = fails
        async with asyncio.timeout(20):
            await worker.work()
        outcome = await look(client, f"/v1/batches/{batch['id']}")
        assert outcome["status"] == "completed" and outcome["request_counts"]["failed"] == 2
        batch = await begin(client, lines(2))
        monkeypatch.setattr("deployments.router.batch_worker._answer_line", fails)
        monkeypatch.setattr("deployments.router.batch_worker._Run._answer_all", fails)
        async with asyncio.timeout(20):
            await worker.work()
        outcome = await look(client, f"/v1/batches/{batch['id']}")
        assert (
            outcome["status"] == "failed"
            and outcome["errors"]["data"][0]["code"] == "internal_error"
        )

    asyncio.run(through())


def test_cancelling_has_its_time(tmp_path: Path) -> None:
    """`cancelling_at` came with `cancelled_at` only, when clients no longer ask."""
    api = api_of(tmp_path)

    async def through() -> None:
        client = Client(api)
        id = (await begin(client, lines(3)))["id"]
        seen = [(await client.request("POST", f"/v1/batches/{id}/cancel")).json()]
        seen.append(await look(client, f"/v1/batches/{id}"))
        seen += (await look(client, "/v1/batches"))["data"]
        since = seen[0]["cancelling_at"]
        assert abs(time.time() - since) < 5
        for state in seen:
            assert (state["status"], state["cancelling_at"]) == ("cancelling", since)
        await worker_of(api).work()
        state = await look(client, f"/v1/batches/{id}")
        assert (state["status"], state["cancelling_at"]) == ("cancelled", since)
        assert state["cancelled_at"] >= since

    asyncio.run(through())
