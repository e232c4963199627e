r"""Speculation by n-gram look-up: edits, summaries, copies and chat with and without drafts.

    python -m bench.speculation --out bench/results
    python -m bench.speculation --model FOLDER --device cuda --streams 1 64 256
    python -m bench.speculation --host --streams 1 8 64 256

The sides are engines in this process, which alternate: `off`, `own` (drafts from the request's own
text, like vLLM's ngram) and `auto` (also from earlier answers). Each round has new documents, whose
names and numbers are random, so no request is repeated. Sampling is greedy except for `fresh`. A
row has a side's output tokens/s, including the time of prompts, divided by those of `off`, the best
round of each; and the number of equal texts. On the CPU in float32 all texts are equal:
tests/parity/test_speculation.py.

    edit       replace a name in a text; rename a function in code
    copy       repeat a text
    summarise  summarise a text in three sentences
    chat       answer a question, of which there are 40
    fresh      answer a question that was not asked before, at temperature 0.8 with a seed

--host measures the host's microseconds per step without a model and a device. No text repeats,
answers have 512 random tokens, and one batch is launched ahead. Rows have a side's time divided by
that of `off`. The side `model` has three drafts of a drafter for each request in each step, of
which 1.33 are accepted on average.
"""

import argparse
import gc
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.report.result_file import Line, print_ratios, ratio_row, write
from deployments.checkpoints.resolve import keeps_blocks, resolve_model
from engine.batch import Batch, StepResult
from engine.config.engine_config import EngineConfig
from engine.factory import build
from engine.messages import EngineRequest
from engine.sampling_params import SamplingParams
from engine.scheduling.core import EngineCore
from engine.scheduling.core_config import CoreConfig
from engine.scheduling.drafts.speculation import Speculation
from engine.speculation.computed import ComputedDrafter
from engine.speculation.lengths import DraftRecord
from engine.speculation.model_lengths import ModelLengths
from engine.speculation.settings import read_speculation
from engine.speculation.synthetic import SyntheticAcceptance
from engine.text.tokenizer import Tokenizer

SIDES: Mapping[str, Any] = {"off": "off", "own": {"method": "ngram"}, "auto": "auto"}
KINDS = ("edit", "copy", "summarise", "chat", "fresh")
_TOWNS = ("Lindau", "Aarau", "Nyborg", "Trieste", "Viana", "Galway", "Ronda", "Tartu", "Kotor")
_WORKS = ("harbour", "library", "theatre", "station", "market hall", "observatory", "tram depot")
_VERBS = ("mean", "total", "spread", "largest", "median", "scale", "shift", "trim", "pairs")
_CHATS = (
    "Explain to a child why the sky is {}.",
    "Write a short story about a fox who learns to {}.",
    "What should I think of before I {} a boat?",
    "Give me three reasons to {} in winter.",
)
_WORDS = ("read", "sail", "paint", "sell", "mend", "blue", "dark", "walk", "cook", "sing")
_FRESH = (
    "What connects {} and {} in the history of {}?",
    "Write a scene in which {} meets {} near {}.",
    "How would an engineer explain {} to somebody who only knows {} and {}?",
    "Compare {} with {}, and say what {} has to do with it.",
    "Plan a day that begins with {}, goes on with {} and ends with {}.",
)
_TOPICS = (
    *("volcanoes", "chess", "bread", "glaciers", "satellites", "opera", "bees", "bridges", "tea"),
    *("coral", "clocks", "maps", "violins", "wheat", "lighthouses", "algebra", "silk", "owls"),
    *("railways", "perfume", "deserts", "cheese", "telescopes", "carpets", "salt", "kites"),
    *("poetry", "batteries", "mushrooms", "canals", "cinema", "marble", "whales", "orchards"),
)


def article(rng: random.Random) -> tuple[str, str]:
    """Return a text of about 130 tokens, and the name of the town in it."""
    town, other = rng.sample(_TOWNS, 2)
    work, second = rng.sample(_WORKS, 2)
    year, number = rng.randrange(1820, 1990), rng.randrange(20, 900)
    return (
        f"The {work} of {town} was rebuilt in {year} after a fire. The new {second}, {number // 9} "
        f"metres long, stands opposite the old gate. Every summer about {number} thousand people "
        f"visit {town}, and most of them come from {other} by train. The council plans a wider "
        f"bridge for bicycles and a ferry that runs on batteries. The ferry will carry "
        f"{number // 3} passengers and cost {number / 100:.1f} million euros. It is to start in "
        f"May {year + 150}, when the {work} of {town} has its next feast."
    ), town


