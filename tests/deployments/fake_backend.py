"""FakeBackend, a Backend without engines, for tests of the HTTP API.

Its tokens are a hash of the request, so a test notices an answer to another request. A test may
script the deltas instead.
"""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache

import msgspec
import numpy as np
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from deployments.adapters.record_store import AdapterRecord
from deployments.adapters.registry import AdapterRegistry, AdapterSettings
from deployments.api.caller import LEAST_PRIORITY
from deployments.backend import BackendState, GenerationRequest, ModelCard, RecalledChoice, Timing
from engine.batch import TokenLogprobs
from engine.errors import AdapterError, MantaError
from engine.messages import AdapterInfo, Delta, EngineStats
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer

MODEL = "tiny"
VOCAB = 512  # size of the fake logits, larger than the tokenizer's, as in real checkpoints
MAX_MODEL_LEN = 256
VECTOR = 8  # elements of an embedding
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@cache
def tiny_tokenizer(*, bos: bool = False) -> Tokenizer:
    """Return a byte-level BPE tokenizer with ChatML's control tokens as ids 0 to 2.

    An emoji is four tokens.
    """
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[AddedToken(text, special=True) for text in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the answer to this question is the number of the words"], trainer)
    names = {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>" if bos else ""}
    return Tokenizer(
        backend,
        special_tokens=names,
        chat_template=ChatTemplate({"default": _TEMPLATE}, names),
    )


class FakeGeneration:
    """A fake generation, which yields one token per choice and step, or the deltas of the
    backend's `script`."""

    def __init__(self, backend: "FakeBackend", request: GenerationRequest) -> None:
        self.backend = backend
        self.request = request
        self.aborted_at: float | None = None
        self._stopped = asyncio.Event()
        emitted = request.emitted or [[]] * request.params.n
        self._alive = {c for c, tokens in enumerate(emitted) if tokens is not None}
        self._scripts = {c: after(backend.deltas(request, c), emitted[c]) for c in self._alive}
        self._step = 0
        backend.live.add(self)

    async def next(self) -> list[tuple[int, Delta]]:
        if not self._alive:
            return []
        error = self.backend.errors.get(self._step)
        if error is not None:
            self._end()
            raise error
        pause = self.backend.first_pause if self._step == 0 else self.backend.pause
        if pause:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), pause)
        elif self._step % 16 == 0:
            await asyncio.sleep(0)
        out: list[tuple[int, Delta]] = []
        for _ in range(self.backend.burst):
            for choice in sorted(self._alive):
                delta = self._scripts[choice][self._step]
                out.append((choice, delta))
                self.backend.keep(self.request, choice, delta)
                if delta.finish:
                    self._alive.discard(choice)
            self._step += 1
        if not self._alive:
            self._end()
        return out

    def versions(self, choice: int) -> list[tuple[str, int]]:
        deltas = self._scripts[choice][: self._step] if choice in self._scripts else []
        return [("initial", sum(len(delta.token_ids) for delta in deltas))]

    def abort(self, choice: int | None = None) -> None:
        self._alive -= self._alive.copy() if choice is None else {choice}
        if choice is not None:
            self.backend.aborted_choices.append(choice)
        if not self._alive:
            if self in self.backend.live:
                self.aborted_at = time.monotonic()
                self.backend.aborts.append(self)
            self._end()

    def timing(self) -> Timing:
        return Timing(0.25, 1, ("r0", "r1"))

    def _end(self) -> None:
        self._alive.clear()
        self._stopped.set()
        self.backend.live.discard(self)


def after(deltas: list[Delta], emitted: list[int] | None) -> list[Delta]:
    """Return the deltas of a resumed choice, which follow the tokens `emitted` before.

    The first of them reports 99 cached tokens.
    """
    left = list(emitted or ())
    if not left:
        return deltas
    collected = []
    for delta in deltas:
        tokens = delta.token_ids
        if left:
            assert tokens == left[: len(tokens)], "resumed with other tokens"
            del left[: len(tokens)]
        else:
            collected.append(delta)
    collected[0] = msgspec.structs.replace(collected[0], cached=99)
    return collected


