"""The functions that write result files and their raw lines to bench/results."""

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
    """Return the commit that is checked out in a folder; None: the working directory."""
    command = ["git", "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    return done.stdout.strip() or "unknown"


def last_result(done: "subprocess.CompletedProcess[str]") -> Any:
    """Return the value of the last line `RESULT {json}` that a program printed.

    Returns None if there is no such line, or if the program failed. done: the ended program.
    """
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return None if done.returncode or not lines else json.loads(lines[-1].removeprefix("RESULT "))


def device_name() -> str:
    """Return the name of the GPU, or the number of cores."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{os.cpu_count()} CPU cores"


def ask_device(what: str) -> str:
    """Return a property of the first GPU without creating a context on it; "" without a GPU."""
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    return output.partition("\n")[0].strip()


def versions(*packages: str) -> dict[str, str]:
    """Return {name: version} of device, driver, Python, CUDA, torch, triton and these packages.

    Missing packages are left out.
    """
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
    """Return the result of `versions` in a process with other environment variables."""
    command = [sys.executable, "-m", "bench.report.result_file", *packages]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:  # continue, as a comparison is useful also without versions
        return {"unknown": done.stderr[-400:]}
    versions: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return versions


class RawLines:
    """The file <out>/<name>-<date>.jsonl.

    Each line is written immediately, so that an interrupted run loses nothing and can be resumed.
    """

    def __init__(
        self, out: Path, name: str, whole: Callable[[list[Line]], list[Line]] | None = None
    ) -> None:
        """Create the day's file, or resume it.

        whole: returns the lines of the existing file to keep; None starts a new file.
        """
        out.mkdir(parents=True, exist_ok=True)
        self.date = datetime.date.today().isoformat()
        self._stem = out / f"{name}-{self.date}"
        self._path = Path(f"{self._stem}.jsonl")
        self.all: list[Line] = []
        if whole and self._path.exists():
            text = self._path.read_text()
            # A last line without a line break is incomplete: drop it.
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
        """Write the table, <name>-<date>.json, next to the lines.

        device: name of the measured device, if it is not this machine's.
        """
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
    """Write the files of a finished run: the table <out>/<name>-<date>.json, and the raw lines
    .jsonl.

    The versions of this process are added to the configuration.
    """
    raw = RawLines(out, name)
    for line in lines:
        raw.keep(line, show=False)
    raw.finish({**config, "versions": versions("transformers")}, rows, device)


def ratio_row(case: str, ours: float, peer: float, unit: str, digits: int = 3) -> Line:
    """Return a row of a table: two values and their ratio ours / peer (None if peer is 0)."""
    ratio = round(ours / peer, digits) if peer else None
    return {"case": case, "ours": ours, "peer": peer, "unit": unit, "ratio": ratio}


def print_ratios(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a line for each row with ours, peer, unit and ratio."""
    for row in rows:
        figures = f"{row['ours']!s:>12} {row['peer']!s:>12} {row['unit']:<6} {row['ratio']!s:>7}"
        print(f"{row['case']:<38} {figures}")


if __name__ == "__main__":
    print(json.dumps(versions(*sys.argv[1:])))
