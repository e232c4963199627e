"""Fixtures of all tests of `deployments`."""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import pytest

from deployments.api.output import grammars
from engine.structured.sandbox import GrammarSandbox

# Number of vocabularies whose sandboxes are kept, with at most two child processes each.
KEPT_SANDBOXES = 8


@pytest.fixture(autouse=True, scope="session")
def shared_sandboxes() -> Iterator[None]:
    """Let all tests use one grammar sandbox per vocabulary.

    Most tests build an API with a new tokenizer, each of which would start a child process, which
    takes 0.2 s.
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
