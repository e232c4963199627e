"""Calls of HTTP routes over a Serve handle, without Ray."""

from deployments.api.app import build_asgi
from deployments.router.serve.handle_call import control
from engine.messages import AdapterInfo
from tests.deployments.fake_backend import FakeBackend


async def test_routes_that_answer_no_json() -> None:
    """Bug: a handle's call of vLLM's routes of adapters, or of /, ended in a JSON error."""
    backend = FakeBackend()
    backend.readers["/adapters/legal"] = AdapterInfo("legal", "r1", "lora", 8, 1, ["q_proj"])
    app = build_asgi(backend)
    body = {"lora_name": "legal", "lora_path": "/adapters/legal"}
    answer = await control(app, "/v1/load_lora_adapter", "", body)
    assert answer == {"text": "Success: LoRA adapter 'legal' added successfully."}
    answer = await control(app, "/v1/load_lora_adapter", "", body)
    assert answer["status"] == 400 and answer["error"]["code"] == "adapter_exists"
    assert await control(app, "/", "", None) == {"text": "Ollama is running"}


async def test_a_method_of_its_own() -> None:
    """Bug: routes of DELETE could not be called over a handle."""
    backend = FakeBackend()
    backend.readers["/adapters/legal"] = AdapterInfo("legal", "r1", "lora", 8, 1, ["q_proj"])
    app = build_asgi(backend)
    body = {"name": "legal", "path": "/adapters/legal"}
    assert (await control(app, "/v1/adapters", "", body))["id"] == "legal"
    answer = await control(app, "/v1/adapters/legal", {"model": "tiny"}, None, "DELETE")
    assert answer["deleted"] and not backend.adapters.records
