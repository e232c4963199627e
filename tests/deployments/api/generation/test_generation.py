"""Whole and streamed answers: the same text, lists that fit it, and an end in every case."""

import asyncio
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from deployments.api.app import build_asgi
from deployments.api.body_fields import LIMITS
from deployments.api.options import ApiOptions
from deployments.router.serve import handle_call
from engine.errors import EngineDead, InvalidRequest, MantaError, Overloaded
from engine.messages import Delta
from engine.sampling_params import SamplingParams
from tests.deployments.api.asgi import CHAT, COMPLETION, Client, Reply
from tests.deployments.fake_backend import MODEL, FakeBackend


def run(work: Any) -> Any:
    return asyncio.run(work)


def streamed(reply: Reply, index: int = 0) -> tuple[str, str | None]:
    """Return the text and the finish reason of one choice of a stream. Asserts that it ended
    once."""
    events = reply.events()
    assert events[-1] == "[DONE]"
    text, finish = "", None
    for event in events[:-1]:
        for choice in event["choices"]:
            if choice["index"] == index:
                assert finish is None, "something after the finish"
                text += choice.get("delta", {}).get("content", "") or choice.get("text", "")
                finish = choice["finish_reason"]
    return text, finish


def text_of(reply: Reply, index: int = 0) -> str:
    choice = reply.json()["choices"][index]
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


def test_chat_stream_equals_whole(client: Client) -> None:
    """A token lost or repeated at the seams: first event, held-back text, last event."""
    whole = run(client.chat())
    stream = run(client.chat(stream=True))
    assert stream.header("content-type") == "text/event-stream; charset=utf-8"
    assert streamed(stream) == (text_of(whole), whole.json()["choices"][0]["finish_reason"])
    first = stream.events()[0]
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len({event["id"] for event in stream.events()[:-1]}) == 1
    assert all("usage" not in event for event in stream.events()[:-1])


def test_include_usage(client: Client) -> None:
    """Usage that differs between stream and answer, or is missing: billing by guess."""
    whole = run(client.chat(n=2)).json()["usage"]
    reply = run(client.chat(n=2, stream=True, stream_options={"include_usage": True}))
    events = reply.events()
    assert events[-2]["choices"] == [] and events[-2]["usage"] == whole
    assert all(event["usage"] is None for event in events[:-2])
    assert whole["total_tokens"] == whole["prompt_tokens"] + whole["completion_tokens"]
    assert whole["prompt_tokens_details"] == {"cached_tokens": 3}


def test_timing_for_those_who_ask(client: Client) -> None:
    """A load tester that has to guess how long a request queued and whether it moved; usage with
    fields in it that nobody asked for."""
    asks = ((b"content-type", b"application/json"), (b"x-return-timing", b"1"))
    reply = run(client.post("/v1/completions", {**COMPLETION, "prompt": ["a", "b"]}, headers=asks))
    timing = reply.json()["usage"]["timing"]
    assert timing == {"queue_ms": 250.0, "migrations": 2, "replicas": ["r0", "r1", "r0", "r1"]}
    streamed = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    events = run(client.post("/v1/chat/completions", streamed, headers=asks)).events()
    assert events[-2]["usage"]["timing"]["migrations"] == 1
    assert "timing" not in run(client.chat()).json()["usage"]


def test_each_token_is_an_event_and_the_first_comes_at_once(
    backend: FakeBackend, client: Client
) -> None:
    """Tokens kept back to fill a buffer; or one send a token when many are there already."""
    backend.script = "abcdef"
    reply = run(client.completion(stream=True))
    texts = [e["choices"][0]["text"] for e in reply.events()[:-1]]
    assert texts == [*"abcdef", ""]
    assert b'"text":"a"' in reply.sends[0] and b'"text":"b"' not in reply.sends[0]


