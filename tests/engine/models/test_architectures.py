"""What a record can say of a checkpoint's layout, on one that has it all; and what layers do with
norms and adapters."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.architectures import ARCHITECTURES, Architecture, CheckpointTensor
from engine.architectures.layout import grouped
from engine.config.model_config import ModelConfig
from engine.config_reader import Reader
from engine.errors import ConfigError
from engine.layers.linear import Linear, RowParallelLinear
from engine.models.registry import build_model
from engine.parallel.group import TensorParallelGroup
from engine.quantization.method import Dense, LinearSpec, Part
from engine.weights import load_weights, stream
from kernels.dispatch import kernels_for
from kernels.metadata import LoraLinear, LoraStep
from kernels.reference import Kernels
from tests.engine.models.checkpoints import (
    NOTHING,
    RANK,
    Paged,
    adapter_on,
    load_model,
    save_checkpoint,
)

LLAMA = ARCHITECTURES["LlamaForCausalLM"]
LAYER = "model.layers.{i}."


IDS = torch.randint(3, 101, (23,), generator=torch.Generator().manual_seed(5))
BLOCKS = [3, 1, 9, 4, 8, 2]


def interleaved(model: ModelConfig) -> Any:
    """Return the order of rows in which gate and up alternate."""
    return np.arange(2 * model.intermediate_size).reshape(-1, 2).T.ravel()


FUSED = Architecture(
    "FusedForCausalLM",
    LLAMA.tensors
    | {
        "qkv": CheckpointTensor((f"{LAYER}attn.wqkv",), grouped),
        "out": CheckpointTensor((f"{LAYER}attn.c_proj",), transposed=True),
        "gate_up": CheckpointTensor((f"{LAYER}mlp.w13",), interleaved),
    },
    keys={"hidden_size": "n_embd", "num_attention_heads": "n_head"},
    ignored=("*.inv_freq", "mtp.*"),
)


def fuse(folder: Path) -> ModelConfig:
    """Rewrite a Llama's checkpoint as FUSED stores it."""
    text = (folder / "config.json").read_text()
    for ours, theirs in {**FUSED.keys, LLAMA.name: FUSED.name}.items():
        text = text.replace(f'"{ours}"', f'"{theirs}"')
    (folder / "config.json").write_text(text)
    config = ModelConfig.from_folder(folder)
    tensors = load_file(folder / "model.safetensors")
    for i in range(config.num_layers):
        for ours in ("qkv", "gate_up"):
            stored = FUSED.tensors[ours].at(i)
            assert stored.rows is not None
            order = torch.from_numpy(stored.rows(config))
            pieces = LLAMA.tensors[ours].at(i).names
            for kind in ("weight", "bias"):
                stack = torch.cat([tensors.pop(f"{piece}.{kind}") for piece in pieces])
                fused = torch.empty_like(stack)
                fused[order] = stack
                tensors[f"{stored.names[0]}.{kind}"] = fused
        theirs = LLAMA.tensors["out"].at(i).names[0]
        out = FUSED.tensors["out"].at(i).names[0]
        tensors[f"{out}.weight"] = tensors.pop(f"{theirs}.weight").t().contiguous()
        tensors[f"{out}.bias"] = tensors.pop(f"{theirs}.bias")
    tensors["mtp.0.weight"] = torch.ones(3)
    save_file(tensors, folder / "model.safetensors")
    return config


