"""The registries of image families, whose modules are imported when a model needs them."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import pytest

from engine.architectures import WRAPPERS
from engine.config import towers
from engine.images import processor
from engine.models.vision import registry
from kernels.candidates import Lazy

REGISTRIES: dict[str, Mapping[str, Callable[..., Any]]] = {
    "configurations": towers.FAMILIES,
    "processors": processor.FAMILIES,
    "towers": registry.TOWERS,
}


@pytest.mark.parametrize("name", REGISTRIES)
def test_every_family_is_there(name: str) -> None:
    """Bug: a renamed class is noticed when the first model of its family starts."""
    families = REGISTRIES[name]
    assert families.keys() == REGISTRIES["towers"].keys()
    for entry in families.values():
        assert isinstance(entry, Lazy)
        module, attribute = entry.path.split(":")
        assert callable(getattr(import_module(module), attribute))


def test_every_wrapper_names_a_family() -> None:
    """Bug: the record of an architecture names a family that no registry has."""
    named = {wrapper.images for wrapper in WRAPPERS.values() if isinstance(wrapper.images, str)}
    assert named - {""} <= REGISTRIES["towers"].keys()
