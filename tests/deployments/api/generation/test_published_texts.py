"""Over HTTP and with published tokenizers, text is transformers' text of prompt and answer without
that of the prompt: whole, streamed, echoed, before stop strings, behind a prefill."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from deployments.api.app import build_asgi
from engine.batch import TokenLogprobs
from engine.messages import Delta
from tests.deployments import fake_backend
from tests.deployments.api.asgi import Client, Reply
from tests.deployments.fake_backend import MODEL, FakeBackend
from tests.engine.text.published_reference import (
    REPLACEMENT,
    Reference,
    each,
    reference,
    texts,
)

LIMITS = settings(
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
STREAM = {"stream": True}


class Served:
    """A published tokenizer behind the API. answer: the ids that every request gets as its
    output."""

    def __init__(self, known: Reference) -> None:
        self.known = known
        self.backend = FakeBackend()
        self.backend._tokenizer = known.ours
        card = self.backend.cards[MODEL]
        size = known.ours.vocab_size
        self.backend.cards[MODEL] = replace(card, vocab_size=size, eos_token_ids=())
        self.client = Client(build_asgi(self.backend))

    def prompt(self) -> list[int]:
        """Return the token ids of the last request."""
        return self.backend.requests[-1].token_ids

    def ask(self, path: str, answer: list[int], **fields: Any) -> Reply:
        prompt_logprobs = None
        if isinstance(fields.get("prompt"), list):
            prompt_logprobs = [None, *map(_logprob, fields["prompt"][1:])]
        deltas = [Delta(0, [token], logprobs=[_logprob(token)]) for token in answer]
        deltas[0].prompt_logprobs = prompt_logprobs
        deltas[-1].finish = "length"
        self.backend.script = deltas
        body = {"model": MODEL, "max_tokens": len(answer), **fields}
        reply = asyncio.run(self.client.post(path, body))
        assert reply.status == 200, reply.body
        return reply


def _logprob(token: int) -> TokenLogprobs:
    return TokenLogprobs(token, -1.5, 1, [token], [-1.5], 9.0)


def streamed(reply: Reply) -> str:
    choices = [event["choices"][0] for event in reply.events()[:-1]]
    return "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in choices)


def lines(reply: Reply, between: str) -> list[str]:
    return [line for line in reply.body.decode().split(between) if line]


@pytest.fixture(scope="module", params=each(pytest.mark.nightly))
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    known = reference(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake_backend, "VOCAB", known.ours.vocab_size)
        yield Served(known)


def test_completions(served: Served) -> None:
    """A prompt of ids: the text, its echo, and an offset for each token of both. A token's text
    begins at its offset, where the text of the tokens before it ends."""
    known = served.known

    def check(prompt: list[int], answer: list[int], skip: bool, stream: bool) -> None:
        assume(prompt and answer)
        fields = {"prompt": prompt, "skip_special_tokens": skip, "stream": stream}
        expected = known.behind(prompt, answer, skip)
        plain = served.ask("/v1/completions", answer, **fields)
        assert (streamed(plain) if stream else plain.json()["choices"][0]["text"]) == expected
        reply = served.ask("/v1/completions", answer, **fields, echo=True, logprobs=1)
        echo = known.decode(prompt, False)
        if stream:
            assert streamed(reply) == echo + expected
            lists = [event["choices"][0]["logprobs"] for event in reply.events()[:-1]]
            offsets = [at for part in lists if part for at in part["text_offset"]]
        else:
            assert reply.json()["choices"][0]["text"] == echo + expected
            offsets = reply.json()["choices"][0]["logprobs"]["text_offset"]
        befores = [known.decode(prompt[:count], False) for count in range(len(prompt))]
        befores += [echo + known.behind(prompt, answer[:n], skip) for n in range(len(answer))]
        for before, offset in zip(befores, offsets, strict=True):
            assert not before[offset:].strip(REPLACEMENT) and len(before) - offset < 4

    examples = {"prompt": known.ids, "answer": known.ids}
    LIMITS(given(**examples, skip=st.booleans(), stream=st.booleans())(check))()


def test_a_prompt_of_text(served: Served) -> None:
    """The echo is the prompt as it was sent, and the text is what belongs behind it. It ends before
    a stop string."""
    known = served.known

    def check(text: str, answer: list[int], at: int, size: int, stream: bool) -> None:
        assume(text and answer)
        fields = {"prompt": text, "echo": True, "stream": stream}
        reply = served.ask("/v1/completions", answer, **fields)
        expected = known.behind(served.prompt(), answer, True)
        shown = streamed(reply) if stream else reply.json()["choices"][0]["text"]
        assert shown == text + expected
        stop = expected[at : at + size]
        assume(stop)
        reply = served.ask("/v1/completions", answer, **fields, stop=stop)
        shown = streamed(reply) if stream else reply.json()["choices"][0]["text"]
        assert shown == text + expected[: expected.index(stop)]

    places = {"at": st.integers(0, 12), "size": st.integers(1, 4)}
    LIMITS(given(text=texts, answer=known.ids, **places, stream=st.booleans())(check))()


@pytest.mark.parametrize("dialect", ["chat", "messages", "ollama"])
def test_a_prefill(served: Served, dialect: str) -> None:
    """A chat that ends with what the assistant has said so far: the prompt ends with that, and the
    answer is what belongs behind it. Answers as items lost the space they began with."""
    known = served.known
    if known.ours.chat_template is None:
        pytest.skip("this tokenizer has no chat template")

    def ask(answer: list[int], messages: list[dict[str, str]], stream: bool) -> str:
        if dialect == "messages":
            reply = served.ask("/v1/messages", answer, messages=messages, stream=stream)
            if stream:
                data = [json.loads(line.partition("data: ")[2]) for line in lines(reply, "\n\n")]
                return "".join(item["delta"].get("text", "") for item in data if "delta" in item)
            return "".join(block["text"] for block in reply.json()["content"])
        if dialect == "ollama":
            options = {"num_predict": len(answer)}
            fields = {"messages": messages, "stream": stream, "options": options}
            reply = served.ask("/api/chat", answer, **fields)
            pieces = [json.loads(line) for line in lines(reply, "\n")]
            return "".join(item["message"]["content"] for item in pieces)
        path, fields = "/v1/chat/completions", {"messages": messages, "stream": stream}
        going_on = {"continue_final_message": True, "add_generation_prompt": False}
        reply = served.ask(path, answer, **fields, **going_on)
        if stream:
            return streamed(reply)
        text: str = reply.json()["choices"][0]["message"]["content"]
        return text

    def check(text: str, answer: list[int], stream: bool) -> None:
        assume(text.strip() and answer)
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": text}]
        shown = ask(answer, messages, stream)
        prompt = served.prompt()
        plain = known.decode(known.ours.encode_plain(text), False)
        assert known.decode(prompt, False).rstrip().endswith(plain.strip())
        assert shown == known.behind(prompt, answer, True)

    LIMITS(given(text=texts, answer=known.ids, stream=st.booleans())(check))()


def test_a_beginning_given_as_ids(served: Served) -> None:
    """liteqwen's `prefix_token_ids`: the reply begins with what they add to the prompt."""
    known = served.known
    if known.ours.chat_template is None:
        pytest.skip("this tokenizer has no chat template")

    def check(begin: list[int], answer: list[int]) -> None:
        assume(begin and answer)
        kwargs = {"prefix_token_ids": begin, "max_new_tokens": len(answer)}
        reply = served.ask("/chat", answer, query="hi", gen_kwargs=kwargs)
        prompt = served.prompt()
        before = prompt[: -len(begin)]
        assert prompt == [*before, *begin]
        expected = known.behind(before, begin, True) + known.behind(prompt, answer, True)
        assume("think>" not in expected)  # thoughts are no part of it
        assert reply.json()["response"] == expected

    LIMITS(given(begin=known.ids, answer=known.ids)(check))()
