"""convert, convert_rounded: write a model folder in the engine's packed form, or a quantised
copy."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch

from engine.config.engine_config import EngineConfig
from engine.config.model_config import ModelConfig
from engine.config.quant_formats import CHECKPOINT_FORMATS
from engine.errors import ConfigError
from engine.models.registry import build_model
from engine.resolve import decide
from engine.rounding.calibration import read_pieces
from engine.rounding.checkpoint import round_checkpoint
from engine.weights.converted import MANIFEST, VERSION, Manifest, Writer, copy_others
from engine.weights.load import each_parameter
from engine.weights.stream import Loading
from kernels.dispatch import kernels_for


def convert(
    config: EngineConfig,
    target: Path,
    progress: Callable[[Loading], None] | None = None,
) -> Manifest:
    """Write `config.model` with its weights packed as an engine with this configuration packs them.

    The engine's device need not be on this machine; "auto" means the CPU. Host memory holds only
    the matrices that are being read. The target folder appears once it is complete.
    Raises ConfigError, also for a target that exists.
    """
    folder = Path(config.model)
    model_config = ModelConfig.from_folder(folder, config.rope_scaling)
    if config.quantization not in ("auto", "none", "gguf"):
        raise ConfigError(
            f"quantization {config.quantization!r} quantises weights when the engine starts, and "
            "is not kept in such a folder; convert without it, and start the folder with it, or "
            f"take one of {', '.join(CHECKPOINT_FORMATS)}",
            param="quantization",
        )
    _check(folder, target)
    kind = "cuda" if config.device == "cuda" else "cpu"
    resolved = decide(config, model_config, torch.device(kind))
    dtype = str(resolved.dtype).removeprefix("torch.")
    model = build_model(
        resolved.model,
        resolved.dtype,
        "cpu",
        kernels_for("cpu"),
        quantization=config.quantization,
        runs_on=kind,
    )
    with _appearing(target) as half:
        writer = Writer(half, model.parameters())
        try:
            each_parameter(model, folder, writer.write, progress)
        finally:
            digests = writer.close()
        copy_others(folder, half, dtype)
        quantized = model_config.quantized
        manifest = Manifest(
            VERSION,
            model_config.architecture,
            kind,
            dtype,
            "none" if quantized is None else quantized.name,
            digests,
        )
        text = json.dumps(asdict(manifest), indent=1) + "\n"
        (half / MANIFEST).write_text(text, encoding="utf-8")
    return manifest


def convert_rounded(
    config: EngineConfig,
    target: Path,
    progress: Callable[[Loading], None] | None = None,
    calibration: Path | None = None,
) -> int:
    """Write a quantised copy of `config.model` and return the number of quantised matrices.

    The copy works on every device and in other programs. `config.quantization` is one of
    CHECKPOINT_FORMATS. Host memory must hold the largest matrix a few times. With a calibration it
    must hold the embedding, a layer and the layer's Hessians. The target folder appears once it is
    complete.

    calibration: a file with text like the model's future inputs. 4-bit matrices are rounded so that
        their outputs on this text change least.
    Raises ConfigError, also for a target that exists.
    """
    folder = Path(config.model)
    model_config = ModelConfig.from_folder(folder, config.rope_scaling)
    _check(folder, target)
    if model_config.quantized is not None:
        raise ConfigError(
            f"quantization {config.quantization!r}: the checkpoint's weights are "
            f"{model_config.quantized.name} already; convert one in 16 bits",
            param="quantization",
        )
    if calibration is not None and config.quantization != "int4":
        raise ConfigError(
            f"--calibrate: quantization {config.quantization!r} is rounded without a text; take "
            "int4, or leave --calibrate out",
            param="calibrate",
        )
    pieces = [] if calibration is None else read_pieces(calibration, folder)
    model = build_model(
        model_config, torch.float32, "meta", kernels_for("cpu"), quantization="none", runs_on="cuda"
    )
    with _appearing(target) as half:
        return round_checkpoint(
            model,
            folder,
            half,
            config.quantization,
            progress,
            pieces,
            config.quantization_layers,
        )


def _check(folder: Path, target: Path) -> None:
    if Manifest.read(folder) is not None:
        raise ConfigError(f"{folder}: is converted already", param="model")
    if target.exists():
        raise ConfigError(f"{target}: is there already; give a folder that is not", param="target")


@contextmanager
def _appearing(target: Path) -> Iterator[Path]:
    """Yield a folder that is renamed to target at the end, or deleted after an error.

    Raises ConfigError if the folder cannot be written.
    """
    half = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        half.mkdir(parents=True)
        yield half
        half.rename(target)
    except OSError as error:
        raise ConfigError(
            f"{target}: cannot be written: {error.strerror or error}", param="target"
        ) from error
    finally:
        if half.is_dir():
            for file in half.iterdir():
                file.unlink()
            half.rmdir()