def test_what_piled_up_leaves_in_one_send(backend: FakeBackend, client: Client) -> None:
    """A slow reader must get larger events, not a longer queue of small ones."""
    tokens = backend.tokenizer("tiny").encode("abcdefgh")
    deltas = [Delta(0, [t]) for t in tokens] + [Delta(0, [2], finish="stop", stop_token=2)]
    backend.script, backend.burst = deltas, len(deltas)
    reply = run(client.completion(stream=True))
    assert streamed(reply) == ("abcdefgh", "stop")
    assert len(reply.sends) == 1
    assert [e["choices"][0]["text"] for e in reply.events()[:-1]] == ["abcdefgh", ""]
    assert deltas[0].token_ids == [tokens[0]], "the backend's delta was changed"


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_across_tokens(backend: FakeBackend, client: Client, stream: bool) -> None:
    """A stop string that begins in one token and ends in another: cut exactly, nothing of
    it sent, and the engine told to stop although it saw no end token.
    """
    backend.script = "one two three four"
    reply = run(client.completion(stream=stream, stop=["o th", "zzz"]))
    assert (streamed(reply) if stream else (text_of(reply), "stop")) == ("one tw", "stop")
    if not stream:
        assert reply.json()["choices"][0]["stop_reason"] == "o th"
    assert len(backend.aborts) == 1 and not backend.live
    included = run(client.completion(stop="o th", include_stop_str_in_output=True))
    assert text_of(included) == "one two th"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_with_a_stop_string(backend: FakeBackend, client: Client, stream: bool) -> None:
    """The page said nothing of tokens whose text was cut off: they are listed, and counted, up to
    the one that completed the stop string."""
    backend.script = "one two three four"
    reply = run(client.completion(stream=stream, stop="o th", logprobs=0, return_token_ids=True))
    choices = [e["choices"][0] for e in reply.events()[:-1]] if stream else reply.json()["choices"]
    listed = [t for c in choices for t in (c["logprobs"] or {"tokens": []})["tokens"]]
    assert "".join(c["text"] for c in choices) == "one tw"
    assert "one two th" in "".join(listed) and "one two th" not in "".join(listed[:-1])
    ids = [token for choice in choices for token in choice.get("token_ids", [])]
    assert len(ids) == len(listed)
    if not stream:
        assert reply.json()["usage"]["completion_tokens"] == len(ids)


@pytest.mark.parametrize("stream", [False, True])
def test_stop_of_an_emoji(backend: FakeBackend, client: Client, stream: bool) -> None:
    """A character of several tokens; half of it must not reach the client."""
    backend.script = "joy \U0001f600 and more"
    reply = run(client.completion(stream=stream, stop=["\U0001f600"]))
    assert (streamed(reply)[0] if stream else text_of(reply)) == "joy "
    reply = run(client.completion(stream=stream))
    assert (streamed(reply)[0] if stream else text_of(reply)) == "joy \U0001f600 and more"
    assert "\ufffd".encode() not in reply.body


def test_tokens_of_half_a_character_are_events(backend: FakeBackend, client: Client) -> None:
    """Bug: the first event waited until a character was whole, and each that was not looked like a
    step that took twice as long: 4 ms more to the first token, and the p99 between two of them."""
    backend.script = "\U0001f600!"
    count = len(backend.tokenizer("tiny").encode(backend.script))
    events = run(client.completion(stream=True)).events()
    texts = [event["choices"][0]["text"] for event in events[:-1]]
    assert len(texts) == count + 1  # and the one that says why it ended
    assert texts[0] == "" and "".join(texts) == backend.script


def test_one_choice_stops_alone(backend: FakeBackend, client: Client) -> None:
    """With n > 1 a stop string in one choice: that one is given back at once, the others go on."""
    texts = [text_of(run(client.completion(n=3, seed=1, temperature=1)), i) for i in range(3)]
    unique = next(c for c in texts[1][14:] if c not in texts[0] + texts[2])
    for stream in (False, True):
        reply = run(client.completion(n=3, seed=1, temperature=1, stop=unique, stream=stream))
        got = [streamed(reply, i)[0] if stream else text_of(reply, i) for i in range(3)]
        assert got == [texts[0], texts[1].split(unique)[0], texts[2]]
    assert backend.aborted_choices == [1, 1]


def test_ids_bias_and_seed_reach_the_engine(backend: FakeBackend, client: Client) -> None:
    """A parameter lost between the HTTP field and SamplingParams."""
    fields = {
        "n": 2,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "seed": 17,
        "stop": ["x", "y"],
        "stop_token_ids": [9],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "logit_bias": {"5": -100, "6": 1.5},
        "allowed_token_ids": [5, 6, 9],
        "bad_words_ids": [[5, 6], [9]],
        "prompt_logprobs": 2,
        "logprobs_mode": "processed_logprobs",
        "skip_special_tokens": False,
    }
    run(client.chat(**fields, logprobs=True, top_logprobs=3, cache_salt="s", priority=-2))
    request = backend.requests[-1]
    params = msgspec.structs.asdict(request.params)
    expected = {
        **fields,
        "return_routed_experts": False,
        "stop": ("x", "y"),
        "stop_token_ids": (9,),
        "allowed_token_ids": (5, 6, 9),
        "bad_words_ids": ([5, 6], [9]),
        "logit_bias": {5: -100, 6: 1.5},
        "logprobs": 3,
        "max_tokens": 32,
        "structured": None,
        "pooled": False,
        "unscaled": False,
        "thinking": None,
    }
    unset = sorted(params.keys() - expected.keys())
    assert not unset, f"{unset}: add each to `fields` above, with a value other than its default"
    assert params == expected
    assert (request.seed, request.cache_salt, request.priority) == (17, "s", -2)
    run(client.chat(seed=None))
    run(client.chat(seed=None))
    assert backend.requests[-1].seed != backend.requests[-2].seed


