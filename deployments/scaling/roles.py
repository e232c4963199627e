"""lines: estimates, for `manta plan`, the throughput of prefill and decode pools.

The estimate ignores queues, steps and the gaps between tokens, which `python -m bench.simulate
roles` simulates.
"""

from collections.abc import Iterator

from deployments.config.load import MantaConfig
from deployments.scaling.policy import RATES

_WORK = ((1024, 256), (8192, 256), (2048, 1024))  # (prompt, output) tokens per request
_ENOUGH = 0.9  # `share_of_together` below which the lines advise against roles


def share_of_together(prefills: int, decodes: int, prompt: int, output: int, kind: str) -> float:
    """Return the requests/s of pools with roles, divided by the requests/s of the same replicas
    without roles.

    The result is at most 1, because replicas of one role idle while those of the other role are
    full.

    prefills, decodes: numbers of replicas of each role.
    prompt, output: tokens of each request.
    kind: "gpu" or "cpu".
    """
    prompts, outputs = RATES[kind]
    together = (prefills + decodes) / (prompt / prompts + output / outputs)
    return min(prefills * prompts / prompt, decodes * outputs / output) / together


def lines(config: MantaConfig) -> Iterator[str]:
    """Yield the lines of `manta plan` about prefill and decode pools; none without such pools."""
    if not config.apart:
        return
    pools = config.engine_pools
    counts = {
        role: sum(
            max(pool.replicas if pool.max_replicas is None else pool.max_replicas, 1)
            for pool in pools.values()
            if (pool.role == "prefill") == (role == "prefill")
        )
        for role in ("prefill", "decode")
    }
    name, pool = next(iter(pools.items()))
    kind = config.kind(name, pool)
    shares = {
        work: share_of_together(counts["prefill"], counts["decode"], *work, kind) for work in _WORK
    }
    yield (
        f"Roles    {counts['prefill']} for prompts, {counts['decode']} for answers; requests/s "
        "against the same replicas without roles, if none was measured:"
    )
    for (prompt, output), share in shares.items():
        verdict = "" if share >= _ENOUGH else ", so roles do not pay in tokens/s"
        yield f"  {prompt:>6,} tokens in, {output:>5,} out: {share:.2f}{verdict}"
    yield (
        "  Roles keep prompts out of the steps of answers, at the price of replicas that idle "
        "while others are full; engine.target_tpot_ms bounds the steps too"
    )
