"""RoutingRequest, RoutingDecision: the input and the output of `route`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """The properties of a request that determine which replica gets it.

    prompt_tokens: number of prompt tokens. max_tokens: limit of its output tokens.
    prefix_hashes: hashes of the prompt's prefixes (prefix_index.hash_prefix).
    sequences: number of choices.
    adapter: name of the adapter; "": none.
    batch_work: whether the request may only use rows that other requests leave free.
    session: digest of the client's session, whose requests should go to the same replica; b"":
        none.
    """

    prompt_tokens: int
    max_tokens: int
    sequences: int = 1
    prefix_hashes: Sequence[bytes] = ()
    adapter: str = ""
    session: bytes = b""
    batch_work: bool = False


Reason = Literal[
    "load", "prefix", "adapter", "owner", "spill", "move", "handover", "session", "only"
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class RoutingDecision:
    """The choice of a replica for a request.

    replica: name of the replica.
    reason: "load": the lowest expected cost; "prefix", "adapter": the replica has the prefix or
        adapter in its cache; "owner": no replica has it, and consistent hashing has chosen this
        one; "spill": the replicas that have it are too busy; "move": the replica pulls the prefix
        from another one; "handover": it pulls the prompt that the prefill replica before it has
        computed; "session": the session's replica; "only": there is no other replica.
    seconds: expected time to the first token.
    cached: number of prompt tokens expected in the replica's prefix cache.
    loads_adapter: whether the replica must load the adapter first.
    source: name of the replica from which the `cached` tokens should be pulled; "": the chosen
        replica has them itself.
    """

    replica: str
    reason: Reason
    seconds: float
    cached: int = 0
    loads_adapter: bool = False
    source: str = ""
