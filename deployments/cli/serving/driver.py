"""The process below `manta serve` that talks to Ray: it deploys, and stays with its deployment.

The driver is a process of its own because Ray ends the process that talks to it when its node is
lost, and because calls to a Ray that is gone may never return. It has a session of its own. So
signals to the server's process group, as of a terminal or of `timeout`, do not reach Ray's
processes, which end when the server says so. The driver writes lines of JSON, which `supervisor.py`
reads:

    {"model": true}                   the model is there, and what is next need not be put away
    {"ray": true}                     Ray is started, or joined
    {"serving": url, "about": [...]}  it answers; lines for the user
    {"beat": true}                    Serve has the application, every few seconds
    {"failed": message, "code": 1}    it cannot be deployed, or is not there any more
    {"lost": message}                 Ray is gone

A line the other way, {"stop": drain_seconds or null}, has it stop what it started.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from deployments.cli.serving.processes import end_with, variable
from deployments.environment import set_for_children
from engine.errors import ConfigError, MantaError


class RayLostError(MantaError):
    """Ray is gone, or does not answer any more."""

    code = "ray_lost"


class Driver:
    """The child's side of the channel.

    serve: says what it has to say by `tell`, and returns only if it was stopped. close: stop what
    was started, with so many seconds for what is in flight. Both raise what they like.
    """

    def __init__(
        self,
        channel: socket.socket,
        serve: Callable[["Driver"], None],
        close: Callable[[float | None], None],
    ) -> None:
        self.stopping = False
        self._channel = channel
        self._serve = serve
        self._close = close

    def report(self, **message: Any) -> None:
        self._channel.sendall(json.dumps(message).encode() + b"\n")

    def ignore(self, *numbers: signal.Signals) -> None:
        """Ignore signals, which are the server's. SIG_IGN is not used, because the processes that
        are started here would inherit it."""
        for number in numbers:
            signal.signal(number, lambda *_: None)

    def run(self, server: int, mark: str) -> NoReturn:
        """Run the driver in a process that was just forked, with no thread but this one. Never
        returns.

        server: pid of the server.
        mark: mark of the server, for the environment of all that is started.
        """
        code = 1
        try:
            end_with(server)
            os.setsid()
            set_for_children(variable(mark))
            self.ignore(signal.SIGTERM, signal.SIGHUP)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            threading.Thread(target=self._listen, daemon=True).start()
            self._serve(self)
        except KeyboardInterrupt:
            code = 130
        except RayLostError as error:
            self.report(lost=error.message)
        except MantaError as error:
            self.report(failed=error.message, code=2 if isinstance(error, ConfigError) else 1)
        except BaseException:
            if not self.stopping:
                traceback.print_exc()
        finally:
            if self.stopping:
                threading.Event().wait()  # the other thread ends the process
            with contextlib.suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _listen(self) -> None:
        """Stop when the server says so, whatever the other thread waits for."""
        if line := self._channel.makefile("rb").readline():
            self.stopping = True
            with contextlib.suppress(Exception):  # the server ends what is left
                self._close(json.loads(line)["stop"])
        os._exit(0)
