"""F4 in full: the default model in float32 on three replicas, 20 kills in 10 minutes, a report.

    python -m tests.faults.soak --out loadtest/results/kills.json

Exit status 1 if any request failed, differed, or paused longer than 2 s plus the prefill.
"""

import argparse
import asyncio
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from deployments.models import resolve_model
from tests.deployments.serve_cluster import ray_and_serve
from tests.faults.cluster import Broken, deployed
from tests.faults.load import kill_under_load

ENGINE = {"dtype": "float32", "num_blocks": 600, "max_num_seqs": 16}


async def soak(broken: Broken, options: argparse.Namespace) -> dict[str, Any]:
    await broken.settled(180)
    report = await kill_under_load(
        broken,
        seconds=options.minutes * 60,
        kills=options.kills,
        at_once=options.at_once,
        tokens=options.tokens,
    )
    report["seconds_to_full_strength_after"] = round(await broken.settled(120), 1)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model = resolve_model("default", progress=lambda what, done, total: None)
    with (
        ray_and_serve(4) as cluster,
        deployed(
            cluster, model, None, replicas=options.replicas, num_cpus=0.5, engine=ENGINE
        ) as broken,
    ):
        report = asyncio.run(soak(broken, options))
    report = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": "default, float32",
        "replicas": options.replicas,
        **report,
    }
    text = json.dumps(report, indent=1)
    print(text)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")
    return int(report["failed"] + report["different"] > 0 or report["longest_gap_s"] > 3)


if __name__ == "__main__":
    sys.exit(main())