def test_the_model_s_defaults_hold_where_a_request_says_nothing(
    backend: FakeBackend, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """generation_config.json is read and thrown away; or it wins over what a client asks for."""
    defaults = {"temperature": 0.6, "top_k": 20}
    tokenizer = backend.tokenizer(MODEL)
    monkeypatch.setattr(tokenizer, "sampling_defaults", defaults)
    asked: tuple[tuple[dict[str, Any], tuple[float, int]], ...] = (
        ({"temperature": None}, (0.6, 20)),
        ({"temperature": None, "top_k": None}, (0.6, 20)),
        ({"temperature": 1.5, "top_k": -1}, (1.5, 0)),
    )
    for fields, want in asked:
        run(client.chat(**fields))
        params = backend.requests[-1].params
        assert (params.temperature, params.top_k) == want


def test_the_engine_s_seed_decides_where_a_request_gives_none(
    backend: FakeBackend, client: Client
) -> None:
    """`engine: {seed: 7}` did nothing over HTTP, where each request drew a seed: no run could be
    repeated. Streams that may go on at another router drew theirs elsewhere."""

    def asked(**fields: Any) -> tuple[str, int]:
        reply = run(client.chat(temperature=1, **fields))
        return reply.json()["choices"][0]["message"]["content"], backend.requests[-1].seed

    assert asked() != asked()
    backend.cards[MODEL] = replace(backend.cards[MODEL], seed=7)
    first = asked()
    assert asked() == first and asked(seed=None) == first
    ids = backend.requests[-1].token_ids
    assert first[1] == SamplingParams().seed_for(ids, 7), "as in the library"
    assert asked(seed=3)[1] == 3
    other = asked(messages=[{"role": "user", "content": "another"}])
    assert other != first
    backend.cards[MODEL] = replace(backend.cards[MODEL], seed=8)
    assert asked() != first
    backend.cards[MODEL] = replace(backend.cards[MODEL], seed=7)
    resumable = Client(build_asgi(backend, ApiOptions(event_secret=b"s" * 32)))
    headers = ((b"content-type", b"application/json"), (b"x-event-ids", b"1"))
    body = {**CHAT, "temperature": 1, "stream": True}
    run(resumable.post("/v1/chat/completions", body, headers=headers))
    assert backend.requests[-1].seed == first[1] and backend.requests[-1].stream
    run(client.completion(prompt=["one", "two", "one"], temperature=1))
    seed, two, again = (request.seed for request in backend.requests[-3:])
    assert seed == again != two


def test_defaults(backend: FakeBackend, client: Client) -> None:
    """OpenAI's: a chat may use the whole context, a completion makes 16 tokens."""
    run(client.chat(max_tokens=None))
    assert backend.requests[-1].params.max_tokens is None
    run(client.completion(max_tokens=None))
    assert backend.requests[-1].params.max_tokens == 16
    run(client.chat(max_tokens=None, max_completion_tokens=4))
    assert backend.requests[-1].params.max_tokens == 4


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs_fit_the_text(client: Client, stream: bool) -> None:
    """One entry a token of the text, and one for the end token."""
    reply = run(client.chat(logprobs=True, top_logprobs=2, stream=stream))
    if stream:
        items = [
            item
            for event in reply.events()[:-1]
            for item in (event["choices"][0]["logprobs"] or {"content": []})["content"]
        ]
        text = streamed(reply)[0]
    else:
        items, text = reply.json()["choices"][0]["logprobs"]["content"], text_of(reply)
    assert "".join(item["token"] for item in items) == text + "<|im_end|>"
    assert b"".join(bytes(item["bytes"]) for item in items[:-1]).decode() == text
    assert all(item["logprob"] == -1.5 and len(item["top_logprobs"]) == 2 for item in items)
    assert items[0]["top_logprobs"][0].keys() == {"token", "logprob", "bytes"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 5])
