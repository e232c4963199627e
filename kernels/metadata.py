"""The metadata of a step, built once and passed to all layers.

AttentionMeta: the layout of tokens and their keys. StateRuns: runs of draft tokens in recurrent
layers. KeptRuns: what such layers keep of runs. RotaryPlaces: rotary positions. OwnTokens: this
rank's tokens with data-parallel attention. LoraStep: tokens sorted by adapter.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor


@dataclass(slots=True)
class AttentionMeta:
    """The layout of a step's tokens for one group of layers.

    An entry is the sequence of a request's tokens in the step. Entries are concatenated, decodes
    (one token each) first. Each KV group (engine/config/kv_groups.py) has an AttentionMeta. KV
    caches are [num_blocks, num_kv_heads, block_size, head_dim] for keys and for values, a pair per
    layer. Within one layer all of the step's keys are written before any attention reads, so an
    entry may read blocks that another entry of the same step writes (requests that share a prefix).
    """

    positions: Tensor  # [num_tokens] int32: index of each token in its request
    # [num_tokens] int64: block * block_size + offset to write; -1 = padding, write nothing
    slots: Tensor
    query_start: Tensor  # [num_entries + 1] int32: first token of each entry, then the last's end
    kv_len: Tensor  # [num_entries] int32: keys of the entry, including those of this step
    block_table: Tensor  # [num_entries, max_blocks] int32
    # number of leading entries with one query token; in a CUDA graph of a mixed step an upper bound
    num_decodes: int
    max_kv_len: int
    # query_start and kv_len on the host, for the CPU back end; None in steps of CUDA graphs
    query_start_host: list[int] | None = None
    kv_len_host: list[int] | None = None
    # data that a back end computes once per step for all layers (e.g. the splits of decodes' keys)
    plan: Any = None
    # [2] int32 on the device: the number of decodes, and the number of entries without padding
    # entries, which come last. None: num_decodes, and all entries.
    counts: Tensor | None = None
    lora: "LoraStep | None" = None  # None: no token of the step has an adapter
    # window > 0: the token at position t sees only keys after t - window. chunk > 0: a token sees
    # only keys of its own chunk of `chunk` tokens. Blocks whose keys no token of the step sees may
    # belong to another request.
    window: int = 0
    chunk: int = 0
    own: "OwnTokens | None" = None  # with data-parallel attention: this rank's tokens
    # [num_entries] int64: the row of each entry's state, in recurrent layers. If an entry begins
    # its request, the state before it is zero, and the row's content is ignored.
    rows: Tensor | None = None
    # the tokens' rotary positions; None: `positions`
    rotary: "RotaryPlaces | None" = None
    # [num_tokens] int32: the position of the last key that each token of a chunk sees, for images
    # whose tokens see each other. Non-decreasing within an entry; the entry includes these keys.
    # None: a token's last key is its own.
    last_keys: Tensor | None = None
    # [num_entries] int32: the entries' request rows, in a step that verifies draft tokens. Kernels
    # then read the keys of a run once: adjacent decodes of one row at consecutive positions.
    # None: there are no runs.
    runs: Tensor | None = None
    # whether entries are so short that recurrent layers process their tokens one by one
    by_token: bool = False
    # the runs of drafts to verify, for recurrent layers
    state_runs: "StateRuns | None" = None

    def first_key(self, position: Any) -> Any:
        """Return the position of the first key that the token at `position` sees.

        position: an int or a tensor.
        """
        if self.chunk:
            return position // self.chunk * self.chunk
        if not self.window:
            return position * 0
        first = position - (self.window - 1)
        return max(0, first) if isinstance(first, int) else first.clamp(min=0)

    def most_blocks(self, num_tokens: int, queries: int, *, decodes: bool) -> int:
        """Return an upper bound of the number of query blocks (`launch.entries.entry_of`).

        The bound holds for any lengths of entries, so for all steps that a CUDA graph replays.

        queries: the number of queries in a block.
        decodes: whether decodes have blocks, too.
        """
        known = self.query_start_host is not None and not decodes
        first = self.num_decodes if known else 0
        # The last block of each entry, and of the padding after the last, may be partly empty.
        return (num_tokens - first) // queries + self.kv_len.shape[0] - first + 1

    def rotation(self, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return a layer's rotary table in this step, and each token's row in the table, int32.

        cos_sin: the layer's own table, see RopeInputs.
        """
        if self.rotary is None:
            return cos_sin, self.positions
        return cos_sin if self.rotary.table is None else self.rotary.table, self.rotary.rows

    def elsewhere(self, slots: Tensor, block_table: Tensor) -> "AttentionMeta":
        """Return a copy without a plan, for layers whose keys are in other blocks and slots."""
        return replace(self, slots=slots, block_table=block_table, plan=None)


