"""The sampler on the CPU: its distribution, its determinism, and each parameter against a naive
implementation."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.batch import NewRow
from engine.errors import InvalidRequest
from engine.sampling import cpu_sampler
from engine.sampling.parameter_rows import ParameterRows
from engine.sampling.sampler import Masked, Sampled, SamplePlan, Sampler
from engine.sampling_params import SamplingParams
from kernels.sampling import philox

CPU = torch.device("cpu")


def new_row(row: int, params: SamplingParams, seed: int = 0, **other: object) -> NewRow:
    values = {"token_ids": [1], "num_prompt_tokens": 1, "choice": 0, "stop_ids": []} | other
    return NewRow(row=row, params=params, seed=seed, **values)  # type: ignore[arg-type]


def run(
    logits: Tensor,
    params: SamplingParams,
    *,
    seeds: list[int] | None = None,
    positions: list[int] | None = None,
    history: Tensor | None = None,
    **other: object,
) -> Sampled:
    """Return the samples of logits [S, vocab], a row for each line, all with the same
    parameters."""
    count, vocab = logits.shape
    sampler = Sampler(count, vocab, CPU)
    for row in range(count):
        sampler.set_row(new_row(row, params, (seeds or range(count))[row], **other))
    if history is None:
        history = torch.zeros(count, 1, dtype=torch.int32)
    at = torch.tensor(positions or [1] * count)
    rows = torch.arange(count)
    return sampler.sample(logits.clone(), rows, at, history, sampler.plan(rows.tolist()))


def naive_kept(x: Tensor, params: SamplingParams) -> list[int]:
    """Return the ids that min_p, top_k and top_p keep, by sorting in float64."""
    scaled = x.double() / params.temperature
    order = torch.sort(x, descending=True, stable=True).indices
    p = torch.softmax(scaled, 0)
    order = order[(p[order] >= params.min_p * p.max()) & (x[order] > -math.inf)]
    order = order[: params.top_k or None]
    mass = p[order] / p[order].sum()
    if params.top_p < 1:
        order = order[: int((mass.cumsum(0) < params.top_p).sum()) + 1]
    return sorted(order.tolist())


def chi_square_p(observed: Tensor, expected: Tensor) -> float:
    """Return the probability of a worse fit; cells with an expectation below five are joined."""
    small = expected < 5
    if small.any():
        observed = torch.cat([observed[~small], observed[small].sum()[None]])
        expected = torch.cat([expected[~small], expected[small].sum()[None]])
    keep = expected > 0
    assert observed[~keep].sum() == 0
    observed, expected = observed[keep].double(), expected[keep].double()
    if len(expected) < 2:
        return 1.0
    statistic = ((observed - expected) ** 2 / expected).sum()
    half = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, statistic / 2))


CASES = [
    {"temperature": 1.0},
    {"temperature": 0.4},
    {"temperature": 2.0},
    {"top_k": 5},
    {"top_p": 0.7},
    {"top_p": 0.35, "temperature": 1.7},
    {"min_p": 0.2},
    {"top_k": 12, "top_p": 0.8, "temperature": 1.3},
    {"top_k": 9, "top_p": 0.9, "min_p": 0.15, "temperature": 0.8},
]


def draws_of() -> Iterator[Any]:
    """Yield each case with its draws. The noise is the same with every filter: CI draws often
    without one and with all, and a quarter as often with each, which shows a wrong filter."""
    for case in CASES:
        for spread in (False, True):
            quick = (case, spread) in ((CASES[0], True), (CASES[-1], False))
            often = [] if quick else [pytest.mark.nightly]
            yield pytest.param(case, spread, 40_000, marks=often)
            if not quick and spread == (case == CASES[-1]):
                yield pytest.param(case, spread, 10_000, marks=pytest.mark.slow)


@pytest.mark.parametrize(("case", "spread", "draws"), [*draws_of()], ids=str)
def test_draws_follow_the_filtered_softmax(
    case: dict[str, float], spread: bool, draws: int
) -> None:
    """A noise that is not Gumbel, or depends between tokens (of one group most of all), biases
    every answer."""
    params = SamplingParams(**case)  # type: ignore[arg-type]
    at_once = 2_000
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, generator=generator) * 1.5
    ids = torch.arange(24)
    if spread:  # 20 of the 64 lanes of one group, the others elsewhere
        ids = torch.cat([torch.randperm(64, generator=generator)[:20] * 64 + 7, torch.arange(4)])
        ids = ids.sort().values
    vocab = int(ids.max()) + 2
    logits = torch.full((vocab,), -math.inf)
    logits[ids] = x

    sampler = Sampler(2, vocab, CPU)
    sampler.set_row(new_row(1, params, seed=-12345))
    counts = torch.zeros(vocab)
    rows = torch.ones(at_once, dtype=torch.int64)
    batch = logits.expand(at_once, -1)
    for first in range(0, draws, at_once):
        at = torch.arange(first, first + at_once)
        history = torch.zeros(2, 1, dtype=torch.int32)
        got = sampler.sample(batch.clone(), rows, at, history, sampler.plan([1]))
        counts += torch.bincount(got.tokens, minlength=vocab)

    allowed = naive_kept(logits, params)
    expected = torch.zeros(vocab, dtype=torch.float64)
    expected[allowed] = torch.softmax(logits[allowed].double() / params.temperature, 0) * draws
    assert chi_square_p(counts, expected) > 1e-4


def test_choices_and_seeds_are_independent() -> None:
    """n choices of a request, and neighbouring seeds, must not repeat or mirror each other."""
    logits = torch.zeros(1, 8)
    pairs = torch.zeros(8, 8)
    for position in range(2000):
        tokens = [
            int(np.argmax(philox.gumbel(seed, choice, position, 8)))
            for seed, choice in ((7, 0), (7, 1))
        ]
        pairs[tokens[0], tokens[1]] += 1
    assert chi_square_p(pairs.flatten(), torch.full((64,), 2000 / 64)) > 1e-4
    first, other = (
        run(logits.expand(200, 8), SamplingParams(), seeds=list(range(s, s + 200))).tokens
        for s in (0, 1000)
    )
    assert 5 < int((first == other).sum()) < 60


def test_philox_matches_published_vectors() -> None:
    """Random123's known answers: another generator would break equality with the device and between
    versions."""
    zero = np.zeros(1, np.int64)
    ones = 0xFFFFFFFF
    words = [int(w[0]) for w in philox.philox4x32(zero, 0, 0, 0, 0)]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    words = [int(w[0]) for w in philox.philox4x32(zero - 1, zero + ones, ones, ones, ones)]
    assert words == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_noise_is_bounded_and_gumbel() -> None:
    """An infinite noise would let a banned token (-inf + inf) poison its row."""
    extremes = np.array([0, 63, 0xFFFFFFFF], np.uint64)
    minimum, lane = philox.group_minimum(extremes)
    assert minimum[0] == np.float32(2**-33)
    assert np.isfinite(np.log(minimum)).all()
    assert lane.tolist() == [0, 63, 63]
    assert np.isfinite(philox.token_exponential(extremes)).all()
    noise = np.sort(philox.gumbel(3, 1, 4, 1 << 18).astype(np.float64))
    ranks = (np.arange(noise.size) + 0.5) / noise.size
    distance = np.abs(np.exp(-np.exp(-noise)) - ranks).max()  # Kolmogorov-Smirnov
    assert distance * math.sqrt(noise.size) < 2.2  # p > 1e-4


@pytest.mark.parametrize("vocab", [50, 4096, 5000, 49152])
@pytest.mark.parametrize("spread", [0.0, 1.0, 6.0])
def test_skipping_groups_changes_nothing(vocab: int, spread: float) -> None:
    """The CPU leaves out tokens that cannot win; one left out wrongly would make it differ from the
    device."""
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(vocab)) * spread
    params = SamplingParams(temperature=0.8)
    got = run(logits, params, seeds=[s - 3 for s in range(6)], positions=list(range(6)), choice=2)
    for s in range(6):
        noise = philox.gumbel(s - 3, 2, s, vocab)
        scores = logits[s].numpy() * np.float32(1 / 0.8) + noise
        assert got.tokens[s] == scores.argmax()


def test_same_seed_and_position_same_token_in_any_batch() -> None:
    """A request resumed elsewhere, or batched with others, must go on with the same text."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(16, 5000, generator=generator) * 2
    kinds = [{}, {"temperature": 0}, {"top_p": 0.9}, {"top_k": 40, "top_p": 0.8}, {"min_p": 0.05}]
    sampler = Sampler(16, 5000, CPU)
    for row in range(16):
        sampler.set_row(new_row(row, SamplingParams(**kinds[row % 5]), seed=2**63 - 1 - row))
    history = torch.zeros(16, 1, dtype=torch.int32)

    def sample(rows: list[int]) -> list[int]:
        at = torch.tensor(rows) * 3 + 1
        plan = sampler.plan(rows)
        got = sampler.sample(logits[rows], torch.tensor(rows), at, history, plan)
        return got.tokens.tolist()

    together = sample(list(range(16)))
    assert sample(list(range(15, -1, -1))) == together[::-1]
    assert [sample([row])[0] for row in range(16)] == together


