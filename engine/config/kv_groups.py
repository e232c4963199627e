"""KVGroups: the layers of a model, grouped by the tokens whose KV they keep. No torch here.

Layers that keep the same tokens (all, or those of a window) and whose heads have one shape form a
class. Classes are cut into groups of about equally many layers. One block holds block_size tokens
for the layers of one group, so that all groups have blocks of one size and share one pool. A
request has a block table for each group. A model whose layers are all alike is one group.

 request's tokens        |  block 0  |  block 1  |  block 2  |  block 3 ..
 group 0 (all keys)         17          4           9           21
 group 1 (window)           -           -           30          2        freed blocks: -
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

TYPICAL = 4096  # assumed length of requests when numbers of blocks are converted to tokens
# desired maximum number of block tables of a request; if there would be more, groups get more
# layers
MOST_GROUPS = 8


class KVKind(Protocol):
    """The kind of a KV group, which decides which blocks of a request its layers keep.

    A kind is pure arithmetic over tokens and blocks of `size` tokens. A new kind is a class with
    these five members, the only ones that scheduler, block manager and admission use.
    """

    @property
    def whole(self) -> bool:
        """Whether a running request keeps all its blocks, so that `behind` always returns 0."""
        ...

    @property
    def by_position(self) -> bool:
        """Whether block i holds tokens i * size and following, so that equal tokens may reuse it.

        Otherwise the first block holds a state of the whole request. No prefix starts from that
        block, and preemption loses the state.
        """
        ...

    def behind(self, position: int, size: int) -> int:
        """Return the number of leading blocks that tokens from `position` on do not read.

        The request frees these blocks, for example those that a sliding window has passed.
        """
        ...

    def most(self, tokens: int, size: int) -> int:
        """Return the peak number of blocks of a request until it has `tokens` tokens."""
        ...

    def describe(self) -> str:
        """Return what the layers keep in words, such as "all tokens" or "the last 4,096 tokens"."""
        ...


@dataclass(frozen=True, slots=True)
class Full:
    """The kind of layers that keep the KV, or the latents, of all tokens."""

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
    """The kind of layers that read the last `window` tokens: token t reads (t - window, t]."""

    window: int
    whole: bool = False
    by_position: bool = True

    def behind(self, position: int, size: int) -> int:
        return max(0, position - self.window + 1) // size

    def most(self, tokens: int, size: int) -> int:
        # `window` consecutive tokens lie in at most this many blocks, wherever they begin.
        return min(-(-tokens // size), (self.window - 2) // size + 2)

    def describe(self) -> str:
        return f"the last {self.window:,} tokens"


@dataclass(frozen=True, slots=True)
class Chunked:
    """The kind of layers that read only the current chunk, of `chunk` tokens, of the context."""

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
    """The layers that share a block table.

    layers: the numbers of the layers.
    attention: the attention of each layer.
    """

    kind: KVKind
    layers: tuple[int, ...]
    attention: LayerAttention

    @property
    def tensors(self) -> int:
        """The number of tensors cached for each token; see `LayerAttention.tensors`."""
        return self.attention.tensors

    @property
    def elements(self) -> int:
        """The number of elements of one token's keys, or values, in one layer."""
        heads, dim = self.attention.kept
        return heads * dim

    def token_bytes(self, form: KVFormat) -> int:
        """Return the bytes of one token's keys, or values, in one layer, in this format."""
        return form.token_bytes(*self.attention.kept)


@dataclass(frozen=True, slots=True)
class KVView:
    """Layers of a group whose caches are indexed by the same block ids.

    If several small layers share a place in blocks (`KVGroups.slots`), each has `parts` times as
    many blocks of 1 / parts of the size. The pool's block b is block b * parts + part of such a
    layer.
    """

    group: int
    part: int
    parts: int
    layers: tuple[int, ...]


