"""Steps of decodes on the CPU as programs: the same numbers as call by call, and what no program
can be made of is computed as before."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import factory
from engine.config.engine_config import EngineConfig
from engine.runner.launch.launchers import ProgramStep
from engine.runner.launch.programs import StepPrograms
from engine.sampling_params import SamplingParams
from engine.scheduling.core import EngineCore, EngineRequest
from engine.scheduling.pacing.chunking import PromptPace
from kernels.cpu import native
from kernels.cpu.codegen.processor import CompilerUnavailable, lanes
from kernels.cpu.codegen.program import Buffers, NotRecordable, Program
from kernels.cpu.codegen.scratch import _scratch, scratch
from kernels.cpu.gemm.blocks import PackedBlocks
from kernels.packed import Format
from tests.engine.test_memory import SIZES

SHAPES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}


LFM2: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"],
    "layer_types": ["conv", "full_attention", "conv"],
    "norm_eps": 1e-5,
    "conv_bias": False,
    "block_auto_adjust_ff_dim": False,
}
GRANITE: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "layer_types": ["mamba", "attention", "mamba"],
    "num_local_experts": 0,
    "mamba_n_heads": 32,
    "mamba_d_head": 8,
    "mamba_d_state": 16,
    "shared_intermediate_size": 64,
}
QWEN: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "partial_rotary_factor": 1.0,
}
# Torch chooses its experts.
QWEN_EXPERTS: dict[str, Any] = {
    **QWEN,
    "architectures": ["Qwen3NextForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
KIMI: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "num_key_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_head_dim": 32,
    "linear_num_heads": 64,
    "linear_conv_kernel_dim": 4,
    "kv_lora_rank": 96,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "first_k_dense_replace": 100,
}
DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_key_value_heads": 4,
    "kv_lora_rank": 96,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "first_k_dense_replace": 100,
}
FALCON: dict[str, Any] = {
    "architectures": ["FalconH1ForCausalLM"],
    "mamba_d_ssm": 256,
    "mamba_n_heads": 64,
    "mamba_d_head": 4,
    "mamba_d_state": 32,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 64,
    "ssm_out_multiplier": 0.5,
    "ssm_multipliers": [0.5, 0.6, 0.7, 0.8, 0.9],
    "mlp_multipliers": [0.7, 0.9],
}
NEMOTRON: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "layers_block_type": ["linear_attention", "mlp", "full_attention"],
    "mamba_num_heads": 64,
    "mamba_head_dim": 4,
    "n_groups": 2,
    "ssm_state_size": 16,
    "mlp_hidden_act": "relu2",
}
JAMBA: dict[str, Any] = {
    "architectures": ["JambaForCausalLM"],
    "num_experts": 1,
    "num_experts_per_tok": 1,
    "attn_layer_offset": 1,
    "attn_layer_period": 2,
    "mamba_d_state": 16,
    "mamba_dt_rank": 32,
}


def able() -> bool:
    try:
        lanes()
    except CompilerUnavailable:
        return False
    return True


needs_compiler = pytest.mark.skipif(not able(), reason="no compiler for this machine")


class Unhurried(PromptPace):
    """A pace that cuts prompts by their lengths alone.

    On a busy machine measured seconds would cut them too. A chunk of one token is computed by
    another kernel, whose sums have other last bits.
    """

    def limit(self, tokens: int, decodes: int, context: int) -> int:
        return tokens


def core_of(folder: Path, changes: dict[str, Any], **options: Any) -> EngineCore:
    values = {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", **SIZES, **SHAPES}
    (folder / "config.json").write_text(json.dumps({**values, **changes}))
    fixed = {"device": "cpu", "load_format": "dummy", "prefix_caching": False}
    config: dict[str, Any] = {"num_threads": 1, **fixed, **options}
    built, _ = factory.build(EngineConfig(model=str(folder), kv_cache_bytes=1 << 22, **config))
    built.scheduler.pace = Unhurried()
    return built


def answers(core: EngineCore) -> dict[int, list[Any]]:
    """Return the outputs of requests that come and go.

    Steps have 1 to 5 decodes, with chunks of prompts between.
    """
    answers_by_id: dict[int, list[Any]] = {}
    waiting = list(range(5))
    steps = 0
    while core.has_work() or waiting:
        if waiting and steps % 2 == 0:
            number = waiting.pop()
            ids = [(7 * number + place) % 190 for place in range(5 + 6 * number)]
            params = SamplingParams(
                max_tokens=6 + 2 * number, temperature=0, ignore_eos=True, logprobs=1
            )
            core.add_request(EngineRequest(number, ids, len(ids), params, seed=0))
        steps += 1
        for delta in core.step():
            logprobs = [logprob.logprob for logprob in delta.logprobs or []]
            answers_by_id.setdefault(delta.id, []).append((list(delta.token_ids), logprobs))
    return answers_by_id


@needs_compiler
@pytest.mark.parametrize("changes", [QWEN, KIMI, DEEPSEEK, FALCON, NEMOTRON, JAMBA])
def test_programs_of_mixers(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: norms, gates, copies and parts put beside each other that only the recorded step saw."""
    # Prompts are cut by the clock, and a short piece of one would be absorbed.
    monkeypatch.setattr(native, "worth_making", lambda *_: True)
    test_a_program_computes_what_its_calls_did(changes, {}, 1, tmp_path)


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, {}),
        ({"architectures": ["Qwen3ForCausalLM"]}, {"quantization": "uint4-32"}),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 16}, {}),
        (LFM2, {}),
        (GRANITE, {}),
    ],
)
def test_a_program_computes_what_its_calls_did(
    changes: dict[str, Any], options: dict[str, Any], threads: int, tmp_path: Path
) -> None:
    """Bug: a kernel reads what the recorded step had, at an address that another tensor has now;
    a state of the recorded requests' rows; a thread goes on before the others have finished;
    arguments of two layers are mixed up."""
    core = core_of(tmp_path, changes, num_threads=threads, **options)
    runner: Any = core._runner
    programs = runner.programs
    first = answers(core)
    assert len(programs._programs) >= 4 and programs._able and programs.gives_logits
    assert all(len(program) >= 4 * 3 for program in programs._programs.values())
    again = answers(core)  # from the first step on out of programs
    runner.launcher = runner.eager
    assert first == again == answers(core)


