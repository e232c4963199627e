"""Batch and StepResult: the data that scheduler and model runner exchange. No torch here.

The device keeps one row for each running request (see runner/request_rows.py): its tokens so far,
its block table and its sampling parameters. A batch is a list of entries, each with a row number
and the tokens to compute. A row's tokens are uploaded once, when a request gets the row. After that
the sampler writes each sampled token into the row on the device. So batch n + 1 can be launched
before the host knows the tokens of batch n:

  entry e computes tokens[row, start : start + length]
  and, if it samples, writes tokens[row, start + length]

With drafts a row has several decodes in a batch, at consecutive positions. Each layer writes the KV
of all tokens of the step before any is read, and a decode reads the KV up to its position. So the
decode at a draft samples the row's next token on condition that the draft equals the sample of the
decode before it:

  drafts       tokens[row, start + 1 : start + 1 + k] = d1 .. dk
  decodes      at start .. start + k, which sample y0 .. yk
  accepted     d1 .. da, where d1 = y0, d2 = y1, ...; the text continues with y0 .. ya, which the
               sampler has written over the drafts

If a model computes drafts, batch n + 1 can be launched before the host knows a. Its starts are then
those after a = 0, and the device adds each row's a (`Batch.unsettled`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from engine.images.image import Image
from engine.sampling_params import SamplingParams

if TYPE_CHECKING:  # routers and the command line import this module without NumPy
    import numpy as np
    from numpy.typing import NDArray


class OutOfMemory(Exception):
    """The error of a step for which the device had no free memory. The device remains usable."""


@dataclass(slots=True)
class NewRow:
    """The data of a device row, sent when a request starts or restarts after a preemption."""

    row: int
    token_ids: list[int]  # prompt and known output; a copy that is not changed
    num_prompt_tokens: int  # index in token_ids where the output begins
    params: SamplingParams
    seed: int  # int64; never None
    choice: int  # index among the request's n choices, part of the random counter
    # End tokens that min_tokens bans: the model's (unless ignore_eos) and the caller's. Empty where
    # a grammar decides, because its masks respect min_tokens.
    stop_ids: Sequence[int]
    lora_slot: int = -1  # device slot of its LoRA adapter; -1 = none
    virtual_slot: int = -1  # device slot of its virtual tokens; -1 = none
    num_virtual: int = 0  # number of leading token_ids that are placeholders of virtual tokens
    kv_rank: int = 0  # the rank that keeps its keys and values, with data-parallel attention
    images: Sequence[Image] = ()  # all images of the request, for rotary positions and spans


@dataclass(slots=True)
class PrefixCopy:
    """A copy of the KV of an adapter slot's virtual tokens [start, stop) into KV blocks.

    The first copied token goes to the beginning of the first block.
    """

    slot: int
    start: int
    stop: int
    blocks: Sequence[int]
    kv_rank: int = 0  # the rank that has these blocks, as in NewRow


# Indices of the lines of `Batch.proposals`, which are its first axis
ROW, POSITION, ENTRY, FIRST_DRAFT, COUNT, VERIFIED, SYNTHETIC = range(7)


@dataclass(slots=True)
class Batch:
    """A step's work: first entries that decode one token and sample, then chunks of any length."""

    step: int
    # [num_entries]; only decodes may have the same row
    rows: list[int] = field(default_factory=list)
    # [num_entries] number of the row's tokens whose KV is already computed; see `unsettled`
    starts: list[int] = field(default_factory=list)
    # [num_entries] number of tokens to compute, >= 1
    lengths: list[int] = field(default_factory=list)
    # [num_entries] whether the entry reaches its row's last token, and samples the next
    samples: list[bool] = field(default_factory=list)
    num_decodes: int = 0  # number of leading entries with length 1 and samples True
    new_rows: list[NewRow] = field(default_factory=list)  # applied before anything else
    # (row, index in its block table, entry of the table as in block_manager.py)
    new_blocks: list[tuple[int, int, int]] = field(default_factory=list)
    # (row, position of the first id, draft ids) to write into rows before anything reads them. A
    # draft model's drafts are in the rows already; all their ids are ON_DEVICE.
    drafts: list[tuple[int, int, list[int]]] = field(default_factory=list)
    # > 0: the batch was scheduled before the host knew how many drafts the last step accepted, at
    # most this number of a row. The device adds each row's number to all positions of the row.
    unsettled: int = 0
    # Rows for which drafts are computed after sampling, then the other rows with drafts of a model,
    # whose accepted drafts the device counts: [7, rows] int64, a column each. Lines:
    #   ROW, POSITION   the row, and the position of the last token that its entry computes
    #   ENTRY           index of the row's entry that samples: its decode or its chunk
    #   FIRST_DRAFT     index of the entry of the row's first draft; has no meaning without drafts
    #   COUNT           new drafts, 0 if drafts are only counted; the row has blocks for as many
    #                   further tokens
    #   VERIFIED        the row's drafts in this step; new drafts follow the accepted ones of these
    #   SYNTHETIC       how many of these count as accepted, whatever was sampled; -1 = those that
    #                   equal the samples
    proposals: "NDArray[np.int64] | None" = None
    # whether drafting is paused, so that the drafter need not process this step's tokens
    dormant: bool = False
    prefixes: list[PrefixCopy] = field(default_factory=list)  # copied before anything reads them
    # (row, n): the last step verified drafts of the row, and the first n of its decode and draft
    # tokens are accepted. Recurrent states are advanced by these before anything reads them. Rows
    # of that step that are not listed have ended.
    settled: list[tuple[int, int]] = field(default_factory=list)
    # (row, slot) of recurrent states after the previous step. First those of saved_states are
    # copied from rows to snapshots, then those of resumed_states from snapshots to rows, each in
    # order. A slot is an unused row, or lies after all rows and the padding row. No slot is saved
    # to twice.
    saved_states: list[tuple[int, int]] = field(default_factory=list)
    resumed_states: list[tuple[int, int]] = field(default_factory=list)
    # Indices, among the sampling entries, of those that a grammar constrains. If there are any, no
    # entry samples before `PendingResult.sample` is called with their masks.
    masked: Sequence[int] = ()
    # images to encode in this step, before an entry reads their embeddings
    images: list[Image] = field(default_factory=list)
    # images to encode in parallel to this step, for entries of later steps
    ahead_images: list[Image] = field(default_factory=list)
    # digests of images whose embeddings are freed before any image is encoded
    dropped_images: list[bytes] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Natural-log probabilities at one position, in the request's `logprobs_mode`."""

    token_id: int
    logprob: float
    rank: int  # 1 = most likely
    top_ids: list[int]  # the k most likely, best first
    top_logprobs: list[float]
    # log-sum-exp of the logits; adding it to a log-probability gives the logit
    total: float


