"""The cases of measure.py for sampling: edits of logits, and the choice of tokens."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from bench.kernels.measure import Calls, KernelWork, copies_for
from bench.kernels.sizes import Sizes
from kernels.sampling import layout
from kernels.sampling.choose import choose
from kernels.sampling.edits import add_bias, apply_masks, ban, penalise
from kernels.sampling.filters import filter_thresholds
from kernels.sampling.logprobs import logprobs


def sampled_words(s: Sizes, rows: int, **values: float) -> Tensor:
    """Make the device's table of sampling parameters, with temperature 1.

    values: other parameters, by their names in kernels/sampling/layout.py.
    """
    words = torch.zeros(rows, layout.NUM_WORDS, dtype=torch.int32)
    words[:, layout.ROW] = torch.arange(rows)
    words[:, layout.SEED] = torch.arange(rows)
    words[:, layout.LOGPROBS] = 5
    for at, count in ((layout.BIAS_IDS, layout.MAX_BIAS), (layout.STOP_IDS, layout.MAX_STOP)):
        # these words are used only if NUM_BIAS and NUM_STOP are set
        words[:, at : at + count] = torch.arange(count)
    fields = {"INV_TEMPERATURE": 1.0, "TOP_P": 1.0, "LOG_MIN_P": -torch.inf, "REPETITION": 1.0}
    for name, value in {**fields, **values}.items():
        at = getattr(layout, name)
        if isinstance(value, float):
            words.view(torch.float32)[:, at] = value
        else:
            words[:, at] = value
    return words.to(s.device)


def sampling(s: Sizes, rows: int, how: str) -> KernelWork:
    """Make a case of sampling.

    Bytes count one pass over the logits, which any sampling needs. Edits of a few logits count only
    these.
    """
    num_bytes: float = rows * s.vocab * s.dtype.itemsize
    logits = [s.random(rows, s.vocab) * 2.5 for _ in range(copies_for(num_bytes))]
    index = torch.arange(rows, device=s.device)
    positions = torch.full_like(index, 1000)
    values: dict[str, float] = {}
    if how == "top-k":
        values = {"TOP_K": 50}
    elif how == "top-p":
        values = {"TOP_P": 0.9}
    elif how == "penalties":
        values = {"REPETITION": 1.1, "FREQUENCY": 0.1}
    elif how == "bias and ban":
        values = {"NUM_BIAS": layout.MAX_BIAS, "NUM_STOP": layout.MAX_STOP, "MIN_TOKENS": 2000}
    words = sampled_words(s, rows, **values)
    calls: Calls
    if how == "greedy":
        calls = [partial(choose, x, index, positions, words, sampled=False) for x in logits]
    elif how == "temperature":
        calls = [partial(choose, x, index, positions, words, sampled=True) for x in logits]
    elif how == "penalties":
        tokens = torch.randint(s.vocab, (rows, 1025), device=s.device).int()
        scratch = torch.zeros(min(rows, 64), s.vocab, dtype=torch.int32, device=s.device)
        calls = [partial(penalise, x, index, positions, words, tokens, scratch) for x in logits]
        num_bytes = rows * 1000 * (2 * 4 + 4 * 4 + 2 * s.dtype.itemsize)
    elif how == "bias and ban":

        def edited(x: Tensor) -> None:
            add_bias(x, index, words)
            ban(x, index, positions, words)

        calls = [partial(edited, x) for x in logits]
        bytes_each = 8 + 2 * s.dtype.itemsize  # id, value and logit
        num_bytes = rows * (layout.MAX_BIAS * bytes_each + layout.MAX_STOP * (4 + s.dtype.itemsize))
    elif how == "grammars":
        masks = torch.zeros(rows, -(-s.vocab // 32), dtype=torch.int32, device=s.device)
        mask_of = torch.arange(rows, dtype=torch.int32, device=s.device)
        calls = [partial(apply_masks, x, mask_of, masks) for x in logits]
        num_bytes = rows * s.vocab * (s.dtype.itemsize + 1 / 8)
    elif how == "logprobs":
        calls = [partial(logprobs, x, index, 5, index, words) for x in logits]
    else:

        def filtered(x: Tensor) -> object:
            filters = filter_thresholds(x, index, words)
            return choose(x, index, positions, words, sampled=True, filters=filters)

        calls = [partial(filtered, x) for x in logits]
    return KernelWork(calls, num_bytes)


def sampling_cases(s: Sizes) -> dict[str, Callable[[], KernelWork]]:
    """Return the case's name -> a function that makes the case."""
    cases: dict[str, Callable[[], KernelWork]] = {}
    for rows in (1, 256):
        for how in ("greedy", "temperature"):
            cases[f"sampling/{how}/{rows}"] = partial(sampling, s, rows, how)
    for how in ("top-k", "top-p", "penalties", "bias and ban", "grammars", "logprobs"):
        cases[f"sampling/{how}/256"] = partial(sampling, s, 256, how)
    return cases