def test_echo_with_logprobs(client: Client, stream: bool, max_tokens: int) -> None:
    """What evaluation harnesses read: prompt and output in one list, offsets into one text."""
    reply = run(client.completion(echo=True, logprobs=1, max_tokens=max_tokens, stream=stream))
    if stream:
        parts = [e["choices"][0] for e in reply.events()[:-1]]
        logprobs: dict[str, list[Any]] = {}
        for part in parts:
            for key, value in (part["logprobs"] or {}).items():
                logprobs[key] = logprobs.get(key, []) + value
        text = "".join(part["text"] for part in parts)
    else:
        logprobs, text = reply.json()["choices"][0]["logprobs"], text_of(reply)
        assert reply.json()["usage"]["completion_tokens"] == max_tokens
        assert "prompt_logprobs" not in reply.json()["choices"][0]
    assert text.startswith("hello") and "".join(logprobs["tokens"]) == text
    assert len(logprobs["tokens"]) == 5 + max_tokens
    assert logprobs["token_logprobs"] == [None] + [-1.5] * (4 + max_tokens)
    assert logprobs["top_logprobs"][0] is None
    for token, offset, top in zip(
        logprobs["tokens"][1:],
        logprobs["text_offset"][1:],
        logprobs["top_logprobs"][1:],
        strict=True,
    ):
        assert text[offset : offset + len(token)] == token
        assert top[token] == -1.5, "the token itself is always among the alternatives"


def test_echo_without_logprobs(client: Client, backend: FakeBackend) -> None:
    """max_tokens 0 with echo: the prompt alone."""
    reply = run(client.completion(echo=True, max_tokens=0))
    assert text_of(reply) == "hello" and reply.json()["usage"]["completion_tokens"] == 0
    assert reply.json()["choices"][0]["finish_reason"] == "length"
    ids = backend.tokenizer("tiny").encode("he")
    reply = run(client.completion(echo=True, prompt=ids, max_tokens=3))
    assert text_of(reply).startswith("he") and len(text_of(reply)) > 4
    assert streamed(run(client.completion(echo=True, max_tokens=0, stream=True))) == (
        "hello",
        "length",
    )


def test_prompt_logprobs_and_token_ids(client: Client, backend: FakeBackend) -> None:
    """Extensions: one item a prompt token, the first without; ids that decode to the text."""
    reply = run(client.completion(prompt_logprobs=1, return_token_ids=True)).json()["choices"][0]
    assert reply["prompt_logprobs"][0] is None and len(reply["prompt_logprobs"]) == 5
    assert {"logprob", "rank", "decoded_token"} == set(
        next(iter(reply["prompt_logprobs"][1].values()))
    )
    assert backend.tokenizer("tiny").decode(reply["token_ids"]) == reply["text"]
    ids = backend.tokenizer("tiny").encode("hello")
    assert reply["prompt_token_ids"] == ids and "token_logprobs" not in reply
    values = reply["prompt_token_logprobs"]
    scored = zip(reply["prompt_logprobs"][1:], ids[1:], strict=True)
    assert values == [None, *(entry[str(token)]["logprob"] for entry, token in scored)]
    chat = run(client.chat(prompt_logprobs=0)).json()
    assert chat["prompt_logprobs"][0] is None and len(chat["prompt_logprobs"]) > 5


def test_many_prompts(client: Client, backend: FakeBackend) -> None:
    """Choices of several prompts in the order of the prompts, each as if it had been alone."""
    alone = [
        text_of(run(client.completion(prompt=p, n=2, seed=1, temperature=1)), i)
        for p in ("hello", "you")
        for i in range(2)
    ]
    both = {"prompt": ["hello", "you"], "n": 2, "seed": 1, "temperature": 1}
    reply = run(client.completion(**both))
    assert [text_of(reply, i) for i in range(4)] == alone
    assert [c["index"] for c in reply.json()["choices"]] == [0, 1, 2, 3]
    assert reply.json()["usage"]["prompt_tokens"] == 8
    stream = run(client.completion(**both, stream=True))
    assert [streamed(stream, i)[0] for i in range(4)] == alone
    mixed = run(client.completion(prompt=[[75, 72], [5]]))
    assert [len(r.token_ids) for r in backend.requests[-2:]] == [2, 1] and mixed.status == 200


