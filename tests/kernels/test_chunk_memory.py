"""What launches of recurrent layers hand on between chunks, as the sum of memory counts it."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.architectures.recurrent.delta_net import DeltaNet
from engine.architectures.recurrent.kimi import Kimi
from engine.architectures.recurrent.mamba2 import Mamba2
from engine.architectures.recurrent.mixer import CHUNK, Mixer
from kernels.metadata import AttentionMeta
from kernels.recurrent.delta_rule import DeltaHeads, DeltaInputs
from kernels.recurrent.mamba2 import Mamba2Heads

chunks_cuda = pytest.importorskip("kernels.recurrent.chunks_cuda")


class Allocated(TorchDispatchMode):
    """A counter of the bytes of tensors that are allocated within a block."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        actual = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.new_empty.default, torch.ops.aten.empty_like.default):
            self.num_bytes += actual.nbytes
        return actual


class Launch:
    """A stand-in for a kernel that does nothing."""

    def __getitem__(self, grid: object) -> Any:
        return lambda *given, **sizes: None

    def warmup(self, *given: object, **sizes: object) -> None:
        """Compile nothing, as on a device that only lists the kernels it needs."""


@pytest.mark.parametrize(
    "mixer",
    [DeltaNet(2, 6, 24, 40, 4), Kimi(3, 80, 4, 80), Mamba2(6, 24, 2, 40, 4, True, False)],
    ids=["delta", "kimi", "mamba 2"],
)
def test_chunks_are_counted(mixer: Mixer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a plan that leaves out what prompts of recurrent layers take, or counts another axis."""
    from kernels.recurrent import delta_chunks_cuda, kimi_chunks_cuda, mamba2_chunks_cuda

    for module in (delta_chunks_cuda, kimi_chunks_cuda, mamba2_chunks_cuda):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Launch())
    starts = torch.tensor([0, 70, 170, 300], dtype=torch.int32)
    meta = AttentionMeta(
        positions=starts, slots=starts, query_start=starts, kv_len=starts[1:], block_table=starts,
        num_decodes=0, max_kv_len=300, rows=torch.arange(3),
        counts=torch.tensor([0, 3]),
    )  # fmt: skip
    ones = [torch.ones(1)] * 5
    x = torch.zeros(300, 8, dtype=torch.bfloat16)
    state: Tensor = torch.zeros(3, 1)
    with Allocated() as allocated:
        if isinstance(mixer, DeltaNet):
            sizes = (mixer.key_heads, mixer.value_heads, mixer.key_size, mixer.value_size)
            how = DeltaHeads(*sizes, torch.ones(mixer.channels, 4), *ones[:3], 1e-5)
            delta_chunks_cuda.delta_chunks(DeltaInputs(x, x, x, x, how, state, state), x, meta)
        elif isinstance(mixer, Kimi):
            sizes = (mixer.heads, mixer.heads, mixer.size, mixer.size)
            conv = torch.ones(3 * mixer.heads * mixer.size, 4)
            how = DeltaHeads(*sizes, conv, *ones[:3], 1e-5, by_key=True)
            kimi_chunks_cuda.kimi_chunks(DeltaInputs(x, x, x, x, how, state, state), x, meta)
        else:
            assert isinstance(mixer, Mamba2)
            own = (mixer.heads, mixer.head_size, mixer.groups, mixer.state_size)
            heads = Mamba2Heads(*own, torch.ones(mixer.channels, 4), *ones[:4], (0.0, 1.0))
            mamba2_chunks_cuda.mamba2_chunks(x, x, heads, state, state, x, meta)
    some, floats = mixer.chunk_elements
    slots = chunks_cuda.num_slots(300, meta)
    assert slots == 300 // CHUNK + 3 + 1 and chunks_cuda.CHUNK == CHUNK
    assert allocated.num_bytes == slots * (2 * some + 4 * floats)
