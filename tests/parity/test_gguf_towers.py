"""GGUF files of models that see, in two files as people download them: the text and pictures of the
checkpoints that they are of."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

from deployments.checkpoints.gguf import convert, write_outline
from deployments.checkpoints.resolve import check_model, gguf_of, resolve_model
from engine.architectures.mmproj import MMPROJS
from engine.config.model_config import ModelConfig
from engine.errors import ConfigError
from engine.text.chat_template import ChatTemplate
from engine.text.template_contents import with_image_places
from tests.engine.images.folders import CASES, Case, load_processor, save_model
from tests.engine.images.kimi_files import write_kimi_vl
from tests.engine.models.vision.test_towers import encode, tower_of
from tests.parity.engine_driver import engine, run
from tests.parity.gguf_files import finish
from tests.parity.gguf_tower_files import PAIRS, of_text, write_pair
from tests.parity.test_images import GREEDY, PROMPTS, Seeing

_QWEN3 = CASES["Qwen3-VL"]
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MIXTURE = replace(_QWEN3, name="Qwen3VLMoe", text=_QWEN3.text | _EXPERTS)
# What the format cannot say: another base of positions, an activation of the projector, tiles of
# another size than the table, the sizes of pictures.
CHANGES: dict[str, dict[str, Any]] = {
    "Mistral 3": {"rope_parameters": {"rope_theta": 10000.0}},
    "InternVL 6B": {"image_size": [16, 16]},
}


def _kimi_vl() -> Case:
    """Return Kimi K2.5's case in Kimi-VL's format, whose files have no limits of pictures."""
    case = CASES["Kimi K2.5"]
    media = case.settings["media_proc_cfg"]
    media = media | {"in_patch_limit": 4096, "patch_limit_on_one_side": 512}
    settings = {"media_proc_cfg": media}
    write = partial(write_kimi_vl, media=media)
    return replace(case, settings=settings, write=write)


def case_of(name: str) -> Case:
    if name == "Kimi-VL":
        return _kimi_vl()
    case = MIXTURE if name == "Qwen3-VL, a mixture" else CASES[name]
    outer = case.outer | ({"projector_hidden_act": "gelu"} if name == "InternVL 6B" else {})
    if name.startswith("GLM"):
        size = {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 12288}
        case = replace(case, settings=case.settings | {"size": size})
    return replace(case, vision=case.vision | CHANGES.get(name, {}), outer=outer)


@pytest.mark.parametrize("name", PAIRS)
def test_greedy_text_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    """Halves of a patch that change places, rows that are turned twice, a norm that is one too
    large, a projector's activation: pictures that are nearly right."""
    checkpoint, folder, converted = (tmp_path / part for part in ("checkpoint", "files", "made"))
    for part in (checkpoint, folder, converted):
        part.mkdir()
    case = case_of(name)
    theirs = save_model(checkpoint, case)
    convert(write_pair(name, case, checkpoint, folder), converted)
    processor, their_own = load_processor(converted), load_processor(checkpoint)
    assert processor is not None and their_own is not None
    for size in ((90, 50), (40, 200)):
        assert processor.layout(*size) == their_own.layout(*size)
    Seeing(case, converted, theirs, processor).run(engine(converted, max_num_batched_tokens=64))


@pytest.mark.parametrize(
    "name", ["Qwen3-VL, a mixture", "GLM-4.1V", "GLM-4.5V", "PaddleOCR-VL", "Kimi-VL", "Kimi K2.5"]
)
def test_the_folder_is_the_checkpoint(name: str, tmp_path: Path) -> None:
    """Bug: a name, a class or a size by which no other program would know the model."""
    case = case_of(name)
    save_model(tmp_path, case)
    (tmp_path / "made").mkdir()
    convert(write_pair(name, case, tmp_path, tmp_path), tmp_path / "made")
    folders = tmp_path, tmp_path / "made"
    theirs, ours = (json.loads((folder / "config.json").read_text()) for folder in folders)
    assert ours["architectures"] == theirs["architectures"]
    vision = theirs["vision_config"] | {"layer_norm_eps": 1e-6, "projector_ln_eps": 1e-5}
    assert all(vision[key] == value for key, value in ours["vision_config"].items())
    mine, read = (part["text_config"]["rope_parameters"] for part in (theirs, ours))
    assert read.get("mrope_section") == mine.get("mrope_section")
    stored, written = (load_file(folder / "model.safetensors") for folder in folders)
    towers = {tensor for tensor in stored if not of_text(tensor)}
    assert towers == {tensor for tensor in written if not of_text(tensor)}
    assert all(torch.equal(stored[tensor], written[tensor]) for tensor in towers)