def test_concurrent_requests_do_not_mix(client: Client) -> None:
    """One id used by two callers at once must not join their answers."""

    async def both() -> list[Reply]:
        headers = ((b"content-type", b"application/json"), (b"x-request-id", b"same"))
        return await asyncio.gather(
            *(
                client.post("/v1/completions", {**COMPLETION, "prompt": p}, headers=headers)
                for p in ("one", "two") * 8
            )
        )

    replies = run(both())
    assert len({text_of(r) for r in replies[::2]}) == len({text_of(r) for r in replies[1::2]}) == 1
    assert text_of(replies[0]) != text_of(replies[1])
    assert len({r.json()["id"] for r in replies}) == 16
    assert {r.header("x-request-id") for r in replies} == {"same"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (Overloaded("the queue is full", retry_after=2.2), 503, "overloaded"),
        (EngineDead("the engine is gone"), 503, "engine_dead"),
        (EngineDead("no frame for 10 s", code="engine_stalled"), 503, "engine_stalled"),
        (
            InvalidRequest("too long", code="context_length_exceeded"),
            400,
            "context_length_exceeded",
        ),
        (InvalidRequest("NaN in a tensor", code="adapter_invalid"), 422, "adapter_invalid"),
        (InvalidRequest("rank 512", code="adapter_incompatible"), 422, "adapter_incompatible"),
        (MantaError("too late", code="deadline_exceeded"), 408, "deadline_exceeded"),
        (RuntimeError("/secret/path 0xdeadbeef"), 500, "internal_error"),
    ],
)
def test_errors_before_the_first_token_have_a_status(
    client: Client, backend: FakeBackend, stream: bool, error: Any, status: int, code: str
) -> None:
    """A 200 sent too early turns every failure into a broken stream."""
    for where in ("refuse", "errors"):
        setattr(backend, where, error if where == "refuse" else {0: error})
        reply = run(client.chat(stream=stream))
        assert (reply.status, reply.json()["error"]["code"]) == (status, code)
        assert b"secret" not in reply.body and b"0xdead" not in reply.body
        if isinstance(error, Overloaded):
            assert reply.header("retry-after") == "3"
        assert (reply.header("x-should-retry") == "false") == (status == 408)
        backend.refuse, backend.errors = None, {}
    assert not backend.live


