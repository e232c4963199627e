"""What `manta serve` says of a deployment that failed or waits, by what Serve tells of it."""

import pytest

from deployments.model_applications import why_failed, why_waiting

REPLICA = """The deployment failed to start 1 times in a row. Error:
RuntimeError: Traceback (most recent call last):
  File "replica.py", line 983, in initialize
    raise ValueError("not this") from error
"""


@pytest.mark.parametrize(
    ("message", "found"),
    [
        (REPLICA + "errors.ConfigError: no such pool", "errors.ConfigError: no such pool"),
        (REPLICA + "AssertionError\n\nDuring handling", "AssertionError"),
        ("ray::Replica: ValueError: one\n  File x", "ray::Replica: ValueError: one"),
        ("no node has 8 GPUs", "no node has 8 GPUs"),
        ("", "no reason given"),
    ],
)  # fmt: skip
def test_the_deepest_cause(message: str, found: str) -> None:
    """The line that a traceback begins with, or a line of code, for the cause."""
    assert why_failed([message, message]) == found


def test_what_a_replica_waits_for() -> None:
    """A model that no node has room for, and a command that only counts seconds."""
    text = (
        "Deployment 'engine-cpu' in application 'manta.b' has 1 replicas that have taken more than "
        "30s to be scheduled. This may be due to waiting for the cluster to auto-scale or for a "
        'runtime environment to be installed. Resources required for each replica: {"CPU": 2.0, '
        '"GPU": 0.5}, total resources available: {}. Use `ray status` for more details.'
    )
    reason = why_waiting(["", text, "app"])
    assert (
        reason.startswith("no node has 2 CPU, 0.5 GPU free") and "(pools.gpu.num_gpus, " in reason
    )
    reason = why_waiting([text.replace(', "GPU": 0.5', "")])
    assert reason.startswith("no node has 2 CPU free") and "(pools.cpu.num_cpus)" in reason
    assert why_waiting([text.replace("scheduled", "initialized"), ""]) == ""
    reserves_nothing = text.replace('{"CPU": 2.0, "GPU": 0.5}', "{}")
    assert why_waiting([reserves_nothing]) == "", "a router on a busy machine"
    assert why_waiting([reserves_nothing, text]) == why_waiting([text])
