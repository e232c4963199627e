"""Caller: the client of a request, derived once from its API key (auth.py)."""

from dataclasses import dataclass

LEAST_PRIORITY = -(2**31)


@dataclass(frozen=True, slots=True)
class Caller:
    """id: names the key, however its header was spelt; "" for all callers where keys are not used.
    admin: may change what is served and see the requests of all keys. least_priority: of its
    requests."""

    id: str = ""
    admin: bool = False
    least_priority: int = LEAST_PRIORITY


ANYONE = Caller()
