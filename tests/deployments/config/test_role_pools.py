"""Pools with roles in the configuration: what is refused, deployed, scaled and planned."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.simulate import roles as simulated
from bench.simulate.fleet.speeds import GPU
from deployments.app import as_config, serve_config
from deployments.cli import plan
from deployments.config.load import parse_config
from deployments.scaling.policy import PoolsPolicy, policy_arguments
from deployments.scaling.roles import share_of_together
from deployments.serve.model_deployments import NodeCapacity, pools
from engine.errors import ConfigError
from tests.deployments.on_ray.serve_cluster import tiny_model

PREFILL, DECODE = {"role": "prefill"}, {"role": "decode"}
ON_CPU = {"engine": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"a": PREFILL}, "pools.a: role: prefill needs a pool with role: decode; add one, or"),
        ({"a": DECODE, "gpu": {}}, "pools.a: role: decode needs a pool with role: prefill"),
        (
            {"a": PREFILL, "b": DECODE | {"engine": {"kv_moves": False}}},
            "pools.b: engine.kv_moves is off, without which",
        ),
        (
            {"a": PREFILL, "b": DECODE | {"engine": {"block_size": 8}}},
            "pools.b.engine.block_size: KV blocks go from pool to pool",
        ),
        (
            {"a": PREFILL, "b": DECODE | {"engine": {"tensor_parallel": 2}}},
            "pools.b: KV blocks of several ranks do not go",
        ),
        ({"a": PREFILL, "b": DECODE | ON_CPU}, "pools.b: prompts do not go from GPUs to CPUs"),
    ],
)
def test_what_roles_cannot_be(config: dict[str, Any], error: str) -> None:
    """Bugs: prompts wait for a pool that is not there; blocks that no other pool can read."""
    with pytest.raises(ConfigError) as refusal:
        parse_config({"pools": config}, {}, check_files=False)
    assert error in refusal.value.message


def roles_config(model: Path) -> Any:
    data = {
        "model": str(model),
        "engine": {"device": "cpu"},
        "pools": {
            "prompts": PREFILL | {"max_replicas": 3},
            "answers": DECODE | {"max_replicas": 9},
        },
    }
    return parse_config(data, {})


def test_deployments(tmp_path: Path) -> None:
    """Bugs: a role is lost on its way to the replicas; both pools take all cores; a changed count
    restarts replicas."""
    config = roles_config(tiny_model(tmp_path / "tiny"))
    machine = NodeCapacity(8.0, 0.0, alone=True)
    resolved = pools(config, machine)
    assert {name: pool.num_cpus for name, pool in resolved.items()} == {"prompts": 4, "answers": 4}
    assert config.engine_options(resolved["prompts"])["kv_moves"]
    schema = serve_config(config)
    (app,) = schema["applications"]
    assert {d["name"] for d in app["deployments"]} >= {"engine-prompts", "engine-answers"}
    again = as_config(app["args"])
    assert {name: pool.role for name, pool in again.pools.items()} == {
        "prompts": "prefill",
        "answers": "decode",
    }
    assert app["autoscaling_policy"]["policy_kwargs"]["pools"]["prompts"]["role"] == "prefill"


def test_roles_scale_apart(tmp_path: Path) -> None:
    """Bug: a flood of prompts starts replicas for answers, or the other way round."""
    config = roles_config(tiny_model(tmp_path / "tiny"))
    for loaded, idle, load in (
        ("prompts", "answers", {"prompt_rate": 4_000.0, "output_rate": 10.0}),
        ("answers", "prompts", {"prompt_rate": 40.0, "output_rate": 900.0}),
    ):
        policy = PoolsPolicy(**policy_arguments(config, config.pools))
        decisions = {}
        for now in range(20):
            contexts = {
                name: SimpleNamespace(
                    capacity_adjusted_min_replicas=1,
                    capacity_adjusted_max_replicas=9,
                    deployment_name=name,
                    app_name="manta",
                    current_num_replicas=1,
                    target_num_replicas=1,
                    current_time=float(now),
                    total_queued_requests=0.0,
                    aggregated_metrics={key: {"r": value} for key, value in metrics.items()},
                )
                for name, metrics in {
                    "router": load,
                    "engine-prompts": {"running": 1.0},
                    "engine-answers": {"running": 1.0},
                }.items()
            }
            decisions, _ = policy(contexts)
        assert decisions[f"engine-{loaded}"] > 1 and decisions[f"engine-{idle}"] == 1


def test_plan_says_when_roles_pay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: two cards are told that roles make them faster."""
    model = tiny_model(tmp_path / "tiny")
    file = tmp_path / "manta.yaml"
    file.write_text(
        f"model: {model}\npools: {{prompts: {{role: prefill}}, answers: {{role: decode}}}}\n"
    )
    plan.run(str(file), "h200", None, None)
    said = capsys.readouterr().out
    assert "Roles    1 for prompts, 1 for answers" in said
    assert "8,192 tokens in,   256 out: 0.54, so roles do not pay in tokens/s" in said
    assert share_of_together(1, 1, 8192, 256, "gpu") < 0.6
    assert share_of_together(12, 1, 8192, 256, "gpu") > 0.9


def test_plan_without_a_gpu_says_how_pools_run_on_the_cpu(tmp_path: Path) -> None:
    """Bug: `--gpu cpu` is refused with the advice to take a GPU."""
    model = tiny_model(tmp_path / "tiny")
    file = tmp_path / "manta.yaml"
    file.write_text(
        f"model: {model}\npools: {{prompts: {{role: prefill}}, answers: {{role: decode}}}}\n"
    )
    with pytest.raises(ConfigError, match=r"or set pools\.prompts\.engine\.device: cpu and set"):
        plan.run(str(file), "cpu", None, 8)


def test_simulated_roles() -> None:
    """Bugs: requests are lost between the simulator's roles; prompts and answers are counted at
    the wrong replicas; the answer to "does it pay on two cards" changes unseen."""
    work = [(0.1 * n, 4096, 256) for n in range(60)]
    together = simulated.run(GPU, 0, 2, work, 10e9)
    apart = simulated.run(GPU, 1, 1, work, 10e9)
    assert apart.gap < 0.5 * together.gap
    full = [(0.0, 8192, 256)] * 60
    assert (
        simulated.run(GPU, 1, 1, full, 10e9).rate < 0.7 * simulated.run(GPU, 0, 2, full, 10e9).rate
    )
    slow = simulated.run(GPU, 1, 1, work, 1e8)
    assert slow.rate < apart.rate
