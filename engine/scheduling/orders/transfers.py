"""WeightTransfers: receives weights from a trainer while steps run. No torch here."""

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

from engine.errors import MantaError, UpdateFailed
from engine.messages import Answer, TransferWeights

logger = logging.getLogger("manta.engine")


class WeightReceiver(Protocol):
    """The interface that receives weights from a trainer.

    All methods are called on one thread and may raise MantaError.
    """

    def init(self, info: dict[str, Any]) -> None: ...
    def start(self, info: dict[str, Any]) -> None: ...

    def update(self, info: dict[str, Any]) -> str:
        """Receive tensors; return the folder of the whole update, or "" if "finish" ends it.

        info: the parameters that the trainer sends.
        """
        ...

    def collect(self, info: dict[str, Any]) -> str:
        """Receive tensors after "start"; return the folder once the checkpoint is complete, else
        ""."""
        ...

    def finish(self, info: dict[str, Any]) -> str:
        """End the update that "start" has begun, and return its folder."""
        ...

    def drop(self, info: dict[str, Any]) -> None:
        """Drop the updates that the engine has not loaded, complete or not."""
        ...

    def in_place(self, folder: str) -> None:
        """Record that the engine has loaded a folder: free its tensors and drop other updates."""
        ...

    def close(self) -> None:
        """Delete all folders."""
        ...


class WeightTransfers:
    """The transfers of weights to one engine, carried out one after the other on a thread.

    receiver: receives the weights; None = transfers are refused.
    """

    def __init__(self, receiver: WeightReceiver | None) -> None:
        self._receiver = receiver
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._done: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._wake: Callable[[], None] = lambda: None

    def on_done(self, wake: Callable[[], None]) -> None:
        """Set the function to call, from any thread, when there is an answer."""
        self._wake = wake

    def ask(self, message: TransferWeights) -> None:
        """Queue a trainer's message for the thread; see `take_answers`."""
        if self._receiver is None:
            text = (
                "this engine takes no weights from a trainer, as it makes embeddings or has ranks "
                "on several nodes; with several nodes update_weights from a folder"
            )
            self._done.put(Answer(message.ticket, "weights_not_replaceable", text))
            self._wake()
        else:
            self._begin(lambda: self._carry_out(message))

    def in_place(self, folder: str) -> None:
        """Tell the receiver on its thread that the engine has the weights of a folder."""
        receiver = self._receiver
        if receiver is not None and self._thread is not None:
            self._begin(lambda: receiver.in_place(folder))

    def _begin(self, order: Callable[[], None]) -> None:
        self._orders.put(order)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="transfers", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            self._orders.get()()

    def _carry_out(self, message: TransferWeights) -> None:
        answer = Answer(message.ticket)
        orders: dict[str, Callable[[dict[str, Any]], str | None]] = {}
        if self._receiver is not None:
            receiver = self._receiver
            orders = {
                "init": receiver.init,
                "start": receiver.start,
                "update": receiver.update,
                "collect": receiver.collect,
                "finish": receiver.finish,
                "drop": receiver.drop,
            }
        try:
            answer.message = orders[message.what](message.info) or ""
        except MantaError as error:
            answer = Answer(message.ticket, error.code, error.message, error.param or "")
        except Exception as error:
            logger.exception("a transfer of weights has failed")
            answer = Answer(message.ticket, UpdateFailed.code, repr(error))
        self._done.put(answer)
        self._wake()

    def take_answers(self) -> list[Answer]:
        answers = []
        while not self._done.empty():
            answers.append(self._done.get())
        return answers

    def close(self) -> None:
        """Delete the folders of all transfers."""
        if self._receiver is not None:
            self._receiver.close()
