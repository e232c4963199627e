"""The sampling kernels against the NumPy noise, sorting and float64; on a GPU also their
bandwidth."""

import math
import time

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.batch import NewRow
from engine.sampling.cpu_sampler import apply_masks as cpu_masks
from engine.sampling.parameter_rows import ParameterRows
from engine.sampling.sampler import SamplePlan, Sampler
from engine.sampling_params import SamplingParams
from kernels.sampling import philox
from kernels.sampling.choose import _group_noise, best_of_part, best_of_parts, choose
from kernels.sampling.edits import add_bias, apply_masks, ban, penalise
from kernels.sampling.filters import filter_thresholds
from kernels.sampling.logprobs import logprobs
from tests.engine.text.test_sampling import naive_edit, naive_kept
from tests.kernels.oracle import DEVICE, DTYPES

pytestmark = pytest.mark.triton

LARGE = DEVICE == "cuda"
VOCABS = [40, 4096, 5003, *([128256] if LARGE else [])]


def table(params: list[SamplingParams], vocab: int, **other: object) -> tuple[Tensor, Tensor]:
    """Return rows 0 to n-1 ([n] int64) with these parameters and seeds -3, -2, ..., and their
    words."""
    parameters = ParameterRows(len(params), vocab, torch.device("cpu"))
    for row, item in enumerate(params):
        values = {"num_prompt_tokens": 1, "choice": row % 3, "stop_ids": []} | other
        parameters.set(NewRow(row=row, token_ids=[1], params=item, seed=row - 3, **values))
    return torch.arange(len(params), device=DEVICE), torch.from_numpy(parameters.words).to(DEVICE)


def random_logits(count: int, vocab: int, dtype: torch.dtype, ties: bool = False) -> Tensor:
    x = torch.randn(count, vocab, generator=torch.Generator().manual_seed(vocab)) * 2.5
    return (x.mul(2).round().div(2) if ties else x).to(dtype).to(DEVICE)


