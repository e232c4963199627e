"""DeltaNet: the description of Gated DeltaNet, with tensor names, row orders and readers. No
torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.architectures.by_layer import FULL
from engine.architectures.record import CheckpointTensor
from engine.architectures.recurrent.mixer import CHUNK, LINEAR, mixed_kinds, mixing, padded
from engine.config_reader import Reader

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from engine.config.model_config import LayerAttention, ModelConfig


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """A recurrent layer of Gated DeltaNet, which has a state instead of KV.

    The state of a request is a matrix [key_size, value_size] for each value head, and the last taps
    - 1 inputs of the layer's convolution.

    negative: whether beta may be up to 2 instead of 1, which allows negative eigenvalues.
    norm_eps: the epsilon of the norm of the heads' outputs; None = the model's epsilon.
    pending_updates: the number of decodes whose updates are stored next to the state before they
        are applied to it (`kernels.recurrent.delta_rule_cuda`).
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    taps: int
    negative: bool = False
    norm_eps: float | None = None
    pending_updates: int = 0

    def undivided(self, ranks: int) -> str:
        return f"{self.key_heads} key heads of its DeltaNet" if self.key_heads % ranks else ""

    def of_rank(self, ranks: int) -> "DeltaNet":
        return replace(
            self, key_heads=self.key_heads // ranks, value_heads=self.value_heads // ranks
        )

    @property
    def channels(self) -> int:
        """The number of the convolution's channels: queries, keys and values."""
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of a request's float32 states: convolution inputs, matrices, pending updates.

        A pending update is not yet added to the matrices. For each head and decode it has a key, a
        correction, and a cumulative decay in the first of four further elements, which align the
        next update to 16 bytes.
        """
        matrices = (self.value_heads, self.key_size, self.value_size)
        entry = self.key_size + self.value_size + 4
        entries = ((self.value_heads, self.pending_updates, entry),) if self.pending_updates else ()
        return (self.taps - 1, self.channels), matrices, *entries

    @property
    def chunk_elements(self) -> tuple[int, int]:
        """The buffer elements of a prompt's chunk: (16-bit elements, float32 elements).

        `kernels.recurrent.delta_chunks_cuda` allocates them. The 16-bit elements are queries and
        keys of each key head, and weights, values and token pairs of each value head. The float32
        elements are cumulative decays of each value head.
        """
        keys, values = (max(64, padded(size)) for size in (self.key_size, self.value_size))
        per_head = CHUNK * (keys + values + CHUNK)
        return (
            2 * self.key_heads * CHUNK * keys + self.value_heads * per_head,
            self.value_heads * CHUNK,
        )


def hybrid(config: Reader, plain: "LayerAttention", layers: int) -> Sequence["LayerAttention"]:
    """Return each layer's attention: by default gated in every fourth, DeltaNet in the others."""
    every = config.size("full_attention_interval", 4)
    default = [LINEAR if (i + 1) % every else FULL for i in range(layers)]
    kinds = mixed_kinds(config, layers, {FULL: FULL, LINEAR: LINEAR}, default)
    full, mixer = replace(plain, gated=True), read_delta_net(config)
    return [mixing(plain, mixer) if kind == LINEAR else full for kind in kinds]


def read_delta_net(config: Reader) -> DeltaNet:
    mixer = DeltaNet(
        config.size("linear_num_key_heads", 16),
        config.size("linear_num_value_heads", 32),
        config.size("linear_key_head_dim", 128),
        config.size("linear_value_head_dim", 128),
        config.size("linear_conv_kernel_dim", 4),
    )
    if mixer.value_heads % mixer.key_heads:
        raise config.error(
            "linear_num_value_heads",
            f"{mixer.value_heads} is no multiple of {mixer.key_heads} key heads",
        )
    if mixer.taps < 2:
        raise config.error("linear_conv_kernel_dim", "must be at least 2")
    return mixer


def _by_key_head(model: "ModelConfig") -> "NDArray[np.int64]":
    """Return the stored rows of the input matrices, which checkpoints group by key head.

    For each key head one tensor has the query, the key, the values of the group, and their gates.
    Another tensor has beta and decay of these values.
    """
    import numpy as np

    mixer = next(layer.mixer for layer in model.attention if isinstance(layer.mixer, DeltaNet))
    shared = mixer.value_heads // mixer.key_heads
    values = shared * mixer.value_size
    per_head = 2 * mixer.key_size + 2 * values
    wide = np.arange(mixer.key_heads * per_head).reshape(mixer.key_heads, -1)
    cuts = np.cumsum([mixer.key_size, mixer.key_size, values])
    narrow = len(wide.ravel()) + np.arange(2 * mixer.value_heads).reshape(mixer.key_heads, -1)
    pieces = [*np.split(wide, cuts, axis=1), *np.split(narrow, [shared], axis=1)]
    return np.concatenate([piece.ravel() for piece in pieces])


_LINEAR = "model.layers.{i}.linear_attn."
_REST: Mapping[str, CheckpointTensor] = {
    "delta_conv": CheckpointTensor((f"{_LINEAR}conv1d.weight",)),
    "delta_decay": CheckpointTensor((f"{_LINEAR}A_log",)),
    "delta_bias": CheckpointTensor((f"{_LINEAR}dt_bias",)),
    "delta_norm": CheckpointTensor((f"{_LINEAR}norm.weight",)),
    "delta_out": CheckpointTensor((f"{_LINEAR}out_proj",)),
}
# The input projection in Manta's order: queries, keys, values; the values' gates; beta; decay.
DELTA_NET_BY_KEY_HEAD: Mapping[str, CheckpointTensor] = {
    "delta_in": CheckpointTensor((f"{_LINEAR}in_proj_qkvz", f"{_LINEAR}in_proj_ba"), _by_key_head),
    **_REST,
}
DELTA_NET: Mapping[str, CheckpointTensor] = {
    "delta_in": CheckpointTensor(tuple(f"{_LINEAR}in_proj_{name}" for name in ("qkv", *"zba"))),
    **_REST,
}
