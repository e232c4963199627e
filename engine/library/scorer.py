"""Scorer: a model's forward pass in the caller's process, with the kernels of a deterministic
engine."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from engine.batch import Batch, NewRow
from engine.config.engine_config import EngineConfig
from engine.config.kv_groups import kv_groups
from engine.errors import ConfigError, InvalidRequest, UpdateFailed, context_too_long
from engine.factory import build_alone
from engine.library.llm import make_config
from engine.library.prompts import as_list
from engine.resolve import resolve
from engine.sampling_params import SamplingParams
from engine.speculation.settings import read_speculation
from engine.weights.staging import checkpoint_bytes, stage

_OWN = {"deterministic": True, "max_num_seqs": 1, "async_scheduling": False}
_ROW = 0


class Scorer:
    """The logits and log-probabilities of token ids, computed in this process. Not thread-safe.

    In deterministic mode the results equal those of an engine's answers bit for bit, if weights,
    kind of device, dtype and `num_threads` are the same. A trainer can score an engine's rollouts.

    model: a folder with config.json and safetensors.
    fields: fields of `EngineConfig`; deterministic is on by default.
    Raises ConfigError for unsupported settings, such as several ranks, adapters or speculation.
    """

    def __init__(self, model: str | Path, **fields: Any) -> None:
        config = make_config(str(model), {**_OWN, **fields})
        _check(config)
        threads = torch.get_num_threads()
        resolved = resolve(config)
        self._num_groups = len(kv_groups(resolved.model).groups)
        self._blocks = -(-resolved.max_model_len // config.block_size)
        if not config.num_blocks:
            blocks = max(1, self._blocks * self._num_groups)
            config = msgspec.structs.replace(config, num_blocks=blocks)
        self._resolved, self._runner, self._refill = build_alone(config)
        # The order of additions in torch's matmuls depends on the number of threads.
        self._threads = torch.get_num_threads()
        torch.set_num_threads(threads)
        self._step = 0

    @torch.inference_mode()
    def forward(self, token_ids: Sequence[int] | Tensor) -> Tensor:
        """Return the raw logits after each of token_ids, [n, vocab_size] float32 on the model's
        device.

        token_ids: [n >= 1].
        Raises InvalidRequest for ids outside the vocabulary, or for more ids than the context
        length.
        """
        ids = self._checked(token_ids)
        with self._own_threads():
            row = NewRow(_ROW, ids, len(ids), SamplingParams(), 0, 0, ())
            return torch.cat([logits.float() for logits, _ in self._logits(row, 0)])

    @torch.inference_mode()
    def logprobs(
        self,
        prompt_token_ids: Sequence[int] | Tensor,
        token_ids: Sequence[int] | Tensor,
        params: SamplingParams | None = None,
    ) -> Tensor:
        """Return the log-probability of each token of an answer, [len(token_ids)] float32.

        An engine with the scorer's fields reports the same values for an answer with these params.
        `params.logprobs_mode`, or else the field `logprobs_mode`, decides whether log-probabilities
        are raw or processed.

        prompt_token_ids: [m >= 1].
        token_ids: [n], the answer.
        Raises InvalidRequest, also for params with lists of allowed or bad tokens, or a grammar.
        """
        params = SamplingParams() if params is None else params
        prompt, answer = self._checked(prompt_token_ids), as_list(token_ids)
        ids = self._checked([*prompt, *answer])
        if params.structured is not None or params.allowed_token_ids or params.bad_words_ids:
            raise InvalidRequest(
                "a scorer knows no grammars and no lists of allowed or bad tokens: score without "
                "them, or take the log-probabilities of the engine's answer",
                param="structured",
            )
        params = msgspec.structs.replace(params, logprobs=0, n=1)
        ends = () if params.ignore_eos else self._resolved.model.eos_token_ids
        stops = sorted({*ends, *params.stop_token_ids})
        row = NewRow(_ROW, ids, len(prompt), params, 0, 0, stops)
        sampling, scores = self._runner.sampling, []
        with self._own_threads():
            for logits, first in self._logits(row, len(prompt) - 1):
                # Without the last row, which predicts the token after the answer.
                count = min(len(logits), len(ids) - 1 - first)
                if count <= 0:
                    continue
                positions = torch.arange(first + 1, first + 1 + count, device=logits.device)
                targets = torch.tensor(ids[first + 1 : first + 1 + count], device=logits.device)
                rows = torch.full_like(positions, _ROW)
                sampler, tokens = sampling.sampler, self._runner.rows.tokens
                plan = sampler.plan([_ROW])
                sampled = sampler.sample(
                    logits[:count], rows, positions, tokens, plan, targets=targets
                )
                assert sampled.logprob is not None
                scores.append(sampled.logprob)
        return torch.cat(scores) if scores else torch.empty(0)

    def update_weights(self, source: str | Path | Iterable[tuple[str, Tensor]]) -> None:
        """Replace the weights by a checkpoint of the same model.

        source: a folder of safetensors, or (name, tensor) pairs of the whole checkpoint, on any
            device.
        Raises UpdateFailed, after which the old weights stay in use.
        """
        if isinstance(source, Mapping):
            raise UpdateFailed(
                "source: a folder, or pairs such as those of state_dict().items()", param="source"
            )
        staged = None
        try:
            if isinstance(source, (str, Path)):
                folder = str(source)
            else:
                staged = stage(source, checkpoint_bytes(self._resolved.config.model))
                folder = str(staged.folder)
            with self._own_threads():
                self._refill.check(folder)
                self._refill.load(folder)
        except ConfigError as error:
            raise UpdateFailed(error.message, param=error.param) from error
        finally:
            if staged is not None:
                staged.discard()

    def _checked(self, token_ids: Sequence[int] | Tensor) -> list[int]:
        ids = list(as_list(token_ids))
        limit, vocab = self._resolved.max_model_len, self._resolved.model.vocab_size
        if len(ids) > limit:
            raise context_too_long(limit, len(ids), None, param="token_ids")
        if not ids or not all(0 <= token < vocab for token in ids):
            raise InvalidRequest(
                f"token_ids: one id or more, each below {vocab}", param="token_ids"
            )
        return ids

    @contextmanager
    def _own_threads(self) -> Iterator[None]:
        threads = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            yield
        finally:
            torch.set_num_threads(threads)

    def _logits(self, row: NewRow, first: int) -> Iterator[tuple[Tensor, int]]:
        """Yield (logits [at most 64, vocab_size], their first position), from position `first`
        on."""
        runner, ids = self._runner, row.token_ids
        runner.sampling.set_row(row)
        runner.forward.set_row(row)
        needed = -(-len(ids) // self._resolved.config.block_size) * self._num_groups
        blocks = [(_ROW, index, index) for index in range(needed)]
        budget = self._resolved.max_num_batched_tokens
        for start in range(0, len(ids), budget):
            length = min(budget, len(ids) - start)
            begins = start == 0
            batch = Batch(
                self._step,
                [_ROW],
                [start],
                [length],
                [False],
                new_rows=[row] if begins else [],
                new_blocks=blocks if begins else [],
            )
            self._step += 1
            states = runner.eager.launch(batch).states
            skip = max(0, first - start)
            for offset in range(skip, length, 64):
                yield runner.model.logits(states[offset : offset + 64]), start + offset


def _check(config: EngineConfig) -> None:
    """Raise ConfigError for settings that a scorer does not support."""
    refused = {
        "tensor_parallel": config.tensor_parallel > 1,
        "pipeline_parallel": config.pipeline_parallel > 1,
        "max_loras": config.max_loras > 0,
        "speculation": read_speculation(config.speculation) is not None,
        "max_num_seqs": config.max_num_seqs != 1,
    }
    for name in (name for name, wrong in refused.items() if wrong):
        raise ConfigError(
            f"{name}: a scorer runs one text on one rank, without adapters and drafts; "
            "leave it out",
            param=name,
        )
