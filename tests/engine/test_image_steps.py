"""Steps with images: rows of a tower in the places of image tokens, and rotary places of three
axes, against transformers with the same rows."""

import copy
import inspect
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers

from engine.batch import Batch, NewRow
from engine.config.kv_groups import kv_groups
from engine.config.model_config import ModelConfig
from engine.config.vision import VisionConfig
from engine.images.image import Image
from engine.models.registry import Model, build_model
from engine.runner.caches.kv_cache import KVCache
from engine.runner.forward import ModelForward
from engine.runner.images import StepImages, axis_of_frequency, rotary_places
from engine.runner.inputs import make_inputs
from engine.runner.launch.launchers import GraphStep
from engine.runner.model_runner import ModelRunner
from engine.runner.request_rows import RequestRows
from engine.runner.warm_up import capture_graphs, warm_up
from engine.sampling.sampler import Sampler
from engine.sampling.step_sampler import StepSampler
from engine.weights import load_weights
from kernels.dispatch import kernels_for
from tests.batches import new_row, tower_config

# The model of transformers has to take rows instead of pictures; 5.17's does not.
forward = transformers.Qwen3VLForConditionalGeneration.forward
if "mm_encoder_outputs" not in inspect.signature(forward).parameters:
    pytest.skip("this release of transformers takes no rows of a tower", allow_module_level=True)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_ROWS, MAX_LEN, SIZE = 4, 64, 4
HIDDEN, VOCAB, PAD = 48, 101, 97  # PAD is the image token
TEXT = {
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": MAX_LEN,
}
TOWER = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
GRIDS = {"a": (2, 3), "b": (4, 2), "c": (3, 2)}
# text, image a, text, image b, text
TOKENS = [5, 9, *[PAD] * 6, 11, 12, 13, *[PAD] * 8, 14, 15, 16]


