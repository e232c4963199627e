"""Kills processes during requests as agents send them: structured output, tool calls, reasoning,
Responses and Messages.

    python -m tests.faults.agents --hits 20 --out bench/results

A random model in float32 on two replicas behind two routers, both under Serve's own proxy. In turn
an engine, a replica and a router are killed in the middle of streams of all kinds. After a router's
death clients resume with the last event's id. The run ends when at least --hits streams of each
kind have moved to another replica, and as many have been resumed. Figures are printed as JSON, and
with --out written as a result file. Exit status 1: an answer differs from the one without a kill.
"""

import argparse
import asyncio
import itertools
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.report.result_file import write
from deployments.resumable_stream import ResumableStream
from engine.text.tokenizer import Tokenizer
from tests.deployments.api.output.tool_templates import HERMES
from tests.deployments.on_ray.serve_cluster import ray_and_serve
from tests.engine.models.checkpoints import save_checkpoint
from tests.engine.text.small_tokenizers import byte_level
from tests.faults.clients import post
from tests.faults.cluster import NAME, Broken, deployed

TARGETS = ("engine", "router", "replica", "router")
LAYERS = 16  # so that a token takes milliseconds, and a kill can come between two tokens
_ROW = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 4, "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    # Few rows, because a random model writes much of the white space allowed between values.
    "properties": {"rows": {"type": "array", "items": _ROW, "minItems": 3, "maxItems": 3}},
    "required": ["rows"],
    "additionalProperties": False,
}
USER = [{"role": "user", "content": "the cat sat on the mat"}]
FUNCTION = {"name": "store", "description": "Stores rows.", "parameters": SCHEMA}
QUIET = {"reasoning_effort": "none"}
PATIENCE = 300.0  # time limit of a stream in seconds; all streams share two cores
SEEN = 4  # number of events of every stream before a kill


def bodies() -> dict[str, tuple[str, dict[str, Any]]]:
    """Return kind -> (path, body) of a request."""
    chat, common = "/v1/chat/completions", {"model": NAME, "stream": True, "temperature": 1.0}
    asked = {**common, "messages": USER, "max_tokens": 1500, "seed": 5}
    asked["stream_options"] = {"include_usage": True}
    schema = {"name": "rows", "strict": True, "schema": SCHEMA}
    form = {"type": "json_schema", "json_schema": schema}
    tools = [{"type": "function", "function": {**FUNCTION, "strict": True}}]
    calls = {"tools": tools, "tool_choice": "required"}
    thinking = {"type": "enabled", "budget_tokens": 60}
    return {
        "schema": (chat, {**asked, **QUIET, "response_format": form}),
        "tools": (chat, {**asked, **calls, **QUIET, "parallel_tool_calls": False}),
        "reasoning": (
            chat,
            {**asked, "reasoning_effort": "high", "thinking_token_budget": 150, "max_tokens": 250},
        ),
        "responses": (
            "/v1/responses",
            {
                **common,
                "input": "the dog sat on the log",
                "max_output_tokens": 1500,
                "tools": [{"type": "function", **FUNCTION}],
                "tool_choice": "required",
                "parallel_tool_calls": False,
                "reasoning": {"effort": "none"},
                "temperature": 0,
            },
        ),
        "messages": (
            "/v1/messages",
            {
                **common,
                "messages": USER,
                "max_tokens": 1500,
                "tools": [{"name": "store", "input_schema": SCHEMA}],
                "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
                "thinking": thinking,
                "temperature": 0,
            },
        ),
    }


def agent_model(folder: Path) -> Path:
    """Save a random model whose chat template has tools and reasoning."""
    tokenizer: Tokenizer = byte_level()
    save_checkpoint(
        folder,
        "llama",
        vocab_size=tokenizer.vocab_size,
        eos_token_id=list(tokenizer.eos_token_ids),
        max_position_embeddings=4096,
        num_hidden_layers=LAYERS,
    )
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": HERMES}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@dataclass
class Answer:
    """The payloads of a stream's events, in order. cuts: how often the stream broke and was
    resumed."""

    events: list[dict[str, Any]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)  # of the request, one for each part
    cuts: int = 0
    gap: float = 0.0
    error: str = ""

    @property
    def outcome(self) -> tuple[Any, ...]:
        """The parts of the answer that a kill must not change: all of the model's text, by its
        place in the answer.

        Pieces are joined, because a pause changes where they are cut.
        """
        if self.error:
            return self.error, len(self.events), self.ids, self.events[-1:]
        last = self.events[-1] if self.events else {}
        if any("choices" in event for event in self.events):
            return self.error, *_chat(self.events)
        if "response" in last:
            return self.error, *_response(self.events)
        return self.error, *_message(self.events)


