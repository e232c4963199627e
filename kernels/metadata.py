"""AttentionMeta: where each query token finds its keys. LoraStep: which adapter each token has.

Built once a step, shared by all layers, passed along.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor


@dataclass(slots=True)
class AttentionMeta:
    """The layout of one step's tokens: entries one after the other, decodes (one token each) first.

    Layers that keep different things of a request (engine/config/kv_groups.py) have one each. KV
    caches are [num_blocks, num_kv_heads, block_size, head_dim] for keys and for values, one pair a
    layer. Within one layer all of the step's keys are written before any attention reads, so an
    entry may read blocks that another entry of the same step writes (requests that share a prefix).
    """

    positions: Tensor  # [num_tokens] int32: index of each token in its request
    # [num_tokens] int64: block * block_size + offset to write; -1 = padding, write nothing
    slots: Tensor
    query_start: Tensor  # [num_entries + 1] int32
    kv_len: Tensor  # [num_entries] int32: keys of the entry, this step's included
    block_table: Tensor  # [num_entries, max_blocks] int32
    # leading entries with exactly one query token; in a graph of a mixed step, how many at most
    num_decodes: int
    max_kv_len: int
    # query_start and kv_len on the host, for the CPU back end. Steps that graphs replay have none.
    query_start_host: list[int] | None = None
    kv_len_host: list[int] | None = None
    # what a back end computed once a step for all layers (e.g. how decode splits the keys)
    plan: Any = None
    # [2] int32 on the device: decodes, entries. What follows them pads. None: num_decodes, all.
    counts: Tensor | None = None
    lora: "LoraStep | None" = None  # None: no token of the step has an adapter
    # What the token at position t does not see: > 0: keys at s <= t - window; keys of another piece
    # of `chunk` tokens. Blocks of keys that no token of the step sees may be another request's.
    window: int = 0
    chunk: int = 0
    own: "OwnTokens | None" = None  # with data-parallel attention: this rank's tokens
    # [num_entries] int64: the row that an entry's state is in, of layers that keep one. An entry
    # whose first token is its request's first begins it with zeros, whatever is there.
    rows: Tensor | None = None
    # where tokens stand for rotary embeddings; None: at their positions
    rotary: "RotaryPlaces | None" = None
    # [num_tokens] int32: the last key that each token of a chunk sees, where tokens of an image see
    # each other. Not descending in an entry; the chunk reaches up to these keys. None: its own.
    last_keys: Tensor | None = None
    # [num_entries] int32: the entries' rows, in a step that verifies drafts. Adjacent decodes of a
    # row at consecutive positions then read their keys once. None: no row has several decodes.
    runs: Tensor | None = None
    # whether entries are so short that layers that keep a state walk their tokens one by one
    by_token: bool = False
    # how layers that keep a state compute a step that verifies drafts
    state_runs: "StateRuns | None" = None

    def first_key(self, position: Any) -> Any:
        """The position of the first key that a token attends to. position: an int or a tensor."""
        if self.chunk:
            return position // self.chunk * self.chunk
        if not self.window:
            return position * 0
        first = position - (self.window - 1)
        return max(0, first) if isinstance(first, int) else first.clamp(min=0)

    def most_blocks(self, num_tokens: int, queries: int, *, decodes: bool) -> int:
        """Return how many blocks of queries `kernels.launch.entries.entry_of` numbers in the step.

        At most one of an entry is empty. A step that a graph replays has the most of any step of
        its size, as its lengths are not known.

        queries: the queries of a block.
        decodes: whether entries that decode have blocks, too.
        """
        known = self.query_start_host is not None and not decodes
        first = self.num_decodes if known else 0
        # Each entry, and the padding after the last, may leave its last block part empty.
        return (num_tokens - first) // queries + self.kv_len.shape[0] - first + 1

    def rotation(self, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rotary table of a layer in this step, and each token's row in it, int32.

        cos_sin: the layer's own table, as of RopeInputs.
        """
        if self.rotary is None:
            return cos_sin, self.positions
        return cos_sin if self.rotary.table is None else self.rotary.table, self.rotary.rows

    def elsewhere(self, slots: Tensor, block_table: Tensor) -> "AttentionMeta":
        """Return a copy for layers whose keys lie in other blocks, not planned yet."""
        return replace(self, slots=slots, block_table=block_table, plan=None)


