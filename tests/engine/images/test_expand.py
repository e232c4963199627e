"""Images in the places of their placeholders, as transformers' processors put them into a text."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from engine.errors import InvalidRequest
from engine.library.prompts import Prompts
from engine.messages import Ready
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from tests.engine.images.files import gradient
from tests.engine.images.folders import CASES
from tests.engine.images.test_processors import write_folder

BEGIN, SOFT, END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"
TEMPLATE = """{% for message in messages %}{{ message.role }}
{% for part in message.content %}
{%- if part.type == 'image' %}<start_of_image>{% else %}{{ part.text }}{% endif %}
{%- endfor %}.
{% endfor %}"""
PICTURE = gradient(40, 16)


@pytest.fixture(scope="module")
def backend() -> Backend:
    """Return a tokenizer in which line ends merge with their neighbours, as Gemma's do."""
    letters = [chr(code) for code in range(32, 127)]
    lines = ["\n" * count for count in range(1, 7)]
    vocab = {text: number for number, text in enumerate([*letters, *lines])}
    merges = [("\n" * count, "\n") for count in range(1, 6)]
    backend = Backend(models.BPE(vocab, merges))
    backend.add_special_tokens([AddedToken(text) for text in (BEGIN, SOFT, END)])
    return backend


@pytest.fixture
def prompts(backend: Backend, tmp_path: Path) -> Prompts:
    keys = {"boi_token_index": BEGIN, "image_token_index": SOFT, "eoi_token_index": END}
    outer = {key: backend.token_to_id(text) for key, text in keys.items()}
    write_folder(tmp_path, replace(CASES["Gemma 3"], outer=outer | {"mm_tokens_per_image": 9}))
    tokenizer = Tokenizer(backend, chat_template=ChatTemplate({"default": TEMPLATE}, {}))
    soft = backend.token_to_id(SOFT)
    ready = Ready(512, 256, 16, 16, [2], {}, "", 256, image_token_ids=[soft])
    return Prompts(tokenizer, ready, str(tmp_path))


def theirs(text: str) -> str:
    """Return the text that transformers' processor encodes."""
    return text.replace(BEGIN, f"\n\n{BEGIN}{SOFT * 9}{END}\n\n")


def test_lines_around_an_image_merge_with_those_of_the_text(
    backend: Backend, prompts: Prompts
) -> None:
    """Bug: a turn's end of line and the two before an image of Gemma 3 are two tokens, where the
    model was trained with one. A placeholder that a user types is text, with no lines around."""
    part = {"type": "image", "image": PICTURE}
    said: list[Any] = [part, {"type": "text", "text": "\nsee"}, part]
    encoded = prompts.encode([{"role": "user", "content": said}])
    assert encoded.ids == backend.encode(theirs(f"user\n{BEGIN}\nsee{BEGIN}.\n")).ids
    starts = [at for at, token in enumerate(encoded.ids) if token == backend.token_to_id(BEGIN)]
    assert [image.start for image in encoded.images()] == [at + 1 for at in starts]
    typed = [part, {"type": "text", "text": BEGIN}]
    encoded = prompts.encode([{"role": "user", "content": typed}])
    assert encoded.ids.count(backend.token_to_id(BEGIN)) == 1
    assert encoded.ids[-len(BEGIN) - 2 :] == backend.encode(f"{BEGIN[0]}").ids + [
        token for letter in f"{BEGIN[1:]}.\n" for token in backend.encode(letter).ids
    ]


def test_prompts_with_images_have_the_lines_too(backend: Backend, prompts: Prompts) -> None:
    """Bug: a text with placeholders of its own is another prompt than the same chat."""
    text = f"a\n{BEGIN}b{BEGIN}"
    encoded = prompts.encode({"prompt": text, "images": [PICTURE, PICTURE]})
    assert encoded.ids == backend.encode(theirs(text)).ids
    with pytest.raises(InvalidRequest, match=r"prompt has 2 placeholders .* for 1 images"):
        prompts.encode({"prompt": text, "images": [PICTURE]})
