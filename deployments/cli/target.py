"""CONFIG|MODEL: what `manta serve` and `manta plan` take."""

from pathlib import Path

from deployments.config.load import MantaConfig, load_config, parse_config
from engine.errors import ConfigError


def read_target(spec: str) -> MantaConfig:
    """A validated configuration from a file, or the defaults for a model.

    Raises ConfigError with all problems, before anything is downloaded or loaded.
    """
    path = Path(spec).expanduser()
    if path.suffix in (".yaml", ".yml"):
        if not path.exists():
            raise ConfigError(f"{spec}: no such configuration file")
        return load_config(path)
    if path.is_file() and path.suffix != ".gguf":
        raise ConfigError(f"{spec}: neither a .yaml configuration nor a .gguf model")
    return parse_config({"model": spec})
