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


def test_long_prompts_are_new_and_the_first_is_not_counted() -> None:
    """Bug: a prompt is repeated, so that a cache has it, or a first start counts."""
    engine = Engine(cache=True)
    figures = offline.measure("prefill_32k", engine.generate)
    assert figures["out_tok"] == 8 and len(engine.asked) == 9
    assert figures["seconds"] == 8 * 32.768 + 0.01
    assert figures["total_tok_s"] == round((8 * 32_768 + 8) / figures["seconds"], 1)


def test_rounds_of_chats_follow_one_another() -> None:
    """Bug: all chats run at once, or replies have another length than liteqwen's."""
    engine = Engine(cache=False)
    figures = offline.measure("chats16", engine.generate)
    assert len(engine.asked) == 80 and figures["out_tok"] == 80 * 140
    assert abs(figures["seconds"] - 5 * (16 * 0.044 + 1.4)) < 0.01


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
