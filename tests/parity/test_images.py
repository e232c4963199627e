"""Requests with images through a whole engine: the greedy text and log-probabilities of
transformers, from pictures to tokens."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from PIL import Image as Pillow

from deployments.checkpoints.tokenizer_files.folder import TokenizerFolder
from deployments.checkpoints.tokenizer_files.templates import known_template
from engine.batch import Batch
from engine.config.engine_config import EngineConfig
from engine.config.model_config import ModelConfig
from engine.errors import ConfigError
from engine.factory import build
from engine.images.image import Image
from engine.images.processor import ImageProcessor, prepare
from engine.parallel.ranks import Ranks
from engine.resolve import resolve
from engine.sampling_params import SamplingParams
from engine.scheduling.core import EngineCore
from engine.text.chat_template import ChatTemplate
from tests.engine.images.folders import (
    CASES,
    Case,
    load_processor,
    picture,
    save_model,
    their_inputs,
)
from tests.engine.images.test_processors import write_folder
from tests.engine.models.test_launch_path import waits_are_errors
from tests.engine.process.conftest import two_cores
from tests.engine.process.ranked import start
from tests.parity.engine_driver import Output, engine, run

__all__ = ["two_cores"]  # a fixture

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1)
TIE = 2e-4
GPU_TIE = 3e-4  # its sums have another order
SMALL, WIDE, TALL = picture(64, 96), picture(200, 90, 1), picture(70, 150, 2)
# What a prompt is made of: token ids, and pictures.
PROMPTS: list[list[int | Pillow.Image]] = [
    [5, 6, SMALL, 7, 8, WIDE, 9],
    [5, 6, WIDE, 7, 8, SMALL, 9],
    [5, 6, 7, 8, 9, 10],
    [TALL, 11, TALL, 12],
    [5, 6, SMALL, 7, 8, TALL, 9, 21, 22],
]


@dataclass
class Seeing:
    """A model folder, and the model of transformers."""

    case: Case
    folder: Path
    theirs: Any
    processor: ImageProcessor
    tie: float = TIE

    def prompt(self, parts: Sequence[int | Pillow.Image]) -> tuple[list[int], list[Image]]:
        """Return the token ids and images of a prompt, as a router makes them."""
        ids: list[int] = []
        images = []
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
                continue
            layout = self.processor.layout(*part.size)
            images.append(prepare(self.processor, part, layout, len(ids)))
            ids += layout.token_ids
        return ids, images

    def run(self, core: EngineCore, max_tokens: int = 6) -> list[Output]:
        """Run the prompts and check them against transformers."""
        prompts = [self.prompt(parts) for parts in PROMPTS]
        params = msgspec.structs.replace(GREEDY, max_tokens=max_tokens)
        ids, images = [list(ids) for ids, _ in prompts], [images for _, images in prompts]
        outputs = run(core, ids, params, images=images)
        for parts, prompt, output in zip(PROMPTS, ids, outputs, strict=True):
            self.check(parts, prompt, output)
        return outputs

    @torch.inference_mode()
    def check(self, parts: Sequence[Any], prompt: list[int], output: Output) -> None:
        assert not output.error and output.token_ids
        ids = torch.tensor([prompt + output.token_ids])
        pictures = [part for part in parts if not isinstance(part, int)]
        inputs: dict[str, Any] = {}
        if pictures:
            inputs = their_inputs(self.case, pictures, self.processor)
            if self.case.types:
                inputs[self.case.types] = (ids == self.processor.image_token_id).int()
        logits = self.theirs(input_ids=ids, **inputs).logits[0, len(prompt) - 1 : -1]
        for row, ours in zip(logits.double().log_softmax(-1), output.logprobs, strict=True):
            assert abs(float(row[ours.token_id]) - ours.logprob) < self.tie
            assert float(row.max()) - float(row[ours.token_id]) < self.tie


def made(name: str, folder: Path) -> Seeing:
    theirs = save_model(folder, CASES[name])
    processor = load_processor(folder)
    assert processor is not None
    return Seeing(CASES[name], folder, theirs, processor)


# Cases whose towers alone run each time.
OTHERS = ("GLM-4.5V", "Idefics 3", "InternVL 6B", "Llama 4")
FAMILIES = [
    pytest.param(name, marks=[pytest.mark.slow] if name in OTHERS else []) for name in CASES
]


@pytest.fixture(scope="module", params=FAMILIES)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return made(request.param, tmp_path_factory.mktemp("model"))


def test_greedy_text_equals_transformers(seeing: Seeing) -> None:
    """Requests together, then again from the caches of keys and of embeddings."""
    core = engine(seeing.folder, max_num_batched_tokens=64)
    seeing.run(core)
    encoded = core.stats().images_encoded
    assert encoded == 3, "each picture once"
    again = seeing.run(core)
    assert core.stats().images_encoded == encoded
    if seeing.case.name != "Qwen3_5":  # a hybrid model has no snapshot of such short prompts
        longer = [len(seeing.prompt(parts)[0]) > 16 for parts in PROMPTS]  # than a block
        assert [output.cached > 0 for output in again] == longer


@pytest.mark.gpu
@pytest.mark.parametrize("cut", [{}, {"deterministic": True}], ids=str)
def test_on_a_gpu(seeing: Seeing, cut: dict[str, Any]) -> None:
    """Bugs: a kernel of the tower mixes pictures up; a graph reads a step's rotary table."""
    if cut and "kv_lora_rank" in seeing.case.text:
        pytest.skip("latent attention is not deterministic on CUDA")
    core = engine(seeing.folder, device="cuda", max_num_batched_tokens=64, **cut)
    replace(seeing, tie=GPU_TIE).run(core, 16)


