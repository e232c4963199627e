"""A user's program: the official openai client, of either generation, against a running server.

python -m tests.deployments.on_ray.openai_session http://127.0.0.1:8000/v1 MODEL
"""

import asyncio
import sys
from typing import Any

import openai

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]


def main(url: str, model: str) -> None:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        listing(client, model)
        chat(client, model)
        chat_stream(client, model)
        completions(client, model)
        many_choices(client, model)
        errors(client, model)
        raw(client, model)
    asyncio.run(asynchronous(url, model))
    print(openai.__version__)


def listing(client: openai.OpenAI, model: str) -> None:
    assert [card.id for card in client.models.list()] == [model]
    assert client.models.retrieve(model).id == model


def chat(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model,
        messages=QUESTION,
        temperature=0,
        max_completion_tokens=24,
        logprobs=True,
        top_logprobs=2,
    )
    (choice,) = answer.choices
    assert "Paris" in (choice.message.content or ""), choice
    assert choice.message.role == "assistant" and choice.finish_reason in ("stop", "length")
    assert choice.logprobs and choice.logprobs.content
    for token in choice.logprobs.content:
        assert len(token.top_logprobs) == 2
        assert token.top_logprobs[0].logprob == token.logprob <= 0  # greedy takes the best
    assert answer.usage
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    text = choice.message.content or ""
    stop = text.split()[3]
    cut = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_tokens=24, stop=[stop]
    )
    assert cut.choices[0].message.content == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    limited = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=1)
    assert limited.choices[0].finish_reason == "length"
    assert limited.usage and limited.usage.completion_tokens == 1


def chat_stream(client: openai.OpenAI, model: str) -> None:
    fields: Any = {"model": model, "messages": QUESTION, "max_tokens": 16, "seed": 5}
    whole = client.chat.completions.create(**fields)
    options: Any = {"include_usage": True}
    text, usage, finish, chunks = "", None, None, 0
    for chunk in client.chat.completions.create(**fields, stream=True, stream_options=options):
        chunks += 1
        assert usage is None, "a chunk after the usage"
        usage = chunk.usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    assert chunks > 3
    assert (text, finish) == (whole.choices[0].message.content, whole.choices[0].finish_reason)
    assert usage and whole.usage
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens is not None
    greedy: Any = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 64}
    whole = client.chat.completions.create(**greedy)
    assert whole.choices[0].finish_reason == "stop"  # the helper below takes nothing else
    if hasattr(client.chat.completions, "stream"):  # some keep it under .beta
        with client.chat.completions.stream(**greedy, logprobs=True, top_logprobs=1) as stream:
            for _ in stream:
                pass
            final = stream.get_final_completion()
        assert final.choices[0].message.content == whole.choices[0].message.content
        assert final.choices[0].logprobs and final.choices[0].logprobs.content


def completions(client: openai.OpenAI, model: str) -> None:
    fields: Any = {"model": model, "temperature": 0, "max_tokens": 8}
    text = client.completions.create(prompt="The sea is", logprobs=2, **fields)
    logprobs = text.choices[0].logprobs
    assert logprobs and logprobs.tokens and logprobs.token_logprobs and logprobs.top_logprobs
    assert "".join(logprobs.tokens) == text.choices[0].text
    ids = tokenize(client, {"prompt": "The sea is"})["tokens"]
    from_ids = client.completions.create(prompt=ids, **fields)
    assert from_ids.choices[0].text == text.choices[0].text
    stream = client.completions.create(prompt=ids, stream=True, **fields)
    assert "".join(c.choices[0].text for c in stream if c.choices) == text.choices[0].text
    echoed = client.completions.create(prompt=["The sea is", "One, two"], echo=True, **fields)
    assert [c.text[:8] for c in echoed.choices] == ["The sea ", "One, two"]
    assert echoed.choices[0].text == "The sea is" + text.choices[0].text


def many_choices(client: openai.OpenAI, model: str) -> None:
    fields: Any = {"model": model, "messages": QUESTION, "max_tokens": 12, "n": 3, "seed": 11}
    first = [c.message.content for c in client.chat.completions.create(**fields).choices]
    again = [c.message.content for c in client.chat.completions.create(**fields).choices]
    assert first == again and len(set(first)) > 1
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == first


def errors(client: openai.OpenAI, model: str) -> None:
    create: Any = client.chat.completions.create
    tool = {"type": "function", "function": {"name": "a name", "parameters": {}}}
    cases: list[tuple[type[openai.APIStatusError], dict[str, Any], str, str]] = [
        (openai.NotFoundError, {"model": "none"}, "model_not_found", "model"),
        (openai.BadRequestError, {"temperature": 3}, "invalid_value", "temperature"),
        (openai.BadRequestError, {"top_logprobs": 2, "logprobs": "x"}, "invalid_type", "logprobs"),
        (openai.BadRequestError, {"tools": [tool]}, "invalid_value", "tools"),
        (openai.BadRequestError, {"max_tokens": 10**6}, "context_length_exceeded", "max_tokens"),
        (openai.BadRequestError, {"messages": []}, "", "messages"),
    ]
    for kind, fields, code, param in cases:
        for stream in (False, True):
            try:
                create(**{"model": model, "messages": QUESTION, "stream": stream, **fields})
            except kind as error:
                assert error.code == code or not code, (fields, error.code)
                assert (error.param or "").split("[")[0] == param, (fields, error.param)
                assert error.request_id and str(error.message)
            else:
                raise AssertionError(f"{fields} was taken")


def tokenize(client: openai.OpenAI, body: dict[str, Any]) -> dict[str, Any]:
    root = str(client.base_url).split("/v1")[0]
    answer = client._client.post(root + "/tokenize", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def raw(client: openai.OpenAI, model: str) -> None:
    root = str(client.base_url).split("/v1")[0]
    text = "A grey sea, naïve & 🌊."
    counted = tokenize(client, {"prompt": text, "return_token_strs": True})
    assert counted["count"] == len(counted["tokens"]) == len(counted["token_strs"])
    back = client._client.post(root + "/detokenize", json={"tokens": counted["tokens"]})
    assert back.json()["prompt"] == text
    rendered = tokenize(client, {"messages": QUESTION})
    answer = client.chat.completions.with_raw_response.create(
        model=model,
        messages=QUESTION,
        max_tokens=2,
        metadata={"a": "b"},
        extra_headers={"X-Request-Id": "round-trip-1"},
    )
    assert answer.headers["x-request-id"] == "round-trip-1"
    assert answer.headers["x-ignored-fields"] == "metadata"
    usage = answer.parse().usage
    assert usage and usage.prompt_tokens == rendered["count"]
    assert client.chat.completions.with_raw_response.create(
        model=model, messages=QUESTION, max_tokens=1
    ).headers["x-request-id"]


async def asynchronous(url: str, model: str) -> None:
    """Check concurrent streams, one of which is left early: each has its own text."""
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:

        async def count_aloud(number: int) -> str:
            message = {"role": "user", "content": f"Count from {number % 3}."}
            fields: Any = {"model": model, "messages": [message], "temperature": 0}
            text = ""
            async with await client.chat.completions.create(
                **fields, max_tokens=12, stream=True
            ) as stream:
                async for chunk in stream:
                    text += chunk.choices[0].delta.content or ""
                    if number == 6:
                        break
            return text

        texts = await asyncio.gather(*(count_aloud(number) for number in range(7)))
        assert texts[:3] == texts[3:6] and texts[0].startswith(texts[6])


if __name__ == "__main__":
    main(*sys.argv[1:])
