"""Several models behind one endpoint: their configuration, the front of a router, and all of it on
a real Ray and Serve with real engines, where what happens to one changes nothing of another."""

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from deployments.adapters.record_store import (
    AdapterRecord,
    AdapterRecordStore,
    LocalRecordStore,
    RayRecordStore,
)
from deployments.api.app import build_asgi
from deployments.app import build, deploy, put_model, serve_config
from deployments.backend import GenerationRequest, ModelCard
from deployments.cli import status
from deployments.cli.models import endpoint_models
from deployments.cli.target import engine_config
from deployments.config.load import load_config, parse_config
from deployments.model_applications import entries, model_app, statuses, trouble
from deployments.observe.metrics import render
from deployments.router.dispatcher import Dispatcher
from deployments.router.models import model_loader
from deployments.router.models.model_settings import DispatchLimits
from deployments.router.models.models_backend import ModelsBackend
from deployments.serve.coexistence import check, left_out
from deployments.serve.model_deployments import served_models
from engine.errors import AdapterError, ConfigError, InvalidRequest, MantaError, Overloaded
from engine.sampling_params import SamplingParams
from tests.deployments.api.asgi import Client
from tests.deployments.fake_backend import tiny_tokenizer
from tests.deployments.on_ray.serve_cluster import Cluster, tiny_model
from tests.deployments.on_ray.test_kept_responses import keeps
from tests.deployments.several_models.endpoint import (
    ADMIN,
    APP,
    PROMPT,
    Several,
    Stream,
    configuration,
    wait,
)

# -- the configuration


WRONG = """models:
  one:
    aliases: [two, gpt-4]
    replcas: 2
  two:
    aliases: [gpt-4]
    replicas: 2
    pools: {cpu: {}}
    engine: {max_num_seqs: -1}
model: default
served_name: x
"""


def test_what_is_wrong_with_a_model_names_it(tmp_path: Path) -> None:
    """`replicas and pools are both set`, of one model among ten; a name that two models have, of
    which one never answers."""
    path = tmp_path / "manta.yaml"
    path.write_text(WRONG.replace("    replcas: 2\n", ""))
    with pytest.raises(ConfigError) as raised:
        load_config(path, {})
    lines = str(raised.value).splitlines()
    assert [line.removeprefix(f"{path}:") for line in lines] == [
        "8: models.two.engine.max_num_seqs: max_num_seqs must not be negative",
    ]
    path.write_text(WRONG.replace("    replcas: 2\n", "").replace("-1", "1"))
    with pytest.raises(ConfigError) as raised:
        load_config(path, {})
    lines = str(raised.value).splitlines()
    assert [line.removeprefix(f"{path}:") for line in lines] == [
        "3: models.one.aliases: 'two' is a name of the model 'two'",
        "4: models.two: replicas and pools are both set; give the counts in pools",
        "5: models.two.aliases: 'gpt-4' is a name of the model 'one'",
        "9: model: belongs to one model; it goes under models.NAME.model of `models`, "
        "got 'default'",
        "10: served_name: belongs to one model; it is NAME in `models`, got 'x'",
    ]
    path.write_text(WRONG)
    with pytest.raises(ConfigError, match=r":4: models\.one\.replcas: .* did you mean replicas"):
        load_config(path, {})
    path.write_text("models:\n  one:\n    model: ./nowhere\n")
    with pytest.raises(ConfigError, match=r":3: models\.one\.model: "):
        load_config(path, {})


def test_one_pattern_in_two_spellings_is_refused(tmp_path: Path) -> None:
    """Two models with `*/*` and `**/*`, of which one never answers."""
    path = tmp_path / "manta.yaml"
    path.write_text('models:\n  one:\n    aliases: ["*/*"]\n  two:\n    aliases: ["**/*"]\n')
    with pytest.raises(ConfigError, match=r":5: models\.two\.aliases: .* of the model 'one'"):
        load_config(path, {})


