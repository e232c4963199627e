"""The charts of the docs and the table of results, generated from the files in bench/results:

    python -m bench.report.plots

For each name (versus-engine-llama-8b, http, ...) the newest file is used. A chart is one
self-contained SVG with its own background, readable on light and dark pages.
"""

import argparse
import json
import re
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
IMAGES = Path(__file__).parents[2] / "docs" / "img"
SPEEDS = Path(__file__).parents[2] / "deployments" / "configs" / "speeds.yaml"
_CHAT = "dialogue"  # workload of chat prompts and answers that saturates the device

# Prefix of a file's name -> the command that wrote the file; the longest matching prefix is used.
MADE_BY = {
    "accuracy": "`python -m bench.accuracy`: next-token distributions of each format of weights",
    "ablations": "`python -m bench.ablations`: each technique switched on and off",
    "adapters-live": "`python -m tests.deployments.on_ray.adapters_live`: adapters come and go",
    "autoscaling": "`python -m tests.deployments.on_ray.autoscaling_live --model default`: 0, 3, 0",
    "before-after": "`python -m bench.versus.engine --against`: Manta's engine and an older one",
    "calibration": "`python -m bench.calibration`: weights in fewer bits, and quantised keys",
    "chaos": "`python -m bench.versus.chaos`: kills and overload, beside other servers",
    "change": "`python -m bench.versus.engine --change`: Manta's engine against itself",
    "faults": "`manta loadtest run --verify --chaos` against `manta serve`: each fault once",
    "faults-abuse": "`python -m tests.faults.abuse`: leaving, slow and far too many clients",
    "faults-drain": "`python -m tests.faults.drain`: scale-downs, updates, a notice under load",
    "faults-flood": "`python -m tests.faults.flood`: ten times the load, real engines",
    "faults-grpo": "`python -m tests.faults.grpo`: a GRPO loop whose replicas are killed",
    "faults-neighbours": "`python -m tests.faults.neighbours`: streams beside dear requests",
    "faults-refusals": "`python -m tests.faults.refusals`: CPU time of a refusal, by process",
    "faults-soak": "`python -m tests.faults.soak`: kills under load for minutes",
    "cpu-steps": "`python -m bench.cpu.steps`: steps on the CPU beside their products and limits",
    "draft-profile": "`python -m bench.draft_profile`: a step with drafts of a model, part by part",
    "embeddings": "`python -m bench.embeddings`: vectors of texts against transformers",
    "operate": "`python -m bench.operate`: a wheel, a second model, a model that is added",
    "first-start": "`python -m bench.versus.engine --side manta`, TRITON_CACHE_DIR empty",
    "gpu-checks": "`python -m bench.gpu_checks`: the tests that need a GPU, what they measured",
    "image-intake": "`python -m bench.images.intake`: a picture's cost to a router, by stage",
    "kernels": "`python -m bench.kernels.table`: each kernel against the device and libraries",
    "cpu-mixers": "`python -m bench.kernels.cpu_mixers`: recurrent layers against transformers",
    "kv-growth": "`python -m bench.kv.growth`: steps while KV memory grows and shrinks",
    "kv-moves": "`python -m bench.kv.moves`: a turn on another replica, by blocks that move",
    "loading": "`python -m bench.loading`: reading weights against copying as many bytes",
    "prefill-surplus": "`python -m bench.kernels.surplus`: prefill programs without work",
    "numa": "`python -m bench.cpu.numa`: two nodes of a machine beside one, and unbound",
    "long-context": "`python -m bench.long_context`: one long request at a time",
    "memory-load": "`python -m bench.memory_load`: more requests than memory, for minutes",
    "parallel": "`python -m bench.cpu.parallel`: ranks of a core each against one rank of all",
    "parity": "`python -m tests.parity.table`: each architecture's logits against transformers'",
    "ray-batches": "`python -m bench.ray_batches`: Ray Data against the engine, and beside others",
    "rl": "`python -m bench.rl`: weights updated under streams, rollouts against a scorer",
    "sampling-speed": "`python -m bench.sampling_speed`: sampling of each kind beside greedy",
    "speculation": "`python -m bench.speculation`: drafts by look-up against none, in turns",
    "scale-out": "`python -m bench.scale_out`: replicas against so many times one of them",
    "simulate": "`python -m bench.simulate`: routing and scaling policies in a simulated fleet",
    "simulate-calibration": "`python -m bench.simulate calibrate`: a real replica's steps, "
    "and the simulator against it",
    "starts": "`python -m bench.operate.starts`: first and later starts, and an older engine's",
    "step-profile": "`python -m bench.step_profile`: kernels of a step, floors and gaps",
    "structured": "`python -m bench.structured`: schemas against two suites of documents",
    "versus-cpu": "`python -m bench.versus.cpu.formats`: formats of weights against peers",
    "versus-cpu-transformers": "`python -m bench.versus.cpu.generate`: against transformers",
    "versus-engine": "`python -m bench.versus.engine`: Manta's engine against vLLM's, offline",
    "versus-http": "`python -m bench.versus.http`: Manta's server against another",
    "versus-images": "`python -m bench.versus.images`: pictures, and text beside them",
    "versus-lora": "`python -m bench.versus.lora`: many adapters, against none or a peer",
    "versus-mixer-kernels": "`python -m bench.versus.mixer_kernels`: latents, delta rules",
    "versus-mixers": "`python -m bench.versus.engine`: latents and recurrent layers, offline",
    "versus-models": "`python -m bench.versus.engine`: other models than Llama and Qwen, offline",
    "versus-parallel": "`python -m bench.versus.parallel`: several GPUs against vLLM and one",
    "versus-quantised": "`python -m bench.versus.quantised`: weights in fewer bits, and 16 bits",
    "versus-roles": "`python -m bench.versus.roles`: prompts and answers apart on two GPUs",
    "versus-speculation": "`python -m bench.versus.speculation`: drafts of models, offline",
    "versus-structured": "`python -m bench.versus.structured`: a schema on every stream, and none",
    "versus-tiers": "`python -m bench.versus.tiers`: KV in host memory and on disk, and none",
    "versus-tools": "`python -m bench.versus.tools`: the load tester against two others",
}
_LESS_IS_BETTER = ("s", "ms", "us", "MB")
_NAME = re.compile(r"(.+)-(\d{4}-\d\d-\d\d)\.json")

