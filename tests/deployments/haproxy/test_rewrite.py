"""The rewriting alone: Serve's template of this release of Ray, and of one that has changed."""

import os
import subprocess
from pathlib import Path

import pytest

from deployments.haproxy.launch import complaint
from deployments.haproxy.rewrite import TemplateChanged, rewrite
from deployments.haproxy.settings import EdgeSettings
from engine.errors import ConfigError
from tests.deployments.haproxy.edge import launcher, served

SETTINGS = EdgeSettings(host="::")


def rewritten(text: str, folder: Path) -> str:
    return rewrite(text, SETTINGS, folder, 65536, folder / "cli.sock")


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> str:
    return served(tmp_path_factory.mktemp("serve"), 8000, [30000]).read_text()


def test_streams_cost_haproxy_nothing_more(template: str, tmp_path: Path) -> None:
    """Bug: a filter, a log or a rule on each chunk of an answer."""
    before, after = template.splitlines(), rewritten(template, tmp_path).splitlines()
    new = {line.strip() for line in after} - {line.strip() for line in before}
    on_answers = (
        "filter",
        "http-response",
        "http-after-response",
        "compression",
        "log",
        "tcp-response",
    )
    refused = "{ status 429 503 } { res.hdr(retry-after) -m found }"
    silent = f"http-response set-log-level silent if {refused}"
    assert [line for line in new if line.startswith(on_answers)] == [silent], "once an answer"
    gone = {line.strip() for line in before} - {line.strip() for line in after}
    threads = f"nbthread {min(4, len(os.sched_getaffinity(0)))}"
    assert len(gone) == 10 + (f"    {threads}" not in before), gone
    assert threads in {line.strip() for line in after}


LINES = [
    "    stats socket",
    "    maxconn",
    "    tune.bufsize",
    "    errorfile 503",
    "    bind :",
    "    bind 127.0.0.1:8000",
    "  bind *:",
    "    http-request return status 404",
    "frontend prometheus",
    "listen stats",
]


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("change", ["missing", "twice", "another"])
def test_a_template_that_has_changed_is_refused(
    template: str, tmp_path: Path, line: str, change: str
) -> None:
    """Bug: with a newer Ray a setting finds no place, and statistics are open to everyone again."""
    lines = template.splitlines(keepends=True)
    index = next(n for n, text in enumerate(lines) if text.startswith(line))
    new = {
        "missing": "",
        "twice": lines[index] * 2,
        "another": line.replace(line.strip(), "other-" + line.strip()) + " x\n",
    }
    lines[index] = new[change]
    with pytest.raises(TemplateChanged, match="another release of Manta"):
        rewritten("".join(lines), tmp_path)


def test_a_listener_that_nobody_knows_is_refused(template: str, tmp_path: Path) -> None:
    """Bug: a port that a newer Ray opens on all interfaces goes unnoticed."""
    with pytest.raises(TemplateChanged, match="4 listeners"):
        rewritten(f"{template}frontend new\n    bind *:9000\n", tmp_path)


def test_why_haproxy_did_not_start_is_told(
    tmp_path: Path, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: `manta serve` says that nothing answers, and the reason lies in a file of Serve's."""
    node = tmp_path / "node"
    node.mkdir()
    (node / "haproxy.cfg").write_text(template.replace("mode 666", "mode 664"))
    command, environment = launcher(tmp_path, EdgeSettings())
    command[command.index("-f") + 1] = str(node / "haproxy.cfg")
    with (node / "admin.sock.1.1.stderr.log").open("wb") as log:
        assert subprocess.run(command, env=environment, stderr=log).returncode == 1
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", command[0])
    assert complaint().startswith("Ray Serve's HAProxy configuration is not as expected: 0 lines")
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", "")
    assert complaint() == ""


def test_settings_travel_whole() -> None:
    """Bug: a misspelt setting of a cluster's environment is dropped."""
    assert EdgeSettings.decode(SETTINGS.encode()) == SETTINGS
    assert EdgeSettings.decode("") == EdgeSettings()
    with pytest.raises(ConfigError, match=r"MANTA_EDGE: .*hots"):
        EdgeSettings.decode('{"hots": "0.0.0.0"}')
