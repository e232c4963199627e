"""A result file and the raw lines beside it, as bench/results keeps them."""

import datetime
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def commit(folder: Path | None = None) -> str:
    """Return the commit that a folder has checked out, by default this process's."""
    command = ["git", "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    return done.stdout.strip() or "unknown"


def device_name() -> str:
    """Return the name of the GPU, or the number of cores."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{os.cpu_count()} CPU cores"


def ask_device(what: str) -> str:
    """Return a property of the first GPU, without a context on it; "" if there is none."""
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    return said.partition("\n")[0].strip()


def versions(*packages: str) -> dict[str, str]:
    """Return what a side of a comparison ran on: the device and its driver, Python, CUDA, torch,
    triton and these packages, as far as they are there."""
    import torch

    versions = {"device": device_name(), "python": sys.version.split()[0]}
    if driver := ask_device("driver_version"):
        versions["driver"] = driver
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    for name in ("torch", "triton", *packages):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def versions_under(environment: Mapping[str, str], *packages: str) -> dict[str, str]:
    """Return the versions that a program with another environment than this one runs on."""
    command = [sys.executable, "-m", "bench.report.result_file", *packages]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:  # a comparison is worth having without it
        return {"unknown": done.stderr[-400:]}
    versions: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return versions


class RawLines:
    """The file <out>/<name>-<date>.jsonl: each line is written at once, so that a run that is cut
    off loses nothing and can be taken up again."""

    def __init__(
        self, out: Path, name: str, whole: Callable[[list[Line]], list[Line]] | None = None
    ) -> None:
        """Begin the day's file, or take it up.

        whole: returns those of the file's lines that are kept; None begins a new file.
        """
        out.mkdir(parents=True, exist_ok=True)
        self.date = datetime.date.today().isoformat()
        self._stem = out / f"{name}-{self.date}"
        self._path = Path(f"{self._stem}.jsonl")
        self.all: list[Line] = []
        if whole and self._path.exists():
            text = self._path.read_text()
            # Without its end, a last line was being written when the run was cut off.
            ended = text[: text.rfind("\n") + 1]
            self.all = whole([json.loads(line) for line in ended.splitlines()])
        self._path.write_text("".join(json.dumps(line) + "\n" for line in self.all))

    def keep(self, line: Line, show: bool = True) -> None:
        text = json.dumps(line)
        if show:
            print(text, flush=True)
        self.all.append(line)
        with self._path.open("a") as file:
            file.write(text + "\n")

    def finish(
        self, config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], device: str = ""
    ) -> None:
        """Write the table, <name>-<date>.json, beside the lines. device: if it is not this one."""
        document = {
            "commit": commit(),
            "date": self.date,
            "device": device or device_name(),
            "config": config,
            "rows": rows,
        }
        Path(f"{self._stem}.json").write_text(json.dumps(document, indent=1) + "\n")


def write(
    out: Path,
    name: str,
    config: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    lines: Iterable[Line],
    device: str = "",
) -> None:
    """Write the files of a run that is over: <out>/<name>-<date>.json, the table, and .jsonl, the
    raw lines.

    The versions of this process are added to the configuration.
    """
    raw = RawLines(out, name)
    for line in lines:
        raw.keep(line, show=False)
    raw.finish({**config, "versions": versions("transformers")}, rows, device)


def ratio_row(case: str, ours: float, peer: float, unit: str, digits: int = 3) -> Line:
    """Return a row of a table: two figures, and ours by the peer's. A ratio to 0 is None."""
    ratio = round(ours / peer, digits) if peer else None
    return {"case": case, "ours": ours, "peer": peer, "unit": unit, "ratio": ratio}


def print_ratios(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a line for each row that has ours, peer, unit and ratio."""
    for row in rows:
        figures = f"{row['ours']!s:>12} {row['peer']!s:>12} {row['unit']:<6} {row['ratio']!s:>7}"
        print(f"{row['case']:<38} {figures}")


if __name__ == "__main__":
    print(json.dumps(versions(*sys.argv[1:])))
