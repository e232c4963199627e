"""gRPC over the API and a backend without engines: answers, errors and keys as over HTTP."""

import asyncio
import hashlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor_pb2 import (
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from deployments.api.app import build_asgi
from deployments.api.fields.chat import MESSAGE
from deployments.api.fields.generation import CHAT, COMPLETION
from deployments.api.options import ApiOptions
from deployments.images.intake import ImageIntake
from deployments.router.rpc.proto_file import HEALTH, INFERENCE, PROTO, message, methods, read_proto
from deployments.router.rpc.server import GrpcServer
from deployments.router.rpc.settings import GrpcSettings
from engine.errors import Overloaded
from tests.deployments.api.asgi import Client
from tests.deployments.api.output.test_tools import CITY, PARIS, TEMPLATES, backend_with, written
from tests.deployments.fake_backend import MODEL, FakeBackend
from tests.deployments.images.test_clips import FRAMES, URLS, clip
from tests.deployments.images.test_clips import Server as ClipServer
from tests.deployments.images.test_wire import part, url, user
from tests.deployments.images.test_wire import text as words
from tests.deployments.images.vision_backend import VisionBackend
from tests.engine.images.files import gradient, saved

Chat, Generate, Sampling = map(message, ("ChatRequest", "GenerateRequest", "Sampling"))
SECRET = b"s" * 32


class Caller:
    """A gRPC client without generated code: a call with a method's name sends a request to it."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel

    def __call__(self, method: str, request: Any, service: str = INFERENCE, **more: Any) -> Any:
        _, answer, streamed = methods(service)[method]
        kind = self._channel.unary_stream if streamed else self._channel.unary_unary
        server = kind(
            f"/{service}/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )
        return server(request, **more)


@asynccontextmanager
async def served(backend: FakeBackend, **options: Any) -> AsyncIterator[tuple[Caller, Any]]:
    api = build_asgi(backend, ApiOptions(event_secret=SECRET, tell_request_id=False, **options))
    settings = GrpcSettings("127.0.0.1", 0, stop_seconds=0.2)
    server = GrpcServer(api, lambda: backend.is_ready, lambda: MODEL, settings)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        yield Caller(channel), channel
    await server.stop()


def chat(text: str = "hello", **sampling: Any) -> Any:
    request = Chat(sampling=Sampling(**{"temperature": 0.0, "max_tokens": 12, **sampling}))
    request.messages.add(role="user", content=text)
    return request


def http_chat(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hello"}]
    return {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 12, **fields}


def test_fields_have_the_types_of_the_bodies() -> None:
    """Bug: a field of manta.proto that no body has any more, or with a type that cannot hold what
    the body takes, such as an unsigned top_k, where -1 is all."""
    bodies = {**CHAT.taken, **COMPLETION.taken}
    kinds = {"double": "number", "bool": "boolean", "string": "string"}
    for field in Sampling.DESCRIPTOR.fields:
        forms = bodies[field.name].get("anyOf", [bodies[field.name]])
        if field.is_repeated:
            forms = [form["items"] for form in forms if form.get("type") == "array"]
        kind = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
        (form,) = [form for form in forms if form.get("type") == kinds.get(kind, "integer")]
        low, high = form.get("minimum", 0), form.get("maximum", 0)
        if kind == "uint32":
            assert low >= 0 and high < 2**32, field.name
        elif kind in ("int32", "int64"):
            assert low >= -(2 ** (int(kind[3:]) - 1)) and high < 2 ** (int(kind[3:]) - 1), (
                field.name
            )
    own = {name for form in MESSAGE.schema["anyOf"] for name in form["properties"]}
    assert {field.name for field in message("Message").DESCRIPTOR.fields} - {"parts"} <= own


async def test_the_same_as_over_http() -> None:
    """A field that gets lost on the way, a 0 that is taken for nothing, pieces that do not add up,
    or another meaning of logprobs."""
    backend = FakeBackend()
    client = Client(build_asgi(backend))
    right = (await client.post("/v1/chat/completions", http_chat(n=2, seed=3))).json()
    more = http_chat(logprobs=True, top_logprobs=2)
    scored = (await client.post("/v1/chat/completions", more)).json()["choices"][0]
    body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 9, "seed": 1, "logprobs": 1}
    plain = (await client.post("/v1/completions", body)).json()["choices"][0]
    async with served(backend) as (ask, _):
        whole = await ask("Chat", chat(n=2, seed=3))
        texts = [choice["message"]["content"] for choice in right["choices"]]
        assert [choice.text for choice in whole.choices] == texts and all(texts)
        assert whole.usage.completion_tokens == right["usage"]["completion_tokens"]
        pieces = [item async for item in ask("ChatStream", chat(n=2, seed=3))]
        joined = ["", ""]
        for piece in pieces:
            for choice in piece.choices:
                joined[choice.index] += choice.text
        assert joined == texts and pieces[-1].usage == whole.usage
        assert len(pieces) > 10 and len({piece.id for piece in pieces}) == 1
        (fault_text,) = (await ask("Chat", chat(logprobs=2))).choices
        items = [(item.token, item.logprob, len(item.top)) for item in fault_text.logprobs]
        wanted = scored["logprobs"]["content"]
        assert items == [(w["token"], pytest.approx(w["logprob"]), 2) for w in wanted]
        request = Generate(sampling=Sampling(max_tokens=9, seed=1, logprobs=1))
        request.token_ids.ids.extend([5, 6, 7])
        (fault_text,) = (await ask("Generate", request)).choices
        assert (
            fault_text.text == plain["text"] and fault_text.finish_reason == plain["finish_reason"]
        )
        assert [item.token for item in fault_text.logprobs] == plain["logprobs"]["tokens"]
        listed = await ask("Models", message("ModelsRequest")())
        assert [item.id for item in listed.models] == [MODEL]


async def test_images() -> None:
    """Bug: an image that is lost, in another place, or of another detail than over HTTP."""
    backend = VisionBackend()
    wide, tall = saved(gradient(40, 16), "PNG"), saved(gradient(16, 32), "JPEG")
    body = {
        "model": MODEL,
        "max_tokens": 4,
        "messages": [user(words("a"), part(wide), words("b"), part(tall, detail="low"))],
    }
    api = build_asgi(backend, ApiOptions(images=ImageIntake()))
    assert (await Client(api).post("/v1/chat/completions", body)).status == 200
    request = Chat(sampling=Sampling(max_tokens=4))
    parts = request.messages.add(role="user").parts
    parts.add(text="a")
    parts.add().image.data = wide
    parts.add(text="b")
    parts.add().image.url = url(tall)
    parts[-1].image.detail = "low"
    async with served(backend, images=ImageIntake()) as (ask, _):
        await ask("Chat", request)
        over_http, over_grpc = backend.requests
        assert over_grpc.token_ids == over_http.token_ids
        assert over_grpc.images == over_http.images and len(over_grpc.images) == 2
        request.messages[0].content = "a"
        with pytest.raises(grpc.aio.AioRpcError, match=r"messages\[0\]\.parts: the message has"):
            await ask("Chat", request)
        for none in (message("Part")(), message("Part")(image=message("Image")(detail="low"))):
            request = Chat()
            request.messages.add(role="user").parts.append(none)
            with pytest.raises(grpc.aio.AioRpcError, match=r"messages\[0\]\.parts\[0\] must have"):
                await ask("Chat", request)


async def test_clips(tmp_path: Path) -> None:
    """Bug: a clip whose frames are swapped or lost, or of another pace than over HTTP."""
    server = ClipServer(tmp_path)
    messages = [user(words("a"), clip(fps=4), part(FRAMES[0])), user(clip())]
    assert (await asyncio.to_thread(server.chat, *messages)).status == 200
    request = Chat(sampling=Sampling(max_tokens=4))
    first, second = request.messages.add(role="user").parts, request.messages.add(role="user").parts
    first.add(text="a")
    video = first.add().video
    video.fps = 4
    first.add().image.data = FRAMES[0]
    others = second.add().video
    for frame, address in zip(FRAMES, URLS, strict=True):
        video.frames.add(data=frame)
        others.frames.add(url=address)
    async with served(server.backend, images=server.intake) as (ask, _):
        await ask("Chat", request)
        over_http, over_grpc = server.backend.requests
        assert over_grpc.token_ids == over_http.token_ids
        assert over_grpc.images == over_http.images and len(over_grpc.images) == 5
        others.fps = 0
        with pytest.raises(grpc.aio.AioRpcError, match=r"messages\[1\]\.content\[0\]\.fps must be"):
            await ask("Chat", request)
        video.frames.add()
        field = r"messages\[0\]\.parts\[1\]\.video\.frames\[3\] must have data or url"
        with pytest.raises(grpc.aio.AioRpcError, match=field):
            await ask("Chat", request)


async def test_tools() -> None:
    """Calls that are lost between two dialects, in answers or in the history."""
    backend = backend_with(TEMPLATES["hermes"])
    backend.script = "<think>hm</think>" + written(("weather", PARIS))
    request = chat(max_tokens=2000)
    request.tools.add(name="weather", parameters=json.dumps(CITY), strict=True)
    request.tool_choice = "weather"
    async with served(backend) as (ask, _):
        (item,) = (await ask("Chat", request)).choices
        (call,) = item.tool_calls
        assert (call.name, json.loads(call.arguments)) == ("weather", PARIS)
        assert (item.reasoning, item.text, item.finish_reason) == ("hm", "", "stop")
        name, arguments, ids = "", "", set()
        async for piece in ask("ChatStream", request):
            for choice in piece.choices:
                for tool_call in choice.tool_calls:
                    name, arguments = name + tool_call.name, arguments + tool_call.arguments
                    ids |= {tool_call.id} - {""}
        assert (name, json.loads(arguments), len(ids)) == ("weather", PARIS, 1)
        request.messages.add(role="assistant", tool_calls=[call])
        request.messages.add(role="tool", content="sunny", tool_call_id=call.id)
        await ask("Chat", request)
    prompt = backend._tokenizer.decode(backend.requests[-1].token_ids, skip_special_tokens=False)
    assert written(("weather", PARIS)) in prompt and "sunny" in prompt


async def failed(call: Any) -> tuple[grpc.StatusCode, dict[str, str]]:
    """Return the status code of a call that fails, and its trailing metadata."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    return caught.value.code(), dict(caught.value.trailing_metadata() or ())


async def test_errors() -> None:
    """A failure that is told as another one, or as an answer."""
    backend = FakeBackend()
    code = grpc.StatusCode
    async with served(backend) as (ask, _):
        for method in ("Chat", "ChatStream"):
            status, details = await failed(ask(method, chat(temperature=9.0)))
            assert status == code.INVALID_ARGUMENT and details["manta-param"] == "temperature"
            unknown = chat()
            unknown.model = "other"
            assert (await failed(ask(method, unknown)))[0] == code.NOT_FOUND
            for options in ("{", "[]", '{"max_tokens": 3}', '{"stream": true}'):
                wrong = chat()
                wrong.options = options
                assert (await failed(ask(method, wrong)))[0] == code.INVALID_ARGUMENT
            backend.refuse = Overloaded("full", retry_after=3)
            status, details = await failed(ask(method, chat()))
            assert status == code.UNAVAILABLE and details["retry-after"] == "3"
            backend.refuse = None
        backend.errors = {3: Overloaded("full")}
        assert (await failed(ask("ChatStream", chat())))[0] == code.UNAVAILABLE
        backend.errors = {}
        ignored = chat()
        ignored.options = '{"made_up": 1, "user": "me"}'
        call = ask("Chat", ignored)
        await call
        assert "made_up" in dict(await call.initial_metadata())["x-ignored-fields"]
        call = ask("Chat", chat(), metadata=(("x-request-id", "mine"),))
        await call
        assert dict(await call.initial_metadata())["x-request-id"] == "mine"
        assert backend.requests[-1].request_id == "mine"


async def test_keys() -> None:
    """A method that somebody without a key may call; health, which a balancer asks without one."""
    options = {"api_keys": frozenset({hashlib.sha256(b"right").digest()})}
    async with served(FakeBackend(), **options) as (ask, channel):
        for key in (None, "Bearer wrong", "right"):
            metadata = () if key is None else (("authorization", key),)
            for method in ("Chat", "ChatStream"):
                status, details = await failed(ask(method, chat(), metadata=metadata))
                assert status == grpc.StatusCode.UNAUTHENTICATED
                assert details["manta-code"] == "invalid_api_key"
        assert (await ask("Chat", chat(), metadata=(("authorization", "Bearer right"),))).choices
        listing = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        assert (await failed(listing))[0] == grpc.StatusCode.UNAUTHENTICATED
        health = await ask("Check", message(f"{HEALTH}CheckRequest")(), HEALTH)
        assert health.status == 1


async def test_health_and_reflection() -> None:
    """A balancer that sends requests to a router without a replica; a tool that finds nothing."""
    backend = FakeBackend()
    asked = message(f"{HEALTH}CheckRequest")
    async with served(backend) as (ask, channel):
        watching = ask("Watch", asked(service=INFERENCE), HEALTH)
        assert (await watching.read()).status == 1
        backend.is_ready = False
        assert (await ask("Check", asked(), HEALTH)).status == 2
        assert (await watching.read()).status == 2
        watching.cancel()
        status, _ = await failed(ask("Check", asked(service="other"), HEALTH))
        assert status == grpc.StatusCode.NOT_FOUND
        wanted = reflection_pb2.ServerReflectionRequest(file_containing_symbol=INFERENCE)
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        (answer,) = [item async for item in stub.ServerReflectionInfo(iter([wanted]))]
        (file,) = answer.file_descriptor_response.file_descriptor_proto
        assert FileDescriptorProto.FromString(file) == read_proto(PROTO)


@pytest.mark.parametrize("kept", [True, False])
async def test_a_cut_stream_goes_on(kept: bool) -> None:
    """Cut after each event in turn: a piece that is missing or comes twice."""
    backend = FakeBackend()
    async with served(backend) as (ask, _):

        async def read(*metadata: tuple[str, str]) -> list[Any]:
            return [entry async for entry in ask("ChatStream", chat(seed=1), metadata=metadata)]

        whole = await read(("x-event-ids", "1"))
        past = dict(backend.kept)
        assert len(whole) > 10 and all(entry.event_id for entry in whole)
        for place, entry in enumerate(whole[:-1]):
            backend.kept = dict(past) if kept else {}
            rest = await read(("last-event-id", entry.event_id))
            assert [(r.id, r.choices, r.usage) for r in rest] == [
                (w.id, w.choices, w.usage) for w in whole[place + 1 :]
            ]


async def test_a_caller_that_leaves() -> None:
    """An engine that goes on for nobody; a deadline that the request does not get."""
    backend = FakeBackend()
    backend.pause = 0.02
    async with served(backend) as (ask, _):
        call = ask("ChatStream", chat(max_tokens=200), timeout=30)
        await call.read()
        call.cancel()
        deadline = asyncio.get_running_loop().time() + 5
        while not backend.aborts:
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.01)
        assert not backend.live and backend.requests[-1].deadline is not None


def test_the_file_is_what_protoc_reads(tmp_path: Path) -> None:
    """A .proto file that our reader takes for something else."""
    pytest.importorskip("grpc_tools", reason="pip install grpcio-tools")
    for name in ("manta.proto", "health.proto"):
        out = tmp_path / name
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO.parent}", name]
        subprocess.run([*command, f"--descriptor_set_out={out}"], check=True)
        (right,) = FileDescriptorSet.FromString(out.read_bytes()).file
        for kind in right.message_type:
            for field in kind.field:
                field.ClearField("json_name")
        assert read_proto(PROTO.with_name(name)) == right


def test_what_the_reader_does_not_know(tmp_path: Path) -> None:
    """A line that is passed over in silence."""
    path = tmp_path / "a.proto"
    path.write_text('syntax = "proto3";\npackage a;\nmessage A {\n  map<string, int32> b = 1;\n}\n')
    with pytest.raises(ValueError, match=r"a\.proto:4"):
        read_proto(path)