class Rows:
    """A tower whose rows are random numbers, chosen by the first pixel."""

    def __init__(self, width: int, levels: int) -> None:
        self.width, self.levels = width, levels
        self.calls: list[int] = []

    def of(self, key: int, size: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(key)
        return torch.randn(size, self.width * (1 + self.levels), generator=generator)

    def encode(self, pixels: Sequence[torch.Tensor]) -> torch.Tensor:
        self.calls.append(len(pixels))
        rows = [self.of(int(p[0, 0, 0, 0]), p.shape[1] * p.shape[2]) for p in pixels]
        return torch.cat(rows).to(DEVICE)

    def shape_of(self, size: int) -> tuple[int, int, int]:
        return 1, 1, size


def image(name: str, start: int) -> Image:
    height, width = GRIDS[name]
    pixels = np.full((1, height, width, 3), ord(name), np.uint8)
    size = height * width
    return Image(
        name.encode() * 16, start, size, size, (height, width), pixels.shape[:3], pixels.tobytes()
    )


IMAGES = [image("a", 2), image("b", 11)]
vision = partial(tower_config, PAD, HIDDEN)


class Seeing:
    """A runner of a tiny model of text and images, and the model of transformers."""

    def __init__(self, theirs: Any, folder: Path, vision: VisionConfig, **forward: Any) -> None:
        self.theirs, self.vision = theirs.eval(), vision
        theirs.save_pretrained(folder)
        self.config = ModelConfig.from_folder(folder).within(MAX_LEN)
        kernels = kernels_for(DEVICE.type, forward.get("deterministic", False))
        self.model: Model = build_model(self.config, torch.float32, DEVICE, kernels)
        load_weights(self.model, folder)
        axes = vision.mrope_section is not None
        groups = kv_groups(self.config)
        self.rows = RequestRows.allocate(
            NUM_ROWS, MAX_LEN, SIZE, DEVICE, len(groups.groups), axes=axes
        )
        self.num_groups = len(groups.groups)
        blocks = NUM_ROWS * self.num_groups * MAX_LEN // SIZE
        kv = KVCache.allocate(groups, blocks, SIZE, torch.float32, DEVICE, rows=NUM_ROWS + 1)
        self.tower = Rows(HIDDEN, vision.deepstack)
        cache = torch.zeros(40, HIDDEN * (1 + vision.deepstack), device=DEVICE)
        table = self.model.rotary_table if axes else None
        images = StepImages(vision, self.rows, self.tower, cache, table)
        self.forward = ModelForward(
            self.model,
            kernels,
            self.rows,
            kv,
            make_inputs(self.rows, SIZE, MAX_LEN, DEVICE),
            images=images,
        )
        sampler = Sampler(NUM_ROWS + 1, VOCAB, DEVICE)
        self.runner = ModelRunner(self.forward, StepSampler(self.model, sampler, self.rows.tokens))
        if DEVICE.type == "cuda":
            warm_up(self.runner, MAX_LEN)
            capture_graphs(self.runner, [1, 2], MAX_LEN)

    def batch(self, entries: Sequence[tuple[int, int, int]], **fields: Any) -> Batch:
        """Return a batch of entries (row, start, length); rows in `new_rows` get their blocks with
        it."""
        batch = Batch(1, **fields)
        per_row = self.num_groups * MAX_LEN // SIZE
        for new in batch.new_rows:
            batch.new_blocks += [(new.row, i, per_row * new.row + i) for i in range(per_row)]
        for row, start, length in entries:
            batch.rows.append(row)
            batch.starts.append(start)
            batch.lengths.append(length)
            batch.samples.append(True)
        batch.num_decodes = next((i for i, n in enumerate(batch.lengths) if n > 1), len(entries))
        return batch

    @torch.inference_mode()
    def logits(self, batch: Batch) -> torch.Tensor:
        """Return the logits of every token of a step."""
        images = self.forward.images
        assert images is not None
        for new in batch.new_rows:
            self.forward.set_row(new)
        images.encode(batch.images, batch.dropped_images)
        step = self.forward.assemble(batch)
        return self.model.logits(self.forward.run_step(step)).cpu()

    @torch.inference_mode()
    def wanted(self, ids: Sequence[int], images: Sequence[Image]) -> torch.Tensor:
        """Return transformers' logits of a prompt with images."""
        if not images:
            return self.theirs(input_ids=torch.tensor([ids])).logits[0]
        grids = torch.tensor([(1, 2 * im.grid[0], 2 * im.grid[1]) for im in images])
        rows = [self.tower.of(im.pixels[0], im.size) for im in images]
        inside = torch.zeros(len(ids), dtype=torch.int)
        for im in images:
            inside[im.start : im.start + im.length] = 1
        levels = [list(part) for part in zip(*(r.split(HIDDEN, 1) for r in rows), strict=True)]
        encoded = transformers.modeling_outputs.BaseModelOutputWithPooling(pooler_output=levels[0])
        encoded.deepstack_features = levels[1:]
        inputs: dict[str, Any] = {"mm_token_type_ids": inside[None], "image_grid_thw": grids}
        if self.vision.mrope_section is None:
            inputs = {"token_type_ids": inside[None]}
            encoded.pooler_output = torch.cat(levels[0])
        return self.theirs(
            input_ids=torch.tensor([ids]), mm_encoder_outputs={"image": encoded}, **inputs
        ).logits[0]


def qwen3_vl(folder: Path, **options: Any) -> Seeing:
    rope = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [4, 2, 2]}
    tower = TOWER | {"out_hidden_size": HIDDEN, "deepstack_visual_indexes": [0, 0]}
    config = transformers.Qwen3VLConfig(
        text_config=TEXT | {"rope_parameters": rope | {"mrope_interleaved": True}},
        vision_config=tower,
        image_token_id=PAD,
        video_token_id=98,
        vision_start_token_id=99,
    )
    return Seeing(
        shaken(transformers.Qwen3VLForConditionalGeneration(config)),
        folder,
        vision(deepstack=2, mrope_section=(4, 2, 2), interleaved=True),
        **options,
    )


