"""Prompt tuning and prefix tuning as model names over HTTP: a router and a real engine with a tiny
model, in one process."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from deployments.adapters.registry import AdapterSettings
from deployments.api.app import build_asgi
from engine import factory
from engine.config.engine_config import EngineConfig
from engine.process import fake
from tests.deployments.api.asgi import Client
from tests.deployments.fake_backend import tiny_tokenizer
from tests.deployments.router.fleet import Fleet
from tests.engine.lora.adapters import save_prompt
from tests.engine.lora.test_logits import add_adapter, run, submit
from tests.engine.models.checkpoints import save_checkpoint

CONTEXT, VIRTUAL = 48, 18
PROMPT = [7, 11, 13, 17]
KINDS = ("prompt_tuning", "prefix_tuning")


def test_served_as_model_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the text of the base model; or a request that asks for more than the virtual tokens
    leave of the context is cut short and says nothing, the first one for an adapter or a later."""
    theirs = save_checkpoint(tmp_path / "base", "llama", vocab_size=256)
    paths = {
        kind: str(save_prompt(theirs, tmp_path / kind, kind, VIRTUAL, seed))
        for seed, kind in enumerate(KINDS)
    }
    config = EngineConfig(
        model=str(tmp_path / "base"),
        device="cpu",
        dtype="float32",
        num_blocks=64,
        block_size=4,
        max_num_seqs=8,
        max_num_batched_tokens=48,
        max_model_len=CONTEXT,
        max_loras=2,
        max_virtual_tokens=VIRTUAL,
        num_threads=1,
    )
    alone = factory.build(config)[0]
    wanted = []  # what the engine alone says
    for number, name in enumerate(("", *KINDS)):
        left = CONTEXT - VIRTUAL * bool(name) - len(PROMPT)
        if name:
            add_adapter(alone, name, Path(paths[name]))
        submit(alone, number, PROMPT, name, max_tokens=left, prompt_logprobs=None)
        wanted.append(run(alone)[number].tokens)
        assert len(wanted[-1]) == left
    assert len({tuple(tokens[:left]) for tokens in wanted}) == 3, "they are alike"

    async def case() -> None:
        adapter_settings = AdapterSettings("m", paths=paths)
        async with Fleet(
            1, loras=2, adapters=adapter_settings, tokenizer=tiny_tokenizer()
        ) as fleet:
            client = Client(build_asgi(fleet.dispatcher))

            async def ask(route: str, model: str, **fields: object) -> tuple[int, Any]:
                body = {"model": model, "temperature": 0, "ignore_eos": True, **fields}
                body["return_token_ids"] = True
                reply = await client.request("POST", f"/v1/{route}", json.dumps(body).encode())
                return reply.status, reply.json()

            async def lengths() -> dict[str, int]:
                reply = await client.request("GET", "/v1/models")
                return {entry["id"]: entry["max_model_len"] for entry in reply.json()["data"]}

            for name, tokens in zip(("m", *KINDS), wanted, strict=True):
                for _ in range(2):  # nobody has read the adapter when the first one comes
                    status, answer = await ask(
                        "completions", name, prompt=PROMPT, max_tokens=len(tokens) + 1
                    )
                    error = answer["error"]
                    assert (status, error["code"]) == (400, "context_length_exceeded"), answer
                    assert error["param"] == "max_tokens"
                    assert f"is {len(PROMPT) + len(tokens)} tokens" in error["message"]
                status, answer = await ask(
                    "completions", name, prompt=PROMPT, max_tokens=len(tokens)
                )
                assert status == 200, answer
                assert answer["choices"][0]["token_ids"] == tokens
                assert answer["usage"]["prompt_tokens"] == len(PROMPT)
            assert await lengths() == {"m": CONTEXT, **dict.fromkeys(KINDS, CONTEXT - VIRTUAL)}
            long = [{"role": "user", "content": "word " * 8}]
            status, answer = await ask("chat/completions", KINDS[0], messages=long)
            assert (status, answer["error"]["param"]) == (400, "messages"), answer
            reply = await client.request("GET", f"/v1/adapters/{KINDS[1]}")
            assert reply.json()["virtual_tokens"] == VIRTUAL and not fleet.load()["r0"]

    monkeypatch.setattr(fake, "build", lambda _: factory.build(config))
    asyncio.run(asyncio.wait_for(case(), 60))
