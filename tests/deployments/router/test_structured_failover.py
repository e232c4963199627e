"""A replica is lost in the middle of a document, which goes on elsewhere with the same text."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from engine.config.engine_config import EngineConfig
from engine.factory import build
from engine.messages import Ready
from engine.structured.grammar import Grammar
from tests.deployments.router.fleet import Fleet, LocalEngine, read, until
from tests.engine.text.small_tokenizers import byte_level
from tests.engine.text.test_structured import PERSON, save_model


class ModelEngine(LocalEngine):
    """A LocalEngine with a random model instead of the engine that counts."""

    folder = Path()

    async def start(self, config: EngineConfig) -> Ready:
        changed = EngineConfig(
            model=str(self.folder), device="cpu", dtype="float32", num_blocks=256, num_threads=1
        )
        self.core, ready = build(changed)  # type: ignore[assignment]
        loop = asyncio.get_running_loop()
        self.core.on_loaded(lambda: loop.call_soon_threadsafe(self._wake))
        self.alive = True
        return ready


class ModelFleet(Fleet):
    def _engine(self, name: str) -> Callable[..., LocalEngine]:
        def make(*callbacks: Any) -> LocalEngine:
            self.engines[name] = ModelEngine(*callbacks)
            return self.engines[name]

        return make


@pytest.mark.parametrize(
    "tokens", [5, *(pytest.param(tokens, marks=pytest.mark.slow) for tokens in (0, 25))]
)
async def test_the_same_document(tmp_path: Path, tokens: int) -> None:
    """A grammar that begins anew at the replica that takes over, and a document in a document."""
    tokenizer = byte_level()
    ModelEngine.folder = save_model(tmp_path, tokenizer)
    fields: dict[str, Any] = {
        "structured": Grammar.json_schema(PERSON),
        "n": 2,
        "max_tokens": 900,
        "logprobs": 1,
    }
    async with ModelFleet(2, tokenizer=tokenizer) as fleet:
        whole = await asyncio.wait_for(read(fleet.generate(**fields)), 60)
        entry = fleet.generate(**fields)
        reading = asyncio.create_task(read(entry))
        await until(lambda: all(len(c.emitted) >= tokens for c in entry.choices), 30)
        (place,) = {choice.place for choice in entry.choices}
        fleet.engines[place].die()
        outcome = await asyncio.wait_for(reading, 60)
    assert outcome == whole
    assert entry.migrations == 2, "both choices had lost their replica"
    for ids in outcome.values():
        document = json.loads(tokenizer.decode(ids))
        jsonschema.validate(document, PERSON)
