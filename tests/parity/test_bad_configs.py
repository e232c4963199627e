"""What config.json says wrongly, of each architecture: an error that names the file and the key."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.config.model_config import ModelConfig
from engine.errors import ConfigError
from tests.parity.cases import save
from tests.parity.test_architectures import ALL

WRONG: list[Any] = ["x", -1, 0, 1.5, True, [], {}, ["x"], None]


def places(config: dict[str, Any]) -> list[tuple[str, ...]]:
    """Keys, and keys of what is inside."""
    inner = [
        (key, each) for key, value in config.items() if isinstance(value, dict) for each in value
    ]
    return [(key,) for key in config] + inner


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_every_key_with_other_values(name: str, tmp_path: Path) -> None:
    """A list where a number is expected ends the engine with a TypeError that names neither."""
    save(ALL[name], tmp_path)
    file = tmp_path / "config.json"
    text = file.read_text()
    for path in places(json.loads(text)):
        for wrong in WRONG:
            config = json.loads(text)
            inside = config
            for key in path[:-1]:
                inside = inside[key]
            inside[path[-1]] = wrong
            file.write_text(json.dumps(config))
            try:
                ModelConfig.from_folder(tmp_path)
            except ConfigError as error:
                assert str(file) in error.message, (path, wrong)
            except Exception as error:
                raise AssertionError(f"{path} = {wrong!r}") from error
