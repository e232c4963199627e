"""Install Manta from this checkout into .venv. The Makefile calls it, with nothing but Python.

    python3 deploy/install.py                    what runs
    python3 deploy/install.py --extras aws       and what the head of a cluster on AWS needs
    python3 deploy/install.py --tests            everything, with the clients that tests drive

uv does it where it is there or can be had, else pip. uv reads nothing of pip's, so pip's settings
(files, PIP_*, PIP_ARGS) are translated; one that has no counterpart makes pip do it. A machine
without an NVIDIA GPU gets PyTorch without CUDA where the index of such builds answers. A second
call with nothing to do takes a moment.

  PIP_ARGS          more arguments, as pip has them
  TORCH_CPU_INDEX   PyTorch's index of builds without CUDA, or a mirror of it; empty: do not ask it
"""

from __future__ import annotations

import argparse
import configparser
import hashlib
import json
import os
import shlex
import shutil
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OLDEST, NEWEST = (3, 11), (3, 14)
SUPPORTED = "Python 3.11 to 3.14"
BESIDE = ("openai-1", "clients", "trainers")  # tests/NAME.txt goes into .venv/NAME
# PyTorch's own, as its install page has it. tests/test_tree.py looks for addresses of registries
# that slip in; this one is meant, and is written in two parts.
TORCH_CPU_INDEX = "https://download.pytorch.org/" + "whl/cpu"
PROBE_S = 4.0
STAMP = ".installed.json"
# What a start of `manta serve` imports, in the two kinds of processes that do. Python compiles a
# module at its first import, and Ray's processes would compile the same ones at the same time.
FIRST_IMPORTS = (
    "import ray.serve._private.controller, deployments.demo, deployments.app, deployments.router",
    "import torch, engine.factory, engine.process.main, deployments.replica",
)
# And what Ray's own processes import, besides.
COMPILED = (
    *("ray/_private", "ray/autoscaler", "ray/core/generated", "ray/dashboard", "ray/util"),
    *("aiohttp", "aiohttp_cors", "colorful", "opencensus", "opentelemetry", "prometheus_client"),
    *("uvicorn", "websockets", "yarl"),
)


class InstallError(Exception):
    """An error that the user can mend."""


# -- pip's settings

# Of pip, to uv's options: those that take a value, repeat with each word, or take none.
_ONE = {"index-url": "--default-index", "keyring-provider": "--keyring-provider"}
_EACH = {
    "constraint": "--constraint",
    "extra-index-url": "--extra-index-url",
    "find-links": "--find-links",
    "no-binary": "--no-binary",
    "only-binary": "--only-binary",
    "trusted-host": "--allow-insecure-host",
}
_FLAG = {
    "no-build-isolation": "--no-build-isolation",
    "no-cache-dir": "--no-cache",
    "no-index": "--no-index",
    "pre": "--prerelease=allow",
    "require-hashes": "--require-hashes",
}
_VARIABLE = {
    "cert": ("SSL_CERT_FILE",),
    "client-cert": ("SSL_CLIENT_CERT",),
    "default-timeout": ("UV_HTTP_TIMEOUT",),
    "proxy": ("HTTP_PROXY", "HTTPS_PROXY"),
    "retries": ("UV_HTTP_RETRIES",),
    "timeout": ("UV_HTTP_TIMEOUT",),
}
# These change what pip prints or where it keeps things, and not what is installed here.
_WITHOUT_EFFECT = {
    "break-system-packages",
    "cache-dir",
    "compile",
    "config-file",
    "debug",
    "disable-pip-version-check",
    "exists-action",
    "log",
    "log-file",
    "no-clean",
    "no-color",
    "no-compile",
    "no-input",
    "no-python-version-warning",
    "no-warn-conflicts",
    "no-warn-script-location",
    "prefer-binary",
    "progress-bar",
    "quiet",
    "require-virtualenv",
    "root-user-action",
    "upgrade",
    "upgrade-strategy",
    "use-feature",
    "use-pep517",
    "user",
    "verbose",
}
_SHORT = {"-c": "constraint", "-f": "find-links", "-i": "index-url", "-q": "quiet", "-v": "verbose"}
_TRUE = {"1", "on", "t", "true", "y", "yes"}


