"""One long request at a time: time to first token, decoding speed, and memory.

    python -m bench.long_context --model FOLDER --tokens 1024 8192 32768 131072 --out FOLDER

FOLDER needs only a config.json: weights are random. `default`, or a .gguf file, is read as it is.
If the model has fewer positions than the longest request, the configuration is changed, and the
result file says so. Each length runs twice and the second run counts. With --once it runs once, for
lengths that take minutes on a CPU. The KV cache of the longest request must fit; the table at the
start shows it. `peak_gib` is the device's peak memory; on the CPU the process's, including weights
(VmHWM).
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.report.result_file import write
from bench.versus.engine import engine_fields
from deployments.checkpoints.resolve import resolve_model
from engine.factory import build
from engine.library.llm import make_config
from engine.messages import EngineRequest
from engine.sampling_params import SamplingParams
from engine.scheduling.core import EngineCore

OUTPUT = 32


def resident() -> float:
    """Return the peak memory of this process, in GiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (peak,) = (line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return int(peak) / 2**20


def measure(core: EngineCore, tokens: int) -> dict[str, Any]:
    """Measure one request of `tokens` tokens, prompt and output together."""
    prompt = tokens - OUTPUT
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    ids = [i % min(core.config.vocab_size, 32_000) for i in range(prompt)]
    begin = time.perf_counter()
    core.add_request(EngineRequest(0, ids, prompt, params, seed=0))
    first = 0.0
    count = 0
    while core.has_work():
        count += sum(len(delta.token_ids) for delta in core.step())
        if count and not first:
            first = time.perf_counter() - begin
    seconds = time.perf_counter() - begin
    assert count == OUTPUT
    return {
        "tokens": tokens,
        "ttft_s": round(first, 4),
        "prompt_tok_s": round(prompt / first),
        "decode_tok_s": round((OUTPUT - 1) / (seconds - first), 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30 if cuda else resident(), 3),
        "out_of_memory": core.stats().out_of_memory,
    }


def widened(model: str, positions: int, folder: Path) -> dict[str, str]:
    """Copy the model to `folder` with at least `positions` positions.

    Returns what the result file must say about the change.
    """
    fields = json.loads((Path(model) / "config.json").read_text())
    for path in Path(model).iterdir():
        if path.name != "config.json":
            (folder / path.name).symlink_to(path.resolve())
    own = fields["max_position_embeddings"]
    fields["max_position_embeddings"] = max(own, positions)
    (folder / "config.json").write_text(json.dumps(fields))
    return {"positions": f"{own}, raised to {positions}"} if own < positions else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", required=True, help="folder with config.json, file or name")
    parser.add_argument("--name", default="model", help="label of the cases")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192, 32768, 131072])
    parser.add_argument("--once", action="store_true", help="the first run of a length counts")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of the engine")
    parser.add_argument("--out", type=Path, help="folder for the result files")
    args = parser.parse_args()
    values: dict[str, Any] = {
        "load_format": "dummy",
        "max_model_len": max(args.tokens),
        "max_num_seqs": 8,
        "prefix_caching": False,
    }
    model = args.model
    if not Path(model).is_dir():
        fields = engine_fields(args.set)
        model = str(resolve_model(model, blocks=fields.get("quantization") == "gguf"))
        del values["load_format"]
    values |= engine_fields(args.set)
    with tempfile.TemporaryDirectory() as folder:
        raised = widened(model, max(args.tokens), Path(folder))
        core, ready = build(make_config(folder, values))
    print(ready.memory_table, flush=True)
    lines = []
    for tokens in args.tokens:
        if not args.once:
            measure(core, tokens)
        lines.append({"case": f"{args.name}/{tokens}", **raised, **measure(core, tokens)})
        print(json.dumps(lines[-1]), flush=True)
    if args.out:
        config = {"ours": {**values, **raised, "memory": ready.memory_table.splitlines()}}
        write(args.out, f"long-context-{args.name}", config, lines, lines)


if __name__ == "__main__":
    main()
