"""Chunked prefill: how many prompt tokens a step computes while requests decode.

Prompt tokens that share a step with decodes delay the next token of every stream. A whole prompt in
one step is one long gap. In two halves it is two shorter gaps, and the first token of that prompt
comes later by one step of decodes. Each step therefore computes half of the waiting prompt tokens.
This ends soon: 8,192 tokens take five steps. A long queue still fills whole steps, so throughput
does not fall. A small share of the budget is computed at once: it takes about as long as a step of
decodes (512 tokens of an 8B model on an H200: 10 ms), and halving it costs as much as it gains.

On a slow device, or at the end of a long context, even that share is a gap that a reader sees: 512
tokens at position 7,000 take seconds on one core. `PromptPace` therefore bounds a step in seconds
as well, by what the last one took.
"""

_SHARE = 16  # 1 / the share of the budget that is computed at once
_SCORED = 2  # 1 / the share of the budget that may be scored beside decodes
_LEAST = 32  # tokens; fewer do not fill the tiles of a matmul
_SECONDS_BESIDE = 0.3  # of a step that computes prompt tokens while requests decode
_SECONDS_ALONE = 1.0  # while none does: for a request that comes meanwhile
_LEAST_TIMED = 8  # tokens that a step computes, however long they take


def prefill_tokens(waiting: int, budget: int) -> int:
    """Return how many of `waiting` prompt tokens the next step computes.

    budget: tokens of a step.
    """
    return min(budget, max(_LEAST, budget // _SHARE, -(-waiting // 2)))


def scored_prefill_tokens(budget: int) -> int:
    """Return the most prompt tokens with log-probabilities in a step beside decodes.

    Each of them also costs a row of logits over the whole vocabulary. For small models that is up
    to as much as the token itself.
    """
    return max(_LEAST, budget // _SCORED)


def startable_tokens(tokens: int, requests: int, startable: int) -> int:
    """Estimate the tokens of the first `startable` requests, if all `requests` have `tokens`."""
    return tokens * startable // max(1, requests)


def steps_until_computed(tokens: int, budget: int) -> int:
    """Return the most steps that `tokens` prompt tokens take in chunks of `prefill_tokens`."""
    steps = 0
    while tokens > 0:
        tokens -= prefill_tokens(tokens, budget)
        steps += 1
    return steps


class PromptPace:
    """The number of prompt tokens that a step has time for, by what the last steps took.

    A step's seconds beyond those of decodes alone are its prompt tokens'. Decodes alone are the
    faster of the last two steps without prompt tokens: a step can take long for another reason, say
    because the process did not run. Such a step with prompt tokens makes the next two or three
    smaller than they could be.

    Where decodes alone take most of the bound, prompts get as much time as they do. Otherwise rows
    would become free faster than prompts fill them.
    """

    def __init__(self) -> None:
        self._seconds = 0.0  # a prompt token; 0: not known
        self._decodes = (0.0, 0.0)  # the last two steps without prompt tokens

    def observe(self, decodes: int, context: int, tokens: int, seconds: float) -> None:
        """Learn from a step that took so many seconds.

        decodes: decodes of the step.
        context: tokens whose keys the decodes read together.
        tokens: prompt tokens of the step.
        """
        if tokens == 0:
            self._decodes = (self._decodes[1], seconds)
        elif tokens >= _LEAST_TIMED:
            self._seconds = max(seconds - min(self._decodes), seconds / 4) / tokens

    def rows(self, most: int) -> int:
        """Return the number of requests that may run at once. most: rows that there are."""
        return most

    def limit(self, tokens: int, decodes: int, context: int) -> int:
        """Return `tokens`, or the number of prompt tokens that there is time for, if that is less.

        decodes: requests that wait for their next token. As many prompt tokens are computed however
            long they take.
        context: tokens whose keys these requests read together.
        """
        if not self._seconds:
            return tokens
        alone = min(self._decodes)
        seconds = max(_SECONDS_BESIDE - alone, alone) if decodes else _SECONDS_ALONE
        return min(tokens, max(_LEAST_TIMED, decodes, int(seconds / self._seconds)))