def qwen25_vl(folder: Path, **options: Any) -> Seeing:
    rope = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 3, 3]}
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            **TEXT,
            "hidden_size": HIDDEN,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "rope_parameters": rope,
        },
        vision_config=TOWER | {"out_hidden_size": HIDDEN},
        image_token_id=PAD,
        video_token_id=98,
        vision_start_token_id=99,
    )
    return Seeing(
        shaken(transformers.Qwen2_5_VLForConditionalGeneration(config)),
        folder,
        vision(mrope_section=(2, 3, 3)),
        **options,
    )


def qwen3_5(folder: Path, **options: Any) -> Seeing:
    rope = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.25}
    config = transformers.Qwen3_5Config(
        text_config=TEXT
        | {
            "head_dim": 32,
            "rope_parameters": rope | {"mrope_section": [2, 1, 1], "mrope_interleaved": True},
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
        vision_config=TOWER | {"out_hidden_size": HIDDEN},
        image_token_id=PAD,
        video_token_id=98,
        vision_start_token_id=99,
        vision_end_token_id=100,
    )
    return Seeing(
        shaken(transformers.Qwen3_5ForConditionalGeneration(config)),
        folder,
        vision(mrope_section=(2, 1, 1), interleaved=True),
        **options,
    )


def gemma3(folder: Path, **options: Any) -> Seeing:
    config = transformers.Gemma3Config(
        text_config={
            **TEXT,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "query_pre_attn_scalar": 16,
            "final_logit_softcapping": None,
        },
        mm_tokens_per_image=4,
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "image_size": 84,
            "patch_size": 14,
        },
        image_token_id=PAD,
        image_token_index=PAD,
        boi_token_index=98,
        eoi_token_index=99,
    )
    return Seeing(
        shaken(transformers.Gemma3ForConditionalGeneration(config)),
        folder,
        vision(bidirectional=True),
        **options,
    )


def shaken(model: Any) -> Any:
    """Change a model's parameters to numbers so large that a wrong place shows; return the
    model."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0 if parameter.dim() > 1 else 1.0, 0.2)
    return model


FAMILIES = {"qwen3_vl": qwen3_vl, "qwen2_5_vl": qwen25_vl, "qwen3_5": qwen3_5, "gemma3": gemma3}


@pytest.fixture(scope="module", params=FAMILIES)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return FAMILIES[request.param](tmp_path_factory.mktemp(request.param))


def with_images(row: int, ids: Sequence[int], images: Sequence[Image]) -> NewRow:
    return replace(new_row(row, list(ids)), images=images)


def prefill(
    seeing: Seeing, row: int, ids: Sequence[int], images: Sequence[Image], cuts: Sequence[int] = ()
) -> torch.Tensor:
    """Return the logits of a prompt that is computed in chunks, which end at `cuts`."""
    parts, start = [], 0
    fields: dict[str, Any] = {"new_rows": [with_images(row, ids, images)], "images": [*images]}
    if seeing.vision.bidirectional:  # never cut inside of an image
        cuts = [
            next((im.start for im in images if 0 < cut - im.start < im.length), cut) for cut in cuts
        ]
    for end in sorted({*cuts, len(ids)}):
        parts.append(seeing.logits(seeing.batch([(row, start, end - start)], **fields)))
        start, fields = end, {}
    return torch.cat(parts)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    # Chunked recurrences of logits up to 8 add in another order.
    torch.testing.assert_close(ours, theirs, atol=5e-4, rtol=1e-4)


def test_logits_are_those_of_transformers(seeing: Seeing) -> None:
    """Bugs: rows in the places of the other image, scaled as embeddings are, or added after the
    wrong layer; an axis that turns another's frequencies; tokens of an image that see no later."""
    close(prefill(seeing, 0, TOKENS, IMAGES), seeing.wanted(TOKENS, IMAGES))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_that_came_are_as_those_of_the_tower(seeing: Seeing, dtype: torch.dtype) -> None:
    """Bugs: levels of another row, a picture that is encoded although its embeddings came, two
    bytes that are read as four."""
    fields = {"new_rows": [with_images(0, TOKENS, IMAGES)]}
    drop, calls = [image.digest for image in IMAGES], seeing.tower.calls
    logits = []
    for came in (False, True):
        images = []
        for image in IMAGES:
            rows = seeing.tower.of(image.pixels[0], image.size).to(dtype)
            name, array = str(dtype).removeprefix("torch."), rows.view(torch.uint8).numpy()
            fields_of = {"rows": array.tobytes(), "rows_dtype": name, "pixels": b""}
            images.append(msgspec.structs.replace(image, **(fields_of if came else {})))
        batch = seeing.batch(
            [(0, 0, len(TOKENS))], images=images, dropped_images=drop, **copy.deepcopy(fields)
        )
        calls.clear()
        logits.append(seeing.logits(batch))
        assert calls == ([] if came else [2])
    assert seeing.forward.images is not None
    seeing.forward.images.clear()
    if dtype == torch.float32:
        assert torch.equal(*logits)
    else:
        torch.testing.assert_close(*logits, atol=0.2, rtol=0.1)


