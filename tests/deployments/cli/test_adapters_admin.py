"""Where adapters are named from outside: HTTP and its keys, the configuration, the command."""

import hashlib
import json
import sys

import pytest
from typer.testing import CliRunner

from deployments.adapters.registry import AdapterSettings
from deployments.api.app import build_asgi
from deployments.api.options import ApiOptions
from deployments.cli.adapter import app as command
from deployments.config.load import load_config
from engine.errors import ConfigError
from tests.deployments.api.asgi import Client
from tests.deployments.fake_adapters import make_folder, run, settings
from tests.deployments.fake_backend import tiny_tokenizer
from tests.deployments.router.fleet import Fleet
from tests.deployments.router.test_adapters import TRAVERSALS


def test_over_http(tmp_path):
    """Names in requests and lists, the admin's routes and their keys, a status for every error."""

    async def case():
        make_folder(tmp_path / "root" / "legal")
        make_folder(tmp_path / "root" / "bad", use_dora=True)
        fleet = Fleet(1, loras=2, adapters=settings(tmp_path / "root"), tokenizer=tiny_tokenizer())
        async with fleet:
            client = Client(build_asgi(fleet.dispatcher))

            async def call(method: str, path: str, /, **body: object):
                reply = await client.request(method, path, json.dumps(body).encode())
                answer = reply.json()
                if path != "/v1/adapters":
                    assert str(tmp_path) not in str(answer)
                return reply.status, answer

            status, answer = await call("POST", "/v1/adapters", name="legal", path="legal")
            assert status == 200 and answer["rank"] == 8 and len(answer["revision"]) == 32
            for name in ("legal", "m:legal"):
                status, answer = await call(
                    "POST", "/v1/completions", model=name, prompt=[5, 6], max_tokens=4
                )
                assert status == 200 and answer["model"] == "legal"
                assert (await call("GET", f"/v1/models/{name}"))[1]["parent"] == "m"
            _, models = await call("GET", "/v1/models")
            assert [(entry["id"], entry["parent"]) for entry in models["data"]] == [
                ("m", None),
                ("legal", "m"),
            ]
            assert (await call("GET", "/v1/adapters"))[1]["data"][0]["id"] == "legal"
            wrong = [
                (404, "model_not_found", {"model": "legall"}),
                (404, "model_not_found", {"model": "x:legal"}),
                (404, "model_not_found", {"model": "m:m"}),
                (400, "invalid_model_name", {"model": "m:../x"}),
                (400, "invalid_model_name", {"model": "../../etc/passwd"}),
                (400, "invalid_model_name", {"model": "a\0"}),
            ]
            for status, code, body in wrong:
                got, answer = await call("POST", "/v1/completions", prompt=[5], **body)
                assert (got, answer["error"]["code"]) == (status, code), body
            _, answer = await call("POST", "/v1/completions", prompt=[5], model="legall")
            assert 'did you mean "legal"' in answer["error"]["message"]
            wrong = [
                (400, "missing_field", {"path": "legal"}),
                (400, "invalid_type", {"name": 5}),
                (400, "invalid_model_name", {"name": "../x", "path": "legal"}),
                (400, "invalid_model_name", {"name": "...", "path": "legal"}),
                (400, "invalid_model_name", {"name": "m", "path": "legal"}),
                (400, "invalid_adapter_path", {"name": "b", "path": "../legal"}),
                (403, "adapter_path_not_allowed", {"name": "b", "path": "/etc"}),
                (404, "adapter_not_found", {"name": "b", "path": "nowhere"}),
                (404, "adapter_not_found", {"name": "b"}),
                (422, "adapter_invalid", {"name": "b", "path": "bad"}),
            ]
            for status, code, body in wrong:
                got, answer = await call("POST", "/v1/adapters", **body)
                assert (got, answer["error"]["code"]) == (status, code), body
            assert (await call("DELETE", "/v1/adapters/legal"))[1]["deleted"] is True
            assert (await call("DELETE", "/v1/adapters/legal"))[0] == 404
            assert (await call("GET", "/v1/adapters/legal"))[0] == 404
            status, _ = await call("POST", "/v1/completions", model="legal", prompt=[5])
            assert status == 404
            assert (await call("PUT", "/v1/adapters"))[0] == 405

    run(case())


opened: list[str] | None = None  # the files and folders that this process opens are put here


def _audit(event: str, arguments: tuple) -> None:
    if opened is not None and event in ("open", "os.listdir", "os.scandir"):
        opened.append(str(arguments[0]))