@pytest.mark.parametrize("chunk", [1 << 25, 700], ids=["whole", "in chunks"])
@torch.inference_mode()
def test_layouts_of_checkpoints(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a fused tensor whose rows are grouped by head or take turns, or one that is stored
    transposed, is loaded as if it were ours; or its adapter is; or a chunk of it."""
    monkeypatch.setitem(ARCHITECTURES, FUSED.name, FUSED)
    monkeypatch.setattr(stream, "CPU_CHUNK", chunk)
    save_checkpoint(tmp_path, "llama", attention_bias=True, mlp_bias=True)
    llama = load_model(tmp_path)
    want = Paged(llama).run((IDS, BLOCKS, 0))[0]
    fuse(tmp_path)
    fused = load_model(tmp_path)
    assert torch.equal(Paged(fused).run((IDS, BLOCKS, 0))[0], want)

    lora, deltas = adapter_on(fused, len(IDS))
    adapted = Paged(fused).run((IDS, BLOCKS, 0), lora=lora)[0]
    tensors = load_file(tmp_path / "model.safetensors")
    for name, delta in deltas.items():
        tensors[name] = (tensors[name] + delta).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    want = Paged(load_model(tmp_path)).run((IDS, BLOCKS, 0))[0]
    torch.testing.assert_close(adapted, want, atol=1e-4, rtol=0)
    assert (adapted - Paged(fused).run((IDS, BLOCKS, 0))[0]).abs().max() > 0.1


def test_shards_of_a_fused_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a rank takes the first half of a fused tensor's rows instead of its heads; or refuses
    the checkpoint for a bias that another rank adds."""
    monkeypatch.setitem(ARCHITECTURES, FUSED.name, FUSED)
    save_checkpoint(tmp_path, "llama", attention_bias=True, mlp_bias=True, vocab_size=102)

    def of_rank(config: ModelConfig, rank: int) -> dict[str, Tensor]:
        group = TensorParallelGroup(rank, 2)
        model = build_model(config, torch.float32, "cpu", kernels_for("cpu"), group=group)
        filled = {parameter.name: parameter.tensor for parameter in model.parameters()}
        load_weights(model, tmp_path)
        return filled

    config = ModelConfig.from_folder(tmp_path)
    want = [of_rank(config, rank) for rank in range(2)]
    config = fuse(tmp_path)
    for rank in range(2):
        for name, tensor in of_rank(config, rank).items():
            assert torch.equal(tensor, want[rank][name]), name


class _Doubled(TensorParallelGroup):
    """A group of ranks that all hold the same tensor."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x.mul_(self.size)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("onto_residual", [True, False])
@torch.inference_mode()
def test_row_parallel_takes_adapters_everywhere(size: int, onto_residual: bool) -> None:
    """Bug: without a residual to add to, as in a model that norms a block's output, the layer took
    no adapters."""
    torch.manual_seed(0)
    part = Part("out", 8, 6, (0, 8), (0, 6))
    spec = LinearSpec("out", (part,), False, torch.float32, torch.device("cpu"))
    linear = RowParallelLinear(spec, Dense(Kernels()), _Doubled(0, size))
    linear.state.weight.normal_()
    linear.lora = LoraLinear(0, 6, (8,))
    a, b, x, residual = (torch.randn(*shape) for shape in ((RANK, 6), (8, RANK), (3, 6), (3, 8)))
    lora = LoraStep(
        NOTHING, NOTHING, 0, NOTHING, NOTHING, NOTHING, RANK,
        segments=[(0, torch.arange(3))], parts=[{0: (a, b)}],
    )  # fmt: skip
    want = size * (x @ (linear.state.weight + b @ a).t()) + (residual if onto_residual else 0)
    out = linear.forward(x, lora, residual=residual.clone() if onto_residual else None)
    torch.testing.assert_close(out, want, atol=1e-4, rtol=1e-4)


class _Centred:
    """A norm that no GEMM can fuse."""

    parameters = ()

    def __call__(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)


@torch.inference_mode()
def test_other_norms_are_launched_apart() -> None:
    """Bug: a layer norm is handed to a kernel that computes an RMS norm."""
    torch.manual_seed(0)
    parts = tuple(Part(name, 4, 6, (0, 4), (0, 6)) for name in ("gate", "up"))
    spec = LinearSpec("gate_up", parts, False, torch.float32, torch.device("cpu"))
    linear = Linear(spec, Dense(Kernels()))
    linear.state.weight.normal_()
    x = torch.randn(3, 6)
    want = Kernels().silu_mul((x - x.mean(1, keepdim=True)) @ linear.state.weight.t())
    torch.testing.assert_close(linear.forward(x, norm=_Centred(), gate="silu"), want)


def test_gemma_4_as_the_hub_writes_it() -> None:
    """Bug: full layers take the windowed ones' heads where the file says these in its own way, a
    layer reads the keys of one that sees other tokens, or an odd file is run wrongly."""
    changes: dict[str, Any] = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "text_config": {
            "model_type": "gemma4_text",
            "num_hidden_layers": 12,
            "num_kv_shared_layers": 6,
            "use_double_wide_mlp": True,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 2,
            "global_head_dim": 512,
            "sliding_window": 512,
        },
    }

    def read(**fields: Any) -> ModelConfig:
        text = {**changes["text_config"], **fields}
        return ModelConfig.from_dicts(Reader({**changes, "text_config": text}, "f"), Reader({}, ""))

    model = read()
    local, full = model.attention[0], model.attention[5]
    assert (local.head_dim, local.num_kv_heads, local.window) == (256, 4, 512)
    assert (full.head_dim, full.num_kv_heads, full.window) == (512, 2, 0)
    assert full.value_is_key and full.rope is not None and full.rope.part == 0.25
    assert [layer.keys_of for layer in model.attention[6:]] == [4] * 5 + [5]
    assert model.mlp_sizes == (9216,) * 6 + (18432,) * 6
    assert model.kv_bytes_per_token(2) == 2 * 2 * 6 * 1024
    assert model.ignores("model.language_model.layers.7.self_attn.k_proj.weight")
    assert not model.ignores("model.language_model.layers.5.self_attn.k_proj.weight")
    for fields, words in (
        ({"num_kv_shared_layers": 11}, "num_kv_shared_layers: no layer before 1"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention: 'all'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_type: 'yarn'"),
    ):
        with pytest.raises(ConfigError, match=words):
            read(**fields)