def _chat(events: list[dict[str, Any]]) -> tuple[Any, ...]:
    assert len({event["id"] for event in events}) == 1, "it became another answer"
    texts: Counter[str] = Counter()
    joined: dict[str, str] = {}
    ends, usage = [], None
    for event in events:
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            delta = choice["delta"]
            pieces = {name: delta.get(name) for name in ("content", "reasoning_content")}
            for call in delta.get("tool_calls") or ():
                pieces[f"name {call['index']}"] = call["function"].get("name")
                pieces[f"arguments {call['index']}"] = call["function"].get("arguments")
                texts["ids"] += "id" in call
            for name, piece in pieces.items():
                joined[name] = joined.get(name, "") + (piece or "")
            ends += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert usage is not None
    counted = (usage["completion_tokens"], usage.get("completion_tokens_details"))
    return sorted(joined.items()), texts["ids"], ends, counted


def _response(events: list[dict[str, Any]]) -> tuple[Any, ...]:
    numbers = [event["sequence_number"] for event in events]
    assert numbers == list(range(len(events))), "an event is missing, or came twice"
    deltas: dict[int, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            at = event["output_index"]
            deltas[at] = deltas.get(at, "") + event["delta"]
    done = events[-1]["response"]
    items = [{k: v for k, v in item.items() if not k.endswith("id")} for item in done["output"]]
    usage = {**done["usage"], "input_tokens_details": None}
    return events[-1]["type"], done["status"], items, deltas, usage


def _message(events: list[dict[str, Any]]) -> tuple[Any, ...]:
    assert [event["type"] for event in events].count("message_start") == 1, "it began twice"
    blocks: dict[int, list[str]] = {}
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] not in blocks, "a block began twice"
            blocks[event["index"]] = [event["content_block"]["type"]]
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            text = next(delta[k] for k in ("text", "thinking", "partial_json") if k in delta)
            blocks[event["index"]].append(text)
    joined = {index: (parts[0], "".join(parts[1:])) for index, parts in blocks.items()}
    end = next(event for event in events if event["type"] == "message_delta")
    return joined, end["delta"], end["usage"]["output_tokens"], events[-1]["type"]


async def read(broken: Broken, kind: str) -> tuple[Answer, asyncio.Task[None]]:
    """Start a stream; return its answer, and the task that fills it."""
    answer = Answer()
    return answer, asyncio.create_task(_read(broken, answer, *bodies()[kind]))


