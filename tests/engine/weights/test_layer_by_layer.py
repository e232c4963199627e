"""What is packed while it is loaded has 16-bit memory from its first tensor to then: a layer or two
at once, whatever the order of the files."""

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.config.model_config import ModelConfig
from engine.errors import ConfigError
from engine.layers.experts import Stack
from engine.layers.linear import Linear
from engine.models.decoder import Decoder
from engine.models.registry import build_model
from engine.weights import load_weights, stream
from engine.weights.parameter import Parameter, Source
from engine.weights.stored import StoredTensor
from kernels.dispatch import Kernels, kernels_for
from tests.engine.models.checkpoints import save_checkpoint

LAYERS = 8
NAMES = ("fp8", "int4", "none-cpu")
MIXTURE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


@pytest.fixture(scope="module", params=["qwen2", "qwen3_moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    changes = MIXTURE if request.param == "qwen3_moe" else {}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 256, "head_dim": 16}
    save_checkpoint(path, request.param, num_hidden_layers=LAYERS, **sizes, **changes)
    return path


def spread(folder: Path, target: Path) -> Path:
    """Write the checkpoint with each layer's tensors in several files, and layers in another
    order."""
    target.mkdir()
    (target / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    files = {f"model-{part}.safetensors": names[part::5] for part in range(5)}
    for file, own in files.items():
        save_file({name: tensors[name] for name in own}, target / file)
    listed = {name: file for file, own in files.items() for name in own}
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    return target


def built(folder: Path, name: str) -> Decoder:
    config = ModelConfig.from_folder(folder)
    if name == "none-cpu":
        return cast(Decoder, build_model(config, torch.bfloat16, "cpu", kernels_for("cpu")))
    model = build_model(config, torch.float32, "cpu", Kernels(), quantization=name, runs_on="cuda")
    return cast(Decoder, model)


class Live:
    """A recorder of the 16-bit bytes of a model's matrices, at each read and each packing."""

    def __init__(self, model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
        tensors: list[Tensor] = [tensor.state.weight for tensor in model._all_linears()]
        for stack in model._stacks():
            tensors += [stack.state.gate_up, stack.state.down]
        self.whole = sum(tensor.nbytes for tensor in tensors)
        layer = sum(tensor.loading_bytes for tensor in model.layers[0].packed)
        self.two_layers = max(2 * layer, *(tensor.nbytes for tensor in tensors))
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        self.seen: list[int] = []
        for of, what in (
            (stream._CpuReader, "run"),
            (Linear, "finish"),
            (Stack, "finish"),
            (Parameter, "settle"),
        ):
            monkeypatch.setattr(of, what, self._looking(getattr(of, what)))

    def _looking(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def outer(*args: Any) -> Any:
            self.look()
            result = inner(*args)
            self.look()
            return result

        return outer

    def look(self) -> None:
        there = (tensor() for tensor in self._tensors)
        self.seen.append(
            sum(tensor.untyped_storage().nbytes() for tensor in there if tensor is not None)
        )


def states(model: Decoder) -> list[Any]:
    all_states = [linear.state for linear in model._all_linears()]
    for stack in model._stacks():
        all_states += [getattr(stack.state, "gate_up", None), getattr(stack.state, "down", None)]
    return all_states


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    codes = getattr(one, "codes", None)
    return codes is None or bool(
        torch.equal(codes, other.codes) and torch.equal(one.scale, other.scale)
    )


@pytest.mark.parametrize("order", ["as saved", "spread", "dummy"])
@pytest.mark.parametrize("name", NAMES)
def test_two_layers_are_there_at_once(
    name: str, order: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All matrices in 16 bits before the first one is packed; or all of those that a file has begun
    and another one ends."""
    source = spread(folder, tmp_path / "spread") if order == "spread" else folder
    monkeypatch.setattr(stream, "CPU_CHUNK", 4096)
    model = built(source, name)
    live = Live(model, monkeypatch)
    model.open_bytes = live.two_layers
    load_weights(model, None if order == "dummy" else source)
    live.look()
    assert max(live.seen) <= live.two_layers < live.whole / 2
    assert live.seen[-1] < live.whole / LAYERS or name == "none-cpu"
    if order == "spread":
        monkeypatch.undo()
        whole = built(folder, name)
        load_weights(whole, folder)
        assert all(map(same, states(model), states(whole)))


def test_less_than_a_unit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers that wait for memory that nobody gives back, where one matrix is more than there
    should be."""
    model = built(folder, "fp8")
    live = Live(model, monkeypatch)
    model.open_bytes = 1
    load_weights(model, folder)
    assert 0 < max(live.seen) <= live.two_layers / 2


def test_the_thread_that_waits_may_pack(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA: a unit that nobody packs, packed before all of it is there, or twice; threads
    that wait for it for ever."""
    work, watch, packed = stream._Queue.work, stream._Queue.watch, []

    def working(queue: stream._Queue, make: Any, then: bool, inference: bool) -> None:
        work(queue, make, False, inference)

    def end(job: stream.Job) -> None:
        assert not job.left
        packed.append(job)
        job.then()

    def watching(queue: stream._Queue, threads: int, progress: Any, _: Any) -> None:
        watch(queue, threads, progress, end)

    model = built(folder, "int4")
    with monkeypatch.context() as patched:
        patched.setattr(stream._Queue, "work", working)
        patched.setattr(stream._Queue, "watch", watching)
        live = Live(model, patched)
        model.open_bytes = live.two_layers
        load_weights(model, folder)
    assert max(live.seen) <= live.two_layers
    assert len(packed) == sum(unit.transient for unit in built(folder, "int4").units())
    whole = built(folder, "int4")
    load_weights(whole, folder)
    assert all(map(same, states(model), states(whole)))


@pytest.mark.parametrize("where", ["read", "packed"])
def test_an_error_ends_those_that_wait(
    where: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that hangs where it should name the tensor."""
    model = built(folder, "fp8")
    model.open_bytes = 1
    if where == "packed":

        def fail(linear: Linear) -> None:
            raise ConfigError("a matrix that cannot be packed", param="quantization")

        monkeypatch.setattr(Linear, "finish", fail)
    else:
        run = stream._CpuReader.run

        def poisoned(reader: Any, parts: Any, transient: Any) -> int:
            count = run(reader, parts, transient)
            if transient is not None:
                parts[0].target.view(-1)[0] = float("nan")
                stream._check_finite(parts[0])
            return count

        monkeypatch.setattr(stream._CpuReader, "run", poisoned)
    with pytest.raises(ConfigError, match="cannot be packed" if where == "packed" else "NaN"):
        load_weights(model, folder)


def test_the_memory_that_is_planned_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that asks for all 16 bits of a model that is never there, or forgets what is there
    beside what is packed."""
    for kind in stream.LEAST_OPEN:
        monkeypatch.setitem(stream.LEAST_OPEN, kind, 0)
    for name in NAMES:
        model = built(folder, name)
        live = Live(model, monkeypatch)
        assert model.open_bytes == live.two_layers
        assert model.loading_bytes == model.num_bytes + model.open_bytes
        load_weights(model, folder)
        assert max(live.seen) <= model.open_bytes
    monkeypatch.setitem(stream.LEAST_OPEN, "cuda", 1 << 40)
    model = built(folder, "fp8")
    every = sum(owner.loading_bytes for owner in (*model._all_linears(), *model._stacks()))
    assert model.open_bytes == every


def test_the_parts_of_a_unit_are_read_together() -> None:
    """What a file has between the parts of a matrix opened before it is packed; or other tensors
    out of the files' order."""

    def nothing() -> None:
        pass

    def job(transient: bool, *places: tuple[str, int]) -> stream.Job:
        tensor = torch.zeros(len(places), 4, dtype=torch.uint8)
        transfers = [
            stream.Transfer(
                tensor,
                row,
                Source(f"{file}{at}", (1, 4)),
                StoredTensor(f"{file}{at}", Path(file), torch.uint8, (1, 4), at, 4),
            )
            for row, (file, at) in enumerate(places)
        ]
        return stream.Job(transfers, nothing, nothing if transient else None)

    first = job(True, ("a", 8), ("b", 40), ("a", 24))
    second = job(True, ("a", 16), ("b", 0))
    others = [job(False, ("a", 0)), job(False, ("b", 20)), job(False, ("a", 20))]
    queue = stream._Queue([second, first, *others], 64, 64, 0)
    read = [[part.source.name for part in piece.parts] for piece in queue._waiting]
    assert read == [["a0"], ["a8", "a24"], ["b40"], ["a16"], ["b0"], ["a20"], ["b20"]]
