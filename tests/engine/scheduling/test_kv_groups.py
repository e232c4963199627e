"""Groups of layers that keep different things of a request: what a model's layers become, what a
request holds, what a prefix may start from, and that the scheduler needs to know none of it."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from engine.config.kv_groups import Chunked, Full, KVKind, Window, blocks_for, kv_groups
from engine.config.model_config import ModelConfig
from engine.errors import ConfigError
from engine.runner.caches.kv_cache import KVCache, in_views
from engine.scheduling.memory.block_manager import BlockManager
from engine.scheduling.request import Request
from kernels.kv.format import KVFormat
from kernels.metadata import AttentionMeta
from tests.engine.scheduling.driver import random_run
from tests.engine.test_runner import CONFIG
from tests.fakes import make_config, make_core, make_request, run

SIZE = 4


@dataclass(frozen=True)
class State:
    """A kind of KV with the state of a whole request in one block.

    No request can start from the middle, and a preempted request begins anew. This is all that such
    a kind takes. No model has it, as recurrent layers keep their states in rows.
    """

    whole: bool = True
    by_position: bool = False

    def behind(self, position: int, size: int) -> int:
        return 0

    def most(self, tokens: int, size: int) -> int:
        return 1

    def describe(self) -> str:
        return "a state"


MIXTURES: dict[str, tuple[KVKind, ...]] = {
    "window alone": (Window(6),),
    "a window of one": (Window(1),),
    "chunk alone": (Chunked(7),),
    "full and window": (Full(), Window(9)),
    "two windows first": (Window(5), Window(5), Full()),
    "full, window, chunk": (Full(), Window(5), Chunked(12)),
    "full and state": (Full(), State()),
    "state and window": (State(), Window(6)),
    "state alone": (State(),),
}


@pytest.mark.parametrize("kinds", MIXTURES.values(), ids=list(MIXTURES))
@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.slow), 1, 2])
def test_random_lives(kinds: tuple[KVKind, ...], seed: int) -> None:
    """Bug: a kind whose blocks go back while a token still reads them, are found under another
    group's name, or are never given back: the fake device sees the wrong keys, or the driver."""
    changes: dict[str, Any] = {"max_num_batched_tokens": 7} if seed == 2 else {}
    random_run(seed, num_blocks=34 * len(kinds), kinds=kinds, **changes)
    options = {"async_scheduling": seed == 1, "micro_batches": 2 + seed % 2}
    random_run(seed, num_blocks=34 * len(kinds), kinds=kinds, **changes, **options)


@pytest.mark.parametrize("policy", ["sum", "reserved", "peak"])
@pytest.mark.parametrize("kinds", MIXTURES.values(), ids=list(MIXTURES))
def test_careful_policies_never_preempt(kinds: tuple[KVKind, ...], policy: str) -> None:
    """Bug: a policy that counts what one group keeps, and finds the others' blocks missing."""
    driver = random_run(1, num_blocks=34 * len(kinds), kinds=kinds, admission=policy)
    assert driver.scheduler.counters.preemptions == 0


def test_a_window_holds_no_more_than_it_needs() -> None:
    """Bug: blocks behind the window stay until the request ends, so that a long context takes the
    memory of full attention."""
    core, _ = make_core(kinds=(Window(10),), num_blocks=8, max_model_len=128)
    core.add_request(make_request(1, 90, max_tokens=30, ignore_eos=True))
    most = 0
    while core.has_work():
        core.step()
        held = [core.scheduler.memory.pools[0].held(r) for r in core.scheduler.running.values()]
        most = max([most, *map(len, held)])
    assert most == blocks_for((Window(10),), 120, SIZE) == 4
    assert core.config.max_model_len == 128, "far more than 8 blocks of 4 tokens"


