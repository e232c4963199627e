"""BlockManager and prefix hashes: who owns a block, what is found again, what is evicted first."""

from typing import Any

import pytest

from engine.lora.tiers.adapter import Adapter
from engine.messages import AdapterInfo
from engine.scheduling.memory import block_manager as module
from engine.scheduling.memory.block_manager import BlockManager
from engine.scheduling.memory.prefix_hash import extend_hashes, root_hash
from engine.scheduling.request import Request
from tests.fakes import make_config, make_request

SIZE = 4


def make(prompt: list[int], id: int = 1, adapter: Adapter | None = None, **fields: str) -> Request:
    return Request(make_request(id, prompt, **fields), make_config(block_size=SIZE), id, adapter)


def fill(manager: BlockManager, request: Request) -> None:
    """Give a request blocks for all its tokens, and offer the full ones to the prefix cache."""
    count = -(-len(request.token_ids) // SIZE)
    request.blocks = manager.allocate(count)
    manager.hash_blocks(request, len(request.token_ids))


def found(manager: BlockManager, request: Request) -> list[int]:
    return manager.match_prefix(manager.hash_prefix(request, len(request.token_ids) // SIZE))


def test_a_prefix_is_found_while_used_and_after() -> None:
    """Bug: cached blocks that vanish when their first owner ends, or partial blocks that match."""
    manager = BlockManager(8, SIZE)
    first = make(list(range(2, 12)))  # two full blocks and a half
    fill(manager, first)
    second = make([*range(2, 12), 40, 41], 2)
    assert found(manager, second) == first.blocks[:2]
    manager.check_integrity([first.blocks])
    manager.free(first.blocks)
    manager.check_integrity([])
    assert manager.num_free == 8
    matched = found(manager, second)
    assert matched == first.blocks[:2] and manager.num_unused(matched) == 2
    manager.share(matched)
    assert manager.num_free == 6 and manager.num_exclusive(matched) == 2
    manager.check_integrity([matched])


def test_least_recently_used_goes_first_and_tails_before_heads() -> None:
    """Bug: a prefix loses its head first, and its tail fills memory though nobody can find it."""
    manager = BlockManager(6, SIZE)
    old, new = make(list(range(2, 14)), 1), make(list(range(20, 32)), 2)
    fill(manager, old)
    fill(manager, new)
    manager.free(old.blocks)
    manager.free(new.blocks)
    for left in (2, 1, 0):
        manager.allocate(1)
        assert found(manager, old) == old.blocks[:left], "old first, tail first"
        assert found(manager, new) == new.blocks
    manager.allocate(1)
    assert found(manager, new) == new.blocks[:2]


def test_sharing_makes_recently_used() -> None:
    """Bug: a prefix that everybody uses is evicted because it is the oldest."""
    manager = BlockManager(4, SIZE)
    popular, other = make(list(range(2, 10)), 1), make(list(range(20, 28)), 2)
    for request in (popular, other):
        fill(manager, request)
        manager.free(request.blocks)
    manager.share(popular.blocks)
    manager.free(popular.blocks)
    manager.allocate(2)
    assert found(manager, popular) == popular.blocks and not found(manager, other)


def test_salt_adapter_and_model_separate_prefixes() -> None:
    """Bug: one tenant finds out by timing what another tenant's prompt was."""
    manager = BlockManager(16, SIZE)
    prompt = list(range(2, 10))
    fill(manager, make(prompt))
    assert len(found(manager, make(prompt, 2))) == 2
    assert not found(manager, make(prompt, 2, cache_salt="tenant"))
    adapter, newer = (
        Adapter(AdapterInfo("a", revision, "lora", 8, 1, []), "", "") for revision in "12"
    )
    assert not found(manager, make(prompt, 2, adapter))
    fill(manager, make(prompt, 2, adapter))
    assert not found(manager, make(prompt, 2, newer)), "another revision has other keys"
    roots = {root_hash(*parts) for parts in [("a", "b", ""), ("ab", "", ""), ("a", "", "b")]}
    assert len(roots) == 3, "parts run together"


def test_hashes_are_chained() -> None:
    """Bug: equal blocks after different prefixes share keys, which depend on the prefix."""
    root, first, other = root_hash("", "", ""), [], []
    extend_hashes(first, root, [1, 2, 3, 4, 5, 6, 7, 8], SIZE, 2)
    extend_hashes(other, root, [9, 2, 3, 4, 5, 6, 7, 8], SIZE, 2)
    assert not set(first) & set(other) and all(len(digest) == 16 for digest in first)
    stepwise: list[bytes] = []
    for count in (1, 1, 2):
        extend_hashes(stepwise, root, [1, 2, 3, 4, 5, 6, 7, 8], SIZE, count)
    assert stepwise == first
    with pytest.raises(AssertionError, match="not known"):
        extend_hashes([], root, [1, 2, 3], SIZE, 1)


def test_each_block_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a long prompt is hashed again at every try of admission and at every block it fills."""
    hashed = []

    def counting(
        hashes: list[bytes], root: bytes, tokens: list[int], size: int, n: int, images: list[Any]
    ) -> None:
        hashed.append(max(0, n - len(hashes)))
        extend_hashes(hashes, root, tokens, size, n, images)

    monkeypatch.setattr(module, "extend_hashes", counting)
    manager = BlockManager(16, SIZE)
    request = make(list(range(2, 30)))
    for _ in range(5):
        found(manager, request)
    fill(manager, request)
    manager.hash_blocks(request, 28)
    assert sum(hashed) == 7


def test_blocks_are_offered_only_when_computed_and_known() -> None:
    """Bug: a block is found before its keys are written, or under a name of tokens to come."""
    manager = BlockManager(8, SIZE)
    request = make(list(range(2, 14)))
    request.blocks = manager.allocate(3)
    manager.hash_blocks(request, 7)
    assert found(manager, make(list(range(2, 14)), 2)) == request.blocks[:1]
    request.token_ids.extend([5, 6])
    manager.hash_blocks(request, 16)  # tokens 14 and 15 are pending
    assert request.num_registered == 3


def test_the_same_block_computed_twice_is_named_once() -> None:
    """Bug: two requests compute one prefix at once, and freeing one of them un-names the other."""
    manager = BlockManager(8, SIZE)
    first, two = make(list(range(2, 10)), 1), make(list(range(2, 10)), 2)
    fill(manager, first)
    fill(manager, two)
    manager.free(two.blocks)
    manager.check_integrity([first.blocks])
    assert found(manager, two) == first.blocks
    manager.free(first.blocks)
    manager.check_integrity([])


def test_forgotten_and_reset_blocks_are_not_found() -> None:
    """Bug: keys of another weight version, or of a request that failed, are served from cache."""
    manager = BlockManager(8, SIZE)
    bad, good = make(list(range(2, 10)), 1), make(list(range(20, 28)), 2)
    fill(manager, bad)
    fill(manager, good)
    manager.forget(bad.hashes)
    assert not found(manager, bad) and found(manager, good)
    manager.free(good.blocks)
    manager.forget(good.hashes[:1])
    manager.check_integrity([bad.blocks])
    assert not found(manager, good)
    manager.reset()
    manager.check_integrity([bad.blocks])
    assert manager.num_free == 6


def test_a_double_free_is_an_error() -> None:
    """Bug: a block freed twice is given to two requests."""
    manager = BlockManager(4, SIZE)
    blocks = manager.allocate(2)
    manager.free(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        manager.free(blocks)
