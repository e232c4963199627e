"""/v1/files and /v1/batches, and the worker that answers them."""

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from deployments.api.app import Api, build_asgi
from deployments.api.auth import known_caller
from deployments.api.batches.folder import BatchFolder
from deployments.api.options import ApiOptions
from deployments.cli.batch import run
from deployments.router.batch_worker import PRIORITY, BatchWorker
from deployments.router.serve import handle_call
from tests.deployments.api.asgi import COMPLETION, Client, Reply
from tests.deployments.api.server import serve
from tests.deployments.fake_backend import FakeBackend

URL = "/v1/completions"


def api_of(path: Path, **options: Any) -> Api:
    folder = BatchFolder(path)
    return build_asgi(FakeBackend(), ApiOptions(batches=folder, **options))


def worker_of(api: Api, in_flight: int = 4) -> BatchWorker:
    async def ask(owner: str, path: str, body: bytes, id: str) -> Any:
        caller = known_caller(owner, api.options)
        assert caller is not None
        return await handle_call.post(api, path, body, caller, id)

    assert api.options.batches is not None
    return BatchWorker(api.options.batches, ask, in_flight)


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
    found: dict[str, Any] = reply.json()
    return found


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
        await worker_of(api).look()
        batch = await look(client, f"/v1/batches/{batch['id']}")
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 10, "completed": 9, "failed": 1}
        found = await content(client, batch["output_file_id"])
        assert sorted(one["custom_id"] for one in found) == [f"c{i}" for i in range(9)]
        first = found[0]["response"]
        assert first["status_code"] == 200 and first["body"]["choices"][0]["text"]
        (failed,) = await content(client, batch["error_file_id"])
        assert failed["custom_id"] == "bad" and failed["response"]["status_code"] == 404
        assert {one.priority for one in api.backend.requests} == {PRIORITY}
        assert (await look(client, "/v1/batches"))["data"] == [batch]

    asyncio.run(case())


def test_a_restart_asks_nothing_again(tmp_path: Path) -> None:
    """A killed router whose batch begins anew, or never ends; a line that the kill has cut."""

    async def case() -> None:
        api = api_of(tmp_path)
        client = Client(api)
        batch = await begin(client, lines(8))
        first = worker_of(api, in_flight=1)
        asked = 0
        whole = first._ask

        async def dies(*call: Any) -> Any:
            nonlocal asked
            asked += 1
            if asked == 4:
                raise ConnectionError
            return await whole(*call)

        first._ask = dies
        with pytest.raises(ConnectionError):
            await first.look()
        part = api.options.batches.part(batch["id"], "output")
        with part.open("ab") as file:
            file.write(b'{"custom_id": "c3", "resp')
        again = api_of(tmp_path)
        await worker_of(again).look()
        batch = await look(Client(again), f"/v1/batches/{batch['id']}")
        assert batch["request_counts"] == {"total": 8, "completed": 8, "failed": 0}
        found = await content(client, batch["output_file_id"])
        assert sorted(one["custom_id"] for one in found) == [f"c{i}" for i in range(8)]
        assert len(again.backend.requests) == 5

    asyncio.run(case())


def test_one_router_works(tmp_path: Path) -> None:
    """Two routers that answer the same requests."""
    one, two = worker_of(api_of(tmp_path)), worker_of(api_of(tmp_path))
    assert one._take_lock() and one._take_lock() and not two._take_lock()
    one.close()
    assert two._take_lock()
    two.close()


