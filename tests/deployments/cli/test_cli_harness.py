"""`manta eval --tasks`: lm-evaluation-harness with an engine of the command's and with a server."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from typer.testing import CliRunner

from deployments.api.app import build_asgi
from deployments.api.options import ApiOptions
from deployments.backend import ModelCard
from deployments.cli.main import cli
from deployments.cli.models import harness
from deployments.replica.server import ReplicaServer, StallLimits
from deployments.router.dispatcher import Dispatcher
from deployments.router.models.model_settings import DispatchLimits
from deployments.router.models.models_backend import ModelsBackend
from engine.config.engine_config import EngineConfig
from engine.errors import ConfigError
from engine.library.harness import HarnessModel
from engine.process.client import EngineClient
from engine.text.tokenizer import Tokenizer
from tests.engine.harness_tasks import write_model, write_tasks

EXAMPLES = Path(__file__).parents[3] / "examples/tasks"
LENGTH = 96
OPTIONS = {"device": "cpu", "dtype": "float32", "max_model_len": LENGTH, "max_num_seqs": 8}


def evaluate(*args: str | Path) -> Any:
    done = CliRunner().invoke(cli, ["eval", *map(str, args)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--few-shot", "5"), "--few-shot needs --tasks"),
        (("--run-code",), "--run-code needs --tasks"),
        (("--against", "http://127.0.0.1:1"), "--against takes a URL only with --tasks"),
        (("--tasks", "gsm8k", "--against", "other"), "--against other: with --tasks it is the URL"),
        (("--tasks", "gsm8k", "--served-as", "m"), "--served-as needs --against"),
        (("--tasks", "gsm8k", "--min-accuracy", "0.5"), "--min-accuracy is not for --tasks"),
        (("--tasks", "gsm8k", "--include", "nowhere"), "--include nowhere: no such folder"),
    ],
)
def test_options_that_do_not_stand_together(args: tuple[str, ...], message: str) -> None:
    """An option that is taken and does nothing."""
    with pytest.raises(ConfigError, match=message):
        evaluate("default", *args)


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """A traceback about a module that no page names."""
    monkeypatch.setattr(harness, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'manta-serve\[eval\]'"):
        evaluate("default", "--tasks", "gsm8k")


def test_which_model_of_a_server_answers() -> None:
    """Figures of another model than the user means."""
    base, other = {"id": "base"}, {"id": "other"}
    adapter = {"id": "legal", "parent": "base"}
    assert harness.choose_card([base, adapter], None, "URL") is base
    assert harness.choose_card([base, adapter], "legal", "URL") is adapter
    for cards, name in (([base, other], None), ([base], "missing"), ([], None)):
        with pytest.raises(ConfigError, match="--served-as: URL has"):
            harness.choose_card(cards, name, "URL")


class _Served:
    """An ASGI application: a router and an engine process, which start with the server."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._app: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        await receive()
        tokenizer = Tokenizer.load(self._folder)
        ends = tokenizer.eos_token_ids
        card = ModelCard("m", LENGTH, tokenizer.vocab_size, ends, 0)
        dispatcher = Dispatcher(card, tokenizer, DispatchLimits(wait_seconds=30.0), "router")
        front = ModelsBackend("router-1")
        front.set_dispatcher("m", dispatcher, 0.0)
        server = ReplicaServer(DispatchLimits().channel, StallLimits(), EngineClient)
        config = EngineConfig(model=str(self._folder), **OPTIONS)
        await server.start(config, "127.0.0.1")
        dispatcher.set_replicas({"r0": {**server.published(), "eos_token_ids": list(ends)}})
        while not dispatcher.state().replicas:
            await asyncio.sleep(0.01)
        self._app = build_asgi(front, ApiOptions())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        front.close()
        await server.stop()
        await send({"type": "lifespan.shutdown.complete"})


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Yield the URL of a server of the model in this folder."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(_Served(folder), log_level="critical", lifespan="on"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.05)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.mark.slow
def test_an_engine_and_a_server_have_the_same_figures(tmp_path: Path) -> None:
    """Bug: an end token behind a prompt takes the log-probability of the prompt's last token."""
    model, file = tmp_path / "model", tmp_path / "report.json"
    write_model(model, bos=True)
    write_tasks(tmp_path)
    config = tmp_path / "manta.yaml"
    engine = "".join(f"  {name}: {value}\n" for name, value in OPTIONS.items() if name != "device")
    config.write_text(f"model: {model}\nengine:\n{engine}")
    tasks = ("--tasks", "animals,words,texts", "--include", tmp_path, "--few-shot", "1")
    common = (*tasks, "--device", "cpu")
    done = evaluate(config, *common, "--out", file)
    assert "|animals|" in done.stdout.replace(" ", "")
    own = json.loads(file.read_text())["results"]
    with served(model) as url:
        answer = evaluate(config, *common, "--against", url, "--json")
    (line,) = [line for line in answer.stdout.splitlines() if line.startswith("{")]
    other = json.loads(line)["results"]
    assert own.keys() == other.keys() == {"animals", "words", "texts"}
    assert own["texts"]["word_perplexity,none"] > 1
    for name, figures in own.items():
        for figure, value in figures.items():
            if isinstance(value, float):
                assert value == pytest.approx(other[name][figure], rel=1e-4), (name, figure)