async def _read(broken: Broken, answer: Answer, path: str, body: dict[str, Any]) -> None:
    stream = ResumableStream()
    try:
        async with asyncio.timeout(PATIENCE):
            while not stream.finished:
                status, headers = await _part(broken, answer, stream, path, body)
                if stream.finished:
                    break
                wait = stream.pause(status if status != 200 else 0, headers)
                if wait is None:
                    raise OSError(f"the stream ended: {status} {answer.events[-1:]}")
                await asyncio.sleep(wait)
    except (OSError, EOFError, TimeoutError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"


async def _part(
    broken: Broken, answer: Answer, stream: ResumableStream, path: str, body: dict[str, Any]
) -> tuple[int, dict[str, str]]:
    status, headers = 0, {}
    writer = None
    last = time.monotonic()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", broken.port)
        more = [f"{name}: {value}" for name, value in stream.headers.items()]
        writer.write(post(broken.prefix + path, body, *more))
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(head[0].split()[1])
        for line in head[1:]:
            name, _, value = line.partition(": ")
            headers[name.lower()] = value
        if status != 200:
            return status, headers
        answer.ids.append(headers["x-request-id"])
        answer.cuts += bool(answer.events)
        while size := int(await reader.readline() or b"", 16):
            whole = stream.feed((await reader.readexactly(size + 2))[:-2])
            for block in whole.split(b"\n\n"):
                answer.gap = max(answer.gap, time.monotonic() - last)
                last = time.monotonic()
                data = [line[6:] for line in block.split(b"\n") if line.startswith(b"data: ")]
                if data and data[0] != b"[DONE]":
                    answer.events.append(json.loads(data[0]))
                    if "error" in answer.events[-1] or answer.events[-1].get("type") == "error":
                        raise OSError(data[0].decode())
    except (ConnectionError, asyncio.IncompleteReadError, ValueError):
        return 0, headers
    finally:
        if writer is not None:
            writer.close()
    return status, headers


async def moved(broken: Broken, answer: Answer) -> bool:
    """Return whether an answer moved to another replica after its first tokens."""
    for id in answer.ids:
        trace = await asyncio.to_thread(_get, broken, f"/v1/requests/{id}")
        for part in trace.get("parts", ()):
            if any(hop["emitted_tokens"] for hop in part["route"]):
                return True
    return False


def _get(broken: Broken, path: str) -> dict[str, Any]:
    import urllib.error
    import urllib.request

    url = f"http://127.0.0.1:{broken.port}{broken.prefix}{path}"
    try:
        with urllib.request.urlopen(url, timeout=10) as server:
            return dict(json.loads(server.read()))
    except urllib.error.URLError:  # what a router that is gone knew
        return {}


@dataclass(slots=True)
class Run:
    """The counts of a run, by kind of request.

    hit: streams that moved to another replica. cut: streams that were resumed after their router
        was killed. wrong: descriptions of wrong answers.
    """

    kills: Counter[str] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)
    hit: Counter[str] = field(default_factory=Counter)
    cut: Counter[str] = field(default_factory=Counter)
    right: Counter[str] = field(default_factory=Counter)
    longest_pause_s: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def told(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of a result file."""
        rows = [{"case": f"kills/{name}", "value": n, "unit": ""} for name, n in self.kills.items()]
        for kind in self.asked:
            for what in ("asked", "hit", "cut", "right"):
                case = {"case": f"{kind}/{what}", "value": getattr(self, what)[kind]}
                rows.append({**case, "unit": "streams"})
        return [*rows, {"case": "longest pause", "value": self.longest_pause_s, "unit": "s"}]

    def enough(self, hits: int, kinds: list[str]) -> bool:
        """Whether at least `hits` streams of each kind were hit and, if routers were killed, cut.

        Streams need not be hit if only routers were killed.
        """
        hit = not self.kills.keys() - {"router"} or all(self.hit[kind] >= hits for kind in kinds)
        return hit and ("router" not in self.kills or all(self.cut[k] >= hits for k in kinds))


async def learn(broken: Broken) -> dict[str, tuple[Any, ...]]:
    """Return the right answer of each kind, from an undisturbed cluster."""
    right = {}
    for kind in bodies():
        answer, task = await read(broken, kind)
        await task
        assert not answer.error and len(answer.events) > 3 * SEEN, (kind, answer)
        right[kind] = answer.outcome
    return right


async def kill_once(
    broken: Broken, right: dict[str, tuple[Any, ...]], target: str, run: Run, each: int
) -> None:
    """Start `each` streams of each kind, and kill a process once all of them have begun."""
    order = list(right) * each
    random.Random(sum(run.kills.values())).shuffle(order)
    began = [(kind, *await read(broken, kind)) for kind in order]
    while any(len(item.events) < SEEN and not task.done() for _, item, task in began):
        await asyncio.sleep(0.002)
    victims = broken.find(target)
    run.kills[target] += victims[run.kills[target] % len(victims)].send(signal.SIGKILL)
    await asyncio.gather(*(task for _, _, task in began))
    for kind, answer, _ in began:
        run.asked[kind] += 1
        run.cut[kind] += answer.cuts > 0
        run.hit[kind] += await moved(broken, answer)
        run.longest_pause_s = max(run.longest_pause_s, round(answer.gap, 2))
        if answer.outcome == right[kind]:
            run.right[kind] += 1
        else:
            run.wrong.append(f"{kind}, {target}: {answer.outcome} instead of {right[kind]}"[:2000])


async def _run(broken: Broken, hits: int, targets: Sequence[str]) -> Run:
    await broken.settled(120)
    right, run = await learn(broken), Run()
    for target in itertools.cycle(targets):
        if len(run.kills) == len(set(targets)) and run.enough(hits, list(right)):
            return run
        await kill_once(broken, right, target, run, each=6)
        await broken.settled(120)
        print(run.told(), file=sys.stderr)
        if sum(run.kills.values()) > 10 * hits + 10:
            break
    raise AssertionError("the kills hit nothing")


def main() -> int:
    parser = argparse.ArgumentParser(description="Agents' answers under kills.")
    parser.add_argument("--hits", type=int, default=20)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=TARGETS)
    parser.add_argument("--out", type=Path, help="folder for the result files")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ray_and_serve() as cluster:
        model = agent_model(Path(folder) / "agent")
        with deployed(cluster, model, None, replicas=2, **SETTINGS) as broken:
            run = asyncio.run(_run(broken, options.hits, options.targets))
    print(json.dumps(run.told(), indent=2))
    if options.out:
        config = {"replicas": 2, "routers": 2, "model": f"random, {LAYERS} layers", **SETTINGS}
        write(options.out, "faults-agents", config, run.rows(), [run.told()])
    return 1 if run.wrong else 0


SETTINGS: dict[str, Any] = {
    "num_cpus": 0.1,
    "engine": {"dtype": "float32", "num_blocks": 2000, "max_num_seqs": 32, "num_threads": 1},
}


if __name__ == "__main__":
    sys.exit(main())