_WIDTH, _LEFT, _BAR, _PAIR, _TOP, _FOOT = 760, 190, 13, 46, 66, 34
_ROOM = 350  # width for a bar and the value after it

STYLE = """
.bg{fill:#fff;stroke:#d5dbe3}.ink{fill:#1b2330}.soft{fill:#5c6878}
.ours{fill:#2563eb}.peer{fill:#a9b3c0}.good{fill:#137a4b}.bad{fill:#b42318}
text{font:13px system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans","DejaVu Sans",sans-serif}
.title{font-size:16px;font-weight:600}.small{font-size:12px}.ratio{font-weight:600}.end{text-anchor:end}
@media (prefers-color-scheme:dark){.bg{fill:#171c24;stroke:#2a323d}.ink{fill:#e6eaf0}
.soft{fill:#98a4b3}.ours{fill:#6ea0ff}.peer{fill:#5a6675}.good{fill:#57d49a}.bad{fill:#ff8d80}}
"""


@dataclass(frozen=True)
class Result:
    """A result file. name: the file's name without its date."""

    path: Path
    name: str
    date: str
    document: dict[str, Any]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows that compare two sides; [] for results that have other charts."""
        if self.name.startswith(("ablations", "simulate", "kernels")):
            return []
        rows = self.document.get("rows", [])
        return [row for row in rows if row.get("ours") and row.get("peer") and "unit" in row]

    @property
    def peers(self) -> str:
        peers = (self.document.get("config") or {}).get("peers") or {}
        return ", ".join(peers) if isinstance(peers, dict) else str(peers)

    @property
    def made_by(self) -> str:
        fitting = [prefix for prefix in MADE_BY if self.name.startswith(prefix)]
        return MADE_BY[max(fitting, key=len)] if fitting else self.document.get("note", "")


def read_results(folder: Path) -> list[Result]:
    """Read all result files of a folder, sorted by name and date."""
    results = []
    for path in sorted(folder.glob("*.json")):
        if match := _NAME.fullmatch(path.name):
            results.append(Result(path, match[1], match[2], json.loads(path.read_text())))
    return results


def newest(results: list[Result]) -> list[Result]:
    return list({result.name: result for result in results}.values())


def picture(result: Result) -> str:
    """Return an SVG with two bars per row, ours and the peer's; the longer has the full width."""
    rows = result.rows
    height = _TOP + _PAIR * len(rows) + _FOOT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" role="img">',
        f"<title>{escape(_spoken(result))}</title><style>{STYLE}</style>",
        f'<rect class="bg" x=".5" y=".5" width="{_WIDTH - 1}" height="{height - 1}" rx="10"/>',
        f'<text class="ink title" x="20" y="30">{escape(result.name)}</text>',
        f'<text class="soft small" x="20" y="49">{escape(result.document.get("device", ""))}, '
        f"{result.date}, commit {escape(result.document.get('commit', '')[:9])}</text>",
        _legend(result.peers or "peer"),
    ]
    common = {row["case"].split("/", 1)[0] for row in rows}
    for number, row in enumerate(rows):
        case = row["case"].split("/", 1)[-1] if len(common) == 1 else row["case"]
        parts.append(_pair(row, case, _TOP + 8 + number * _PAIR))
    colours = "where they agree" if any("agrees" in row for row in rows) else "where ours is better"
    parts.append(
        f'<text class="soft small" x="20" y="{height - 14}">bars: each pair on its own scale; '
        f"right: ours over theirs, green {colours}</text></svg>\n"
    )
    return "".join(parts)


