"""The sizes of the timed kernels' inputs, and metadata of steps with scattered KV blocks."""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.metadata import AttentionMeta


class Sizes(NamedTuple):
    """The sizes of a model, and the device and dtype of its tensors."""

    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    hidden: int = 4096
    inner: int = 14336
    vocab: int = 128256
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    kv: str = ""  # "int8", "fp8", "int4": quantised KV cache

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def ints(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


LLAMA = Sizes()


def meta_of(
    s: Sizes, kv_len: list[int], query_len: list[int], num_decodes: int, block_size: int
) -> tuple[AttentionMeta, int]:
    """Return a step's metadata with KV blocks in random order, and the number of blocks."""
    blocks = [-(-n // block_size) for n in kv_len]
    order = torch.randperm(sum(blocks)).int().split(blocks)
    table = torch.zeros(len(kv_len), max(blocks), dtype=torch.int32)
    for entry, own in enumerate(order):
        table[entry, : len(own)] = own
    lengths = zip(kv_len, query_len, strict=True)
    positions = torch.cat([torch.arange(n - m, n) for n, m in lengths])
    entry_of = torch.repeat_interleave(torch.arange(len(kv_len)), torch.tensor(query_len))
    slots = table[entry_of, positions // block_size].long() * block_size + positions % block_size
    meta = AttentionMeta(
        positions=positions.int().to(s.device),
        slots=slots.to(s.device),
        query_start=torch.tensor([0, *query_len]).cumsum(0).int().to(s.device),
        kv_len=s.ints(kv_len),
        block_table=table.to(s.device),
        num_decodes=num_decodes,
        max_kv_len=max(kv_len),
    )
    return meta, sum(blocks)
