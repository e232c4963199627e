"""Names of tensors in models of text and pictures or sound, as transformers has them."""

import pytest
import torch
import transformers

from engine.architectures import ARCHITECTURES, TEXT_TYPES, WRAPPERS, Wrapper
from engine.architectures.record import renamed

MADE = [
    wrapper
    for wrapper in WRAPPERS.values()
    # Aya Vision's configuration without arguments makes no model in transformers 5.23.
    if hasattr(transformers, wrapper.name) and not wrapper.name.startswith("AyaVision")
]


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", MADE, ids=lambda wrapper: wrapper.name)
def test_what_is_left_is_the_text_model(wrapper: Wrapper) -> None:
    """A projector or a tower whose tensors are neither named as ignored nor of the text model, so
    that a model of this family ends with an unknown tensor; a text model that no record knows."""
    configuration = wrapper.name.removesuffix("ForConditionalGeneration") + "Config"
    config = getattr(transformers, configuration)()
    kind = config.text_config.model_type
    assert TEXT_TYPES.get(kind, kind) in {record.model_type for record in ARCHITECTURES.values()}
    with torch.device("meta"):
        names = getattr(transformers, wrapper.name)(config).state_dict()
    left = {renamed(name, wrapper.renames) for name in names if not wrapper.ignores(name)}
    assert left
    others = ("vision", "visual", "audio", "projector", "image", "merger", "connector")
    for name in left:
        assert name.startswith(("model.", "lm_head.")), name
        assert not any(other_name in name for other_name in others), name
