"""The content of requests: request number i of a phase, as a pure function of the seed.

Workloads of token ids use /v1/completions, where a prompt is exactly as long as requested. Chats
use /v1/chat/completions. Prefixes, adapters, tenants, JSON schemas, cancellations, slow readers and
unary answers may be mixed in. Each aspect has its own random generator, so adding one changes no
prompt.
"""

import random
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from loadtest.scenario import filler_text, workloads
from loadtest.scenario.arrivals import TRACE_BLOCK, TraceRow, rng_of
from loadtest.scenario.conversations import Conversation, Exchange, read_conversations
from loadtest.scenario.lengths import Length, parse_length

if TYPE_CHECKING:
    from loadtest.scenario.schema import AdapterMix, Prefix, Tenant, Workload

# Quantiles at 0, 5, ... 100 % from samples_1024.json of OpenPPL's ppl.llm.serving, in Llama 2
# tokens. The means are those that its authors report.
SHAREGPT_INPUT = {
    "cdf": [4, 7, 9, 11, 13, 15, 17, 20, 22, 25, 29, 35, 44, 55, 74, 101, 143, 207, 348, 596, 1007],
    "mean": 114,
}
SHAREGPT_OUTPUT = {
    "cdf": [
        *(5, 24, 41, 77, 98, 128, 159, 194, 223, 251, 277),
        *(309, 343, 370, 400, 431, 486, 550, 666, 806, 1068),
    ],
    "mean": 322,
}


@dataclass(frozen=True, kw_only=True)
class NamedWorkload:
    """The lengths, prefixes and sampling of a workload that scenarios use by name.

    ids: whether token ids are sent instead of a chat. prefix: (groups, tokens) of shared prefixes.
    """

    about: str
    input: Length | None = None
    output: Length | None = None
    ids: bool = True
    prefix: tuple[int, int] | None = None
    sampling: dict[str, Any] | None = None


def _named(about: str, input: Any, output: Any, **more: Any) -> NamedWorkload:
    return NamedWorkload(
        about=about, input=parse_length(input), output=parse_length(output), **more
    )


NAMES: dict[str, NamedWorkload] = {
    **{
        name: NamedWorkload(about=(make.__doc__ or "").strip().rstrip("."))
        for name, make in workloads.WORKLOADS.items()
    },
    "tokens": NamedWorkload(about="token ids of the lengths that input and output say"),
    "trace": NamedWorkload(about="lengths and shared blocks of the phase's trace"),
    "dataset": NamedWorkload(
        about="chats of the file that dataset names, in ShareGPT's format", ids=False
    ),
    "sharegpt": _named("ShareGPT lengths, means 114 and 322", SHAREGPT_INPUT, SHAREGPT_OUTPUT),
    "sharegpt_sampled": _named(
        "sharegpt with temperature 1 and top_p 0.9",
        SHAREGPT_INPUT,
        SHAREGPT_OUTPUT,
        sampling={"temperature": 1.0, "top_p": 0.9, "seed": "each"},
    ),
    "dashinfer_128": _named("128 in, 128 out", 128, 128),
    "dashinfer_1200": _named("1,200 in, 128 out", 1200, 128),
    "liteqwen": _named("44 in, 140 out: short chats of 16 clients", 44, 140),
    "lightllm_router": _named(
        "short prompts, answers of very different lengths",
        [32, 64],
        {"mix": [[0.7, [16, 64]], [0.3, [1024, 2048]]]},
    ),
    "long_prompts": _named("2,048 to 8,192 in, 32 to 128 out", [2048, 8192], [32, 128]),
    "shared_prefix": _named(
        "one of 16 prefixes of 1,024 tokens, then 32 to 256 of its own",
        [32, 256],
        [32, 128],
        prefix=(16, 1024),
    ),
    "chat": _named(
        "questions in English under one of 8 system prompts of about 200 tokens",
        [8, 32],
        [32, 256],
        ids=False,
        prefix=(8, 200),
    ),
    "chat_long": _named(
        "a text of 500 to 2,000 tokens and a question about it",
        [500, 2000],
        [64, 256],
        ids=False,
    ),
}


