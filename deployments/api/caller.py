"""Caller: who asks, derived once from a request's key (auth.py)."""

from dataclasses import dataclass

LEAST_PRIORITY = -(2**31)


@dataclass(frozen=True, slots=True)
class Caller:
    """id: names the key, however its header was spelt; "" where no key is asked for, and everybody
    is the same. admin: may change what is served and see everybody's requests. least_priority: of
    its requests."""

    id: str = ""
    admin: bool = False
    least_priority: int = LEAST_PRIORITY


ANYONE = Caller()
