"""In which order checkpoints keep the rows of attention and MLP matrices. Each function gives the
stored row of each of our rows; ours are all queries, all keys, all values, and within a head the
first halves of the rotated pairs before the second ones."""

from typing import TYPE_CHECKING

from engine.architectures.record import Rows

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from engine.config.model_config import ModelConfig

# Only code that loads a model imports numpy: routers and the command line read records too.


def half_pairs(heads: int, size: int, turning: int | None = None) -> "NDArray[np.int64]":
    """Rows of `heads` heads of this size, stored for rotary embeddings that turn (0, 1), (2, 3) and
    so on; ours turn (0, turning / 2), (1, turning / 2 + 1) ...

    turning: how many of each head's rows turn; the rest stay where they are. None: all.
    """
    import numpy as np

    turning = size if turning is None else turning
    rows = np.arange(heads * size).reshape(heads, size)
    turned = rows[:, :turning].reshape(heads, -1, 2).swapaxes(1, 2).reshape(heads, -1)
    return np.concatenate((turned, rows[:, turning:]), axis=1).ravel()


def neighbours(model: "ModelConfig") -> "NDArray[np.int64]":
    """Queries and keys whose neighbours turn together, then values."""
    import numpy as np

    q, k = (
        half_pairs(heads, model.head_dim, model.rotary_dim)
        for heads in (model.num_heads, model.num_kv_heads)
    )
    v = np.arange(len(k))
    return np.concatenate((q, len(q) + k, len(q) + len(k) + v))


def neighbours_in_q(model: "ModelConfig") -> "NDArray[np.int64]":
    """The same of the queries alone: their norm's rows."""
    return half_pairs(model.num_heads, model.head_dim, model.rotary_dim)


def neighbours_in_k(model: "ModelConfig") -> "NDArray[np.int64]":
    return half_pairs(model.num_kv_heads, model.head_dim, model.rotary_dim)


def grouped(model: "ModelConfig") -> "NDArray[np.int64]":
    """Of each key head: the queries that share it, the key, the value."""
    import numpy as np

    group = model.num_heads // model.num_kv_heads
    count = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    rows = np.arange(count).reshape(model.num_kv_heads, group + 2, model.head_dim)
    return np.concatenate([piece.ravel() for piece in np.split(rows, [group, group + 1], axis=1)])


def four_blocks(model: "ModelConfig") -> "NDArray[np.int64]":
    """Four blocks, each with a quarter of the queries, of the values, of the keys: what CodeGen was
    trained on had four cores."""
    import numpy as np

    rows = np.arange(3 * model.num_heads * model.head_dim).reshape(4, 3, -1)
    return np.concatenate((rows[:, 0].ravel(), rows[:, 2].ravel(), rows[:, 1].ravel()))


def both(stored: Rows, then: Rows) -> Rows:
    """`then` of what `stored` has put into the order q, k, v."""
    return lambda model: stored(model)[then(model)]
