"""Requests with clips through a whole engine: the greedy text and log-probabilities of
transformers, from frames to tokens."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from PIL import Image as Pillow
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor

from engine.images.image import Image
from engine.images.processor import clip_layouts, clips_of, prepare
from engine.library.prompts import Prompts
from engine.messages import Ready
from engine.scheduling.core import EngineCore
from engine.text.tokenizer import Tokenizer
from tests.engine.images.folders import (
    CASES,
    load_processor,
    picture,
    save_clip_settings,
    save_model,
    their_inputs,
    their_processor,
)
from tests.parity.engine_driver import engine, run
from tests.parity.test_images import GREEDY, TIE, Seeing

FPS = 1.5
NAMES = ["Qwen2-VL", "Qwen2.5-VL", "Qwen3-VL", "Qwen3.5"]
FIVE = [picture(70, 100, seed) for seed in range(5)]
FOUR = [picture(100, 70, seed) for seed in range(7, 11)]
STILL = picture(64, 96, 3)
# What a prompt is made of: token ids, pictures, and clips.
PROMPTS: list[list[Any]] = [
    [5, 6, FIVE, 7, 8],
    [5, FOUR, 6, STILL, 7, FIVE, 9],
    [5, STILL, 6, FOUR, 10, FOUR, 7, 8, 9],
]


def clip_rows(images: list[Image], mean: Any, deviation: Any, size: int) -> tuple[Tensor, Tensor]:
    """Return a clip's pixels as transformers' processor lays them out, and its grid.

    The processor itself needs torchvision. size: pixels on the side of a patch.
    """
    tiles = [np.frombuffer(image.pixels, np.uint8).reshape(*image.shape, 3) for image in images]
    frames = torch.from_numpy(np.concatenate(tiles)).float() / 255
    frames = ((frames - torch.tensor(mean)) / torch.tensor(deviation)).permute(0, 3, 1, 2)
    count, height, width = len(frames) // 2, frames.shape[2] // size, frames.shape[3] // size
    cut = frames.reshape(count, 2, 3, height // 2, 2, size, width // 2, 2, size)
    rows = cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(count * height * width, -1)
    return rows, torch.tensor([[count, height, width]])


class Watching:
    """A model that takes clips, and its prompts."""

    def __init__(self, seeing: Seeing) -> None:
        self.seeing = seeing
        self.clips = clips_of(seeing.processor)
        assert self.clips is not None

    def prompt(self, parts: list[Any]) -> tuple[list[int], list[Image], list[list[Image]]]:
        """Return the token ids and images of a prompt, and the pieces of each clip."""
        ids: list[int] = []
        images, clips = [], []
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
                continue
            processor = self.seeing.processor
            if isinstance(part, Pillow.Image):
                layouts = [processor.layout(*part.size)]
            else:
                layouts = clip_layouts(processor, [frame.size for frame in part], FPS)
            pieces = []
            for number, layout in enumerate(layouts):
                ids += [21, 22 + number] if layout.before else []  # where the time is a text
                pieces.append(prepare(processor, part, layout, len(ids)))
                ids += layout.token_ids
            images += pieces
            if not isinstance(part, Pillow.Image):
                clips.append(pieces)
        return ids, images, clips

    def inputs(self, parts: list[Any], clips: list[list[Image]]) -> dict[str, Any]:
        seeing = self.seeing
        stills = [part for part in parts if isinstance(part, Pillow.Image)]
        inputs = their_inputs(seeing.case, stills, seeing.processor) if stills else {}
        theirs = their_processor(seeing.case)
        laid = [
            clip_rows(pieces, theirs.image_mean, theirs.image_std, theirs.patch_size)
            for pieces in clips
        ]
        inputs["pixel_values_videos"] = torch.cat([rows for rows, _ in laid])
        inputs["video_grid_thw"] = torch.cat([grid for _, grid in laid])
        if seeing.case.name == "Qwen2_5_VL":
            inputs["second_per_grid_ts"] = [2 / FPS] * len(clips)
        return inputs

    @torch.inference_mode()
    def run(self, core: EngineCore) -> None:
        """Run the prompts and check them against transformers."""
        prompts = [self.prompt(parts) for parts in PROMPTS]
        ids = [prompt for prompt, _, _ in prompts]
        outputs = run(core, ids, GREEDY, images=[images for _, images, _ in prompts])
        for parts, (prompt, _, clips), output in zip(PROMPTS, prompts, outputs, strict=True):
            assert not output.error and output.token_ids
            tokens = torch.tensor([prompt + output.token_ids])
            kinds = (tokens == 90).int() + 2 * (tokens == 91).int()
            kinds[:, len(prompt) :] = 0
            inputs = self.inputs(parts, clips)
            logits = self.seeing.theirs(input_ids=tokens, mm_token_type_ids=kinds, **inputs).logits
            rows = logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
            for row, ours in zip(rows, output.logprobs, strict=True):
                assert abs(float(row[ours.token_id]) - ours.logprob) < TIE
                assert float(row.max()) - float(row[ours.token_id]) < TIE


class Prompting(Watching):
    """A model and prompts of `LLM.generate`: texts, and their images and clips beside them."""

    def __init__(self, seeing: Seeing) -> None:
        super().__init__(seeing)
        marks = {"<|image_pad|>": 90, "<|video_pad|>": 91}
        marks |= {"<|vision_start|>": 92, "<|vision_end|>": 93}
        words = {f"{token}": token for token in range(90)} | marks
        tokenizer = tokenizers.Tokenizer(WordLevel(words, unk_token="0"))  # of a time's words
        tokenizer.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
        tokenizer.add_special_tokens([*marks])
        ready = Ready(512, 100, 16, 16, [], {}, "", 512, image_token_ids=[90, 91])
        self.prompts = Prompts(Tokenizer(tokenizer), ready, str(seeing.folder))

    def prompt(self, parts: list[Any]) -> tuple[list[int], list[Image], list[list[Image]]]:
        words, images, videos = [], [], []
        for part in parts:
            if isinstance(part, int):
                words.append(f"{part}")
            elif isinstance(part, Pillow.Image):
                words.append("<|image_pad|>")
                images.append(part)
            else:
                words.append("<|vision_start|><|video_pad|><|vision_end|>")
                videos.append({"video": part, "fps": FPS})
        fields = {"prompt": " ".join(words), "images": images, "videos": videos}
        encoded = self.prompts.encode(fields)
        placed = encoded.images()
        pieces = [image for image in placed if encoded.ids[image.start] == 91]
        clips = []
        for video in videos:
            sizes = [frame.size for frame in video["video"]]
            count = len(clip_layouts(self.seeing.processor, sizes, FPS))
            clips.append(pieces[:count])
            del pieces[:count]
        assert not pieces
        return encoded.ids, placed, clips


def watched(name: str, folder: Path) -> Seeing:
    """Make a model, of whose clips no frame is later than its rows and columns.

    Behind later frames transformers' positions of texts are those of the clip, and not its
    publisher's.
    """
    case = CASES[name]
    if name == "Qwen2.5-VL":
        case = replace(case, vision=case.vision | {"tokens_per_second": 1})
    theirs = save_model(folder, case)
    save_clip_settings(folder, case)
    processor = load_processor(folder)
    assert processor is not None
    return Seeing(case, folder, theirs, processor)


@pytest.mark.parametrize("name", NAMES)
def test_clips_equal_transformers(name: str, tmp_path: Path) -> None:
    """Bugs: frames of a patch that are swapped or summed, a clip's time in the place of its row,
    or pieces of a clip that share a key of the prefix cache. Then from the caches, and in chunks
    that end inside of clips."""
    watching = Watching(watched(name, tmp_path))
    core = engine(tmp_path, max_num_batched_tokens=64)
    watching.run(core)
    encoded = core.stats().images_encoded
    assert encoded == (3 if name in NAMES[:2] else 6), "each picture and piece once"
    watching.run(core)
    assert core.stats().images_encoded == encoded
    watching.run(engine(tmp_path, max_num_batched_tokens=11, prefix_caching=False))


@pytest.mark.parametrize("name", NAMES)
def test_clips_of_prompts_equal_transformers(name: str, tmp_path: Path) -> None:
    """Bug: a prompt's clips and images stand in each other's places, of which the tokens are as
    many."""
    Prompting(watched(name, tmp_path)).run(engine(tmp_path, max_num_batched_tokens=64))