def config_files(environment: Mapping[str, str], prefix: str) -> list[Path]:
    """List the files that pip reads, a later one over an earlier. prefix: of the interpreter."""
    named = environment.get("PIP_CONFIG_FILE")
    if named == os.devnull:
        return []
    home = Path(environment.get("HOME") or Path.home())
    shared = (environment.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(os.pathsep)
    own = Path(environment.get("XDG_CONFIG_HOME") or home / ".config")
    files = [Path(folder) / "pip" / "pip.conf" for folder in shared if folder]
    files.append(Path("/etc/pip.conf"))
    if not (named and Path(named).exists()):
        files += [home / ".pip" / "pip.conf", own / "pip" / "pip.conf"]
    files.append(Path(prefix) / "pip.conf")
    return files + ([Path(named)] if named else [])


def pip_settings(environment: Mapping[str, str], prefix: str) -> dict[str, str]:
    """Options of `pip install` by their long names, from its files and its variables. Raises
    InstallError for a file that is none of pip's."""
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}}
    for path in config_files(environment, prefix):
        parser = configparser.RawConfigParser()
        try:
            parser.read(path, "utf-8")
        except (configparser.Error, UnicodeDecodeError, OSError) as error:
            raise InstallError(f"pip's settings in {path} cannot be read: {error}") from error
        for section, options in sections.items():
            if parser.has_section(section):
                options.update((_long(name), value) for name, value in parser.items(section))
    settings = {**sections["global"], **sections["install"]}
    for name, value in environment.items():
        if name.startswith("PIP_") and name not in ("PIP_ARGS", "PIP_CONFIG_FILE") and value:
            settings[_long(name.removeprefix("PIP_"))] = value
    return settings


def _long(name: str) -> str:
    return name.lower().replace("_", "-").removeprefix("--")


@dataclass
class UvOptions:
    """uv's options. resolving: arguments for whatever resolves or installs. environment: variables.
    unknown: what pip is told that uv cannot be."""

    resolving: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    def add(self, name: str, value: str) -> None:
        """One setting of pip's, as its file or a variable has it."""
        if name in _ONE:
            self.resolving += [_ONE[name], value]
        elif name in _EACH:
            for word in value.split():
                self.resolving += [_EACH[name], word]
        elif name in _FLAG:
            if value.lower() in _TRUE:
                self.resolving.append(_FLAG[name])
        elif name in _VARIABLE:
            self.environment.update(dict.fromkeys(_VARIABLE[name], value))
        elif name not in _WITHOUT_EFFECT:
            self.unknown.append(name)


def uv_options(settings: Mapping[str, str], arguments: Sequence[str]) -> UvOptions:
    """Translate pip's settings to uv. settings: of `pip_settings`. arguments: of PIP_ARGS, which
    come on top."""
    options = UvOptions()
    own = list(_parsed(arguments))
    replaced = {name for name, _ in own} & _ONE.keys()
    for name, value in settings.items():
        if name not in replaced:
            options.add(name, value)
    for name, value in own:
        options.add(name, value)
    # An index beside another adds to it, as with pip. By itself, uv takes the first with the name.
    options.resolving.append("--index-strategy=unsafe-best-match")
    return options


