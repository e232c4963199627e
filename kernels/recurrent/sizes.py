"""The sizes of heads and states of recurrent layers, as compile-time constants of kernels."""

from typing import NamedTuple

import triton
from torch import Tensor

from kernels.recurrent.delta_rule import DeltaHeads
from kernels.recurrent.mamba2 import Mamba2Heads


class DeltaSizes(NamedTuple):
    """The sizes of a layer of the delta rule, as one `tl.constexpr`.

    key_heads, value_heads: numbers of key heads, and of value heads; each value head has a state.
    key_dim, value_dim: elements of a head's key and value.
    channels, taps: sizes of the convolution.
    most: the maximum factor of a correction (beta).
    by_key: whether each row of a state decays separately (Kimi Delta Attention).
    key_columns, value_columns: `key_dim` and `value_dim`, padded. They are not called `values`,
        because Triton 3.8's tuples have an attribute of this name.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    channels: int
    taps: int
    most: float
    by_key: bool
    key_columns: int
    value_columns: int


def delta_sizes(heads: DeltaHeads, keys: int, values: int) -> DeltaSizes:
    """Return the sizes of a layer whose keys and values are padded to `keys` and `values`."""
    return DeltaSizes(
        heads.key_heads, heads.value_heads, heads.key_size, heads.value_size, *heads.conv.shape,
        heads.most, heads.by_key, keys, values,
    )  # fmt: skip


def tile_sizes(heads: DeltaHeads, element_size: int) -> dict[str, int]:
    """Return the constants KEYS and VALUES, the padded sizes of a key and a value."""
    # With 16 bits, tiles narrower than 64 make Triton 3.6's wgmma code read out of bounds.
    least = 16 if element_size > 2 else 64
    padded = (triton.next_power_of_2(size) for size in (heads.key_size, heads.value_size))
    return {name: max(least, size) for name, size in zip(("KEYS", "VALUES"), padded, strict=True)}


def late_sizes(late: Tensor | None) -> dict[str, int]:
    """Return the constants LATE, pending updates per head, and ENTRY, elements of an update."""
    entries, size = (0, 0) if late is None else late.shape[2:]
    return {"LATE": entries, "ENTRY": size}


class Mamba2Sizes(NamedTuple):
    """The sizes of a Mamba-2 layer, as one `tl.constexpr`.

    heads, size: heads and the channels of a head.
    groups, state: groups of heads that share B and C, and the elements of these.
    channels, taps: sizes of the convolution.
    least, most: limits of the time step.
    sizes, states: `size` and `state`, padded.
    """

    heads: int
    size: int
    groups: int
    state: int
    channels: int
    taps: int
    least: float
    most: float
    sizes: int
    states: int


def mamba2_sizes(heads: Mamba2Heads, sizes: int, states: int) -> Mamba2Sizes:
    """Return the sizes of a layer whose head and state sizes are padded to `sizes` and `states`."""
    least, most = heads.limits
    return Mamba2Sizes(
        heads.heads, heads.head_size, heads.groups, heads.state_size, *heads.conv.shape,
        least, min(most, 3e38), sizes, states,
    )  # fmt: skip
