"""Deterministic mode: the largest difference of log-probabilities from a Scorer's, and the loss of
throughput.
"""

import random
import time
from contextlib import ExitStack
from typing import Any

from bench.report.result_file import Line
from engine import LLM, SamplingParams, Scorer


def prompts(count: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, vocab) for _ in range(length)] for _ in range(count)]


def mismatch(
    folder: str, fields: dict[str, Any], requests: int, tokens: int, seconds: float
) -> list[Line]:
    """Return a line with max |rollout - scorer| for raw and for processed log-probabilities.

    requests: number of rollouts of each kind; as many are scored as `seconds` allow.
    tokens: number of tokens of a rollout, and of its prompt.
    """
    began = time.perf_counter()
    lines: list[Line] = []
    own = {
        key: value for key, value in fields.items() if key not in ("max_num_seqs", "kv_cache_bytes")
    }
    with LLM(folder, **fields, deterministic=True) as llm:
        scorer = Scorer(folder, **own)
        for number, mode in enumerate(("raw_logprobs", "processed_logprobs")):
            params = SamplingParams(
                max_tokens=tokens, ignore_eos=True, logprobs=0, logprobs_mode=mode,
                temperature=0.8, top_p=0.95, seed=number,
            )  # fmt: skip
            asked = prompts(requests, tokens, llm.ready.vocab_size, number)
            answers = llm.generate(asked, params, detokenize=False, progress=False)
            largest, scored = 0.0, 0
            for answer in answers:
                if time.perf_counter() - began > seconds and scored:
                    break
                choice = answer.outputs[0]
                scores = scorer.logprobs(answer.prompt_token_ids, choice.token_ids, params)
                assert choice.logprobs is not None
                for ours, theirs in zip(scores.tolist(), choice.logprobs, strict=True):
                    largest = max(largest, abs(ours - theirs.logprob))
                scored += len(choice.token_ids)
            lines.append({"logprobs": mode, "largest": largest, "tokens": scored})
    return lines


def throughput(
    folder: str, fields: dict[str, Any], requests: int, tokens: int, rounds: int, seconds: float
) -> list[Line]:
    """Return a line for each round of each mode, in turns, with output tokens/s of a full batch."""
    began = time.perf_counter()
    lines: list[Line] = []
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    with ExitStack() as stack:
        sides = {
            side: stack.enter_context(LLM(folder, **fields, deterministic=side == "deterministic"))
            for side in ("default", "deterministic")
        }
        for number in range(-1, rounds):  # -1 warms up
            if number > 0 and time.perf_counter() - began > seconds:
                break
            for side, llm in sides.items():
                asked = prompts(requests, tokens, llm.ready.vocab_size, number)
                start = time.perf_counter()
                llm.generate(asked, params, detokenize=False, progress=False)
                rate = requests * tokens / (time.perf_counter() - start)
                if number >= 0:
                    lines.append({"side": side, "tok_s": round(rate, 1)})
    return lines