@pytest.mark.parametrize(
    ("route", "fields", "param", "told"),
    [
        (
            "chat",
            {"messages": [{"role": "user", "content": "a" * 300}], "max_tokens": None},
            "messages",
            "your messages resulted in 316 tokens. Please reduce the length of the messages.",
        ),
        (
            "chat",
            {"max_tokens": 250},
            "max_tokens",
            "you requested 271 tokens (21 in the messages, 250 in the completion). Please reduce "
            "the length of the messages or completion.",
        ),
        (
            "completion",
            {"prompt": [75] * 256, "max_tokens": 9},
            "prompt",
            "your prompt resulted in 256 tokens, which leaves none for the completion. Please "
            "reduce the length of the prompt.",
        ),
        (
            "completion",
            {"prompt": [75] * 10_000},
            "prompt",
            "your prompt resulted in 10000 tokens. Please reduce the length of the prompt.",
        ),
    ],
)
def test_what_does_not_fit_is_said_in_openais_words(
    client: Client, route: str, fields: dict[str, Any], param: str, told: str
) -> None:
    """LiteLLM knows the error by its words: other ones made it a BadRequestError, and the fallback
    to a model with a larger context did not start."""
    reply = run(getattr(client, route)(**fields))
    error = reply.json()["error"]
    assert (reply.status, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert error["message"] == (
        f"This model's maximum context length is 256 tokens. However, {told}"
    )


def test_ignored_fields_are_named_with_what_they_are_in(client: Client) -> None:
    """`stream_options` was named as ignored although its include_usage was heeded."""
    options = {"include_usage": True, "include_obfuscation": False, "a b": 1}
    reply = run(client.chat(stream=True, stream_options=options))
    assert reply.header("x-ignored-fields") == (
        "stream_options.include_obfuscation, stream_options.a?b"
    )
    assert reply.events()[-2]["usage"]["completion_tokens"] > 0
    many = {f"f{number}": 1 for number in range(40)}
    named = (run(client.chat(**many)).header("x-ignored-fields") or "").split(", ")
    assert named == [*(f"f{number}" for number in range(15)), "..."]


def test_a_model_that_is_not_there(client: Client, backend: FakeBackend) -> None:
    """ "does not exist", and no word of what does."""

    def message(name: str) -> str:
        error = run(client.chat(model=name)).json()["error"]
        assert error["code"] == "model_not_found"
        return str(error["message"])

    assert message("gpt-4") == 'the model "gpt-4" does not exist; served: "tiny"'
    assert 'did you mean "tiny"?; served: "tiny"' in message("tinny")
    backend.cards |= {f"legal-{i}": backend.cards["tiny"] for i in range(5)}
    assert message("gpt-4").endswith(
        'served: "tiny", "legal-0", "legal-1", "legal-2" and 2 more, see /v1/models'
    )
    refusal = run(
        handle_call.call(client.app, {**COMPLETION, "model": "gpt-4"})
    )  # the Python client's
    assert 'served: "tiny"' in refusal["error"]["message"]


@pytest.mark.parametrize(
    ("name", "served"),
    [
        ("claude-opus-4", "tiny"),
        ("gpt-4o", "tiny"),
        ("tiny", "tiny"),
        ("claude-law", "claude-law"),  # an adapter that is called so
        ("gpt-4o-mini", None),
        ("Claude-opus-4", None),
    ],
)
def test_aliases_go_to_the_model(
    client: Client, backend: FakeBackend, name: str, served: str | None
) -> None:
    """Clients with names of models built in got a 404 for each of them."""
    card = replace(backend.cards["tiny"], aliases=("claude-*", "gpt-4o"))
    law = replace(card, id="claude-law", parent="tiny")
    backend.cards = {"tiny": card, "claude-law": law}
    if served != "claude-law":
        reply = run(client.chat(model=name)).json()
        assert reply.get("model") == served
        if served is None:
            assert reply["error"]["code"] == "model_not_found"
            assert 'served: "tiny"' in reply["error"]["message"]
    shown = run(client.request("GET", f"/v1/models/{name}")).json()
    assert shown.get("id") == served
    listed = run(client.request("GET", "/v1/models")).json()["data"]
    assert [(model["id"], model.get("aliases")) for model in listed] == [
        ("tiny", ["claude-*", "gpt-4o"]),
        ("claude-law", None),
    ]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("name", "served"),
    [
        ("intfloat/multilingual-e5-small", "exact"),
        ("intfloat/e5", "longer"),
        ("other/e5", "broad"),
        ("intfloat/e5-large", "longest"),
        ("intfloat/x1", "set"),
        ("broad", "broad"),
    ],
)
def test_the_most_specific_alias_is_meant(
    client: Client, backend: FakeBackend, name: str, served: str, turned: bool
) -> None:
    """A broad pattern of one model took the very name of another, by the order of the models."""
    aliases = {
        "broad": ("*/*",),
        "longer": ("intfloat/*",),
        "longest": ("intfloat/*-large",),
        "set": ("intfloat/x[0-9]",),
        "exact": ("intfloat/multilingual-e5-small",),
    }
    card = backend.cards["tiny"]
    names = reversed(aliases) if turned else aliases
    backend.cards = {
        card_id: replace(card, id=card_id, aliases=aliases[card_id]) for card_id in names
    }
    assert run(client.request("GET", f"/v1/models/{name}")).json()["id"] == served
    assert run(client.chat(model=name)).json()["model"] == served


@pytest.mark.parametrize("name", [None, "", "left out"])
def test_one_model_needs_no_name(client: Client, backend: FakeBackend, name: str | None) -> None:
    """A curl line for the only model was refused for want of its name, by each dialect."""
    text = [{"role": "user", "content": "hello"}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": text},
        "/v1/completions": {"prompt": "hello"},
        "/v1/responses": {"input": "hello"},
        "/v1/messages": {"messages": text, "max_tokens": 8},
        "/v1/messages/count_tokens": {"messages": text},
        "/v1/responses/input_tokens": {"input": "hello"},
        "/chat": {"query": "hello"},
        "/api/chat": {"messages": text},
        "/tokenize": {"prompt": "hello"},
        "/detokenize": {"tokens": [5]},
    }
    law = replace(backend.cards["tiny"], id="law", parent="tiny")
    both = {"law": law, **backend.cards}
    for path, body in bodies.items():
        backend.cards = both
        body = body if name == "left out" else {**body, "model": name}
        reply = run(client.post(path, body))
        assert reply.status == 200, (path, reply.body)
        backend.cards = {**both, "other": replace(both["tiny"], id="other")}
        reply = run(client.post(path, body))
        assert reply.status == 400 and b"other" in reply.body, (path, reply.body)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat", [False, True])
