"""RoutingRequest and RoutingDecision: what a router asks of `route`, and the answer."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """What a request needs of a replica, in tokens.

    prefix_hashes: of its prompt (prefix_index.hash_prefix). sequences: choices.
    """

    prompt_tokens: int
    max_tokens: int
    sequences: int = 1
    prefix_hashes: Sequence[bytes] = ()
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class RoutingDecision:
    """replica: its name. reason: "load"; "prefix" or "adapter" (the replica has it); "owner" (it
    shall have it); "spill" (the replica that has it is too busy); "only". seconds: expected to the
    first token. cached: prompt tokens expected in its cache. loads_adapter: it must first."""

    replica: str
    reason: str
    seconds: float
    cached: int = 0
    loads_adapter: bool = False
