"""KeyLimits: rates and budgets of API keys, as one router counts them. Pure: times are arguments.

A rate is a token bucket that holds a minute's worth and fills as time passes. A request takes one
from the bucket of requests and its prompt's tokens from that of tokens, or is refused. Its output's
tokens are taken when it has ended; the bucket may become negative, and then fills from there. A
budget counts the prompts and outputs of requests that have ended.

Routers do not ask each other before they admit a request. Each sends its counts to the others once
a second (router/keys/key_service.py). Until they arrive, a key may exceed its limit by what the
other routers have admitted meanwhile.
"""

import math
import time
from dataclasses import dataclass, field

import msgspec

from deployments.api.caller import Caller, Period
from deployments.api.http.errors import NO_RETRY, ApiError

MINUTE = 60.0
# Maximum number of callers whose counts a router keeps; their keys come from the keys file alone.
_MOST_KEYS = 65_536


class KeyCount(msgspec.Struct, array_like=True):
    """One router's counts of a key.

    requests, tokens: the counts against rates since the router started
    period: the current period, as `period_of` names it
    spent: the tokens of prompts and outputs in that period
    """

    requests: int = 0
    tokens: int = 0
    period: str = ""
    spent: int = 0


@dataclass(slots=True)
class _Bucket:
    level: float
    at: float  # monotonic seconds

    def fill(self, limit: int, now: float) -> float:
        self.level = min(limit, self.level + (now - self.at) * limit / MINUTE)
        self.at = now
        return self.level


@dataclass(slots=True)
class _Account:
    requests: _Bucket | None = None
    tokens: _Bucket | None = None
    period: Period = "month"
    own: KeyCount = field(default_factory=KeyCount)
    others: int = 0  # tokens that other routers counted in the current period


class KeyLimits:
    """The rates and budgets of API keys, as one router counts them.

    used: the monotonic seconds of the last request of a key with limits; 0 before the first
    """

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._heard: dict[str, dict[str, KeyCount]] = {}  # router -> key's id -> its last report
        self.used = 0.0

    def count_request(self, caller: Caller, now: float, at: float) -> None:
        """Charge a new request to its key's limits. now: monotonic seconds; at: Unix seconds.

        Raises ApiError 429 insufficient_quota, rate_limit_exceeded.
        """
        rule = caller.rule
        if not rule.limited:
            return
        account = self._account(caller, now)
        if rule.budget is not None:
            spent = self._spent(account, at)
            if spent >= rule.budget:
                raise _over_budget(caller, spent, at)
        if rule.requests is not None:
            bucket = account.requests = account.requests or _Bucket(rule.requests, now)
            level = bucket.fill(rule.requests, now)
            if level < 1:
                raise _over_rate(caller, "requests", rule.requests, level, 1)
            bucket.level -= 1
        account.own.requests += 1

    def charge(self, caller: Caller, tokens: int, now: float) -> None:
        """Charge the tokens of a request's prompts. Raises ApiError 429 rate_limit_exceeded."""
        limit = caller.rule.tokens
        if limit is None:
            return
        account = self._account(caller, now)
        bucket = account.tokens = account.tokens or _Bucket(limit, now)
        level = bucket.fill(limit, now)
        if level < tokens:
            raise _over_rate(caller, "tokens", limit, level, tokens)
        bucket.level -= tokens
        account.own.tokens += tokens

    def ended(self, owner: str, prompt: int, output: int, at: float) -> None:
        """Charge a finished prompt to its key: the output to its rate, all tokens to its budget.

        owner: the key's id; at: Unix seconds.
        """
        account = self._accounts.get(owner)
        if account is None:
            # The key has no limits.
            return
        if account.tokens is not None:
            account.tokens.level -= output
            account.own.tokens += output
        self._spent(account, at)
        account.own.spent += prompt + output

    def headers(self, caller: Caller) -> list[tuple[bytes, bytes]]:
        """Return OpenAI's x-ratelimit-* headers of an answer."""
        account = self._accounts.get(caller.id)
        if account is None:
            return []
        counts = []
        for what, limit, bucket in (
            (b"requests", caller.rule.requests, account.requests),
            (b"tokens", caller.rule.tokens, account.tokens),
        ):
            if limit is not None and bucket is not None:
                remaining, full = max(0.0, bucket.level), (limit - bucket.level) * MINUTE / limit
                counts.append((b"x-ratelimit-limit-" + what, b"%d" % limit))
                counts.append((b"x-ratelimit-remaining-" + what, b"%d" % remaining))
                counts.append((b"x-ratelimit-reset-" + what, b"%.3fs" % max(0.0, full)))
        return counts

    # -- between routers

    def told(self, at: float) -> dict[str, KeyCount]:
        """Return this router's counts for the other routers: key's id -> counts. at: Unix
        seconds.
        """
        for account in self._accounts.values():
            self._spent(account, at)
        return {owner: account.own for owner, account in self._accounts.items()}

    def hear(self, routers: dict[str, dict[str, KeyCount]], at: float) -> None:
        """Charge the counts of other routers since the last call, ended routers included.

        routers: router's name -> key's id -> counts. at: Unix seconds.
        """
        for known in self._accounts.values():
            self._spent(known, at)
            known.others = 0
        for router, counts in routers.items():
            before = self._heard.get(router)
            for owner, count in counts.items():
                account = self._accounts.get(owner)
                if account is None:
                    continue
                if count.period == period_of(account.period, at):
                    account.others += count.spent
                # A router's first report covers times that no longer count for a rate.
                last = None if before is None else before.get(owner, KeyCount())
                if last is not None and account.requests is not None:
                    account.requests.level -= max(0, count.requests - last.requests)
                if last is not None and account.tokens is not None:
                    account.tokens.level -= max(0, count.tokens - last.tokens)
        self._heard = routers

    def _account(self, caller: Caller, now: float) -> _Account:
        self.used = now
        account = self._accounts.get(caller.id)
        if account is None:
            if len(self._accounts) >= _MOST_KEYS:
                del self._accounts[next(iter(self._accounts))]
            account = self._accounts[caller.id] = _Account()
            account.others = sum(
                count.spent
                for counts in self._heard.values()
                if (count := counts.get(caller.id)) is not None
                and count.period == period_of(caller.rule.period, time.time())
            )
        account.period = caller.rule.period
        return account

    def _spent(self, account: _Account, at: float) -> int:
        """Return the tokens spent in the current period, by all routers as far as known."""
        period = period_of(account.period, at)
        if account.own.period != period:
            if account.own.period:  # the counts of other routers belong to the former period, too
                account.others = 0
            account.own.period, account.own.spent = period, 0
        return account.own.spent + account.others


