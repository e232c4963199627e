"""StepPrograms: steps of decodes on the CPU, recorded as programs of generated kernels.

There is a program for each number of decodes, recorded at its first step
(`kernels.cpu.codegen.program`). A program has the model's layers and, where possible, the
embedding, the last norm and the head, whose launches take as long as a few layers of a small model.
"""

import logging
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.models.decoder import Decoder
from engine.runner.caches.kv_cache import KVCache
from engine.runner.request_rows import RequestRows
from kernels.cpu.codegen.program import Buffers, NotRecordable, Program, can_record
from kernels.metadata import AttentionMeta, RotaryPlaces

logger = logging.getLogger("manta.engine")

# maximum number of decodes; in larger steps launch overhead is small compared with the kernels
_MOST = 64
# The maximum number of bytes of states that are copied while trying whether steps can be recorded.
_MOST_COPIED = 1 << 28


class StepPrograms:
    """The recorded programs of a decoder, which read their inputs at fixed addresses."""

    def __init__(
        self, model: Decoder, rows: RequestRows, kv: KVCache, *, leaves: bool = True
    ) -> None:
        """Set up the programs.

        leaves: whether programs may end with logits, instead of the last layer's output.
        """
        self._model, self._kv = model, kv
        most = self._most = min(_MOST, rows.pad_row)
        # number of AttentionMetas, as in `in_views`
        groups = len(kv.groups.views) or rows.num_groups
        width = rows.block_table.shape[1] // rows.num_groups
        self._positions = torch.zeros(most, dtype=torch.int32)
        self._kv_len = torch.zeros(most, dtype=torch.int32)
        self._slots = torch.zeros(groups, most, dtype=torch.int64)
        self._tables = torch.zeros(groups, most, width, dtype=torch.int32)
        self._rows = torch.zeros(most, dtype=torch.int64)
        self._ids = torch.zeros(most, dtype=torch.int64)
        self._rotary_rows = None if rows.deltas is None else torch.zeros_like(self._positions)
        self._max_kv_len = width * kv.block_size
        self._arrays = (
            self._positions.numpy(),
            self._kv_len.numpy(),
            self._slots.numpy(),
            self._tables.numpy(),
            self._rows.numpy(),
            self._ids.numpy(),
        )
        self._residual = torch.empty(0)
        self._buffers = Buffers(most)
        self._programs: dict[int, Program] = {}
        self._able = can_record() and model.layer_inputs is None
        self._known = False  # whether a step was recorded, so that `_able` is final
        # Whether programs begin with the embedding and end with logits; final once `_known`. With
        # several ranks or stages they do neither.
        self._enters = model.group.size == model.stage.count == 1
        self._leaves = leaves and self._enters
        self._tried = model.group.size == 1

    def forget(self) -> None:
        """Drop all programs, because the KV cache has moved."""
        self._programs.clear()

    @property
    def gives_logits(self) -> bool:
        """Whether `through` returns the logits of the step's tokens, valid until its next call."""
        return self._leaves

    def through(
        self, token_ids: Tensor, metas: Sequence[AttentionMeta], entered: Tensor | None = None
    ) -> Tensor | None:
        """Run a step's program: the model's layers, or with `gives_logits` the whole model.

        metas: the meta of each view.
        entered: the input of the first layer; None = the output of `Decoder.enter`.
        Returns None for a step without a program, which must be computed by the model's usual code.
        """
        first = metas[0]
        count = token_ids.shape[0]
        if not self._able or first.num_decodes != count or count > self._most:
            return None
        if first.lora is not None:
            return None
        states = None if self._known else self._kv.states
        if states is not None and count * states.row_bytes > _MOST_COPIED:
            return None
        residual = self._enter(token_ids, metas, entered)
        program = self._programs.get(count)
        if not self._tried:
            # A rank that fails to record in the middle of a step would leave the others waiting, so
            # all ranks try first.
            self._tried = True
            states_before = None if states is None else states.copied(self._rows[:count])
            self._able = self._model.group.all_can(
                lambda: _recordable(lambda: self._record(metas, residual))
            )
            if states is not None and states_before is not None:
                states.put_back(self._rows[:count], states_before)
            if not self._able:
                return None
            residual = self._enter(token_ids, metas, entered)
        if program is not None:
            out = program.play()
            self._model.group.check()
            return out
        # The step runs twice: KV is written again with the same values, but recurrent states must
        # be restored.
        states_before = None if states is None else states.copied(self._rows[:count])
        try:
            program = self._record(metas, residual)
        except NotRecordable as error:
            logger.debug("steps are not recorded: %s", error)
            self._able = False
            if states is not None and states_before is not None:
                states.put_back(self._rows[:count], states_before)
            return None
        self._known = True
        self._programs[count] = program
        return program.out

    def _enter(
        self, token_ids: Tensor, metas: Sequence[AttentionMeta], entered: Tensor | None
    ) -> Tensor:
        """Copy the step's inputs to their fixed addresses; return the first layer's input.

        entered: see `through`.
        """
        count = token_ids.shape[0]
        positions, kv_len, slots, tables, rows, ids = self._arrays
        first = metas[0]
        if first.rows is not None:
            rows[:count] = first.rows.numpy()
        positions[:count] = first.positions.numpy()
        if self._rotary_rows is not None and first.rotary is not None:
            self._rotary_rows[:count] = first.rotary.rows
        kv_len[:count] = first.kv_len.numpy()
        for group, meta in enumerate(metas):
            slots[group, :count] = meta.slots.numpy()
            table: np.ndarray = meta.block_table.numpy()
            tables[group, :count, : table.shape[1]] = table
        if self._known and self._enters:
            ids[:count] = token_ids.numpy()
            return self._residual[:count]
        if entered is None:
            ids[:count] = token_ids.numpy()
            entered = self._model.enter(self._ids[:count], first.positions)
        if self._residual.shape[1:] != entered.shape[1:]:
            self._residual = entered.new_empty(self._most, entered.shape[1])
        return self._residual[:count].copy_(entered)

    def _record(self, metas: Sequence[AttentionMeta], residual: Tensor) -> Program:
        count = residual.shape[0]
        threads = torch.get_num_threads()
        rotary = None
        if self._rotary_rows is not None:
            rotary = RotaryPlaces(self._rotary_rows[:count])
        ours = []
        for group, meta in enumerate(metas):
            ours.append(
                AttentionMeta(
                    positions=self._positions[:count],
                    slots=self._slots[group, :count],
                    query_start=torch.arange(count + 1, dtype=torch.int32),
                    kv_len=self._kv_len[:count],
                    block_table=self._tables[group, :count],
                    num_decodes=count,
                    max_kv_len=self._max_kv_len,
                    query_start_host=list(range(count + 1)),
                    kv_len_host=meta.kv_len_host,
                    window=meta.window,
                    chunk=meta.chunk,
                    rows=self._rows[:count],
                    rotary=rotary,
                )
            )
        model, layers = self._model, self._kv.layers
        ids, positions = self._ids[:count], self._positions[:count]

        def record(body: Callable[[], Tensor]) -> Program:
            return Program(body, self._buffers, count, threads)

        def enter() -> Tensor:
            return model.enter(ids, positions) if self._enters else residual

        def leave(out: Tensor) -> Tensor:
            return model.logits(model.leave(out)) if self._leaves else out

        if not self._known:  # trial recordings, whose programs are discarded
            self._enters = self._enters and _recordable(lambda: record(enter))
            self._leaves = self._leaves and _recordable(lambda: record(lambda: leave(residual)))
        return record(lambda: leave(model.through(enter(), ours, layers)))


def _recordable(record: Callable[[], object]) -> bool:
    try:
        record()
    except NotRecordable:
        return False
    return True
