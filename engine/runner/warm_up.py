"""The warm-up of a ModelRunner before the first request.

The warm-up runs the largest step, compiles the kernels that will be launched, and captures the
graphs.
"""

import logging
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.batch import COUNT, ENTRY, FIRST_DRAFT, ROW, SYNTHETIC, Batch
from engine.runner.drafts.drafting import Drafting
from engine.runner.drafts.graphs import Record, Recorder
from engine.runner.forward import ModelForward
from engine.runner.inputs import DeviceStep
from engine.runner.launch.graphs import StepGraphs
from engine.runner.model_runner import ModelRunner
from engine.sampling.sampler import MOST, Masked

logger = logging.getLogger("manta.engine")

# number of rows up to which each number has a different matmul kernel: kernels/gemm/small_m.py
FEW_ROWS = 4


def capture_graphs(
    runner: ModelRunner, sizes: Sequence[int], max_tokens: int, *, drafts: bool = False
) -> None:
    """Capture CUDA graphs of decode steps and mixed steps, after `warm_up`.

    sizes: the batch sizes of decode steps.
    max_tokens: the tokens of the largest step.
    drafts: whether batches may have drafts to verify.
    """
    drafter = runner.drafting is not None
    layers = runner.forward, runner.sampling
    graphs = StepGraphs(*layers, sizes, max_tokens, drafts=drafts, drafter=drafter)
    graphs.capture()
    runner.use_graphs(graphs)
    if runner.drafting is not None:
        capture_drafts(runner, runner.drafting, graphs, Recorder())


def capture_drafts(
    runner: ModelRunner, drafting: Drafting, graphs: StepGraphs | None, record: Record
) -> None:
    """Capture the passes of a drafter; if memory does not suffice, they run without CUDA graphs.

    graphs: the step graphs, to which the passes over a step's tokens are added; None = those passes
        run without CUDA graphs.
    """
    try:
        _warm_up_drafts(runner, drafting)  # in case this runner has not run a step yet
        if drafting.reads_states and graphs is not None:
            graphs.capture_reads(drafting.passes, drafting.like, record)
        chains = drafting.chains(record)
        chains.capture()
    except RuntimeError as error:
        if graphs is not None:
            graphs.drop_reads()
        logger.warning("drafts are computed without CUDA graphs, which is slower: %s", error)
        return
    drafting.graphs = chains


@torch.inference_mode()
def warm_up(runner: ModelRunner, num_tokens: int, *, drafts: bool = False) -> None:
    """Run the largest step on the padding row, with every sampling option.

    This compiles kernels and shows the peak of memory.

    Vision encoders are run by `warm_up_tower`.

    drafts: whether steps may have drafts.
    """
    pad, forward, sampling = runner.rows.pad_row, runner.forward, runner.sampling
    batch = largest_step(runner, num_tokens)
    step = forward.inputs.assemble(batch)
    if runner.lora is not None and forward.cuda:
        _warm_up_adapters(runner, batch)
        step = forward.inputs.assemble(batch)
        step.adapt(runner.lora.warm_up_step(batch.num_tokens))
    hidden = _run_step(forward, step)
    if runner.lora is not None:
        runner.lora.forget()
    if runner.drafting is not None:
        tapped = forward.tapped()
        runner.drafting.launch(batch, step.metas, hidden if tapped is None else tapped)
        _warm_up_drafts(runner, runner.drafting)
    decode = Batch(-1, [pad], [0], [1], [True], num_decodes=1)
    _run_step(forward, forward.inputs.assemble(decode))
    if forward.images is not None:
        _warm_up_images(runner, num_tokens)
    if forward.cuda and runner.model.config.recurrent:
        _warm_up_prompts(runner, num_tokens)
        if drafts:
            _warm_up_verification(runner, num_tokens)
    if not runner.model.stage.first:
        return
    count, device = pad, forward.device
    rows = torch.full((count,), pad, dtype=torch.int64, device=device)
    last = torch.arange(count, device=device) % hidden.shape[0]
    masked = Masked.everything(count, runner.model.config.vocab_size, device)
    logits = runner.model.logits(hidden.index_select(0, last))
    sampling.sample(logits, rows, torch.ones_like(rows), MOST, masked)
    if forward.cuda:
        sampling.sampler.prompt_logprobs(logits, last, MOST.logprobs)


@torch.inference_mode()
def warm_up_tower(runner: ModelRunner, num_tokens: int) -> None:
    """Encode the maximum of image embeddings of a step, if the model takes images.

    num_tokens: the tokens of the largest step.
    """
    if runner.forward.images is not None:
        runner.forward.images.warm_up(num_tokens)


def launch_everything(
    runner: ModelRunner, sizes: Sequence[int], max_tokens: int, *, drafts: bool = False
) -> StepGraphs | None:
    """Launch everything that a start launches, to record which kernels are needed.

    See `kernels.launch.compiling`. Returns the graphs, uncaptured; None without sizes.

    sizes, max_tokens, drafts: as for `capture_graphs`; no sizes if no graphs will be captured.
    """
    pad = runner.rows.pad_row
    update = Batch(-1, [pad], [0], [1], [True], num_decodes=1, new_blocks=[(pad, 0, 0)])
    graphs = None
    try:
        warm_up(runner, max_tokens, drafts=drafts)
        warm_up_tower(runner, max_tokens)
        if sizes:
            layers = runner.forward, runner.sampling
            drafter = runner.drafting is not None
            graphs = StepGraphs(*layers, sizes, max_tokens, drafts=drafts, drafter=drafter)
            graphs.launch_all()
            if (drafting := runner.drafting) is not None:
                if drafting.reads_states:
                    graphs.launch_reads(drafting.passes, drafting.like)
                drafting.chains(Recorder()).launch_all()
        runner.forward.inputs.upload(update, 1, 1)
    finally:
        # Kernels are not run here, so the rows may hold undefined token ids that a later lookup
        # would use.
        runner.rows.tokens.zero_()
    return graphs