def test_a_model_has_what_the_top_level_says_unless_it_says_otherwise() -> None:
    """A limit of the file that holds for no model, or one of a model that holds for all."""
    config = parse_config(
        {
            "engine": {"max_model_len": 512, "max_num_seqs": 8},
            "scaling": {"ttft": 3.0},
            "limits": {"waiting": 5, "drain_seconds": 9.0},
            "models": {
                "a": {"engine": {"max_num_seqs": 2}, "limits": {"waiting": 1}},
                "b": {"scaling": {"busy": 0.5}, "revision": "v1"},
            },
        },
        {},
        check_files=False,
    )
    a, b = config.by_model().values()
    assert (a.name(), b.name(), b.revision) == ("a", "b", "v1")
    assert a.engine == {"max_model_len": 512, "max_num_seqs": 2}
    assert (a.limits.waiting, a.limits.drain_seconds, b.limits.waiting) == (1, 9.0, 5)
    assert (a.scaling.busy, b.scaling.busy, b.scaling.ttft) == (0.93, 0.5, 3.0)
    assert list(parse_config({}, {}).by_model()) == ["SmolLM2-135M-Instruct"]


def applications(**models: Any) -> dict[str, dict[str, Any]]:
    """Return Serve's schema of each application by name, for models whose folders do not exist."""
    data = {"app_name": APP, "models": {n: {"model": "/m", **m} for n, m in models.items()}}
    schema = serve_config(parse_config(data, {}, check_files=False))
    return {app["name"]: app for app in schema["applications"]}


def test_each_model_is_an_application_that_others_do_not_change() -> None:
    """An argument of one that follows from another: adding a model restarts the routers, or an
    alias every engine."""
    from ray.serve.schema import ServeDeploySchema

    pools = {"cpu": {"num_cpus": 1.0, "replicas": 1}}
    schema = applications(a={"pools": pools}, b={"pools": pools})
    assert list(schema) == ["several", "several.a", "several.b"]
    ServeDeploySchema.model_validate({"applications": list(schema.values())})
    more = {"cpu": {"num_cpus": 1.0, "replicas": 3}}
    two = applications(
        a={"pools": more, "aliases": ["x"], "limits": {"waiting": 3}},
        b={"pools": pools, "engine": {"max_num_seqs": 3}},
        c={"pools": pools},
    )
    for name in ("several", "several.a"):
        assert schema[name]["args"] == two[name]["args"]
    assert schema["several.b"]["args"] != two["several.b"]["args"]
    entry = entries(APP, two)
    assert list(entry) == ["a", "b", "c"] and entry["a"].config.aliases == ["x"]
    assert entry["a"].config.pools["cpu"].replicas == 3
    assert entries("other", two) == {} == entries(APP, {"several.x": {"import_path": "theirs:x"}})
    assert model_app("m", "a/b") != model_app("m", "a-b") == "m.a-b"


def test_a_slip_in_a_keys_file_takes_no_model_away(tmp_path: Path) -> None:
    """Every model gone from the routers, which look at Serve's list every few seconds, while a keys
    file has a line that is not understood or is being replaced."""
    keys = tmp_path / "keys"
    keys.touch(0o600)
    keys.write_text(f"{ADMIN}\n")
    data = {"app_name": APP, "models": {"a": {"model": "/m"}}, "http": {"api_keys_file": str(keys)}}
    schema = serve_config(parse_config(data, {}, check_files=False))
    there = {app["name"]: app for app in schema["applications"]}
    keys.write_text(f"{ADMIN} reqests=5\n")
    assert list(entries(APP, there)) == ["a"]
    keys.unlink()  # and another model, as what was read once is not read again
    again = serve_config(parse_config({**data, "models": {"b": {}}}, {}, check_files=False))
    entry = entries(APP, {app["name"]: app for app in again["applications"]} | there)
    assert sorted(entry) == ["a", "b"]


def test_deploying_a_file_leaves_what_is_not_its_own() -> None:
    """A model that was added by hand goes with the next update of the file; one that left the file
    stays for ever; one model's application is replaced by several models'."""
    there = applications(a={}, b={})
    there["several.b"]["deployments"][-1]["user_config"]["added"] = True
    there["other.c"] = {**applications(c={})["several.c"], "name": "other.c"}
    wanted = list(applications(c={}).values())
    check(wanted, there)
    assert left_out(wanted, there) == {"several.a"}
    single = serve_config(parse_config({"model": "/m", "app_name": APP}, {}, check_files=False))
    assert left_out(single["applications"], there) == set()
    with pytest.raises(ConfigError, match=r"serves several models .* configuration of one model"):
        check(single["applications"], there)
    with pytest.raises(ConfigError, match="serves one model on this cluster"):
        check(wanted, {APP: single["applications"][0]})
    with pytest.raises(ConfigError, match="route_prefix: / is that of the application 'several'"):
        check([{**single["applications"][0], "name": "x"}], there)


