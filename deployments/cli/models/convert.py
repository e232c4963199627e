"""`manta convert`: write a model folder that the engine reads unchanged, or a quantised one."""

from pathlib import Path

import msgspec

from deployments.checkpoints.resolve import keeps_blocks, resolve_model
from deployments.cli.console import StatusLine, err, model_progress
from deployments.cli.target import engine_config, read_target
from engine.config.quant_formats import CHECKPOINT_FORMATS
from engine.conversion import convert, convert_rounded
from engine.errors import ConfigError
from engine.shards import read_headers
from engine.weights.converted import damaged

# Safetensors' names of 16- and 32-bit floats.
_FLOATS = ("F32", "F16", "BF16")


def run(
    spec: str,
    target: Path | None,
    *,
    device: str,
    dtype: str,
    quantization: str,
    check: bool,
    calibrate: Path | None = None,
) -> int:
    if check:
        return _check(Path(spec))
    if target is None:
        raise ConfigError("DIR is missing: the folder to write")
    asked = read_target(spec)
    config = engine_config(
        asked,
        device=device,
        dtype=None if dtype == "auto" else dtype,
        quantization=None if quantization == "auto" else quantization,
    )
    blocks = keeps_blocks(msgspec.structs.asdict(config))
    with model_progress() as progress:
        folder = resolve_model(asked.model, asked.revision, progress, blocks=blocks)
    config = msgspec.structs.replace(config, model=str(folder))
    if config.quantization in CHECKPOINT_FORMATS:
        with StatusLine("Quantising") as status:
            count = convert_rounded(
                config,
                target,
                lambda loading: status.update(f"Quantising: {loading}"),
                calibrate,
            )
        what = f"{count:,} matrices in {config.quantization}, for every device"
        print(f"{target}: {what}; {_sizes(target)}")
        return 0
    if calibrate is not None:
        raise ConfigError("--calibrate needs --quantization int4", param="calibrate")
    with StatusLine("Converting") as status:
        manifest = convert(config, target, lambda loading: status.update(f"Converting: {loading}"))
    weights = manifest.dtype if manifest.quantization == "none" else manifest.quantization
    print(f"{target}: {len(manifest.digests):,} tensors, {weights}, for {manifest.device}")
    return 0


def _sizes(folder: Path) -> str:
    """Return a text about a quantised folder: its size, the size of its unquantised matrices, and
    the largest of these."""
    entries = read_headers(folder).values()
    matrices = [entry for entry in entries if entry.code in _FLOATS and len(entry.shape) > 1]
    values = [
        matrix for matrix in matrices if not matrix.name.endswith(("_scale", "absmax", "quant_map"))
    ]
    whole = sum(entry.num_bytes for entry in entries)
    of_values = sum(matrix.num_bytes for matrix in values)
    text = f"{whole / 1e6:,.0f} MB, of which {of_values / 1e6:,.0f} MB"
    largest = max(values, key=lambda one: one.num_bytes, default=None)
    return f"{text} stay as they are" + (f" ({largest.name} ...)" if largest is not None else "")


def _check(folder: Path) -> int:
    with StatusLine(f"Reading {folder}") as status:
        wrong = damaged(folder, lambda read: status.update(f"Reading {folder}: {read}"))
    for name in wrong:
        err.print(f"{folder}: tensor {name} is not as it was written", markup=False)
    if not wrong:
        print(f"{folder}: as it was written")
    return 1 if wrong else 0
