"""Images in batches, and through the handle of the application."""

import asyncio
import gc
import json
from pathlib import Path
from typing import Any

from deployments.api.app import Api, build_asgi
from deployments.api.batch_folder import BatchFolder, BatchSettings
from deployments.api.options import ApiOptions
from deployments.images.intake import ImageIntake
from deployments.router.serve import handle_call
from tests.deployments.api.asgi import Client
from tests.deployments.api.test_batches import content, look, upload, worker_of
from tests.deployments.fake_backend import MODEL
from tests.deployments.images.test_wire import TALL, WIDE, part, text, url, user
from tests.deployments.images.vision_backend import VisionBackend

URL = "/v1/chat/completions"


def api_of(folder: Path) -> tuple[Api, VisionBackend]:
    backend = VisionBackend()
    batches = BatchFolder(BatchSettings(str(folder), in_flight=4))
    return build_asgi(backend, ApiOptions(batches=batches, images=ImageIntake())), backend


def body(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 4, "messages": [user(*parts)]}


SEEN = body(text("a"), part(WIDE), text("b"), part(TALL))
BROKEN = body(part(WIDE[:20]))


def assert_given_back(api: Api, backend: VisionBackend) -> None:
    """Check that no bytes of images are counted once no request has them."""
    for request in backend.requests:
        request.images = []
    gc.collect()
    assert api.options.images is not None
    assert api.options.images.memory.held == 0


def test_batches(tmp_path: Path) -> None:
    """Bug: a line's images are lost, or a broken one fails the lines beside it."""

    async def case() -> None:
        api, backend = api_of(tmp_path)
        client = Client(api)
        right = (await client.post(URL, SEEN)).json()
        asked = [("seen", SEEN), ("broken", BROKEN), ("again", SEEN)]
        lines = [
            {"custom_id": id, "method": "POST", "url": URL, "body": body} for id, body in asked
        ]
        data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        file = (await upload(client, data)).json()
        batch = {"input_file_id": file["id"], "endpoint": URL, "completion_window": "24h"}
        id = (await client.post("/v1/batches", batch)).json()["id"]
        await worker_of(api).work()
        done = await look(client, f"/v1/batches/{id}")
        answers = await content(client, done["output_file_id"])
        assert sorted(answer["custom_id"] for answer in answers) == ["again", "seen"]
        for answer in answers:
            said = answer["response"]["body"]
            assert said["usage"] == right["usage"]
        over_http, *of_lines = backend.requests
        assert len(of_lines) == 2 and len(over_http.images) == 2
        for request in of_lines:
            assert request.token_ids == over_http.token_ids
            assert request.images == over_http.images
        (failed,) = await content(client, done["error_file_id"])
        error = failed["response"]["body"]["error"]
        assert (failed["custom_id"], error["code"]) == ("broken", "invalid_image")
        assert error["param"] == "messages[0].content[0].image_url.url"
        assert_given_back(api, backend)

    asyncio.run(case())


def test_handles(tmp_path: Path) -> None:
    """Bug: images of a call from Python, which has no HTTP body, are lost or never given back."""

    async def case() -> None:
        api, backend = api_of(tmp_path)
        right = (await Client(api).post(URL, SEEN)).json()
        answer = await handle_call.call(api, SEEN)
        pieces = [piece async for piece in handle_call.stream(api, SEEN)]
        texts = [choice["message"]["content"] for choice in (*right["choices"], *answer["choices"])]
        said = "".join(
            choice["delta"].get("content") or "" for piece in pieces for choice in piece["choices"]
        )
        assert texts == [said] * 2
        over_http, *of_calls = backend.requests
        for request in of_calls:
            assert request.token_ids == over_http.token_ids
            assert request.images == over_http.images
        assert len(of_calls) == 2 and len(over_http.images) == 2
        refused = await handle_call.call(api, body(part(b"text", url=url(b"text"))))
        assert refused["error"]["code"] == "invalid_image"
        assert_given_back(api, backend)

    asyncio.run(case())
