"""Real PNG and JPEG files over HTTP to an engine process with a tiny Qwen3-VL, against
transformers, through a killed engine, and from the library."""

import asyncio
import base64
import io
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image as Pillow

from deployments.api.app import build_asgi
from deployments.api.options import ApiOptions
from deployments.backend import ModelCard
from deployments.replica.server import ReplicaServer, StallLimits
from deployments.router.dispatcher import Dispatcher
from deployments.router.models.model_settings import DispatchLimits
from deployments.router.models.models_backend import ModelsBackend
from engine.config.engine_config import EngineConfig
from engine.errors import InvalidRequest
from engine.images.processor import image_processor
from engine.library.llm import LLM
from engine.process.client import EngineClient
from engine.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer
from tests.deployments.api.asgi import Client, Reply
from tests.deployments.images.vision_backend import TEMPLATE, vision_tokenizer
from tests.engine.images.files import saved
from tests.engine.images.folders import CASES, Case, picture, save_model, their_processor

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WIDE, TALL = picture(200, 90, 1), picture(70, 150, 2)
PNG, JPEG = saved(WIDE, "PNG"), saved(TALL, "JPEG", quality=90)
TOKENS = 24
POSITIONS = 1000
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": POSITIONS,
    "num_blocks": 200,
    "max_num_seqs": 4,
}