def test_layers_that_a_drafter_reads(seeing: Seeing) -> None:
    """Bug: a model whose layers' inputs are kept for a drafter adds no levels of images."""
    model: Any = seeing.model
    try:
        model.taps = (1, 3)
        close(prefill(seeing, 0, TOKENS, IMAGES), seeing.wanted(TOKENS, IMAGES))
        assert len(model.tapped) == 2
    finally:
        model.taps = ()


def test_logits_do_not_depend_on_where_a_prompt_is_cut(seeing: Seeing) -> None:
    """Bugs: a chunk that begins inside an image reads its first rows again; a chunk of text
    between images stands at index + the last delta; a level is added to another token."""
    want = seeing.wanted(TOKENS, IMAGES)
    for size in (1, 3, 7):
        close(prefill(seeing, 0, TOKENS, IMAGES, range(size, len(TOKENS), size)), want)


def test_images_are_those_of_their_own_places(seeing: Seeing) -> None:
    """Two images swapped, and one picture twice, whose rows are encoded once."""
    swapped = [image("b", 2), image("a", 13)]
    ids = [5, 9, *[PAD] * 8, 11, 12, 13, *[PAD] * 6, 14, 15, 16]
    close(prefill(seeing, 0, ids, swapped), seeing.wanted(ids, swapped))
    twice = [image("a", 2), image("a", 9)]
    ids = [5, 9, *[PAD] * 6, 11, *[PAD] * 6, 14, 15]
    close(prefill(seeing, 1, ids, twice, (5, 12)), seeing.wanted(ids, twice))


def test_a_step_of_several_requests(seeing: Seeing) -> None:
    """Bugs: indices of one entry in another's tokens; a decode beside an image that stands at its
    index, or at another row's delta; an image token outside of images gets a row."""
    text = [5, PAD, 7, 8, 9, 10]
    prefill(seeing, 2, TOKENS, IMAGES)
    prefill(seeing, 1, text, ())
    later = TOKENS[:11]
    longer = [*TOKENS, 21]
    rows = seeing.rows.tokens
    rows[2, len(TOKENS)], rows[1, len(text)] = 21, 22
    new = with_images(3, later, [IMAGES[0]])
    batch = seeing.batch(
        [(1, len(text), 1), (2, len(TOKENS), 1), (3, 0, len(later))], new_rows=[new]
    )
    logits = seeing.logits(batch)
    close(logits[0], seeing.wanted([*text, 22], ())[-1])
    close(logits[1], seeing.wanted(longer, IMAGES)[-1])
    close(logits[2:], seeing.wanted(later, [IMAGES[0]]))