def period_of(period: Period, at: float) -> str:
    """Return the day ("2026-11-23") or month ("2026-11") of UTC that a Unix time lies in."""
    return time.strftime("%Y-%m-%d" if period == "day" else "%Y-%m", time.gmtime(at))


def period_ends(period: Period, at: float) -> float:
    """Return the seconds until the period of a Unix time is over."""
    day = 86400.0
    if period == "day":
        return day - at % day
    now = time.gmtime(at)
    end = at - at % day + (28 - min(28, now.tm_mday)) * day
    while time.gmtime(end).tm_mon == now.tm_mon:
        end += day
    return end - at


def _over_rate(caller: Caller, what: str, limit: int, level: float, wanted: int) -> ApiError:
    seconds = (wanted - level) * MINUTE / limit
    name = f"{what} per min ({'RPM' if what == 'requests' else 'TPM'})"
    if wanted > limit:
        message = (
            f'Request too large for key "{caller.name}" on {name}: Limit {limit}, Requested '
            f"{wanted}. The prompt must be reduced, or the operator has to raise the limit."
        )
        return ApiError(429, "rate_limit_exceeded", message, headers=NO_RETRY)
    message = (
        f'Rate limit reached for key "{caller.name}" on {name}: Limit {limit}, Used '
        f"{math.ceil(limit - level)}, Requested {wanted}. Please try again in {seconds:.3f}s."
    )
    return ApiError(429, "rate_limit_exceeded", message, retry_after=seconds)


def _over_budget(caller: Caller, spent: int, at: float) -> ApiError:
    rule = caller.rule
    seconds = math.ceil(period_ends(rule.period, at))
    return ApiError(
        429,
        "insufficient_quota",
        f'You exceeded your current quota: key "{caller.name}" has spent {spent} of {rule.budget} '
        f"tokens per {rule.period}. It begins anew in {seconds}s.",
        kind="insufficient_quota",
        headers=NO_RETRY,
        retry_after=seconds,
    )
