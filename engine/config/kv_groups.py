"""KVGroups: what of each request's tokens the layers of a model keep. No torch here.

Layers that keep the same (all keys, those of a window) and whose heads have one shape form a class.
Classes are cut into groups of about equally many layers, so that one block, which holds block_size
tokens for the layers of one group, is of the same size whatever group it serves: there is one pool
of blocks, and a request has a table for each group. A model whose layers are all alike is one
group.

    request's tokens        |  block 0  |  block 1  |  block 2  |  block 3 ..
    group 0 (all keys)         17          4           9           21
    group 1 (window)           -           -           30          2        the rest went back
    its table               17 - 4 - 9 30 21 2       entry = block * number of groups + group
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
    """What one group keeps of a request. Pure arithmetic over tokens and blocks of `size` tokens.

    A new kind is a class with these five; scheduler, block manager and admission ask nothing else.
    """

    @property
    def whole(self) -> bool:
        """A running request gives back nothing, so that `behind` is always 0."""
        ...

    @property
    def by_position(self) -> bool:
        """Block i is of the tokens i * size and following, and may be found again by what these
        are. Else the first block holds a state of the whole request: no prefix starts from it, and
        preemption loses it."""
        ...

    def behind(self, position: int, size: int) -> int:
        """Leading blocks that no token from `position` on reads."""
        ...

    def most(self, tokens: int, size: int) -> int:
        """The most blocks that a request of so many tokens needs at once to compute its next
        token."""
        ...

    def describe(self) -> str:
        """What is kept, for people: "12 layers that keep ..."."""
        ...


@dataclass(frozen=True, slots=True)
class Full:
    """All keys and values; latents likewise."""

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
    """Of the last `window` tokens: the token at t reads t - window + 1 .. t."""

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
    """Of the current one of the pieces of `chunk` tokens that the context is cut into."""

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
    """Layers that share a table. layers: their numbers; each is as `attention` says."""

    kind: KVKind
    layers: tuple[int, ...]
    attention: LayerAttention

    @property
    def tensors(self) -> int:
        """See `LayerAttention`."""
        return self.attention.tensors

    @property
    def elements(self) -> int:
        """Of one token's keys, or values, in one layer."""
        heads, dim = self.attention.kept
        return heads * dim

    def token_bytes(self, form: KVFormat) -> int:
        """The same in bytes."""
        return form.token_bytes(*self.attention.kept)


@dataclass(frozen=True, slots=True)
class KVView:
    """Layers of a group that find a request's keys at the same blocks of their caches. Where
    several layers share a place, each has `parts` times as many blocks, which are `parts` times
    smaller: of the pool's block b it has the one at b * parts + part."""

    group: int
    part: int
    parts: int
    layers: tuple[int, ...]


@dataclass(frozen=True)
class KVGroups:
    """groups: never empty. slots: places for layers of the largest shape in a block; a group has at
    most as many layers, or several in a place where they are smaller."""

    groups: tuple[KVGroup, ...]
    slots: int
    borrowed: tuple[tuple[int, int], ...] = ()  # layers without keys, and those whose they read
    # Layers that keep a state of each running request, apart from the blocks: by rows.
    recurrent: tuple[tuple[int, Mixer], ...] = ()

    @cached_property
    def views(self) -> tuple[KVView, ...]:
        """Those of a group follow each other. A group whose layers are as large as any is one."""
        found = []
        for number, group in enumerate(self.groups):
            parts = self.elements // group.elements
            for part in range(min(parts, len(group.layers))):
                found.append(KVView(number, part, parts, group.layers[part::parts]))
        return tuple(found)

    @property
    def kinds(self) -> tuple[KVKind, ...]:
        return tuple(group.kind for group in self.groups)

    @property
    def num_whole(self) -> int:
        """Groups of which a running request gives back nothing."""
        return sum(group.kind.whole for group in self.groups)

    @property
    def tensors(self) -> int:
        """Of each place: keys and values, or latents where no layer has others."""
        return max(group.tensors for group in self.groups)

    @property
    def elements(self) -> int:
        """Of one token's keys, or values, in one place."""
        return max(group.elements for group in self.groups)

    def place_bytes(self, form: KVFormat) -> int:
        """The same in bytes."""
        return max(group.token_bytes(form) for group in self.groups)

    def bytes_per_block(self, size: int, form: KVFormat) -> int:
        return self.tensors * self.slots * self.place_bytes(form) * size

    def token_bytes(self, form: KVFormat) -> dict[KVKind, tuple[int, int]]:
        """Of each kind: layers that keep keys and values so, and bytes that a token takes there."""
        found: dict[KVKind, tuple[int, int]] = {}
        for group in self.groups:
            layers, taken = found.get(group.kind, (0, 0))
            count = len(group.layers)
            more = group.tensors * count * group.token_bytes(form)
            found[group.kind] = (layers + count, taken + more)
        return found

    @property
    def state_bytes(self) -> int:
        """Of a running request, or a snapshot, in the layers that keep states: float32."""
        shapes = [shape for _, record in self.recurrent for shape in record.state_shapes]
        return 4 * sum(map(prod, shapes))

    def of(self, layers: range) -> "KVGroups":
        """As many groups, with what these layers keep: one stage's."""
        groups = tuple(
            replace(group, layers=tuple(number for number in group.layers if number in layers))
            for group in self.groups
        )
        fit = [self.elements // group.elements for group in groups]
        slots = max(-(-len(group.layers) // each) for group, each in zip(groups, fit, strict=True))
        borrowed = tuple(each for each in self.borrowed if each[0] in layers)
        recurrent = tuple(each for each in self.recurrent if each[0] in layers)
        return KVGroups(groups, slots, borrowed, recurrent)

    def blocks(self, tokens: int, size: int) -> int:
        """The most that a request of so many tokens needs at once."""
        return blocks_for(self.kinds, tokens, size)


def blocks_for(kinds: Sequence[KVKind], tokens: int, size: int) -> int:
    """The most blocks that a request of so many tokens needs at once."""
    return sum(kind.most(tokens, size) for kind in kinds)


def positions(kinds: Sequence[KVKind], blocks: int, size: int) -> int:
    """How many positions of requests of TYPICAL tokens so many blocks last for. People and
    routers, which know nothing of kinds, count in these positions."""
    return blocks * -(-TYPICAL // size) // blocks_for(kinds, TYPICAL, size)


def kv_groups(model: ModelConfig, ranks: int = 1, rank: int = 0) -> KVGroups:
    """The groups of a model's layers; those of one class follow each other. ranks: that the heads
    are divided among; the groups are then those of one of them, and as many on each."""
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