def test_every_projector_has_a_case() -> None:
    """Bug: an entry whose names nobody compares with the `gguf` package's table."""
    assert {projector for projector, _ in PAIRS.values()} == {entry.projector for entry in MMPROJS}


@pytest.fixture(scope="module")
def smol(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smol")
    save_model(folder, CASES["SmolVLM"])
    return folder


@pytest.mark.parametrize("kind", ["Q8_0", "F16", "BF16"])
def test_types_of_towers(kind: str, smol: Path, tmp_path: Path) -> None:
    """Bug: a scale that is left out, or 8 bits that the tower's layers take for numbers."""
    quant = GGMLQuantizationType[kind]
    source = write_pair("SmolVLM", CASES["SmolVLM"], smol, tmp_path, quant)
    (tmp_path / "made").mkdir()
    convert(source, tmp_path / "made")
    name = "model.vision_model.encoder.layers.1.self_attn.k_proj.weight"
    stored = load_file(smol / "model.safetensors")[name]
    written = load_file(tmp_path / "made" / "model.safetensors")[name]
    values = torch.from_numpy(dequantize(quantize(stored.numpy(), quant), quant))
    assert written.dtype == (torch.float16 if kind == "F16" else torch.bfloat16)
    assert torch.equal(written, values.to(written.dtype))


def test_a_tower_beside_blocks(tmp_path: Path) -> None:
    """Bug: the tower of a file that is served as it is, as on CPUs, is taken for blocks."""
    sizes = {"hidden_size": 64, "head_dim": 16}
    case = replace(CASES["SmolVLM"], text=CASES["SmolVLM"].text | sizes)
    theirs = save_model(tmp_path, case)
    (tmp_path / "files").mkdir()
    source = write_pair(
        "SmolVLM", case, tmp_path, tmp_path / "files", text_quant=GGMLQuantizationType.Q8_0
    )
    stored = load_file(tmp_path / "model.safetensors")
    values = []
    for blocks in (False, True):
        folder = tmp_path / f"blocks-{blocks}"
        folder.mkdir()
        convert(source, folder, blocks=blocks)
        config = ModelConfig.from_folder(folder)
        assert (config.quantized is not None) == blocks
        processor = load_processor(folder)
        assert processor is not None
        core = engine(folder, max_num_batched_tokens=64)
        seeing = Seeing(case, folder, theirs, processor)
        prompts = [seeing.prompt(parts) for parts in PROMPTS]
        ids, images = [ids for ids, _ in prompts], [images for _, images in prompts]
        outputs = run(core, ids, GREEDY, images=images)
        written = load_file(folder / "model.safetensors")
        towers = [name for name in written if "vision" in name or "connector" in name]
        assert len(towers) > 30
        assert all(torch.equal(written[name], stored[name]) for name in towers)
        values.append([output.logprobs[0].logprob for output in outputs])
    assert values[0] == pytest.approx(values[1], abs=0.3)  # activations of 8 bits


def test_mlps_that_older_files_name_the_other_way_round(smol: Path, tmp_path: Path) -> None:
    """Bug: a file of Gemma 3's first weeks is refused for the shapes of its MLPs."""
    written = []
    for swapped in (False, True):
        folder = tmp_path / str(swapped)
        folder.mkdir()
        source = write_pair("SmolVLM", CASES["SmolVLM"], smol, folder, swapped=swapped)
        (folder / "made").mkdir()
        convert(source, folder / "made")
        written.append((folder / "made" / "model.safetensors").read_bytes())
    assert written[0] == written[1]


def test_folders_of_files(smol: Path, tmp_path: Path) -> None:
    """A folder as it is downloaded, its plan, and a cache that forgets no tower."""
    source = write_pair("SmolVLM", CASES["SmolVLM"], smol, tmp_path)
    assert gguf_of(str(tmp_path)) == gguf_of(str(source)) == source
    cache = tmp_path / "cache"
    check_model(str(tmp_path))
    for spec in (tmp_path, source):
        assert ModelConfig.from_folder(resolve_model(str(spec), cache=cache)).vision is not None
    (tmp_path / "outline").mkdir()
    write_outline(source, tmp_path / "outline")
    assert ModelConfig.from_folder(tmp_path / "outline").vision is not None
    (tmp_path / "mmproj-model.gguf").rename(tmp_path / "elsewhere")
    assert ModelConfig.from_folder(resolve_model(str(source), cache=cache)).vision is None


def test_towers_that_do_not_fit(smol: Path, tmp_path: Path) -> None:
    """Another family's tower, or that of another size, would give noise; and so would the tower
    itself."""
    source = write_pair("SmolVLM", CASES["SmolVLM"], smol, tmp_path)
    tower = tmp_path / "mmproj-model.gguf"
    with pytest.raises(ConfigError, match=r"mmproj-model\.gguf: has the tower .* own file"):
        check_model(str(tower))
    other = tmp_path / "gemma"
    other.mkdir()
    save_model(other, CASES["Gemma 3"])
    write_pair("Gemma 3", CASES["Gemma 3"], other, other)
    (other / "mmproj-model.gguf").rename(tower)
    way_out = r"put the mmproj file of model\.gguf in its place, or move this one"
    with pytest.raises(ConfigError, match=rf"mmproj-model\.gguf: .* gemma3 model .*{way_out}"):
        check_model(str(source))
    wide = replace(CASES["SmolVLM"], text=CASES["SmolVLM"].text | {"hidden_size": 96})
    save_model(other, wide)
    write_pair("SmolVLM", wide, other, other)
    (other / "mmproj-model.gguf").rename(tower)
    with pytest.raises(ConfigError, match=rf"have 96 numbers, .* 48: .*{way_out}"):
        check_model(str(source))
    # A folder of many models, and a projector that is not known, keep on giving text.
    (tmp_path / "another.gguf").write_bytes(source.read_bytes())
    check_model(str(source))
    (tmp_path / "another.gguf").unlink()
    write_pair("SmolVLM", CASES["SmolVLM"], smol, tmp_path, projector_type="minicpmv")
    (tmp_path / "made").mkdir()
    convert(source, tmp_path / "made")
    assert ModelConfig.from_folder(tmp_path / "made").vision is None


def test_towers_with_other_tensors(smol: Path, tmp_path: Path) -> None:
    """A missing tensor would stay random, an extra one would be left out."""
    source = write_pair("SmolVLM", CASES["SmolVLM"], smol, tmp_path, **{"vision.block_count": 3})
    (tmp_path / "made").mkdir()
    with pytest.raises(ConfigError, match=r"mmproj-model\.gguf: tensor 'v\.blk\.2\..*missing"):
        convert(source, tmp_path / "made")
    write_pair("SmolVLM", CASES["SmolVLM"], smol, tmp_path)
    tower = tmp_path / "mmproj-model.gguf"
    tower.write_bytes(tower.read_bytes().replace(b"v.post_ln.bias", b"v.post_lm.bias"))
    with pytest.raises(ConfigError, match=r"mmproj-model\.gguf: unknown tensor 'v\.post_lm\.bias'"):
        convert(source, tmp_path / "made")


@pytest.mark.parametrize(
    ("name", "lacking"),
    [
        ("GLM-4.1V", "mm.post_norm"),
        ("PaddleOCR-VL", "mm.input_norm"),
        ("Kimi-VL", "mm.input_norm"),
        ("Kimi K2.5", "mm.input_norm"),
    ],
)
def test_files_that_lack_something(name: str, lacking: str, tmp_path: Path) -> None:
    """A tensor that stays random, and a token whose number would be another vocabulary's."""
    case = case_of(name)
    save_model(tmp_path, case)
    source, tower = write_pair(name, case, tmp_path, tmp_path), tmp_path / "mmproj-model.gguf"
    whole = tower.read_bytes()
    for key in ("clip.vision.patch_size", "clip.vision.attention.layer_norm_epsilon"):
        tower.write_bytes(whole.replace(key.encode(), f"{key[:-1]}_".encode()))
        with pytest.raises(ConfigError, match=rf"mmproj-model\.gguf: has no {key}"):
            write_outline(source, tmp_path)
    (tmp_path / "made").mkdir()
    tower.write_bytes(whole.replace(lacking.encode(), lacking[:-1].encode() + b"_"))
    with pytest.raises(ConfigError, match=rf"mmproj-model\.gguf: unknown tensor '{lacking[:-1]}_"):
        convert(source, tmp_path / "made")
    tower.write_bytes(whole)
    token = next(iter(PAIRS[name][1].tokens.values()))
    source.write_bytes(source.read_bytes().replace(token.encode(), token[:-1].encode() + b"_"))
    with pytest.raises(ConfigError, match=r"model\.gguf has no token .* for pictures"):
        check_model(str(source))


@pytest.mark.parametrize("name", ["Kimi-VL", "Kimi K2.5"])
def test_rows_of_moonvit(name: str, tmp_path: Path) -> None:
    """Bug: pairs of columns and rows that change places give pictures that are nearly right."""
    case = case_of(name)
    save_model(tmp_path, case)
    converted = tmp_path / "converted"
    converted.mkdir()
    convert(write_pair(name, case, tmp_path, tmp_path), converted)
    ours, theirs = (encode(folder, tower_of(folder)) for folder in (converted, tmp_path))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["Kimi-VL", "Kimi K2.5"])
