"""RoutingRequest and RoutingDecision: what a router asks of `route`, and the answer."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """The need of a request, in tokens.

    prefix_hashes: of its prompt (prefix_index.hash_prefix). sequences: choices.
    """

    prompt_tokens: int
    max_tokens: int
    sequences: int = 1
    prefix_hashes: Sequence[bytes] = ()
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class RoutingDecision:
    """The choice of a replica for a request.

    replica: its name.
    reason: "load"; "prefix" or "adapter" (the replica has it); "owner" (it shall have it); "spill"
        (the replica that has it is too busy); "only".
    seconds: expected time to the first token.
    cached: prompt tokens expected in the replica's cache.
    loads_adapter: whether the replica must load the adapter first.
    """

    replica: str
    reason: str
    seconds: float
    cached: int = 0
    loads_adapter: bool = False