def code(rng: random.Random) -> tuple[str, str]:
    """Return a program of about 130 tokens, and the name of a function in it."""
    first, second, third = rng.sample(_VERBS, 3)
    return (
        f"def {first}(values):\n    result = 0\n    for value in values:\n"
        f"        result = result + value * {rng.randrange(2, 99)}\n    return result\n\n"
        f"def {second}(values):\n    start = {first}(values)\n    result = {rng.randrange(99)}\n"
        f"    for value in values:\n        result = result + (value - start) ** 2\n"
        f"    return result / len(values)\n\n"
        f"def {third}(values):\n    return {first}(values) - {second}(values)\n"
    ), first


def question(kind: str, rng: random.Random) -> str:
    """Return a message of this kind."""
    if kind == "chat":
        return rng.choice(_CHATS).format(rng.choice(_WORDS))
    if kind == "fresh":
        return rng.choice(_FRESH).format(*rng.sample(_TOPICS, 3))
    if kind == "edit" and rng.random() < 0.5:
        text, name = code(rng)
        return f"Rename the function {name} to compute and print the whole file.\n\n```\n{text}```"
    text, town = article(rng)
    return {
        "edit": f"Replace {town} by Bregenz everywhere, and leave all else as it is.\n\n{text}",
        "copy": f"Repeat this text word by word:\n\n{text}",
        "summarise": f"Summarise in three sentences:\n\n{text}",
    }[kind] + "\n"


class Side:
    """An engine with one value of `speculation`, whose speed is measured."""

    def __init__(self, config: Mapping[str, Any], speculation: Any) -> None:
        self.core, _ = build(EngineConfig(**config, speculation=speculation))

    def answer(
        self, prompts: Sequence[list[int]], max_tokens: int, temperature: float
    ) -> tuple[list[list[int]], Line]:
        """Return the answers to prompts that run at once, and the measured figures."""
        core: EngineCore = self.core
        before = core.stats()
        began = time.perf_counter()
        for number, ids in enumerate(prompts):
            params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=number)
            core.add_request(EngineRequest(number, list(ids), len(ids), params, 0))
        answers: list[list[int]] = [[] for _ in prompts]
        while core.has_work():
            for delta in core.step():
                assert not delta.error, delta.error
                answers[delta.id] += delta.token_ids
        seconds = time.perf_counter() - began
        after = core.stats()
        drafted = after.draft_tokens - before.draft_tokens
        accepted = sum(after.accepted_by_position) - sum(before.accepted_by_position)
        return answers, {
            "seconds": seconds,
            "tokens": sum(map(len, answers)),
            "steps": after.step - before.step,
            "drafted": drafted,
            "accepted": accepted,
        }


def measure(
    sides: Mapping[str, Side], tokenizer: Tokenizer, options: argparse.Namespace
) -> Iterator[Line]:
    """Yield a line for each side, kind, number of streams and round."""
    for streams in options.streams:
        for kind in options.kinds:
            for number in range(options.rounds):
                rng = random.Random(f"{kind} {streams} {number}")
                prompts = [
                    tokenizer.encode_chat(
                        [{"role": "user", "content": question(kind, rng)}], max_tokens=4096
                    )
                    for _ in range(streams)
                ]
                expected: list[list[int]] = []
                for name, side in sides.items():
                    temperature = 0.8 if kind == "fresh" else 0.0
                    answers, figures = side.answer(prompts, options.max_tokens, temperature)
                    expected = expected or answers
                    equal = sum(map(list.__eq__, answers, expected))
                    case = {"kind": kind, "streams": streams, "round": number, "side": name}
                    line = {**case, **figures, "equal": equal}
                    print(line, flush=True)
                    yield line


def table(lines: Sequence[Line]) -> list[Line]:
    """Return a row for each case and side: tokens/s, against those of `off`."""
    best: dict[tuple[str, int, str], Line] = {}
    counts: dict[tuple[str, int, str], Line] = {}
    for line in lines:
        key = (line["kind"], line["streams"], line["side"])
        if key not in best or rate(line) > rate(best[key]):
            best[key] = line
        sums = counts.setdefault(key, {"drafted": 0, "accepted": 0, "equal": 0, "texts": 0})
        for name in ("drafted", "accepted", "equal"):
            sums[name] += line[name]
        sums["texts"] += line["streams"]
    rows = []
    for (kind, streams, side), line in best.items():
        if side != "off":
            off = best[kind, streams, "off"]
            values = (round(rate(line), 1), round(rate(off), 1), "tok/s")
            row = ratio_row(f"{kind}/{streams}/{side}", *values)
            rows.append({**row, **counts[kind, streams, side]})
    return rows


class NoDevice:
    """A model runner without a device: each step returns immediately, with random tokens."""

    def __init__(self) -> None:
        self._tokens = np.random.default_rng(0).integers(2, 128_000, 1 << 22).tolist()
        self._next = 0

    def take(self, count: int) -> list[int]:
        """Return the next random tokens."""
        if self._next + count > len(self._tokens):
            self._next = 0
        self._next += count
        return self._tokens[self._next - count : self._next]

    def launch(self, batch: Batch) -> "DoneStep":
        return DoneStep(StepResult(batch.step, self.take(sum(batch.samples))))

    def recover(self) -> bool:
        return False

    def shrink(self, num_blocks: int) -> None:
        raise NotImplementedError