def test_what_takes_one_model_says_so() -> None:
    """The first of several models converted or verified without a word."""
    config = parse_config({"models": {"a": {}, "b": {}}}, {}, check_files=False)
    for call in (build, engine_config):
        with pytest.raises(ConfigError, match="models: "):
            call(config)


# -- the front


def dispatcher(name: str, records: AdapterRecordStore | None = None, **fields: Any) -> Dispatcher:
    limits = DispatchLimits(waiting=1)
    card = ModelCard(name, 64, 300, (2,), 0, **fields)
    return Dispatcher(card, tiny_tokenizer(), limits, "router", record_store=records)


def request(model: str) -> GenerationRequest:
    return GenerationRequest("id", model, [1, 2, 3], SamplingParams(max_tokens=3), 0)


async def test_a_full_model_refuses_none_of_anothers_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One queue for all models: who waits for the one keeps others from the other."""
    front = ModelsBackend("router", several=True)
    front.set_dispatcher("a", dispatcher("a"), 1.0)
    front.set_dispatcher("b", dispatcher("b"), 1.0)
    assert list(front.models()) == ["a", "b"] and front.only == ""
    front.generate(request("a"))  # no replica is there: it waits, and has the only place
    with pytest.raises(Overloaded):
        front.generate(request("a"))
    asked: list[tuple[str, str, int]] = []
    for name, router in front.dispatchers.items():
        monkeypatch.setattr(
            router.queue, "admit", lambda *place, name=name: asked.append((name, *place))
        )
    for priority, name in enumerate(("b", "", "a")):
        front.admit("key", priority, name)
    wanted = [("b", "key", 0), ("a", "key", 2)]
    assert asked == wanted, "a name that nobody knows is refused for that, later"
    front.generate(request("b"))
    assert front.held()["requests"] == 2 and front.state().queued == 2
    text = render(front.metric_families(), "")
    assert 'manta_request_failure_total{model_name="a",code="no_replica"} 1' in text
    assert 'manta_prompt_tokens_total{model_name="b"} 3' in text
    front.close()
    with pytest.raises(Overloaded, match="about to stop"):
        front.admit("", 0, "")


async def test_what_a_model_answers_goes_on_when_it_is_changed() -> None:
    """A stream that ends because its model is changed, or that waits for replicas of a model that
    was removed; a model that stays known."""
    front = ModelsBackend("router", several=True)
    front.set_dispatcher("a", dispatcher("a"), 60.0)
    front.set_dispatcher("b", dispatcher("b"), 60.0)
    streams = [front.generate(request("a")), front.generate(request("b"))]
    front.take_out("a", 60.0)
    front.set_dispatcher("b", dispatcher("b", aliases=("c",)), 60.0)
    assert list(front.models()) == ["b"] and front.models()["b"].aliases == ("c",)
    assert front.only == "b"
    with pytest.raises(InvalidRequest, match="was taken away"):
        front.generate(request("a"))
    with pytest.raises(MantaError, match="the model a was removed"):
        await streams[0].next()
    assert front.held()["requests"] == 1, "the other goes on"
    streams[1].abort()
    assert front.held()["requests"] == 0
    front.close()


async def test_models_that_nobody_asks_share_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question a second to Ray's store for each model, whose thread and answer cost a router as
    much as dozens of chunks; or an adapter that another router added, and that is never seen."""
    from ray.experimental import internal_kv

    by_name: dict[str, bytes] = {}
    asked: list[str] = []

    def get(key: str | bytes) -> bytes | None:
        name = key if isinstance(key, str) else key.decode()
        asked.append(name)
        return by_name.get(name)

    def put(key: str, value: bytes, overwrite: bool = True) -> bool:
        by_name[key] = value
        return True

    def listed(prefix: str) -> list[bytes]:
        return [key.encode() for key in by_name if key.startswith(prefix)]

    for name, fake in (("get", get), ("put", put), ("list", listed)):
        monkeypatch.setattr(internal_kv, f"_internal_kv_{name}", fake)
    monkeypatch.setattr(model_loader, "_POLL_SECONDS", 0.01)
    front = ModelsBackend("router", several=True)
    looks = model_loader.ModelLoader(front, APP, 1.0)
    for name in ("a", "b", "c"):
        store = RayRecordStore(model_app(APP, name), APP)
        card = ModelCard(name, 8192, 250, (2,), 0)
        router = Dispatcher(card, tiny_tokenizer(), DispatchLimits(), "router", record_store=store)
        front.set_dispatcher(name, router, 1.0)
        looks._connected[name] = model_loader._Connected(cast(Any, None), router, ())
    await looks.follow(None)
    while len(asked) < 4:  # the first look is at all that there is
        await asyncio.sleep(0.01)
    asked.clear()
    while len(asked) < 10:
        await asyncio.sleep(0.01)
    assert set(asked) == {f"manta/{APP}/adapters/mark"}
    RayRecordStore(model_app(APP, "b"), APP).put(AdapterRecord(name="x", path="/x"))
    async with asyncio.timeout(10):
        while "x" not in front.adapters.records:
            await asyncio.sleep(0.01)
    assert list(front.dispatchers["b"].adapters.records) == ["x"]
    looks.close()
    front.close()


