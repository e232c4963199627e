"""Chunked prefill: how many prompt tokens a step computes while requests decode.

Prompt tokens that share a step with decodes delay the next token of every stream. A whole prompt in
one step is one long gap. In two halves it is two shorter gaps, and the first token of that prompt
comes later by one step of decodes. Each step therefore computes half of the waiting prompt tokens.
This ends soon: 8,192 tokens take five steps. A long queue still fills whole steps, so throughput
does not fall. A small share of the budget is computed at once: it takes about as long as a step of
decodes (512 tokens of an 8B model on an H200: 10 ms), and halving it costs as much as it gains.
"""

_SHARE = 16  # 1 / the share of the budget that is computed at once
_SCORED = 2  # 1 / the share of the budget that may be scored beside decodes
_LEAST = 32  # tokens; fewer do not fill the tiles of matrix products


def prefill_tokens(waiting: int, budget: int) -> int:
    """How many of `waiting` prompt tokens the next step computes. budget: tokens of a step."""
    return min(budget, max(_LEAST, budget // _SHARE, -(-waiting // 2)))


def scored_prefill_tokens(budget: int) -> int:
    """Most prompt tokens with log-probabilities in a step beside decodes. Each of them also costs a
    row of logits over the whole vocabulary, for small models up to as much as the token itself."""
    return max(_LEAST, budget // _SCORED)


def startable_tokens(tokens: int, requests: int, startable: int) -> int:
    """About the tokens of the `startable` first requests, if `requests` have `tokens` together."""
    return tokens * startable // max(1, requests)


def steps_until_computed(tokens: int, budget: int) -> int:
    """The most steps that `tokens` prompt tokens take in chunks of `prefill_tokens`."""
    steps = 0
    while tokens > 0:
        tokens -= prefill_tokens(tokens, budget)
        steps += 1
    return steps
