"""Encoders: vectors equal to transformers' model and sentence-transformers' pooling, in batches."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModel

from engine.config.model_config import ModelConfig
from engine.errors import ConfigError
from engine.messages import EngineRequest
from engine.sampling_params import SamplingParams
from kernels.attention import bidirectional
from tests.engine.library.test_pooling import PROMPTS, pool, vectors
from tests.fakes import make_core, make_request, run
from tests.parity.cases import randomise
from tests.parity.engine_driver import engine

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 66,
    "initializer_range": 0.3,
}
BERT = {"type_vocab_size": 2, "pad_token_id": 0}
ROBERTA = {"type_vocab_size": 1, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
MODERN = {"local_attention": 12, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2}
CASES = {
    "bert": BERT,
    "roberta": ROBERTA,
    "xlm-roberta": ROBERTA,
    "modernbert": MODERN,
    "nomic_bert": BERT,
}


def save_encoder(folder: Path, model_type: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SIZES, **CASES[model_type]})
    model = AutoModel.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    randomise(model)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("model_type", CASES)
def test_vectors_equal_transformers(model_type: str, tmp_path: Path) -> None:
    """A causal mask, a position that begins elsewhere, a text that sees its neighbour in the batch:
    vectors that are nearly right."""
    theirs = save_encoder(tmp_path, model_type)
    pool(tmp_path, "mean", "Normalize")
    core = engine(tmp_path, max_model_len=64, max_num_batched_tokens=80)
    for ours, prompt in zip(vectors(core, PROMPTS), PROMPTS, strict=True):
        with torch.inference_mode():
            hidden = theirs(torch.tensor([prompt])).last_hidden_state[0].mean(0)
        want = torch.nn.functional.normalize(hidden, dim=0).numpy()
        assert np.abs(ours - want).max() < 1e-5
    core.add_request(EngineRequest(9, [5, 6], 2, SamplingParams(max_tokens=3), 1))
    (refused,) = core.step()
    assert refused.error.startswith("generation_not_supported: ")


def test_texts_are_never_cut() -> None:
    """Half a text sees half of itself. One that is longer than a step may be, because memory was
    short, runs alone."""
    from engine.pooling import Pooling, PoolingHead

    head = PoolingHead(Pooling("mean"), 2)
    core, runner = make_core(
        num_blocks=80, max_num_batched_tokens=64, max_num_seqs=8, pooling=head, whole_texts=True
    )
    launched: list[tuple[int, int]] = []
    launch = runner.launch

    def watched(batch: Any) -> Any:
        launched.extend(zip(batch.starts, batch.lengths, strict=True))
        return launch(batch)

    runner.launch = watched  # type: ignore[method-assign]
    lengths = [1 + (7 * n) % 60 for n in range(40)]
    requests = [
        make_request(n + 1, length, max_tokens=0, pooled=True) for n, length in enumerate(lengths)
    ]
    outputs = run(core, requests)
    assert sorted(launched) == sorted((0, length) for length in lengths)
    assert all(outputs[request.id].deltas[-1].vector for request in requests)
    core.scheduler.token_limit = 16
    assert run(core, [make_request(99, 50, max_tokens=0, pooled=True)])[99].deltas[-1].vector


@pytest.mark.parametrize("window", [0, 3])
def test_padded_attention(window: int) -> None:
    """What GPUs compute: all texts padded to the longest. A mask that is off by one is seen by a
    text beside a longer one."""
    torch.manual_seed(0)
    starts = [0, 1, 9, 12, 30]
    q, k, v = torch.randn(3, 30, 2, 8)
    want = bidirectional.bidirectional_attention(q, k, v, starts, 0.3, window)
    attended = bidirectional._padded(q, k, v, starts, 0.3, window)
    assert torch.allclose(attended, want, atol=1e-6)
    alone = bidirectional.bidirectional_attention(q[9:12], k[9:12], v[9:12], [0, 3], 0.3, window)
    assert torch.allclose(want[9:12], alone, atol=1e-6)


def test_names_and_what_is_refused(tmp_path: Path) -> None:
    """BertForMaskedLM is how many checkpoints of embeddings were saved."""
    save_encoder(tmp_path, "bert")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "architectures": ["BertForMaskedLM"]})
    )
    model = ModelConfig.from_folder(tmp_path)
    assert (model.architecture, model.generates, model.whole_texts) == ("BertModel", False, True)
    (tmp_path / "config.json").write_text(json.dumps({**config, "is_decoder": True}))
    with pytest.raises(ConfigError, match="is_decoder"):
        ModelConfig.from_folder(tmp_path)


def test_nomic_bert_as_the_hub_has_it(tmp_path: Path) -> None:
    """Bug: the hub's file is written in GPT-2's words, and what it does not say is another model's:
    rotations ten times slower, or a mixture of experts read as none."""
    theirs = save_encoder(tmp_path, "nomic_bert")
    hub = {
        "architectures": ["NomicBertModel"],
        "model_type": "nomic_bert",
        "vocab_size": 101,
        "n_embd": 32,
        "n_inner": 56,
        "n_layer": 4,
        "n_head": 4,
        "n_positions": 8192,
        "activation_function": "swiglu",
        "layer_norm_epsilon": 1e-12,
        "type_vocab_size": 2,
        "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_scaling_factor": None,
        "max_trained_positions": 2048,
        "causal": False,
        "qkv_proj_bias": False,
        "mlp_fc1_bias": False,
        "mlp_fc2_bias": False,
        "prenorm": False,
        "parallel_block": False,
        "use_rms_norm": False,
    }

    def write(**changes: Any) -> None:
        (tmp_path / "config.json").write_text(json.dumps({**hub, **changes}))

    write()
    pool(tmp_path, "cls")
    model = ModelConfig.from_folder(tmp_path)
    assert (model.rope.theta, model.max_positions, model.generates) == (1000.0, 8192, False)
    core = engine(tmp_path, max_model_len=64, max_num_batched_tokens=80)
    for ours, prompt in zip(vectors(core, PROMPTS), PROMPTS, strict=True):
        with torch.inference_mode():
            want = theirs(torch.tensor([prompt])).last_hidden_state[0, 0].numpy()
        assert np.abs(ours - want).max() < 1e-5
    write(rotary_scaling_factor=2)
    assert ModelConfig.from_folder(tmp_path).max_positions == 2048
    for key, value in (("num_experts", 8), ("activation_function", "gelu"), ("prenorm", True)):
        write(**{key: value})
        with pytest.raises(ConfigError, match=key):
            ModelConfig.from_folder(tmp_path)
