"""Weights replaced in a model that serves: numbers of a fresh load, at the old addresses."""

import json
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.config.model_config import ModelConfig
from engine.errors import ConfigError, EngineDead
from engine.evaluation.paged import Paged
from engine.models.registry import Model, build_model
from engine.runner import refill
from engine.runner.caches.sleep_memory import tensors_of
from engine.runner.refill import Refill
from engine.weights import load, load_weights
from kernels.cpu.codegen.compiler import has_int8
from kernels.dispatch import kernels_for
from tests.engine.models.checkpoints import save_checkpoint
from tests.parity.cases import CASES, DELTA_NET, EXPERTS, LATENT, MIXED, WINDOWS, Case, save

ALL = {**CASES, **WINDOWS, **EXPERTS, **LATENT, **DELTA_NET, **MIXED}
IDS, BLOCKS = torch.arange(3, 27), list(range(8))
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "vocab_size": 128}
NAMES = ["llama", "llama, biases, tied", "qwen 3", "deepseek v3", "longcat flash", "qwen 3 next",
         "lfm 2", "granite 4 h"]  # fmt: skip

Change = Callable[[str, Tensor], Tensor]


def changed(folder: Path, to: Path, change: Change = lambda _, tensor: tensor.mul(0.8)) -> Path:
    """Write the folder's checkpoint with other numbers to `to`; return that folder."""
    to.mkdir()
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: change(name, tensor).contiguous() for name, tensor in tensors.items()},
        to / "model.safetensors",
    )
    return to


def model_of(
    folder: Path, weights: Path, quantization: str = "none", dtype: torch.dtype = torch.bfloat16
) -> Model:
    config = ModelConfig.from_folder(folder)
    kernels = kernels_for("cpu")
    model = build_model(config, dtype, "cpu", kernels, quantization=quantization)
    load_weights(model, weights)
    return model


def refill_of(model: Model, folder: Path, quantization: str = "none") -> Refill:
    config, kernels = ModelConfig.from_folder(folder), kernels_for("cpu")
    return Refill(
        model,
        lambda: build_model(
            config, model.dtype, "meta", kernels, quantization=quantization, runs_on="cpu"
        ),
    )


def logits(model: Model) -> Tensor:
    return Paged(model).run((IDS, BLOCKS, 0))[0]


def addresses(model: Model) -> set[int]:
    return {tensor.data_ptr() for tensor in tensors_of(model, model.device) if tensor.numel()}


def check(folder: Path, new: Path, quantization: str) -> None:
    model = model_of(folder, folder, quantization)
    before, places = logits(model), addresses(model)
    want = logits(model_of(folder, new, quantization))
    assert not torch.equal(before, want)
    weights = refill_of(model, folder, quantization)
    weights.check(str(new))
    assert torch.equal(logits(model), before), "a check changed the weights"
    weights.load(str(new))
    assert torch.equal(logits(model), want)
    assert addresses(model) == places
    weights.load(str(folder))
    held = load_file(new / "model.safetensors")
    sent = new.with_name(f"sent {new.name}")
    sent.mkdir()
    weights.hold(str(sent), held)
    weights.check(str(sent))
    assert torch.equal(logits(model), before), "a check changed the weights"
    weights.load(str(sent))
    assert torch.equal(logits(model), want), "of tensors in memory"
    assert addresses(model) == places