def test_nothing_outside_the_roots_is_opened(tmp_path, monkeypatch):
    """A path that leads out of the roots through the route itself: a 500, a path that one
    layer reads in another way than the one that allowed it, or a look at a file outside."""
    root = tmp_path / "root"
    make_folder(root / "good")
    make_folder(tmp_path / "rootx" / "x")
    (root / "link").symlink_to(tmp_path / "rootx")
    outside = [str(root), str(root.parent), f"{root}/link/x", f"{root}x/x", f"{root}/../rootx/x"]
    sys.addaudithook(_audit)  # for good: there is no way to take one back

    async def case():
        adapter_settings = AdapterSettings("m", roots=(str(root), "s3://bucket/models"))
        async with Fleet(1, loras=2, adapters=adapter_settings) as fleet:
            client = Client(build_asgi(fleet.dispatcher))

            async def add_adapter(name: str, path: str) -> tuple[int, str]:
                body = json.dumps({"name": name, "path": path}).encode()
                reply = await client.request("POST", "/v1/adapters", body)
                return reply.status, reply.json().get("error", {}).get("code", "")

            assert await add_adapter("good", "good") == (200, "")
            calls = list(fleet.engines["r0"].adapter_calls)
            monkeypatch.setattr(f"{__name__}.opened", [])
            for path in [*TRAVERSALS, *outside]:
                status, code = await add_adapter("bad", path)
                assert (status, code) in (
                    (400, "invalid_value"),  # none
                    (400, "invalid_adapter_path"),
                    (403, "adapter_path_not_allowed"),
                    (404, "adapter_not_found"),  # a plain name that no root has
                ), path
            assert opened == [] and fleet.engines["r0"].adapter_calls == calls
            assert await add_adapter("good", "good") == (200, "")
            assert f"{root}/good/adapter_config.json" in opened, "the hook sees what is read"
            assert list(fleet.dispatcher.adapters.records) == ["good"]

    run(case())


def test_a_link_that_comes_later(tmp_path):
    """A folder that was allowed when it was added, or found in the watched one, and is a link
    to somewhere else when it is read again."""
    folders = [tmp_path / name for name in ("root/a", "watch/b", "watch/c")]

    async def case():
        for folder in folders:
            make_folder(folder)
        # The operator's own names may have links, and more letters than a caller's.
        (tmp_path / "roots (all)").symlink_to(tmp_path / "root")
        adapter_settings = settings(tmp_path / "roots (all)", watch=str(tmp_path / "watch"))
        async with Fleet(
            1, loras=2, adapters=adapter_settings, tokenizer=tiny_tokenizer()
        ) as fleet:
            await fleet.dispatcher.adapters.start()
            client = Client(build_asgi(fleet.dispatcher))

            async def post(route: str, **body: object) -> tuple[int, str]:
                reply = await client.request("POST", route, json.dumps(body).encode())
                return reply.status, reply.json().get("error", {}).get("code", "")

            async def ask(name: str) -> tuple[int, str]:
                return await post("/v1/completions", model=name, prompt=[5], max_tokens=1)

            assert await post("/v1/adapters", name="a", path="a") == (200, "")
            for name in "ab":
                assert await post("/v1/adapters", name=name) == (200, "")
            for folder in folders:
                folder.rename(tmp_path / folder.name)
                folder.symlink_to(tmp_path / folder.name)
                make_folder(tmp_path / folder.name, r=32)
            calls = list(fleet.engines["r0"].adapter_calls)
            for name in "ab":
                refused = await post("/v1/adapters", name=name)
                assert refused == (403, "adapter_path_not_allowed"), name
            assert await ask("c") == (403, "adapter_path_not_allowed"), "nobody had read it before"
            assert fleet.engines["r0"].adapter_calls == calls
            (tmp_path / "root" / "a").unlink()
            (tmp_path / "root" / "a").symlink_to(make_folder(tmp_path / "root" / "new", r=32))
            assert await post("/v1/adapters", name="a") == (200, "")
            assert fleet.dispatcher.adapters.records["a"].rank == 32, "a link within the roots"

    run(case())


def test_admin_keys(tmp_path):
    """E 23: a user's key, or none, that changes what is served; an admin's that may do less."""

    async def case():
        make_folder(tmp_path / "legal")
        user, admin = (hashlib.sha256(key).digest() for key in (b"user", b"admin"))
        add = json.dumps({"name": "legal", "path": "legal"}).encode()
        async with Fleet(1, loras=2, adapters=settings(tmp_path)) as fleet:
            for users, admins, header, status in (
                ((), (), None, 200),
                ((user,), (), None, 401),
                ((user,), (), b"user", 403),
                ((user,), (admin,), b"user", 403),
                ((user,), (admin,), b"admin", 200),
                ((), (admin,), None, 401),
                ((), (admin,), b"user", 401),
                ((), (admin,), b"admin", 200),
            ):
                options = ApiOptions(api_keys=frozenset(users), admin_keys=frozenset(admins))
                client = Client(build_asgi(fleet.dispatcher, options))
                headers = [(b"content-type", b"application/json")]
                headers += [(b"authorization", b"Bearer " + header)] if header else []
                for method, path, body in (
                    ("POST", "/v1/adapters", add),
                    ("GET", "/v1/adapters", b""),
                    ("GET", "/v1/adapters/legal", b""),
                ):
                    reply = await client.request(method, path, body, headers)
                    assert reply.status == status, (users, admins, header, path)
                reply = await client.request("GET", "/v1/models", b"", headers)
                assert reply.status == (401 if users and not header else 200)

    run(case())


