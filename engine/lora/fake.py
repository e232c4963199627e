"""FakeAdapters: a fake core's adapters: real names, slots and errors, no weights."""

import time
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from engine.errors import AdapterError
from engine.lora.names import AdapterNames, disabled
from engine.lora.peft_config import check_name, read_peft_config, stamp
from engine.messages import AdapterAnswer, AdapterInfo, AddAdapter, EngineRequest, RemoveAdapter


@dataclass(slots=True, eq=False)
class FakeAdapter:
    info: AdapterInfo
    ready_at: float = 0.0  # monotonic seconds


class FakeAdapters:
    """max_loras slots, the least recently used unused one goes; a load takes `seconds`."""

    def __init__(self, max_loras: int, seconds: float) -> None:
        self._max_loras = max_loras
        self._seconds = seconds
        self._names: AdapterNames[FakeAdapter] = AdapterNames()
        self._slots: list[FakeAdapter] = []  # the last used first
        self._users: dict[int, FakeAdapter] = {}  # by request id
        self._answers: list[AdapterAnswer] = []
        self.loads = 0

    def add(self, message: AddAdapter) -> None:
        try:
            if not self._max_loras:
                raise disabled()
            check_name(message.name)
            config, revision = read_peft_config(Path(message.path)), stamp(Path(message.path))
        except AdapterError as error:
            self._answers.append(AdapterAnswer(message.ticket, None, error.code, error.message))
            return
        info = AdapterInfo(
            message.name,
            message.revision or revision,
            config.kind,
            config.max_rank or config.virtual_tokens,
            0,
            list(config.targets or ()),
        )
        self._names.put(info.name, info.revision, FakeAdapter(info))
        self._answers.append(AdapterAnswer(message.ticket, info))

    def remove(self, message: RemoveAdapter) -> None:
        try:
            found = self._names.remove(message.name, message.revision)
        except AdapterError as error:
            self._answers.append(AdapterAnswer(message.ticket, None, error.code, error.message))
        else:
            self._answers.append(AdapterAnswer(message.ticket, found.info))

    def take_answers(self) -> list[AdapterAnswer]:
        answers, self._answers = self._answers, []
        return answers

    def claim(self, request: EngineRequest) -> AdapterError | None:
        """Before a request is accepted: an error if it cannot be."""
        if request.adapter:
            try:
                if not self._max_loras:
                    raise disabled()
                self._users[request.id] = self._names.find(request.adapter)
            except AdapterError as error:
                return error
        return None

    def release(self, request_id: int) -> None:
        self._users.pop(request_id, None)

    def on_device(self, request_id: int) -> bool:
        """Whether a request can run now; begins to load what it needs if there is a slot."""
        adapter = self._users.get(request_id)
        if adapter is None:
            return True
        if adapter in self._slots:
            self._slots.remove(adapter)
        else:
            used = list(self._users.values())
            if len(self._slots) == self._max_loras:
                unused = [other for other in self._slots if other not in used]
                if not unused:
                    return False
                self._slots.remove(unused[-1])
            self.loads += 1
            adapter.ready_at = time.monotonic() + self._seconds
        self._slots.insert(0, adapter)
        return time.monotonic() >= adapter.ready_at

    def shift(self, request_id: int) -> int:
        adapter = self._users.get(request_id)
        if adapter is None:
            return 0
        return crc32(f"{adapter.info.name}@{adapter.info.revision}".encode())

    @property
    def resident(self) -> list[str]:
        return [adapter.info.name for adapter in self._slots]