@dataclass(slots=True)
class StateRuns:
    """The runs of a step that verifies drafts: a row's decode and its drafts, token after token.

    A recurrent layer computes runs on copies of its states, because a state cannot drop a token.
    Once the accepted tokens are known, `replays` compute them again on the states themselves.

    others: int64 [n], tokens of no run, ascending.
    others_meta: the layout of these tokens, as a step of their own.
    tokens: int64 [m], tokens of runs, run after run.
    meta: the layout of `tokens`, an entry for each run, whose row is the run's number.
    rows: int64 [runs], where the runs' states are.
    back: int64 [num_tokens], each token's place among first `others`, then `tokens`.
    in_place: whether `others_meta` is a layout of the step itself, in which entries of runs have no
        tokens (`kv_len` 0): kernels that write no state of a run need no copies then.
    replays: for each kernel that has run, a function that computes `tokens` again, in the layout
        that it is given.
    """

    others: Tensor
    others_meta: AttentionMeta
    tokens: Tensor
    meta: AttentionMeta
    rows: Tensor
    back: Tensor
    in_place: bool = False
    replays: list[Callable[[AttentionMeta], object]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RotaryPlaces:
    """The rotary positions of a step's tokens, if they differ from the indices of tokens.

    rows: [num_tokens] int32: each token's row in the rotary table.
    table: [num_tokens, rotary_dim] float32, used instead of the layers' tables, in a step with
        tokens that have different positions on several axes; None = the layers' own.
    """

    rows: Tensor
    table: Tensor | None = None

    def of(self, token: int) -> "RotaryPlaces":
        """Return the rotary position of one token."""
        return RotaryPlaces(self.rows[token : token + 1], self.table)


@dataclass(frozen=True, slots=True)
class OwnTokens:
    """The tokens of a step whose keys this rank has.

    tokens: int64 [num_own], their indices in the step, ascending; None: `others` is given instead.
    meta: the layout of these tokens as a step of their own, with their adapters; None: there are
        none.
        With `others` it has all tokens of the step.
    others: bool [num_tokens, 1], true for tokens of other ranks, which are padding in meta.
    """

    tokens: Tensor | None
    meta: AttentionMeta | None
    others: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LoraLinear:
    """A linear layer as adapters see it: parts of one input, side by side in the output.

    Part i is number first_part + i in the tables of LoraStep.
    """

    first_part: int
    in_features: int
    outs: tuple[int, ...]  # output features of each part


@dataclass(slots=True)
class LoraStep:
    """The tokens of one step sorted by adapter, and the adapters' matrices.

    On CUDA all matrices of slot s lie in slab[s]: part p has A [rank, in] from a * 16 on and
    B [out, rank] from b * 16, already multiplied by the adapter's scale, where (rank, a, b, 0) =
    table[s, p]. Ranks are multiples of 16; 0 = the adapter leaves this part alone. The CPU back
    end has views instead: parts[s][p] = (A, B).
    """

    # [num_tokens] int32: sorted position -> token, so that equal slots are neighbours
    order: Tensor
    # [num_tiles, 3] int32: (slot, first sorted position, count <= block_m); slot -1 = no adapter;
    # count 0 = nothing. Every token is in one tile.
    tiles: Tensor
    block_m: int
    slab: Tensor  # [slots, slot_size]
    table: Tensor  # [slots, num_parts, 4] int32
    partial: Tensor  # [...] float32, room for what shrink writes
    max_rank: int
    # on the CPU, which loops over the slots: (slot, int64 indices of the slot's tokens)
    segments: Sequence[tuple[int, Tensor]] = ()
    parts: Sequence[Mapping[int, tuple[Tensor, Tensor]]] = ()
    # sums of one order whatever the number of tokens; block_m must be tile_rows(1, slots)
    deterministic: bool = False
