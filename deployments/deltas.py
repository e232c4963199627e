"""coalesce: merges the deltas of a choice that nobody has read yet."""

from typing import TypeVar

import msgspec

from engine.messages import Delta

T = TypeVar("T")


def coalesce(items: list[tuple[int, Delta]], keep: int) -> list[tuple[int, Delta]]:
    """Merge deltas into one per choice if there are more than `keep` deltas per choice.

    Deltas accumulate when the client or this process is slow; fewer events help to catch up.

    items: (index of the choice, delta), in the order of arrival.
    """
    if len(items) <= keep or len(items) <= keep * len({choice for choice, _ in items}):
        return items
    merged: dict[int, Delta] = {}
    for choice, delta in items:
        into = merged.get(choice)
        if into is None:
            # The delta is copied, as the router may still refer to the original.
            merged[choice] = msgspec.structs.replace(delta, token_ids=list(delta.token_ids))
            continue
        into.token_ids += delta.token_ids
        into.finish, into.stop_token, into.error = delta.finish, delta.stop_token, delta.error
        into.cached = max(into.cached, delta.cached)
        into.logprobs = _joined(into.logprobs, delta.logprobs)
        into.routed = delta.routed or into.routed
        into.prompt_logprobs = _joined(into.prompt_logprobs, delta.prompt_logprobs)
    return list(merged.items())


def _joined(a: list[T] | None, b: list[T] | None) -> list[T] | None:
    return [*(a or ()), *(b or ())] if a or b else None
