"""Renaming: what a request's own fields are called, for errors about the chat that it became."""

import re

from deployments.api.http.errors import ApiError, from_backend
from engine.errors import MantaError


class Renaming:
    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def add(self, chat: str, own: str) -> None:
        self._names[chat] = own

    def shift(self, of: str, count: int) -> None:
        """Move the names of a list's items `count` places earlier: its first items became one."""
        moved = {}
        for chat, own in self._names.items():
            at = re.match(rf"{of}\[(\d+)\](.*)", chat)
            if at is None:
                moved[chat] = own
            elif (place := int(at[1]) - count) >= 0:
                moved.setdefault(f"{of}[{place}]{at[2]}", own)
                if place:
                    moved[f"{of}[{place}]{at[2]}"] = own
        self._names = moved

    def name(self, path: str) -> str:
        """Return the request's name of a chat field, by the longest prefix with another name."""
        for end in [len(path), *(m.start() for m in reversed(list(_CUTS.finditer(path))))]:
            own = self._names.get(path[:end])
            if own is not None:
                return own + path[end:]
        return path

    def error(self, error: ApiError | MantaError) -> ApiError:
        """Return the error with the names of the request's own fields."""
        told = error if isinstance(error, ApiError) else from_backend(error)
        own = None if told.param is None else self.name(told.param)
        message = _PLACE.sub(lambda at: self.name(at[0]), told.message)
        if told.param is not None and own is not None and _PLACE.fullmatch(told.param) is None:
            plain = rf"(?<![\w.\]]){re.escape(told.param)}(?![\w\[])"
            message = re.sub(plain, lambda _: own, message)
        if own == told.param and message == told.message:
            return told
        return ApiError(
            told.status, told.code, message, param=own, kind=told.kind, headers=told.headers
        )


_CUTS = re.compile(r"[.\[#]")
# A field inside of another one, as messages name it.
_PLACE = re.compile(r"[A-Za-z_]\w*(?:\[\d+\]|\.[A-Za-z_]\w*)+")
