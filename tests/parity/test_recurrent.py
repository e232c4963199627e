"""Models with states, through a whole engine: batches, chunks, preemption, rows that are used
again, steps that fail; and what is refused."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from deployments.cli.plan import keys_and_values
from deployments.plan.gpus import GIB
from deployments.plan.memory import Hardware, plan
from engine.config.engine_config import EngineConfig
from engine.config.kv_groups import Full, kv_groups
from engine.config.model_config import ModelConfig
from engine.config.rank_checks import check_ranks
from engine.errors import ConfigError
from engine.factory import build
from engine.resolve import decide
from engine.runner.caches.kv_cache import KVCache
from engine.sampling_params import SamplingParams
from kernels.cpu.recurrent.back_end import Recurrent
from kernels.recurrent import delta_rule as delta
from tests.parity.cases import DELTA_NET, save
from tests.parity.engine_driver import engine, run
from tests.parity.test_deterministic import all_cuts

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SIZES: dict[str, Any] = {"max_model_len": 64, "block_size": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]], list[Any]]:
    """Return a model's folder, prompts, and transformers' outputs."""
    folder = tmp_path_factory.mktemp("model")
    theirs = save(DELTA_NET["qwen 3 next"], folder)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 96, (n,), generator=generator).tolist() for n in (5, 20, 33, 1, 18)]
    want = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(12):
            with torch.inference_mode():
                ids.append(int(theirs(torch.tensor([ids])).logits[0, -1].argmax()))
        want.append(ids[len(prompt) :])
    return folder, prompts, want


def test_texts_of_transformers(model: tuple[Path, list[list[int]], list[Any]]) -> None:
    """A state that a chunk or a decode leaves unwritten, that another request finds in its row, or
    that a prefix of another request's blocks is taken for."""
    folder, prompts, want = model
    core = engine(folder, num_blocks=400, max_num_batched_tokens=16, max_num_seqs=3, **SIZES)
    for _ in range(2):  # rows are used again
        outputs = run(core, prompts, GREEDY)
        assert [output.token_ids for output in outputs] == want
        assert not any(output.cached for output in outputs), "prompts too short for a snapshot"


def test_preemption(model: tuple[Path, list[list[int]], list[Any]]) -> None:
    """A preempted request that goes on from the state of whoever had its row."""
    folder, prompts, want = model
    for fewer in range(26, 16, -1):
        tight = engine(folder, num_blocks=fewer, **SIZES)
        assert [output.token_ids for output in run(tight, prompts, GREEDY)] == want
        if tight.stats().preemptions:
            return
    pytest.fail("nothing was preempted")


