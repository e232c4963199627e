"""RoutingRequest, RoutingDecision: the input and the output of `route`."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """The facts of a request that decide which replica gets it: sizes in tokens, prefixes, adapter.

    prefix_hashes: hashes of the prompt's prefixes (prefix_index.hash_prefix).
    sequences: number of choices.
    adapter: name of the adapter; "": none.
    batch_work: whether it waits for rows that other requests leave free.
    session: digest of the session that the client names, whose requests go to one replica; b"":
        none.
    """

    prompt_tokens: int
    max_tokens: int
    sequences: int = 1
    prefix_hashes: Sequence[bytes] = ()
    adapter: str = ""
    session: bytes = b""
    batch_work: bool = False


@dataclass(frozen=True, slots=True)
class RoutingDecision:
    """The choice of a replica for a request.

    replica: name of the replica.
    reason: "load"; "prefix" or "adapter" (the replica has it); "owner" (the replica is to have it);
        "spill" (the replica that has it is too busy); "move" (the same, and it pulls the prefix
        from there); "session" (its session is there); "only" (it is the only replica).
    seconds: expected time to the first token.
    cached: prompt tokens expected in the replica's prefix cache.
    loads_adapter: whether the replica must load the adapter first.
    source: name of the replica from which it should pull `cached` tokens; "": it has them itself.
    """

    replica: str
    reason: str
    seconds: float
    cached: int = 0
    loads_adapter: bool = False
    source: str = ""
