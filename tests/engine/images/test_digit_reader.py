"""The model of digits that tests on a real Ray serve, as transformers computes it.

It is trained here, where two processes share the cores, and not while those tests wait for it.
"""

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from tests.digit_reader import (
    _IDS,
    PATCH,
    SIDE,
    TRAINED,
    _patches,
    _prompt,
    digit_reader,
    digits,
)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_held_out_digits_are_read() -> None:
    """Bug: a model that was trained badly, for which the server is blamed."""
    from transformers import Qwen3VLForConditionalGeneration

    folder = digit_reader()
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder)
    pictures, words = digits()
    pixels = np.stack([np.asarray(picture) for picture in pictures[TRAINED:]])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompt = tokenizer.encode(_prompt(1)).ids
    ids = torch.tensor([prompt] * len(pixels))
    with torch.inference_mode():
        logits = model(
            input_ids=ids,
            mm_token_type_ids=(ids == _IDS["<|image_pad|>"]).int(),
            pixel_values=_patches(torch.tensor(pixels) / 127.5 - 1),
            image_grid_thw=torch.tensor([[1, SIDE // PATCH, SIDE // PATCH]] * len(pixels)),
        ).logits[:, -1]
    expected = torch.tensor([_IDS[word] for word in words[TRAINED:]])
    assert (logits.argmax(-1) == expected).float().mean() >= 0.95
