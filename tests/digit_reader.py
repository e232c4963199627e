"""A small vision model of Qwen3-VL's architecture, trained on the digits that scikit-learn ships.

The model names the digits of one or two images as words. Its share of right answers shows that each
image's embeddings are at their place, which random weights cannot show. It is trained once, in half
a minute on one core, and kept in .cache/models."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from tests.published_tokenizers import CACHE, fetched

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
QUESTION = "what is it?"
SIDE, PATCH = 64, 16
TRAINED = 1400  # number of images to train on; the others are held out
_STEPS, _BATCH, _RATE, _SHIFT = 500, 48, 2e-3, 3
_SPECIAL = [
    "<pad>",
    *(f"<|{name}|>" for name in ("im_start", "im_end", "vision_start", "vision_end")),
    *(f"<|{name}|>" for name in ("image_pad", "video_pad")),
]
_TEXTS = ["user", "assistant", "\n", " ", "what", "is", "it", "?", *WORDS]
_IDS = {text: number for number, text in enumerate([*_SPECIAL, *_TEXTS])}
_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    f"{{% if part.type == 'image' %}}{_IMAGE}{{% else %}}{{{{ part.text }}}}{{% endif %}}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def digit_reader() -> Path:
    """Return the model's folder. Skips the test without scikit-learn, of `.[dev]`."""
    pytest.importorskip("sklearn", reason="pip install -e .[dev] has scikit-learn")
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]

    def train(place: Path) -> Path:
        folder = place / "model"
        program = [sys.executable, "-m", "tests.digit_reader", str(folder)]
        subprocess.run(program, check=True, timeout=600, cwd=Path(__file__).parents[1])
        return folder

    return fetched(CACHE.with_name("models") / f"digit-reader-{digest}", train)


def digits() -> tuple[list[Image.Image], list[str]]:
    """Return images of SIDE x SIDE pixels in random order, and the words for their digits."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    order = np.random.default_rng(1).permutation(len(bunch.images))
    grey = (255 - bunch.images[order] / 16 * 255).astype(np.uint8)
    pictures = [
        Image.fromarray(pixels).convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        for pixels in grey
    ]
    return pictures, [WORDS[digit] for digit in bunch.target[order]]


def _patches(pixels: torch.Tensor) -> torch.Tensor:
    """Return the patches [n * 16, 1536] of pixels [n, SIDE, SIDE, 3] between -1 and 1.

    They are in the layout of transformers' processor: patches by blocks of 2 x 2, and a patch's
    elements by channel, frame (two equal ones) and pixel.
    """
    blocks = pixels.permute(0, 3, 1, 2).reshape(-1, 3, 2, 2, PATCH, 2, 2, PATCH)
    blocks = blocks.permute(0, 2, 5, 3, 6, 1, 4, 7)[..., None, :, :]
    return blocks.expand(*blocks.shape[:6], 2, PATCH, PATCH).reshape(len(pixels) * 16, -1)


def _model() -> Any:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 10000.0}
    rope |= {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
    text = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    text |= {"vocab_size": 64, "tie_word_embeddings": True, "max_position_embeddings": 1024}
    vision = {"depth": 2, "hidden_size": 64, "num_heads": 4, "intermediate_size": 128}
    vision |= {"out_hidden_size": 96, "patch_size": PATCH, "num_position_embeddings": 64}
    tokens = {"image": "image_pad", "video": "video_pad"}
    tokens |= {name: name for name in ("vision_start", "vision_end")}
    config = Qwen3VLConfig(
        text_config={**text, "rope_parameters": rope, "eos_token_id": _IDS["<|im_end|>"]},
        vision_config={**vision, "deepstack_visual_indexes": [0]},
        tie_word_embeddings=True,
        **{f"{name}_token_id": _IDS[f"<|{token}|>"] for name, token in tokens.items()},
    )
    return Qwen3VLForConditionalGeneration(config)


def _tokenizer() -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel(_IDS, unk_token="<pad>"))
    words = Regex(r"\s|\w+|[^\s\w]")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(words, "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in _SPECIAL])
    return tokenizer


def _prompt(pictures: int) -> str:
    asked = "<|image_pad|>" * (SIDE // PATCH // 2) ** 2
    images = _IMAGE.replace("<|image_pad|>", asked) * pictures
    return f"<|im_start|>user\n{images}{QUESTION}<|im_end|>\n<|im_start|>assistant\n"


def _train(model: Any, tokenizer: Any) -> None:
    """Train the model on prompts with one and with two images in turns, each randomly shifted by a
    few pixels."""
    pictures, words = digits()
    pixels = torch.tensor(np.stack([np.asarray(picture) for picture in pictures])) / 127.5 - 1
    optimizer = torch.optim.AdamW(model.parameters(), _RATE, weight_decay=0.01)
    random = np.random.default_rng(0)

    def shifted(chosen: NDArray[np.int64]) -> torch.Tensor:
        groups = pixels[torch.tensor(chosen.flatten())].split(_BATCH // 8)
        shifts = random.integers(-_SHIFT, _SHIFT + 1, (len(groups), 2)).tolist()
        moved = [
            torch.roll(group, shift, (1, 2)) for group, shift in zip(groups, shifts, strict=True)
        ]
        return _patches(torch.cat(moved))

    for step in range(_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = _RATE * min(1, (step + 1) / 20) * (1 - 0.97 * step / _STEPS)
        count = 1 + step % 2
        chosen = random.integers(0, TRAINED, (_BATCH // count, count))
        prompt = _prompt(count)
        texts = [f"{prompt}{' '.join(words[i] for i in row)}<|im_end|>" for row in chosen]
        ids = torch.tensor([tokenizer.encode(text).ids for text in texts])
        labels = ids.clone()
        labels[:, : len(tokenizer.encode(prompt).ids)] = -100
        loss = model(
            input_ids=ids,
            mm_token_type_ids=(ids == _IDS["<|image_pad|>"]).int(),
            pixel_values=shifted(chosen),
            image_grid_thw=torch.tensor([[1, SIDE // PATCH, SIDE // PATCH]] * chosen.size),
            labels=labels,
        ).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def main(folder: Path) -> None:
    """Train the model and write its checkpoint folder in Hugging Face's layout."""
    torch.set_num_threads(1)  # the matmuls are too small for two threads
    torch.manual_seed(0)
    model, tokenizer = _model(), _tokenizer()
    _train(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"eos_token": "<|im_end|>", "pad_token": "<pad>", "chat_template": _TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    processor = {"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": PATCH}
    processor |= {"temporal_patch_size": 2, "merge_size": 2}
    processor |= {"size": {"shortest_edge": 1024, "longest_edge": 65536}}
    processor |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