@pytest.mark.parametrize("case", [{"temperature": 0}, {}, {"top_p": 0.9}, {"top_k": 3}], ids=str)
def test_rows_that_are_not_finite_are_flagged_alone(case: dict[str, float]) -> None:
    """One request's NaN must end that request, not crash the step or change its neighbours'
    tokens."""
    params = SamplingParams(**case)  # type: ignore[arg-type]
    clean = torch.randn(5, 300, generator=torch.Generator().manual_seed(2))
    broken = clean.clone()
    broken[1, 17] = math.nan
    broken[2, 299] = math.inf
    broken[3] = -math.inf
    expected, got = run(clean, params), run(broken, params)
    assert got.bad.tolist() == [False, True, True, True, False]
    assert got.tokens[[1, 2, 3]].tolist() == [0, 0, 0]
    assert got.tokens[[0, 4]].tolist() == expected.tokens[[0, 4]].tolist()
    assert not expected.bad.any()


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("case", CASES[3:], ids=str)
def test_filters_keep_what_sorting_keeps(case: dict[str, float], ties: bool) -> None:
    """Off by one in top_k, the crossing token of top_p, or an unstable order of equal logits."""
    params = SamplingParams(**case)  # type: ignore[arg-type]
    x = torch.randn(300, generator=torch.Generator().manual_seed(5)) * 2
    if ties:
        x = x.round()
    got = run(x.expand(3000, -1), params)
    allowed = naive_kept(x, params)
    assert set(got.tokens.tolist()) <= set(allowed)
    likely = torch.softmax(x[allowed].double() / params.temperature, 0) > 0.01
    assert {t for t, often in zip(allowed, likely, strict=True) if often} <= set(
        got.tokens.tolist()
    )