def test_the_end_token_is_listed(client: Client, chat: bool, stream: bool) -> None:
    """usage counted a token that neither token_ids nor the log-probabilities had."""
    ask = client.chat if chat else client.completion
    scores: dict[str, Any] = {"logprobs": True} if chat else {"logprobs": 0}
    reply = run(ask(n=2, return_token_ids=True, stream=stream, **scores))
    choices = [e["choices"][0] for e in reply.events()[:-1]] if stream else reply.json()["choices"]
    for index in (0, 1):
        mine = [choice for choice in choices if choice["index"] == index]
        ids = [token for choice in mine for token in choice.get("token_ids", [])]
        logprobs = [choice["logprobs"] for choice in mine if choice.get("logprobs")]
        listed = [x for choice in logprobs for x in choice["content" if chat else "tokens"]]
        assert ids[-1] == 2 and len(listed) == len(ids)
        values = [value for choice in mine for value in choice.get("token_logprobs", [])]
        if chat:
            assert values == [entry["logprob"] for entry in listed]
        else:
            assert values == [value for entry in logprobs for value in entry["token_logprobs"]]
        text = [
            choice.get("text") or choice.get("message", choice.get("delta", {})).get("content")
            for choice in mine
        ]
        assert "<|im_end|>" not in "".join(filter(None, text))
    if not stream:
        assert reply.json()["usage"]["completion_tokens"] == sum(
            len(choice["token_ids"]) for choice in choices
        )


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("chat", "fields"),
    [
        (True, {"logprobs": False, "top_logprobs": 0}),
        (True, {"top_logprobs": 0}),
        (True, {"function_call": "none", "functions": []}),
        (True, {"function_call": "auto"}),
        (True, {"tools": [], "tool_choice": "none"}),
        (True, {"modalities": ["text"], "audio": None}),
        (True, {"store": None, "service_tier": None, "prediction": None}),
        (False, {"logprobs": False}),
        (False, {"best_of": 1, "stream": True}),
        (False, {"suffix": "", "tools": None}),
        (False, {"function_call": "none", "functions": []}),
        *(
            (chat, fields)
            for chat in (False, True)
            for fields in (
                {"n": 1, "best_of": 1},
                {"stop": ""},
                {"stop": []},
                {"stop": None, "stop_token_ids": []},
                {"logit_bias": {}},
                {"stream": False, "stream_options": None},
                {"stream": False, "stream_options": {}},
                {"stream_options": {"include_usage": False}},
                {"use_beam_search": False, "length_penalty": 1.0, "bad_words": []},
                {"allowed_token_ids": None, "truncate_prompt_tokens": None},
                {"request_id": None, "kv_transfer_params": None, "chat_template": None},
            )
        ),
    ],
)
def test_values_that_ask_for_nothing_are_taken(
    backend: FakeBackend, chat: bool, fields: dict[str, Any], strict: bool
) -> None:
    """Clients send their defaults; a 400 for a field that asks for nothing ends the evening."""
    client = Client(build_asgi(backend, ApiOptions(strict=strict)))
    reply = run((client.chat if chat else client.completion)(**fields))
    assert reply.status == 200, reply.body
    assert reply.header("x-ignored-fields") is None


def test_limits_of_other_servers_are_refused(client: Client) -> None:
    """Fields that limit the output were named in a header, and the output was not limited."""
    for name, (neutral, instead) in LIMITS.items():
        for path, body in (
            ("/v1/chat/completions", CHAT),
            ("/v1/completions", COMPLETION),
            ("/v1/responses", {"input": "hello"}),
            ("/v1/messages", {"messages": CHAT["messages"], "max_tokens": 8}),
        ):
            own = (path, name) in {
                ("/v1/responses", "max_output_tokens"),
                ("/v1/messages", "stop_sequences"),
            }
            for value in (*neutral, None) if not own else ():
                reply = run(client.post(path, {**body, name: value}))
                assert reply.status == 200, (path, name, value, reply.body)
            reply = run(client.post(path, {**body, name: [["bad"]]}))
            assert reply.status == 400, (path, name)
            if not own:
                assert instead in reply.body.decode() and name in reply.body.decode()


def test_other_names_of_limits(client: Client) -> None:
    """max_new_tokens was ignored, and the answer went on."""
    for fields in ({"max_new_tokens": 2}, {"max_completion_tokens": 2}):
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
            asked = {**body, "max_tokens": None, **fields}
            assert run(client.post(path, asked)).json()["usage"]["completion_tokens"] == 2
    reply = run(client.chat(max_tokens=3, max_new_tokens=2))
    assert reply.json()["error"]["code"] == "conflicting_fields"
    assert run(client.chat(min_new_tokens="2")).json()["error"]["param"] == "min_new_tokens"