def test_a_prefix_may_end_inside_an_image(seeing: Seeing) -> None:
    """A request that finds the first tokens of an image in another's blocks computes the rest."""
    if seeing.config.recurrent:
        pytest.skip("a hybrid model begins at snapshots")
    prefill(seeing, 0, TOKENS, IMAGES)
    want = seeing.wanted(TOKENS, IMAGES)
    for start in (4, 8, 12, 16):
        batch = seeing.batch(
            [(1, start, len(TOKENS) - start)], new_rows=[with_images(1, TOKENS, IMAGES)]
        )
        shared = start // SIZE * seeing.num_groups
        batch.new_blocks += [(1, index, index) for index in range(shared)]
        close(seeing.logits(batch), want[start:])


def test_the_text_goes_on_behind_images(seeing: Seeing) -> None:
    """Decodes by recorded programs and kernel by kernel, a preempted request that comes back in
    another row, and a row that had images before: the greedy text of transformers."""
    ids, text = [*TOKENS], [5, 6, 7]
    new = [with_images(0, ids, IMAGES), with_images(1, text, ())]
    batch = seeing.batch([(0, 0, len(ids)), (1, 0, len(text))], new_rows=new, images=[*IMAGES])
    for step in range(9):
        result = seeing.runner.launch(batch).wait()
        for row, token in zip((ids, text), result.tokens, strict=True):
            assert token == int(seeing.wanted(row, IMAGES if row is ids else ())[-1].argmax())
            row.append(token)
        batch = seeing.batch([(0, len(ids) - 1, 1), (1, len(text) - 1, 1)])
        if step == 4:  # both come back, in each other's row
            new = [with_images(1, ids, IMAGES), with_images(0, text, ())]
            batch = seeing.batch([(1, 0, len(ids)), (0, 0, len(text))], new_rows=new)
        elif step > 4:
            batch = seeing.batch([(1, len(ids) - 1, 1), (0, len(text) - 1, 1)])


def test_decodes_behind_images_take_graphs(seeing: Seeing) -> None:
    """Bugs: a request with images never takes a graph again, nor does who decodes beside it; a
    graph gets tokens of an image, whose embeddings it has not."""
    taken: list[str] = []

    class Graphs:
        def size_of(self, batch: Batch) -> tuple[int, int]:
            return len(batch.rows), batch.num_tokens

        def launch(self, batch: Batch, size: tuple[int, int]) -> None:
            taken.append("graph")

    class Eager:
        def launch(self, batch: Batch) -> None:
            taken.append("eager")
            seeing.forward.assemble(batch)

    fakes: Any = Graphs(), seeing.runner.sampling, Eager()
    step, images = GraphStep(seeing.forward, *fakes), seeing.forward.images
    assert images is not None
    images.encode(IMAGES)
    text, end = [5, 6, 7, 8], len(TOKENS)
    for row, ids, own in ((0, TOKENS, IMAGES), (1, text, ()), (2, TOKENS, IMAGES)):
        seeing.forward.set_row(with_images(row, ids, own))
    for entries in (
        [(0, 0, 14)],  # cut inside the last image
        [(1, 3, 1), (0, 14, end - 14)],
        [(0, end, 1)],
        [(0, end + 1, 1), (1, 0, 4)],
        [(0, end + 2, 1), (2, 0, end)],
        [(0, end + 3, 1), (2, end, 1)],
    ):
        step.launch(seeing.batch(entries))
    assert taken == ["eager", "eager", "graph", "graph", "eager", "graph"]