@pytest.mark.parametrize("spread", [0.05, 1.0, 4.0])
@pytest.mark.parametrize("top_p", [0.001, 0.5, 0.97])
def test_large_nuclei_are_exact(spread: float, top_p: float) -> None:
    """The search that spares the CPU a sort of the vocabulary must stop at the same token."""
    x = torch.randn(20_000, generator=torch.Generator().manual_seed(4)) * spread
    params = SamplingParams(top_p=top_p, min_p=0.001, temperature=0.7)
    row = ParameterRows(1, 20_000, CPU)
    row.set(new_row(0, params))
    allowed = sorted(cpu_sampler._allowed(x.numpy(), x.max()[None].numpy(), row.words[0]).tolist())
    expected = naive_kept(x, params)
    assert (
        len(set(allowed) ^ set(expected)) <= len(expected) // 5000
    )  # float32 weights against float64


def test_degenerate_filters_are_greedy() -> None:
    """top_k = 1, a tiny top_p, min_p = 1 and a tiny temperature all mean the argmax, lowest id
    first."""
    logits = torch.randn(4, 500, generator=torch.Generator().manual_seed(6)).round()
    best = logits.argmax(-1)
    ties = (logits == logits.max(-1, keepdim=True).values).sum(-1)
    assert ties.max() > 1
    first = torch.tensor([int((row == row.max()).nonzero()[0]) for row in logits])
    assert torch.equal(best, first)
    for params in (
        SamplingParams(temperature=0),
        SamplingParams(temperature=1e-30),
        SamplingParams(top_k=1),
        SamplingParams(top_p=1e-6),
    ):
        assert torch.equal(run(logits, params).tokens, first), params
    tokens = run(logits * 1e30, SamplingParams(min_p=1.0, temperature=0.01)).tokens
    assert all(logits[s, t] == logits[s].max() for s, t in enumerate(tokens.tolist()))