def encoding_ahead(core: EngineCore, *, ahead: bool) -> tuple[EngineCore, list[Batch]]:
    """Return the engine with encodes beside steps or without, and the batches that it will
    launch."""
    runner: Any = core._runner
    launch, batches = runner.launch, []

    def recorded(batch: Batch) -> Any:
        batches.append(batch)
        return launch(batch)

    runner.launch = recorded
    return EngineCore(replace(core.config, encodes_ahead=ahead), runner), batches


def compare_encodes(folder: Path, name: str, **fields: Any) -> None:
    """Assert that encodes beside steps change no token, and are those that steps would do
    themselves."""
    seeing = made(name, folder)
    texts, encodes = [], []
    for ahead in (False, True):
        core = engine(folder, max_num_batched_tokens=64, prefix_caching=False, **fields)
        core, batches = encoding_ahead(core, ahead=ahead)
        texts.append([output.token_ids for output in seeing.run(core, 16)])
        encodes.append([len(batch.ahead_images) for batch in batches])
        digests = [im.digest for batch in batches for im in (*batch.images, *batch.ahead_images)]
        assert len(digests) == len({*digests}) == 3
    assert texts[0] == texts[1]
    assert not any(encodes[0]) and any(encodes[1])


@pytest.mark.parametrize("name", ["Qwen3-VL", pytest.param("SmolVLM", marks=pytest.mark.slow)])
def test_encodes_beside_steps(name: str, tmp_path: Path) -> None:
    """Bug: tokens of an image are computed before its encode, which a later step brings."""
    compare_encodes(tmp_path, name)


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["Qwen2.5-VL", "Qwen3-VL", "Mistral 3", "SmolVLM"])
def test_encodes_beside_steps_on_a_gpu(name: str, deterministic: bool, tmp_path: Path) -> None:
    """Bug: a step reads embeddings while another stream writes them."""
    compare_encodes(tmp_path, name, device="cuda", deterministic=deterministic)


@pytest.mark.gpu
def test_launches_of_encodes_do_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: pixels come from pageable memory, or the host waits for the stream of encodes."""
    seeing = made("Qwen3-VL", tmp_path)
    core = engine(tmp_path, device="cuda", max_num_batched_tokens=64, prefix_caching=False)
    assert core.config.encodes_ahead
    runner: Any = core._runner
    launch, ahead = runner.launch, []

    def guarded(batch: Batch) -> Any:
        ahead.extend(batch.ahead_images)
        with waits_are_errors():
            return launch(batch)

    monkeypatch.setattr(runner, "launch", guarded)
    seeing.run(core, 16)
    assert ahead and core.stats().image_encode_seconds > 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Qwen3-VL", "Qwen2.5-VL", "Gemma 3"])
def test_decodes_behind_images_are_graphs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a request with images launches its decodes kernel by kernel, or a graph turns its
    tokens by their index."""
    seeing = made(name, tmp_path)
    core = engine(tmp_path, device="cuda", max_num_batched_tokens=64, graph_sizes=(1, 2, 4, 8))
    runner: Any = core._runner
    eager = runner.eager.launch

    def prompts_alone(batch: Batch) -> Any:
        assert batch.num_decodes < len(batch.rows), "decodes are launched kernel by kernel"
        return eager(batch)

    monkeypatch.setattr(runner.eager, "launch", prompts_alone)
    seeing.run(core, 16)


