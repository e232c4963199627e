"""Fake adapters for tests of `deployments`: folders that the fake engine accepts as adapters."""

import asyncio
import json
from pathlib import Path

from deployments.adapters.registry import AdapterSettings


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 20))


def make_folder(folder: Path, **fields: object) -> Path:
    """Write a folder that the fake engine accepts as an adapter, and return it.

    The adapter's revision is a hash of the folder's files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], **fields}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder


def settings(root: Path, **more: object) -> AdapterSettings:
    return AdapterSettings("m", roots=(str(root),), **more)
