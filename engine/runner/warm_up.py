"""What a start does with a ModelRunner before the first request: the largest step, the kernels that
will be launched, and the graphs."""

from collections.abc import Sequence

import torch

from engine.batch import Batch
from engine.runner.graphs import StepGraphs
from engine.runner.model_runner import ModelRunner
from engine.sampling.sampler import MOST, Masked


def capture_graphs(runner: ModelRunner, sizes: Sequence[int]) -> None:
    """Record steps of these numbers of decodes, and mixed ones. CUDA only; after `warm_up`."""
    runner.graphs = StepGraphs(runner, sizes, runner.max_num_batched_tokens)
    runner.graphs.capture()


@torch.inference_mode()
def warm_up(runner: ModelRunner, num_tokens: int) -> None:
    """Run the largest step on the padding row, with everything that can be asked of sampling:
    compiles kernels, shows the peak of memory."""
    pad = runner.rows.pad_row
    batch = largest_step(runner, num_tokens)
    step = runner.inputs.assemble(batch)
    if runner.lora is not None and runner.cuda:
        _warm_up_adapters(runner, batch)
        step = runner.inputs.assemble(batch)
        step.adapt(runner.lora.pretend(batch.num_tokens))
    hidden = runner.forward(step)
    if runner.lora is not None:
        runner.lora.forget()
    decode = Batch(-1, [pad], [0], [1], [True], num_decodes=1)
    runner.forward(runner.inputs.assemble(decode))
    if runner.cuda and runner.model.config.recurrent:
        _warm_up_prompts(runner, num_tokens)
    if not runner.model.stage.first:
        return
    count = runner.rows.pad_row
    rows = torch.full((count,), pad, dtype=torch.int64, device=runner.device)
    last = torch.arange(count, device=runner.device) % hidden.shape[0]
    masked = Masked.everything(count, runner.model.config.vocab_size, runner.device)
    logits = runner.model.logits(hidden.index_select(0, last))
    runner.sample(logits, rows, torch.ones_like(rows), MOST, masked)
    if runner.cuda:
        runner.sampler.prompt_logprobs(logits, last, MOST.logprobs)


def launch_everything(runner: ModelRunner, sizes: Sequence[int]) -> None:
    """What a start launches, where launches only tell which kernels they need
    (`kernels.launch.compiling`). sizes: as for `capture_graphs`; none, if there will be none."""
    pad = runner.rows.pad_row
    update = Batch(-1, [pad], [0], [1], [True], num_decodes=1, new_blocks=[(pad, 0, 0)])
    try:
        warm_up(runner, runner.max_num_batched_tokens)
        if sizes:
            StepGraphs(runner, sizes, runner.max_num_batched_tokens).launch_all()
        runner.inputs.upload(update, 1, 1)
    finally:
        # Tokens that no kernel has chosen were written there, and would be looked up.
        runner.rows.tokens.zero_()


def largest_step(runner: ModelRunner, num_tokens: int) -> Batch:
    """Of prompts as long as they can be: this many tokens, or as many as all rows can bring."""
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


def _warm_up_prompts(runner: ModelRunner, num_tokens: int) -> None:
    """How many prompts a step has decides launches of layers that keep states. So one step of each
    number, up to that from which they are the same, through a layer of each kind."""
    from kernels.recurrent.chunks_cuda import CHUNK, ENTRIES

    pad, whole = runner.rows.pad_row, runner.model
    most = min(CHUNK, runner.rows.tokens.shape[1] - 1)
    runner.model = whole.one_layer()
    try:
        for count in range(1, min(ENTRIES, pad, num_tokens) + 1):
            # A chunk each: a few tokens have other kernels for their products.
            lengths = [min(most, num_tokens // count)] * count
            batch = Batch(-1, [pad] * count, [0] * count, lengths, [True] * count)
            runner.forward(runner.inputs.assemble(batch))
    finally:
        runner.model = whole


def _warm_up_adapters(runner: ModelRunner, largest: Batch) -> None:
    """Small steps compile what the largest does not need."""
    from kernels.lora import warm_up_sizes

    assert runner.lora is not None
    pad = runner.rows.pad_row
    for size in warm_up_sizes(largest.num_tokens, runner.lora.num_slots):
        lengths = [min(size, largest.lengths[0])]
        step = runner.inputs.assemble(Batch(-1, [pad], [0], lengths, [True]))
        step.adapt(runner.lora.pretend(lengths[0]))
        runner.forward(step)
