r"""Weight formats against other engines on this machine's CPU, alternating.

The bench prints ratios and, on a quiet machine, writes the result file.

    python -m bench.versus.cpu.formats --workload FILE --out bench/results \
        --ours bf16=default:none --ours q4_1=default:gguf --ours q4_0=smol-Q4_0.gguf:gguf \
        --peer q4_0:llama.cpp='VENV/bin/python peer.py smol-Q4_0.gguf'

--ours FORMAT=MODEL:QUANTIZATION is run by `bench.versus.cpu.side`. --peer FORMAT:NAME=COMMAND is a
command line, to which --workload FILE is appended. The command must print a line `RESULT {json}`
with prefill_tok_s, single_decode_tok_s, batch_tok_s and peak_rss_mb, as defined in
`bench.versus.cpu.side`. With FORMAT,FORMAT:NAME=COMMAND one run of the command per round is
compared with several formats.

Each round starts every side again, one after the other, and a side's best quiet round counts.
Rounds in which other processes were busy do not count, and without a quiet round of each side
nothing is written. The result file is versus-cpu-DATE.json with cases FORMAT/COLUMN/NAME. In the
column `memory` (peak MB) less is better.
"""

import argparse
import json
import os
import resource
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from bench.report.result_file import last_result, print_ratios, ratio_row, write
from bench.versus.cpu.side import COLUMNS, KEYS

MEMORY = "peak_rss_mb"  # peak memory of all processes of a side
BUSY = 0.05  # maximum number of cores that other processes keep busy in a quiet round


@dataclass(slots=True)
class Side:
    """An engine of the comparison, with its command and its measured rounds.

    formats: the formats in which the engine is compared. name: "" for ours.
    rounds: the engine's output in each round, plus `other`, the cores that other processes used.
    """

    formats: tuple[str, ...]
    name: str
    command: list[str]
    rounds: list[dict[str, Any]] = field(default_factory=list)

    @property
    def quiet(self) -> list[dict[str, Any]]:
        return [figures for figures in self.rounds if figures["other"] <= BUSY]

    @property
    def memory(self) -> tuple[float, float] | None:
        """Return the smallest peak memory of a round in MB, and the cores that others used."""
        peaks = [(figures[MEMORY], figures["other"]) for figures in self.quiet if MEMORY in figures]
        return min(peaks, default=None)

    def best(self, column: str) -> tuple[float, float] | None:
        """Return the best tokens/s of a round, and the cores that other processes used in it."""
        rates = [
            (figures[KEYS[column]], figures["other"])
            for figures in self.quiet
            if KEYS[column] in figures
        ]
        return max(rates, default=None)


def ours(text: str, workload: Path, repeat: int) -> Side:
    """Parse one of our sides: FORMAT=MODEL:QUANTIZATION."""
    form, separator, source = text.partition("=")
    model, colon, quantization = source.rpartition(":")
    if not (separator and colon):
        raise SystemExit(f"--ours {text}: not FORMAT=MODEL:QUANTIZATION")
    command = [sys.executable, "-m", "bench.versus.cpu.side", model, "--quantization", quantization]
    command += ["--repeat", str(repeat)]
    return Side((form,), "", [*command, "--workload", str(workload)])


def peer(text: str, workload: Path) -> Side:
    """Parse a peer: FORMAT,...:NAME=COMMAND."""
    head, separator, command = text.partition("=")
    form, colon, name = head.partition(":")
    if not (separator and colon):
        raise SystemExit(f"--peer {text}: not FORMAT:NAME=COMMAND")
    return Side(tuple(form.split(",")), name, [*shlex.split(command), "--workload", str(workload)])


def _busy() -> float:
    """Return the CPU seconds that the whole machine has used so far."""
    with open("/proc/stat") as file:
        ticks = [int(number) for number in file.readline().split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def _own() -> float:
    """Return the CPU seconds of this process and its ended children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def _name(word: str) -> str:
    """Return a word of a command line; a path is shortened to its last part."""
    return Path(word).name if word.startswith("/") else word


def turn(side: Side) -> dict[str, Any]:
    """Run a side once. Raises SystemExit with the end of its output if it printed no result."""
    busy, own, start = _busy(), _own(), time.perf_counter()
    done = subprocess.run(side.command, capture_output=True, text=True, check=False)
    wall = time.perf_counter() - start
    other = max(0.0, _busy() - busy - (_own() - own)) / wall
    result = last_result(done)
    if result is None:
        output = (done.stderr or done.stdout)[-2000:]
        raise SystemExit(f"{shlex.join(side.command)}: no RESULT line\n{output}")
    return {**result, "other": round(other, 3)}


def rows(sides: list[Side]) -> list[dict[str, Any]]:
    """Return a row for each peer and each column that both sides have, including peak memory.

    A row's `busy` is the number of cores that other processes used, in the busier of both rounds.
    """
    mine = {side.formats[0]: side for side in sides if not side.name}
    lines: list[dict[str, Any]] = []
    for side in sides:
        for form, column in product(side.formats, (*COLUMNS, "memory")):
            if not side.name or form not in mine:
                continue
            both = (mine[form], side)
            memory = column == "memory"
            ours, other = (
                timed_side.memory if memory else timed_side.best(column) for timed_side in both
            )
            if ours is None or other is None:
                continue
            lines.append(
                {
                    **ratio_row(
                        f"{form}/{column}/{side.name}",
                        ours[0],
                        other[0],
                        "MB" if memory else "tok/s",
                        2,
                    ),
                    "busy": max(ours[1], other[1]),
                }
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workload", type=Path, required=True)
    parser.add_argument("--ours", action="append", default=[], metavar="FORMAT=MODEL:QUANTIZATION")
    parser.add_argument("--peer", action="append", default=[], metavar="FORMAT:NAME=COMMAND")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=3, help="of our columns, a round")
    parser.add_argument("--out", type=Path, help="folder for the result files")
    args = parser.parse_args()
    sides = [ours(text, args.workload, args.repeat) for text in args.ours]
    sides += [peer(text, args.workload) for text in args.peer]
    lines = []
    for _ in range(args.rounds):
        for side in sides:
            side.rounds.append(turn(side))
            described = {
                "format": ",".join(side.formats),
                "side": side.name or "manta",
                **side.rounds[-1],
            }
            print(json.dumps(described), flush=True)
            lines.append(described)
    result_rows = rows(sides)
    print_ratios(result_rows)
    if unquiet := [
        f"{','.join(side.formats)} {side.name or 'manta'}" for side in sides if not side.quiet
    ]:
        raise SystemExit(
            f"nothing is written: other processes were busy in every round of {', '.join(unquiet)}"
        )
    if args.out:
        commands = {f"{','.join(side.formats)}:{side.name}": side.command for side in sides}
        # shorten this machine's absolute paths
        config = {"sides": {key: [*map(_name, command)] for key, command in commands.items()}}
        write(args.out, "versus-cpu", config, result_rows, lines)


if __name__ == "__main__":
    main()
