"""The rewriting of the HAProxy configuration that Serve renders.

Each change has a pattern for the line that it replaces. A missing or repeated line is an error, as
is an unknown listener.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from deployments.api.http.errors import ApiError
from deployments.haproxy import refusals
from deployments.haproxy.settings import EdgeSettings
from engine.errors import MantaError

_LOOPBACK = "127.0.0.1"
_SPARE_FILES = 256  # number of open files besides connections: listeners, checks, logs, libraries
# HAProxy accepts more headers than routers do, because its parser would refuse them in HTML.
_MAX_HEADERS = 1024
# Share of the maximum number of connections above which requests get an error response.
_SHED = 0.95
_STATS_SOCKET = r"stats socket (\S+) mode 666 (level admin expose-fd listeners)"


class TemplateChanged(MantaError):
    """The error for a configuration of Serve in an unknown form, for example from another Ray
    release."""

    code = "haproxy_template_changed"


def admin_socket(text: str) -> Path:
    """Return the path of the socket on which Serve sends commands to HAProxy.

    text: the configuration that Serve has rendered.

    Raises TemplateChanged.
    """
    return Path(_HaproxyFile(text).section("global").match(_STATS_SOCKET)[1])


def rewrite(
    text: str, settings: EdgeSettings, folder: Path, open_files: int, commands: Path
) -> str:
    """Return the rewritten HAProxy configuration. text: the configuration that Serve has rendered.

    folder: folder for error responses and the certificate, private to this process.
    open_files: limit of the process's open files.
    commands: path of the socket on which HAProxy takes commands.

    Raises TemplateChanged; OSError if a file cannot be read or written.
    """
    # A connection needs two sockets, and HAProxy reserves a pipe for every fourth connection.
    connections = max(1, min(settings.connections, (open_files - _SPARE_FILES) * 2 // 5))
    file = _HaproxyFile(text)
    main = file.section("global")
    main.change(_STATS_SOCKET, rf"stats socket {commands} mode 600 \2")
    main.change(r"maxconn \d+", f"maxconn {connections}")
    # A new connection wakes all threads, so more threads than cores only cost time.
    threads = min(int(main.match(r"nbthread (\d+)")[1]), len(os.sched_getaffinity(0)))
    main.change(r"nbthread \d+", f"nbthread {threads}")
    main.change(r"tune\.bufsize \d+", f"tune.bufsize {refusals.BUFFER_BYTES}")
    main.add_line(f"tune.http.maxhdr {_MAX_HEADERS}")
    _defaults(file.section("defaults"), settings, folder)
    for name in ("frontend prometheus", "listen stats"):
        file.section(name).change(r"bind (?:\*|):(\d+)", rf"bind {_LOOPBACK}:\1")
    _frontend(file.section("frontend http_frontend"), settings, folder, connections)
    nowhere = f"http-request {refusals.returned(refusals.NOWHERE, folder / '404.json')}"
    if settings.prefix:
        # Serve's default backend gets requests that match no other backend: all requests while no
        # router is known.
        below = f"{{ path_beg {settings.prefix.rstrip('/')}/ }}"
        early = refusals.returned(refusals.UNREACHABLE, folder / "early.json")
        nowhere = f"http-request {early} if {below}\n    {nowhere}"
    file.section("backend default_backend").change(r"http-request return status 404 .*", nowhere)
    file.check_listeners(3)
    if settings.certificate:
        main.add_line("ssl-default-bind-options ssl-min-ver TLSv1.2")
    return file.text()


def _defaults(section: "_HaproxySection", settings: EdgeSettings, folder: Path) -> None:
    section.absent("timeout http-request")
    # Maximum time for a request head. HAProxy counts from the head's first byte or, on a new
    # connection, from the connection's beginning.
    section.add_line(f"timeout http-request {settings.request_seconds}s")
    files = refusals.write_own(folder)
    for status in (502, 503, 504):
        section.change(rf"errorfile {status} \S+", f"errorfile {status} {files.pop(status)}")
    for status, file in files.items():
        section.add_line(f"errorfile {status} {file}")


def _frontend(
    section: "_HaproxySection", settings: EdgeSettings, folder: Path, connections: int
) -> None:
    def answer(error: ApiError, name: str, condition: str) -> str:
        returned = refusals.returned(error, folder / f"{name}.json")
        return f"http-request {returned} if {condition}"

    match = section.match(r"bind (\S+):(\d+)")
    bind = f"bind {_listen_at(settings.host or match[1], match[2])}"
    if settings.certificate:
        pem = folder / "edge.pem"
        pem.touch(0o600)
        pem.write_bytes(
            Path(settings.certificate).read_bytes() + b"\n" + Path(settings.key).read_bytes()
        )
        bind += f" ssl crt {pem} alpn h2,http/1.1"
    rules = []
    if settings.connections_per_address:
        bound = max(1, min(settings.connections_per_address, connections // 2))
        rules += [
            "stick-table type ipv6 size 100k expire 1m store conn_cur",
            "tcp-request connection track-sc0 src",
            # Up to an eighth above the limit, connections are accepted but get an error response.
            f"tcp-request connection reject if {{ sc0_conn_cur gt {bound + bound // 8} }}",
        ]
    rules += [
        answer(refusals.VERSION, "version", "!{ req.ver 1.0 1.1 2.0 }"),
        answer(refusals.NO_HOST, "host", "{ req.ver 1.1 } !{ req.hdr(host) -m found }"),
    ]
    own_path = "!{ path_beg /-/ }"  # load balancers check this node's health there
    if settings.connections_per_address:
        rules.append(
            answer(refusals.ADDRESS_FULL, "address", f"{{ sc0_conn_cur gt {bound} }} {own_path}")
        )
    shed = f"{{ fe_conn gt {max(1, int(connections * _SHED))} }} {own_path}"
    rules += [
        answer(refusals.FULL, "full", shed),
        # A fully buffered request can be retried at another router, if the first router ends before
        # it has sent a byte. Larger requests are forwarded immediately; routers have their own time
        # limits.
        f"http-request wait-for-body time {settings.request_seconds}s "
        f"if {{ req.body_size lt {refusals.REQUEST_BYTES} }}",
        # Routers count their refusals. HAProxy does not log them, because two log lines, one of
        # which Serve's actor reads in Python, are a third of a refusal's cost.
        "http-response set-log-level silent "
        "if { status 429 503 } { res.hdr(retry-after) -m found }",
    ]
    section.change(r"bind \S+:\d+", "\n    ".join([bind, *rules]))


def _listen_at(host: str, port: str) -> str:
    """Return the address for a `bind` line. IPv6's wildcard address also accepts IPv4."""
    if host in ("0.0.0.0", "*"):
        return f"*:{port}"
    if ":" not in host:
        return f"{host}:{port}"
    return f"[{host.strip('[]')}]:{port}" + " v4v6" * (host == "::")


