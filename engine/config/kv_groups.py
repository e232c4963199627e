"""KVGroups: which tokens' keys and values the layers of a model keep. No torch here.

Layers that keep the same tokens (all, or those of a window) and whose heads have one shape form a
class. Classes are cut into groups of about equally many layers, so that one block, which holds
block_size tokens for the layers of one group, is of the same size whatever group it serves: there
is one pool of blocks, and a request has a table for each group. A model whose layers are all alike
is one group.

    request's tokens        |  block 0  |  block 1  |  block 2  |  block 3 ..
    group 0 (all keys)         17          4           9           21
    group 1 (window)           -           -           30          2        the rest went back
    its table               17 - 4 - 9 30 21 2       entry = block * number of groups + group

A kind is pure arithmetic over tokens and blocks of `size` tokens. A new kind is a class with these
five members; scheduler, block manager and admission ask nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Protocol

from engine.architectures.recurrent.mixer import Mixer
from engine.config.model_config import LayerAttention, ModelConfig
from kernels.kv.format import KVFormat

TYPICAL = 4096  # tokens of the request that room is told in
MOST_GROUPS = 8  # tables a request may have; more layers a block rather than more


class KVKind(Protocol):
    """The kind of a group: which blocks of a request its layers keep.

    A kind is pure arithmetic over tokens and blocks of `size` tokens. A new kind is a class with
    these five members; scheduler, block manager and admission ask nothing else.
    """

    @property
    def whole(self) -> bool:
        """Whether a running request gives back no blocks, so that `behind` is always 0."""
        ...

    @property
    def by_position(self) -> bool:
        """Whether block i holds the tokens i * size and following, and may be found again by these
        tokens.

        Otherwise the first block holds a state of the whole request: no prefix starts from the
        block, and preemption loses the state.
        """
        ...

    def behind(self, position: int, size: int) -> int:
        """The number of leading blocks that no token from `position` on reads."""
        ...

    def most(self, tokens: int, size: int) -> int:
        """The most blocks that a request of so many tokens needs at once to compute its next
        token."""
        ...

    def describe(self) -> str:
        """Return what the layers keep, for people: "all tokens", "the last 4,096 tokens"."""
        ...


@dataclass(frozen=True, slots=True)
class Full:
    """The kind of layers that keep all keys and values, or all latents."""

    whole: bool = True
    by_position: bool = True

    def behind(self, position: int, size: int) -> int:
        return 0

    def most(self, tokens: int, size: int) -> int:
        return -(-tokens // size)

    def describe(self) -> str:
        return "all tokens"


@dataclass(frozen=True, slots=True)
class Window:
    """The kind of layers that read the last `window` tokens: the token at t reads t - window + 1 ..
    t."""

    window: int
    whole: bool = False
    by_position: bool = True

    def behind(self, position: int, size: int) -> int:
        return max(0, position - self.window + 1) // size

    def most(self, tokens: int, size: int) -> int:
        # `window` tokens in a row lie in so many blocks, wherever they begin.
        return min(-(-tokens // size), (self.window - 2) // size + 2)

    def describe(self) -> str:
        return f"the last {self.window:,} tokens"


@dataclass(frozen=True, slots=True)
class Chunked:
    """The kind of layers that read the current chunk of a context cut into pieces of `chunk`
    tokens."""

    chunk: int
    whole: bool = False
    by_position: bool = True

    def behind(self, position: int, size: int) -> int:
        return position // self.chunk * self.chunk // size

    def most(self, tokens: int, size: int) -> int:
        return min(-(-tokens // size), (self.chunk - 2) // size + 2)

    def describe(self) -> str:
        return f"a piece of {self.chunk:,} tokens"


@dataclass(frozen=True, slots=True)
class KVGroup:
    """The layers that share a table.

    layers: their numbers.
    attention: how each of these layers attends.
    """

    kind: KVKind
    layers: tuple[int, ...]
    attention: LayerAttention

    @property
    def tensors(self) -> int:
        """The number of tensors that the cache has of each token; see `LayerAttention.tensors`."""
        return self.attention.tensors

    @property
    def elements(self) -> int:
        """The number of elements of one token's keys, or values, in one layer."""
        heads, dim = self.attention.kept
        return heads * dim

    def token_bytes(self, form: KVFormat) -> int:
        """The bytes of one token's keys, or values, in one layer."""
        return form.token_bytes(*self.attention.kept)


@dataclass(frozen=True, slots=True)
class KVView:
    """The layers of a group that find a request's keys at the same blocks of their caches.

    Where several layers share a place, each has `parts` times as many blocks, which are `parts`
    times smaller. Of the pool's block b, such a layer has the block at b * parts + part.
    """

    group: int
    part: int
    parts: int
    layers: tuple[int, ...]


