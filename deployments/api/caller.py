"""Caller: the client of a request, derived once from its API key (auth.py). KeyRule: what the
operator allows that key."""

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

LEAST_PRIORITY = -(2**31)

CALLER = "manta.caller"  # in an ASGI scope of ours: whose request it is, in place of a key

Period = Literal["day", "month"]


@dataclass(frozen=True, slots=True)
class KeyRule:
    """One line of a keys file, without the key.

    name: what metrics, the usage file and errors call the key; "" is the start of its digest.
    models: patterns (`*`, `?`, `[...]`) of the models and adapters that it may use; () is all.
    requests, tokens: a minute. budget: tokens a period, prompts and outputs; periods are of UTC.
    priority: the least that its requests may have.
    """

    name: str = ""
    models: tuple[str, ...] = ()
    requests: int | None = None
    tokens: int | None = None
    budget: int | None = None
    period: Period = "month"
    priority: int = 0

    @property
    def limited(self) -> bool:
        """Whether requests are counted against anything."""
        return not (self.requests is None and self.tokens is None and self.budget is None)


NO_RULE = KeyRule()


@dataclass(frozen=True, slots=True)
class Caller:
    """The client of a request, by its API key. id: names the key, however its header was spelt; ""
    for all callers where keys are not used. admin: may change what is served and see the requests
    of all keys. least_priority: of its requests. rule: of its key. tenant: whose its requests are,
    if not whose `limits.share_by` says.
    """

    id: str = ""
    admin: bool = False
    least_priority: int = LEAST_PRIORITY
    rule: KeyRule = field(default=NO_RULE)
    tenant: str = ""

    @property
    def name(self) -> str:
        """Return the name of the key for errors and records."""
        return self.rule.name or self.id[:8]

    def may_use(self, model: str) -> bool:
        """Whether the caller may use a model. model: the name of a served model or adapter."""
        models = self.rule.models
        return not models or any(fnmatchcase(model, pattern) for pattern in models)


ANYONE = Caller()