class _HaproxyFile:
    def __init__(self, text: str) -> None:
        self._sections: list[_HaproxySection] = []
        lines: list[str] = []
        for line in text.splitlines():
            if line[:1] not in ("", " ", "\t", "#"):
                lines = []
                self._sections.append(_HaproxySection(line.strip(), lines))
            lines.append(line)

    def section(self, title: str) -> "_HaproxySection":
        sections = [section for section in self._sections if section.title == title]
        if len(sections) != 1:
            raise _changed(f"{len(sections)} sections {title!r}")
        return sections[0]

    def check_listeners(self, known: int) -> None:
        """Check that the file has exactly `known` lines with `bind`. Raises TemplateChanged."""
        binds = sum(section.count("bind ") for section in self._sections)
        if binds != known:
            raise _changed(f"{binds} listeners, {known} of them known")

    def text(self) -> str:
        return "\n".join(section.text() for section in self._sections) + "\n"


class _HaproxySection:
    """A section of HAProxy's configuration.

    title: the section's first line.
    lines: all lines of the section, including the first.
    """

    def __init__(self, title: str, lines: list[str]) -> None:
        self.title = title
        self._lines = lines

    def match(self, pattern: str) -> "re.Match[str]":
        return self._only(pattern)[1]

    def change(self, pattern: str, new: str) -> None:
        """Replace the only line that matches `pattern` fully. Raises TemplateChanged.

        new: the new line, which may refer to the pattern's groups.
        """
        index, match = self._only(pattern)
        self._lines[index] = "    " + match.expand(new)

    def add_line(self, line: str) -> None:
        self._lines.append("    " + line)

    def absent(self, beginning: str) -> None:
        if self.count(beginning):
            raise _changed(f"{beginning!r} in {self.title!r}")

    def count(self, beginning: str) -> int:
        return sum(line.lstrip().startswith(beginning) for line in self._lines)

    def text(self) -> str:
        return "\n".join(self._lines)

    def _only(self, pattern: str) -> "tuple[int, re.Match[str]]":
        lines = [
            (index, match)
            for index, line in enumerate(self._lines)
            if (match := re.fullmatch(pattern, line.strip()))
        ]
        if len(lines) != 1:
            raise _changed(f"{len(lines)} lines {pattern!r} in {self.title!r}")
        return lines[0]


def _changed(what: Sequence[object] | str) -> TemplateChanged:
    return TemplateChanged(
        f"Ray Serve's HAProxy configuration is not as expected: {what}. This release of Ray needs "
        "another release of Manta; http.proxy: serve works without HAProxy"
    )
