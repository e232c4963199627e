"""The orders in which checkpoints store the rows of attention and MLP matrices.

Each function returns, for each row in Manta's order, its index in the checkpoint. Manta's order is
all queries, all keys, all values. Within a head the first elements of the rotary pairs come before
the second elements.
"""

from typing import TYPE_CHECKING

from engine.architectures.record import Rows

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from engine.config.model_config import ModelConfig

# numpy is imported inside functions: routers and the command line read records without it.


def half_pairs(heads: int, size: int, rotary: int | None = None) -> "NDArray[np.int64]":
    """Return the stored rows of heads whose rotary pairs are adjacent in the checkpoint.

    Stored pairs are (0, 1), (2, 3) and so on; Manta's are (0, rotary / 2), (1, rotary / 2 + 1) ...

    size: the number of rows of a head.
    rotary: the number of rotary rows in a head; other rows keep their position. None = all.
    """
    import numpy as np

    rotary = size if rotary is None else rotary
    rows = np.arange(heads * size).reshape(heads, size)
    paired = rows[:, :rotary].reshape(heads, -1, 2).swapaxes(1, 2).reshape(heads, -1)
    return np.concatenate((paired, rows[:, rotary:]), axis=1).ravel()


def neighbouring_pairs(heads: int, size: int, rotary: int) -> "NDArray[np.int64]":
    """Return the inverse of `half_pairs`: stored pairs are half a head apart, Manta's adjacent."""
    return half_pairs(heads, size, rotary).argsort()


def neighbours(model: "ModelConfig") -> "NDArray[np.int64]":
    """Return the stored rows of queries and keys with adjacent rotary pairs, then of values."""
    import numpy as np

    q, k = (
        half_pairs(heads, model.head_dim, model.rotary_dim)
        for heads in (model.num_heads, model.num_kv_heads)
    )
    v = np.arange(len(k))
    return np.concatenate((q, len(q) + k, len(q) + len(k) + v))


def neighbours_in_q(model: "ModelConfig") -> "NDArray[np.int64]":
    """Return the stored rows of the query norm, whose rotary pairs are adjacent."""
    return half_pairs(model.num_heads, model.head_dim, model.rotary_dim)


def neighbours_in_k(model: "ModelConfig") -> "NDArray[np.int64]":
    return half_pairs(model.num_kv_heads, model.head_dim, model.rotary_dim)


def grouped(model: "ModelConfig") -> "NDArray[np.int64]":
    """Return the stored rows of a matrix grouped by KV head: queries, key and value of each."""
    import numpy as np

    group = model.num_heads // model.num_kv_heads
    count = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    rows = np.arange(count).reshape(model.num_kv_heads, group + 2, model.head_dim)
    return np.concatenate([piece.ravel() for piece in np.split(rows, [group, group + 1], axis=1)])


def four_blocks(model: "ModelConfig") -> "NDArray[np.int64]":
    """Return the stored rows of four blocks, each with a quarter of queries, values and keys.

    CodeGen has this order because it was trained on a device with four cores.
    """
    import numpy as np

    rows = np.arange(3 * model.num_heads * model.head_dim).reshape(4, 3, -1)
    return np.concatenate((rows[:, 0].ravel(), rows[:, 2].ravel(), rows[:, 1].ravel()))


def both(stored: Rows, then: Rows) -> Rows:
    """Return the composition of two row orders: `stored` gives q, k, v, to which `then` applies."""
    return lambda model: stored(model)[then(model)]
