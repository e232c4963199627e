"""Driver: the child process of `manta serve` that calls Ray, deploys, and monitors the deployment.

The driver is a separate process for two reasons: Ray ends a process that is connected to a lost
node, and calls to a Ray that is gone may never return. The driver has a session of its own, so that
signals to the server's process group (from a terminal or `timeout`) do not reach Ray's processes,
which end only on the server's order. The driver writes lines of JSON that `supervisor.py` reads:

  {"model": true}                   the model is downloaded; later work leaves no partial files
  {"ray": true}                     Ray is started or joined
  {"serving": url, "about": [...]}  requests are answered; lines for the user
  {"beat": true}                    Serve has the application; sent every few seconds
  {"failed": message, "code": 1}    the deployment failed, or the application has disappeared
  {"lost": message}                 Ray is gone

The server sends one line, {"stop": drain_seconds or null}, to stop what the driver started.
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
    """The error raised if Ray is gone, or no longer answers."""

    code = "ray_lost"


class Driver:
    """The code of the driver process, with its end of the channel to the server process.

    channel: socket to the server process.
    serve: deploys, and monitors the deployment; sends messages by `report`, and returns only when
        stopped.
    close: stops the cluster or the deployment; its argument is the seconds for running requests to
        end, or None.

    `serve` and `close` may raise any exception.
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
        """Ignore signals that are meant for the server process.

        SIG_IGN is not used, because child processes would inherit it.
        """
        for number in numbers:
            signal.signal(number, lambda *_: None)

    def run(self, server: int, mark: str) -> NoReturn:
        """Run the driver in a newly forked process with one thread. Never returns.

        server: pid of the server process.
        mark: the server's mark (`processes.mark`), to be set in the environment of all child
            processes.
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
                # The thread of `_listen` ends the process.
                threading.Event().wait()
            with contextlib.suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _listen(self) -> None:
        """Wait for the server's stop message, and then call `close` and end the process, even if
        the main thread hangs in a call."""
        if line := self._channel.makefile("rb").readline():
            self.stopping = True
            # The server then kills all remaining processes.
            with contextlib.suppress(Exception):
                self._close(json.loads(line)["stop"])
        os._exit(0)
