"""Two ranks of a model, as threads whose sums meet in memory, against one rank."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from engine.config.model_config import ModelConfig
from engine.models.registry import build_model
from engine.parallel import shared_memory
from engine.parallel.group import TensorParallelGroup
from engine.parallel.shared_memory import RankFailed, SharedMemoryGroup
from engine.sampling.sampler import Sampled, SamplePlan, Sampler
from engine.sampling.step_sampler import StepSampler
from engine.weights import load_weights
from kernels.dispatch import kernels_for
from tests.engine.models.checkpoints import Paged, load_model, save_checkpoint

RANKS = 2
T = TypeVar("T")
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "a key head a rank": ("qwen3", {}),
    "a key head more on the last": ("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 3}),
    "fewer key heads than ranks": ("qwen3", {"num_key_value_heads": 1}),
    "norms behind the rotation": ("hunyuan_v1_dense", {"head_dim": 16}),
    "norms over all heads": ("olmo2", {"head_dim": 8}),
    "norms over a head that is on both": ("olmo2", {"head_dim": 8, "num_key_value_heads": 1}),
    "norms with weights for each head": ("cohere", {"use_qk_norm": True, "head_dim": 8}),
    "norms with a tensor for each head": (
        "stablelm",
        {"qk_layernorm": True, "head_dim": 8, "use_parallel_residual": False},
    ),
    "norms over all heads, and experts": (
        "minimax_m2",
        {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "a head that is the embedding": ("qwen3", {"tie_word_embeddings": True}),
    "experts": (
        "qwen3_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "decoder_sparse_step": 1,
        },
    ),
    "experts with biases": (
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "hidden_size": 64,
        },
    ),
    "projections beside the embedding": (
        "opt",
        {
            "ffn_dim": 96,
            "head_dim": 8,
            "num_key_value_heads": 4,
            "word_embed_proj_dim": 16,
            "do_layer_norm_before": False,
        },
    ),
}


def together(size: int, work: Callable[[SharedMemoryGroup], T]) -> list[T]:
    """Run `work` on each rank, and return the results; ranks are threads here."""
    memory = os.memfd_create("ranks")

    def rank(number: int) -> T:
        group = SharedMemoryGroup.open(number, size, memory)
        try:
            with torch.inference_mode():
                return work(group)
        except RankFailed:
            raise
        except BaseException:
            group.fail()
            raise

    try:
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(rank, range(size)))
    finally:
        os.close(memory)


@pytest.mark.parametrize("name", list(CASES))
@torch.inference_mode()
def test_ranks_compute_what_one_does(name: str, tmp_path: Path) -> None:
    """Bugs: a product is divided among the ranks and never put together; a rank takes the whole
    model's heads for its own, or more of a vocabulary that cannot be halved than there is."""
    model_type, changes = CASES[name]
    save_checkpoint(tmp_path, model_type, **changes)
    ids = torch.randint(3, 101, (20,))
    blocks = [3, 1, 4, 0, 2]
    whole = Paged(load_model(tmp_path))
    want = [whole.run((ids[:end], blocks, start))[0] for start, end in ((0, 19), (19, 20))]
    config = ModelConfig.from_folder(tmp_path)

    def work(group: SharedMemoryGroup) -> list[Tensor]:
        model = build_model(config, torch.float32, "cpu", kernels_for("cpu"), group=group)
        load_weights(model, tmp_path)
        paged = Paged(model)
        logits = [paged.run((ids[:end], blocks, start))[0] for start, end in ((0, 19), (19, 20))]
        return logits if group.rank == 0 else []

    results, _ = together(RANKS, work)
    for ours, theirs in zip(results, want, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


class NormsAhead(SharedMemoryGroup):
    """A group that computes the norm after an all-reduce with it, as GPUs do."""

    count = 0

    def norm_reduced(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        NormsAhead.count += 1
        return kernels_for("cpu").rms_norm(self.add_reduced(x, residual), weight, eps)


@pytest.mark.parametrize(
    "model_type, sums",
    [
        ("qwen3", 4),  # of both blocks of both layers
        ("qwen3_moe", 2),  # of experts: the router has a norm of its own
        ("gemma2", 0),  # norms between sum and residual
        ("cohere", 0),  # both blocks read one norm
    ],
)
@torch.inference_mode()
def test_norms_are_made_with_the_sums_before_them(
    model_type: str, sums: int, tmp_path: Path
) -> None:
    """Bugs: a norm of the residual before something else is added; one that is made twice; one of
    an earlier step."""
    changes = CASES["experts"][1] if model_type == "qwen3_moe" else {}
    save_checkpoint(tmp_path, model_type, **changes)
    ids, blocks = torch.randint(3, 101, (20,)), [3, 1, 4, 0, 2]
    cuts = ((0, 18), (18, 19), (19, 20))
    whole = Paged(load_model(tmp_path))
    want = [whole.run((ids[:end], blocks, start))[0] for start, end in cuts]
    config = ModelConfig.from_folder(tmp_path)
    NormsAhead.count = 0

    def work(group: SharedMemoryGroup) -> list[Tensor]:
        group = NormsAhead(group.rank, group.size, group.state)
        model = build_model(config, torch.float32, "cpu", kernels_for("cpu"), group=group)
        load_weights(model, tmp_path)
        paged = Paged(model)
        return [paged.run((ids[:end], blocks, start))[0] for start, end in cuts]

    outputs, _ = together(RANKS, work)
    for ours, theirs in zip(outputs, want, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    assert NormsAhead.count == RANKS * len(cuts) * sums


@pytest.mark.parametrize("size", [2, 3])
def test_sums_meet(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bugs: a piece of a message that is larger than a slot is lost; a rank reads what another one
    has already written for the next sum; ranks add in orders of their own and have other bits; the
    last columns of a vocabulary that cannot be divided are in the wrong place."""
    monkeypatch.setattr(shared_memory, "SLOT", 256)
    torch.manual_seed(0)
    summands = torch.randn(40, size, 7, 23)
    columns = torch.randn(5, 40)

    def work(group: SharedMemoryGroup) -> tuple[Tensor, Tensor, Tensor, int]:
        sums = torch.stack([group.all_reduce(summand[group.rank].clone()) for summand in summands])
        begin, end = group.share(40)
        gathered = group.gather_columns(columns[:, begin:end], 40)
        sent = group.broadcast(torch.full((100,), group.rank + 5))
        mine = group.gather(torch.full((2, 50), group.rank))
        assert mine.flatten(1).unique(dim=1).flatten().tolist() == [*range(size)]
        return sums, gathered, sent, group.least(7 - group.rank)

    results = together(size, work)
    for sums, _, broadcast, least in results:
        torch.testing.assert_close(sums, summands.sum(1))
        assert torch.equal(sums, results[0][0])
        assert torch.equal(broadcast, torch.full((100,), 5))
        assert least == 8 - size
    assert torch.equal(results[0][1], columns)


@pytest.mark.parametrize("size", [2, 3])
def test_the_best_token_is_that_of_all_logits(size: int) -> None:
    """Bugs: the last of equals; an id of the part, not of the vocabulary; an id that no text has,
    or a column in its place in another part; a row that is not finite on another rank; a part that
    has no ids."""
    never, vocab = [0, 8, 17, 18], 19
    logits = torch.randn(60, vocab).round()
    logits[3, 7], logits[4, 2], logits[5] = torch.nan, torch.inf, -torch.inf
    logits[6, 10:] = -torch.inf
    rows, positions = torch.zeros(60, dtype=torch.int64), torch.ones(60, dtype=torch.int64)
    device = torch.device("cpu")

    def sampling(group: TensorParallelGroup, count: int) -> StepSampler:
        part = group.share(count)
        sampler = Sampler(2, count, device, [token for token in never if token < count], part)
        head: Any = SimpleNamespace(group=group)
        step_sampler = StepSampler(head, sampler, torch.zeros(2, 9, dtype=torch.int32))
        step_sampler.cuda = True  # rows are written by torch
        return step_sampler

    for count in (vocab, 2):  # of 2 the third of three ranks has nothing
        head_logits, plan = logits[:, :count], SamplePlan()
        want = sampling(TensorParallelGroup(), count).sample(
            head_logits.clone(), rows, positions, plan
        )

        def work(
            group: SharedMemoryGroup, head_logits: Tensor = head_logits, count: int = count
        ) -> Sampled:
            own, plan = sampling(group, count), SamplePlan()
            assert own.by_parts(plan) and not own.by_parts(plan, [0])
            assert not own.by_parts(SamplePlan(sampled=True))
            assert not own.by_parts(SamplePlan(logprobs=0))
            begin, end = group.share(count)
            return own.sample(
                head_logits[:, begin:end].clone(), rows, positions, plan, by_parts=True
            )

        for sampled in together(size, work):
            assert torch.equal(sampled.tokens, want.tokens)
            assert torch.equal(sampled.bad, want.bad)


def test_a_rank_that_fails_lets_the_others_know() -> None:
    """Bug: ranks wait for ever for one whose step has failed."""

    def work(group: SharedMemoryGroup) -> None:
        group.all_reduce(torch.ones(3))
        if group.rank == 1:
            raise ValueError("rank 1")
        group.all_reduce(torch.ones(3))

    with pytest.raises(RankFailed, match="failed on rank 1 of 2"):
        together(2, work)
