"""Drafter, Drafts: the interface between the scheduler and drafters of speculative decoding.

    drafts = drafter.begin(token_ids, num_prompt, prediction, key)   when a request first drafts
    drafts.extend(tokens)                                            newly accepted tokens, in order
    drafts.propose(most)                                             0 to `most` next tokens
    drafts.end()                                                     when the request ends

`extend` may be called late: the scheduler need not call it in steps without drafts, so paused
speculation costs nothing. `Drafts.num_tokens` is the number of tokens that the drafts have.
"""

from collections.abc import Sequence
from typing import Protocol


class Drafts(Protocol):
    """The source of one request's drafts."""

    @property
    def num_tokens(self) -> int:
        """The length of the known text, prompt and output, in tokens."""
        ...

    def extend(self, tokens: Sequence[int]) -> None:
        """Append accepted tokens to the text."""
        ...

    def propose(self, most: int) -> list[int]:
        """Return 0 to `most` tokens that may continue the text; the state does not change."""
        ...

    def end(self) -> None:
        """Store the answer as a source of drafts for later requests with the same key.

        This is the last call.
        """
        ...


class Drafter(Protocol):
    """A source of drafts; one for each engine."""

    def begin(
        self, token_ids: Sequence[int], num_prompt: int, prediction: Sequence[int], key: bytes
    ) -> Drafts:
        """Return the drafts of a request.

        token_ids: the prompt and the output known so far, without virtual tokens.
        num_prompt: the index in token_ids where the output begins.
        prediction: tokens that the client expects in the answer; may be empty.
        key: the root of the request's prefix hashes (model, adapter, salt). Requests of different
            keys never draft from each other's answers.
        """
        ...
