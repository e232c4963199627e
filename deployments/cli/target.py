"""read_target: reads the commands' argument CONFIG|MODEL, a configuration file or a model's
name."""

from pathlib import Path
from typing import Any

import msgspec

from deployments.checkpoints.resolve import with_drafter
from deployments.config.load import MantaConfig, load_config, parse_config
from deployments.environment import gpus_here
from engine.config.engine_config import EngineConfig
from engine.errors import ConfigError


def read_target(spec: str, *, complete: bool = True) -> MantaConfig:
    """Return the configuration in a file, or the default configuration with a model.

    spec: path of a .yaml file, or a value of `model:`.
    complete: see `load_config`.

    Raises ConfigError with all problems, before anything is downloaded or loaded.
    """
    path = Path(spec).expanduser()
    if path.suffix in (".yaml", ".yml"):
        if not path.exists():
            raise ConfigError(f"{spec}: no such configuration file")
        return load_config(path, complete=complete)
    if path.is_file() and path.suffix != ".gguf":
        raise ConfigError(f"{spec}: neither a .yaml configuration nor a .gguf model")
    return parse_config({"model": spec})


def read_planned(spec: str, *, complete: bool = True) -> tuple[MantaConfig, Path | None]:
    """Return a configuration for planning, and the path of the model's config.json.

    `spec` may also be a model folder without weights and tokenizer, or a config.json alone. The
    path is None if the model may have to be downloaded first.

    complete: whether the folder that a .yaml file names must have weights and tokenizer.
    """
    path = Path(spec).expanduser()
    file = path if path.suffix == ".json" else path / "config.json"
    if file.is_file():
        return parse_config({"model": str(file.parent)}, check_files=False), file
    return read_target(spec, complete=complete), None


def engine_config(target: MantaConfig, **instead: Any) -> EngineConfig:
    """Return the configuration of an engine in this process, with a resolved device.

    If the configuration has a pool of the device's kind, the fields are those of this pool.

    instead: fields of EngineConfig from the command line; None: as in the configuration.

    Raises ConfigError for a configuration of several models.
    """
    if target.models:
        names = ", ".join(target.models)
        raise ConfigError(
            f"models: there are several ({names}), and this takes one; give its folder or name",
            param="models",
        )
    wanted = {name: value for name, value in instead.items() if value is not None}
    options = {"model": target.model, "revision": target.revision, **target.engine}
    device = wanted.get("device", options.get("device", "auto"))
    kind = "gpu" if device == "cuda" or (device == "auto" and gpus_here()) else "cpu"
    if kind in target.pools:
        options = target.engine_options(target.pools[kind])
    wanted["device"] = "cuda" if kind == "gpu" else "cpu"
    return msgspec.convert({**with_drafter(options), **wanted}, EngineConfig)
