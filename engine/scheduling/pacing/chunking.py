"""Chunked prefill: chooses the number of prompt tokens in a step while requests decode.

Prompt tokens that share a step with decodes delay the next token of every stream. A whole prompt in
one step is one long gap. In two halves it is two shorter gaps, and the prompt's first token comes
later by one step of decodes. So each step computes half of the waiting prompt tokens. This ends
soon: 8,192 tokens take five steps. A long queue still fills whole steps, so that throughput does
not fall. A small share of the budget is computed at once: it takes about as long as a step of
decodes (512 tokens of an 8B model on an H200: 10 ms), and halving it gains nothing.

On a slow device, or at the end of a long context, even that share is a visible gap: 512 tokens at
position 7,000 take seconds on one core. So `PromptPace` also bounds a step in seconds, by the time
of the last one.
"""

_SHARE = 16  # 1 / the share of the budget below which waiting tokens are not split
# 1 / the share of the budget that may need prompt log-probabilities in a step with decodes
_SCORED = 2
_LEAST = 32  # tokens; fewer do not fill the tiles of a matmul
_SECONDS_BESIDE = 0.3  # maximum seconds of a step with prompt tokens while requests decode
# maximum seconds of a step while none decodes, as requests may arrive meanwhile
_SECONDS_ALONE = 1.0
_LEAST_TIMED = 8  # minimum number of prompt tokens of a step, however long they take
_RISE = 1.05  # factor by which the minimum time of a prompt token may rise with a step


def prefill_tokens(waiting: int, budget: int) -> int:
    """Return how many of `waiting` prompt tokens the next step computes.

    budget: maximum number of tokens of a step.
    """
    return min(budget, max(_LEAST, budget // _SHARE, -(-waiting // 2)))


def scored_prefill_tokens(budget: int) -> int:
    """Return the maximum number of prompt tokens with log-probabilities in a step with decodes.

    Each such token also costs a row of logits over the whole vocabulary. In small models the row
    may take as long as the token itself.
    """
    return max(_LEAST, budget // _SCORED)


def startable_tokens(tokens: int, requests: int, startable: int) -> int:
    """Return an estimate of the tokens of the first `startable` of `requests` requests.

    tokens: the tokens of all these requests together.
    """
    return tokens * startable // max(1, requests)


def steps_until_computed(tokens: int, budget: int) -> int:
    """Return the maximum number of steps for `tokens` prompt tokens in chunks by
    `prefill_tokens`."""
    steps = 0
    while tokens > 0:
        tokens -= prefill_tokens(tokens, budget)
        steps += 1
    return steps


class PromptPace:
    """A bound on the prompt tokens of a step, from the time that the last steps took.

    A step's time beyond that of its decodes is attributed to its prompt tokens. The time of decodes
    is the shorter of the last two steps without prompt tokens, as a step may be slow for other
    reasons. A slow step with prompt tokens makes the next two or three smaller than necessary. If
    decodes take most of the bound, prompts get as much time as decodes. Otherwise rows would become
    free faster than prompts fill them.
    """

    def __init__(self) -> None:
        self._seconds = 0.0  # seconds of a prompt token; 0: unknown
        self._least = 0.0  # recent minimum of the seconds of a prompt token; 0: unknown
        self._decodes = (0.0, 0.0)  # seconds of the last two steps without prompt tokens

    def observe(self, decodes: int, context: int, tokens: int, seconds: float) -> None:
        """Update the time of a prompt token with the time of a step.

        decodes: number of decodes in the step.
        context: total number of tokens whose KV the decodes read.
        tokens: prompt tokens of the step.
        """
        if tokens == 0:
            self._decodes = (self._decodes[1], seconds)
        elif tokens >= _LEAST_TIMED:
            self._seconds = max(seconds - min(self._decodes), seconds / 4) / tokens
            self._least = min(_RISE * self._least or self._seconds, self._seconds)

    def least_seconds(self, decodes: int, tokens: int) -> float:
        """Return the least time that a step is expected to take; see `observe` for the
        parameters."""
        return (min(self._decodes) if decodes else 0.0) + tokens * self._least

    def rows(self, most: int) -> int:
        """Return the maximum number of running requests.

        most: the number of rows.
        """
        return most

    def limit(self, tokens: int, decodes: int, context: int) -> int:
        """Return `tokens`, or fewer prompt tokens if the step would take too long.

        decodes: the number of decoding requests, which is also the minimum number of prompt tokens.
        context: total number of tokens whose KV these requests read.
        """
        if not self._seconds:
            return tokens
        alone = min(self._decodes)
        seconds = max(_SECONDS_BESIDE - alone, alone) if decodes else _SECONDS_ALONE
        return min(tokens, max(_LEAST_TIMED, decodes, int(seconds / self._seconds)))
