"""WeightUpdates and Pause: weight updates and pauses of a serving engine. No torch here.

An update is checked on a separate thread while steps run. Once it has passed, no further step is
launched, and the weights are replaced when the launched ones are done. So each step, and with it
each token, has the weights of one version.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

from engine.errors import EngineDead, InvalidRequest, MantaError, UpdateFailed
from engine.messages import NO_FOLDER, Answer, EngineRequest, UpdateWeights

logger = logging.getLogger("manta.engine")

MODES = ("abort", "wait", "keep")


class WeightLoader(Protocol):
    """An interface that replaces a serving model's weights by those of a checkpoint folder."""

    def holds(self, folder: str) -> bool:
        """Whether a folder's weights were received from a trainer and are in memory."""
        ...

    def check(self, folder: str) -> None:
        """Check a folder on any thread; nothing changes. Raises MantaError."""
        ...

    def load(self, folder: str) -> None:
        """Replace the weights; no step may be in flight.

        Raises EngineDead if only some of the weights were replaced, and another MantaError if none
        were.
        """
        ...


class WeightUpdates:
    """The updates of one engine's weights, one at a time.

    count: number of updates since the start.
    version: the name of the current weights.
    folder: the folder of the current weights; "" = those of the engine's start.
    ready: whether a checked update waits for the launched steps, so that no step may be launched.
    """

    def __init__(self, loader: WeightLoader | None) -> None:
        self._loader = loader
        self._wake: Callable[[], None] = lambda: None
        self._running: UpdateWeights | None = None
        self.ready = False
        self._passed = False  # whether an update that was only to be checked has passed the check
        self._failure: Exception | None = None  # why the update cannot be carried out
        self._answers: list[Answer] = []
        self._checked = ""  # the folder of the update in progress, on this node
        self.count, self.version = 0, "0"
        self.folder = ""
        self.seconds = 0.0  # seconds for which the last update stopped the steps

    def on_checked(self, wake: Callable[[], None]) -> None:
        """Set the function to call, from any thread, when `ready` or the answers may change."""
        self._wake = wake

    def ask(self, message: UpdateWeights) -> None:
        """Begin an update: check it on a thread."""
        if self._loader is None:
            self._answer(
                message, "weights_not_replaceable", "an embedding model's weights cannot change"
            )
            return
        if self._running is not None:
            self._answer(
                message, "update_in_progress", "another update of the weights is in progress"
            )
            return
        self._running = message
        threading.Thread(target=self._check, args=(message,), name="weights", daemon=True).start()

    def _check(self, message: UpdateWeights) -> None:
        assert self._loader is not None
        try:
            self._checked = _here(message.folder, self._loader)
            self._loader.check(self._checked)
            if message.check_only:
                self._passed = True
            else:
                self.ready = True
        except Exception as error:
            self._failure = error
        self._wake()

    @property
    def recomputes(self) -> bool:
        """Whether the KV of running requests is to be computed again with the new weights."""
        return self._running is not None and self._running.recompute

    def replace(self) -> bool:
        """Carry the checked update out, with no step in flight; return whether it succeeded.

        Raises EngineDead if only some of the weights were replaced.
        """
        message = self._running
        assert message is not None and self._loader is not None
        began = time.perf_counter()
        self.ready = False
        try:
            self._loader.load(self._checked)
        except EngineDead:
            raise
        except MantaError as error:
            self._failure = error
            return False
        self.seconds = time.perf_counter() - began
        self.folder = self._checked
        self.count += 1
        self.version = message.version or str(self.count)
        logger.info("weights of version %s after %.2f s", self.version, self.seconds)
        self._answer(message)
        self._running = None
        return True

    def _answer(self, message: UpdateWeights, code: str = "", why: str = "") -> None:
        self._answers.append(Answer(message.ticket, code, why))

    def take_answers(self) -> list[Answer]:
        failure, message = self._failure, self._running
        if failure is not None and message is not None:
            known = isinstance(failure, MantaError)
            code = failure.code if isinstance(failure, MantaError) else UpdateFailed.code
            self._answer(message, code, str(failure) if known else repr(failure))
            self._running = self._failure = None
        elif self._passed and message is not None:
            self._answer(message)
            self._running, self._passed = None, False
        answers, self._answers = self._answers, []
        return answers


def _here(folders: str, loader: WeightLoader) -> str:
    """Return the folder to load: the first that is in memory, else the first on this node's disk.

    folders: alternative paths, one a line.

    Raises UpdateFailed (folder_not_found).
    """
    paths = folders.split("\n")
    for there in (loader.holds, os.path.isdir):
        for path in paths:
            if there(path):
                return path
    raise UpdateFailed(
        f"{', '.join(paths)}: no such folder on this node", param="weights", code=NO_FOLDER
    )


class Pause:
    """The pause of an engine, in which new requests wait.

    frozen: whether running requests wait too.
    later: the requests that arrived during the pause, by id.
    """

    def __init__(self) -> None:
        self.on = self.frozen = False
        self.later: dict[int, EngineRequest] = {}
        self._asked: list[int] = []  # tickets to be answered once the pause has begun
        self._answers: list[Answer] = []

    def begin(self, mode: str, ticket: int) -> bool:
        """Begin a pause; return whether requests have to be aborted.

        mode: "abort" ends running requests with their current output, "wait" lets them finish, and
            "keep" stops them until the end of the pause.
        """
        if mode not in MODES:
            known = ", ".join(MODES)
            message = f"pause: mode is one of {known}, not {mode!r}"
            self._answers.append(Answer(ticket, InvalidRequest.code, message, "mode"))
            return False
        self.on, self.frozen = True, mode != "wait"
        self._asked.append(ticket)
        return mode == "abort"

    def end(self) -> list[EngineRequest]:
        """End the pause; return the requests that arrived during it."""
        self.on = self.frozen = False
        later, self.later = self.later, {}
        return [*later.values()]

    def take_answers(self, *, in_flight: bool, requests: bool) -> list[Answer]:
        """Return the answers to pauses that have begun.

        in_flight: whether a step is launched and not done.
        requests: whether there are requests that the pause does not hold back.
        """
        if self._asked and not in_flight and (self.frozen or not requests or not self.on):
            self._answers += [Answer(ticket) for ticket in self._asked]
            self._asked = []
        answers, self._answers = self._answers, []
        return answers
