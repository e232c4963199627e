"""TextReader: the text of `{"input": "..."}`, as it comes."""

import json

_OPEN = '"input"'


class TextReader:
    """A custom tool takes a text; models write it as the one argument of a function."""

    def __init__(self) -> None:
        self._held = ""
        self._inside = False
        self._ended = False

    def feed(self, piece: str) -> str:
        """Return the new part of the text, unescaped. Half a surrogate pair waits for the other."""
        if self._ended:
            return ""
        self._held += piece
        if not self._inside:
            at = self._held.find(_OPEN)
            quote = self._held.find('"', at + len(_OPEN)) if at >= 0 else -1
            if quote < 0:
                return ""
            self._inside, self._held = True, self._held[quote + 1 :]
        at = safe = 0
        text = self._held
        while at < len(text):
            if text[at] == '"':
                self._ended = True
                safe = at
                break
            size = 1
            if text[at] == "\\":
                size = 6 if text[at + 1 : at + 2] == "u" else 2
            at += size
            if at > len(text):
                break
            high = size == 6 and text[at - 4 : at - 2].lower() in ("d8", "d9", "da", "db")
            if not high:
                safe = at
        ready, self._held = text[:safe], text[safe:]
        if not ready:
            return ""
        value: str = json.loads(f'"{ready}"', strict=False)
        return value.encode("utf-8", "replace").decode()