@dataclass(frozen=True)
class KVGroups:
    """The groups of a model's layers, and how a block is shared among layers.

    groups: the groups, never empty.
    slots: places for layers of the largest shape in a block; a group has at most as many layers, or
        several in a place where the layers are smaller.
    """

    groups: tuple[KVGroup, ...]
    slots: int
    borrowed: tuple[tuple[int, int], ...] = ()  # layers without keys, and those whose they read
    # Layers that keep a state of each running request, apart from the blocks: by rows.
    recurrent: tuple[tuple[int, Mixer], ...] = ()

    @cached_property
    def views(self) -> tuple[KVView, ...]:
        """The views of all groups; the views of one group follow each other.

        A group whose layers are as large as any layer is one view.
        """
        views = []
        for number, group in enumerate(self.groups):
            parts = self.elements // group.elements
            for part in range(min(parts, len(group.layers))):
                views.append(KVView(number, part, parts, group.layers[part::parts]))
        return tuple(views)

    @property
    def kinds(self) -> tuple[KVKind, ...]:
        return tuple(group.kind for group in self.groups)

    @property
    def num_whole(self) -> int:
        """The number of groups of which a running request gives back no blocks."""
        return sum(group.kind.whole for group in self.groups)

    @property
    def tensors(self) -> int:
        """The number of tensors of each place: keys and values, or latents where no layer has
        others."""
        return max(group.tensors for group in self.groups)

    @property
    def elements(self) -> int:
        """The number of elements of one token's keys, or values, in one place."""
        return max(group.elements for group in self.groups)

    def place_bytes(self, form: KVFormat) -> int:
        """The bytes of one token's keys, or values, in one place."""
        return max(group.token_bytes(form) for group in self.groups)

    def bytes_per_block(self, size: int, form: KVFormat) -> int:
        return self.tensors * self.slots * self.place_bytes(form) * size

    def token_bytes(self, form: KVFormat) -> dict[KVKind, tuple[int, int]]:
        """Return for each kind the number of its layers and the bytes that a token takes in these
        layers."""
        by_kind: dict[KVKind, tuple[int, int]] = {}
        for group in self.groups:
            layers, taken = by_kind.get(group.kind, (0, 0))
            count = len(group.layers)
            more = group.tensors * count * group.token_bytes(form)
            by_kind[group.kind] = (layers + count, taken + more)
        return by_kind

    @property
    def state_bytes(self) -> int:
        """The float32 bytes of one request's state, or one snapshot, in all recurrent layers."""
        shapes = [shape for _, record in self.recurrent for shape in record.state_shapes]
        return 4 * sum(map(prod, shapes))

    def of(self, layers: range) -> "KVGroups":
        """Return as many groups, restricted to these layers of one pipeline stage."""
        groups = tuple(
            replace(group, layers=tuple(number for number in group.layers if number in layers))
            for group in self.groups
        )
        fit = [self.elements // group.elements for group in groups]
        slots = max(
            -(-len(group.layers) // parts) for group, parts in zip(groups, fit, strict=True)
        )
        borrowed = tuple(pair for pair in self.borrowed if pair[0] in layers)
        recurrent = tuple(pair for pair in self.recurrent if pair[0] in layers)
        return KVGroups(groups, slots, borrowed, recurrent)

    def blocks(self, tokens: int, size: int) -> int:
        """The most blocks that a request of so many tokens needs at once."""
        return blocks_for(self.kinds, tokens, size)


def blocks_for(kinds: Sequence[KVKind], tokens: int, size: int) -> int:
    """The most blocks that a request of so many tokens needs at once."""
    return sum(kind.most(tokens, size) for kind in kinds)


def positions(kinds: Sequence[KVKind], blocks: int, size: int) -> int:
    """How many positions of requests of TYPICAL tokens so many blocks last for. People and
    routers, which know nothing of kinds, count in these positions."""
    return blocks * -(-TYPICAL // size) // blocks_for(kinds, TYPICAL, size)


def kv_groups(model: ModelConfig, ranks: int = 1, rank: int = 0) -> KVGroups:
    """Return the groups of a model's layers as one rank has them; the groups of one class follow
    each other.

    ranks: the number of ranks that the heads are divided among; each rank has as many groups.
    rank: the number of the rank.
    """
    attention = [layer.of_rank(ranks, rank) for layer in model.attention]
    classes: dict[tuple[KVKind, int, int, int, int], list[int]] = {}
    for number, layer in enumerate(attention):
        if layer.keys_of is not None or not layer.attends:
            continue
        shape = (layer.num_heads, *layer.kept, layer.tensors)
        classes.setdefault((_kind(layer), *shape), []).append(number)
    largest = max(kv_heads * dim for _, _, kv_heads, dim, _ in classes)
    # How many layers of each class find room in one place.
    fit = {key: largest // (key[2] * key[3]) for key in classes}
    needed = {key: -(-len(layers) // fit[key]) for key, layers in classes.items()}
    slots = max(min(needed.values()), -(-sum(needed.values()) // MOST_GROUPS))
    groups = []
    for key, layers in classes.items():
        for first in range(0, len(layers), slots * fit[key]):
            own = tuple(layers[first : first + slots * fit[key]])
            groups.append(KVGroup(key[0], own, attention[own[0]]))
    borrowed = tuple(
        (number, layer.keys_of)
        for number, layer in enumerate(attention)
        if layer.keys_of is not None
    )
    recurrent = tuple(
        (number, layer.mixer) for number, layer in enumerate(attention) if layer.mixer is not None
    )
    return KVGroups(tuple(groups), slots, borrowed, recurrent)


def _kind(layer: LayerAttention) -> KVKind:
    if layer.window and not layer.bidirectional:
        return Window(layer.window)
    return Chunked(layer.chunk) if layer.chunk else Full()