@pytest.mark.parametrize("name", NAMES)
def test_equals_a_fresh_load(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of some architecture keeps its old weights, or moves to another address."""
    case: Case = ALL[name]
    save(case, tmp_path / "old")
    monkeypatch.setattr(refill, "PART_BYTES", 1)  # a layer at a time
    check(tmp_path / "old", changed(tmp_path / "old", tmp_path / "new"), "none")


@pytest.mark.parametrize("quantization", ["int8", "w8a8", "uint4-32"])
def test_packed_forms_are_packed_again(quantization: str, tmp_path: Path) -> None:
    """Packed weights are filled with unpacked numbers, or stay as they were."""
    if quantization == "int8" and not has_int8():
        pytest.skip("needs AVX512-VNNI")
    for model_type in ("qwen3", "qwen3_moe"):
        folder = tmp_path / model_type
        sizes = {**SIZES, "moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2}
        save_checkpoint(folder, model_type, **(sizes if "moe" in model_type else SIZES))
        check(folder, changed(folder, tmp_path / f"new {model_type}"), quantization)


def without(name: str) -> Change:
    return lambda stored, tensor: tensor[:1] if stored == name else tensor


BROKEN: dict[str, tuple[Change, str]] = {
    "shape": (without("model.layers.1.mlp.up_proj.weight"), "up_proj.weight has shape"),
    "dtype": (
        lambda name, tensor: tensor.long() if "embed" in name else tensor,
        "embed_tokens.weight: dtype I64",
    ),
    "NaN": (
        lambda name, tensor: tensor * torch.nan if name == "model.norm.weight" else tensor,
        "model.norm.weight holds NaN",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
def test_bad_tensors_change_nothing(kind: str, tmp_path: Path) -> None:
    """A wrong tensor is found when others have changed already."""
    folder, (change, message) = tmp_path / "old", BROKEN[kind]
    save_checkpoint(folder, "llama")
    model = model_of(folder, folder)
    before = logits(model)
    new = changed(folder, tmp_path / "new", change)
    weights = refill_of(model, folder)
    with pytest.raises(ConfigError, match=message):
        weights.check(str(new))
    weights.hold(str(tmp_path), load_file(new / "model.safetensors"))
    with pytest.raises(ConfigError, match=message):
        weights.check(str(tmp_path))
    assert torch.equal(logits(model), before)


def test_missing_and_unknown_names(tmp_path: Path) -> None:
    """A checkpoint of another model is taken for one of this model."""
    folder = tmp_path / "old"
    save_checkpoint(folder, "llama")
    weights = refill_of(model_of(folder, folder), folder)
    tensors = load_file(folder / "model.safetensors")
    file = tmp_path / "new" / "model.safetensors"
    file.parent.mkdir()
    gone = tensors.pop("model.layers.0.self_attn.q_proj.weight")
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=r"self_attn\.q_proj\.weight is missing"):
        weights.check(str(file.parent))
    save_file(
        {**tensors, "model.layers.0.self_attn.q_proj.weight": gone, "extra": gone.clone()}, file
    )
    with pytest.raises(ConfigError, match="unexpected tensor extra"):
        weights.check(str(file.parent))


def test_blocks_of_a_file_are_not_replaced(tmp_path: Path) -> None:
    """A trainer's 16-bit weights are refused by a shape of bytes that no checkpoint has."""
    save_checkpoint(tmp_path, "llama", **SIZES)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["quantization_config"] = {
        "quant_method": "gguf", "types": {"model.layers.0.mlp.up_proj": "Q8_0"}
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = ModelConfig.from_folder(tmp_path)
    model = build_model(config, torch.bfloat16, "meta", kernels_for("cpu"), runs_on="cpu")
    with pytest.raises(ConfigError, match="serves the model with quantization: none"):
        Refill(model, lambda: model).check(str(tmp_path))


def test_nothing_is_checked_while_steps_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replacement of tensors in memory reads names and numbers again, or copies one tensor
    after the other, while streams wait."""
    calls: Counter[str] = Counter()

    def counted(module: Any, name: str) -> None:
        function = getattr(module, name)

        def counting(*arguments: Any, **options: Any) -> Any:
            calls[name] += 1
            return function(*arguments, **options)

        monkeypatch.setattr(module, name, counting)

    folder = tmp_path / "old"
    save_checkpoint(folder, "llama")
    model = model_of(folder, folder)
    weights = refill_of(model, folder)
    new = changed(folder, tmp_path / "new")
    tensors = load_file(new / "model.safetensors")
    for name in ("read_named", "_check_held", "_check_finite", "wait_until_written"):
        counted(refill, name)
    counted(load, "_check_finite")
    counted(torch, "_foreach_copy_")
    weights.hold(str(new), tensors)
    weights.check(str(new))
    assert calls["read_named"] == calls["_check_held"] == 1
    calls.clear()
    weights.load(str(new))
    assert {*calls} == {"_foreach_copy_"}
    parts = 2  # the embedding and the head; the layers
    assert calls["_foreach_copy_"] == 2 * parts, "into a part, and from there into the model"
    assert torch.equal(logits(model), logits(model_of(folder, new)))
    weights.load(str(new))
    assert calls["read_named"] == 1, "of weights that were not checked"
    reference, _ = weakref.ref(tensors["model.norm.weight"]), tensors.clear()
    assert reference() is None, "tensors that the engine has stay in memory"


def test_a_failure_in_the_middle_is_fatal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update that fails leaves the old weights before its first change, and ends the engine
    after it."""
    folder = tmp_path / "old"
    save_checkpoint(folder, "llama")
    monkeypatch.setattr(refill, "PART_BYTES", 1)
    fill, done = refill.fill_part, []

    def failing(*arguments: object) -> None:
        if len(done) == fails_at:
            raise OSError("the disk is gone")
        done.append(fill(*arguments))  # type: ignore[arg-type, func-returns-value]

    monkeypatch.setattr(refill, "fill_part", failing)
    model = model_of(folder, folder)
    before = logits(model)
    for fails_at, error in ((0, ConfigError), (1, EngineDead)):
        with pytest.raises(error, match="the disk is gone"):
            refill_of(model, folder).load(str(changed(folder, tmp_path / str(fails_at))))
        if not fails_at:
            assert torch.equal(logits(model), before)