@dataclass(slots=True)
class StateRuns:
    """The runs of a step that verifies draft tokens; a run is a request's decode and its drafts.

    A recurrent layer computes runs on copies of its states, because rejected tokens cannot be
    removed from a state. Once the accepted tokens are known, `replays` compute these tokens again
    on the original states.

    others: int64 [n], indices of the step's tokens outside runs, ascending.
    others_meta: the layout of `others`, as a step of their own.
    tokens: int64 [m], indices of the tokens of runs, run after run.
    meta: the layout of `tokens`, with an entry for each run; the entry's row is the run's number.
    rows: int64 [runs], the rows of the runs' states.
    back: int64 [num_tokens], each token's index in the concatenation of `others` and `tokens`.
    in_place: whether `others_meta` is the layout of the whole step, in which the entries of runs
        have no tokens (`kv_len` 0). Kernels that write no state of a run then need no copies.
    replays: for each layer computed so far that is not in `settles`, a function that computes the
        accepted ones of `tokens` again. Its argument is the layout of the accepted tokens.
    kept: memory in which layers may keep the updates of a step's runs.
    numbers: int32 [runs, 12], a `KeptRun` for each run; zeros where there is none.
    settles: for each layer that keeps updates in `kept`, a function that advances states by
        accepted tokens. Its argument is shaped like `numbers`, with runs of length 0. Runs of the
        next step need no such call: the layer's kernel advances their states first.
    """

    others: Tensor
    others_meta: AttentionMeta
    tokens: Tensor
    meta: AttentionMeta
    rows: Tensor
    back: Tensor
    in_place: bool = False
    replays: list[Callable[[AttentionMeta], object]] = field(default_factory=list)
    kept: "KeptRuns | None" = None
    numbers: Tensor | None = None
    settles: list[Callable[[Tensor], object]] = field(default_factory=list)


class KeptRun(NamedTuple):
    """A run of a step, and the same request's run of the step before, as int32 numbers.

    row: the row of the state.
    position: the number of the request's tokens before the run.
    length: the number of tokens of the run; 0 if only accepted tokens are to be applied.
    first, draft: indices in the step of the decode and of the first draft, which others follow.
    accepted: the number of accepted tokens of the run before, to apply to the state in memory.
    whole: 1 if the state in memory already includes the pending updates of decodes, else 0.
    kept, kept_run: index of the run before in `KeptRuns`, counted in tokens and in runs.
    own, own_run: the same indices of this run.
    """

    row: int
    position: int
    length: int
    first: int
    draft: int
    accepted: int
    whole: int
    kept: int
    kept_run: int
    own: int
    own_run: int
    unused: int = 0  # for alignment to 16 bytes


@dataclass(slots=True)
class KeptRuns:
    """Memory for the updates of the runs of two consecutive steps, of all layers that use it.

    A step reads the half that the step before has written, and writes the other half. The CUDA
    graphs of steps of any size share the memory.

    tokens, runs: the maximum numbers of tokens and of runs of a step.
    layers: for each layer, updates and convolution inputs, allocated by the layer's kernel.
    """

    tokens: int
    runs: int
    layers: list[tuple[Tensor, Tensor]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RotaryPlaces:
    """The rotary positions of a step's tokens, if they differ from the indices of tokens.

    rows: [num_tokens] int32: each token's row in the rotary table.
    table: [num_tokens, rotary_dim] float32, used instead of the layers' tables if tokens have
        positions on several axes (M-RoPE); None = the layers' own.
    """

    rows: Tensor
    table: Tensor | None = None

    def of(self, token: int) -> "RotaryPlaces":
        """Return the rotary position of one token."""
        return RotaryPlaces(self.rows[token : token + 1], self.table)


@dataclass(frozen=True, slots=True)
class OwnTokens:
    """The tokens of a step whose keys this rank has, with data-parallel attention.

    tokens: int64 [num_own], the tokens' indices in the step, ascending; None if `others` is set.
    meta: the layout of these tokens as a step of their own, with their adapters. With `others`, the
        layout of all tokens of the step. None: this rank has no tokens.
    others: bool [num_tokens, 1], true for tokens of other ranks, which are padding in meta; None if
        `tokens` is set.
    """

    tokens: Tensor | None
    meta: AttentionMeta | None
    others: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LoraLinear:
    """A layer that fuses one or several linear layers (parts) of the same input.

    The parts' outputs are concatenated. Part i has index first_part + i in LoraStep's tables.
    """

    first_part: int
    in_features: int
    outs: tuple[int, ...]  # output features of each part


@dataclass(slots=True)
class LoraStep:
    """The tokens of one step sorted by adapter, and the adapters' matrices.

    On CUDA all matrices of slot s are in slab[s]: part p has A [rank, in] from element a * 16 on
    and B [out, rank] from b * 16 on, already multiplied by the adapter's scale, where
    (rank, a, b, 0) = table[s, p]. Ranks are multiples of 16; 0 = the adapter does not change this
    part. The CPU back end has views instead: parts[s][p] = (A, B).
    """

    # [num_tokens] int32: sorted position -> token, so that equal slots are neighbours
    order: Tensor
    # [num_tiles, 3] int32: (slot, first sorted position, count <= block_m); slot -1 = no adapter;
    # count 0 = empty tile. Every token is in one tile.
    tiles: Tensor
    block_m: int
    slab: Tensor  # [slots, slot_size]
    table: Tensor  # [slots, num_parts, 4] int32
    partial: Tensor  # [...] float32, buffer for the results of the shrink kernel
    max_rank: int
    # for the CPU back end, which loops over the slots: (slot, int64 indices of the slot's tokens)
    segments: Sequence[tuple[int, Tensor]] = ()
    parts: Sequence[Mapping[int, tuple[Tensor, Tensor]]] = ()
    # whether results are batch-invariant; block_m must then be tile_rows(1, slots)
    deterministic: bool = False
