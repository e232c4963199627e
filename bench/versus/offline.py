"""The offline workloads, and the choice of each workload's result.

They are the load tester's workloads, one request after a long context, long prompts, rounds of
chats, and conversations that continue from the prefix cache.
"""

import random
from collections.abc import Callable, Iterable
from typing import Any

from loadtest.scenario import workloads
from loadtest.scenario.workloads import Request

# requests -> (output tokens of each, seconds of the whole run)
Generate = Callable[[list[Request]], tuple[list[list[int]], float]]

LONG_CONTEXT, DECODED = 131_072, 256
CONVERSATIONS, TURNS, OPENING, MESSAGE, ANSWER = 64, 6, 1024, 128, 128
HISTORY, NEXT, TIMES = 8192, 64, 5
CHATS, ROUNDS, QUESTION, REPLY = 16, 5, 44, 140  # liteqwen's workload, in tokens


class Turned:
    """The conversations of a run, and the token counts of all prompts and answers so far."""

    def __init__(self, generate: Generate, count: int, opening: int, seed: int = 0) -> None:
        self.generate, self.rng = generate, random.Random(seed)
        self.history = [self._ids(opening) for _ in range(count)]
        self.seconds, self.num_in, self.num_out = 0.0, 0, 0

    def _ids(self, count: int) -> list[int]:
        return [self.rng.randrange(workloads.LOW_ID, workloads.HIGH_ID) for _ in range(count)]

    def answer(self, tokens: int) -> float:
        """Run a turn of all conversations, and return its seconds."""
        answers, seconds = _asked(self.generate, [(ids, tokens) for ids in self.history])
        self.seconds += seconds
        self.num_in += sum(map(len, self.history))
        self.num_out += tokens * len(self.history)
        for ids, answer in zip(self.history, answers, strict=True):
            ids += answer
        return seconds

    def go_on(self, tokens: int) -> None:
        for ids in self.history:
            ids += self._ids(tokens)


def _asked(generate: Generate, requests: list[Request]) -> tuple[list[list[int]], float]:
    """Generate the requests; return (token ids of each answer, seconds of the whole run).

    Raises SystemExit if an answer does not have its number of tokens.
    """
    token_ids, seconds = generate(requests)
    if [len(ids) for ids in token_ids] != [wanted for _, wanted in requests]:
        raise SystemExit("a request did not give the tokens it was asked for")
    return token_ids, seconds


def _speeds(num_in: int, num_out: int, seconds: float) -> dict[str, Any]:
    return {
        "seconds": round(seconds, 3),
        "out_tok": num_out,
        "out_tok_s": round(num_out / seconds, 1),
        "total_tok_s": round((num_in + num_out) / seconds, 1),
    }


def decode_128k(generate: Generate) -> dict[str, Any]:
    """Measure the decoding of one long request, whose prompt time is subtracted.

    The prompt time is the better of two measurements.
    """
    rng = random.Random(0)
    length = LONG_CONTEXT - DECODED - 1
    ids = [rng.randrange(workloads.LOW_ID, workloads.HIGH_ID) for _ in range(length)]
    first = min(_asked(generate, [(ids, 1)])[1] for _ in range(2))
    whole = _asked(generate, [(ids, 1 + DECODED)])[1]
    return {**_speeds(0, DECODED, whole - first), "first_token_ms": round(first * 1e3, 1)}


def _long_prompts(generate: Generate, length: int, count: int) -> dict[str, Any]:
    """Measure `count` prompts of `length` tokens at once, with one output token each.

    A first run of one prompt is not counted.
    """
    rng = random.Random(0)

    def requests(number: int) -> list[Request]:
        return [
            ([rng.randrange(workloads.LOW_ID, workloads.HIGH_ID) for _ in range(length)], 1)
            for _ in range(number)
        ]

    _asked(generate, requests(1))
    measured = requests(count)
    return _speeds(count * length, count, _asked(generate, measured)[1])


