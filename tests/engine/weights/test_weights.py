"""Checkpoints: every tensor accounted for, all damage refused with file and tensor named."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.config.model_config import ModelConfig
from engine.errors import ConfigError
from engine.layers.linear import Linear
from engine.models.registry import build_model
from engine.shards import weight_files
from engine.weights import load_weights, stream
from engine.weights.parameter import Source
from kernels.dispatch import kernels_for
from tests.engine.models.checkpoints import load_model, save_checkpoint
from tests.parity.cases import EXPERTS, save

Q = "model.layers.1.self_attn.q_proj.weight"
K = "model.layers.1.self_attn.k_proj.weight"
NORM = "model.norm.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path, "qwen2", head_dim=8)
    return tmp_path


def file_of(folder: Path) -> Path:
    return folder / "model.safetensors"


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(file_of(folder))
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file_of(folder))


def edit_header(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Rewrite the header alone; the data stays as it is."""
    data = file_of(folder).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file_of(folder).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def parameters(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    model = build_model(ModelConfig.from_folder(folder), dtype, "cpu", kernels_for("cpu"))
    filled = {parameter.name: parameter.tensor for parameter in model.parameters()}
    load_weights(model, folder)
    return filled


def poison(tensors: dict[str, Tensor]) -> None:
    tensors[Q][3, 5] = float("nan")


def overflow(tensors: dict[str, Tensor]) -> None:
    tensors[NORM][0] = float("inf")


def move_to_the_start(header: dict[str, Any]) -> None:
    begin, end = header[Q]["data_offsets"]
    header[Q]["data_offsets"] = [0, end - begin]


TENSORS: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "missing": (lambda t: t.pop(Q), f"{Q} is missing"),
    "unexpected": (lambda t: t.update({"model.extra": torch.ones(1)}), "unexpected .*model.extra"),
    "wrong shape": (
        lambda t: t.update({Q: t[Q][:-1]}),
        rf"{Q} has shape \[31, 32\].*implies \[32, 32\]",
    ),
    "transposed": (lambda t: t.update({NORM: t[NORM][None]}), rf"{NORM} has shape \[1, 32\]"),
    "integers": (lambda t: t.update({Q: t[Q].to(torch.int8)}), f"{Q}: dtype I8.*implies F32"),
    "NaN": (poison, f"{Q} holds NaN or infinity"),
    "infinity": (overflow, f"{NORM} holds NaN or infinity"),
}


@pytest.mark.parametrize("case", list(TENSORS))
def test_refuses_tensors_by_name(case: str, folder: Path) -> None:
    """A model with a wrong, absent or poisoned tensor answers nonsense without an error."""
    change, words = TENSORS[case]
    rewrite(folder, change)
    with pytest.raises(ConfigError, match=words) as caught:
        load_model(folder)
    assert str(folder) in caught.value.message and caught.value.param == "model"


HEADERS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "overlap": (move_to_the_start, "overlaps"),
    "shape and bytes disagree": (lambda h: h[Q]["shape"].append(2), f"{Q}: .*do not hold"),
    "no dtype": (lambda h: h[Q].pop("dtype"), f"{Q}: malformed"),
    "negative": (lambda h: h[Q].update(shape=[-32, -32]), f"{Q}: malformed"),
    "a hole": (lambda h: h.pop(Q), "leaves a hole before it"),
}


@pytest.mark.parametrize("case", list(HEADERS))
def test_refuses_headers(case: str, folder: Path) -> None:
    """Offsets that point into other tensors load without complaint if nobody checks."""
    change, words = HEADERS[case]
    edit_header(folder, change)
    with pytest.raises(ConfigError, match=rf"model\.safetensors: .*{words}"):
        load_model(folder)


FILES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "truncated": (lambda data: data[:-10], "truncated: tensor"),
    "truncated header": (lambda data: data[:50], "truncated or not safetensors"),
    "empty": (lambda data: b"", "truncated or not safetensors"),
    "trailing bytes": (lambda data: data + b"1234", "4 bytes after the last tensor"),
    "a pointer to large-file storage": (
        lambda data: b"version https://git-lfs.github.com/spec/v1\n",
        "git lfs pull",
    ),
    "no JSON": (lambda data: data[:8] + b"x" + data[9:], "header is not JSON"),
    "a name twice": (lambda data: data.replace(K.encode(), Q.encode()), f"{Q} is there twice"),
}