@triton.jit
def _words_kernel(seed, position, choice, tokens, groups):
    i = tl.arange(0, 1024)
    zero = i * 0
    r0, r1, r2, r3 = tl.philox(tl.load(seed), i, zero + position, zero + choice, zero)
    tl.store(tokens + i, r0.to(tl.int64))
    tl.store(tokens + 1024 + i, r1.to(tl.int64))
    tl.store(tokens + 2048 + i, r2.to(tl.int64))
    tl.store(tokens + 3072 + i, r3.to(tl.int64))
    minimum, lane = _group_noise(tl.load(seed), choice, position, 0)
    col = tl.arange(0, 64)
    tl.store(groups + col, minimum)
    tl.store(groups + 64 + col, lane.to(tl.float32))


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63), 123456789012345])
def test_integers_equal_the_numpy_form(seed: int) -> None:
    """A sign-extended seed word or a swapped counter: another text on the GPU than on the CPU."""
    tokens = torch.empty(4096, dtype=torch.int64, device=DEVICE)
    groups = torch.empty(128, device=DEVICE)
    _words_kernel[(1,)](torch.tensor([seed], device=DEVICE), 77, 2, tokens, groups)
    index = np.arange(1024)
    words = philox.philox4x32(np.array([seed]), index, 77, 2, 0)
    assert tokens.tolist() == np.concatenate(words).astype(np.int64).tolist()
    ones = np.ones(1, np.int64)
    minimum, lane = philox.group_noise(np.array([seed]), ones * 2, ones * 77, 1)
    assert groups[64:].tolist() == lane[0].tolist()
    assert torch.allclose(groups[:64].cpu(), torch.from_numpy(minimum[0]), rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("ties", [False, True])
def test_choice(vocab: int, ties: bool, dtype: torch.dtype) -> None:
    """Tokens past the vocabulary's end winning, ties by block order, greedy rows given noise."""
    params = [SamplingParams(temperature=t) for t in (0.0, 1.0, 0.3, 2.0, 0.0)]
    rows, words = table(params, vocab)
    logits = random_logits(5, vocab, dtype, ties)
    logits[1:, ::3] = -math.inf
    at = torch.tensor([5, 900, 1, 0, 3], device=DEVICE)
    tokens, bad = choose(logits, rows, at, words, sampled=True)
    assert not bad.any()
    x = logits.float().cpu().numpy()
    for s, item in enumerate(params):
        if item.greedy:
            assert tokens[s] == x[s].argmax()
            continue
        noise = philox.gumbel(s - 3, s % 3, int(at[s]), vocab)
        score = x[s] * np.float32(1 / item.temperature) + noise
        # Logarithms differ in the last bit between devices; a token that is that close may win.
        assert score[int(tokens[s])] >= score.max() - 1e-4
    greedy, _ = choose(logits, rows, at, words, sampled=False)
    assert greedy.tolist() == x.argmax(1).tolist()
    cut = vocab // 3
    both = (logits[:, :cut], 0), (logits[:, cut:], cut)
    parts = torch.stack([best_of_part(part, rows, words, first) for part, first in both])
    tokens, bad = best_of_parts(parts)
    assert tokens.tolist() == x.argmax(1).tolist() and not bad.any()


def test_rows_that_are_not_finite() -> None:
    """NaN compares false with everything: without a flag, the row's token would be garbage."""
    params = [SamplingParams(temperature=t) for t in (1.0, 1.0, 0.0, 0.7, 1.0)]
    rows, words = table(params, 9000)
    clean = random_logits(5, 9000, torch.float32)
    broken = clean.clone()
    broken[1, 8999] = math.nan
    broken[2, 4097] = math.inf
    broken[3] = -math.inf
    at = torch.ones(5, dtype=torch.int64, device=DEVICE)
    expected, _ = choose(clean, rows, at, words, sampled=True)
    tokens, bad = choose(broken, rows, at, words, sampled=True)
    assert bad.tolist() == [False, True, True, True, False]
    assert tokens.tolist() == [int(expected[0]), 0, 0, 0, int(expected[4])]
    filters = filter_thresholds(broken, *table([SamplingParams(top_p=0.9)] * 5, 9000))
    _, bad = choose(broken, rows, at, words, sampled=True, filters=filters)
    assert bad.tolist() == [False, True, True, True, False]
    both = (broken[:, :5000], 0), (broken[:, 5000:], 5000)
    parts = torch.stack([best_of_part(part, rows, words, first) for part, first in both])
    tokens, bad = best_of_parts(parts)
    assert bad.tolist() == [False, True, True, True, False] and not tokens[bad].any()


FILTERS = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_p": 0.02},
    {"top_p": 0.6},
    {"top_p": 0.999, "temperature": 0.5},
    {"min_p": 0.05},
    {"top_k": 20, "top_p": 0.8, "temperature": 0.6},
    {"top_k": 33, "top_p": 0.95, "min_p": 0.02, "temperature": 1.5},
    {},
    {"temperature": 0.0, "top_k": 3},
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [40, 5003, *([128256] if LARGE else [])])
@pytest.mark.parametrize("ties", [False, True])
def test_filters(vocab: int, ties: bool, dtype: torch.dtype) -> None:
    """A threshold one token off, ties kept by chance, a mass normalised before top_k instead of
    after."""
    params = [SamplingParams(**case) for case in FILTERS]  # type: ignore[arg-type]
    rows, words = table(params, vocab)
    logits = random_logits(len(params), vocab, dtype, ties)
    logits[:, 5] = -math.inf
    if ties:
        logits[0, :9] = -0.0  # equal to 0.0, whatever their bits
    thresholds, cuts = filter_thresholds(logits, rows, words)
    ids = torch.arange(vocab, device=DEVICE)
    x = logits.float()
    allowed = (x > thresholds[:, None]) | ((x == thresholds[:, None]) & (ids <= cuts[:, None]))
    for s, item in enumerate(params):
        got = set((allowed[s] & (x[s] > -math.inf)).nonzero()[:, 0].tolist())
        if item.greedy or not FILTERS[s]:
            assert thresholds[s] == -math.inf and cuts[s] == 2**31 - 1
            continue
        expected = set(naive_kept(x[s].cpu(), item))
        if (
            item.top_p < 1 and got != expected
        ):  # a sum in float32 may cross one token earlier or later
            assert item.top_p > 0.9 or LARGE
            assert len(got ^ expected) <= max(1, len(expected) // 2000)
        else:
            assert got == expected, FILTERS[s]


def test_filters_of_extreme_logits() -> None:
    """The search must end and be exact for huge, tiny, denormal and equal values."""
    vocab = 40
    case = SamplingParams(top_k=3)
    rows, words = table([case] * 6, vocab)
    x = random_logits(6, vocab, torch.float32)
    x[0] *= 1e30
    x[1] *= 1e-38
    x[2] = 0.0
    x[3, :20] = -math.inf
    x[4] = torch.linspace(-1e-45, 3e38, vocab, device=DEVICE)
    x[5, 2:] = -math.inf
    thresholds, cuts = filter_thresholds(x, rows, words)
    ids = torch.arange(vocab, device=DEVICE)
    allowed = (x > thresholds[:, None]) | ((x == thresholds[:, None]) & (ids <= cuts[:, None]))
    allowed &= x > -math.inf
    for s in range(6):
        order = sorted(range(vocab), key=lambda i: (-x[s, i].item(), i))[:3]
        finite = [i for i in order if x[s, i] > -math.inf]
        assert allowed[s].nonzero()[:, 0].tolist() == sorted(finite), s


@pytest.mark.parametrize("dtype", [torch.float32, *([torch.bfloat16] if LARGE else [])], ids=str)
def test_edits(dtype: torch.dtype) -> None:
    """A token that occurs twice penalised twice, also across programs; a scratch left dirty for the
    next step."""
    vocab, count, max_len = 300, 7, 2500
    params = [
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(presence_penalty=1.25),
        SamplingParams(frequency_penalty=0.25),
        SamplingParams(repetition_penalty=0.5, frequency_penalty=-0.5, presence_penalty=1.0),
        SamplingParams(),
        SamplingParams(logit_bias={i: i / 4 - 30 for i in range(299)}, min_tokens=2400),
        SamplingParams(repetition_penalty=2.0, logit_bias={7: -2.0}, min_tokens=100),
    ]
    stop_ids = [3, 8, 299]
    rows, words = table(params, vocab, num_prompt_tokens=1030, stop_ids=stop_ids)
    order = torch.tensor([6, 0, 5, 1, 4, 2, 3], device=DEVICE)
    logits = random_logits(count, vocab, dtype)
    before = logits.clone()
    history = torch.randint(0, vocab, (count, max_len), dtype=torch.int32)
    history[:, 1000:] %= 40  # many repeats
    at = torch.tensor([1129, 1030, 2499, 1031, 1100, 2100, 2400], device=DEVICE)
    scratch = torch.zeros(3, vocab, dtype=torch.int32, device=DEVICE)
    add_bias(logits, rows[order], words)
    penalise(logits, rows[order], at, words, history.to(DEVICE), scratch)
    ban(logits, rows[order], at, words)
    assert not scratch.any()
    rtol = 1e-5 if dtype == torch.float32 else 0.02
    for s, row in enumerate(order.tolist()):
        past = history[row, : int(at[s])].tolist()
        expected = naive_edit(before[s].cpu(), params[row], past, 1030, stop_ids)
        assert torch.allclose(logits[s].cpu().double(), expected, rtol=rtol, atol=rtol), row


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [31, 64, *VOCABS])
def test_masks(vocab: int, dtype: torch.dtype) -> None:
    """Bit 31 of a word, a last word that is not full, logits beyond the mask, a row's mask applied
    to another; a choice that applies masks itself and chooses otherwise than after they were
    applied."""
    logits = random_logits(5, vocab, dtype)
    words = vocab // 32 if vocab > 64 else -(-vocab // 32)  # fewer than the logits need
    masks = torch.randint(-(2**31), 2**31, (3, words), dtype=torch.int64).int()
    masks[1] = 1 << 30 | -(2**31)
    masks[2, 1:] = 0
    mask_of = torch.tensor([1, -1, -1, 0, 2], dtype=torch.int32)
    before = logits.clone()
    host = logits.float().cpu().numpy().copy()
    apply_masks(logits, mask_of.to(DEVICE), masks.to(DEVICE))
    for s, m in enumerate(mask_of.tolist()):
        for token in range(vocab):
            bits = -1 if m < 0 else 0 if token // 32 >= words else int(masks[m, token // 32])
            expected = before[s, token] if bits >> (token % 32) & 1 else -math.inf
            assert logits[s, token] == expected, (s, token)
    cpu_masks(host, mask_of.numpy(), masks.numpy())
    assert torch.equal(torch.from_numpy(host), logits.float().cpu())

    some = [SamplingParams(temperature=t) for t in (0.0, 0.7, 0.0, 1.0, 1.5)]
    rows, table_of = table(some, vocab)
    at = torch.arange(20, 25, device=DEVICE)
    before[0, 1] = math.nan  # forbidden
    before[1, 1] = math.inf  # no mask, so the row is bad
    logits[1, 1] = math.inf
    expected = choose(logits, rows, at, table_of, sampled=True)
    mask = mask_of.to(DEVICE), masks.to(DEVICE)
    tokens, bad = choose(before, rows, at, table_of, sampled=True, masks=mask)
    assert torch.equal(tokens, expected[0]) and torch.equal(bad, expected[1])
    assert bad.tolist() == [False, True, False, False, False]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("k", [0, 1, 20])