@pytest.mark.slow
def test_the_shipped_tasks_run_from_local_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task file that does not load, or asks the hub; a filter or a check that passes nothing."""
    write_model(tmp_path / "model", bos=True)
    choice = {"question": "which?", "choices": list("wxyz"), "answer": 2}
    letter = {"question": "哪个?", **dict(zip("ABCD", "wxyz", strict=True)), "answer": "C"}
    number = {"question": "1 + 1?", "answer": "It is\n#### 1,002"}
    code = {"prompt": "def one():\n", "entry_point": "one"}
    checks = [f"def check(one):\n    assert one() == {value}" for value in (1, 2)]
    (tmp_path / "data").mkdir()
    for name, *rows in (
        *((f"mmlu_{split}", choice) for split in ("dev", "test")),
        *((f"ceval_{split}", letter) for split in ("dev", "val")),
        *((f"gsm8k_{split}", number) for split in ("train", "test")),
        ("HumanEval", *({**code, "test": check} for check in checks)),
    ):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"data/{name}.jsonl").write_text(lines)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_ALLOW_CODE_EVAL", "0")  # and put back what the command sets

    class Right(HarnessModel):
        """A model that knows the answers."""

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            super().generate_until(requests, disable_tqdm)
            code = ["    return 1\n" if "def" in item.args[0] else "" for item in requests]
            return [text or "So\n#### 1002" for text in code]

        def _loglikelihood_tokens(self, requests: Any, **options: Any) -> Any:
            super()._loglikelihood_tokens(requests, **options)
            return [(float(key[1].strip() == "C"), False) for key, *_ in requests]

    monkeypatch.setattr("engine.library.harness.HarnessModel", Right)
    names = ("mmlu_here", "ceval_here", "gsm8k_here", "humaneval_here")
    include = ("--include", EXAMPLES, "--device", "cpu", "--run-code", "--few-shot", "1")
    file = tmp_path / "report.json"
    evaluate(tmp_path / "model", "--tasks", ",".join(names), *include, "--out", file)
    results = json.loads(file.read_text())["results"]
    right = ("acc,none", "acc,none", "exact_match,strict", "pass_at_1,none")
    values = [results[name][figure] for name, figure in zip(names, right, strict=True)]
    assert values == [1.0, 1.0, 1.0, 0.5]


@pytest.mark.slow
def test_tasks_that_are_refused(tmp_path: Path) -> None:
    """A traceback of the library; a model that is loaded before its task is known to be wrong."""
    write_tasks(tmp_path)
    file = tmp_path / "answer.yaml"
    file.write_text(file.read_text() + "unsafe_code: true\n")
    (tmp_path / "texts.jsonl").unlink()
    include = ("--include", tmp_path, "--device", "cpu")
    for tasks, message in (
        ("nothing", "nothing is not among the library's, nor in"),
        ("texts", r"texts\.jsonl"),
        ("words", "--run-code allows it"),
    ):
        with pytest.raises(ConfigError, match=message):
            evaluate(tmp_path / "missing", "--tasks", tasks, *include)