def test_a_layer_that_is_missing(name: str, tmp_path: Path) -> None:
    """Queries, keys and values are three tensors in one format, and one in the other."""
    case = case_of(name)
    save_model(tmp_path, case)
    source = write_pair(name, case, tmp_path, tmp_path, **{"vision.block_count": 3})
    (tmp_path / "made").mkdir()
    with pytest.raises(ConfigError, match=r"mmproj-model\.gguf: tensor 'v\.blk\.2\..*missing"):
        convert(source, tmp_path / "made")


def test_a_table_that_is_no_square(tmp_path: Path) -> None:
    """The file does not have the sides of Kimi-VL's table of positions."""
    case = case_of("Kimi-VL")
    save_model(tmp_path, case)
    checkpoint = tmp_path / "model.safetensors"
    tensors = load_file(checkpoint)
    name = "vision_tower.patch_embed.pos_emb.weight"
    save_file(tensors | {name: tensors[name][:6].contiguous()}, checkpoint)
    source = write_pair("Kimi-VL", case, tmp_path, tmp_path)
    (tmp_path / "converted").mkdir()
    with pytest.raises(ConfigError, match=r"'v\.position_embd\.weight' has 42 rows, no square"):
        convert(source, tmp_path / "converted")


def test_a_text_model_that_is_not_read(tmp_path: Path) -> None:
    """The error of a folder of two files is that of the text model, not of the encoder."""
    for file, architecture in (("model.gguf", "llama4"), ("mmproj-model.gguf", "clip")):
        writer = GGUFWriter(tmp_path / file, architecture)
        writer.add_string("clip.projector_type", "llama4")
        finish(writer)
    with pytest.raises(ConfigError, match=r"model\.gguf: GGUF architecture 'llama4' is not sup"):
        check_model(str(tmp_path))


def test_places_of_images_in_a_template_without_them() -> None:
    """Bug: a picture that the template leaves out, or a chat of texts that it writes otherwise."""
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    template = ChatTemplate({"default": with_image_places(source, "[IMG]\n")}, {})
    parts = [{"type": "image"}, {"type": "text", "text": "a"}, {"type": "image"}]
    chat = [{"role": "system", "content": "b"}, {"role": "user", "content": parts}]
    assert template.render(chat) == "<system>b<user>[IMG]\na[IMG]\n"
    assert with_image_places(json.dumps(["image"]), "[IMG]") == '["image"]'