def naive_edit(
    x: Tensor, params: SamplingParams, history: list[int], num_prompt: int, stop_ids: list[int]
) -> Tensor:
    x = x.double().clone()
    for token, bias in params.logit_bias.items():
        x[token] += bias
    for token in set(history):
        factor = params.repetition_penalty
        x[token] = x[token] / factor if x[token] > 0 else x[token] * factor
    output = history[num_prompt:]
    for token in set(output):
        x[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    if len(output) < params.min_tokens:
        x[stop_ids] = -math.inf
    return x


@pytest.mark.parametrize(
    "case",
    [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.6},
        {"presence_penalty": 1.2},
        {"frequency_penalty": 0.9},
        {"frequency_penalty": -0.7, "presence_penalty": -0.2, "repetition_penalty": 1.1},
        {"repetition_penalty": 1.5, "logit_bias": {3: 4.0, 11: -100.0, 20: 2.5}},
        {"min_tokens": 15},
        {"min_tokens": 9},
    ],
    ids=str,
)
def test_edits_match_a_naive_implementation(case: dict[str, float]) -> None:
    """Repeated tokens penalised twice, prompt tokens counted as output, end tokens banned a token
    too long."""
    params = SamplingParams(temperature=0, **case)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(40, 30, generator=generator)
    history = torch.randint(0, 30, (40, 64), generator=generator, dtype=torch.int32)
    positions = [8 + s % 12 for s in range(40)]
    stop_ids = [4, 9, 21, 22]
    got = run(
        logits,
        params,
        positions=positions,
        history=history,
        num_prompt_tokens=6,
        stop_ids=stop_ids,
    )
    changed = 0
    for s in range(40):
        past = history[s, : positions[s]].tolist()
        expected = naive_edit(logits[s], params, past, 6, stop_ids)
        assert got.tokens[s] == expected.argmax(), s
        changed += int(expected.argmax() != logits[s].argmax())
    assert changed


def test_bias_forces_and_forbids() -> None:
    """OpenAI's definition: +100 and -100 decide; a row whose every token is banned is flagged, not
    guessed."""
    logits = torch.randn(4, 200, generator=torch.Generator().manual_seed(9))
    assert run(logits, SamplingParams(logit_bias={150: 100.0})).tokens.tolist() == [150] * 4
    best = {int(t): -100.0 for t in logits.argmax(-1)}
    got = run(logits, SamplingParams(temperature=0, logit_bias=best))
    assert not set(got.tokens.tolist()) & set(best)
    assert not got.bad.any()
    every = dict.fromkeys(range(200), -100.0)  # -100 is added like any other: nothing changes
    got = run(logits, SamplingParams(temperature=0, logit_bias=every))
    assert got.tokens.tolist() == logits.argmax(-1).tolist() and not got.bad.any()
    got = run(logits[:, :2], SamplingParams(min_tokens=3), stop_ids=[0, 1])
    assert got.bad.all()