class RequestSpec(NamedTuple):
    """A request, ready to send.

    fields: the request body, without the fields for streaming.
    expected: output tokens if the server respects ignore_eos, else None.
    cancel_chunks, cancel_after: number of chunks, or seconds, after which the client disconnects.
    key: see the property `key`.
    """

    path: str
    fields: dict[str, Any]
    stream: bool
    expected: int | None
    headers: dict[str, str]
    tenant: str
    adapter: str
    cancel_chunks: int | None
    cancel_after: float | None
    slow_pause: float | None

    def body(self, *, token_ids: bool = False, chunk_usage: bool = False) -> bytes:
        fields = dict(self.fields)
        if self.stream:
            options = {"include_usage": True}
            if chunk_usage:
                options["continuous_usage_stats"] = True
            fields["stream"], fields["stream_options"] = True, options
        if token_ids:
            fields["return_token_ids"] = True
        return msgspec.json.encode(fields)

    def key(self) -> str:
        """The key of the question in a reference file, equal for all tenants and with or without
        streaming."""
        data = msgspec.json.encode([self.path, self.fields])
        return blake2b(data, digest_size=12).hexdigest()

    @property
    def repeatable(self) -> bool:
        """Whether a repeated request must get an equal answer: greedy, or sampled with a seed."""
        return self.fields.get("temperature") == 0 or self.fields.get("seed") is not None