@pytest.mark.parametrize(
    ("name", "file", "key"),
    [
        ("Mistral 3", "tekken.json", "image"),
        ("Mistral 3", "params.json", "vision_encoder"),
        ("Pixtral", "tekken.json", "multimodal"),
    ],
)
def test_mistrals_own_files(name: str, file: str, key: str, tmp_path: Path) -> None:
    """Bug: Mistral Small 3.2, whose folder has no processor's file, sees nothing."""
    longest = CASES[name].settings["size"]
    case = replace(CASES[name], settings={**CASES[name].settings, "size": longest})
    for colours in ("image_mean", "image_std"):  # of CLIP
        case.settings.pop(colours, None)
    theirs = save_model(tmp_path, case)
    (tmp_path / "preprocessor_config.json").unlink()
    assert ModelConfig.from_folder(tmp_path).vision is None
    (tmp_path / file).write_text(json.dumps({"config": {}}))
    assert ModelConfig.from_folder(tmp_path).vision is None
    side = longest["longest_edge"]
    settings = {"image_patch_size": 14, "max_image_size": side, "spatial_merge_size": 2}
    (tmp_path / file).write_text(json.dumps({"config": {"version": "v7"}, key: settings}))
    processor = load_processor(tmp_path)
    assert processor is not None
    Seeing(case, tmp_path, theirs, processor).run(engine(tmp_path, max_num_batched_tokens=64))
    if file == "tekken.json":
        known = known_template(TokenizerFolder(tmp_path), "tekken", {"model": {"vocab": {}}})
        assert known is not None
        (tmp_path / "chat_template.jinja").write_text(known.source)
        template = ChatTemplate.load(tmp_path, {"bos_token": "<s>"})
        assert template is not None
        parts = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
        rendered = template.render([{"role": "user", "content": parts}])
        assert rendered == "<s>[INST][IMG]What is it?[/INST]"
    (tmp_path / file).write_text(json.dumps({key: {"max_image_size": "1540"}}))
    with pytest.raises(ConfigError, match=rf"{file}: {key}: max_image_size: must be a positive"):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.slow
def test_little_room(seeing: Seeing) -> None:
    """Chunks of a few tokens, preemptions, and room for the largest picture alone: embeddings are
    dropped and encoded again."""
    prompts = [seeing.prompt(parts) for parts in PROMPTS]
    longest = max(46, *(len(ids) for ids, _ in prompts))
    largest = max(image.size for _, images in prompts for image in images)
    core = engine(
        seeing.folder,
        max_num_batched_tokens=16,
        max_num_seqs=4,
        image_cache_tokens=seeing.case.settings.get("max_soft_tokens", largest),
        max_model_len=longest + 18,
        num_blocks=28 if seeing.case.name == "Gemma4" else (longest + 18) // 4 + 2,
        block_size=4,
        prefix_caching=False,
    )
    seeing.run(core, max_tokens=16)
    assert core.stats().images_encoded > 3
    if seeing.case.name != "Llama4":  # which gives blocks of past chunks back
        assert core.stats().preemptions


def settings(folder: Path, **fields: Any) -> EngineConfig:
    return EngineConfig(
        model=str(folder), device="cpu", dtype="float32", num_threads=1, max_model_len=128,
        num_blocks=64, max_num_seqs=8, max_num_batched_tokens=24, **fields,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "ways"),
    [
        ("Qwen3-VL", {"tensor_parallel": 2}),
        ("Qwen3-VL", {"tensor_parallel": 2, "attention_data_parallel": True}),
        ("Qwen3.5", {"pipeline_parallel": 2}),
        ("Gemma 3", {"tensor_parallel": 2}),
        pytest.param("Gemma 3", {"pipeline_parallel": 2}, marks=pytest.mark.slow),
        pytest.param("Qwen2.5-VL", {"tensor_parallel": 2}, marks=pytest.mark.slow),
        pytest.param("Qwen2.5-VL", {"pipeline_parallel": 2}, marks=pytest.mark.slow),
        ("SmolVLM", {"tensor_parallel": 2}),
        ("SmolVLM", {"pipeline_parallel": 2}),
        ("InternVL", {"tensor_parallel": 2}),
        ("InternVL", {"pipeline_parallel": 2}),
        ("Llama 4", {"tensor_parallel": 2}),
        ("Llama 4", {"pipeline_parallel": 2}),
        ("Mistral 3", {"tensor_parallel": 2}),
        ("Pixtral", {"pipeline_parallel": 2}),
        ("Gemma 4 31B", {"tensor_parallel": 2}),
        ("Gemma 4 31B", {"tensor_parallel": 2, "attention_data_parallel": True}),
        ("Gemma 4 31B", {"pipeline_parallel": 2}),
        ("Kimi K2.5", {"tensor_parallel": 2}),
        ("Kimi K2.5", {"pipeline_parallel": 2}),
    ],
    ids=str,
)
@pytest.mark.usefixtures("two_cores")
def test_ranks(name: str, ways: dict[str, Any], tmp_path: Path) -> None:
    """Each rank has the tower, but for later stages, which have only the places."""
    seeing = made(name, tmp_path)
    core, others = start(settings(tmp_path, **ways))
    try:
        seeing.run(core)
    finally:
        assert others is not None
        others.close()


