"""deploy/install.py: what a fresh machine gets from `make demo` and `make test`."""

import ast
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "deploy" / "install.py"


@pytest.fixture(scope="module")
def install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["install"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


# -- pip's settings


def pip_config(environment: dict[str, str], *arguments: str) -> str:
    """Return what `pip config` prints."""
    command = [sys.executable, "-m", "pip", "config", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout


def test_settings_are_those_that_pip_reads(install: ModuleType, tmp_path: Path) -> None:
    """uv reads nothing of pip's: a machine behind a company's mirror could install nothing."""
    files = {
        "xdg/pip/pip.conf": "[global]\nindex-url = https://a/simple\ntimeout = 7\n",
        "home/.pip/pip.conf": "[global]\nextra-index-url = https://old/simple\n",
        "home/.config/pip/pip.conf": (
            "[global]\nextra_index_url =\n    https://b/simple\n    https://c/simple\n"
            "[install]\nindex-url = https://d/100%25/simple\nno-index = no\n[list]\nformat = json\n"
        ),
        "own.conf": "[global]\ntrusted-host = e f\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    clean |= {"HOME": str(tmp_path / "home"), "XDG_CONFIG_DIRS": str(tmp_path / "xdg")}
    clean.pop("XDG_CONFIG_HOME", None)
    variables = (
        {},
        {"PIP_INDEX_URL": "https://g/simple", "PIP_FIND_LINKS": "/wheels /more"},
        {"PIP_CONFIG_FILE": str(tmp_path / "own.conf")},
        {"PIP_CONFIG_FILE": str(tmp_path / "missing.conf")},
        {"PIP_CONFIG_FILE": os.devnull, "PIP_CERT": "/ca.pem"},
    )
    for more in variables:
        environment = {**clean, **more}
        sections: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
        for line in pip_config(environment, "list").splitlines():
            key, _, value = line.partition("=")
            section, _, name = key.partition(".")
            if section not in sections or name == "config-file":
                continue
            if name in sections[section]:  # of two files, which pip lists by their names
                sections[section][name] = pip_config(environment, "get", key).removesuffix("\n")
            else:
                sections[section][name] = ast.literal_eval(value)
        theirs = {**sections["global"], **sections["install"], **sections[":env:"]}
        assert install.pip_settings(environment, sys.prefix) == theirs, more


def test_settings_become_uvs(install: ModuleType) -> None:
    """A mirror, a folder of wheels or a constraint that is dropped is another installation."""
    settings = {
        "index-url": "https://a/simple",
        "extra-index-url": "\nhttps://b/simple\nhttps://c/simple",
        "find-links": "/wheels",
        "constraint": "/etc/c.txt",
        "cert": "/ca.pem",
        "default-timeout": "180",
        "pre": "false",
        "no-cache-dir": "true",
        "progress-bar": "off",
    }
    options = install.uv_options(settings, ["-f", "/more", "--trusted-host=h", "-i", "https://z"])
    assert options.unknown == []
    assert options.environment == {"SSL_CERT_FILE": "/ca.pem", "UV_HTTP_TIMEOUT": "180"}
    assert options.resolving == [
        *("--extra-index-url", "https://b/simple", "--extra-index-url", "https://c/simple"),
        *("--find-links", "/wheels", "--constraint", "/etc/c.txt", "--no-cache"),
        *("--find-links", "/more", "--allow-insecure-host", "h", "--default-index", "https://z"),
        "--index-strategy=unsafe-best-match",
    ]
    assert install.uv_options({"platform": "any"}, ["--root", "/x"]).unknown == [
        "platform",
        "root",
        "/x",
    ]


# -- what is there already


def stamped(venv: Path, version: str, made_at: Path | None = None) -> Path:
    """Return an environment's folder whose Python claims to be of this version."""
    python = venv / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\necho {version.replace('.', ' ')}\n", "utf-8")
    python.chmod(0o755)
    (venv / ".installed.json").write_text(json.dumps({"venv": str(made_at or venv)}), "utf-8")
    return venv


def test_an_environment_that_cannot_stay_is_noticed(install: ModuleType, tmp_path: Path) -> None:
    """On Ubuntu 22.04 the .venv of Python 3.10 stayed after 3.11 was installed, and pip refused
    Manta for ever."""
    here = ".".join(map(str, sys.version_info[:2]))
    assert install.unusable(tmp_path / "none", None) == ""
    assert install.unusable(stamped(tmp_path / "good", here), None) == ""
    assert "Python 3.10" in install.unusable(stamped(tmp_path / "old", "3.10"), None)
    assert "Python 3.15" in install.unusable(stamped(tmp_path / "new", "3.15"), None)
    moved = stamped(tmp_path / "moved", here, Path("/elsewhere/.venv"))
    assert "/elsewhere/.venv" in install.unusable(moved, None)
    another = "3.12" if here != "3.12" else "3.13"
    asked = stamped(tmp_path / "asked", another)
    assert install.unusable(asked, None) == ""
    assert f"it has Python {another}" in install.unusable(asked, f"python{here}")
    gone = tmp_path / "gone"
    (gone / "bin").mkdir(parents=True)
    (gone / "bin" / "python").symlink_to("/nowhere/python3.11")
    assert install.unusable(gone, None) == "its Python is gone"


def test_an_unsupported_python_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    """Its resolver would say after a minute that no version of Manta fits."""
    code = (
        "import runpy, sys; sys.version_info = (3, 10, 4, 'final', 0); "
        f"sys.argv = ['install.py', '--venv', {str(tmp_path / 'v')!r}]; "
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and not (tmp_path / "v").exists()
    assert "Python 3.10" in done.stderr and "PYTHON=" in done.stderr


def test_the_demo_installs_what_it_runs(
    install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo installed the type checker and 48 packages of test clients; what `make test` adds
    must not go when the demo runs again."""
    calls: list[tuple[tuple[str, ...], bool]] = []
    monkeypatch.setattr(
        install.Installer, "install", lambda self: calls.append((self.extras, self.tests))
    )
    venv = tmp_path / ".venv"

    def ensure(*extras: str, tests: bool = False) -> None:
        python = venv / "bin" / "python"
        if not python.exists():
            python.parent.mkdir(parents=True)
            python.symlink_to(sys.executable)
        install.ensure(venv, extras, tests, None)

    ensure()
    ensure()
    ensure("dev", tests=True)
    ensure()
    ensure("gcp")
    ensure("dev", tests=True)
    assert calls == [((), False), (("dev",), True), (("dev", "gcp"), True)]


# -- PyTorch without CUDA


@pytest.fixture
def index() -> Iterator[str]:
    """Yield the URL of a package index that has torch alone."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/cpu/torch/" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_an_index_without_cuda_is_taken_where_it_answers(
    install: ModuleType,
    index: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A machine without a GPU fetched 3 GB of CUDA without a word."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert install.answers(f"{index}/cpu", None)
    assert not install.answers(f"{index}/other", None)
    assert not install.answers("http://127.0.0.1:1", None)
    monkeypatch.setattr(install, "has_gpu", lambda: False)
    cases = {f"{index}/cpu": True, f"{index}/other": False, "": False}
    for url, taken in cases.items():
        commands: list[list[str]] = []

        def run(
            self: object, command: list[str], _: object, ran: list[list[str]] = commands
        ) -> None:
            ran.append(command)
            if "--output-file" in command:
                cuda = "--extra-index-url" not in command
                path = Path(command[command.index("--output-file") + 1])
                path.parent.mkdir(exist_ok=True)
                path.write_text("torch==1\n" + "nvidia-cublas==1\n" * cuda, "utf-8")

        monkeypatch.setattr(install.Installer, "_run", run)
        installer = install.Installer(tmp_path / ".venv", (), False, [], {}, url)
        installer._with_uv("uv", install.uv_options({}, []))
        (installed,) = [command for command in commands if "--editable" in command]
        assert (["--extra-index-url", url] == installed[6:8]) == taken, installed
        said = capsys.readouterr().out
        assert ("saves about 3 GB" in said) == taken
        assert ("TORCH_CPU_INDEX" in said) == (bool(url) and not taken)