@pytest.mark.parametrize("case", list(FILES))
def test_refuses_damaged_files(case: str, folder: Path) -> None:
    """A download that broke off must not be read as far as it goes."""
    change, words = FILES[case]
    file_of(folder).write_bytes(change(file_of(folder).read_bytes()))
    with pytest.raises(ConfigError, match=rf"model\.safetensors: .*{words}"):
        load_model(folder)


def shard(folder: Path) -> dict[str, str]:
    """Split the checkpoint over two files with an index, as large ones are."""
    tensors = load_file(file_of(folder))
    names = sorted(tensors)
    listed = {}
    for part, own in enumerate((names[::2], names[1::2])):
        name = f"model-{part}.safetensors"
        save_file({tensor: tensors[tensor] for tensor in own}, folder / name)
        listed.update(dict.fromkeys(own, name))
    file_of(folder).unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    return listed


def test_reads_sharded_checkpoints(folder: Path) -> None:
    """The same weights whether in one file or two, with or without the index."""
    want = parameters(folder)
    shard(folder)
    # A stray file that the index does not list must not count.
    save_file({"stray": torch.ones(1)}, folder / "consolidated.safetensors")
    for name, tensor in parameters(folder).items():
        assert torch.equal(tensor, want[name]), name
    (folder / "model.safetensors.index.json").unlink()  # nor beside files of the usual names
    for name, tensor in parameters(folder).items():
        assert torch.equal(tensor, want[name]), name


def test_the_index_decides(folder: Path) -> None:
    """Other values of a tensor in a second shard, of an older save: those count that the index
    lists. Files that a folder was saved over do not count either, whichever form they have."""
    want = parameters(folder)
    shard(folder)
    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text())["weight_map"]
    for part in (0, 1):
        file = folder / f"model-{part}.safetensors"
        other = {
            name: torch.zeros_like(t) for name, t in load_file(folder / other_of(part)).items()
        }
        save_file({**other, **load_file(file)}, folder / f"both-{part}.safetensors")
    both = {name: file.replace("model", "both") for name, file in listed.items()}
    index.write_text(json.dumps({"weight_map": both}))
    for name, tensor in parameters(folder).items():
        assert torch.equal(tensor, want[name]), name
    assert [file.name for file in weight_files(folder)] == [f"both-{i}.safetensors" for i in (0, 1)]
    # A model that was saved whole over shards, whose index stayed.
    for file in folder.glob("both-*"):
        file.unlink()
    whole = {**load_file(folder / other_of(0)), **load_file(folder / other_of(1))}
    save_file(whole, file_of(folder))
    for name, tensor in parameters(folder).items():
        assert torch.equal(tensor, want[name]), name
    assert weight_files(folder) == [file_of(folder)]


def other_of(part: int) -> str:
    return f"model-{1 - part}.safetensors"


def test_pickled_shards_count_before_files_of_other_names(folder: Path) -> None:
    """An adapter, or an optimizer, as safetensors beside a model that is not."""
    want = parameters(folder)
    pickled(folder)
    save_file({"stray": torch.ones(1)}, folder / "adapter_model.safetensors")
    for name, tensor in parameters(folder).items():
        assert torch.equal(tensor, want[name]), name


