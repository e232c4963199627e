"""Completions with a suffix, llama.cpp's /infill, and Ollama's suffix: the prompt of each family of
models that fills gaps, and what is refused of one that does not."""

import asyncio
import json
from typing import Any

import pytest
from msgspec import Struct

from deployments.api.app import build_asgi
from deployments.api.fields.generation import LLAMA_SAMPLING, Queued
from deployments.api.fields.ollama import Options
from deployments.api.fields.others import Infill
from engine.text.infill import FillMarks
from engine.text.tokenizer import Tokenizer
from tests.deployments.api.asgi import Client, Reply
from tests.deployments.fake_backend import MODEL, FakeBackend, tiny_tokenizer

P, S = "def add(a, b):\n    ", "\n    return total"
# Names in the order in which a prompt has them; the texts stand behind the first two.
FAMILIES = {
    "qwen2.5-coder": ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    "starcoder": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    "codellama": ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    "deepseek-coder": ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    "codestral": ("[SUFFIX]", "[PREFIX]"),
    "seed-coder": ("<[fim-suffix]>", "<[fim-prefix]>", "<[fim-middle]>"),
}
ENDS = ("<|file_sep|>", "<|fim_pad|>")


def tokenizer_with(names: tuple[str, ...], *, bos: bool = False) -> Tokenizer:
    backend = type(tiny_tokenizer().backend).from_str(tiny_tokenizer().backend.to_str())
    backend.add_special_tokens([*names, *ENDS])
    special = {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>" if bos else ""}
    if bos:
        from tokenizers.processors import TemplateProcessing

        backend.post_processor = TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
    return Tokenizer(backend, special_tokens=special)


def fake(family: str, *, bos: bool = False) -> FakeBackend:
    backend = FakeBackend()
    backend._tokenizer = tokenizer_with(FAMILIES[family], bos=bos)
    return backend


def wanted(backend: FakeBackend, family: str) -> list[int]:
    names, tokenizer = FAMILIES[family], backend.tokenizer(MODEL)
    texts = (S, P) if "suffix" in names[0].lower() else (P, S)
    ids: list[int] = []
    for name, text in zip(names, (*texts, ""), strict=False):
        mark = tokenizer.token_id(name)
        assert mark is not None
        ids += [mark, *tokenizer.encode(text)]
    return ids


def ask(backend: FakeBackend, path: str, **body: Any) -> Reply:
    return asyncio.run(Client(build_asgi(backend)).post(path, body))


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_prompt_is_that_of_each_family(family: str, bos: bool) -> None:
    """Bug: the suffix is passed over, or stands where the model was never shown it."""
    backend = fake(family, bos=bos)
    want = [0] * bos + wanted(backend, family)
    fill = {"prompt": P, "suffix": S}
    assert ask(backend, "/v1/completions", model=MODEL, **fill).status == 200
    assert ask(backend, "/api/generate", model=MODEL, stream=False, **fill).status == 200
    infill = {"input_prefix": P, "input_suffix": S}
    assert ask(backend, "/infill", model=MODEL, **infill).status == 200
    assert ask(backend, "/infill", **infill).status == 200, "one model needs no name"
    assert [request.token_ids for request in backend.requests] == [want] * 4
    ends = {backend.tokenizer(MODEL).token_id(name) for name in ENDS}
    assert all(ends <= set(request.params.stop_token_ids) for request in backend.requests)
    assert backend.requests[0].params.max_tokens == 16
    assert {request.params.max_tokens for request in backend.requests[1:]} == {None}
    two = ask(backend, "/v1/completions", model=MODEL, prompt=[P, "x"], suffix=S)
    assert len(two.json()["choices"]) == 2 and backend.requests[-2].token_ids == want
    shown = ask(backend, "/api/show", model=MODEL).json()["capabilities"]
    assert "insert" in shown


def test_infill_as_llama_cpp_answers() -> None:
    """Bug: pieces that are not the answer; options that reach nothing."""
    backend = fake("qwen2.5-coder")
    body: dict[str, Any] = {"input_prefix": P, "input_suffix": S, "n_predict": 9, "seed": 3}
    body |= {"temperature": 0, "repeat_penalty": 1.1, "cache_prompt": True, "id_slot": -1}
    reply = ask(backend, "/infill", **body)
    whole = reply.json()
    assert whole["stop"] and whole["tokens_predicted"] == 9 and whole["stop_type"] == "limit"
    assert whole["model"] == MODEL
    assert set((reply.header("x-ignored-fields") or "").split(", ")) == {"cache_prompt", "id_slot"}
    params = backend.requests[0].params
    assert (params.max_tokens, params.repetition_penalty, params.temperature) == (9, 1.1, 0)
    streamed = ask(backend, "/infill", **body, stream=True)
    pieces = [json.loads(line[6:]) for line in streamed.body.decode().split("\n\n") if line]
    assert "".join(piece["content"] for piece in pieces) == whole["content"]
    assert [piece["stop"] for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1]["tokens_evaluated"] == whole["tokens_evaluated"]


def test_what_stands_beside_the_gap() -> None:
    """Bug: the line that was begun, or other files, are not in the prompt."""
    backend = fake("qwen2.5-coder")
    encode = backend.tokenizer(MODEL).encode
    extra = [{"filename": "a.py", "text": "x = 1\n"}]
    body: dict[str, Any] = {"input_prefix": P, "input_suffix": S, "prompt": "tot"}
    ask(backend, "/infill", **body, input_extra=extra)
    want = [*wanted(backend, "qwen2.5-coder"), *encode("tot")]
    snippet = encode("\n\n--- snippet ---\n\nx = 1\n")
    assert backend.requests[-1].token_ids == snippet + want
    backend._tokenizer = tokenizer_with((*FAMILIES["qwen2.5-coder"], "<|repo_name|>"))
    ask(backend, "/infill", **body, input_extra=extra)
    prompt = backend.tokenizer(MODEL).decode(
        backend.requests[-1].token_ids, skip_special_tokens=False
    )
    assert prompt == (
        "<|repo_name|>myproject\n<|file_sep|>a.py\nx = 1\n<|file_sep|>filename\n"
        f"<|fim_prefix|>{P}<|fim_suffix|>{S}<|fim_middle|>tot"
    )


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": P, "suffix": S}, "suffix"),
        ("/infill", {"input_prefix": P, "input_suffix": S}, "input_suffix"),
        ("/api/generate", {"prompt": P, "suffix": S}, "suffix"),
    ],
)
def test_a_model_without_such_tokens(path: str, body: dict[str, Any], param: str) -> None:
    """Bug: a gap is filled as if nothing stood behind it."""
    backend = FakeBackend()
    assert FillMarks.of(backend.tokenizer(MODEL)) is None
    answer = ask(backend, path, model=MODEL, **body).json()
    error = answer if isinstance(answer["error"], str) else answer["error"]
    assert (error["code"], error["param"]) == ("suffix_not_supported", param)
    assert not backend.requests


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": [5, 6], "suffix": S}, "suffix"),
        ("/v1/completions", {"prompt": P, "suffix": S, "echo": True}, "suffix"),
        ("/v1/completions", {"prompt": P, "suffix": 5}, "suffix"),
        ("/v1/completions", {"prompt": P, "suffix": "word " * 2000}, "prompt"),
        ("/infill", {"input_prefix": 5}, "input_prefix"),
        ("/infill", {"prompt": 5}, "prompt"),
        ("/infill", {"input_prefix": "word " * 2000}, "input_prefix"),
        ("/infill", {"input_extra": [{"filename": "x"}]}, "input_extra[0]"),
        ("/infill", {"n_predict": -3}, "n_predict"),
        ("/infill", {"repeat_penalty": 99}, "repeat_penalty"),
    ],
)
def test_refusals(path: str, body: dict[str, Any], param: str) -> None:
    """Bug: an error names a field of the completion that the request became."""
    backend = fake("starcoder")
    reply = ask(backend, path, model=MODEL, **body)
    assert (reply.status, reply.json()["error"]["param"]) == (400, param), reply.json()
    assert not backend.requests


@pytest.mark.parametrize("fields", [Infill, Options])
def test_llama_names_are_the_fields_of_bodies(fields: type[Struct]) -> None:
    """A field that a body takes, and that sets nothing."""
    bodies = {*fields.__struct_fields__} - {*Queued.__struct_fields__}
    others = {"input_prefix", "input_suffix", "prompt", "input_extra", "n_predict", "num_predict"}
    assert bodies - others - {"stream"} == LLAMA_SAMPLING.keys()
