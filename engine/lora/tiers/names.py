"""AdapterNames: the current adapter and revision of each name. No torch here."""

from typing import Generic, TypeVar

from engine.errors import AdapterError

T = TypeVar("T")


class AdapterNames(Generic[T]):
    """The names of adapters: name -> its current adapter.

    `find` also takes "name@revision", for the current revision or a retired one that is still in
    use.
    """

    def __init__(self) -> None:
        self._current: dict[str, tuple[str, T]] = {}  # name -> (revision, adapter)
        # (name, revision) -> adapter that was replaced or removed, but is still used
        self._retired: dict[tuple[str, str], T] = {}

    def set_current(self, name: str, revision: str, adapter: T) -> T | None:
        """Make the adapter the current one of its name; return the adapter that it replaces."""
        before = self._current.get(name)
        self._current[name] = (revision, adapter)
        self._retired.pop((name, revision), None)
        if before is None:
            return None
        if before[0] != revision:
            self._retired[name, before[0]] = before[1]
        return before[1]

    def remove(self, name: str, revision: str = "") -> T:
        """Remove a name and return its adapter.

        Raises AdapterError if the name is unknown or has another revision.
        """
        current = self._current.get(name)
        if current is None or revision not in ("", current[0]):
            raise not_found(f"{name}@{revision}" if revision else name)
        del self._current[name]
        self._retired[name, current[0]] = current[1]
        return current[1]

    def find(self, name: str) -> T:
        """Return the adapter of a name or "name@revision". Raises AdapterError."""
        base, _, revision = name.partition("@")
        current = self._current.get(base)
        if current is not None and revision in ("", current[0]):
            return current[1]
        if revision and (base, revision) in self._retired:
            return self._retired[base, revision]
        raise not_found(name)

    def get(self, name: str) -> T | None:
        current = self._current.get(name)
        return None if current is None else current[1]

    def forget(self, name: str, revision: str, adapter: T) -> None:
        """Forget a retired adapter that is no longer used."""
        if self._retired.get((name, revision)) is adapter:
            del self._retired[name, revision]


def not_found(name: str) -> AdapterError:
    return AdapterError(f"no adapter is called {name[:300]!r} here", code="adapter_not_found")