@needs_compiler
def test_a_program_looks_up_its_tokens(tmp_path: Path) -> None:
    """The tokens of the recorded step, embedded in every later one; the result of the last layer
    taken for logits, or normed twice."""
    core = core_of(tmp_path, {})
    runner: Any = core._runner
    weight = runner.model.embedding.float()
    packed = PackedBlocks(Format(8, zero=128), *weight.shape, None)
    top = weight.unflatten(1, (-1, 32)).abs().amax(-1).clamp(min=1e-6)
    scale = (top / 127).half()
    codes = (weight.unflatten(1, (-1, 32)) / scale.float().unsqueeze(-1)).round().clamp(-127, 127)
    packed.fill(0, (codes + 128).flatten(1).to(torch.uint8), scale, None)
    runner.model.table.forward = lambda ids: packed.rows(ids.long())
    # The start has recorded a step without.
    programs = StepPrograms(runner.model, runner.rows, runner.kv)
    runner.launcher = ProgramStep(runner.forward, programs, runner.eager)
    first = answers(core)
    assert programs._enters and programs.gives_logits
    again = answers(core)
    runner.launcher = runner.eager
    assert first == again == answers(core)


@needs_compiler
@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, {"dtype": "float32"}),  # attention by torch
        ({}, {"deterministic": True}),
        ({"hidden_size": 72, "num_attention_heads": 3, "num_key_value_heads": 3}, {}),  # odd sizes
        (QWEN_EXPERTS, {}),
    ],
)
def test_steps_of_torch_are_not_recorded(
    changes: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    """A step whose result a torch operation makes, replayed without that operation; states that the
    attempt has changed, changed again."""
    core = core_of(tmp_path, changes, **options)
    runner: Any = core._runner
    first = answers(core)
    assert not runner.programs._able and not runner.programs._programs
    runner.launcher = runner.eager
    assert first == answers(core)


@needs_compiler
def test_buffers_are_shared_in_turns() -> None:
    """Bug: two tensors that are alive at once share memory; or none ever do, and a step of a model
    with many layers needs memory for all of them."""
    buffers = Buffers(8)
    seen: list[tuple[int, int]] = []

    def body() -> Tensor:
        x = torch.empty(2, 16)
        for _ in range(50):
            y = torch.empty(2, 16)
            view = y.view(32)[:4]
            del y
            z = torch.empty(2, 16)
            seen.append((view.data_ptr(), z.data_ptr()))
            assert len({x.data_ptr(), view.data_ptr(), z.data_ptr()}) == 3
        return x

    with pytest.raises(NotRecordable, match="nothing was launched"):
        Program(body, buffers, 2, 1)
    assert len(set(seen)) <= 3 and buffers.num_bytes == 4 * 8 * 64
    with pytest.raises(NotRecordable, match="aten"):
        Program(lambda: torch.zeros(2).add_(1), buffers, 2, 1)


@needs_compiler
def test_copies_are_recorded() -> None:
    """Bug: rows of longer ones copied as if they lay behind each other; parts put side by side in
    another order, or once for all replays."""
    x, buffers = torch.randn(3, 100), Buffers(4)

    def body() -> Tensor:
        cut = x[:, :36].unflatten(1, (3, 2, 6))
        return torch.cat((cut[:, :, 1].flatten(1), x[:, 40:77].contiguous()), dim=1)

    program = Program(body, buffers, 3, 2)
    assert torch.equal(program.out, body())
    x.copy_(torch.randn(3, 100))
    assert torch.equal(program.play(), body())


@needs_compiler
def test_scratch_is_no_buffer() -> None:
    """Bug: a kernel's scratch that grows while a step is recorded lies in a buffer, where the next
    program puts a tensor: two threads round one's rows over what the other still reads."""
    buffers, places = Buffers(8), []
    count = 2 * len(_scratch.floats) + 16

    def body() -> Tensor:
        places.append(scratch(count))
        for _ in range(3):
            places.append(torch.empty(2, count).data_ptr())
        return torch.empty(2)

    for _ in range(2):
        with pytest.raises(NotRecordable, match="nothing was launched"):
            Program(body, buffers, 2, 2)
    assert places[0] == places[4] and places[0] not in places[5:]


@needs_compiler
def test_a_smaller_cache_is_recorded_anew(tmp_path: Path) -> None:
    """A program that writes where the old cache was."""
    core = core_of(tmp_path, {})
    runner: Any = core._runner
    answers(core)
    programs: StepPrograms = runner.programs
    assert programs._programs
    runner.shrink(64)
    assert not programs._programs