def test_text_alone_costs_no_bit(seeing: Seeing) -> None:
    """A text beside images, and on a model without any, has the same logits bit by bit."""
    text = [5, 6, 7, 8, 9]
    alone = prefill(seeing, 1, text, ())
    images, seeing.forward.images = seeing.forward.images, None
    deltas, seeing.rows.deltas = seeing.rows.deltas, None
    inputs, seeing.forward.inputs = (
        seeing.forward.inputs,
        make_inputs(seeing.rows, SIZE, MAX_LEN, DEVICE),
    )
    try:
        new = with_images(1, text, ())
        step = seeing.forward.assemble(seeing.batch([(1, 0, len(text))], new_rows=[new]))
        assert step.metas[0].rotary is None
        with torch.inference_mode():
            plain = seeing.model.logits(seeing.forward.run_step(step)).cpu()
    finally:
        seeing.forward.images, seeing.rows.deltas = images, deltas
        seeing.forward.inputs = inputs
    assert torch.equal(alone, plain)


def test_dropped_images_make_room(seeing: Seeing) -> None:
    """The cache has 40 rows; places of a dropped image belong to the next one."""
    images = seeing.forward.images
    assert images is not None
    big = [replace_digest(IMAGES[1], bytes([n]) * 16) for n in range(6)]
    before: list[bytes] = [*images.held]
    for image in big:
        ids = [5, *[PAD] * 8, 7]
        moved = [Image(image.digest, 1, 8, 8, image.grid, image.shape, image.pixels)]
        batch = seeing.batch(
            [(0, 0, len(ids))],
            new_rows=[with_images(0, ids, moved)],
            images=moved,
            dropped_images=before,
        )
        close(seeing.logits(batch), seeing.wanted(ids, moved))
        before = [image.digest]


def replace_digest(old: Image, digest: bytes) -> Image:
    return Image(digest, old.start, old.length, old.size, old.grid, old.shape, old.pixels)


def test_one_table_serves_both_layouts() -> None:
    """Bug: the axes of published sections in another order than in training."""
    assert axis_of_frequency([2, 3, 3], interleaved=False) == [0, 0, 1, 1, 1, 2, 2, 2]
    assert axis_of_frequency([4, 2, 2], interleaved=True) == [0, 1, 2, 0, 1, 2, 0, 0]
    axes = axis_of_frequency([24, 20, 20], interleaved=True)
    assert "".join("thw"[axis] for axis in axes) == "thw" * 20 + "tttt"
    assert axis_of_frequency([11, 11, 10], True) == [0, 1, 2] * 10 + [0, 1]


def test_places_of_clips() -> None:
    """Bugs: frames that all have the first one's time; text behind a long clip that is earlier than
    its last frame, and has the places of its rows."""
    cases = ((0.5, [0, 0, 1, 1], 3), (4 / 3, [0, 1, 2, 4], 5), (7.0, [0, 7, 14, 21], 22))
    for step, times, end in cases:
        clip = Image(b"c" * 16, 2, 24, 24, (2, 3), (8, 32, 48), b"", time_step=step)
        places, delta = rotary_places([clip])
        assert places[:, :2].tolist() == [[0, 1]] * 3
        frames = places[:, 2:].reshape(3, 4, 2, 3) - 2
        assert frames[0, :, 0, 0].tolist() == times
        assert (frames[0] == frames[0, :, :1, :1]).all()
        assert frames[1, 3].tolist() == [[0] * 3, [1] * 3]
        assert frames[2, 2].tolist() == [[0, 1, 2]] * 2
        assert 26 + delta == 2 + end


def test_places_of_text_and_images() -> None:
    """Bug: text behind an image goes on one place further, or behind its area."""
    places, delta = rotary_places([image("a", 2), image("b", 9)])
    assert places[:, :2].tolist() == [[0, 1]] * 3
    assert places[:, 2:8].tolist() == [[2] * 6, [2, 2, 2, 3, 3, 3], [2, 3, 4, 2, 3, 4]]
    assert places[:, 8].tolist() == [5] * 3
    assert places[:, 9:].tolist() == [[6] * 8, [6, 6, 7, 7, 8, 8, 9, 9], [6, 7] * 4]
    assert delta == 10 - 17
