"""Fixtures that tests of the API share, whichever back end they put behind it."""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import pytest

from deployments.api.output import grammars
from engine.structured.sandbox import GrammarSandbox

# Vocabularies whose sandboxes stay, with two child processes at the most for each.
KEPT_SANDBOXES = 8


@pytest.fixture(autouse=True, scope="session")
def shared_sandboxes() -> Iterator[None]:
    """Share the grammar sandboxes of equal vocabularies.

    Most tests build an API with a tokenizer of its own, which would start a child process of 0.2 s.
    """

    @lru_cache(maxsize=KEPT_SANDBOXES)
    def shared(
        special: tuple[tuple[int, str], ...], num_tokens: int, end_ids: tuple[int, ...]
    ) -> GrammarSandbox:
        return GrammarSandbox(dict(special), num_tokens, end_ids)

    def sandbox(
        special: Mapping[int, str], num_tokens: int, end_ids: Sequence[int]
    ) -> GrammarSandbox:
        return shared(tuple(special.items()), num_tokens, tuple(end_ids))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammars, "GrammarSandbox", sandbox)
        yield
