"""Allocates the device memory for adapters, by the configuration."""

from dataclasses import dataclass

import torch

from engine.lora.device import LoraDevice, slot_sizes
from engine.lora.loader import AdapterLoader
from engine.lora.tiers.disk import DiskCache
from engine.lora.uploader import AdapterUploader
from engine.lora.virtual_tokens import VirtualTokensDevice, VirtualTokensReader
from engine.lora.weights import LoraLayout, LoraReader
from engine.models.registry import Model
from engine.resolve import Resolved


def adapter_bytes(resolved: Resolved, model: Model) -> list[tuple[str, int]]:
    """Return (purpose, bytes) of the device memory that `DeviceAdapters.allocate` takes.

    On the CPU adapters stay in host memory.
    """
    config, cuda = resolved.config, resolved.device.type == "cuda"
    slots, virtual = config.max_loras, config.max_virtual_tokens
    parts = []
    if slots and cuda:
        layout = LoraLayout(linear.spec for linear in model.linears())
        slab, table, partial = slot_sizes(
            slots,
            layout.num_elements(config.max_lora_rank),
            len(layout.parts),
            max(resolved.max_num_batched_tokens, resolved.max_num_seqs),
            config.max_lora_rank,
            config.deterministic,
        )
        size = slab * resolved.dtype.itemsize + 4 * (table + partial)
        parts.append((f"LoRA slots ({slots} of rank {config.max_lora_rank})", size))
    if slots and virtual:
        token = model.lookup.shape[1] * model.lookup.itemsize
        if cuda:  # the CPU reads prefixes from host memory
            part = resolved.head_ranks, model.head_group.rank
            token += resolved.model.kv_bytes_per_token(resolved.dtype.itemsize, *part)
        parts.append((f"virtual tokens ({slots} times {virtual})", slots * virtual * token))
    return parts


@dataclass(frozen=True, slots=True)
class DeviceAdapters:
    """The adapters on the device, and the loader that fills their slots."""

    loader: AdapterLoader
    lora: LoraDevice
    prompts: VirtualTokensDevice | None

    @classmethod
    def allocate(cls, resolved: Resolved, model: Model) -> "DeviceAdapters":
        """Allocate and return the adapter slots, and connect the model's layers to them."""
        config, device = resolved.config, resolved.device
        linears = list(model.linears())
        layout = LoraLayout(linear.spec for linear in linears)
        for linear, place in zip(linears, layout.layers, strict=True):
            linear.lora = place
        dtype = torch.float32 if device.type == "cpu" else resolved.dtype
        uploader = AdapterUploader(device)
        lora = LoraDevice(
            config.max_loras,
            layout.num_elements(config.max_lora_rank),
            len(layout.parts),
            config.max_lora_rank,
            dtype,
            uploader,
            max_rows=resolved.max_num_seqs,
            max_tokens=resolved.max_num_batched_tokens,
            deterministic=config.deterministic,
            steps=resolved.stages,
            layouts=2 if resolved.kv_ranks > 1 else 1,
        )
        disk = DiskCache(config.lora_disk_folder, config.lora_disk_bytes)
        reader = LoraReader(
            layout,
            dtype,
            config.max_lora_rank,
            resolved.model.tensor_name,
            model.modules_elsewhere,
            lambda module: resolved.model.ignores(f"{module}.weight"),
        )
        if not config.max_virtual_tokens:
            return cls(AdapterLoader((reader, lora), None, disk, config.model), lora, None)
        count, kv_dtype = config.max_virtual_tokens, resolved.dtype
        layers = model.layer_numbers
        prompts = VirtualTokensDevice(
            config.max_loras,
            count,
            resolved.model,
            model.lookup,
            kv_dtype,
            uploader,
            model.head_group,
            layers,
        )
        prompt_reader = VirtualTokensReader(
            resolved.model, model.dtype, kv_dtype, count, model.head_group, layers
        )
        loader = AdapterLoader((reader, lora), (prompt_reader, prompts), disk, config.model)
        return cls(loader, lora, prompts)