class DoneStep:
    """The handle of a step that `NoDevice` has launched; its result is available at once."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def sample(self, masks: Any) -> None:
        raise NotImplementedError

    def conclude(self) -> None:
        """Do nothing."""

    def ready(self) -> bool:
        return True

    def wait(self) -> StepResult:
        return self._result


class ThreeDrafts(ModelLengths):
    """A controller of draft lengths that does its usual work, but always chooses three drafts."""

    def begin_step(self, entries: int) -> int:
        return max(3, super().begin_step(entries))

    def worth(self, records: Sequence[DraftRecord], lengths: Sequence[int]) -> list[int]:
        super().worth(records, lengths)
        return list(lengths)


class HostSide:
    """An engine core without a device, in which `streams` requests always run."""

    def __init__(self, speculation: Any, streams: int) -> None:
        most = 1024
        config = CoreConfig(
            num_blocks=streams * most // 16,
            block_size=16,
            max_num_seqs=4 * streams,
            max_num_batched_tokens=2048,
            max_model_len=most,
            vocab_size=128_000,
        )
        self._runner = NoDevice()
        if speculation == "model":
            rates = SyntheticAcceptance((0.75, 0.55, 0.4))
            drafts = Speculation(ComputedDrafter(), ThreeDrafts(3), rates)
        else:
            drafts = Speculation.of(read_speculation(speculation))
        self._core = EngineCore(config, self._runner, speculation=drafts)
        self._streams, self._added = streams, 0

    def steps(self, count: int) -> float:
        """Run `count` steps; return the mean seconds of a step."""
        core = self._core
        seconds = 0.0
        for _ in range(count):
            while len(core.scheduler.requests) < self._streams:
                self._added += 1
                # The first requests have different lengths, so that ends are spread over time.
                first = min(self._added / self._streams, 1.0)
                params = SamplingParams(max_tokens=int(512 * first), ignore_eos=True)
                ids = self._runner.take(400)
                core.add_request(EngineRequest(self._added, ids, len(ids), params, 0))
            began = time.thread_time()
            core.step()
            seconds += time.thread_time() - began
        return seconds / count


def measure_host(streams: Sequence[int], rounds: int) -> Iterator[Line]:
    """Yield a line for each side and number of streams: the median of turns of 256 steps."""
    for count in streams:
        values = {**SIDES, "model": "model"}
        sides = {name: HostSide(value, count) for name, value in values.items()}
        gc.collect()
        turns: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(8 * rounds + 4):
            for name, side in sides.items():
                seconds = side.steps(256)
                if turn >= 4:  # in the first turns the controller still tries out drafts
                    turns[name].append(1e6 * seconds)
        for name, figures in turns.items():
            line = {"streams": count, "side": name, "host_us": round(median(figures), 2)}
            print(line, flush=True)
            yield line


def host_table(lines: Sequence[Line]) -> list[Line]:
    """Return a row for each number of streams and side."""
    off = {line["streams"]: line["host_us"] for line in lines if line["side"] == "off"}
    return [
        ratio_row(
            f"host/{line['streams']}/{line['side']}",
            line["host_us"],
            off[line["streams"]],
            "us",
        )
        for line in lines
        if line["side"] != "off"
    ]


def rate(line: Line) -> float:
    return float(line["tokens"] / line["seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="default")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--name", default="speculation")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--host", action="store_true", help="the host's time alone")
    options = parser.parse_args()
    if options.host:
        host_lines = list(measure_host(options.streams, options.rounds))
        host_rows = host_table(host_lines)
        print_ratios(host_rows)
        if options.out:
            write(options.out, options.name, {}, host_rows, host_lines)
        return
    chosen = {
        "device": options.device,
        "dtype": options.dtype,
        "quantization": options.quantization,
    }
    blocks = options.model == "default" and keeps_blocks(chosen)
    folder = resolve_model(options.model, blocks=blocks)
    config = {
        "model": str(folder),
        **chosen,
        "quantization": "gguf" if blocks else options.quantization,
        "prefix_caching": False,  # otherwise results depend on the previous rounds
        "max_num_seqs": 8 * max(options.streams),  # drafts take rows, too
        "max_model_len": 2048,
        "kv_cache_bytes": 2**20 * 64 * max(8, *options.streams),
    }
    sides = {name: Side(config, value) for name, value in SIDES.items()}
    lines = list(measure(sides, Tokenizer.load(folder), options))
    rows = table(lines)
    print_ratios(rows)
    if options.out:
        write(options.out, options.name, {**config, "model": options.model}, rows, lines)


if __name__ == "__main__":
    main()
