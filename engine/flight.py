"""What the scheduler notes of a step: while it is made (Draft), while it is in flight (Flight), and
what waits for its end (Release)."""

from dataclasses import dataclass, field

from engine.batch import Batch
from engine.request import Request


@dataclass(slots=True)
class Flight:
    """A launched step. Lists are in batch order: entries that sample, then those that do not."""

    step: int
    requests: list[Request]  # [num_entries]
    starts: list[int]  # [num_entries]
    ids: list[int]  # [num_samples]
    token_lists: list[list[int]]  # [num_samples] where the tokens go
    firsts: list[int]  # entries that may bring their request's first delta
    closing: list[int]  # entries after which their request ends, whatever is sampled
    prompt_tokens: int = 0  # of its chunks
    some_ended: bool = False  # a request has ended since the launch


@dataclass(slots=True)
class Release:
    """A row and blocks to give back when `step` is done."""

    step: int
    row: int
    blocks: list[int]
    adapter_slot: int = -1


@dataclass(slots=True)
class Counters:
    """Since start."""

    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    finished: int = 0
    out_of_memory: int = 0


@dataclass(slots=True)
class Draft:
    """The step being made."""

    batch: Batch
    joined: list[Request] = field(default_factory=list)  # became members of the decode group
    sampling: list[tuple[Request, int]] = field(default_factory=list)  # chunks and their lengths
    silent: list[tuple[Request, int]] = field(default_factory=list)  # chunks that do not sample
    chunk_tokens: int = 0
    preempted: bool = False
    owed: int = 0  # of the blocks that will come back, how many somebody already waits for