def test_logprobs_are_of_the_raw_distribution() -> None:
    """Temperature, bias or penalties leaking into what is reported; ranks from 0; unstable order of
    equals."""
    logits = torch.randn(6, 700, generator=torch.Generator().manual_seed(10)).mul(4).round() / 2
    exact = torch.log_softmax(logits.double(), -1)
    for params in (
        SamplingParams(temperature=0, logprobs=5),
        SamplingParams(temperature=1.6, top_p=0.9, logit_bias={8: 9.0}, logprobs=20),
        SamplingParams(repetition_penalty=2.0, logprobs=0),
    ):
        got = run(logits, params)
        assert got.logprob is not None and got.rank is not None
        assert got.top_ids is not None and got.top_logprobs is not None
        chosen = exact.gather(1, got.tokens[:, None])
        assert torch.allclose(got.logprob.double(), chosen[:, 0], atol=1e-5)
        assert torch.equal(got.rank, (exact > chosen).sum(-1) + 1)
        assert got.top_ids.shape == (6, params.logprobs)
        for s in range(6):
            order = sorted(range(700), key=lambda i: (-logits[s, i].item(), i))
            assert got.top_ids[s].tolist() == order[: params.logprobs]
        assert torch.allclose(got.top_logprobs.double(), exact.gather(1, got.top_ids), atol=1e-5)


def naive_processed(x: Tensor, params: SamplingParams) -> Tensor:
    """Return log-probabilities of the distribution that edited logits x [vocab] are sampled
    from."""
    if params.greedy:
        return torch.log_softmax(x.double(), 0)
    kept = naive_kept(x, params)
    scaled = torch.full_like(x, -math.inf, dtype=torch.float64)
    scaled[kept] = x[kept].double() / params.temperature
    return torch.log_softmax(scaled, 0)


@pytest.mark.parametrize(
    "case",
    [
        {"temperature": 0.7},
        {"temperature": 0.05},
        {"temperature": 1.3, "top_k": 20},
        {"temperature": 0.8, "top_p": 0.9},
        {"min_p": 0.02},
        {"temperature": 1.5, "top_k": 50, "top_p": 0.8, "min_p": 0.01},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "logit_bias": {3: 4.0, 30: -100.0}},
        {"temperature": 0.6, "top_p": 0.95, "presence_penalty": 0.5, "min_tokens": 30},
        {"temperature": 0, "top_k": 3, "repetition_penalty": 1.2},
    ],
    ids=str,
)
def test_processed_logprobs_are_of_what_was_sampled_from(case: dict[str, float]) -> None:
    """A trainer divides by these: a temperature, filter or penalty that is left out, or applied
    twice, is a ratio that is wrong for every token. A raw neighbour has the model's own."""
    count, vocab = 12, 700
    generator = torch.Generator().manual_seed(21)
    logits = torch.randn(count, vocab, generator=generator) * 4
    history = torch.randint(0, vocab, (count, 64), generator=generator, dtype=torch.int32)
    sampler = Sampler(count, vocab, CPU)
    stop_ids = [4, 9]
    every = []
    for row in range(count):
        mode = "raw_logprobs" if row == 5 else "processed_logprobs"
        params = SamplingParams(logprobs=8, logprobs_mode=mode, **case)  # type: ignore[arg-type]
        every.append(params)
        sampler.set_row(new_row(row, params, row, num_prompt_tokens=6, stop_ids=stop_ids))
    positions = [8 + row for row in range(count)]
    rows = torch.arange(count)
    plan = sampler.plan(rows.tolist())
    assert plan.processed
    got = sampler.sample(logits.clone(), rows, torch.tensor(positions), history, plan)
    assert got.logprob is not None and got.rank is not None
    assert got.top_ids is not None and got.top_logprobs is not None
    for s, params in enumerate(every):
        exact = torch.log_softmax(logits[s].double(), 0)
        if s != 5:
            past = history[s, : positions[s]].tolist()
            exact = naive_processed(naive_edit(logits[s], params, past, 6, stop_ids), params)
        token = int(got.tokens[s])
        assert abs(float(got.logprob[s]) - float(exact[token])) < 1e-5
        assert got.rank[s] == int((exact > exact[token]).sum()) + 1
        best = exact[got.top_ids[s]]
        assert torch.equal(best, exact.topk(8).values)
        torch.testing.assert_close(got.top_logprobs[s].double(), best, atol=1e-5, rtol=0)


