"""bench.versus.offline: the workloads that engines get."""

from bench.versus import offline
from loadtest.scenario.workloads import Request


class Engine:
    """A simulated engine: 1,000 uncached prompt tokens take a second, and each step 10 ms."""

    def __init__(self, cache: bool) -> None:
        self.cache, self.seen, self.asked = cache, list[list[int]](), list[Request]()

    def generate(self, requests: list[Request]) -> tuple[list[list[int]], float]:
        new, answers = 0, []
        for ids, wanted in requests:
            self.asked.append((list(ids), wanted))
            known = max((len(old) for old in self.seen if ids[: len(old)] == old), default=0)
            new += len(ids) - (known if self.cache else 0)
            answers.append([7] * wanted)
        self.seen = [[*ids, *answer] for (ids, _), answer in zip(requests, answers, strict=True)]
        return answers, new / 1000 + max(wanted for _, wanted in requests) * 0.01


def test_a_prompts_time_is_not_decoding() -> None:
    """Tokens/s of one request that are those of its 131,072 tokens of prompt."""
    engine = Engine(cache=False)
    assert offline.measure("decode_128k", engine.generate)["out_tok_s"] == 100.0
    assert {len(ids) + wanted for ids, wanted in engine.asked} == {
        offline.LONG_CONTEXT,
        offline.LONG_CONTEXT - offline.DECODED,
    }


def test_turns_go_on_from_their_own_answers() -> None:
    """A history that begins anew, or two conversations of one history: the cache would know
    nothing, or all."""
    engine = Engine(cache=True)
    figures = offline.measure("conversations", engine.generate)
    count, turns = offline.CONVERSATIONS, offline.TURNS
    assert (
        figures["out_tok"] == count * turns * offline.ANSWER and len(engine.asked) == count * turns
    )
    new = count * (offline.OPENING + (turns - 1) * offline.MESSAGE) / 1000
    assert abs(figures["seconds"] - new - turns * offline.ANSWER * 0.01) < 0.01
    engine = Engine(cache=True)
    figures = offline.measure("second_turn", engine.generate)
    assert figures["first_token_ms"] == offline.NEXT + 10
    openings = {tuple(ids[:9]) for ids, _ in engine.asked}
    assert len(openings) == offline.TIMES + 1


def test_engines_are_started_as_workloads_need_them() -> None:
    """A throughput with the prefix cache on, or a conversation without it; the slowest first token
    as the best one."""
    names = ["single", "conversations", "prefill", "decode_128k", "second_turn"]
    assert offline.by_engine(names) == [
        ["single", "prefill"], ["conversations", "second_turn"], ["decode_128k"]
    ]  # fmt: skip
    assert offline.by_engine([]) == [[]]
    lines = [{"out_tok_s": 1, "total_tok_s": 4, "first_token_ms": 9}, {
        "out_tok_s": 2, "total_tok_s": 3, "first_token_ms": 8}]  # fmt: skip
    best = [offline.best(name, lines) for name in ("single", "prefill", "second_turn")]
    assert best == [2, 4, 8]
