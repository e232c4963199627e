"""EngineProcess: starts one engine process, owns the parent's sockets, and waits for its end."""

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from engine.config.engine_config import EngineConfig
from engine.errors import EngineDead
from engine.messages import Control, ToEngine
from engine.parallel.connections import RemoteRanks
from engine.private_folder import MAX_PATH, private_folder
from engine.process.fake import PREFIX as FAKE
from engine.process.main import EngineStart

ROOT = Path(__file__).resolve().parents[2]


class EngineProcess:
    """The owner of an engine process, from its start to its end.

    A separate thread creates the process and waits for its end, which needs no polling. The thread
    must live as long as the process, as the kernel's parent-death signal is sent when the thread
    ends that forked.

    on_exit: called from that thread with the exit status.
    remote: the engine's ranks on other nodes, if there are any.
    frames: the zmq PULL socket for frames, to be read in one thread only.
    Raises ConfigError if there is no folder for the sockets, EngineDead if no process can be
    created.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_exit: Callable[[int], None],
        remote: RemoteRanks | None = None,
    ) -> None:
        self._config = config
        self._on_exit = on_exit
        self._folder = str(private_folder(MAX_PATH))  # mode 0700, so that no other user can connect
        inbox, outbox = f"ipc://{self._folder}/in", f"ipc://{self._folder}/out"
        self._start = EngineStart(
            core="fake" if config.model.startswith(FAKE) else "model",
            config=config,
            directory=os.getcwd(),
            inbox=inbox,
            outbox=outbox,
            parent=os.getpid(),
            spawned=time.monotonic(),
            remote=remote,
        )
        self._encoder = msgspec.msgpack.Encoder()
        self._send_lock = threading.Lock()  # requests may be sent from any thread
        self._context = zmq.Context()
        self._requests = self._context.socket(zmq.PUSH)
        self.frames = self._context.socket(zmq.PULL)
        self._process: subprocess.Popen[bytes] | None = None
        self._spawn_error: OSError | None = None
        self._spawned = threading.Event()
        self._thread = threading.Thread(target=self._own, name="engine-owner", daemon=True)
        try:
            for socket, address in ((self._requests, inbox), (self.frames, outbox)):
                socket.set_hwm(0)
                socket.linger = 0
                socket.bind(address)
            self._thread.start()
            self._spawned.wait()
            if self._spawn_error is not None:
                raise EngineDead(f"cannot start the engine process: {self._spawn_error}")
        except BaseException:
            self._release()
            raise

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def _own(self) -> None:
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "engine.process.main"],
                # the folder of the package, so that the child can import it; the child then changes
                # to this process's directory
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=2,  # to stderr, so that output of libraries is in the log
                # a separate group, so that Ctrl-C at a terminal reaches only the parent
                process_group=0,
            )
        except OSError as error:
            self._spawn_error = error
            self._spawned.set()
            return
        self._process = process
        assert process.stdin is not None
        # raised if the process has already ended, which its exit status will show
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(msgspec.json.encode(self._start) + b"\n")
            process.stdin.flush()
        self._spawned.set()
        self._on_exit(process.wait())

    def send(self, message: ToEngine) -> None:
        """Send a message to the engine process. Never blocks. Thread-safe.

        Raises EngineDead if the engine process is gone.
        """
        raw = self._encoder.encode(message)
        with self._send_lock:
            if self._requests.closed:
                raise EngineDead("the engine is closed")
            try:
                # Without a copy for large messages, such as pixels; zmq copies small ones anyway.
                self._requests.send(raw, zmq.NOBLOCK, copy=False)
            except zmq.Again:
                raise EngineDead("the engine process is gone") from None

    def hide(self) -> None:
        """Remove the sockets' folder, which connected sockets do not need.

        So a killed parent leaves no folder behind.
        """
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        """Send SIGKILL to the engine process, in any state."""
        if self._process is not None:
            self._process.kill()

    def close(self, timeout: float) -> None:
        """Ask the process to stop, kill it after `timeout` seconds, and release its resources.

        The resources are the process, its thread, the sockets and files. The call blocks and is
        idempotent. The caller must have stopped reading frames.
        """
        with contextlib.suppress(EngineDead):
            self.send(Control("stop"))
        self._thread.join(timeout)
        if self._thread.is_alive():
            self.kill()
        self._release()

    def _release(self) -> None:
        if self._thread.is_alive():
            self._thread.join()
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        with self._send_lock:
            self._requests.close(0)
        self.frames.close(0)
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)
