"""Speculation with draft models on one GPU: Manta's engine with and without drafts, and vLLM's.

    python -m bench.versus.speculation --model LLAMA --name llama-8b --method eagle3 \\
        --rates 0.75 0.55 0.40
    python -m bench.versus.speculation --model QWEN --name qwen3-next-24 --method mtp --rates 0.85

LLAMA is a folder that needs only a config.json: weights, also the drafter's, are random on both
sides. So acceptance is synthetic: --rates has the probability that each draft of a step is accepted
if all earlier ones are, and both sides accept drafts by chance at these rates. Drafts are
nevertheless computed, verified and sampled. The EAGLE-3 drafter is one layer with the model's sizes
and a vocabulary of 32,000 tokens, as in published drafters. Each run has its own process, and the
best run of a side counts.

A row has the output tokens/s with drafts, divided by those of vLLM with drafts of equal number and
rates (`ratio`), and by those of Manta without drafts (`own`); `peer_own` is vLLM's own gain. With
`--sides manta manta-off` there is no vLLM, and `ratio` is null.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, product
from operator import mul
from pathlib import Path
from typing import Any

from bench.report.result_file import Line, print_ratios, ratio_row
from bench.versus.engine import best, run_side
from bench.versus.harness import Harness, Piece

WORKLOADS = ("single", "streams64", "streams256")
DRAFT_VOCABULARY = 32_000
# side -> (engine, whether it uses drafts)
SIDES = {
    "manta": ("manta", True),
    "vllm": ("vllm", True),
    "manta-off": ("manta", False),
    "vllm-off": ("vllm", False),
}


def write_eagle3(model: Mapping[str, Any], folder: Path) -> None:
    """Write the config.json of an EAGLE-3 drafter.

    model: the values of the model's config.json.
    """
    shared = (
        *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
        *("head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_theta"),
        *("rope_scaling", "vocab_size", "bos_token_id", "eos_token_id", "torch_dtype"),
    )
    values = {key: model[key] for key in shared if key in model}
    values |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": min(DRAFT_VOCABULARY, model["vocab_size"]),
        "tie_word_embeddings": False,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values, indent=1))


def options(side: str, method: str, drafter: Path | None, rates: Sequence[float]) -> list[str]:
    """Return an engine's options KEY=JSON for drafts with synthetic acceptance rates.

    side: "manta" or "vllm".
    drafter: the folder of the drafter; None = the model's own MTP layer.
    """
    named = {} if drafter is None else {"model": str(drafter)}
    if side == "manta":
        ours = {"method": method, **named, "rates": " ".join(map(str, rates))}
        return [f"speculation={json.dumps(ours)}"]
    theirs = {
        "method": method,
        **named,
        "num_speculative_tokens": len(rates),
        "rejection_sample_method": "synthetic",
        # vLLM's rates are the probabilities that a draft and all earlier drafts are accepted
        "synthetic_acceptance_rates": [round(rate, 6) for rate in accumulate(rates, mul)],
    }
    return [f"speculative_config={json.dumps(theirs)}"]


def rows_of(case: str, lines: list[Line]) -> list[Line]:
    """Return a row for each workload that both of Manta's sides ran.

    The ratio is None if vLLM did not run the workload.
    """
    rows = []
    for name in dict.fromkeys(line["workload"] for line in lines if "workload" in line):
        done = {line["side"] for line in lines if line.get("workload") == name}
        if not done >= {"manta", "manta-off"}:
            continue
        ours, off = best(lines, "manta", name), best(lines, "manta-off", name)
        row: Line = {"case": f"{case}/{name}", "ours": ours, "peer": None, "unit": "tok/s"}
        row |= {"ratio": None, "off": off, "own": round(ours / off, 3), "peer_own": None}
        if done >= {*SIDES}:
            peer, peer_off = best(lines, "vllm", name), best(lines, "vllm-off", name)
            row |= ratio_row(row["case"], ours, peer, "tok/s")
            row["peer_own"] = round(peer / peer_off, 3)
        rows.append(row)
    return rows


def compare(
    folder: Path,
    case: str,
    method: str,
    rates: Sequence[float],
    names: Sequence[str],
    runs: int,
    sides: Sequence[str],
    common: Sequence[str],
    out: Path,
    resume: bool,
) -> None:
    """Run the sides in turns, print the table and save it with the raw lines.

    folder: the model's folder.
    case: a label of model and drafter.
    common: options KEY=JSON for both engines.
    """
    harness = Harness(out, "versus-speculation", ("case", "run", "side"), resume=resume)
    with tempfile.TemporaryDirectory() as scratch:
        drafter = Path(scratch) / "drafter" if method == "eagle3" else None
        if drafter is not None:
            write_eagle3(json.loads((folder / "config.json").read_text()), drafter)

        def run_piece(piece: Piece) -> Iterator[Line]:
            engine, drafts = SIDES[piece[2]]
            change = [*common, *(options(engine, method, drafter, rates) if drafts else ())]
            for line in run_side(engine, str(folder), list(names), change, None):
                yield {**line, "side": piece[2]}

        harness.run(product([case], range(runs), sides), run_piece)
    raw = harness.raw
    labels = dict.fromkeys(line["case"] for line in raw.all)
    rows = [
        row
        for label in labels
        for row in rows_of(label, [line for line in raw.all if line["case"] == label])
    ]
    configs = {
        side: next((li["config"] for li in raw.all if li["side"] == side and "config" in li), None)
        for side in SIDES
    }
    raw.finish({"ours": configs["manta"], "peers": {"vllm": configs["vllm"]}}, rows)
    print_ratios(rows)
    for row in rows:
        print(f"{row['case']}: {row['own']} of none, vLLM's {row['peer_own']} of its")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, required=True, help="a folder with config.json")
    parser.add_argument("--name", default="model", help="a label of the cases")
    parser.add_argument("--method", choices=["eagle3", "mtp"], required=True)
    parser.add_argument("--rates", type=float, nargs="+", required=True)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS))
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--max-num-seqs", type=int, help="of both engines, for large states")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--resume", action="store_true", help="go on with the day's lines in --out")
    args = parser.parse_args()
    case = f"{args.name}/{args.method}"
    compare(
        args.model,
        case,
        args.method,
        args.rates,
        args.workloads,
        args.runs,
        args.sides,
        [] if args.max_num_seqs is None else [f"max_num_seqs={args.max_num_seqs}"],
        args.out,
        args.resume,
    )


if __name__ == "__main__":
    main()