def test_no_room_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy minute that fails a batch of hours."""

    async def case() -> None:
        api = api_of(tmp_path)
        client = Client(api)
        batch = await begin(client, lines(1))
        worker = worker_of(api)
        whole, answers = worker._ask, [(503, {b"retry-after": b"1"}, b"{}")]

        async def busy(*call: Any) -> Any:
            return answers.pop() if answers else await whole(*call)

        worker._ask = busy
        await worker.look()
        assert not answers
        batch = await look(client, f"/v1/batches/{batch['id']}")
        assert batch["request_counts"]["completed"] == 1

    asyncio.run(case())


def test_a_cancelled_batch_keeps_what_it_has(tmp_path: Path) -> None:
    """A batch that cannot be stopped."""

    async def case() -> None:
        api = api_of(tmp_path)
        client = Client(api)
        batch = await begin(client, lines(50))
        path = f"/v1/batches/{batch['id']}"
        worker = worker_of(api, in_flight=1)
        whole, asked = worker._ask, 0

        async def count(*call: Any) -> Any:
            nonlocal asked
            asked += 1
            if asked == 3:
                assert (await client.post(f"{path}/cancel", {})).json()["status"] == "cancelling"
                assert (await look(client, path))["status"] == "cancelling"
            return await whole(*call)

        worker._ask = count
        await worker.look()
        batch = await look(client, path)
        assert batch["status"] == "cancelled" and 1 <= batch["request_counts"]["completed"] <= 3
        assert len(await content(client, batch["output_file_id"])) <= 3
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
        (lines(1, custom_id=None), "missing_required_parameter"),
        (b"", "empty_file"),
    ],
)
def test_a_bad_file_fails_with_its_lines(tmp_path: Path, bad: bytes, code: str) -> None:
    """A fault in line 40,000 that is found after hours."""

    async def case() -> None:
        api = api_of(tmp_path)
        batch = await begin(Client(api), bad)
        await worker_of(api).look()
        batch = await look(Client(api), f"/v1/batches/{batch['id']}")
        assert batch["status"] == "failed" and not api.backend.requests
        assert [error["code"] for error in batch["errors"]["data"]] == [code]

    asyncio.run(case())


def test_files_are_their_keys_own(tmp_path: Path) -> None:
    """Another key that reads, uses or removes a file; an id that leaves the folder."""
    one, two = ((b"authorization", b"Bearer " + key) for key in (b"one", b"two"))
    keys = frozenset(hashlib.sha256(key).digest() for key in (b"one", b"two"))

    async def case() -> None:
        client = Client(api_of(tmp_path, api_keys=keys))
        file = (await upload(client, lines(1), one)).json()
        path = f"/v1/files/{file['id']}"
        json_type = (b"content-type", b"application/json")
        for verb, where in (("GET", path), ("GET", f"{path}/content"), ("DELETE", path)):
            assert (await client.request(verb, where, headers=[two])).status == 404
        body = {"input_file_id": file["id"], "endpoint": URL, "completion_window": "24h"}
        data = json.dumps(body).encode()
        made = await client.request("POST", "/v1/batches", data, [json_type, two])
        assert made.status == 400
        assert (await client.request("GET", "/v1/files", headers=[two])).json()["data"] == []
        assert (await client.request("GET", "/v1/files/..%2f", headers=[one])).status == 404
        assert (await client.request("GET", "/v1/files/../../x", headers=[one])).status == 404
        assert (await client.request("GET", path, headers=[one])).json()["filename"] == "a.jsonl"
        assert (await client.request("DELETE", path, headers=[one])).json()["deleted"]
        assert (await client.request("GET", path, headers=[one])).status == 404

    asyncio.run(case())


def test_uploads_are_bounded_and_leave_nothing(tmp_path: Path) -> None:
    """A disk that fills with refused uploads; a form that is cut short and taken."""

    async def case() -> None:
        client = Client(api_of(tmp_path, batch_file_bytes=2048))
        assert (await upload(client, b"x" * 4096)).status == 413
        body, kinds = form(lines(1))
        assert (await client.request("POST", "/v1/files", body[:-30], kinds)).status == 400
        assert (await client.request("POST", "/v1/files", body)).status == 415
        other, _ = form(lines(1), "fine-tune")
        assert (await client.request("POST", "/v1/files", other, kinds)).status == 400
        assert list((tmp_path / "files").iterdir()) == []
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
        """The app, whose worker begins with its first request."""
        if not started and scope["type"] == "http":
            started.append(True)
            worker.start()
        await api(scope, receive, send)

    with serve(working) as port:
        assert run(source, output, f"http://127.0.0.1:{port}", None, None) == 0
    assert len(output.read_text().splitlines()) == 3