def test_refuses_incomplete_shards(folder: Path) -> None:
    """Files absent, outside the folder or without a listed tensor; a tensor that is there twice,
    and no index that says which one counts."""
    index = folder / "model.safetensors.index.json"
    listed = shard(folder)
    index.write_text(json.dumps({"weight_map": {**listed, "ghost": "model-0.safetensors"}}))
    with pytest.raises(ConfigError, match=r"model-0\.safetensors: tensor ghost is missing"):
        load_model(folder)
    index.write_text(json.dumps({"weight_map": {**listed, Q: "../model.safetensors"}}))
    with pytest.raises(ConfigError, match="not a file name of this folder"):
        load_model(folder)
    index.write_text("{}")
    with pytest.raises(ConfigError, match=r"index\.json: cannot be read"):
        load_model(folder)
    index.unlink()
    save_file({Q: torch.ones(32, 32)}, folder / "model-2.safetensors")
    with pytest.raises(ConfigError, match=f"tensor {Q} is also in"):
        load_model(folder)
    (folder / "model-2.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    with pytest.raises(ConfigError, match=r"model-00002-of-00002\.safetensors: is missing beside"):
        load_model(folder)
    (folder / "model-00001-of-00002.safetensors").unlink()
    assert listed[Q] == "model-1.safetensors"
    index.write_text(json.dumps({"weight_map": {**listed, Q: "model-0.safetensors"}}))
    with pytest.raises(ConfigError, match=rf"model-0\.safetensors: tensor {Q} is missing"):
        load_model(folder)
    index.write_text(json.dumps({"weight_map": listed}))
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model-1\.safetensors: is missing, .*json lists it"):
        load_model(folder)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(ConfigError, match=r"no \*\.safetensors file"):
        load_model(folder)


def pickled(folder: Path, **more: Any) -> None:
    """Write the checkpoint as torch's own shards with an index, as older ones are."""
    tensors = load_file(file_of(folder))
    file_of(folder).unlink()
    names = sorted(tensors)
    listed = {}
    for part, own in enumerate((names[::2], names[1::2])):
        name = f"pytorch_model-{part}.bin"
        torch.save({tensor: tensors[tensor] for tensor in own} | more, folder / name)
        listed.update(dict.fromkeys([*own, *more], name))
    index = {"weight_map": listed}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def test_reads_pickled_shards(folder: Path) -> None:
    """Users bring shards of torch's own; optimizers and arguments beside them are not weights."""
    want = parameters(folder)
    pickled(folder)
    torch.save({"lr": 1}, folder / "training_args.bin")
    for name, tensor in parameters(folder).items():
        assert torch.equal(tensor, want[name]), name
    (folder / "pytorch_model.bin.index.json").unlink()
    for name, tensor in parameters(folder).items():
        assert torch.equal(tensor, want[name]), name


class _Planted:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("planted"),)