async def test_an_adapters_name_is_of_one_model() -> None:
    """An adapter of one model that takes the name of another model, or of its adapter."""
    front = ModelsBackend("router", several=True)
    for name in ("a", "b"):
        front.set_dispatcher(name, dispatcher(name), 1.0)
    registry = front.dispatchers["a"].adapters
    registry.records = {"legal": AdapterRecord(name="legal", path="/x")}
    front.dispatchers["a"]._set_models()
    assert front.models()["legal"].parent == "a" and list(front.adapters.records) == ["legal"]
    with pytest.raises(InvalidRequest, match="model must name the base model, one of a, b"):
        await front.adapters.add("new", "/y")
    with pytest.raises(AdapterError, match="legal is the name of an adapter of a"):
        await front.adapters.add("legal", "/y", "b")
    with pytest.raises(AdapterError, match="b is the name of a model"):
        await front.adapters.add("b", "/y", "a")
    with pytest.raises(AdapterError, match="no model is called 'c'"):
        await front.adapters.add("new", "/y", "c")
    front.close()


async def test_an_adapter_that_two_models_have_is_named_with_its_model() -> None:
    """Bug: `manta adapter remove` takes an adapter of any model away where two have its name, and
    the list shows one of them."""
    front = ModelsBackend("router", several=True)
    for name in ("a", "b"):
        store = LocalRecordStore()
        store.put(AdapterRecord(name="legal", path=f"/{name}", version=1))
        front.set_dispatcher(name, dispatcher(name, store), 1.0)
    await front.adapters.refresh()
    client = Client(build_asgi(cast(Any, front)))

    async def ask(method: str, path: str) -> tuple[int, Any]:
        route, _, query = path.partition("?")
        reply = await client.request(method, route, query=query.encode())
        return reply.status, reply.json()

    async def paths(query: str = "") -> list[tuple[str, str]]:
        _, answer = await ask("GET", f"/v1/adapters{query}")
        return [(entry["model"], entry["path"]) for entry in answer["data"]]

    assert await paths() == [("a", "/a"), ("b", "/b")] and await paths("?model=b") == [("b", "/b")]
    status, answer = await ask("DELETE", "/v1/adapters/legal")
    assert status == 400 and "model must name the base model, one of a, b" in str(answer)
    for method, path in (("GET", "/v1/adapters?model=c"), ("DELETE", "/v1/adapters/legal?model=c")):
        status, answer = await ask(method, path)
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert (await ask("DELETE", "/v1/adapters/legal?model=b"))[0] == 200
    assert await paths() == [("a", "/a")]
    assert (await ask("DELETE", "/v1/adapters/legal?model=b"))[0] == 404
    assert (await ask("DELETE", "/v1/adapters/legal"))[0] == 200 and await paths() == []
    front.close()


# -- on Ray


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("models")
    keys = parent / "admins"
    keys.touch(0o600)
    keys.write_text(f"{ADMIN}\n")
    return tiny_model(parent / "tiny")


