"""schemathesis sends what /openapi.json allows, and what it does not, to every operation."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from deployments.api.app import build_asgi
from deployments.api.batch_folder import BatchFolder, BatchSettings
from deployments.api.options import ApiOptions, EngineFacts
from deployments.api.routes import ROUTES
from engine.pooling import Pooling
from tests.deployments.fake_backend import MODEL, VECTOR, FakeBackend

schemathesis = pytest.importorskip("schemathesis", reason="make, or pip install -e '.[dev]'")

pytestmark = pytest.mark.slow
EXAMPLES = [3, pytest.param(12, marks=pytest.mark.nightly)]  # of each operation and mode
# By the end of a path; other routes generate.
POOLINGS = {
    "embeddings": Pooling("mean", (None,), {"query": "query: "}, matryoshka=True),
    "rerank": Pooling("cls", labels=("relevance",)),
    "score": Pooling("cls", labels=("relevance",)),
    "classify": Pooling("cls", labels=tuple(f"kind {i}" for i in range(VECTOR))),
}


def app_for(kind: str, folder: Path) -> Any:
    """Return an application with one model.

    kind: the kind of pooling, a key of `POOLINGS`; "" for a model that generates.
    """
    backend = FakeBackend()
    if kind:
        card = replace(backend.cards[MODEL], pooling=POOLINGS[kind], vector_size=VECTOR)
        backend.cards[MODEL] = card
    batches = BatchFolder(BatchSettings(str(folder), in_flight=4))
    options = ApiOptions(
        batches=batches, store_bytes=2**20, page=True, live=nobody, training=FakeTraining()
    )
    return build_asgi(backend, options)


class FakeTraining:
    """A fake of Training that accepts every order, and has one replica."""

    def __init__(self) -> None:
        self.version, self.paused = "initial", False

    async def update(self, model: str, folder: str, version: str) -> str:
        self.version = version or self.version
        return self.version

    async def pause(self, model: str, mode: str) -> None:
        self.paused = True

    async def resume(self, model: str) -> None:
        self.paused = False

    async def sleep(self, model: str, level: int, tags: Sequence[str], mode: str) -> None:
        self.paused = True

    async def wake(self, model: str, tags: Sequence[str]) -> None:
        self.paused = False

    async def init_transfer(self, model: str, info: dict[str, Any]) -> None: ...

    async def start_update(self, model: str) -> None: ...

    async def take_tensors(self, model: str, info: dict[str, Any], version: str) -> str:
        return version

    async def finish_update(self, model: str, version: str) -> str:
        return version

    async def begin_sent(self, model: str) -> None: ...

    async def take_sent(self, model: str, info: dict[str, Any], version: str) -> str:
        return version

    async def end_sent(self, model: str) -> str:
        return self.version

    async def reset_prefix_cache(self, model: str) -> None: ...

    async def state(self, model: str) -> dict[str, Any]:
        replica = {"weight_version": self.version, "paused": self.paused, "asleep": False}
        return {
            "weight_version": self.version, "is_paused": self.paused, "is_sleeping": self.paused,
            "weights_dropped": False, "replicas": {"r0": replica},
        }  # fmt: skip

    async def engine(self, model: str) -> EngineFacts:
        return EngineFacts(model, 256, "float32", "raw_logprobs", 1, 1, 1)


async def nobody() -> list[dict[str, Any]]:
    """Return an empty live view."""
    return []


def operations(folder: Path, *, bodies: bool) -> Iterator[Any]:
    """Yield each operation, of an application whose model does what the route asks for.

    An application and its schema take 65 ms, so they are made once for each kind of model.
    bodies: whether only operations that read a body are yielded.
    """
    schemas: dict[str, Any] = {}
    for route in ROUTES:
        kind = next((end for end in POOLINGS if route.path.endswith(end)), "")
        if kind not in schemas:
            app = app_for(kind, folder)
            schemas[kind] = schemathesis.openapi.from_asgi("/openapi.json", app)
        for method, operation in route.operations.items():
            if not bodies or operation.body or operation.form:
                yield schemas[kind][route.path][method.lower()]


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
def test_no_5xx_and_nothing_undocumented(mode: str, examples: int, tmp_path: Path) -> None:
    """Bug: a body of the right shape that ends in a traceback; a status, a content type or a shape
    of an answer that no client was told of."""
    from schemathesis.checks import not_a_server_error
    from schemathesis.generation import GenerationMode
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    checks = [
        not_a_server_error,
        status_code_conformance,
        content_type_conformance,
        response_schema_conformance,
    ]
    bounded = settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    good = mode == "POSITIVE"
    asked: set[str] = set()
    answered: set[str] = set()

    def ask(case: Any) -> None:
        if good and isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = MODEL  # or all that would be tested is that there is no such model
        response = case.call()
        label = f"{case.method} {case.path}"
        asked.add(label)
        if response.status_code == 200:
            answered.add(label)
        case.validate_response(response, checks=checks)

    for operation in operations(tmp_path, bodies=not good):
        strategy = operation.as_strategy(generation_mode=GenerationMode[mode])
        bounded(given(case=strategy)(ask))()
    if good:
        assert len(asked) == sum(len(route.operations) for route in ROUTES)
        assert len(answered) > len(asked) // 2, sorted(asked - answered)
