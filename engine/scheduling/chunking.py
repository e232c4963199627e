"""Chunked prefill: how many prompt tokens a step computes while requests decode.

Prompt tokens that share a step with decodes put off the next token of every stream. All at once
they are one long gap; in two halves they are two shorter ones, and the first token of that prompt
comes later by one step of decodes. Halving what waits ends soon (8,192 tokens are five steps) and
takes a long queue in full steps, so that throughput is what it was. A small share of the budget is
taken at once: it takes about as long as a step of decodes (512 tokens of an 8B on an H200: 10 ms),
and halving it would cost as much as it gains.
"""

_SHARE = 16  # of the budget
_SCORED = 2  # of the budget, the part whose tokens may be scored beside decodes
_LEAST = 32  # tokens; fewer do not fill the tiles of matrix products


def prefill_tokens(waiting: int, budget: int) -> int:
    """Prompt tokens for the next step, of `waiting` that could be computed; budget: of a step."""
    return min(budget, max(_LEAST, budget // _SHARE, -(-waiting // 2)))


def scored_prefill_tokens(budget: int) -> int:
    """Prompt tokens of a step whose log-probabilities are wanted, beside decodes. Each costs a row
    of logits over the whole vocabulary as well: for small models up to as much as the token."""
    return max(_LEAST, budget // _SCORED)


def startable_tokens(tokens: int, requests: int, startable: int) -> int:
    """Of the tokens of all requests in a queue, about those of the few that there are rows for."""
    return tokens * startable // max(1, requests)


def steps_until_computed(tokens: int, budget: int) -> int:
    """Steps that `tokens` prompt tokens take at that pace, at most."""
    steps = 0
    while tokens > 0:
        tokens -= prefill_tokens(tokens, budget)
        steps += 1
    return steps