@pytest.fixture(scope="module")
def several(shared_cluster: Cluster, folder: Path) -> Iterator["Several"]:
    """Yield an endpoint of two models: `one`, with an alias, and `two`."""
    from ray import serve

    config = configuration(folder, shared_cluster.port, one={"aliases": ["claude-*"]}, two={})
    deploy(serve_config(config))
    several = Several(shared_cluster, config)
    names = ["one", "two"]
    wait(lambda: several.names() == names and all(map(several.ready, names)), 150)
    yield several
    for name in list(serve.status().applications):
        serve.delete(name)


@pytest.mark.serve
@pytest.mark.slow
def test_each_request_goes_to_its_model(several: Several) -> None:
    """Both names answered by one of the engines, or the alias by none."""
    before = {name: several.engines(name)["output_tokens"] for name in ("one", "two")}
    assert several.text("two")
    after = {name: several.engines(name)["output_tokens"] for name in ("one", "two")}
    assert after["one"] == before["one"] and after["two"] >= before["two"] + 23
    assert several.text("one") == several.text("claude-3")
    assert several.models()["one"]["aliases"] == ["claude-*"]


@pytest.mark.serve
@pytest.mark.slow
def test_an_unknown_name_says_what_is_there(several: Several) -> None:
    """A 404 that leaves its reader guessing; a request without a name that goes to any model."""
    answer = several.cluster.post("/several/v1/completions", model="onne", **PROMPT)
    assert answer["error"]["code"] == "model_not_found"
    assert 'did you mean "one"' in answer["error"]["message"]
    assert 'served: "one", "two"' in answer["error"]["message"]
    answer = several.cluster.post("/several/v1/completions", **PROMPT)
    assert answer["error"]["code"] == "missing_field"


@pytest.mark.serve
@pytest.mark.slow
def test_answers_are_kept(several: Several) -> None:
    """A key of the endpoint that its routers refuse, or that only an endpoint of one model has."""
    keeps(f"http://127.0.0.1:{several.cluster.port}/several/v1", "two")


@pytest.mark.serve
@pytest.mark.slow
def test_metrics_have_the_model(several: Several) -> None:
    """Counters of two models in one series, of which nobody can tell which."""
    several.text("one"), several.text("two")
    text = several.cluster.get("/several/metrics")
    for model in ("one", "two"):
        assert f'manta_request_success_total{{model_name="{model}",router="' in text
        assert f'manta_num_requests_running{{model_name="{model}",replica="engine-cpu/' in text
    assert 'manta_http_requests_total{model_name="",router="' in text
    assert text.count("# TYPE manta_request_success_total ") == 1


@pytest.mark.serve
@pytest.mark.slow
def test_status_has_a_page_for_each_model(several: Several) -> None:
    """Pools of the routers' application only, which has none; two models' replicas on one page."""
    several.text("two")
    pages = [status.summarise(look) for look in status._looks(APP).values()]
    assert [(look["application"], look["model"]) for look in pages] == [(APP, "one"), (APP, "two")]
    for look in pages:
        assert look["status"] == "RUNNING" and look["pools"]["cpu"]["running"] == 1
        assert [replica["pool"] for replica in look["replicas"]] == ["cpu"]
    assert pages[1]["latency_ms"]["first_token"]["p50"]
    status.pages(pages)


@pytest.mark.serve
@pytest.mark.slow
def test_a_killed_engine_is_none_of_the_others_business(several: Several) -> None:
    """An engine's death that costs another model's stream a token, or its replicas a restart, or
    leaves a task behind in the router."""
    wait(lambda: several.ready("one"))
    pid, before = several.engines("two")["pid"], several.router_tasks()
    with Stream(several, "two") as stream:
        os.kill(several.engines("one")["engine_pid"], signal.SIGKILL)
        seen = len(stream.answers)
        wait(lambda: len(stream.answers) > seen + 2)
        wait(lambda: several.ready("one"))
    assert several.engines("two")["pid"] == pid
    wait(lambda: several.router_tasks() == before)