def test_the_engines_mode_is_that_of_requests_that_name_none() -> None:
    """An engine's default that goes before a request's own wish, or that is forgotten."""
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(3))
    sampler = Sampler(3, 100, CPU, logprobs_mode="processed_logprobs")
    modes = (None, "raw_logprobs", "processed_logprobs")
    for row, mode in enumerate(modes):
        params = SamplingParams(temperature=0.5, logprobs=0, logprobs_mode=mode)  # type: ignore[arg-type]
        sampler.set_row(new_row(row, params))
    rows = torch.arange(3)
    at, history = torch.ones(3, dtype=torch.int64), torch.zeros(3, 1, dtype=torch.int32)
    got = sampler.sample(logits.clone(), rows, at, history, sampler.plan([0, 1, 2]))
    assert got.logprob is not None
    for s, scale in enumerate((2.0, 1.0, 2.0)):
        exact = torch.log_softmax(logits[s].double() * scale, 0)[got.tokens[s]]
        assert abs(float(got.logprob[s] - exact)) < 1e-5
    with pytest.raises(InvalidRequest, match="'raw_logprobs' or 'processed_logprobs'"):
        SamplingParams(logprobs_mode="processed_logits")  # type: ignore[arg-type]


def test_processed_logprobs_know_masks_and_missing_ids() -> None:
    """A grammar's mask and ids without text shrink the distribution that is sampled from."""
    logits = torch.randn(2, 64, generator=torch.Generator().manual_seed(4))
    sampler = Sampler(2, 64, CPU, never=[1, 63])
    for row in range(2):
        params = SamplingParams(logprobs=0, logprobs_mode="processed_logprobs")
        sampler.set_row(new_row(row, params, row))
    masks = np.array([[0b1110, 0]], np.int32)
    masked = Masked.upload([1], 2, masks, CPU)
    at, history = torch.ones(2, dtype=torch.int64), torch.zeros(2, 1, dtype=torch.int32)
    rows = torch.arange(2)
    got = sampler.sample(logits.clone(), rows, at, history, sampler.plan([0, 1]), masked)
    assert got.logprob is not None
    logits[:, [1, 63]] = -math.inf
    exact = torch.log_softmax(logits[0].double(), 0)[got.tokens[0]]
    assert abs(float(got.logprob[0] - exact)) < 1e-5
    exact = torch.log_softmax(logits[1, 2:4].double(), 0)[got.tokens[1] - 2]
    assert abs(float(got.logprob[1] - exact)) < 1e-5


def test_logprobs_only_for_rows_that_ask() -> None:
    """A row that asks for none must not read its neighbour's, and k is the largest that was
    asked."""
    sampler = Sampler(3, 40, CPU)
    for row, k in enumerate((None, 2, 4)):
        sampler.set_row(new_row(row, SamplingParams(temperature=0, logprobs=k)))
    plan = sampler.plan([0, 1, 2])
    assert plan.logprobs == 4
    logits = torch.randn(3, 40)
    got = sampler.sample(
        logits.clone(), torch.arange(3), torch.ones(3, dtype=torch.int64), torch.zeros(3, 1), plan
    )
    assert got.top_ids is not None and got.top_ids.shape == (3, 4)
    assert got.top_ids[1, :2].tolist() == logits[1].topk(2).indices.tolist()
    assert got.top_ids[2].tolist() == logits[2].topk(4).indices.tolist()