def table(manager: BlockManager, prompt: list[int], id: int) -> Request:
    request = Request(make_request(id, prompt), make_config(block_size=SIZE), id)
    request.row = id
    manager.extend([request], -(-len(prompt) // SIZE))
    manager.hash_blocks(request, len(prompt))
    return request


def test_a_hit_needs_the_last_blocks_of_a_window_and_all_of_the_rest() -> None:
    """Bug: a prefix is taken whose last keys one group has lost; or none is, because a group has
    lost what nobody reads."""
    manager = BlockManager(64, SIZE, kinds=(Full(), Window(5)))
    first = table(manager, list(range(2, 34)), 1)  # 8 blocks
    full, window = first.blocks[::2], first.blocks[1::2]
    hashes = manager.hash_prefix(first, 8)
    assert manager.match_prefix(hashes)[::2] == full
    assert manager.match_prefix(hashes)[1::2] == [-1] * 7 + [window[7]]
    manager.drop_behind(first, 32)
    assert manager.held(first) == [*full[:7], full[7], window[7]]
    assert manager.match_prefix(hashes[:3]) == [full[0], -1, full[1], -1, full[2], window[2]]
    manager.allocate(manager.num_free - 7 + 3)  # evicts the window's first three
    assert manager.match_prefix(hashes[:3]) == []
    assert manager.match_prefix(hashes[:4])[1::2] == [-1, -1, -1, window[3]]
    manager.allocate(manager.num_free)
    assert manager.match_prefix(hashes[:7]) == []
    assert manager.match_prefix(hashes)[1::2] == [-1] * 7 + [window[7]]
    manager.forget(hashes[:1])
    assert manager.match_prefix(hashes) == []


def test_a_conversation_is_found_again_though_its_window_has_moved_on() -> None:
    """Bug: the next turn finds nothing, because early blocks of a window went back."""
    core, _ = make_core(kinds=(Full(), Window(9)), num_blocks=64)
    turn = make_request(1, 40, max_tokens=8, ignore_eos=True)
    prompt = turn.token_ids.copy()
    tokens = [*prompt, *run(core, [turn])[1].tokens]
    again = make_request(2, [*tokens, 3, 4, 5], max_tokens=4)
    assert run(core, [again])[2].cached == 44  # all full blocks whose tokens were computed


def test_a_request_that_has_its_state_needs_no_block() -> None:
    """Bug: a long prompt of a model with states alone stalls after its first chunk, because no
    block is free, though it needs no other."""
    core, _ = make_core(kinds=(State(),), num_blocks=1, max_num_batched_tokens=8)
    core.add_request(make_request(1, 30, max_tokens=6, ignore_eos=True))
    for _ in range(30):
        core.step()
    assert not core.has_work()


def test_room_is_told_in_positions_of_a_request() -> None:
    """Bug: a router that books three blocks for what takes six, or sees a full replica empty."""
    for kinds in ((Full(),), (Full(), Window(8)), (Full(), Full())):
        core, _ = make_core(kinds=kinds, num_blocks=4096)
        stats = core.stats()
        per_position = blocks_for(kinds, 4096, SIZE) / 1024
        assert stats.free_blocks == stats.total_blocks == int(4096 / per_position)


def with_layers(*windows: int) -> ModelConfig:
    plain = CONFIG.plain_attention
    layers = tuple(replace(plain, window=window) for window in windows)
    return replace(CONFIG, num_layers=len(windows), attention=layers)


def test_layers_become_groups_of_about_one_size() -> None:
    """Bug: a layer in no group or in two; or blocks of which most is empty."""
    assert [g.layers for g in kv_groups(with_layers(0, 0, 0)).groups] == [(0, 1, 2)]
    groups = kv_groups(with_layers(*[8, 8, 8, 8, 8, 0] * 2))
    assert groups.slots == 2 and [len(g.layers) for g in groups.groups] == [2] * 6
    assert [g.kind for g in groups.groups] == [Window(8)] * 5 + [Full()]
    assert sorted(n for g in groups.groups for n in g.layers) == list(range(12))
    many = kv_groups(with_layers(0, *[8] * 39))
    assert len(many.groups) <= 9 and many.slots == 5
    # Smaller heads share a place.
    model = with_layers(8, 0, 0)
    small = replace(model.attention[1], num_kv_heads=1)
    mixed = kv_groups(replace(model, attention=(model.attention[0], small, small)))
    assert mixed.slots == 1 and [g.layers for g in mixed.groups] == [(0,), (1, 2)]
    assert mixed.bytes_per_block(16, KVFormat()) == 2 * 16 * model.num_kv_heads * model.head_dim * 2


def test_layers_of_several_groups_share_memory_but_no_block() -> None:
    """Bug: a block of one group overlaps another block of another group."""
    groups = kv_groups(with_layers(0, 8, 0, 8, 8))
    assert [g.layers for g in groups.groups] == [(0, 2), (1, 3), (4,)]
    kv = KVCache.allocate(groups, 6, SIZE, torch.float32, torch.device("cpu"))
    for group in groups.groups:
        for other in groups.groups:
            kv.storage.zero_()
            for layer in group.layers:
                for cache in kv.layers[layer]:
                    assert cache.is_contiguous()
                    assert not cache[2].any(), "layers of one group overlap"
                    cache[2] = 1.0
            for layer in other.layers:
                for cache in kv.layers[layer]:
                    assert not cache[[0, 1, 3, 4, 5]].any()
    kv.shrink(3)
    assert kv.layers[4][0].shape == (3, CONFIG.num_kv_heads, SIZE, CONFIG.head_dim)


def test_smaller_layers_share_a_place_and_no_element() -> None:
    """Bug: kernels take blocks to lie side by side where they do not, and read other layers'; or
    a padding token is written to the last block."""
    model = with_layers(0, 8, 8, 8)
    small = replace(model.attention[1], num_kv_heads=1)
    borrowing = replace(small, keys_of=2)
    attention = (model.attention[0], small, small, borrowing)
    groups = kv_groups(replace(model, attention=attention))
    assert CONFIG.num_kv_heads == 2 and groups.slots == 1
    assert [(view.group, view.part, view.layers) for view in groups.views] == [
        (0, 0, (0,)), (1, 0, (1,)), (1, 1, (2,)),
    ]  # fmt: skip
    kv = KVCache.allocate(groups, 6, SIZE, torch.float32, torch.device("cpu"))
    assert kv.layers[3] is kv.layers[2]
    slots = torch.tensor([2 * SIZE + 1, -1])
    meta = AttentionMeta(
        slots.int(), slots, slots, slots, torch.tensor([[2, 5]], dtype=torch.int32), 1, 1
    )
    for view, view_meta in zip(groups.views, in_views(groups, [meta, meta], SIZE), strict=True):
        assert view_meta.slots[1] == -1
        cache = kv.layers[view.layers[0]][0]
        assert cache.is_contiguous() and view_meta.window == (8 if view.group else 0)
        block = int(view_meta.slots[0]) // SIZE
        assert view_meta.slots[0] % SIZE == 1 and view_meta.block_table[0, 0] == block
        assert not cache[block].any(), "another layer's"
        cache[block] = 1.0
        cache[int(view_meta.block_table[0, 1])] = 1.0
        if view.group == 0:
            kv.storage.zero_()
    own = kv.storage.view(2, 6, -1)[0]
    assert own[[2, 5]].all() and not own[[0, 1, 3, 4]].any()


def test_layers_whose_keys_do_not_divide_are_refused() -> None:
    """Bug: a layer's blocks begin where another's are."""
    model = with_layers(0, 8)
    large = replace(model.attention[1], head_dim=3 * CONFIG.head_dim // 2)
    groups = kv_groups(replace(model, attention=(model.attention[0], large)))
    with pytest.raises(ConfigError, match="different sizes"):
        KVCache.allocate(groups, 6, SIZE, torch.float32, torch.device("cpu"))


def test_a_window_that_no_request_outgrows_is_none() -> None:
    """Bug: a short context pays for windows that never hide anything."""
    model = with_layers(0, 64, 32)
    assert [layer.window for layer in model.within(48).attention] == [0, 0, 32]
    assert len(kv_groups(model.within(32)).groups) == 1


def test_the_core_takes_the_longest_request_that_all_groups_hold() -> None:
    """Bug: a request longer than the blocks of one group waits for them for ever."""
    for kinds, longest in (((Full(),), 40), ((Full(), Full()), 20), ((Full(), Window(9)), 28)):
        core, _ = make_core(kinds=kinds, num_blocks=10, max_model_len=128)
        assert core.config.max_model_len == longest
        run(core, [make_request(1, longest - 3, max_tokens=None, ignore_eos=True)])
