"""Runs `manta serve` without Ray, for tests of how it stops and how it notices a lost Ray.

Fake processes have the names of Ray's processes, and a fake driver sends a real one's messages:

    python -m tests.deployments.cli.fake_serving FOLDER '{"until": "serving", "limits": {...}}'

Programs with Ray's names are written to FOLDER. Each event is printed as a line.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from deployments.cli.serving import supervisor
from deployments.cli.serving.cluster import Cluster
from deployments.cli.serving.driver import Driver
from deployments.config.load import parse_config


def main(folder: str, told: str) -> int:
    """Run `manta serve` with a fake driver; return its exit code.

    folder: a folder for programs with Ray's names.
    told: a JSON object. `until`: the last message of the driver. `stays`: whether closing the
        driver never returns. `silent`: seconds without a heartbeat after which Ray counts as lost.
    """
    options = json.loads(told)
    until, stays = options.get("until", ""), options.get("stays", False)
    supervisor._SILENT = options.get("silent", 60.0)
    supervisor.STOP_SECONDS = 0.5
    config = parse_config({"model": "some/model", "limits": options.get("limits", {})}, {})

    programs = [Path(folder, name) for name in ("raylet", "gcs_server")]
    for program in programs:
        program.symlink_to(os.path.realpath("/bin/sh"))

    def serve(driver: Driver, _: str) -> None:
        _spawn("plain")
        for what, item in _STEPS if until else ():
            driver.report(**item)
            if what == "model":
                driver.ignore(signal.SIGINT)
                for program in programs:
                    _spawn(program.name, program)
                _spawn("orphan", orphan=True)
            if until == what:
                break
        print("there", flush=True)
        while until == "beat":
            driver.report(beat=True)
            time.sleep(0.1)
        threading.Event().wait()

    def close(drain_seconds: float | None) -> None:
        print(f"close {drain_seconds}", flush=True)
        if stays:
            threading.Event().wait()

    return supervisor.Supervisor(config, Cluster("local"), serve, close).run()


_STEPS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("model", {"model": True}),
    ("ray", {"ray": True}),
    ("serving", {"serving": "http://127.0.0.1:1", "about": ["Serving"]}),
    ("beat", {"beat": True}),
)


def _spawn(name: str, program: Path | None = None, orphan: bool = False) -> None:
    """Start a process that sleeps, and print its name and pid.

    orphan: whether the process gets its own session, an empty environment and no living parent, so
        that only a process that adopts orphans can find it.
    """
    if orphan:
        shell = "sleep 1000 >/dev/null & echo $!"
        environment = {"PATH": os.environ["PATH"]}
        command = ["setsid", "sh", "-c", shell]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
        print(f"{name} {int(done.stdout)}", flush=True)
        return
    command = ["sh", "-c", "sleep 1000; :"]
    process = subprocess.Popen(command, executable=program, process_group=0)
    print(f"{name} {process.pid}", flush=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
