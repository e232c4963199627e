"""`manta convert`: a folder that the engine reads without changing anything, or one whose weights
are rounded."""

from pathlib import Path

import msgspec

from deployments.checkpoints.resolve import keeps_blocks, resolve_model
from deployments.cli.console import StatusLine, err, model_progress
from deployments.cli.target import engine_config, read_target
from engine.conversion import convert, convert_rounded
from engine.errors import ConfigError
from engine.rounding import NAMES
from engine.weights.converted import damaged


def run(
    spec: str, target: Path | None, *, device: str, dtype: str, quantization: str, check: bool
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
    kept = keeps_blocks(msgspec.structs.asdict(config))
    with model_progress() as progress:
        folder = resolve_model(asked.model, asked.revision, progress, blocks=kept)
    config = msgspec.structs.replace(config, model=str(folder))
    if config.quantization in NAMES:
        with StatusLine("Rounding") as status:
            count = convert_rounded(
                config, target, lambda loading: status.update(f"Rounding: {loading}")
            )
        print(f"{target}: {count:,} matrices in {config.quantization}, for every device")
        return 0
    with StatusLine("Converting") as status:
        manifest = convert(config, target, lambda loading: status.update(f"Converting: {loading}"))
    weights = manifest.dtype if manifest.quantization == "none" else manifest.quantization
    print(f"{target}: {len(manifest.digests):,} tensors, {weights}, for {manifest.device}")
    return 0


def _check(folder: Path) -> int:
    with StatusLine(f"Reading {folder}") as status:
        wrong = damaged(folder, lambda read: status.update(f"Reading {folder}: {read}"))
    for name in wrong:
        err.print(f"{folder}: tensor {name} is not as it was written", markup=False)
    if not wrong:
        print(f"{folder}: as it was written")
    return 1 if wrong else 0