def test_many_choices_and_stops(backend: FakeBackend, client: Client) -> None:
    """pass@k asks for more than 8 choices, lm-eval for more than 4 stops."""
    reply = run(client.chat(n=128))
    assert len(reply.json()["choices"]) == 128
    backend.script = "one two three"
    stops = [f"<{i}>" for i in range(127)]
    assert text_of(run(client.chat(stop=[*stops, "o th"]))) == "one tw"
    few = Client(build_asgi(backend, ApiOptions(max_choices=4)))
    reply = run(few.completion(n=3, prompt=["a", "b"]))
    assert reply.json()["error"]["code"] == "too_many_choices"
    assert run(few.completion(n=2, prompt=["a", "b"])).status == 200


def test_errors_inside_a_stream(client: Client, backend: FakeBackend) -> None:
    """After the first token the only place is an event; [DONE] must not claim a good end."""
    backend.errors = {3: EngineDead("the engine is gone")}
    reply = run(client.chat(stream=True))
    assert reply.status == 200
    assert reply.events()[-1]["error"]["code"] == "engine_dead"
    assert b"[DONE]" not in reply.body and not backend.live


@pytest.mark.parametrize("message", ["numerical_error: the logits are not finite", ""])
def test_a_choice_that_the_engine_gives_up(
    client: Client, backend: FakeBackend, message: str
) -> None:
    """An unasked end must not look like a finished answer."""
    backend.script = [Delta(0, [75]), Delta(0, [], finish="error", error=message)]
    code = "numerical_error" if message else "engine_error"
    reply = run(client.completion(n=2))
    assert (reply.status, reply.json()["error"]["code"]) == (500, code)
    assert dict(reply.headers).get("x-should-retry") == ("false" if message else None)
    events = run(client.completion(n=2, stream=True)).events()
    assert events[-1]["error"]["code"] == code
    assert not backend.live


def test_a_choice_that_a_trainer_aborts(client: Client, backend: FakeBackend) -> None:
    """The tokens of a rollout are lost with the pause of its trainer, or their end is hidden."""
    backend.script = [Delta(0, [75]), Delta(0, [], finish="abort")]
    for ask in (client.completion, client.chat):
        answer = run(ask(n=2, return_token_ids=True)).json()
        parts = [(choice["token_ids"], choice["finish_reason"]) for choice in answer["choices"]]
        assert parts == [([75], "abort")] * 2
        spans = [choice["weight_versions"] for choice in answer["choices"]]
        assert spans == [[{"version": "initial", "num_tokens": 1}]] * 2
        assert answer["usage"]["completion_tokens"] == 2
        *events, done = run(ask(n=2, stream=True)).events()
        reasons = [choice["finish_reason"] for event in events for choice in event["choices"]]
        assert reasons.count("abort") == 2 and done == "[DONE]"
    unscored = run(client.completion(prompt_logprobs=0, max_tokens=1))
    assert (unscored.status, unscored.json()["error"]["code"]) == (503, "aborted")
    body = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "a"}]}
    claude = run(client.request("POST", "/v1/messages", msgspec.json.encode(body)))
    assert claude.status == 503 and b"trainer" in claude.body, "no stop_reason says so"
    assert not backend.live


def test_a_second_prompt_refused_frees_the_first(client: Client, backend: FakeBackend) -> None:
    """Half of a request left running when the other half could not start."""
    real, count = backend.generate, 0

    def generate(request: Any) -> Any:
        nonlocal count
        count += 1
        if count == 2:
            raise Overloaded("full")
        return real(request)

    backend.generate = generate  # type: ignore[method-assign]
    assert run(client.completion(prompt=["a", "b", "c"])).status == 503
    assert not backend.live


def test_in_flight_limit(backend: FakeBackend) -> None:
    """Without a bound the router's memory is the only limit."""
    app = build_asgi(backend, ApiOptions(max_in_flight=2))
    backend.first_pause = 0.05
    client = Client(app)

    async def many() -> list[Reply]:
        return await asyncio.gather(*(client.chat() for _ in range(5)))

    replies = run(many())
    assert sorted(r.status for r in replies) == [200, 200, 503, 503, 503]
    refused = next(r for r in replies if r.status == 503)
    assert refused.json()["error"]["code"] == "overloaded" and refused.header("retry-after") == "1"
    assert run(client.chat()).status == 200 and app.in_flight == 0