def largest_step(runner: ModelRunner, num_tokens: int) -> Batch:
    """Return the largest step of prompts, each as long as a request can be.

    num_tokens: the number of tokens of the step; fewer if the rows cannot hold them.
    """
    pad = runner.rows.pad_row
    max_len = runner.rows.tokens.shape[1] - 1
    batch = Batch(step=-1)
    while num_tokens > 0 and len(batch.rows) < pad:
        length = min(num_tokens, max_len)
        batch.rows.append(pad)
        batch.starts.append(0)
        batch.lengths.append(length)
        batch.samples.append(True)
        num_tokens -= length
    return batch


def _run_step(forward: ModelForward, step: DeviceStep) -> Tensor:
    """Return the hidden states of a step, once the device has computed them.

    The wait is necessary because the step after the next reuses the pinned input buffer. An engine
    waits for results in between, a warm-up does not.
    """
    hidden = forward.run_step(step)
    if forward.device.type == "cuda":
        torch.cuda.synchronize(forward.device)
    return hidden


@torch.inference_mode()
def _warm_up_drafts(runner: ModelRunner, drafting: Drafting) -> None:
    """Draft two tokens for one row, for a few rows, and for all rows.

    Matmul kernels for a few rows depend on the number of rows.
    """
    pad, forward = runner.rows.pad_row, runner.forward
    for count in dict.fromkeys((*range(1, min(pad, FEW_ROWS) + 1), pad)):
        batch = Batch(-1, [pad] * count, [0] * count, [1] * count, [True] * count)
        batch.num_decodes = count
        table = batch.proposals = np.zeros((7, count), np.int64)
        table[ROW], table[COUNT], table[SYNTHETIC] = pad, 2, -1
        table[[ENTRY, FIRST_DRAFT]] = np.arange(count)
        step = forward.inputs.assemble(batch)
        hidden, tapped = _run_step(forward, step), forward.tapped()
        drafting.launch(batch, step.metas, hidden if tapped is None else tapped)


def _warm_up_prompts(runner: ModelRunner, num_tokens: int) -> None:
    """Run steps with each number of prompts through one layer of each kind.

    The kernels of recurrent layers depend on the number of prompts in a step, up to ENTRIES
    prompts.
    """
    from kernels.recurrent.chunks_cuda import CHUNK, ENTRIES

    pad, forward, whole = runner.rows.pad_row, runner.forward, runner.forward.model
    most = min(CHUNK, runner.rows.tokens.shape[1] - 1)
    forward.model = whole.one_layer()
    try:
        for count in range(1, min(ENTRIES, pad, num_tokens) + 1):
            # Entries are whole chunks, as few tokens would use other matmul kernels.
            lengths = [min(most, num_tokens // count)] * count
            batch = Batch(-1, [pad] * count, [0] * count, lengths, [True] * count)
            _run_step(forward, forward.inputs.assemble(batch))
    finally:
        forward.model = whole


def _warm_up_verification(runner: ModelRunner, num_tokens: int) -> None:
    """Run a step with a chunk and rows that each verify one draft, and discard its states."""
    forward, pad = runner.forward, runner.rows.pad_row
    count = min(pad, num_tokens) // 2
    if forward.state_runs is None or not count:
        return
    chunk = min(num_tokens - 2 * count, runner.rows.tokens.shape[1] - 1)
    rows, chunks = [*range(count)] * 2, [chunk] * (chunk > 0)
    batch = Batch(
        -1,
        rows + [pad] * len(chunks),
        [0] * count + [1] * count + [0] * len(chunks),
        [1] * 2 * count + chunks,
        [True] * (2 * count + len(chunks)),
        num_decodes=2 * count,
        drafts=[(row, 1, [0]) for row in range(count)],
    )
    _run_step(forward, forward.assemble(batch))
    forward.state_runs.settle([(row, 1) for row in range(count)])


def _warm_up_images(runner: ModelRunner, most: int) -> None:
    """Run a chunk with images, for which there are no CUDA graphs.

    most: the maximum number of tokens in a step.
    """
    pad, forward = runner.rows.pad_row, runner.forward
    assert forward.images is not None
    length = largest_step(runner, most).lengths[0]
    step = forward.inputs.assemble(Batch(-1, [pad], [0], [length], [True]))
    forward.images.add_warm_up_inputs(step)
    _run_step(forward, step)


def _warm_up_adapters(runner: ModelRunner, largest: Batch) -> None:
    """Run small steps with adapters, for kernels that the largest step does not need."""
    from kernels.lora import warm_up_sizes

    assert runner.lora is not None
    pad = runner.rows.pad_row
    for size in warm_up_sizes(largest.num_tokens, runner.lora.num_slots):
        lengths = [min(size, largest.lengths[0])]
        step = runner.forward.inputs.assemble(Batch(-1, [pad], [0], lengths, [True]))
        step.adapt(runner.lora.warm_up_step(lengths[0]))
        _run_step(runner.forward, step)
