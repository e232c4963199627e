"""StepPrograms: steps of decodes on the CPU as programs of generated kernels, one for each number
of decodes, recorded when that number first comes (`kernels.cpu.codegen.program`)."""

import logging
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.models.decoder import Decoder
from engine.runner.caches.kv_cache import KVCache
from engine.runner.inputs import DeviceStep
from engine.runner.rows import RequestRows
from kernels.cpu.codegen.program import Buffers, NotRecordable, Program, can_record
from kernels.metadata import AttentionMeta

logger = logging.getLogger("manta.engine")

_MOST = 64  # decodes; in larger steps the kernels outweigh what they cost to launch
# Bytes of states that may be copied to learn whether steps of a model can be recorded.
_MOST_COPIED = 1 << 28


class StepPrograms:
    """Inputs lie here, at fixed addresses. `through` gives None for a step that is not recorded."""

    def __init__(self, model: Decoder, rows: RequestRows, kv: KVCache) -> None:
        self._model, self._kv = model, kv
        most = self._most = min(_MOST, rows.pad_row)
        groups = len(kv.groups.views) or rows.num_groups  # as `in_views`
        width = rows.block_table.shape[1] // rows.num_groups
        self._positions = torch.zeros(most, dtype=torch.int32)
        self._kv_len = torch.zeros(most, dtype=torch.int32)
        self._slots = torch.zeros(groups, most, dtype=torch.int64)
        self._tables = torch.zeros(groups, most, width, dtype=torch.int32)
        self._rows = torch.zeros(most, dtype=torch.int64)
        self._max_kv_len = width * kv.block_size
        self._arrays = (
            self._positions.numpy(),
            self._kv_len.numpy(),
            self._slots.numpy(),
            self._tables.numpy(),
            self._rows.numpy(),
        )
        self._residual = torch.empty(0)
        self._buffers = Buffers(most)
        self._programs: dict[int, Program] = {}
        self._able = can_record() and model.layer_inputs is None
        self._known = False  # whether it is: no step was recorded yet
        self._tried = model.group.size == 1

    def forget(self) -> None:
        """The KV cache has moved."""
        self._programs.clear()

    def through(self, step: DeviceStep, entered: Tensor | None = None) -> Tensor | None:
        """The model's layers over the step; None: they have to be computed as usual. entered: what
        the first of them sees; None: what `Decoder.enter` makes."""
        first = step.metas[0]
        count = step.token_ids.shape[0]
        if not self._able or first.num_decodes != count or count > self._most:
            return None
        if first.lora is not None:
            return None
        states = None if self._known else self._kv.states
        if states is not None and count * states.row_bytes > _MOST_COPIED:
            return None
        residual = self._enter(step, entered)
        program = self._programs.get(count)
        if not self._tried:
            # A rank that finds only in the middle of a step that it cannot would leave the others.
            self._tried = True
            kept = None if states is None else states.copied(self._rows[:count])
            self._able = self._model.group.all_can(lambda: self._can_record(step.metas, residual))
            if states is not None and kept is not None:
                states.put_back(self._rows[:count], kept)
            if not self._able:
                return None
            residual = self._enter(step, entered)
        if program is not None:
            out = program.play()
            self._model.group.check()
            return out
        # Keys are written again as they were; states that a part of a step has changed are not.
        kept = None if states is None else states.copied(self._rows[:count])
        try:
            program = self._record(step.metas, residual)
        except NotRecordable as error:
            logger.debug("steps are not recorded: %s", error)
            self._able = False
            if states is not None and kept is not None:
                states.put_back(self._rows[:count], kept)
            return None
        self._known = True
        self._programs[count] = program
        return program.out

    def _can_record(self, metas: Sequence[AttentionMeta], residual: Tensor) -> bool:
        try:
            self._record(metas, residual)
        except NotRecordable:
            return False
        return True

    def _enter(self, step: DeviceStep, entered: Tensor | None) -> Tensor:
        """The step's inputs, in their places."""
        count = step.token_ids.shape[0]
        positions, kv_len, slots, tables, rows = self._arrays
        first = step.metas[0]
        if first.rows is not None:
            rows[:count] = first.rows.numpy()
        positions[:count] = first.positions.numpy()
        kv_len[:count] = first.kv_len.numpy()
        for group, meta in enumerate(step.metas):
            slots[group, :count] = meta.slots.numpy()
            table: np.ndarray = meta.block_table.numpy()
            tables[group, :count, : table.shape[1]] = table
        if entered is None:
            entered = self._model.enter(step.token_ids, first.positions)
        if self._residual.shape[1:] != entered.shape[1:]:
            self._residual = entered.new_empty(self._most, entered.shape[1])
        return self._residual[:count].copy_(entered)

    def _record(self, metas: Sequence[AttentionMeta], residual: Tensor) -> Program:
        count = residual.shape[0]
        threads = torch.get_num_threads()
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
                )
            )
        layers = self._kv.layers
        return Program(
            lambda: self._model.through(residual, ours, layers), self._buffers, count, threads
        )