def _legend(peer: str) -> str:
    x = _WIDTH - 20
    shown = peer if len(peer) <= 34 else f"{peer[:33]}…"
    return (
        f'<text class="soft small end" x="{x}" y="30">'
        '<tspan class="ours">■</tspan> Manta  '
        f'<tspan class="peer">■</tspan> {escape(shown)}</text>'
    )


def _pair(row: dict[str, Any], case: str, y: float) -> str:
    ours, peer, unit = float(row["ours"]), float(row["peer"]), row["unit"]
    longest = max(ours, peer)
    less = unit in _LESS_IS_BETTER
    better = ours <= peer if less else ours >= peer
    agrees = row.get("agrees")  # in a comparison of tools, equal values are best
    if agrees is None and abs(ours / peer - 1) < 0.01:
        tone = "soft"
    else:
        tone = "good" if (better if agrees is None else agrees) else "bad"
    right = _LEFT - 14
    parts = [f'<text class="ink end" x="{right}" y="{y + 13}">{escape(case)}</text>']
    if less and agrees is None:
        parts.append(f'<text class="soft small end" x="{right}" y="{y + 28}">less is better</text>')
    for side, value, top in (("ours", ours, y), ("peer", peer, y + _BAR + 3)):
        length = max(1.0, _ROOM * value / longest)
        parts.append(
            f'<rect class="{side}" x="{_LEFT}" y="{top}" width="{length:.1f}" '
            f'height="{_BAR}" rx="2"/>'
            f'<text class="ink small" x="{_LEFT + length + 7:.1f}" y="{top + 11}">'
            f"{_figure(value)} {escape(unit)}</text>"
        )
    parts.append(
        f'<text class="{tone} ratio end" x="{_WIDTH - 20}" y="{y + 19}">{ours / peer:.2f}</text>'
    )
    return "".join(parts)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _spoken(result: Result) -> str:
    rows = (f"{row['case']}: {row['ours']} to {row['peer']} {row['unit']}" for row in result.rows)
    return f"{result.name}: {'; '.join(rows)}"


def table(results: list[Result]) -> str:
    """Return the text of bench/results/README.md."""
    lines = [
        "# Results",
        "",
        "Written by `python -m bench.report.plots`, which also draws `docs/img/` and writes",
        "`deployments/configs/speeds.yaml` for `manta plan`. A result is two files:",
        "`NAME-DATE.json` with commit, device, both configurations and the rows that are quoted,",
        "`NAME-DATE.jsonl` with a raw line for each run. The newest is the current claim.",
        "",
        "| file | what | against | device | commit | rows |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for result in results:
        document = result.document
        cells = [
            f"`{result.path.name}`",
            result.made_by,
            result.peers,
            document.get("device", ""),
            document.get("commit", "")[:9],
            str(len(document.get("rows", []))),
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def speeds(results: list[Result]) -> str:
    """Return the text of deployments/configs/speeds.yaml, the measured speeds for `manta plan`."""
    rows: dict[tuple[str, str, str], str] = {}
    engine = [result for result in results if result.name.startswith("versus-engine")]
    # newer results replace older ones
    for result in sorted(engine, key=lambda result: result.date):
        document = result.document
        dtype = document["config"]["ours"].get("dtype", "bfloat16")
        for row in result.rows:
            model, _, workload = row["case"].partition("/")
            if workload == _CHAT:
                rows[model, document["device"], dtype] = (
                    f"  - {{model: {model}, device: {document['device']}, dtype: {dtype}, "
                    f"tokens_per_second: {row['ours']}}}  # {result.path.name}"
                )
    return (
        "# Output tokens/s of one replica, the engine alone, on the chat workload with the device\n"
        "# full. Written by `python -m bench.report.plots` from the files that each line names.\n"
        "speeds:\n" + "".join(f"{row}\n" for _, row in sorted(rows.items()))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--images", type=Path, default=IMAGES)
    parser.add_argument("--speeds", type=Path, default=SPEEDS)
    args = parser.parse_args()
    results = read_results(args.results)
    args.images.mkdir(parents=True, exist_ok=True)
    for result in newest(results):
        if result.rows:
            path = args.images / f"{result.name}.svg"
            path.write_text(picture(result), "utf-8")
            print(path)
    (args.results / "README.md").write_text(table(results), "utf-8")
    args.speeds.write_text(speeds(results), "utf-8")


if __name__ == "__main__":
    main()
