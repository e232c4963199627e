"""CONFIG|MODEL: what `manta serve` and `manta plan` take."""

from pathlib import Path
from typing import Any

import msgspec

from deployments.config.load import MantaConfig, load_config, parse_config
from deployments.environment import gpus_here
from engine.config.engine_config import EngineConfig
from engine.errors import ConfigError


def read_target(spec: str, *, complete: bool = True) -> MantaConfig:
    """A validated configuration from a file, or the defaults for a model. complete: as of
    `load_config`.

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
    """Read a target as `read_target` does, but for planning: the model's files need not be
    complete. A folder may be without weights and tokenizer, and its config.json may be given alone.
    The path is that config.json's; None where the model has to be resolved.

    complete: whether the folder that a .yaml file names has to have weights and tokenizer.
    """
    path = Path(spec).expanduser()
    file = path if path.suffix == ".json" else path / "config.json"
    if file.is_file():
        return parse_config({"model": str(file.parent)}, check_files=False), file
    return read_target(spec, complete=complete), None


def engine_config(target: MantaConfig, **instead: Any) -> EngineConfig:
    """Return the configuration of an engine in this process, with its device decided. It is that of
    a pool of the device's kind, if the configuration has one. Raises ConfigError.

    instead: fields that the command line decides; None leaves a field alone.
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
    return msgspec.convert({**options, **wanted}, EngineConfig)