@dataclass(frozen=True)
class KVGroups:
    """The KV groups of a model's layers, and how layers share a block.

    groups: the groups, never empty.
    slots: the number of places in a block. A place holds the KV of one layer of the largest shape,
        or of several smaller layers of a group.
    """

    groups: tuple[KVGroup, ...]
    slots: int
    # (layer without a KV cache, layer whose KV it reads)
    borrowed: tuple[tuple[int, int], ...] = ()
    # (layer, mixer) of layers with a recurrent state for each running request, stored by row and
    # not in blocks.
    recurrent: tuple[tuple[int, Mixer], ...] = ()

    @cached_property
    def views(self) -> tuple[KVView, ...]:
        """The views of all groups, in order of groups.

        A group whose layers are as large as the largest layer has one view.
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
    def whole_group(self) -> int | None:
        """The number of the first group that keeps all tokens; None if there is none.

        A drafter's KV lies in this group's blocks.
        """
        kinds = self.kinds
        return kinds.index(Full()) if Full() in kinds else None

    @property
    def num_whole(self) -> int:
        """The number of groups in which a running request frees no blocks."""
        return sum(group.kind.whole for group in self.groups)

    @property
    def tensors(self) -> int:
        """The number of tensors for each place in a block: 2 for keys and values, 1 for latents."""
        return max(group.tensors for group in self.groups)

    @property
    def elements(self) -> int:
        """The number of elements of one token's keys, or values, in one place."""
        return max(group.elements for group in self.groups)

    def place_bytes(self, form: KVFormat) -> int:
        """Return the bytes of one token's keys, or values, in one place, in this format."""
        return max(group.token_bytes(form) for group in self.groups)

    def bytes_per_block(self, size: int, form: KVFormat) -> int:
        return self.tensors * self.slots * self.place_bytes(form) * size

    def token_bytes(self, form: KVFormat) -> dict[KVKind, tuple[int, int]]:
        """Return kind -> (number of layers, bytes of a token in all of the kind's layers)."""
        by_kind: dict[KVKind, tuple[int, int]] = {}
        for group in self.groups:
            layers, num_bytes = by_kind.get(group.kind, (0, 0))
            count = len(group.layers)
            more = group.tensors * count * group.token_bytes(form)
            by_kind[group.kind] = (layers + count, num_bytes + more)
        return by_kind

    @property
    def state_bytes(self) -> int:
        """The float32 bytes of one request's state, or one snapshot, in all recurrent layers."""
        shapes = [shape for _, record in self.recurrent for shape in record.state_shapes]
        return 4 * sum(map(prod, shapes))

    def of(self, layers: range) -> "KVGroups":
        """Return the same groups, restricted to the layers of one pipeline stage."""
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
        """Return the peak number of blocks of a request with the given number of tokens."""
        return blocks_for(self.kinds, tokens, size)


def blocks_for(kinds: Sequence[KVKind], tokens: int, size: int) -> int:
    """Return the peak number of blocks of a request with the given number of tokens.

    kinds: the kind of each group.
    size: tokens of a block.
    """
    return sum(kind.most(tokens, size) for kind in kinds)


def positions(kinds: Sequence[KVKind], blocks: int, size: int) -> int:
    """Return how many tokens a number of blocks holds, for requests of TYPICAL tokens.

    Users and routers count in these tokens, as they do not know the kinds.
    """
    return blocks * -(-TYPICAL // size) // blocks_for(kinds, TYPICAL, size)


def kv_groups(model: ModelConfig, ranks: int = 1, rank: int = 0) -> KVGroups:
    """Return the KV groups of a model on one rank; groups of a class are consecutive.

    ranks: the number of ranks that divide the heads; each rank has the same number of groups.
    rank: this rank's number.
    """
    attention = [layer.of_rank(ranks, rank) for layer in model.attention]
    classes: dict[tuple[KVKind, int, int, int, int], list[int]] = {}
    for number, layer in enumerate(attention):
        if layer.keys_of is not None or not layer.attends:
            continue
        shape = (layer.num_heads, *layer.kept, layer.tensors)
        classes.setdefault((_kind(layer), *shape), []).append(number)
    largest = max(kv_heads * dim for _, _, kv_heads, dim, _ in classes)
    # class -> how many of its layers fit into the space of the largest layer
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