@pytest.mark.serve
@pytest.mark.slow
def test_a_router_that_changes_models_pickles_no_classes(
    several: Several, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve's own status makes the request router of each deployment anew: tens of milliseconds of
    a router's interpreter for each look at whether a model has started, and each ten seconds."""
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    wait(lambda: several.ready("one"))
    pid, applications = several.engines("one")["pid"], serve.status().applications

    def refused(config: RequestRouterConfig) -> None:
        raise AssertionError("a class was pickled")

    monkeypatch.setattr(RequestRouterConfig, "_serialize_request_router_cls", refused)
    assert list(served_models(APP)) == ["one", "two"]
    assert trouble(APP, "one") == {} == trouble(APP, "never")
    by_application = statuses()
    assert {
        name: (status_of.status, status_of.deployed_at)
        for name, status_of in by_application.items()
    } == {
        name: (status_of.status, status_of.last_deployed_time_s)
        for name, status_of in applications.items()
    }
    section = several.config.models["one"].model_dump(exclude_unset=True)
    put_model(several.config, "one", section)
    assert several.engines("one")["pid"] == pid


@pytest.mark.serve
@pytest.mark.slow
def test_models_come_and_go_over_http(
    several: Several, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that is added takes the others with it, answers before it is there, or stays when it
    is removed; anybody may do it; what is wrong with it is told by nobody."""
    url, admins = f"http://127.0.0.1:{several.cluster.port}/several", folder.parent / "admins"
    section = tmp_path / "added.yaml"

    def written(text: str) -> str:
        section.write_text(f"model: {folder}\npools: {{cpu: {{num_cpus: 0.4}}}}\n{text}")
        return str(section)

    with pytest.raises(MantaError, match="API key"):
        endpoint_models.add("three", written(""), url=url, key=None)
    for wrong, said in (
        ("replcas: 2", "replcas: .*did you mean replicas"),
        ("aliases: [claude-*]", "'claude-\\*' is a name of the model 'one'"),
        ("engine: {max_num_seqs: -1}", "engine.max_num_seqs: max_num_seqs must not be"),
    ):
        with pytest.raises(MantaError, match=said):
            endpoint_models.add("three", written(wrong), url=url, key=admins)
    with pytest.raises(MantaError, match="no model is called 'three'"):
        endpoint_models.remove("three", url=url, key=admins)
    pid, two = several.engines("one")["pid"], several.engines("two")["pid"]
    with Stream(several, "one"):
        endpoint_models.add("three", written("aliases: [drei]"), url=url, key=admins)
        assert several.text("three") and several.ready("drei")
        deploy(serve_config(several.config))  # the file knows nothing of it
        endpoint_models.show(url=url, key=admins)
        shown = capsys.readouterr().out
        assert re.search(r"^one +ready +256 tokens +claude-\*$", shown, re.M)
        assert re.search(r"^three +ready +256 tokens +drei$", shown, re.M)
        endpoint_models.remove("three", url=url, key=admins)
        assert several.names() == ["one", "two"] and not several.ready("three")
        endpoint_models.add(
            "four", written("engine: {quantization: gguf}"), wait=False, url=url, key=admins
        )
        with pytest.raises(MantaError, match=r"four does not start: .*gguf"):
            endpoint_models.add(
                "four", written("engine: {quantization: gguf}"), url=url, key=admins
            )
        endpoint_models.remove("four", url=url, key=admins)
    assert (several.engines("one")["pid"], several.engines("two")["pid"]) == (pid, two)


@pytest.mark.serve
@pytest.mark.slow
def test_a_changed_file_restarts_only_what_changed(several: Several, folder: Path) -> None:
    """A model that is added, changed or taken out of the file, and every engine loads again."""
    pid, two = several.engines("one")["pid"], several.engines("two")["pid"]
    port = several.cluster.port
    with Stream(several, "one"):
        more = configuration(folder, port, one={"aliases": ["claude-*", "gpt-4"]}, two={}, three={})
        deploy(serve_config(more))
        wait(lambda: "three" in several.names() and several.ready("three"))
        wait(lambda: several.text("gpt-4".replace("gpt-4", "one")) and several.ready("gpt-4"))
        changed = configuration(folder, port, one={}, two={"engine": {"max_num_seqs": 3}})
        deploy(serve_config(changed))
        wait(lambda: several.names() == ["one", "two"])
        wait(lambda: several.ready("two") and several.engines("two")["pid"] != two)
    assert several.engines("one")["pid"] == pid
