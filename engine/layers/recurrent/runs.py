"""compute_runs: runs a recurrent kernel so that unverified drafts do not change the states."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels.metadata import AttentionMeta

# (inputs [num_tokens, ...], states [rows, ...], layout) -> outputs [num_tokens, ...]
Kernel = Callable[[Sequence[Tensor], Sequence[Tensor], AttentionMeta], Tensor]


def compute_runs(
    kernel: Kernel, inputs: Sequence[Tensor], states: Sequence[Tensor], meta: AttentionMeta
) -> Tensor:
    """Return kernel(inputs, states, meta), without changing states by unverified drafts.

    In a step that verifies drafts, the kernel runs on copies of the states. A function that later
    computes the accepted tokens on the states themselves is added to `meta.state_runs.replays`.

    inputs: the kernel's inputs, [num_tokens, ...] each.
    states: the tensors that the kernel writes, [rows, ...] each.
    """
    runs = meta.state_runs
    if runs is None:
        return kernel(inputs, states, meta)
    own = [tensor.index_select(0, runs.tokens) for tensor in inputs]
    copies = [state.index_select(0, runs.rows) for state in states]
    outputs = kernel(own, copies, runs.meta)
    runs.replays.append(lambda layout: kernel(own, states, layout))
    if len(runs.others):
        others = [tensor.index_select(0, runs.others) for tensor in inputs]
        outputs = torch.cat((kernel(others, states, runs.others_meta), outputs))
    return outputs.index_select(0, runs.back)
