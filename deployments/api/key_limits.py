"""KeyLimits: rate limits and budgets of API keys at one router. Pure: times are arguments.

A rate limit is a token bucket that holds one minute's allowance. A request takes one unit from the
bucket of requests and its prompt tokens from the bucket of tokens, or is refused. Its output tokens
are taken when it has ended, so that the bucket may become negative. A budget counts the prompts and
outputs of requests that have ended.

Routers do not ask each other before they admit a request. Each sends its counts to the others once
a second (router/keys/key_service.py). Until these arrive, a key may exceed its limit by the
requests that other routers admit meanwhile.
"""

import math
import time
from dataclasses import dataclass, field

import msgspec

from deployments.api.caller import Caller, Period
from deployments.api.http.errors import NO_RETRY, ApiError

MINUTE = 60.0
# Maximum number of keys whose counts a router keeps; only keys in the keys files are counted.
_MOST_KEYS = 65_536


class KeyCount(msgspec.Struct, array_like=True):
    """One router's counts of a key.

    requests, tokens: the counts for rate limits since the router's start
    period: the current period, as `period_of` names it
    spent: prompt and output tokens in that period
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
    """The rate limits and budgets of API keys at one router.

    used: the monotonic seconds of the last request of a key with limits; 0 before the first
    """

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._heard: dict[str, dict[str, KeyCount]] = {}  # router -> key id -> last report
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
        """Charge a prompt whose choices have ended to its key.

        The rate limit gets the output tokens, and the budget all tokens.

        owner: id of the key. prompt, output: numbers of tokens. at: Unix seconds.
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
        """Return OpenAI's x-ratelimit-* headers for an answer to this caller."""
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
        """Return this router's counts, to be sent to other routers: {key id: counts}. at: Unix
        seconds.
        """
        for account in self._accounts.values():
            self._spent(account, at)
        return {owner: account.own for owner, account in self._accounts.items()}

    def hear(self, routers: dict[str, dict[str, KeyCount]], at: float) -> None:
        """Charge what other routers, including ended ones, have counted since the last call.

        routers: {router: {key id: counts}}. at: Unix seconds.
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
                # A router's first report is not charged to rates, as it covers a longer time than
                # the rates do.
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
        """Return the tokens spent in the current period at all routers, as far as known here."""
        period = period_of(account.period, at)
        if account.own.period != period:
            if account.own.period:  # the counts of other routers are of the old period, too
                account.others = 0
            account.own.period, account.own.spent = period, 0
        return account.own.spent + account.others


def period_of(period: Period, at: float) -> str:
    """Return the day ("2026-11-23") or month ("2026-11") of UTC that a Unix time lies in."""
    return time.strftime("%Y-%m-%d" if period == "day" else "%Y-%m", time.gmtime(at))


def period_ends(period: Period, at: float) -> float:
    """Return the seconds from a Unix time to the end of its period."""
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