@pytest.mark.gpu
@pytest.mark.two_gpus
def test_two_gpus_encode_a_share_each(tmp_path: Path) -> None:
    """Bugs: a rank reads rows that another has not sent, or ranks meet in another order."""
    seeing = made("Qwen3-VL", tmp_path)
    parts: list[list[int | Pillow.Image]] = [
        [part for seed in range(50) for part in (5, picture(64, 96, seed))] + [7, 8 + number]
        for number in range(3)
    ]
    prompts = [seeing.prompt(some) for some in parts]
    assert sum(image.size for image in prompts[0][1]) >= 256, "the ranks do not share it"
    config = EngineConfig(
        model=str(tmp_path), device="cuda", dtype="float32", tensor_parallel=2, num_blocks=512,
        max_num_seqs=8, max_num_batched_tokens=512,
    )  # fmt: skip
    core, others = start(config, Ranks)
    try:
        ids = [list(prompt) for prompt, _ in prompts]
        outputs = run(core, ids, GREEDY, images=[images for _, images in prompts])
        for some, prompt, output in zip(parts, ids, outputs, strict=True):
            seeing.check(some, prompt, output)
    finally:
        assert others is not None
        others.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["Qwen2.5-VL", "Qwen3-VL", "Mistral 3", "SmolVLM", "InternVL", "Llama 4"]
)
def test_deterministic_mode(name: str, tmp_path: Path) -> None:
    """Bug: an image that is encoded beside others, or cut by a chunk, changes a request's bits."""
    seeing = made(name, tmp_path)
    fields = {"deterministic": True, "prefix_caching": False, "max_num_seqs": 5}
    seen = []
    for tokens in (64, 11):
        outputs = seeing.run(engine(tmp_path, max_num_batched_tokens=tokens, **fields))
        seen.append([output.logprobs for output in outputs])
    assert seen[0] == seen[1]


def test_the_plan_counts_images(tmp_path: Path) -> None:
    """Bug: the cache of embeddings is left out, and a GPU runs out of memory."""
    made("Qwen3-VL", tmp_path)
    _, ready = build(settings(tmp_path, image_cache_tokens=1 << 20))
    (line,) = (line for line in ready.memory_table.splitlines() if "embeddings" in line)
    size = (1 << 20) * 48 * 3 * 4 / (1 << 30)  # three levels of 48 float32 numbers
    assert line.split() == ["images", "(1048576", "embeddings)", f"{size:.2f}", "GiB"]


def test_images_that_are_computed_whole(tmp_path: Path) -> None:
    """Bugs: the default budget holds no image of Gemma 3 beside decodes; a window that is smaller
    than an image computes another attention."""
    write_folder(tmp_path, CASES["Gemma 3"])
    plain = EngineConfig(model=str(tmp_path), device="cpu", dtype="float32", num_threads=1)
    assert resolve(plain).max_num_batched_tokens == 512
    many = msgspec.structs.replace(plain, max_num_seqs=600)
    assert resolve(many).max_num_batched_tokens == 609
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"sliding_window": 10', '"sliding_window": 8'))
    with pytest.raises(ConfigError, match=r"9 of them, .* windows see 8 tokens; set images: off"):
        resolve(plain)
    assert resolve(msgspec.structs.replace(plain, images="off")).model.vision is None


def test_a_step_has_room_for_an_image_that_is_not_cut(tmp_path: Path) -> None:
    """Bug: the defaults of a model whose images are not cut are refused, though it had served
    text."""
    case = CASES["Gemma 4 31B"]
    vision = case.vision | {"position_embedding_size": 560 * 3}
    save_model(tmp_path, replace(case, vision=vision, settings={"max_soft_tokens": 560}))
    config = EngineConfig(model=str(tmp_path), device="cpu", num_blocks=64)
    assert resolve(config).max_num_batched_tokens == 560 + 64
    small = {"max_num_batched_tokens": 256}
    with pytest.raises(ConfigError, match=r"raise it to 624, or set engine\.images: off"):
        build(msgspec.structs.replace(config, **small))
    build(msgspec.structs.replace(config, **small, images="off"))


def test_what_ranks_and_modes_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage without the layers after which embeddings are added; images that are off."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    seeing = made("Qwen3-VL", tmp_path)
    with pytest.raises(ConfigError, match="pipeline_parallel: the first of 2 stages has 1 layers"):
        start(settings(tmp_path, pipeline_parallel=2))
    ids, images = seeing.prompt(PROMPTS[0])
    assert ModelConfig.from_folder(tmp_path).vision is not None
    (output,) = run(engine(tmp_path, images="off"), [ids], GREEDY, images=[images])
    assert "takes no images" in output.error
    made("Gemma 3", tmp_path)
    with pytest.raises(ConfigError, match=r"raise it to 17, or set engine\.images: off"):
        engine(tmp_path, max_num_batched_tokens=16, max_num_seqs=8)