@dataclass(slots=True)
class StepResult:
    """The result of a step.

    tokens: one id for each entry that samples, in batch order.
    logprobs: entry index -> log-probability of its sampled token, where the request asked for it.
    prompt_logprobs: entry index -> one item for each prompt token that this chunk predicts, i.e.
        the tokens start + 1 .. min(start + length, num_prompt_tokens - 1), except virtual tokens
        and the first token after them.
    pooled: entry index -> the chunk's part of its request's embedding, [hidden_size] float32: the
        sum of hidden states (mean pooling), or the pooled hidden state if it is in this chunk.
    routes: entry index -> the experts of each of the chunk's tokens, [length, num_layers, chosen],
        where the request asked for them.
    errors: entry index -> why the entry has no valid token, e.g. "numerical_error".
    drafts: a function that waits for the drafts that `Batch.proposals` orders and returns them,
        [columns of proposals, most draft tokens]; elements from a column's COUNT on are undefined.
        Drafts are ready before the next step's samples. Not called if no column has a COUNT.
    encode_seconds: the seconds of image encodes that ended since the last result.
    encode_wait: the part of encode_seconds for which steps waited.
    """

    step: int
    tokens: list[int]
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, list[TokenLogprobs]] = field(default_factory=dict)
    pooled: "Mapping[int, NDArray[np.float32]]" = field(default_factory=dict)
    routes: "Mapping[int, NDArray[np.integer]]" = field(default_factory=dict)
    errors: Mapping[int, str] = field(default_factory=dict)
    drafts: "Callable[[], NDArray[np.int64] | Sequence[Sequence[int]]]" = tuple
    encode_seconds: float = 0.0
    encode_wait: float = 0.0
