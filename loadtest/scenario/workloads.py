"""Named, seeded workloads: a name and a seed give the same requests, byte for byte, everywhere.

A request is (prompt token ids, output length). Ids are below 32,000, which every model's vocabulary
contains.
"""

import random
from collections.abc import Callable

Request = tuple[list[int], int]

LOW_ID, HIGH_ID = 10, 32_000


def _request(rng: random.Random, num_in: int, num_out: int) -> Request:
    return [rng.randrange(LOW_ID, HIGH_ID) for _ in range(num_in)], num_out


def _clamped_lognormal(rng: random.Random, mu: float, sigma: float) -> int:
    return max(4, min(1024, int(rng.lognormvariate(mu, sigma))))


def dialogue(rng: random.Random) -> list[Request]:
    """ShareGPT-like lengths: 1,024 requests, mean 116 in and 316 out (OpenPPL-LLM's setting)."""
    return [
        _request(rng, _clamped_lognormal(rng, 4.30, 0.93), _clamped_lognormal(rng, 5.48, 0.78))
        for _ in range(1024)
    ]


def uniform(rng: random.Random) -> list[Request]:
    """256 requests, input and output uniform in 100..1024 (nano-vllm's setting)."""
    return [_request(rng, rng.randint(100, 1024), rng.randint(100, 1024)) for _ in range(256)]


def single(rng: random.Random) -> list[Request]:
    """A stream of 128 tokens in and 256 out."""
    return [_request(rng, 128, 256)]


def streams32(rng: random.Random) -> list[Request]:
    """32 streams of 128 tokens in and 256 out."""
    return [_request(rng, 128, 256) for _ in range(32)]


def streams64(rng: random.Random) -> list[Request]:
    """64 streams of 128 tokens in and 256 out."""
    return [_request(rng, 128, 256) for _ in range(64)]


def streams256(rng: random.Random) -> list[Request]:
    """256 streams of 128 tokens in and 256 out."""
    return [_request(rng, 128, 256) for _ in range(256)]


def prefill(rng: random.Random) -> list[Request]:
    """Long prompts: 16 of 8,192 tokens, 8 out."""
    return [_request(rng, 8192, 8) for _ in range(16)]


def fixed512(rng: random.Random) -> list[Request]:
    """Short repeated inputs, 512 out, 256 requests (OpenPPL-LLM's fixed setting)."""
    return [_request(rng, [5, 13, 27, 51][i % 4], 512) for i in range(256)]


WORKLOADS: dict[str, Callable[[random.Random], list[Request]]] = {
    f.__name__: f
    for f in (dialogue, uniform, single, streams32, streams64, streams256, prefill, fixed512)
}


def build(name: str, seed: int = 0) -> list[Request]:
    """Return the requests of a workload. Raises KeyError with all names for an unknown name."""
    if name not in WORKLOADS:
        raise KeyError(f"no workload {name!r}; there are: {', '.join(sorted(WORKLOADS))}")
    return WORKLOADS[name](random.Random(seed))
