"""What operating costs: from a wheel to the first token, a second model, a model that is added.

    python -m bench.operate --out bench/results
    python -m bench.operate --cases two-models

Cases that are not named keep their lines of the same day.
"""

import argparse
import os
import sys
from pathlib import Path

from bench.operate import add_model, two_models, wheel
from bench.report.result_file import Line, RawLines, print_ratios, versions

CASES = {"wheel": wheel, "two-models": two_models, "add-model": add_model}
PEERS = {
    "wheel": "the promise",
    "two-models": "a router of one of the models",
    "add-model": "the same streams before",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    args = parser.parse_args()

    def case(line: dict[str, object]) -> str:
        return str(line["case"]).partition("/")[0]

    raw = RawLines(
        args.out, "operate", lambda kept: [line for line in kept if case(line) not in args.cases]
    )
    for name in args.cases:
        for line in CASES[name].lines(args.rounds):
            raw.keep(line)
    rows: list[Line] = []
    peers: dict[str, object] = {}
    for name, module in CASES.items():
        if found := [line for line in raw.all if case(line) == name]:
            rows += module.rows(found)
            peers[PEERS[name]] = {}
    config: dict[str, object] = {"ours": {"model": "default"}, "peers": peers}
    config["versions"] = versions("transformers")
    raw.finish(config, rows, f"{os.cpu_count()} CPU cores, busy with other work")
    print_ratios(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
