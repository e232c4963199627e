"""DeviceResult: the pending result of a launched step, whose tokens are copied to the host.

`DeviceResult.wait` waits for the device and returns the StepResult.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import StepResult, TokenLogprobs


@dataclass(slots=True)
class DeviceResult:
    """The pending result of a launched step. Call `wait` once, in launch order."""

    step: int
    # [num_samples] int64 on the host (pinned on CUDA); -1 = the row's logits were not finite
    tokens: Tensor
    # index of each sample's entry in the batch; None = sample i is entry i
    entries: Sequence[int] | None
    event: "torch.cuda.Event | None" = None
    logprobs: "HostLogprobs | None" = None
    prompt_logprobs: list[tuple[int, "HostLogprobs"]] = field(default_factory=list)
    # (entries, pooled hidden states [entries, hidden_size] float32)
    pooled: "tuple[list[int], Tensor] | None" = None
    # (entry, the experts of its tokens [length, num_layers, chosen])
    routes: list[tuple[int, Tensor]] = field(default_factory=list)
    drafts: Tensor | None = None  # new drafts [proposals, most] int64 on the host
    drafted: "torch.cuda.Event | None" = None  # event after the copy of the drafts to the host
    # Launches the sampling with the given masks; None = sampling was launched.
    unsampled: "Callable[[NDArray[np.int32]], None] | None" = None
    # Returns (seconds of finished encodes, seconds of waits for them); called once the step is
    # done.
    encode_seconds: Callable[[], tuple[float, float]] | None = None
    check: Callable[[], None] | None = None  # checks the step's all-reduces; raises RankFailed

    def sample(self, masks: NDArray[np.int32]) -> None:
        """Launch the sampling of a step that waits for masks; see `engine.scheduling.core`."""
        assert self.unsampled is not None, "nothing waits for masks"
        launch, self.unsampled = self.unsampled, None
        launch(masks)

    def conclude(self) -> None:
        """Do nothing, as the whole step is already launched."""

    def ready(self) -> bool:
        """Return whether the device has done the step, without waiting for it."""
        return self.unsampled is None and (self.event is None or self.event.query())

    def wait(self) -> StepResult:
        """Block until the step is done on the device and return its result.

        Raises RankFailed if an all-reduce failed.
        """
        if self.unsampled is not None:
            raise RuntimeError("the step was not sampled")
        if self.event is not None:
            self.event.synchronize()
        if self.check is not None:
            self.check()
        tokens: list[int] = self.tokens.tolist()
        result = StepResult(step=self.step, tokens=tokens)
        if self.encode_seconds is not None:
            result.encode_seconds, result.encode_wait = self.encode_seconds()
        if tokens and min(tokens) < 0:
            result.errors = {
                self._entry(i): "numerical_error: the model's logits are not finite"
                for i, token in enumerate(tokens)
                if token < 0
            }
        if self.drafts is not None:
            result.drafts = self._read_drafts
        if self.logprobs is not None:
            result.logprobs = {
                self._entry(i): item for i, item in self.logprobs.items(tokens) if item is not None
            }
        if self.prompt_logprobs:
            result.prompt_logprobs = {
                entry: [item for _, item in host.items() if item is not None]
                for entry, host in self.prompt_logprobs
            }
        if self.routes:
            result.routes = {entry: ids.numpy() for entry, ids in self.routes}
        if self.pooled is not None:
            entries, parts = self.pooled
            result.pooled = dict(zip(entries, parts.numpy(), strict=True))
            for entry, part in result.pooled.items():
                if not np.isfinite(part).all():
                    why = "numerical_error: the model's hidden states are not finite"
                    result.errors = {**result.errors, entry: why}
        return result

    def _read_drafts(self) -> NDArray[np.int64]:
        """Block until the drafts are computed, and return them, [proposals, most]."""
        assert self.drafts is not None
        if self.drafted is not None:
            self.drafted.synchronize()
        return self.drafts.numpy()

    def _entry(self, sample: int) -> int:
        return sample if self.entries is None else self.entries[sample]


@dataclass(slots=True)
class HostLogprobs:
    """Log-probabilities of n tokens that are being copied to the host."""

    token_ids: Tensor  # [n] int64
    logprob: Tensor  # [n] float32
    rank: Tensor  # [n] int64
    top_ids: Tensor  # [n, k] int64
    top_logprobs: Tensor  # [n, k] float32
    total: Tensor  # [n] float32
    # [n] number of alternatives to report for each token; -1 = no log-probabilities
    counts: list[int]

    def items(self, tokens: list[int] | None = None) -> list[tuple[int, TokenLogprobs | None]]:
        ids = tokens if tokens is not None else self.token_ids.tolist()
        logprob, rank = self.logprob.tolist(), self.rank.tolist()
        top_ids, top_logprobs = self.top_ids.tolist(), self.top_logprobs.tolist()
        total = self.total.tolist()
        return [
            (
                i,
                None
                if count < 0
                else TokenLogprobs(
                    ids[i],
                    logprob[i],
                    int(rank[i]),
                    top_ids[i][:count],
                    top_logprobs[i][:count],
                    total[i],
                ),
            )
            for i, count in enumerate(self.counts)
        ]
