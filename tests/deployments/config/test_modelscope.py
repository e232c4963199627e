"""Models of ModelScope from a server of this machine, and converted folders by a hub's name."""

import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import huggingface_hub
import pytest

from deployments.checkpoints.resolve import resolve_model
from engine import LLM, SamplingParams
from engine.config.engine_config import EngineConfig
from engine.conversion import convert
from engine.errors import ConfigError
from engine.weights.converted import damaged
from tests.engine.harness_tasks import write_model


class Hub(ThreadingHTTPServer):
    """A server with ModelScope's two routes. spoilt: the file that arrives changed."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.spoilt, self.asked = folder, "", list[str]()
        self.more: list[dict[str, Any]] = []


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        base = "/api/v1/models/org/name/repo"
        if not url.path.startswith(base) or query["Revision"] not in ("master", "v1"):
            self.send_error(404)
            return
        if url.path == f"{base}/files":
            files = [
                {"Type": "blob", "Path": f.name, "Sha256": hashlib.sha256(data).hexdigest()}
                for f in sorted(self.server.folder.iterdir())
                for data in (f.read_bytes(),)
            ]
            tree = {"Type": "tree", "Path": "folder", "Sha256": ""}
            body = json.dumps({"Data": {"Files": [*files, tree, *self.server.more]}}).encode()
        else:
            name = query["FilePath"]
            self.server.asked.append(name)
            body = (self.server.folder / name).read_bytes()
            body += b"!" * (name == self.server.spoilt)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    (tmp_path / "model").mkdir()
    write_model(tmp_path / "model", bos=False)
    (tmp_path / "model" / "code.py").write_text("raise SystemExit")
    server = Hub(tmp_path / "model")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("MODELSCOPE_DOMAIN", f"http://127.0.0.1:{server.server_port}")
    yield server
    server.shutdown()
    server.server_close()


def test_a_model_of_modelscope(hub: Hub, tmp_path: Path) -> None:
    """Bugs: code that is fetched; weights before the model is checked; files fetched again."""
    cache = tmp_path / "cache"
    folder = resolve_model("modelscope:org/name", cache=cache)
    weights = [name for name in hub.asked if name.endswith(".safetensors")]
    assert weights and hub.asked[-len(weights) :] == weights and "code.py" not in hub.asked
    for name in ("config.json", "tokenizer.json", *weights):
        assert (folder / name).read_bytes() == (hub.folder / name).read_bytes()
    count = len(hub.asked)
    assert resolve_model("modelscope:org/name", "v1", cache=cache) == folder
    assert len(hub.asked) == count


def test_a_refused_model_costs_no_weights(hub: Hub, tmp_path: Path) -> None:
    """Bug: gigabytes for a model that no engine runs."""
    file = hub.folder / "config.json"
    config = {**json.loads(file.read_text()), "architectures": ["Unknown"], "model_type": "unknown"}
    file.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="nknown"):
        resolve_model("modelscope:org/name", cache=tmp_path / "cache")
    assert not any(name.endswith(".safetensors") for name in hub.asked)


def test_faults_of_modelscope(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bugs: a changed file that is served, a file written outside of the cache, a traceback."""
    cache = tmp_path / "cache"
    hub.spoilt = "config.json"
    with pytest.raises(ConfigError, match=r"config\.json is not the file that the listing names"):
        resolve_model("modelscope:org/name", cache=cache)
    assert not list((cache / "models" / "modelscope").glob("*/config.json"))
    hub.spoilt = ""
    hub.more = [{"Type": "blob", "Path": "../out.json", "Sha256": "0" * 64}]
    with pytest.raises(ConfigError, match=r"cannot be taken: '\.\./out\.json'"):
        resolve_model("modelscope:org/name", cache=cache)
    with pytest.raises(ConfigError, match="no such public model, or no revision 'v9'"):
        resolve_model("modelscope:org/name", "v9", cache=cache)
    with pytest.raises(ConfigError, match="or modelscope:org/name"):
        resolve_model("modelscope:one-word", cache=cache)
    monkeypatch.setenv("MODELSCOPE_DOMAIN", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"cannot be used .* set MODELSCOPE_DOMAIN"):
        resolve_model("modelscope:org/name", cache=cache)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["org/name", "modelscope:org/name"])
def test_a_converted_folder_by_hub_name(
    hub: Hub, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a file of `manta convert` that is not fetched, so that the folder loads as another."""
    target = tmp_path / "converted"
    convert(EngineConfig(model=str(hub.folder), device="cpu", dtype="float32"), target)

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        folder = tmp_path / "snapshot"
        folder.mkdir(exist_ok=True)
        for file in target.iterdir():
            if any(fnmatch(file.name, pattern) for pattern in allow_patterns):
                shutil.copy(file, folder)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    hub.folder = target
    folder = resolve_model(name, cache=tmp_path / "cache")
    assert {file.name for file in folder.iterdir()} >= {file.name for file in target.iterdir()}
    assert damaged(folder) == damaged(target) == []
    with LLM(folder, device="cpu", dtype="float32", max_model_len=32) as llm:
        (output,) = llm.generate(["a b"], SamplingParams(max_tokens=4, temperature=0.0))
    assert len(output.outputs[0].token_ids) == 4