def test_prompt_logprobs() -> None:
    """The same numbers as for sampled tokens, at each position."""
    logits = torch.randn(9, 300, generator=torch.Generator().manual_seed(11))
    targets = torch.arange(9) * 30
    exact = torch.log_softmax(logits.double(), -1)
    logprob, rank, ids, values, total = Sampler(1, 300, CPU).prompt_logprobs(logits, targets, 3)
    chosen = exact.gather(1, targets[:, None])
    assert torch.allclose(logprob.double(), chosen[:, 0], atol=1e-5)
    assert torch.equal(rank, (exact > chosen).sum(-1) + 1)
    assert torch.equal(ids, exact.topk(3).indices)
    assert torch.allclose(values.double(), exact.topk(3).values, atol=1e-5)
    assert torch.allclose(values + total[:, None], logits.topk(3).values, atol=1e-5)


def test_plan_is_the_cheapest_and_rows_are_reused_clean() -> None:
    """A row must forget its last request's parameters, and a greedy batch must not pay for
    sampling."""
    sampler = Sampler(4, 100, CPU)
    full = SamplingParams(
        top_k=3,
        top_p=0.5,
        min_p=0.1,
        repetition_penalty=1.2,
        logit_bias={5: 1.0},
        min_tokens=2,
        logprobs=1,
    )
    sampler.set_row(new_row(1, full, stop_ids=[7]))
    sampler.set_row(new_row(2, SamplingParams()))
    assert sampler.plan([0, 3]) == sampler.simple_plan(greedy=True) == SamplePlan()
    assert sampler.plan([0, 2]) == sampler.simple_plan(greedy=False)
    plan = sampler.plan([1, 2])
    assert plan == SamplePlan(True, True, True, True, True, 1)
    assert not plan.simple
    sampler.set_row(new_row(1, SamplingParams(temperature=0)))
    assert sampler.plan([0, 1]).greedy
    # A temperature's filters mean nothing to an argmax; top_k beyond the vocabulary filters
    # nothing.
    sampler.set_row(new_row(1, SamplingParams(temperature=0, top_k=5, top_p=0.5)))
    sampler.set_row(new_row(2, SamplingParams(top_k=10**6)))
    assert sampler.plan([1, 2]).simple


def test_bfloat16_logits_and_padding_rows() -> None:
    """Models on the CPU hand over bfloat16; entries that pad a batch may share a row."""
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(12)).bfloat16()
    sampler = Sampler(2, 300, CPU)
    sampler.set_row(new_row(0, SamplingParams(temperature=0)))
    rows = torch.tensor([0, 1, 1])
    got = sampler.sample(
        logits, rows, torch.zeros(3, dtype=torch.int64), torch.zeros(2, 1), SamplePlan()
    )
    assert torch.equal(got.tokens, logits.float().argmax(-1))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("never", [[8, 9], [2, 5], [0, 3, 9]], ids=str)
def test_ids_without_text_are_never_chosen(never: list[int], temperature: float) -> None:
    """Rows that pad the vocabulary are trained as little as they are tested: one is chosen now and
    then, and no text has it. Their place in log-probabilities is the model's all the same."""
    logits = torch.zeros(64, 10)
    logits[:, never] = 50.0
    sampler = Sampler(64, 10, CPU, never)
    params = SamplingParams(
        temperature=temperature,
        logprobs=3,
        logit_bias={never[0]: 100.0, 1: 0.5},
        min_tokens=1,
        stop_token_ids=never,
    )
    for row in range(64):
        sampler.set_row(new_row(row, params, row, stop_ids=never))
    rows = torch.arange(64)
    plan = sampler.plan(rows.tolist())
    at, history = torch.ones(64, dtype=torch.int64), torch.zeros(64, 1, dtype=torch.int32)
    sampled = sampler.sample(logits.clone(), rows, at, history, plan)
    assert not sampled.bad.any()
    assert not set(sampled.tokens.tolist()) & set(never)
    assert sampled.logprob is not None
    want = logits.log_softmax(-1).gather(1, sampled.tokens[:, None])[:, 0]
    torch.testing.assert_close(sampled.logprob, want)
