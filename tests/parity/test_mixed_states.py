"""Models of short convolutions and of Mamba-2 through a whole engine: batches, chunks, rows that
are used again, preemption, deterministic mode; and what their configurations are refused for."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config.model_config import ModelConfig
from engine.config_reader import Reader
from engine.errors import ConfigError
from engine.sampling_params import SamplingParams
from tests.parity.cases import MIXED, save
from tests.parity.engine_driver import engine, run
from tests.parity.test_deterministic import all_cuts

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
SIZES: dict[str, Any] = {"max_model_len": 64, "block_size": 4, "dtype": "float32"}
NAMES = ("lfm 2, biases", "granite 4 h", "falcon h1", "nemotron h", "olmo hybrid", "jamba")


@pytest.mark.parametrize("name", NAMES)
def test_texts_of_transformers(name: str, tmp_path: Path) -> None:
    """A state that a chunk or a decode leaves unwritten, that another request finds in its row, or
    that a preempted request goes on from."""
    theirs = save(MIXED[name], tmp_path)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 96, (n,), generator=generator).tolist() for n in (5, 20, 33, 1)]
    want = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(8):
            with torch.inference_mode():
                ids.append(int(theirs(torch.tensor([ids])).logits[0, -1].argmax()))
        want.append(ids[len(prompt) :])
    core = engine(tmp_path, num_blocks=400, max_num_batched_tokens=16, max_num_seqs=3, **SIZES)
    for _ in range(2):
        assert [output.token_ids for output in run(core, prompts, GREEDY)] == want
    for fewer in range(20, 10, -1):
        tight = engine(tmp_path, num_blocks=fewer, **SIZES)
        assert [output.token_ids for output in run(tight, prompts, GREEDY)] == want
        if tight.stats().preemptions:
            return
    pytest.fail("nothing was preempted")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_deterministic(name: str, tmp_path: Path) -> None:
    """Chunks whose sums differ with where they begin."""
    case = MIXED[name]
    longer = {**case.changes, "max_position_embeddings": 256}
    save(replace(case, changes=longer), tmp_path)
    generator = torch.Generator().manual_seed(4)
    lengths = (1, 2, 15, 16, 17, 90, 150, 33, 64, 65, 7, 40)
    prompts = [torch.randint(3, 96, (n,), generator=generator).tolist() for n in lengths]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
    sizes: dict[str, Any] = {"max_model_len": 256, "dtype": "float32", "deterministic": True}
    assert all_cuts(tmp_path, prompts, params, **sizes)


GRANITE: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "num_local_experts": 0,
    "intermediate_size": 32,
    "mamba_n_heads": 8,
    "layer_types": ["mamba", "attention"],
}


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as refused:
        ModelConfig.from_dicts(Reader(config, "config.json"), Reader({}, ""))
    return str(refused.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["mamba", "mamba"]}, "without a layer of full_attention"),
        ({"layer_types": ["mamba"]}, "each of 2 layers"),
        ({"layer_types": ["mamba", "rwkv"]}, "'rwkv' is not supported"),
        ({"mamba_n_groups": 3}, "3 does not divide 8 heads"),
        ({"mamba_n_heads": 3}, "3 does not divide 128"),
        ({"mamba_d_conv": 1}, "at least 2"),
        ({"time_step_limit": 3}, "must be two numbers"),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    """A model that is computed otherwise than its file says, or an error far behind its cause."""
    ModelConfig.from_dicts(Reader(dict(GRANITE), "config.json"), Reader({}, ""))
    assert message in refusal({**GRANITE, **changes})


FALCON: dict[str, Any] = {
    **GRANITE,
    "architectures": ["FalconH1ForCausalLM"],
    "num_key_value_heads": 2,
    "mamba_d_ssm": 64,
}
JAMBA: dict[str, Any] = {
    **GRANITE,
    "architectures": ["JambaForCausalLM"],
    "num_key_value_heads": 2,
}
del JAMBA["layer_types"]
NEMOTRON: dict[str, Any] = {**JAMBA, "architectures": ["NemotronHForCausalLM"]}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["GlmMoeDsaForCausalLM"]}, "an indexer chooses the index_topk keys"),
        ({**FALCON, "attention_bias": True}, "attention_bias: True is not supported"),
        ({**FALCON, "ssm_multipliers": [1.0]}, "ssm_multipliers: must be a list of 5 numbers"),
        ({**FALCON, "mlp_multipliers": [1.0, "x"]}, "mlp_multipliers[1]: must be a positive"),
        ({**JAMBA, "attn_layer_offset": 8}, "attn_layer_offset: must be a number below 8"),
        ({**JAMBA, "sliding_window": 8}, "sliding_window: 8 is not supported"),
        ({**JAMBA, "num_hidden_layers": 4}, "without a layer of full_attention"),
        (
            {**NEMOTRON, "hybrid_override_pattern": 3},
            "hybrid_override_pattern: must have one of M * - E",
        ),
        ({**NEMOTRON, "hybrid_override_pattern": "M*X"}, "hybrid_override_pattern: must have"),
        ({**NEMOTRON, "layers_block_type": ["mamba", "rwkv"]}, "'rwkv' is not supported"),
        (
            {**NEMOTRON, "hybrid_override_pattern": "*E", "moe_latent_size": 8},
            "moe_latent_size: experts of latents are not supported",
        ),
        ({**NEMOTRON, "hybrid_override_pattern": "M-"}, "without a layer of full_attention"),
    ],
)
def test_others_refused(config: dict[str, Any], message: str) -> None:
    """A multiplier that is left out, letters that are taken for others."""
    assert message in refusal(config)
