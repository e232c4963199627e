"""Vectors of texts: Manta's engine against transformers' batches on this machine's CPU, in turns.

    python -m bench.embeddings --rounds 3 --out bench/results

Random weights of real sizes in float32 on both sides, texts of random token ids, pooling (the mean
of encoders, the last token of the decoder) and division by the length, both sides in this process
with all cores. transformers gets what sentence-transformers would give it: texts sorted by length,
in batches of 32, padded to the longest. The best round of each side counts, by the clock; beside it
stands the ratio of their CPU time. Vectors of both sides are compared first.

    short    128 texts of 8 to 64 tokens
    mixed    64 texts of 8 to 256 tokens
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.report.result_file import print_ratios, write

Vectors = NDArray[np.float32]
Side = Callable[[Sequence[list[int]]], Vectors]

BATCH = 32  # sentence-transformers' default
BOUND = 1e-4  # of the difference of two vectors of length 1
MODELS: dict[str, dict[str, Any]] = {
    "minilm-l6": {
        "model_type": "bert",
        "num_hidden_layers": 6,
        "hidden_size": 384,
        "num_attention_heads": 12,
        "intermediate_size": 1536,
        "vocab_size": 30522,
    },
    "bert-base": {"model_type": "bert", "vocab_size": 30522},
    "decoder-135m": {  # SmolLM2's
        "model_type": "llama",
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
}
CASES = {"short": (128, 64), "mixed": (64, 256)}


def texts_of(case: str) -> list[list[int]]:
    count, longest = CASES[case]
    rng = random.Random(0)
    return [
        [rng.randrange(1000, 30000) for _ in range(rng.randint(8, longest))] for _ in range(count)
    ]


def save(folder: Path, sizes: dict[str, Any]) -> Any:
    """A random encoder with sentence-transformers' files; the model of transformers."""
    import torch
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(0)
    sizes = dict(sizes)
    config = AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    model = AutoModel.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    pooling = {"pooling_mode_lasttoken" if is_decoder(model) else "pooling_mode_mean_tokens": True}
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"path": path, "type": f"sentence_transformers.models.{kind}"}
        for path, kind in kinds.items()
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    return model


def is_decoder(model: Any) -> bool:
    return bool(model.config.model_type == "llama")


def manta(folder: Path) -> Side:
    from engine.config.engine_config import EngineConfig
    from engine.factory import build
    from engine.messages import EngineRequest
    from engine.pooling import as_array
    from engine.sampling_params import SamplingParams

    # Without the prefix cache, in which a decoder would find the texts of the round before.
    config = EngineConfig(model=str(folder), device="cpu", dtype="float32", prefix_caching=False)
    core, _ = build(config)
    params = SamplingParams(max_tokens=0, temperature=0.0, pooled=True)

    def run(texts: Sequence[list[int]]) -> Vectors:
        for number, ids in enumerate(texts):
            core.add(EngineRequest(number, list(ids), len(ids), params, 0))
        found: dict[int, Vectors] = {}
        while core.has_work():
            for delta in core.step():
                assert delta.vector is not None, delta.error
                found[delta.id] = as_array(delta.vector)
        return np.stack([found[number] for number in range(len(texts))])

    return run


def transformers(model: Any) -> Side:
    import torch

    def run(texts: Sequence[list[int]]) -> Vectors:
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        found = np.empty((len(texts), model.config.hidden_size), np.float32)
        for first in range(0, len(order), BATCH):
            batch = order[first : first + BATCH]
            width = max(len(texts[i]) for i in batch)
            ids = torch.tensor([texts[i] + [0] * (width - len(texts[i])) for i in batch])
            lengths = torch.tensor([[len(texts[i])] for i in batch])
            mask = (torch.arange(width)[None] < lengths).long()
            with torch.inference_mode():
                hidden = model(ids, attention_mask=mask).last_hidden_state
            if is_decoder(model):
                pooled = hidden[torch.arange(len(batch)), lengths[:, 0] - 1]
            else:
                pooled = (hidden * mask[..., None]).sum(1) / lengths
            found[batch] = torch.nn.functional.normalize(pooled, dim=1).numpy()
        return found

    return run


def compare(name: str, rounds: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows and raw lines of one model."""
    rows: list[dict[str, Any]] = []
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as made:
        model = save(Path(made), MODELS[name])
        sides = {"manta": manta(Path(made)), "transformers": transformers(model)}
        for case in CASES:
            texts = texts_of(case)
            tokens = sum(map(len, texts))
            ours, theirs = (run(texts) for run in sides.values())  # the first is not counted
            difference = float(np.abs(ours - theirs).max())
            assert difference < BOUND, f"{name}/{case}: vectors differ by {difference}"
            best = dict.fromkeys(sides, 0.0)
            least = dict.fromkeys(sides, float("inf"))  # CPU seconds
            for _ in range(rounds):
                for side, run in sides.items():
                    begin, cpu = time.perf_counter(), time.process_time()
                    run(texts)
                    rate = round(tokens / (time.perf_counter() - begin), 1)
                    cpu = round(time.process_time() - cpu, 3)
                    line = {"case": f"{name}/{case}", "side": side, "tok_s": rate, "cpu_s": cpu}
                    lines.append(line)
                    print(json.dumps(line), flush=True)
                    best[side] = max(best[side], rate)
                    least[side] = min(least[side], cpu)
            rows.append(
                {
                    "case": f"{name}/{case}",
                    "ours": best["manta"],
                    "peer": best["transformers"],
                    "unit": "tok/s",
                    "ratio": round(best["manta"] / best["transformers"], 2),
                    "cpu_ratio": round(least["transformers"] / least["manta"], 2),
                    "difference": difference,
                }
            )
    return rows, lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="folder for the result files")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    lines: list[dict[str, Any]] = []
    for name in args.models:
        more, raw = compare(name, args.rounds)
        rows += more
        lines += raw
    print_ratios(rows)
    if args.out:
        config = {
            "ours": {"dtype": "float32", "weights": "random"},
            "peers": {"transformers": {"dtype": "float32", "batch": BATCH, "sorted": True}},
        }
        write(args.out, "embeddings", config, rows, lines)


if __name__ == "__main__":
    main()
