"""A result file and the raw lines beside it, as loadtest/results keeps them."""

import datetime
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest.versus_engine import commit


def device_name() -> str:
    """The GPU, or how many cores there are."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{os.cpu_count()} CPU cores"


def write(
    out: Path,
    name: str,
    config: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    lines: Iterable[Mapping[str, Any]],
) -> None:
    """<out>/<name>-<date>.json, the table, and .jsonl, the raw lines."""
    date = datetime.date.today().isoformat()
    document = {
        "commit": commit(),
        "date": date,
        "device": device_name(),
        "config": config,
        "rows": rows,
    }
    out.mkdir(parents=True, exist_ok=True)
    stem = out / f"{name}-{date}"
    Path(f"{stem}.json").write_text(json.dumps(document, indent=1) + "\n")
    Path(f"{stem}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