def _parsed(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """Parse pip's options and their values; what is no option keeps its text as its name."""
    pairs = []
    words = iter(arguments)
    for word in words:
        head, equals, value = word.partition("=")
        name = _SHORT.get(head, head.removeprefix("--") if head.startswith("--") else head)
        if name in {*_ONE, *_EACH, *_VARIABLE, "progress-bar", "log", "cache-dir", "use-feature"}:
            pairs.append((name, value if equals else next(words, "")))
        else:
            pairs.append((name, value if equals else "true"))
    return pairs


# -- the environment


def unusable(venv: Path, python: str | None) -> str:
    """Why a folder cannot stay as it is; empty if it can, or if there is none. python: the
    interpreter that the user asks for."""
    if not venv.exists():
        return ""
    executable = venv / "bin" / "python"
    done = (
        subprocess.run(
            [str(executable), "-c", "import sys; print(*sys.version_info[:2])"],
            capture_output=True,
            text=True,
            check=False,
        )
        if executable.exists()
        else None
    )
    if done is None or done.returncode:
        return "its Python is gone"
    version = tuple(int(part) for part in done.stdout.split())
    if not OLDEST <= version <= NEWEST:
        return f"it has Python {_dotted(version)}, and Manta needs {SUPPORTED}"
    if python and version != sys.version_info[:2]:
        return f"it has Python {_dotted(version)}, and {python} is asked for"
    made_at = _stamp(venv).get("venv", str(venv))
    if made_at != str(venv):
        return f"it was made at {made_at}, which its programs name"
    return ""


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def _stamp(venv: Path) -> dict[str, object]:
    try:
        read = json.loads((venv / STAMP).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


def _digest() -> str:
    """Hash what decides what is installed."""
    names = ["pyproject.toml", "constraints.txt", *(f"tests/{name}.txt" for name in BESIDE)]
    state = hashlib.sha256()
    for name in names:
        path = ROOT / name
        state.update(path.read_bytes() if path.exists() else b"")
    return state.hexdigest()


def has_gpu() -> bool:
    """Whether there are signs of NVIDIA's driver, WSL's included."""
    signs = ("/dev/nvidiactl", "/dev/nvidia0", "/proc/driver/nvidia", "/usr/lib/wsl/lib/nvidia-smi")
    return any(Path(sign).exists() for sign in signs) or shutil.which("nvidia-smi") is not None


def answers(index: str, certificates: str | None) -> bool:
    """Whether an index has PyTorch, within PROBE_S. A name server may take longer than any time-out
    of a connection, so the question is put in a thread that nobody waits for."""
    checks: list[bool] = []

    def ask() -> None:
        try:
            url = f"{index.rstrip('/')}/torch/"
            if url.startswith("file://"):
                checks.append(Path(urllib.request.url2pathname(url[7:])).exists())
                return
            context = ssl.create_default_context(cafile=certificates)
            with urllib.request.urlopen(url, timeout=PROBE_S, context=context) as page:
                checks.append(page.status == 200)
        except (OSError, ValueError):
            pass

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PROBE_S)
    return checks == [True]


# -- installing


_started = time.monotonic()


def say(text: str) -> None:
    """A step, with the seconds since the start."""
    print(f"== {time.monotonic() - _started:3.0f} s  {text}", flush=True)


@dataclass
class Installer:
    """The installation. venv: the folder. extras: of pyproject.toml. tests: whether the clients
    beside come too."""

    venv: Path
    extras: tuple[str, ...]
    tests: bool
    pip_args: list[str]
    settings: dict[str, str]
    cpu_index: str

    @property
    def python(self) -> str:
        return str(self.venv / "bin" / "python")

    def install(self) -> None:
        """Raises InstallError."""
        options = uv_options(self.settings, self.pip_args)
        uv = "" if options.unknown else self._uv()
        if uv:
            self._with_uv(uv, options)
        else:
            if options.unknown:
                names = ", ".join(options.unknown)
                say(f"Installing with pip: uv has no counterpart of pip's settings {names}")
            else:
                say("Installing with pip, which takes longer: uv is not here and could not be had")
            self._with_pip()
        self._compile()

    # uv

    def _uv(self) -> str:
        """Return uv's path, fetched if it is not there; empty if it cannot be had."""
        if program := shutil.which("uv"):
            return program
        private = self.venv / "uv"
        if (private / "bin" / "uv").exists():
            return str(private / "bin" / "uv")
        base = [sys.executable, "-m", "pip"]
        if subprocess.run([*base, "--version"], capture_output=True, check=False).returncode:
            if not self._venv_with_pip():
                return ""
            base = [self.python, "-m", "pip"]
        say("Fetching uv")
        pins = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
        pinned = next((line for line in pins if line.startswith("uv==")), "uv")
        command = [*base, "install", *self.pip_args, "--quiet", "--only-binary=uv", "--target"]
        environment = {**os.environ, "PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        done = subprocess.run([*command, str(private), pinned], env=environment, check=False)
        return str(private / "bin" / "uv") if done.returncode == 0 else ""

    def _with_uv(self, uv: str, options: UvOptions) -> None:
        environment = {
            # Certificates of the system, as pip takes them: UV_NATIVE_TLS until uv 0.11.
            "UV_SYSTEM_CERTS": "1",
            "UV_NATIVE_TLS": "1",
            "UV_HTTP_TIMEOUT": "180",
            **os.environ,
            **options.environment,
        }
        if not (self.venv / "bin" / "python").exists():
            self._run(
                [
                    uv,
                    "venv",
                    "--quiet",
                    "--allow-existing",
                    "--python",
                    sys.executable,
                    str(self.venv),
                ],
                environment,
            )
        say("Resolving")
        resolved = self.venv / "resolved.txt"
        more: list[str] = []

        def resolve() -> list[str]:
            self._run(
                [
                    uv,
                    "pip",
                    "compile",
                    "--quiet",
                    "--no-header",
                    "--no-annotate",
                    "--python",
                    self.python,
                    "--constraint",
                    str(ROOT / "constraints.txt"),
                    *(f"--extra={extra}" for extra in self.extras),
                    *options.resolving,
                    *more,
                    "--output-file",
                    str(resolved),
                    str(ROOT / "pyproject.toml"),
                ],
                environment,
            )
            return resolved.read_text("utf-8").splitlines()

        lines = resolve()
        cuda = any(line.startswith("nvidia-") for line in lines)
        if cuda and not has_gpu() and self._cpu_index_answers():
            more = ["--extra-index-url", self.cpu_index]
            lines = resolve()
        elif not cuda and has_gpu():
            say("This machine has an NVIDIA GPU, but pip's settings lead to a PyTorch without CUDA")
        say(f"Installing {len(lines)} packages into {self.venv.name}")
        self._run(
            [
                uv,
                "pip",
                "install",
                "--python",
                self.python,
                *options.resolving,
                *more,
                "--no-deps",
                "--requirement",
                str(resolved),
                "--editable",
                str(ROOT),
            ],
            environment,
        )
        # A requirement beside the pins: `manta serve default` and people's habits want it.
        self._run(
            [uv, "pip", "install", "--quiet", "--python", self.python, *options.resolving, "pip"],
            environment,
        )
        install = [uv, "pip", "install", "--quiet", "--python", self.python]
        self._install_beside([*install, *options.resolving], environment)

    def _cpu_index_answers(self) -> bool:
        """Whether PyTorch without CUDA can be had; says what it saves."""
        if not self.cpu_index:
            return False
        if answers(self.cpu_index, self.settings.get("cert")):
            say("No NVIDIA GPU here: PyTorch without CUDA, which saves about 3 GB")
            return True
        say(
            "No NVIDIA GPU here, and PyTorch's index of builds without CUDA does not answer "
            f"({self.cpu_index}): about 3 GB of CUDA come with PyTorch. What saves them: "
            "TORCH_CPU_INDEX=URL of a mirror, or PIP_ARGS='--find-links FOLDER' with such a wheel"
        )
        return False

    # pip

    def _venv_with_pip(self) -> bool:
        """Whether the environment has pip now."""
        if not (self.venv / "bin" / "python").exists():
            command = [sys.executable, "-m", "venv", str(self.venv)]
            if subprocess.run(command, capture_output=True, check=False).returncode:
                shutil.rmtree(self.venv, ignore_errors=True)
                return False
        check = [self.python, "-m", "pip", "--version"]
        if subprocess.run(check, capture_output=True, check=False).returncode:
            check = [self.python, "-m", "ensurepip", "--upgrade"]
            return subprocess.run(check, capture_output=True, check=False).returncode == 0
        return True

    def _with_pip(self) -> None:
        if not self._venv_with_pip():
            raise InstallError(
                f"{sys.executable} cannot make an environment with pip, and uv is not here: "
                "apt-get install python3-venv, or install uv, or PYTHON=... make"
            )
        environment = {**os.environ, "PIP_USER": "0"}
        more: list[str] = []
        if not has_gpu() and self._cpu_index_answers():
            more = ["--extra-index-url", self.cpu_index]
        extras = f"[{','.join(self.extras)}]" if self.extras else ""
        pip = [self.python, "-m", "pip", "install", *self.pip_args, "--no-compile"]
        self._run(
            [*pip, *more, "-c", str(ROOT / "constraints.txt"), "-e", f"{ROOT}{extras}"], environment
        )
        self._install_beside([*pip, "--upgrade"], environment)

    # both

    def _install_beside(self, install: list[str], environment: dict[str, str]) -> None:
        """Install the packages of other versions that tests drive, each file into its folder."""
        for name in BESIDE if self.tests else ():
            target, requirements = self.venv / name, ROOT / "tests" / f"{name}.txt"
            self._run(
                [*install, "--no-deps", "--target", str(target), "-r", str(requirements)],
                environment,
            )

    def _compile(self) -> None:
        """Whatever fails here fails at the start as well, and says there why."""
        say("Compiling what a start imports")
        environment = {**os.environ}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        packages = next(self.venv.glob("lib/python*/site-packages"))
        ours = [str(ROOT / name) for name in ("deployments", "engine", "kernels")]
        theirs = [str(packages / name) for name in COMPILED]
        commands = [["-c", code] for code in FIRST_IMPORTS]
        commands.append(["-m", "compileall", "-q", *ours, *theirs])
        quiet = subprocess.DEVNULL
        running = [
            subprocess.Popen(
                [self.python, *command],
                cwd=ROOT,
                env=environment,
                stdin=quiet,
                stdout=quiet,
                stderr=quiet,
            )
            for command in commands
        ]
        for process in running:
            process.wait()

    def _run(self, command: list[str], environment: Mapping[str, str]) -> None:
        done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
        if done.returncode:
            raise InstallError(
                f"{shlex.join(command[:3])} ended with exit code {done.returncode}; its reason is "
                "above. pip's settings and PIP_ARGS say which index is asked: docs/install.md"
            )


def ensure(venv: Path, extras: Sequence[str], tests: bool, python: str | None) -> None:
    """Make the environment have these, whatever there is. Raises InstallError."""
    if why := unusable(venv, python):
        say(f"Making {venv.name} anew: {why}")
        shutil.rmtree(venv)
    stamp = _stamp(venv)
    state = {"digest": _digest(), "venv": str(venv)}
    current = all(stamp.get(name) == value for name, value in state.items())
    before = stamp.get("parts") if current else []
    had = set(before) if isinstance(before, list) else set()
    wanted = {"run", *extras, *(["tests"] if tests else [])}
    if wanted <= had:
        return
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        raise InstallError(
            f"{sys.executable} is Python {_dotted(sys.version_info[:2])}, and Manta needs "
            f"{SUPPORTED}: install one, or PYTHON=/path/to/python3.12 make"
        )
    parts = wanted | had
    venv.mkdir(exist_ok=True)
    (venv / STAMP).unlink(missing_ok=True)
    Installer(
        venv,
        tuple(sorted(parts - {"run", "tests"})),
        "tests" in parts,
        shlex.split(os.environ.get("PIP_ARGS", "")),
        pip_settings(os.environ, sys.prefix),
        os.environ.get("TORCH_CPU_INDEX", TORCH_CPU_INDEX),
    ).install()
    (venv / STAMP).write_text(json.dumps({**state, "parts": sorted(parts)}), "utf-8")
    say("Installed")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--extras", default="", help="of pyproject.toml, with commas or spaces")
    parser.add_argument("--tests", action="store_true", help="what the tests need, too")
    parser.add_argument("--python", help="the interpreter that the user asks for, by name")
    options = parser.parse_args()
    extras = options.extras.replace(",", " ").split()
    if options.tests:
        extras.append("dev")
    try:
        ensure(options.venv.absolute(), extras, options.tests, options.python)
    except InstallError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
