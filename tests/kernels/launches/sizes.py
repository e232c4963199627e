"""Sizes of models, and unfilled tensors, for the launches beside this file."""

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK_SIZE, NUM_BLOCKS, EPS = 16, 64, 1e-5


class Dims(NamedTuple):
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    qk_norm: bool


MODELS = {
    "llama-8b": Dims(4096, 14336, 32, 8, 128, 128256, False),
    "qwen3-0.6b": Dims(1024, 3072, 16, 8, 128, 151936, True),
    "smollm2-135m": Dims(576, 1536, 9, 3, 64, 49152, False),
}


def bf16(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def int32(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def int64(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)
