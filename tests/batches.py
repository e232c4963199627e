"""RandomSteps, which makes random batches like the scheduler's, and Layout, the expected inputs of
the step that runs such a batch."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.batch import Batch, NewRow
from engine.config.vision import VisionConfig
from engine.sampling_params import SamplingParams

MAX_LEN, BLOCK_SIZE = 50, 4


def new_row(
    row: int, token_ids: Sequence[int], params: SamplingParams | None = None, seed: int = 0
) -> NewRow:
    """Return the NewRow of a request whose tokens are all prompt tokens."""
    params = params or SamplingParams(temperature=0.0)
    return NewRow(row, token_ids, len(token_ids), params, seed, 0, ())


def tower_config(image_token_id: int, out_size: int, **fields: Any) -> VisionConfig:
    """Return a vision encoder's configuration that has only the fields that a step reads."""
    sizes = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "patch_size")
    return VisionConfig(
        family="",
        image_token_id=image_token_id,
        names=(),
        **dict.fromkeys(sizes, 1),
        out_size=out_size,
        activation="gelu",
        norm_eps=1e-6,
        mean=(0.5, 0.5, 0.5),
        deviation=(0.5, 0.5, 0.5),
        **fields,
    )


@dataclass
class Layout:
    """The expected inputs of a step, in lists by token or by row of the batch."""

    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[list[int]] = field(default_factory=list)  # for each KV group
    query_start: list[int] = field(default_factory=lambda: [0])
    kv_len: list[int] = field(default_factory=list)
    # for each KV group: each entry's blocks
    tables: list[list[list[int]]] = field(default_factory=list)
    last: list[int] = field(default_factory=list)  # index of each sampling entry's last token
    sample_rows: list[int] = field(default_factory=list)
    sample_positions: list[int] = field(default_factory=list)


class RandomSteps:
    """A generator of random steps, in which requests with random rows and blocks arrive, compute
    chunks, decode and end."""

    def __init__(self, num_rows: int, seed: int, groups: int = 1) -> None:
        self._groups = groups
        self._random = random.Random(seed)
        self._num_rows = num_rows
        self._tokens: dict[int, list[int]] = {}  # by row
        self._blocks: dict[int, list[int]] = {}
        self._computed: dict[int, int] = {}
        self._step = 0

    def next(self, decodes_only: bool = False) -> tuple[Batch, Layout]:
        """Return a random step of one to num_rows entries, and its expected layout.

        Call `sampled` before the next call: each row that sampled has a token more then.
        """
        rng = self._random
        self._step += 1
        batch = Batch(self._step)
        decodes, chunks = [], []
        for row in rng.sample(range(self._num_rows), rng.randint(1, self._num_rows)):
            if self._left(row) < 1 or rng.random() < 0.2:
                self._add_request(row, batch, 1 if decodes_only else rng.randint(1, MAX_LEN - 1))
            left = self._left(row)
            length = 1 if decodes_only else rng.randint(1, left)
            (decodes if left == length == 1 else chunks).append((row, length, left == length))
        if decodes_only:
            decodes = [(row, 1, True) for row, _, _ in decodes + chunks]
            chunks = []
        layout = Layout()
        for _ in range(self._groups):
            layout.slots.append([])
            layout.tables.append([])
        for row, length, samples in decodes + chunks:
            self._enter(row, length, samples, batch, layout)
        batch.num_decodes = len(decodes)
        return batch, layout

    def sampled(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Add the tokens that the last step sampled to the texts of their rows."""
        for row, token in zip(rows, tokens, strict=True):
            self._tokens[row].append(token)

    def _left(self, row: int) -> int:
        tokens = self._tokens.get(row, ())
        return len(tokens) - self._computed[row] if 0 < len(tokens) < MAX_LEN else 0

    def _add_request(self, row: int, batch: Batch, length: int) -> None:
        self._tokens[row] = [self._random.randrange(1000) for _ in range(length)]
        self._blocks[row], self._computed[row] = [], 0
        batch.new_rows.append(new_row(row, list(self._tokens[row])))

    def _enter(self, row: int, length: int, samples: bool, batch: Batch, layout: Layout) -> None:
        start, blocks = self._computed[row], self._blocks[row]
        end = self._computed[row] = start + length
        while len(blocks) // self._groups * BLOCK_SIZE < end or len(blocks) % self._groups:
            block = self._random.randrange(10**6)
            batch.new_blocks.append((row, len(blocks), block))
            blocks.append(block)
        batch.rows.append(row)
        batch.starts.append(start)
        batch.lengths.append(length)
        batch.samples.append(samples)
        for position in range(start, end):
            layout.token_ids.append(self._tokens[row][position])
            layout.positions.append(position)
            for group, slots in enumerate(layout.slots):
                block = blocks[position // BLOCK_SIZE * self._groups + group]
                slots.append(block * BLOCK_SIZE + position % BLOCK_SIZE)
        layout.query_start.append(len(layout.token_ids))
        layout.kv_len.append(end)
        for group, tables in enumerate(layout.tables):
            tables.append(blocks[group :: self._groups])
        if samples:
            layout.last.append(len(layout.token_ids) - 1)
            layout.sample_rows.append(row)
            layout.sample_positions.append(end)
