"""ParameterRows: the sampling parameters of each request row, packed into int32 words."""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import NewRow
from engine.sampling_params import LogprobsMode
from kernels.sampling import layout as word

# Bits of the operations that a row needs in addition to the argmax.
SAMPLED, FILTERED, BIASED, PENALISED, BANNED = 1, 2, 4, 8, 16

# Rows with lower temperatures are greedy, which avoids overflow: the smallest difference of two
# float32 logits, divided by the temperature, would exceed any noise.
MIN_TEMPERATURE = 1e-5


class ParameterRows:
    """The sampling parameters of all rows on the host and, on CUDA, their copy on the device.

    words: [num_rows, word.NUM_WORDS] int32 on the host; floats is the same memory as float32.
    device_words: the copy, as of the last `flush`; None on the CPU.
    processed: for each row, whether it reports processed log-probabilities (`logprobs_mode`).
    needs: for each row, the bits of the operations that it needs, such as SAMPLED. Rows start as
        greedy.
    """

    def __init__(
        self,
        num_rows: int,
        vocab_size: int,
        device: torch.device,
        logprobs_mode: LogprobsMode = "raw_logprobs",
    ) -> None:
        """Set up the rows. logprobs_mode: the default of requests without a `logprobs_mode`."""
        self._vocab_size = vocab_size
        self._logprobs_mode = logprobs_mode
        self._device = device
        self.words: NDArray[np.int32] = np.zeros((num_rows, word.NUM_WORDS), np.int32)
        self.floats: NDArray[np.float32] = self.words.view(np.float32)
        self.words[:, word.ROW] = np.arange(num_rows)
        self.words[:, word.LOGPROBS] = -1
        self.floats[:, [word.TOP_P, word.REPETITION]] = 1
        self.floats[:, word.LOG_MIN_P] = -math.inf
        self.needs = [0] * num_rows
        self.logprobs = [-1] * num_rows
        self.processed = [False] * num_rows
        self._changed: set[int] = set()
        self.device_words: Tensor | None = None
        if device.type == "cuda":
            self.device_words = torch.from_numpy(self.words).to(device)

    def set(self, new: NewRow) -> None:
        """Stage a row's parameters on the host."""
        params, row = new.params, new.row
        words, floats = self.words[row], self.floats[row]
        greedy = params.temperature < MIN_TEMPERATURE
        floats[word.INV_TEMPERATURE] = 0 if greedy else 1 / params.temperature
        words[word.TOP_K] = params.top_k if params.top_k < self._vocab_size else 0
        floats[word.TOP_P] = params.top_p
        floats[word.LOG_MIN_P] = math.log(params.min_p) if params.min_p > 0 else -math.inf
        floats[word.REPETITION] = params.repetition_penalty
        floats[word.PRESENCE] = params.presence_penalty
        floats[word.FREQUENCY] = params.frequency_penalty
        words[word.SEED : word.SEED + 2] = np.array([new.seed], np.int64).view(np.int32)
        words[word.CHOICE] = new.choice
        words[word.NUM_PROMPT] = new.num_prompt_tokens
        words[word.MIN_TOKENS] = params.min_tokens
        words[word.LOGPROBS] = -1 if params.logprobs is None else params.logprobs
        mode = params.logprobs_mode or self._logprobs_mode
        self.processed[row] = params.logprobs is not None and mode == "processed_logprobs"
        words[word.PROCESSED] = self.processed[row]

        # Token ids outside the vocabulary are ignored.
        vocab = self._vocab_size
        bias = {
            token: value
            for token, value in params.logit_bias.items()
            if value != 0 and token < vocab
        }
        assert len(bias) <= word.MAX_BIAS
        words[word.NUM_BIAS] = len(bias)
        words[word.BIAS_IDS : word.BIAS_IDS + len(bias)] = list(bias)
        floats[word.BIAS_VALUES : word.BIAS_VALUES + len(bias)] = list(bias.values())
        stops = sorted({token for token in new.stop_ids if token < vocab})
        stops = stops if params.min_tokens > 0 else []
        assert len(stops) <= word.MAX_STOP
        words[word.NUM_STOP] = len(stops)
        words[word.STOP_IDS : word.STOP_IDS + len(stops)] = stops

        filtered = words[word.TOP_K] > 0 or floats[word.TOP_P] < 1 or params.min_p > 0
        self.needs[row] = (
            (0 if greedy else SAMPLED)
            | (FILTERED if filtered and not greedy else 0)
            | (BIASED if bias else 0)
            | (PENALISED if params.has_penalties else 0)
            | (BANNED if stops else 0)
        )
        self.logprobs[row] = int(words[word.LOGPROBS])
        self._changed.add(row)

    def scale(self, row: int) -> float:
        """Return the factor of a row's logits in processed log-probabilities; 1 for a greedy
        row."""
        return float(self.floats[row, word.INV_TEMPERATURE]) or 1.0

    def flush(self) -> None:
        """Copy changed rows to the device, in one asynchronous copy if there are any."""
        if not self._changed:
            return
        changed = sorted(self._changed)
        self._changed.clear()
        if self.device_words is None:
            return
        width = (
            word.NUM_WORDS
            if any(self.needs[row] & (BIASED | BANNED) for row in changed)
            else word.NUM_SCALARS
        )
        # torch's caching allocator reuses the pinned block only after this copy is done.
        staged: Any = torch.from_numpy(self.words[changed, :width]).pin_memory()
        staged = staged.to(self._device, non_blocking=True)
        self.device_words[:, :width].index_copy_(0, staged[:, word.ROW].long(), staged)
