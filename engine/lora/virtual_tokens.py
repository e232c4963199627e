"""Virtual tokens: learned vectors that an adapter puts before every prompt.

Prompt tuning and p-tuning have an embedding for each virtual token. Prefix tuning has keys and
values for each virtual token and layer. In both cases virtual token i is the request's token i: it
has a position and a place in a KV block, and chunks, prefix cache and preemption treat it like any
other token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from engine.batch import NewRow, PrefixCopy
from engine.config.kv_groups import kv_groups
from engine.config.model_config import ModelConfig
from engine.errors import AdapterError
from engine.lora.files import check_finite, list_tensors, read_tensors
from engine.lora.peft_config import (
    CONFIG_FILE,
    PREFIX,
    PeftConfig,
    file_in,
    read_peft_config,
    stamp,
)
from engine.lora.tiers.adapter import AdapterDescription, LoadedAdapter
from engine.lora.uploader import AdapterUploader
from engine.parallel.group import TensorParallelGroup

# writes KV: (block ids, positions in the blocks, values)
PutKV = Callable[[Tensor, Tensor, Tensor], None]

# the only tensor in an adapter's file; PEFT saves the output of a p-tuning encoder
TENSOR = "prompt_embeddings"


@dataclass(frozen=True, slots=True)
class HostVirtualTokens:
    """The virtual tokens of an adapter in host memory.

    values: one row for each virtual token: [n, hidden_size] embeddings; with `prefix` [n, 2 *
        num_layers, num_kv_heads, head_dim], the first layer's keys, its values, the second's ...
    """

    values: Tensor
    prefix: bool


class VirtualTokensReader:
    """A reader of virtual tokens for one model.

    dtype: the dtype of the model's embedding.
    kv_dtype: the dtype of the KV cache.
    """

    def __init__(
        self,
        model: ModelConfig,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        max_tokens: int,
        group: TensorParallelGroup = TensorParallelGroup(),  # noqa: B008, it is frozen
        layers: range | None = None,
    ) -> None:
        """Set up the reader.

        max_tokens: the maximum number of virtual tokens of an adapter.
        group: the ranks that divide the heads; this rank reads only the KV of its heads.
        layers: the layers whose KV is read; None = all.
        """
        self._group = group
        self._layers = range(model.num_layers) if layers is None else layers
        self._model = model
        self._dtype = dtype
        self._kv_dtype = kv_dtype
        self._max_tokens = max_tokens

    def describe(self, folder: Path, seen: str) -> AdapterDescription:
        """Return the description of an adapter, from its configuration alone. Raises AdapterError.

        seen: the stamp for the description.
        """
        return self._describe(folder, read_peft_config(folder), seen)

    def _describe(self, folder: Path, config: PeftConfig, seen: str) -> AdapterDescription:
        count, model = config.virtual_tokens, self._model
        if count > self._max_tokens:
            raise AdapterError(
                f"{folder}: {count} virtual tokens are over max_virtual_tokens {self._max_tokens}",
                code="adapter_incompatible",
            )
        groups = kv_groups(model).groups
        if config.kind == PREFIX and (len(groups) > 1 or not groups[0].kind.whole):
            raise AdapterError(
                f"{folder}: prefix tuning is not supported where layers see a part of the context",
                code="adapter_incompatible",
            )
        if config.kind == PREFIX and model.recurrent:
            raise AdapterError(
                f"{folder}: prefix tuning is not supported where layers have recurrent "
                "states in the place of keys and values",
                code="adapter_incompatible",
            )
        if config.kind == PREFIX and not all(layer.attends for layer in model.attention):
            raise AdapterError(
                f"{folder}: prefix tuning is not supported where layers have no keys and values",
                code="adapter_incompatible",
            )
        if config.kind == PREFIX and groups[0].attention.latent is not None:
            raise AdapterError(
                f"{folder}: prefix tuning is not supported where layers keep latents in the place "
                "of keys and values",
                code="adapter_incompatible",
            )
        layers, heads = config.layers, config.heads
        if config.kind == PREFIX and (
            layers not in (0, model.num_layers) or heads not in (0, model.num_kv_heads)
        ):
            raise AdapterError(
                f"{folder}: made for {layers} layers of {heads} key heads; this model has "
                f"{model.num_layers} of {model.num_kv_heads}",
                code="adapter_incompatible",
            )
        return AdapterDescription(config.kind, 0, 0, [], seen, count)

    def read(self, folder: Path, seen: str) -> LoadedAdapter:
        """Read an adapter, and check its tensor's name, shape, and that all numbers are finite.

        seen: the stamp for the description.
        """
        before = stamp(folder)
        config = read_peft_config(folder)
        described = self._describe(folder, config, seen)
        stored = list_tensors(folder)
        if [tensor.name for tensor in stored] != [TENSOR]:
            raise AdapterError(f"{folder}: holds something else than the tensor {TENSOR}")
        prefix, shape = config.kind == PREFIX, self._shape(config)
        wanted = (shape[0], shape[1:].numel())
        if stored[0].shape != wanted:
            raise AdapterError(
                f"{stored[0].file}: tensor {TENSOR} has shape {list(stored[0].shape)}; "
                f"num_virtual_tokens {shape[0]} and this model imply {list(wanted)}",
                code="adapter_incompatible",
            )
        state = blake2b(digest_size=16)
        state.update(file_in(folder, CONFIG_FILE).read_bytes())
        host = torch.empty(shape, dtype=self._kv_dtype if prefix else self._dtype)
        read = read_tensors(stored, state.update)
        host.copy_(read[0].view(shape))
        check_finite(stored, read, host)
        if prefix and (self._group.size > 1 or len(self._layers) < self._model.num_layers):
            _, (begin, end) = self._group.heads(self._model.num_heads, shape[2])
            tensors = slice(2 * self._layers.start, 2 * self._layers.stop)
            host = host[:, tensors, begin:end].clone()
        if stamp(folder) != before:
            raise AdapterError(f"{folder}: was written to while it was read; add it again")
        described = AdapterDescription(
            config.kind, 0, host.nbytes, [], seen, described.virtual_tokens
        )
        return LoadedAdapter(
            described, state.hexdigest(), host.nbytes, HostVirtualTokens(host, prefix)
        )

    def _shape(self, config: PeftConfig) -> torch.Size:
        model = self._model
        if config.kind == PREFIX:
            layers = 2 * model.num_layers
            return torch.Size((config.virtual_tokens, layers, model.num_kv_heads, model.head_dim))
        return torch.Size((config.virtual_tokens, model.hidden_size))


class VirtualTokensDevice:
    """Device memory for `max_tokens` virtual tokens in each of `slots` slots.

    embedding: [vocab_size + slots * max_tokens, hidden_size], the model's embedding table, in which
        virtual tokens have ids after the vocabulary.
    """

    def __init__(
        self,
        slots: int,
        max_tokens: int,
        model: ModelConfig,
        embedding: Tensor,
        kv_dtype: torch.dtype,
        uploader: AdapterUploader,
        group: TensorParallelGroup = TensorParallelGroup(),  # noqa: B008, it is frozen
        layers: range | None = None,
    ) -> None:
        """Allocate the memory.

        embedding: see the class.
        kv_dtype: the dtype of the KV cache.
        group: the ranks that divide the heads.
        layers: the layers of this pipeline stage; None = all. On later stages the embedding is on
            torch's "meta" device.
        """
        assert embedding.shape[0] == model.vocab_size + slots * max_tokens
        self._max_tokens = max_tokens
        self._vocab_size = model.vocab_size
        self._vectors = embedding[model.vocab_size :]
        self._uploader = uploader
        self._cuda = uploader.device.type == "cuda"
        _, (begin, end) = group.heads(model.num_heads, model.num_kv_heads)
        count = model.num_layers if layers is None else len(layers)
        shape = (slots, max_tokens, 2 * count, end - begin, model.head_dim)
        if not self._cuda:  # on the CPU slots refer to host memory
            shape = (slots, 0, 0, 0, 0)
        self._prefixes = list(torch.zeros(shape, dtype=kv_dtype, device=uploader.device))

    @property
    def num_bytes(self) -> int:
        return self._vectors.nbytes + sum(prefix.nbytes for prefix in self._prefixes)

    def upload(self, prompt: HostVirtualTokens, slot: int) -> None:
        """Copy an adapter into an unused slot; return when the copy is done.

        Thread-safe.
        """
        values, count = prompt.values, len(prompt.values)
        if not prompt.prefix and self._vectors.is_meta:
            return
        if not prompt.prefix:
            first = slot * self._max_tokens
            self._uploader.copy([(values, self._vectors[first : first + count])])
        elif self._cuda:
            self._uploader.copy([(values, self._prefixes[slot][:count])])
        else:
            self._prefixes[slot] = values

    def name(self, new: NewRow) -> None:
        """Replace a row's placeholder ids by the embedding ids of its adapter's virtual tokens."""
        first = self._vocab_size + new.virtual_slot * self._max_tokens
        new.token_ids[: new.num_virtual] = range(first, first + new.num_virtual)

    def copy(self, prefixes: Sequence[PrefixCopy], size: int, put: PutKV) -> None:
        """Copy the KV of prefixes into KV blocks, before a step reads them.

        size: tokens of a block.
        put: `KVCache.write_entries`.
        """
        for prefix in prefixes:
            source = self._prefixes[prefix.slot][prefix.start : prefix.stop]
            tokens = torch.arange(prefix.stop - prefix.start)
            blocks = torch.tensor(prefix.blocks)[tokens // size]
            places = torch.stack((blocks, tokens % size))
            if self._cuda:  # torch keeps pinned memory until the copy is done
                places = places.pin_memory().to(source.device, non_blocking=True)
            put(places[0], places[1], source)