class Model:
    """A model folder with tokenizer and template, and the model of transformers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = vision_tokenizer()
        ids = {
            f"{name}_token_id": self.tokenizer.token_id(f"<|{text}|>")
            for name, text in (
                ("image", "image_pad"),
                ("video", "image_pad"),
                ("vision_start", "vision_start"),
                ("vision_end", "vision_end"),
            )
        }
        ids["video_token_id"] = 0  # of no prompt here
        case = CASES["Qwen3-VL"]
        text = case.text | {"max_position_embeddings": POSITIONS}
        text |= {"vocab_size": self.tokenizer.vocab_size}
        self.case: Case = replace(case, text=text, outer=ids)
        self.theirs: Any = save_model(folder, self.case)
        self.tokenizer.backend.save(str(folder / "tokenizer.json"))
        named = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
        (folder / "tokenizer_config.json").write_text(json.dumps(named))
        (folder / "chat_template.jinja").write_text(TEMPLATE)

    @torch.inference_mode()
    def answer(self, prompt: list[int], pictures: list[Pillow.Image]) -> list[int]:
        """Return the greedy tokens of transformers."""
        pad = self.case.outer["image_token_id"]
        inputs = dict(their_processor(self.case)(images=pictures, return_tensors="pt"))
        ids = list(prompt)
        for _ in range(TOKENS):
            tokens = torch.tensor([ids])
            inputs["mm_token_type_ids"] = (tokens == pad).int()
            ids.append(int(self.theirs(input_ids=tokens, **inputs).logits[0, -1].argmax()))
        return ids[len(prompt) :]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("vlm"))


def part(data: bytes) -> dict[str, Any]:
    url = f"data:image/x;base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


CONTENT = [
    {"type": "text", "text": "the number of"},
    part(PNG),
    {"type": "text", "text": "is"},
    part(JPEG),
]
BODY = {
    "model": "m",
    "messages": [{"role": "user", "content": CONTENT}],
    "max_tokens": TOKENS,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}


class Endpoint:
    """A router with engine processes, without Ray. pids: of the engines."""

    def __init__(self, client: Client, servers: list[ReplicaServer], pids: list[int]) -> None:
        self.client, self.servers, self.pids = client, servers, pids


@asynccontextmanager
async def endpoint(model: Model, replicas: int, **options: Any) -> AsyncIterator[Endpoint]:
    config = EngineConfig(model=str(model.folder), **OPTIONS, **options)
    tokenizer = Tokenizer.load(model.folder)
    card = ModelCard(
        "m", POSITIONS, tokenizer.vocab_size, (2,), 0, images=image_processor(model.folder)
    )
    dispatcher = Dispatcher(card, tokenizer, DispatchLimits(wait_seconds=30.0), "router")
    front = ModelsBackend("router-1")
    front.set_dispatcher("m", dispatcher, 0.0)
    servers: list[ReplicaServer] = []
    engines: list[EngineClient] = []

    def make(*callbacks: Any) -> EngineClient:
        engines.append(EngineClient(*callbacks))
        return engines[-1]

    published = {}
    try:
        for number in range(replicas):
            server = ReplicaServer(DispatchLimits().channel, StallLimits(), make)
            await server.start(config, "127.0.0.1")
            servers.append(server)
            published[f"r{number}"] = {**server.published(), "eos_token_ids": [2]}
        dispatcher.set_replicas(published)
        while len(dispatcher.state().replicas) < replicas:
            await asyncio.sleep(0.01)
        client = Client(build_asgi(front, ApiOptions()))
        yield Endpoint(client, servers, [engine.pid for engine in engines])
    finally:
        front.close()
        for server in servers:
            await server.stop()


async def test_answers_are_those_of_transformers(model: Model) -> None:
    """Bug: on its way to the tokens a picture is swapped, turned or resized otherwise."""
    async with endpoint(model, 1) as served:
        reply = await served.client.post("/v1/chat/completions", BODY)
        assert reply.status == 200, reply.body
        answer = reply.json()
        prompt, tokens = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
        pictures = [WIDE, Pillow.open(io.BytesIO(JPEG)).convert("RGB")]
        assert tokens == model.answer(prompt, pictures)
        swapped = [CONTENT[0], CONTENT[3], CONTENT[2], CONTENT[1]]
        messages = [{"role": "user", "content": swapped}]
        other = await served.client.post("/v1/chat/completions", {**BODY, "messages": messages})
        assert other.json()["choices"][0]["token_ids"] != tokens
        again = await served.client.post("/v1/chat/completions", {**BODY, "n": 2})
        choices = again.json()["choices"]
        assert [choice["token_ids"] for choice in choices] == [tokens, tokens]
        assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        broken = [part(PNG[:-100])]
        messages = [{"role": "user", "content": broken}]
        refused = await served.client.post("/v1/chat/completions", {**BODY, "messages": messages})
        assert (refused.status, refused.json()["error"]["code"]) == (400, "invalid_image")


async def test_placeholders_without_a_picture_are_refused(model: Model) -> None:
    """Bug: a prompt with a picture's token and no picture is answered as if it were a word, or as
    an error of the server."""
    pad = model.case.outer["image_token_id"]
    text = {"prompt": "a<|image_pad|>b", "max_tokens": 4}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", text),
        ("/v1/completions", {**text, "stream": True}),
        ("/v1/completions", {**text, "prompt": ["a", "b<|image_pad|>"]}),
        ("/api/generate", {**text, "raw": True, "stream": False}),
        ("/api/generate", {**text, "raw": True}),
    ]
    says = f"the prompt has 1 placeholders of images (token {pad}) without an image"
    async with endpoint(model, 1) as served:
        for path, body in bodies:
            reply = await served.client.post(path, {"model": "m", **body})
            assert reply.status == 400, (path, body, reply.body)
            error = reply.json()
            if path == "/v1/completions":
                assert error["error"]["code"] == "image_not_shown"
                error = error["error"]["message"]
            assert says in str(error)
        messages = [{"role": "user", "content": "a<|image_pad|>b"}]  # there it is text
        chat = {"model": "m", "messages": messages, "max_tokens": 4}
        assert (await served.client.post("/v1/chat/completions", chat)).status == 200
        for prompt in ("ab", [5, pad, 6]):  # ids may have been sampled, as a trainer's are
            plain = {"model": "m", "prompt": prompt, "max_tokens": 4}
            assert (await served.client.post("/v1/completions", plain)).status == 200


async def test_an_image_beyond_the_cache_is_refused_before_it_is_decoded(model: Model) -> None:
    """Bug: the image is decoded and sent to the engine, whose error names neither its field nor the
    setting."""
    async with endpoint(model, 1, image_cache_tokens=4) as served:
        reply = await served.client.post("/v1/chat/completions", BODY)
        error = reply.json()["error"]
        assert (reply.status, error["code"]) == (400, "image_too_large")
        assert error["param"] == "messages[0].content[1].image_url.url"
        assert "(4 tokens, engine.image_cache_tokens)" in error["message"]
        messages = [{"role": "user", "content": [part(PNG[:-100])]}]
        cut = await served.client.post("/v1/chat/completions", {**BODY, "messages": messages})
        assert cut.json()["error"]["code"] == "image_too_large", "its pixels were decoded"


async def test_a_killed_engine_changes_nothing(model: Model) -> None:
    """Without its pixels a request that moved would be refused, or answered about nothing."""
    async with endpoint(model, 2) as served:
        body = {**BODY, "max_tokens": 150}
        whole = (await served.client.post("/v1/chat/completions", body)).json()
        asked = asyncio.create_task(served.client.post("/v1/chat/completions", body))
        while not sum(server.in_flight for server in served.servers):
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        busy = next(i for i, server in enumerate(served.servers) if server.in_flight)
        os.kill(served.pids[busy], signal.SIGKILL)
        reply = await asked
        assert reply.status == 200, reply.body
        tokens = reply.json()["choices"][0]["token_ids"]
        assert tokens == whole["choices"][0]["token_ids"]


def sampled(seed: int, **fields: Any) -> dict[str, Any]:
    return {**BODY, "temperature": 1.0, "seed": seed, **fields}


async def test_seeds_grammars_and_tools(model: Model) -> None:
    """Bug: what shapes an answer is lost beside images, or answers differ from turn to turn."""
    async with endpoint(model, 1) as served:

        async def answer(body: dict[str, Any]) -> Any:
            reply = await served.client.post("/v1/chat/completions", body)
            assert reply.status == 200, reply.body
            return reply.json()["choices"]

        async def tokens(body: dict[str, Any]) -> list[list[int]]:
            return [choice["token_ids"] for choice in await answer(body)]

        first, again, other = [
            await tokens(sampled(seed, n=2, max_tokens=12)) for seed in (5, 5, 6)
        ]
        assert first == again and first[0] != first[1] and first != other
        alone = await tokens(sampled(5, max_tokens=12))
        together = await asyncio.gather(*(tokens(sampled(5, max_tokens=12)) for _ in range(3)))
        assert together == [alone] * 3

        plain = {**BODY, "ignore_eos": False, "max_tokens": 250}
        schema = {
            "type": "object",
            "properties": {"animal": {"enum": ["cat", "dog"]}},
            "required": ["animal"],
            "additionalProperties": False,
        }
        named = {"name": "seen", "schema": schema, "strict": True}
        formatted = {"type": "json_schema", "json_schema": named}
        (choice,) = await answer({**plain, "response_format": formatted})
        assert json.loads(choice["message"]["content"])["animal"] in ("cat", "dog")
        (choice,) = await answer({**plain, "structured_outputs": {"choice": ["cat", "dog"]}})
        assert choice["message"]["content"] in ("cat", "dog")
        tool = {"type": "function", "function": {"name": "tell", "parameters": schema}}
        called = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
        (choice,) = await answer({**plain, **called})
        (call,) = choice["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"])["animal"] in ("cat", "dog")


async def test_a_kill_in_mid_stream(model: Model) -> None:
    """Bug: a stream that moves goes on with other noise, or says a part twice."""
    async with endpoint(model, 2) as served:
        body = sampled(7, n=2, max_tokens=100, stream=True)

        def texts(reply: Any) -> dict[int, str]:
            parts: dict[int, str] = {}
            for event in reply.events():
                for choice in () if event == "[DONE]" else event["choices"]:
                    text = choice["delta"].get("content") or ""
                    parts[choice["index"]] = parts.get(choice["index"], "") + text
            return parts

        whole = texts(await served.client.post("/v1/chat/completions", body))
        reply = Reply()
        raw = json.dumps(body).encode()
        path = "/v1/chat/completions"
        asked = asyncio.create_task(served.client.request("POST", path, raw, reply=reply))
        while len(reply.sends) < 20:
            await asyncio.sleep(0.001)
        busy = next(i for i, server in enumerate(served.servers) if server.in_flight)
        os.kill(served.pids[busy], signal.SIGKILL)
        await asked
        assert reply.events()[-1] == "[DONE]"
        assert texts(reply) == whole and len(whole) == 2


def test_the_library(model: Model, tmp_path: Path) -> None:
    """A program without a server gets the same answer, from a file or from Pillow's picture."""
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    file = tmp_path / "a.png"
    file.write_bytes(PNG)
    with LLM(model.folder, **OPTIONS) as llm:
        text = {"type": "text", "text": "the number of"}
        chats = [
            [{"role": "user", "content": [text, {"type": "image", "image": image}]}]
            for image in (PNG, WIDE)
        ]
        first, second = llm.chat(chats, params)
        prompt = first.prompt_token_ids
        expected = model.answer(prompt, [WIDE])
        assert [first.outputs[0].token_ids, second.outputs[0].token_ids] == [expected] * 2
        mark = "<|vision_start|><|image_pad|><|vision_end|>"
        written = f"<|im_start|>user\nthe number of{mark}<|im_end|>\n<|im_start|>assistant\n"
        (third,) = llm.generate({"prompt": written, "images": [WIDE]}, params)
        assert third.outputs[0].token_ids == expected
        for prompts in (written, [written, "a"], {"prompt": written}):
            with pytest.raises(InvalidRequest, match="1 placeholders of images"):
                llm.generate(prompts, params)
        assert llm.ready.image_tokens == 4096
        # docs/images.md: the last program, with this model and picture
        page = Path(__file__).parents[3] / "docs" / "images.md"
        *_, program = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
        program = program.replace('LLM("models/my-model")', "given").replace("cat.png", str(file))
        exec(program, names := {"given": llm})
        assert len(names["output"].prompt_token_ids) > 20
    with LLM(model.folder, **OPTIONS, images="off") as llm:
        with pytest.raises(InvalidRequest, match='images="off"'):
            llm.chat(chats, params)
        assert not llm.ready.image_token_ids