class FakeBackend:
    """A backend without engines, whose tokens are a hash of the request.

    script: the text or deltas of every choice, instead of the hash.
    pause, first_pause: seconds of each step, and of the first step.
    burst: number of steps whose tokens arrive together.
    errors: number of a step -> the error that `next` raises at this step.
    refuse: the error of all requests whose priority is at least `refuses_from`.
    admitted: the priorities that `admit` was called with.
    """

    def __init__(self, *, bos: bool = False) -> None:
        self._tokenizer = tiny_tokenizer(bos=bos)
        self.cards: dict[str, ModelCard] = {
            MODEL: ModelCard(
                id=MODEL,
                max_model_len=MAX_MODEL_LEN,
                vocab_size=VOCAB,
                eos_token_ids=(2,),
                created=1_700_000_000,
            )
        }
        self.script: str | list[Delta] | None = None
        self.pause = 0.0
        self.first_pause = 0.0
        self.burst = 1
        self.errors: dict[int, MantaError] = {}
        self.refuse: MantaError | None = None
        self.refuses_from = LEAST_PRIORITY
        self.admitted: list[int] = []
        self.is_ready = True
        self.is_starting = False
        self.draining = False
        self.live: set[FakeGeneration] = set()
        self.aborts: list[FakeGeneration] = []
        self.aborted_choices: list[int] = []
        self.requests: list[GenerationRequest] = []
        self.kept: dict[
            tuple[str, int, int], RecalledChoice
        ] = {}  # choices of streams whose tokens a replica would keep
        # path of an adapter -> the result of reading its files
        self.readers: dict[str, AdapterInfo | AdapterError] = {}
        settings = AdapterSettings(MODEL, roots=("/adapters",))
        self.adapters = AdapterRegistry(settings, self, self._set_cards)

    @property
    def only(self) -> str:
        return MODEL

    def models(self) -> Mapping[str, ModelCard]:
        return self.cards

    def _set_cards(self) -> None:
        base = self.cards[MODEL]
        self.cards = {
            MODEL: base,
            **{name: replace(base, id=name, parent=MODEL) for name in self.adapters.records},
        }

    async def load(self, record: AdapterRecord) -> AdapterInfo:
        reader = self.readers.get(record.path)
        if reader is None:
            raise AdapterError(f"{record.path}: is missing", code="adapter_not_found")
        if isinstance(reader, AdapterError):
            raise reader
        return reader

    async def announce(self, record: AdapterRecord, *, gone: bool = False) -> None:
        """Do nothing, because there are no replicas to tell."""

    def tokenizer(self, model: str) -> Tokenizer:
        return self._tokenizer

    def admit(self, key: str, priority: int, model: str) -> None:
        self.admitted.append(priority)
        if self.refuse is not None and priority >= self.refuses_from:
            raise self.refuse

    def generate(self, request: GenerationRequest) -> FakeGeneration:
        if self.refuse is not None and request.priority >= self.refuses_from:
            raise self.refuse
        assert request.token_ids and all(0 <= t < VOCAB for t in request.token_ids)
        assert request.params.pooled or request.params.max_tokens != 0
        self.requests.append(request)
        return FakeGeneration(self, request)

    def keep(self, request: GenerationRequest, choice: int, delta: Delta) -> None:
        if not request.stream:
            return
        past = self.kept.get((request.stream, choice, id(request)))
        if past is None:
            begun = list((request.emitted or [[]] * request.params.n)[choice] or ())
            past = RecalledChoice(request.stream, choice, begun, "", None, "w")
        past.token_ids.extend(delta.token_ids)
        past = replace(past, finish=delta.finish, stop_token=delta.stop_token)
        self.kept[request.stream, choice, id(request)] = past

    async def recall(
        self,
        model: str,
        streams: Sequence[str],
        enough: Callable[[list[RecalledChoice]], bool],
    ) -> list[RecalledChoice]:
        return [past for past in self.kept.values() if past.stream in streams]

    def state(self) -> BackendState:
        return BackendState({"fake": EngineStats()}, len(self.live), draining=self.draining)

    def ready(self) -> bool:
        return self.is_ready

    def starting(self) -> bool:
        return self.is_starting

    def deltas(self, request: GenerationRequest, choice: int) -> list[Delta]:
        """Return the deltas of one choice as an engine returns them, before the router searches
        stop strings."""
        if isinstance(self.script, list):
            return self.script
        params = request.params
        if params.pooled:
            return [Delta(choice, [], "length", cached=0, vector=vector_of(request))]
        limit = self.cards[request.model].max_model_len - len(request.token_ids)
        limit = min(limit, params.max_tokens or limit)
        tokens = self._tokens(request, choice, limit)
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else {2})
        out: list[Delta] = []
        for place, token in enumerate(tokens):
            stopped = token in ends and place + 1 >= params.min_tokens
            delta = Delta(id=choice, token_ids=[token], cached=3 if place == 0 else -1)
            if stopped or place + 1 == limit:
                delta.finish = "stop" if stopped else "length"
                delta.stop_token = token if stopped else None
            if params.logprobs is not None:
                delta.logprobs = [_logprobs(token, params.logprobs)]
            if place == 0 and params.prompt_logprobs is not None:
                rest = request.token_ids[1:]
                delta.prompt_logprobs = [
                    None,
                    *(_logprobs(t, params.prompt_logprobs) for t in rest),
                ]
            out.append(delta)
            if delta.finish:
                break
        return out

    def _tokens(self, request: GenerationRequest, choice: int, limit: int) -> list[int]:
        if isinstance(self.script, str):
            return [*self._tokenizer.encode(self.script), 2, *([5] * limit)]
        seed = 0 if request.params.greedy else request.seed
        key = repr((request.token_ids, seed, choice, request.cache_salt)).encode()
        digest = hashlib.sha256(key).hexdigest()
        return [*self._tokenizer.encode(f"the answer is {digest[:12]}"), 2, *([5] * limit)]


def vector_of(request: GenerationRequest) -> bytes:
    """Return the bytes of a float32 unit vector, a hash of the request's token ids and adapter."""
    key = hashlib.sha256(repr((request.token_ids, request.adapter_key)).encode()).digest()
    values = np.frombuffer(key[:VECTOR], dtype=np.uint8).astype(np.float32) + 1
    return (values / np.linalg.norm(values)).astype("<f4").tobytes()


def _logprobs(token: int, k: int) -> TokenLogprobs:
    """Return the k likeliest log-probabilities, in which `token` is the second, and so not in the
    top 1."""
    ids = [t for t in ((token + 7) % 200 + 40, token, *range(100, 140)) if t != token or k > 1]
    ids = list(dict.fromkeys([ids[0], *([token] if k > 1 else []), *ids[1:]]))[:k]
    return TokenLogprobs(token, -1.5, 2, ids, [-0.5 - i for i in range(len(ids))], 9.0)
