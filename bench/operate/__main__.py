"""Costs of operating a server, such as its first token, a second model, and waking from sleep.

Cases: from a wheel to the first token; a second model; adding a model; a viewer of the live view.
On a GPU also: waking a model, and keeping a TPOT target.

    python -m bench.operate --out bench/results
    python -m bench.operate --cases two-models
    python -m bench.operate --cases wake tpot-50ms --model LLAMA --name llama-8b    # on a GPU

A model for a GPU is a folder with a config.json; its weights are random. Cases that are not named
keep their lines in the day's file. If no case is named, only the table is made from these lines.
"""

import argparse
import os
import re
import sys
import tomllib
from importlib import import_module, metadata
from pathlib import Path

from bench.report.result_file import Line, RawLines, print_ratios, versions

# Case -> its module, imported when the case runs, since GPU cases do not need Ray.
CASES = {
    "wheel": "wheel",
    "two-models": "two_models",
    "add-model": "add_model",
    "page": "viewer",
    "wake": "wake",
    "tpot-50ms": "tpot",
}
ON_GPU = ("wake", "tpot-50ms")
PEERS = {
    "wheel": "the promise",
    "two-models": "a router of one of the models",
    "add-model": "the same streams before",
    "page": "the promise",
    "wake": "the promise",
    "tpot-50ms": "the promise; the engine without a target",
}


def missing() -> list[str]:
    """Return the dependencies of pyproject.toml that are not installed."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    missing = []
    for requirement in project["dependencies"]:
        name = re.split(r"[^\w.-]", requirement)[0]
        try:
            metadata.distribution(name)
        except metadata.PackageNotFoundError:
            missing.append(name)
    return missing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    without = [name for name in CASES if name not in ON_GPU]
    parser.add_argument("--cases", nargs="*", choices=CASES, default=without)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", help="Folder of the model for a GPU.")
    parser.add_argument("--name", help="What the result calls it; default: the folder's.")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    args = parser.parse_args()
    if args.model is None and any(name in args.cases for name in ON_GPU):
        parser.error(f"{', '.join(ON_GPU)} need --model, a folder with a config.json")
    served = [name for name in args.cases if name not in ON_GPU]
    if served and (packages := missing()):  # the server would fail without these packages
        sys.exit(
            f"{', '.join(served)} serve a model, for which {sys.executable} lacks "
            f"{', '.join(packages)}: install the checkout's dependencies (pip install -e .)"
        )

    def case(line: dict[str, object]) -> str:
        return str(line["case"]).partition("/")[0]

    raw = RawLines(
        args.out, "operate", lambda kept: [line for line in kept if case(line) not in args.cases]
    )
    there = versions("transformers")
    for name in args.cases:
        here = there if name in ON_GPU else {**there, "device": f"{os.cpu_count()} CPU cores"}
        module = import_module(f"bench.operate.{CASES[name]}")
        model = (args.model, args.name or Path(args.model).name) if name in ON_GPU else ()
        for line in module.lines(args.rounds, *model):
            raw.keep({**line, "versions": here})
    rows: list[Line] = []
    peers: dict[str, object] = {}
    for name, file in CASES.items():
        if lines := [line for line in raw.all if case(line) == name]:
            rows += import_module(f"bench.operate.{file}").rows(lines)
            peers[PEERS[name]] = {}
    config: dict[str, object] = {"ours": {"model": "default"}, "peers": peers}
    ran = {case(line): line.get("versions", there) for line in raw.all}
    config["versions"] = ran
    devices = dict.fromkeys(str(ran_line["device"]) for ran_line in ran.values())
    raw.finish(config, rows, ", ".join(devices))
    print_ratios(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