@pytest.mark.parametrize(
    ("lines", "part"),
    [
        ("paths: {a: nowhere}", "adapters.paths.a"),
        ("paths: {../x: good}", "adapters.paths: adapter name"),
        ("paths: {SmolLM2-135M-Instruct: good}", "is the model's own name"),
        ("paths: {dora: dora}", "use_dora"),
        ("watch: nowhere", "adapters.watch: nowhere: no such folder"),
        ("watch: s3://x/y", "must be a folder"),
        ("roots: [nowhere]", "adapters.roots: nowhere: no such folder"),
        ("roots: [good, 5]", "adapters.roots.1: must be a valid string"),
        ("path: {a: good}", "did you mean paths?"),
    ],
)
def test_configuration_faults_name_the_key(tmp_path, lines, part):
    """E 88: an adapter that turns out to be missing when somebody asks for it."""
    make_folder(tmp_path / "good")
    make_folder(tmp_path / "dora", use_dora=True)
    file = tmp_path / "manta.yaml"
    file.write_text(f"engine: {{max_loras: 2}}\nadapters:\n  {lines}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file, {})
    assert part in caught.value.message
    file.write_text("adapters: {paths: {a: good}}")
    with pytest.raises(ConfigError, match="max_loras is 0"):
        load_config(file, {})


def test_configuration(tmp_path):
    """Relative folders that another machine's working directory would decide."""
    make_folder(tmp_path / "adapters" / "legal")
    file = tmp_path / "manta.yaml"
    file.write_text(
        "engine: {max_loras: 2}\n"
        "adapters:\n"
        "  paths: {legal: adapters/legal, sql: s3://models/sql}\n"
        "  watch: adapters\n"
        "  roots: [s3://models, adapters]\n"
    )
    config = load_config(file, {}).adapters
    root = str(tmp_path / "adapters")
    assert config.paths == {"legal": f"{root}/legal", "sql": "s3://models/sql"}
    assert (config.watch, config.roots) == (root, ["s3://models", root])


def test_the_command(tmp_path, monkeypatch, capsys):
    """A command that says something else than the server has done."""
    calls = []

    class Answer:
        def __init__(self, *args):
            calls.append(args)

        def read(self):
            record = {"id": "legal", "rank": 8, "revision": "r1", "source": "api", "path": "/x"}
            record["model"] = "qwen"
            other = {**record, "model": "smol"}
            return json.dumps({**record, "data": [record, other]}).encode()

    monkeypatch.setattr(
        "deployments.cli.chat.ChatServer.request", lambda self, *args: Answer(self.url, *args)
    )
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    for args in (["list"], ["add", "legal", "here"], ["add", "legal"], ["remove", "legal"]):
        result = runner.invoke(command, [*args, "--url", "http://x:1"])
        assert result.exit_code == 0 and "legal" in result.output, result.output
    assert [call[1:4] for call in calls] == [
        ("GET", "/adapters", None),
        ("GET", "/adapters", None),  # is anybody there: reading an adapter may take minutes
        ("POST", "/adapters", {"name": "legal", "path": f"{tmp_path}/here"}),
        ("GET", "/adapters", None),
        ("POST", "/adapters", {"name": "legal"}),
        ("DELETE", "/adapters/legal", None),
    ]
    calls.clear()
    for args in (["list"], ["add", "legal", "s3://x"], ["remove", "legal"]):
        result = runner.invoke(command, [*args, "--model", "a b", "--url", "http://x:1"])
        assert result.exit_code == 0, result.output
        assert ("qwen:legal" in result.output) == (args == ["list"])
    assert [call[1:4] for call in calls] == [
        ("GET", "/adapters?model=a+b", None),
        ("GET", "/adapters", None),
        ("POST", "/adapters", {"name": "legal", "path": "s3://x", "model": "a b"}),
        ("DELETE", "/adapters/legal?model=a+b", None),
    ]


def test_without_slots_adapters_are_refused(tmp_path):
    """An engine without slots: a request that is answered by the model itself, or with a 500."""

    async def case():
        make_folder(tmp_path / "a")
        async with Fleet(1, adapters=settings(tmp_path)) as fleet:
            client = Client(build_asgi(fleet.dispatcher))
            body = json.dumps({"name": "a", "path": "a"}).encode()
            reply = await client.request("POST", "/v1/adapters", body)
            assert (reply.status, reply.json()["error"]["code"]) == (400, "adapters_disabled")

    run(case())
