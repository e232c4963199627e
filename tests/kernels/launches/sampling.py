"""Launches of the kernels outside the layers: the preparation of a step's inputs, and sampling."""

from kernels.batch import apply_updates, assemble
from kernels.sampling.choose import best_of_part, best_of_parts, choose
from kernels.sampling.edits import add_bias, apply_masks, ban, penalise
from kernels.sampling.filters import filter_thresholds
from kernels.sampling.layout import NUM_WORDS
from kernels.sampling.logprobs import logprobs
from tests.kernels.launches.sizes import BLOCK_SIZE, MODELS, bf16, int32, int64


def sampling(model: str) -> None:
    """Launch the sampler: edits of logits, filters, the choice of a token, log-probabilities."""
    d = MODELS[model]
    count = 2
    logits, words = bf16(count, d.vocab), int32(count + 1, NUM_WORDS)
    rows, positions, tokens = int64(count), int64(count), int32(count + 1, 1025)
    add_bias(logits, rows, words)
    penalise(logits, rows, positions, words, tokens, int32(count, d.vocab))
    ban(logits, rows, positions, words)
    masks = int32(count), int32(count, -(-d.vocab // 32))
    apply_masks(logits, *masks)
    filters = filter_thresholds(logits, rows, words)
    for sampled, wanted in ((False, None), (True, None), (True, filters)):
        choose(logits, rows, positions, words, sampled=sampled, filters=wanted)
    choose(logits, rows, positions, words, sampled=True, masks=masks)
    part = best_of_part(logits[:, : d.vocab // 2], rows, words, 0)
    best_of_parts(int64(2, *part.shape).int())
    for k in (0, 1, 20):
        logprobs(logits, positions, k, rows, words)
        logprobs(logits, positions, k, rows, words, filters=filters)
    logprobs(logits, positions, 5)


def assembly(_: str) -> None:
    """Launch the kernels that update the rows' tables and compute a step's inputs."""
    tokens, table, count = int32(5, 1025), int32(5, 64), 4
    apply_updates(int32(30), tokens, table, 2, 3)
    assemble(
        int32(count),
        int32(count),
        int32(count + 1),
        tokens,
        table,
        int32(64),
        int32(64),
        int64(64),
        int32(count),
        int32(count, 64),
        BLOCK_SIZE,
        4,
    )