def test_refuses_pickled_shards(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unpickling runs what a file says; a download that broke off is read as far as it goes."""
    monkeypatch.chdir(folder)
    pickled(folder, extra=_Planted())
    with pytest.raises(ConfigError, match=r"-0\.bin: .* it wants getattr, and nothing"):
        load_model(folder)
    assert not (folder / "planted").exists()
    shard = folder / "pytorch_model-0.bin"
    torch.save({Q: torch.ones(32, 32).t()}, shard)
    with pytest.raises(ConfigError, match=f"-0.bin: tensor {Q}: is not contiguous"):
        load_model(folder)
    torch.save({Q: 3}, shard)
    with pytest.raises(ConfigError, match=f"-0.bin: {Q}: not a tensor but int"):
        load_model(folder)
    torch.save([torch.ones(2)], shard)
    with pytest.raises(ConfigError, match=r"-0\.bin: must hold a dictionary"):
        load_model(folder)
    torch.save({Q: torch.ones(32, 32)}, shard)
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"-0\.bin: truncated"):
        load_model(folder)


def test_buffers_are_ignored(tmp_path: Path) -> None:
    """Old checkpoints hold masks, of types that no weight has."""
    save_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    mask = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3, dtype=torch.bool)}
    rewrite(tmp_path, lambda tensors: tensors.update(mask))
    load_model(tmp_path)


def test_what_is_not_read_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A user whose model sees pictures learns from a wrong answer that this part is not run."""
    save(EXPERTS["gemma 4 31b"], tmp_path)
    with caplog.at_level("INFO", logger="manta.engine"):
        load_model(tmp_path)
    assert "not read" in caplog.text
    assert "multi_modal_projector (1), vision_tower (1) (tensors)" in caplog.text


def test_a_tied_head_in_the_checkpoint_is_harmless(tmp_path: Path) -> None:
    """Some tools write lm_head and buffers although the configuration ties or derives them."""
    save_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    extra = {
        "lm_head.weight": torch.ones(101, 32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6),
    }
    rewrite(tmp_path, lambda tensors: tensors.update(extra))
    load_model(tmp_path)


def test_converts_dtypes(folder: Path) -> None:
    """Bytes must be read in the file's dtype, then converted, never reinterpreted."""
    want = parameters(folder)
    rewrite(folder, lambda t: t.update({k: v.bfloat16() for k, v in t.items() if "proj" in k}))
    for name, tensor in parameters(folder).items():
        torch.testing.assert_close(tensor, want[name], rtol=2**-8, atol=0)
    for name, tensor in parameters(folder, torch.bfloat16).items():
        torch.testing.assert_close(tensor.float(), want[name], rtol=2**-7, atol=0)


def test_chunked_reads_are_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor larger than a chunk is split by rows: an off-by-one would shift the rest."""
    want = parameters(folder)
    monkeypatch.setattr(stream, "CPU_CHUNK", 300)
    for name, tensor in parameters(folder).items():
        assert torch.equal(tensor, want[name]), name


def test_progress_reaches_one(folder: Path) -> None:
    """A bar that jumps back or ends at 99 % looks like a hang."""
    seen: list[stream.Loading] = []
    model = build_model(ModelConfig.from_folder(folder), torch.float32, "cpu", kernels_for("cpu"))
    load_weights(model, folder, progress=seen.append)
    fractions = [loading.fraction for loading in seen]
    assert fractions == sorted(fractions) and fractions[-1] == 1.0


def test_progress_in_words() -> None:
    """Time that is left by another rate than the one beside it."""
    assert str(stream.Loading(12 * 10**9, 16 * 10**9, 4.0)) == "12.0 of 16.0 GB, 3.0 GB/s, 1 s left"
    assert str(stream.Loading(16 * 10**9, 16 * 10**9, 4.0)) == "16.0 GB in 4.0 s, 4.0 GB/s"
    assert str(stream.Loading(0, 16 * 10**9, 0.0)) == "0.0 of 16.0 GB, 0.0 GB/s, no byte yet"


def test_a_layer_is_packed_while_others_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model on the CPU that is there twice before it is packed."""
    model = build_model(ModelConfig.from_folder(folder), torch.bfloat16, "cpu", kernels_for("cpu"))
    every = sum(len(parameter.sources) for parameter in model.parameters())
    finish, read = Linear.finish, stream._CpuReader.run
    seen: list[stream.Transfer] = []
    unread: list[int] = []

    def finished(self: Linear) -> None:
        unread.append(every - len(seen))
        finish(self)

    def counted(
        self: stream._CpuReader, parts: list[stream.Transfer], transient: stream.Job | None
    ) -> int:
        seen.extend(parts)
        return read(self, parts, transient)

    monkeypatch.setattr(Linear, "finish", finished)
    monkeypatch.setattr(stream._CpuReader, "run", counted)
    load_weights(model, folder)
    assert len(seen) == every and unread[0] > every // 2
    assert not any(linear.parameters for linear in model.linears())


def test_dummy_weights_are_a_function_of_the_seed(folder: Path) -> None:
    """Benchmarks without a checkpoint: normal numbers, ones for norms, no file read."""
    file_of(folder).unlink()
    config = ModelConfig.from_folder(folder)

    def drawn(seed: int) -> dict[str, Tensor]:
        model = build_model(config, torch.float32, "cpu", kernels_for("cpu"))
        filled = {parameter.name: parameter.tensor for parameter in model.parameters()}
        load_weights(model, None, seed=seed)
        return filled

    first, same, other = drawn(1), drawn(1), drawn(2)
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["embedding.weight"], other["embedding.weight"])
    assert (first["norm.weight"] == 1).all() and (first["layers.0.mlp_norm.weight"] == 1).all()
    assert 0.015 < first["layers.1.down.weight"].std() < 0.025


def test_sources_transpose_split_and_shard() -> None:
    """The transforms of the table, on numbers that show where each element went."""
    stored = torch.arange(24.0).view(4, 6)
    fused = Source("x", (4, 6), rows=(1, 3))
    assert torch.equal(fused.part_of(stored), stored[1:3]) and fused.num_rows == 2
    turned = Source("x", (4, 6), rows=(2, 6), columns=(1, 3), transpose=True)
    assert torch.equal(turned.part_of(stored), stored.t()[2:6, 1:3]) and turned.num_rows == 4
    assert Source("x", (4, 6), transpose=True).num_rows == 6