def test_a_failed_step_is_computed_anew(
    model: tuple[Path, list[list[int]], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that failed in its third layer, and runs again on states that already have it."""
    folder, prompts, want = model
    core = engine(folder, num_blocks=400, **SIZES)
    calls, plain = [0], Recurrent.gated_delta

    def fails(self: Recurrent, *args: Any) -> Any:
        calls[0] += 1
        if calls[0] in (12, 30):
            raise RuntimeError("once")
        return plain(self, *args)

    monkeypatch.setattr(Recurrent, "gated_delta", fails)
    assert [output.token_ids for output in run(core, prompts, GREEDY)] == want
    assert calls[0] > 30


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen 3.5", "qwen 3 next"])
def test_deterministic(name: str, tmp_path: Path) -> None:
    """Chunks whose sums differ with where they begin; a gate of shared experts that is rounded
    otherwise in a larger step."""
    case = DELTA_NET[name]
    longer = {**case.changes, "max_position_embeddings": 256}
    save(type(case)(case.model_type, longer), tmp_path)
    generator = torch.Generator().manual_seed(4)
    lengths = (1, 2, 15, 16, 17, 90, 150, 33, 64, 65, 7, 40)
    prompts = [torch.randint(3, 96, (n,), generator=generator).tolist() for n in lengths]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
    sizes: dict[str, Any] = {"max_model_len": 256, "dtype": "float32", "deterministic": True}
    assert all_cuts(tmp_path, prompts, params, **sizes)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_fewer_bits(model: tuple[Path, list[list[int]], list[Any]], kv_dtype: str) -> None:
    """Generated kernels and recorded steps: states that are not recorded with them. Roundings may
    change a token, and what follows it."""
    folder, prompts, want = model
    core = engine(folder, num_blocks=400, dtype="bfloat16", kv_dtype=kv_dtype, **SIZES)
    outputs = run(core, prompts, GREEDY)
    same = [
        ours == theirs
        for output, text in zip(outputs, want, strict=True)
        for ours, theirs in zip(output.token_ids, text, strict=True)
    ]
    assert sum(same) > 0.4 * len(same)


def test_states_written_late(model: tuple[Path, list[list[int]], list[Any]]) -> None:
    """A plan of a GPU without the late parts of states, or states of the CPU or of deterministic
    mode with a part that no kernel of theirs reads; a layer that is given two of its tensors."""
    folder, _, _ = model
    config = ModelConfig.from_folder(folder)
    state = 4 * (4 * 16 * 8 + 3 * (2 * 2 * 16 + 4 * 8))
    late = 4 * 4 * 3 * (16 + 8 + 4)
    settings = EngineConfig(model=str(folder), dtype="float32", max_num_seqs=5)
    deterministic = msgspec.structs.replace(settings, deterministic=True)
    for kind, asked, elements in (
        ("cuda", settings, state + late),
        ("cuda", deterministic, state),
        ("cpu", settings, state),
    ):
        groups = kv_groups(decide(asked, config, torch.device(kind)).model)
        assert groups.state_bytes == 3 * elements, (kind, asked.deterministic)
        kv = KVCache.allocate(groups, 2, 4, torch.float32, torch.device("cpu"), rows=2)
        assert kv.states is not None and kv.states.row_bytes == 3 * elements
        assert sum(4 * part[0].numel() for part in kv.layers[1]) == elements
    assert plan(config, settings, Hardware("A GPU", "cuda", 8 * GIB)).states == (
        3,
        3 * (state + late),
    )


def test_memory(model: tuple[Path, list[list[int]], list[Any]]) -> None:
    """States that the plan does not count, or blocks that count layers without keys."""
    folder, _, _ = model
    config = ModelConfig.from_folder(folder)
    groups = kv_groups(config)
    assert groups.kinds == (Full(),) and [n for n, _ in groups.recurrent] == [0, 1, 2]
    assert config.kv_bytes_per_token(4) == 2 * 2 * 16 * 4
    state = 4 * (4 * 16 * 8 + 3 * (2 * 2 * 16 + 4 * 8))
    assert groups.state_bytes == 3 * state
    settings = EngineConfig(model="", dtype="float32", max_num_seqs=5)
    planned = plan(config, settings, Hardware("CPU", "cpu", 8 * GIB))
    assert dict(planned.memory.rows)["states (5 requests)"] == 6 * 3 * state
    assert planned.states == (3, 3 * state)
    count = planned.snapshots
    assert dict(planned.memory.rows)[f"snapshots ({count} of states)"] == count * 3 * state
    assert 0 < planned.kv_bytes // 3 - count * 3 * state < 4 * state
    assert any(f"{count:,} snapshots" in line for line in keys_and_values(planned))
    off = plan(
        config,
        msgspec.structs.replace(settings, prefix_caching=False),
        Hardware("C", "cpu", 8 * GIB),
    )
    assert not off.snapshots and off.kv_bytes > planned.kv_bytes
    assert any("prefix_caching is false" in line for line in keys_and_values(off))
    small = plan(
        config, msgspec.structs.replace(settings, snapshot_bytes=1), Hardware("C", "cpu", 8 * GIB)
    )
    assert any("raise snapshot_bytes" in line for line in keys_and_values(small))
    many = msgspec.structs.replace(settings, max_num_seqs=8 * GIB // (3 * state))
    said = f"beside states \\({many.max_num_seqs} requests\\) .*each has a state"
    with pytest.raises(ConfigError, match=f"KV cache too small.*{said}"):  # nor asked for snapshots
        plan(config, many, Hardware("CPU", "cpu", 8 * GIB))
    settings = msgspec.structs.replace(
        settings, model=str(folder), device="cpu", num_blocks=200, snapshot_bytes=10 * 3 * state
    )
    core, ready = build(settings)
    assert ready.prefix_caching and core.stats().snapshot_slots == 10 + 5, "rows hold some, too"
    assert core.stats().state_slots == 5
    assert "states (5 requests)" in ready.memory_table
    assert "snapshots (10 of states)" in ready.memory_table
    none = msgspec.structs.replace(settings, snapshot_bytes=1)
    core, ready = build(none)
    assert not ready.prefix_caching and not core.config.prefix_caching
    with pytest.raises(ConfigError, match="snapshot_bytes: 900"):
        build(msgspec.structs.replace(settings, snapshot_bytes=900 * GIB))


def test_refused(model: tuple[Path, list[list[int]], list[Any]]) -> None:
    """A start that fails far behind what is at fault, or a model that is half there."""
    folder, _, _ = model
    config, settings = ModelConfig.from_folder(folder), EngineConfig(model=str(folder))
    assert decide(settings, config, torch.device("cuda")).max_num_seqs == 128
    with pytest.raises(ConfigError, match=r"tensor_parallel: 4: .*2 key heads of its DeltaNet"):
        check_ranks(config, 4)
    resolved = decide(
        msgspec.structs.replace(settings, kv_dtype="int8"), config, torch.device("cpu")
    )
    assert resolved.kv.name == "int8"


@pytest.mark.parametrize("by_key", [False, True])
def test_chunks_are_the_rule_token_by_token(by_key: bool) -> None:
    """A decay counted twice or not at all, a correction that misses the one before it."""
    torch.manual_seed(0)
    heads, tokens, keys, values = 3, 20, 8, 6
    q, k = torch.randn(2, heads, tokens, keys, dtype=torch.float64)
    k = k / k.norm(dim=-1, keepdim=True)
    v = torch.randn(heads, tokens, values, dtype=torch.float64)
    # A decay of each element that would overflow if it were undone.
    sizes = (heads, tokens, keys) if by_key else (heads, tokens, 1)
    log_decay = -torch.rand(sizes, dtype=torch.float64) * (200 if by_key else 1)
    beta = torch.rand(heads, tokens, dtype=torch.float64)
    state = torch.randn(heads, keys, values, dtype=torch.float64)
    if by_key:
        chunked, left = delta.chunk_rule_by_key(q, k, v, log_decay, beta, state)
    else:
        chunked, left = delta.chunk_rule(q, k, v, log_decay[..., 0], beta, state)
    for t in range(tokens):
        state = state * log_decay[:, t].exp()[..., None]
        wrong = (v[:, t] - torch.einsum("hkv,hk->hv", state, k[:, t])) * beta[:, t, None]
        state = state + k[:, t, :, None] * wrong[:, None]
        assert torch.allclose(chunked[:, t], torch.einsum("hkv,hk->hv", state, q[:, t]))
    assert torch.allclose(left, state)
