"""Beside a worker node: when the cloud announces that it takes the machine back, tell Ray, which
starts replacements at once and ends this node's replicas in time.

    python drain_on_notice.py aws|gcp

Ends after the notice. On a machine that is never taken back it asks once in a few seconds for ever.
"""

import argparse
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

PERIOD = 5.0  # seconds between questions; AWS asks for as much
MARGIN = 5  # seconds before the end in which nothing is left to be done
AWS = "http://169.254.169.254"
GCP = "http://metadata.google.internal"
GCP_SECONDS = 30  # from the notice to the end

Notice = Callable[[], int | None]  # seconds left; None: no notice


def ask(url: str, method: str = "GET", **headers: str) -> str | None:
    """The answer's text. None: the page does not exist, or no server answers."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(url, method=method, headers=named)
    try:
        with urllib.request.urlopen(request, timeout=3) as answer:
            return str(answer.read(4096).decode())
    except (urllib.error.URLError, OSError):
        return None


def aws_notice(base: str = AWS) -> int | None:
    """Ask IMDSv2 whether a spot instance is to be interrupted."""
    token = ask(f"{base}/latest/api/token", "PUT", X_aws_ec2_metadata_token_ttl_seconds="60")
    if token is None:
        return None
    url = f"{base}/latest/meta-data/spot/instance-action"
    text = ask(url, X_aws_ec2_metadata_token=token)
    if text is None:
        return None
    end = datetime.fromisoformat(json.loads(text)["time"])
    return max(0, int((end - datetime.now(UTC)).total_seconds()))


def gcp_notice(base: str = GCP) -> int | None:
    """Ask whether a spot machine is being preempted."""
    url = f"{base}/computeMetadata/v1/instance/preempted"
    return GCP_SECONDS if ask(url, Metadata_Flavor="Google") == "TRUE" else None


def drain(seconds: int) -> bool:
    """Tell Ray that this node ends in so many seconds; whether it has understood."""
    command = [
        str(Path(sys.executable).with_name("ray")),
        "drain-node",
        "--reason=DRAIN_NODE_REASON_PREEMPTION",
        "--reason-message=the cloud takes this machine back",
        f"--deadline-remaining-seconds={max(1, seconds - MARGIN)}",
    ]
    return subprocess.run(command, check=False).returncode == 0


def watch(notice: Notice, drain: Callable[[int], bool], sleep: Callable[[float], None]) -> None:
    """Until there is a notice and Ray has been told."""
    while (left := notice()) is None or not drain(left):
        sleep(PERIOD if left is None else 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("cloud", choices=["aws", "gcp"])
    cloud = parser.parse_args().cloud
    watch({"aws": aws_notice, "gcp": gcp_notice}[cloud], drain, time.sleep)


if __name__ == "__main__":
    main()
