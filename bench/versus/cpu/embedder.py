"""Another project's embedder, as a peer of `bench.embeddings`.

This file runs under the Python of that project's environment, and imports nothing from Manta.

    VENV/bin/python bench/versus/cpu/embedder.py sentence-transformers|vllm FOLDER --dtype float32

It reads JSON lines from stdin, {"texts": [[ids]], "vectors": FILE}. For each line it computes the
vectors, saves them to FILE (.npy, [texts, elements] float32) and prints `RESULT {"seconds":
wall-clock, "cpu": CPU seconds of this process and its children}`. Both embedders get token ids, so
tokenizer time is excluded. sentence-transformers' modules get the ids sorted and padded as by its
`encode`.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Embed = Callable[[list[list[int]]], Any]
BATCH = 32  # sentence-transformers' default


def sentence_transformers(folder: str, dtype: str) -> Embed:
    import numpy as np
    import torch
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(folder, device="cpu", model_kwargs={"dtype": dtype})

    def embed(texts: list[list[int]]) -> Any:
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        results: list[Any] = [None] * len(texts)
        for first in range(0, len(order), BATCH):
            batch = order[first : first + BATCH]
            width = len(texts[batch[0]])
            ids = [texts[i] + [0] * (width - len(texts[i])) for i in batch]
            mask = [[1] * len(texts[i]) + [0] * (width - len(texts[i])) for i in batch]
            with torch.inference_mode():
                asked = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
                vectors = model(asked)["sentence_embedding"]
            for i, vector in zip(batch, vectors.float().numpy(), strict=True):
                results[i] = vector
        return np.stack(results)

    return embed


def vllm(folder: str, dtype: str) -> Embed:
    import numpy as np

    cores = sorted(os.sched_getaffinity(0))
    threads = int(os.environ.get("OMP_NUM_THREADS", len(cores)))
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores[:threads])))
    from vllm import LLM

    # No prefix cache: a decoder would reuse the texts of the previous round.
    model = LLM(
        folder,
        runner="pooling",
        dtype=dtype,
        enable_prefix_caching=False,
        disable_log_stats=True,
        max_model_len=512,
    )

    def embed(texts: list[list[int]]) -> Any:
        prompts = [{"prompt_token_ids": ids} for ids in texts]
        outputs = model.embed(prompts, use_tqdm=False)
        return np.array([output.outputs.embedding for output in outputs], np.float32)

    return embed


PEERS = {"sentence-transformers": sentence_transformers, "vllm": vllm}


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and all its live descendants."""
    below: dict[int, list[int]] = {}
    used: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # the process has just ended
                continue
            below.setdefault(int(fields[1]), []).append(int(entry.name))
            used[int(entry.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    total, pids = 0.0, [os.getpid()]
    while pids:
        pid = pids.pop()
        total += used.get(pid, 0.0)
        pids += below.get(pid, [])
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("folder")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    embed = PEERS[args.peer](args.folder, args.dtype)
    import numpy as np

    for line in sys.stdin:
        asked = json.loads(line)
        begin, cpu = time.perf_counter(), cpu_seconds()
        vectors = embed(asked["texts"])
        spent = {"seconds": time.perf_counter() - begin, "cpu": cpu_seconds() - cpu}
        np.save(asked["vectors"], vectors)
        print("RESULT " + json.dumps(spent), flush=True)


if __name__ == "__main__":
    main()