def prefill_32k(generate: Generate) -> dict[str, Any]:
    """Measure eight prompts of 32,768 tokens."""
    return _long_prompts(generate, 32_768, 8)


def prefill_128k(generate: Generate) -> dict[str, Any]:
    """Measure two prompts of almost 131,072 tokens."""
    return _long_prompts(generate, LONG_CONTEXT - 16, 2)


def chats16(generate: Generate) -> dict[str, Any]:
    """Measure five rounds of 16 short questions at once, as liteqwen's authors did."""
    rng = random.Random(0)
    rounds = [
        [
            ([rng.randrange(workloads.LOW_ID, workloads.HIGH_ID) for _ in range(QUESTION)], REPLY)
            for _ in range(CHATS)
        ]
        for _ in range(ROUNDS)
    ]
    seconds = sum(_asked(generate, requests)[1] for requests in rounds)
    return _speeds(ROUNDS * CHATS * QUESTION, ROUNDS * CHATS * REPLY, seconds)


def conversations(generate: Generate) -> dict[str, Any]:
    """Measure the time of all turns of conversations, including prompts."""
    turned = Turned(generate, CONVERSATIONS, OPENING)
    for turn in range(TURNS):
        if turn:
            turned.go_on(MESSAGE)
        turned.answer(ANSWER)
    return _speeds(turned.num_in, turned.num_out, turned.seconds)


def second_turn(generate: Generate) -> dict[str, Any]:
    """Measure the second turn of single conversations: the median of TIMES, after one warm-up."""
    seconds = []
    for seed in range(TIMES + 1):
        turned = Turned(generate, 1, HISTORY, seed)
        turned.answer(16)
        turned.go_on(NEXT)
        seconds.append(turned.answer(1))
    middle = sorted(seconds[1:])[TIMES // 2]
    return {"seconds": round(sum(seconds), 3), "first_token_ms": round(middle * 1e3, 2)}


OURS: dict[str, Callable[[Generate], dict[str, Any]]] = {
    f.__name__: f
    for f in (decode_128k, prefill_32k, prefill_128k, chats16, conversations, second_turn)
}
# Workload -> the engine options that it needs, if they differ from the defaults.
NEEDS: dict[str, dict[str, Any]] = {
    "decode_128k": {"max_model_len": LONG_CONTEXT},
    "prefill_32k": {"max_model_len": LONG_CONTEXT},
    "prefill_128k": {"max_model_len": LONG_CONTEXT},
    "conversations": {"prefix_caching": True},
    "second_turn": {"prefix_caching": True},
}
# workload -> its result, if it is not out_tok_s
FIGURES = {
    "prefill": "total_tok_s",
    "prefill_32k": "total_tok_s",
    "prefill_128k": "total_tok_s",
    "second_turn": "first_token_ms",
}


def measure(name: str, generate: Generate) -> dict[str, Any]:
    """Run a workload and return its results. Raises KeyError if it does not exist."""
    if name in OURS:
        return OURS[name](generate)
    requests = workloads.build(name)
    _, seconds = _asked(generate, requests)
    return _speeds(sum(len(ids) for ids, _ in requests), sum(n for _, n in requests), seconds)


def by_engine(names: Iterable[str]) -> list[list[str]]:
    """Group the workloads that can share one start of an engine.

    Returns [[]] for no names, which measures a start alone.
    """
    commands: list[list[str]] = []
    for name in names:
        for group in commands:
            if NEEDS.get(group[0]) == NEEDS.get(name):
                group.append(name)
                break
        else:
            commands.append([name])
    return commands or [[]]


def best(name: str, lines: Iterable[dict[str, Any]]) -> float:
    """Return the best result of a workload over several runs' lines.

    It is output tokens/s; for prompts alone the tokens/s of prompts and outputs; for second_turn
    milliseconds.
    """
    key = FIGURES.get(name, "out_tok_s")
    some = [float(line[key]) for line in lines]
    return min(some) if key.endswith("_ms") else max(some)


def unit(name: str) -> str:
    return "ms" if FIGURES.get(name, "").endswith("_ms") else "tok/s"