class RequestGenerator:
    """The generator of one phase's requests.

    first: whether the phase is the first measured one. Its list of requests, if `workloads.build`
        makes it, then has the scenario's seed. Lists of other phases have seeds of their own.
    """

    def __init__(
        self,
        work: "Workload",
        seed: int,
        phase: str,
        model: str,
        *,
        keys: dict[str, str] | None = None,
        trace: Sequence[TraceRow] = (),
        first: bool = False,
    ) -> None:
        self._work, self._seed, self._phase, self._model = work, seed, phase, model
        self._keys, self._trace, self._first = keys or {}, trace, first
        self._named = NAMES["trace" if trace else work.name]
        self._low, self._high = work.ids or (workloads.LOW_ID, workloads.HIGH_ID)
        self._adapter = _picker(work.adapters)
        shares = list(accumulate(tenant.share for tenant in work.tenants))
        self._tenant_shares = shares
        self._prefix_pick, self._prefix_tokens = _prefixes(work.prefix, self._named)
        self._ignore_eos = self._named.ids if work.ignore_eos is None else work.ignore_eos
        self._sampling = dict(self._named.sampling or {"temperature": 0})
        if "sampling" in work.model_fields_set:
            self._sampling = dict(work.sampling)
        self._conversations: list[Conversation] = []
        if work.dataset is not None and not trace:
            self._conversations = list(read_conversations(work.dataset))
            rng_of(seed, phase, "dataset", 0).shuffle(self._conversations)
        self._list = lru_cache(maxsize=4)(self._build_list)

    @property
    def is_chat(self) -> bool:
        return not self._named.ids

    def spec(self, index: int, first: int | None = None) -> RequestSpec:
        """Return request `index`. first: index of the first turn of the request's conversation."""
        work = self._work
        tenant = self._tenant(index if first is None else first)
        output = self._output(index, tenant, first)
        fields: dict[str, Any] = {"model": self._model}
        if self.is_chat:
            path = "/v1/chat/completions"
            fields["messages"] = self._messages(index, first)
        else:
            path = "/v1/completions"
            fields["prompt"] = self._prompt(index, first)
        fields["max_tokens"] = output
        mix = self._rng("mix", index)
        fields |= self._sampling | work.extra
        if fields.get("seed") == "each":
            fields["seed"] = index
        schema = work.json_schema is not None and mix.random() < work.json_schema.share
        if schema:
            assert work.json_schema is not None
            shape = work.json_schema.json_schema or filler_text.SCHEMA
            fields["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": shape},
            }
        elif self._ignore_eos:
            fields["ignore_eos"] = True
        adapter = self._adapter(index, self._rng("adapter", index))
        if adapter:
            fields["model"] = adapter
        if tenant is not None and tenant.priority is not None:
            fields["priority"] = tenant.priority
        stream = self._rng("stream", index).random() < work.stream
        cancel, slow = self._rng("cancel", index), self._rng("slow", index)
        hang_up = work.cancel is not None and cancel.random() < work.cancel.share
        is_slow = work.slow is not None and slow.random() < work.slow.share
        return RequestSpec(
            path=path,
            fields=fields,
            stream=stream,
            expected=output if self._ignore_eos and not schema else None,
            headers=self._headers(tenant),
            tenant=tenant.name if tenant else "",
            adapter=adapter,
            cancel_chunks=work.cancel.after_chunks.draw(cancel) if hang_up and stream else None,  # type: ignore[union-attr]
            cancel_after=work.cancel.after if hang_up and not stream else None,  # type: ignore[union-attr]
            slow_pause=work.slow.pause if is_slow else None,  # type: ignore[union-attr]
        )

    def _rng(self, what: str, index: int) -> random.Random:
        return rng_of(self._seed, self._phase, what, index)

    def _headers(self, tenant: "Tenant | None") -> dict[str, str]:
        if tenant is None:
            return {}
        key = self._keys.get(tenant.name)
        return ({"authorization": f"Bearer {key}"} if key else {}) | tenant.headers

    def _tenant(self, index: int) -> "Tenant | None":
        if not self._tenant_shares:
            return None
        place = self._rng("tenant", index).random() * self._tenant_shares[-1]
        at = min(bisect(self._tenant_shares, place), len(self._tenant_shares) - 1)
        return self._work.tenants[at]

    def _build_list(self, round_: int) -> list[workloads.Request]:
        seed = self._seed
        if round_ or not self._first:
            seed = rng_of(self._seed, self._phase, "list", round_).getrandbits(32)
        return workloads.build(self._work.name, seed)

    def _listed(self, index: int) -> workloads.Request | None:
        """Return the request from a list in workloads.py, or None if the scenario sets its own
        lengths.
        """
        if self._trace or self._work.name not in workloads.WORKLOADS:
            return None
        number, length = index // self._work.copies, len(self._list(0))
        return self._list(number // length)[number % length]

    def _exchange(self, index: int, first: int | None) -> Exchange:
        """Return the dataset's question and answer for a request.

        If the load's conversation is longer than the file's, the file's conversation is repeated.

        first: the index of the conversation's first request; None: each request is a conversation
            of its own.
        """
        start = index if first is None else first
        conversation = self._conversations[start % len(self._conversations)]
        return conversation[(index - start) % len(conversation)]

    def _output(self, index: int, tenant: "Tenant | None", first: int | None = None) -> int:
        own = (tenant.output if tenant else None) or self._work.output
        if own is None and self._conversations:
            return self._exchange(index, first).tokens
        if own is None and self._trace:
            return self._trace[index % len(self._trace)].output
        if own is None and (listed := self._listed(index)) is not None:
            return listed[1]
        length = own or self._named.output
        assert length is not None
        return length.draw(self._rng("output", index))

    def _prompt(self, index: int, first: int | None) -> list[int]:
        prompt = self._shared_ids(index if first is None else first)
        for turn in range(index if first is None else first, index + 1):
            prompt += self._own_ids(turn)
        return prompt

    def _own_ids(self, index: int) -> list[int]:
        own = self._work.input
        if own is None and self._trace:
            return self._trace_ids(self._trace[index % len(self._trace)], index)
        if own is None and (listed := self._listed(index)) is not None:
            if index % self._work.copies:
                return self._ids(self._rng("input", index), len(listed[0]))
            return list(listed[0])
        length = own or self._named.input
        assert length is not None
        rng = self._rng("input", index)
        return self._ids(rng, length.draw(rng))

    def _ids(self, rng: random.Random, count: int) -> list[int]:
        return rng.choices(range(self._low, self._high), k=count)

    def _trace_ids(self, row: TraceRow, index: int) -> list[int]:
        ids: list[int] = []
        for block in row.blocks[: -(-row.input // TRACE_BLOCK)]:
            ids += self._ids(rng_of(self._seed, "block", block), TRACE_BLOCK)
        if len(ids) < row.input:
            ids += self._ids(self._rng("input", index), row.input - len(ids))
        return ids[: row.input]

    def _shared_ids(self, index: int) -> list[int]:
        if self._prefix_pick is None:
            return []
        group = self._prefix_pick(self._rng("prefix", index))
        return self._ids(rng_of(self._seed, "group", group), self._prefix_tokens)

    def _messages(self, index: int, first: int | None) -> list[dict[str, str]]:
        start = index if first is None else first
        messages = []
        if self._prefix_pick is not None:
            group = self._prefix_pick(self._rng("prefix", start))
            rng = rng_of(self._seed, "group", group)
            role = filler_text.ROLES[group % len(filler_text.ROLES)]
            text = f"{role} {filler_text.filler(rng, self._prefix_tokens)}"
            messages.append({"role": "system", "content": text})
        if self._conversations:
            for turn in range(start, index + 1):
                exchange = self._exchange(turn, start)
                messages.append({"role": "user", "content": exchange.asked})
                if turn < index:
                    messages.append({"role": "assistant", "content": exchange.answered})
            return messages
        length = self._work.input or self._named.input
        assert length is not None
        for turn in range(start, index + 1):
            rng = self._rng("input", turn)
            asked = filler_text.question(rng, follow_up=turn > start)
            filler = length.draw(rng) - len(asked.split())
            text = f"{filler_text.filler(rng, filler)}\n\n{asked}" if filler > 0 else asked
            messages.append({"role": "user", "content": text})
            # a synthetic earlier answer of the right length, so that it is the same for any server
            if turn < index:
                reply = filler_text.filler(rng, self._output(turn, None))
                messages.append({"role": "assistant", "content": reply})
        return messages


def _zipf(count: int, s: float) -> list[float]:
    return list(accumulate(1.0 / k**s for k in range(1, count + 1)))


def _pick(sums: list[float], rng: random.Random) -> int:
    return min(bisect(sums, rng.random() * sums[-1]), len(sums) - 1)


def _picker(adapters: "AdapterMix | None") -> Callable[[int, random.Random], str]:
    """Return a function (index, rng) -> adapter name, "" for the base model."""
    if adapters is None:
        return lambda index, rng: ""
    names, base, kind = adapters.all_names(), adapters.base, adapters.choice
    sums = _zipf(len(names), adapters.s) if kind == "zipf" else _zipf(len(names), 0)

    def pick(index: int, rng: random.Random) -> str:
        if rng.random() < base:
            return ""
        return names[index % len(names) if kind == "round_robin" else _pick(sums, rng)]

    return pick


def _prefixes(
    prefix: "Prefix | None", named: NamedWorkload
) -> tuple[Callable[[random.Random], int] | None, int]:
    """Return (function rng -> index of the prefix group, or None; number of tokens of a prefix)."""
    if prefix is None and named.prefix is None:
        return None, 0
    if prefix is None:
        assert named.prefix is not None
        groups, tokens = named.prefix
        return (lambda rng: rng.randrange(groups)), tokens
    sums = _zipf(prefix.groups, prefix.s if prefix.choice == "zipf" else 0)
    return (lambda rng: _pick(sums, rng)), prefix.tokens
