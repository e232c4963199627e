"""Batch and StepResult: the plain data between scheduler and model runner. No torch here.

The device keeps one row per running request (see runner/rows.py): its tokens so far, its block
table and its sampling parameters. A batch is a list of row numbers and what to compute for each.
A row's tokens are uploaded once, when the request takes the row; after that each sampled token is
written into the row by the sampler, on the device, so that batch n + 1 can be launched before the
host knows the tokens of batch n:

    entry e computes                  tokens[row, start : start + length]
            and, if it samples, writes tokens[row, start + length]
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from engine.sampling_params import SamplingParams

if TYPE_CHECKING:  # routers and the command line import this module, and have no use for NumPy
    import numpy as np
    from numpy.typing import NDArray


class OutOfMemory(Exception):
    """The error of a step that the device had no memory for. The device itself is well."""


@dataclass(slots=True)
class NewRow:
    """A row that a request takes, or takes again after a preemption."""

    row: int
    token_ids: list[int]  # prompt and known output; its own copy
    num_prompt_tokens: int  # where the output begins in token_ids
    params: SamplingParams
    seed: int  # resolved; int64
    choice: int  # 0 .. n-1, part of the random counter
    # end tokens that min_tokens bans: the model's (unless ignore_eos) and the caller's
    # (none where a grammar decides: its masks know min_tokens)
    stop_ids: Sequence[int]
    lora_slot: int = -1  # device slot of its LoRA adapter; -1 = none
    virtual_slot: int = -1  # device slot of its virtual tokens; -1 = none
    num_virtual: int = 0  # leading token_ids that stand for them
    kv_rank: int = 0  # the rank that has its keys, with data-parallel attention


@dataclass(slots=True)
class PrefixCopy:
    """A copy of a slot's virtual tokens [start, stop): their keys and values go into blocks, the
    first at the beginning of the first block."""

    slot: int
    start: int
    stop: int
    blocks: Sequence[int]
    kv_rank: int = 0  # that has these blocks, as of NewRow


@dataclass(slots=True)
class Batch:
    """A step: first the entries with length 1 that sample ("decodes"), then chunks of any
    length."""

    step: int
    rows: list[int] = field(default_factory=list)  # [num_entries]
    # [num_entries] tokens whose keys are there already
    starts: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # [num_entries] tokens to compute, >= 1
    # [num_entries] reaches its last token: sample the next
    samples: list[bool] = field(default_factory=list)
    num_decodes: int = 0  # leading entries with length 1 and samples True
    new_rows: list[NewRow] = field(default_factory=list)  # to apply before anything else
    # (row, index in its table, block id); a table is as block_manager.py says
    new_blocks: list[tuple[int, int, int]] = field(default_factory=list)
    prefixes: list[PrefixCopy] = field(default_factory=list)  # to copy before anything reads them
    # (row, slot): states of rows to copy to snapshots, as the step before has left them; then of
    # snapshots to rows, in this order. A slot is a row that no request has, or lies behind all rows
    # and that of padding. No snapshot is saved twice.
    saved_states: list[tuple[int, int]] = field(default_factory=list)
    resumed_states: list[tuple[int, int]] = field(default_factory=list)
    # Samples (counted among the entries that sample) that a grammar limits. If there are any, no
    # entry samples before the masks of these are there: `PendingResult.sample`.
    masked: Sequence[int] = ()

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


class TokenLogprobs(msgspec.Struct, array_like=True):
    """The natural-log probabilities at a position, under the raw model distribution."""

    token_id: int
    logprob: float
    rank: int  # 1 = most likely
    top_ids: list[int]  # the k most likely, best first
    top_logprobs: list[float]
    total: float  # log of the sum of exp(logits): a log-probability plus it is the logit


@dataclass(slots=True)
class StepResult:
    """The result of a step.

    tokens: one id for each entry that samples, in batch order.
    logprobs: entry index -> the sampled token's; only entries whose request asked.
    prompt_logprobs: entry index -> one item for each prompt token predicted by this chunk, i.e. of
        the tokens at start + 1 .. min(start + length, num_prompt_tokens - 1), without the virtual
        ones and the first that is not.
    pooled: entry index -> what the chunk adds to its request's vector: the sum of the hidden states
        (mean pooling), or the one that is pooled, if it is in the chunk; [hidden_size] float32.
    errors: entry index -> why that entry alone has no valid token (e.g. "numerical_error").
    """

    step: int
    tokens: list[int]
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, list[TokenLogprobs]] = field(default_factory=dict)
    pooled: "Mapping[int, NDArray[np.float32]]" = field(default_factory=dict)
    errors: Mapping[int, str] = field(default_factory=dict)
