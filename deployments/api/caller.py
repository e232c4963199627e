"""Caller: the client of a request, derived once from its API key (auth.py). KeyRule: the rights and
limits that the operator gives that key.
"""

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

LEAST_PRIORITY = -(2**31)

CALLER = "manta.caller"  # key of a router's own ASGI scope for the Caller, in place of an API key

Period = Literal["day", "month"]


@dataclass(frozen=True, slots=True)
class KeyRule:
    """The rights and limits of an API key, as a line of a keys file states them.

    name: the name of the key in metrics, the usage file and errors; "": the start of its digest.
    models: patterns (`*`, `?`, `[...]`) of the models and adapters that the key may use; (): all.
    requests, tokens: maximum number of requests, and of tokens, per minute; None: no limit.
    budget: maximum tokens of prompts and outputs in a period; None: no limit.
    period: "day" or "month", which begin at midnight UTC.
    priority: minimum value of `priority` in its requests; smaller values run earlier.
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
        """Whether the key has a rate limit or a budget, so that its requests are counted."""
        return not (self.requests is None and self.tokens is None and self.budget is None)


NO_RULE = KeyRule()


@dataclass(frozen=True, slots=True)
class Caller:
    """The client of a request, identified by its API key.

    id: the first 32 hex digits of the key's digest; "" for all callers if no keys are configured.
    admin: whether the caller may change models and adapters, and see the requests of all keys.
    least_priority: the minimum value of `priority` in its requests.
    rule: the rights and limits of its key.
    tenant: the tenant for fair queueing; "": determined by `limits.share_by`.
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