def test_logprobs(vocab: int, k: int, dtype: torch.dtype) -> None:
    """Sums that leave out a block, ranks that count the token itself, top tokens lost between
    blocks or ties."""
    logits = random_logits(4, vocab, dtype, ties=True)
    logits[2, 1:] = -math.inf
    targets = torch.tensor([vocab - 1, 3, 0, 17], device=DEVICE)
    logprob, rank, ids, values, total = logprobs(logits, targets, k)
    exact = torch.log_softmax(logits.double(), -1)
    chosen = exact.gather(1, targets[:, None])
    assert torch.allclose(logprob.double(), chosen[:, 0], atol=2e-5)
    assert torch.equal(rank, (exact > chosen).sum(-1) + 1)
    for s in range(4):
        order = torch.sort(logits[s].float(), descending=True, stable=True).indices[:k]
        assert ids[s].tolist() == order.tolist()
        assert torch.allclose(values[s].double(), exact[s, order], atol=2e-5)
        assert torch.allclose(values[s] + total[s], logits[s, order].float(), atol=2e-5)


def test_logprobs_skip_rows_that_did_not_ask() -> None:
    """Rows that want none are not paid for, and do not disturb those that do."""
    rows, words = table([SamplingParams(), SamplingParams(logprobs=2)], 100)
    logits = random_logits(2, 100, torch.float32)
    targets = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    logprob, _, ids, *_ = logprobs(logits, targets, 2, rows, words)
    assert ids[1].tolist() == logits[1].topk(2).indices.tolist()
    assert torch.allclose(logprob[1], torch.log_softmax(logits[1], -1)[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", VOCABS)
def test_processed_logprobs(vocab: int, dtype: torch.dtype) -> None:
    """A filter's cut that is not the choice's, a scale applied twice, blocks without any token."""
    cases: list[dict[str, object]] = [
        {"temperature": 0.6},
        {"temperature": 1.4, "top_k": 7},
        {"top_p": 0.7, "logprobs_mode": "raw_logprobs"},
        {"temperature": 0.8, "top_p": 0.8, "min_p": 0.01},
        {"temperature": 0.0},
    ]
    params = [
        SamplingParams(**{"logprobs": 4, "logprobs_mode": "processed_logprobs", **case})  # type: ignore[arg-type]
        for case in cases
    ]
    rows, words = table(params, vocab)
    logits = random_logits(5, vocab, dtype, ties=True)
    at = torch.ones(5, dtype=torch.int64, device=DEVICE)
    filters = filter_thresholds(logits, rows, words)
    targets, _ = choose(logits, rows, at, words, sampled=True, filters=filters)
    parts = logprobs(logits, targets, 4, rows, words)
    logprob, rank, ids, values, total = logprobs(
        logits, targets, 4, rows, words, filters=filters, out=parts
    )
    for s, item in enumerate(params):
        x = logits[s].cpu()
        exact = torch.log_softmax(x.double(), 0)
        if item.logprobs_mode == "processed_logprobs":
            threshold, cut = float(filters[0][s]), int(filters[1][s])
            index = torch.arange(vocab)
            kept = (x.float() > threshold) | ((x.float() == threshold) & (index <= cut))
            scaled = x.double() / (item.temperature or 1.0)
            exact = torch.log_softmax(scaled.masked_fill(~kept, -math.inf), 0)
            assert abs(float(total[s]) - float(scaled[kept].logsumexp(0))) < 1e-4
        token = int(targets[s])
        assert abs(float(logprob[s]) - float(exact[token])) < 2e-5
        assert int(rank[s]) == int((exact > exact[token]).sum()) + 1
        order = torch.sort(exact, descending=True, stable=True)
        assert ids[s].tolist() == order.indices[:4].tolist()
        expected = order.values[:4]
        torch.testing.assert_close(values[s].cpu().double(), expected, atol=2e-5, rtol=0)


MIX: list[dict[str, object]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    {"top_p": 0.9},
    {"min_p": 0.05, "logprobs": 5},
    {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "logit_bias": {5: 3.0}},
    {"min_tokens": 50, "logprobs": 0},
    {"temperature": 0.7, "top_k": 9, "logprobs": 3, "logprobs_mode": "processed_logprobs"},
    {"repetition_penalty": 1.2, "logprobs": 0, "logprobs_mode": "processed_logprobs"},
]


def samplers(count: int, vocab: int, max_len: int) -> tuple[Sampler, Sampler, Tensor]:
    """Return samplers with the same rows on the GPU and on the CPU, and histories for them."""
    gpu, cpu = (Sampler(count + 1, vocab, torch.device(d)) for d in ("cuda", "cpu"))
    for row in range(count):
        params = SamplingParams(**MIX[row % len(MIX)])  # type: ignore[arg-type]
        new = NewRow(row, [1], 20, params, row * 7919 - 5, row % 2, [2, 3])
        gpu.set_row(new)
        cpu.set_row(new)
    return gpu, cpu, torch.randint(0, vocab, (count + 1, max_len), dtype=torch.int32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_device_and_host_choose_alike(dtype: torch.dtype) -> None:
    """A request that moves from a GPU replica to a CPU one goes on with the same numbers."""
    count, vocab = 70, 128256
    gpu, cpu, history = samplers(count, vocab, 100)
    logits = random_logits(count, vocab, dtype)
    rows, at = torch.arange(count), torch.randint(21, 100, (count,))
    plan = gpu.plan(rows.tolist())
    on_host = cpu.sample(logits.cpu().clone(), rows, at, history, plan)
    torch.cuda.synchronize()
    arguments = logits.clone(), rows.cuda(), at.cuda(), history.cuda(), plan
    torch.cuda.set_sync_debug_mode("error")
    try:
        on_device = gpu.sample(*arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    same = on_device.tokens.cpu() == on_host.tokens
    # Penalised bfloat16 logits are rounded on the GPU and not on the CPU; sums in float32 cross
    # top_p elsewhere.
    assert same.float().mean() > 0.9
    assert same[torch.arange(count) % len(MIX) < 3].all()
    assert on_device.logprob is not None and on_host.logprob is not None
    asked = same & torch.tensor([("logprobs" in MIX[r % len(MIX)]) for r in range(count)])
    assert torch.allclose(on_device.logprob.cpu()[asked], on_host.logprob[asked], atol=1e-4)


@pytest.mark.gpu
def test_simple_plans_are_captured() -> None:
    """A captured sample must read parameters uploaded after its capture, and give what the eager
    one gives."""
    count, vocab = 8, 49152
    sampler = Sampler(count + 1, vocab, torch.device("cuda"))
    logits = random_logits(count, vocab, torch.bfloat16)
    rows, at = torch.full((count,), count, device="cuda"), torch.arange(count, device="cuda")
    history = torch.zeros(count + 1, 4, dtype=torch.int32, device="cuda")
    plan = SamplePlan(sampled=True)
    sampler.sample(logits, rows, at, history, plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sampler.sample(logits, rows, at, history, plan)
    for row in range(count):
        sampler.set_row(NewRow(row, [1], 1, SamplingParams(), row, 0, []))
    sampler.flush()
    rows.copy_(torch.arange(count))
    graph.replay()
    eager = sampler.sample(logits, rows, at, history, plan)
    assert torch.equal(captured.tokens, eager.tokens)


def bench(
    count: int, vocab: int, dtype: torch.dtype, params: SamplingParams
) -> tuple[float, float]:
    """Return microseconds a call of `Sampler.sample` on the GPU, and TB/s of one read of its
    logits."""
    sampler = Sampler(count, vocab, torch.device("cuda"))
    for row in range(count):
        sampler.set_row(NewRow(row, [1], 1, params, row, 0, [2]))
    # More logits than the L2 cache holds, as after a matrix product that wrote others meanwhile.
    copies = max(2, (256 << 20) // (count * vocab * dtype.itemsize))
    copies = min(copies, 64)
    logits = [random_logits(count, vocab, dtype) for _ in range(2)]
    logits = [logits[i % 2].clone() for i in range(copies)]
    rows = torch.arange(count, device="cuda")
    at = torch.full((count,), 1000, device="cuda")
    history = torch.randint(0, vocab, (count, 2048), dtype=torch.int32, device="cuda")
    plan = sampler.plan(list(range(count)))
    for x in logits[:2]:
        sampler.sample(x, rows, at, history, plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for x in logits:
            sampler.sample(x, rows, at, history, plan)
    graph.replay()
    torch.cuda.synchronize()
    best = math.inf
    for _ in range(5):
        start = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - start) / copies)
    return best * 1e6, count * vocab * dtype.itemsize / best / 1e12


@pytest.mark.gpu
@pytest.mark.slow
def test_bandwidth() -> None:
    """Prints what each path costs (pytest -s); fails if sampling a full batch takes a millisecond
    more than it must."""
    cases: dict[str, dict[str, object]] = {
        "greedy": {"temperature": 0.0},
        "temperature": {},
        "top_k 50": {"top_k": 50},
        "top_p 0.9": {"top_p": 0.9},
        "top_k 20, top_p 0.8": {"top_k": 20, "top_p": 0.8},
        "penalties": {"temperature": 0.0, "repetition_penalty": 1.1},
        "logprobs 5": {"temperature": 0.0, "logprobs": 5},
    }
    for name, case in cases.items():
        for count in (1, 32, 256):
            params = SamplingParams(**case)  # type: ignore[arg-type]
            took, rate = bench(count, 128256, torch.bfloat16, params)
            print(f"{name:20} {count:4} rows {took:8.1f} us {rate:6.2f} TB/s")
            if name in ("greedy", "temperature"):
                assert took < 1000
