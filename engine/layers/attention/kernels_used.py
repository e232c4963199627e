"""attention_kernels: describes the kernels of attention on CUDA, for `manta plan` and `doctor`.

The kernels' back end chooses from the same candidates (`kernels.attention.candidates`).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from engine.config.model_config import LayerAttention
from engine.parallel.group import TensorParallelGroup
from kernels.attention.candidates import (
    CHUNK_ATTENTION,
    DECODE_ATTENTION,
    FIXED_ATTENTION,
    LATENT_CHUNKS,
    LATENT_DECODE,
)
from kernels.attention.inputs import AttentionForm, LatentForm
from kernels.candidates import Candidate, taking
from kernels.kv.format import KVFormat


def attention_kernels(
    layers: Sequence[LayerAttention],
    group: TensorParallelGroup,
    dtype: torch.dtype,
    kv: KVFormat,
    block_size: int,
    capability: tuple[int, int],
    deterministic: bool = False,
) -> Iterator[str]:
    """Yield a line of text for each kind of attention layers that cache KV or latents.

    group: the ranks among which heads are divided.
    dtype: the dtype of activations.
    capability: compute capability of CUDA.
    """
    attending = [layer for layer in layers if layer.attends and not layer.bidirectional]
    lines: dict[str, None] = {}
    for layer in attending:
        if layer.latent is not None:
            (begin, end), _ = group.heads(layer.num_heads, 1)
            sizes = (layer.latent.rank, layer.latent.rope)
            latents = LatentForm(end - begin, *sizes, dtype.itemsize, block_size)
            decodes = taking(LATENT_DECODE, latents, capability)[:1]
            prompts = taking(LATENT_CHUNKS, latents, capability)
            lines[f"attention over latents, {end - begin} heads: {_by(decodes, prompts)}"] = None
            continue
        (begin, end), (first, last) = group.heads(layer.num_heads, layer.num_kv_heads)
        form = AttentionForm(
            kv=kv.name,
            element_size=dtype.itemsize,
            head_dim=layer.head_dim,
            group=(end - begin) // (last - first),
            block_size=block_size,
            softcap=layer.softcap > 0,
            slopes=bool(layer.slopes),
        )
        text = f"attention, heads of {form.head_dim} in groups of {form.group}"
        text += ", soft caps" * form.softcap + ", slopes" * form.slopes
        if deterministic:
            kernel = taking(FIXED_ATTENTION, form, capability)[0]
            lines[f"{text}: {kernel.name}"] = None
            continue
        decode = taking(DECODE_ATTENTION, form, capability)[:1]
        chunks = taking(CHUNK_ATTENTION, form, capability)[:1]
        lines[f"{text}: {_by(decode, chunks)}"] = None
    yield from lines


def _by(decodes: Sequence[Candidate[Any]], prompts: Sequence[Candidate[Any]]) -> str:
    """Return in words the kernels for decodes and for prompts.

    Several kernels are named if the choice depends on the lengths in a step.
    """
    names = [" or ".join(kernel.name for kernel in kernels) for kernels in (decodes, prompts)]
    return f"decodes by {names[0]}, prompts by {names[1]}"
