"""Encoder pools in the configuration: what is refused, deployed, counted and scaled."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.app import as_config, assemble, serve_config
from deployments.cli import plan
from deployments.cli.building.kubernetes import rayservice
from deployments.cli.doctor import model_checks
from deployments.config.load import parse_config
from deployments.plan.encoders import plan_encoders
from deployments.plan.gpus import GIB
from deployments.plan.memory import Hardware
from deployments.scaling.policy import PoolsPolicy
from deployments.serve.model_deployments import NodeCapacity, check_gpus, pools, served_model
from engine.config.model_config import ModelConfig
from engine.errors import ConfigError
from tests.deployments.on_ray.serve_cluster import tiny_model
from tests.engine.images.folders import CASES, save_model

ENCODER = {"role": "encoder"}
QWEN = Path(__file__).parents[3] / "bench" / "models" / "qwen3-vl-8b"


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"pictures": ENCODER}, "pools.pictures: encoders answer no requests; add pools.gpu or"),
        ({"cpu": ENCODER}, "pools.cpu.role: gpu and cpu are pools of engines; give the encoder"),
        ({"pictures": {}}, "pools.pictures: unknown key; known keys: gpu, cpu, any other name "),
        ({"cpu": {}, "a": ENCODER, "b": ENCODER}, "pools.b: pools.a has role: encoder already"),
        ({"cpu": {"encode_seconds": 9}}, "pools.cpu: encode_seconds is of pools with role: enc"),
        ({"cpu": {}, "a": ENCODER | {"num_gpus": 2}}, "num_gpus is 2, and an encoder uses one GPU"),
        (
            {"cpu": {}, "a": ENCODER | {"engine": {"num_blocks": 9}}},
            "pools.a: engine.num_blocks: an encoder has the model's tower alone",
        ),
        (
            {"cpu": {"engine": {"images": "off"}}, "a": ENCODER},
            "pools.a: engine.images is off, so there is nothing to encode; leave one of them out",
        ),
    ],
)
def test_what_an_encoder_pool_cannot_be(config: dict[str, Any], error: str) -> None:
    """Bugs: a pool that answers nothing is waited for; a setting that means nothing is taken."""
    with pytest.raises(ConfigError) as refusal:
        parse_config({"pools": config}, {}, check_files=False)
    assert error in refusal.value.message
    if "known keys" not in error:
        with pytest.raises(ConfigError) as refusal:
            parse_config({"models": {"m": {"pools": config}}}, {}, check_files=False)
        assert error.removeprefix("pools.") in refusal.value.message


def test_a_model_without_a_tower_is_refused(tmp_path: Path) -> None:
    """Bug: actors start and fail for ever, beside replicas that never ask them."""
    model = tiny_model(tmp_path / "tiny")
    config = {"model": str(model), "pools": {"cpu": {}, "pictures": ENCODER}}
    with pytest.raises(ConfigError, match=r"pools\.pictures\.role: the model sees no images, so"):
        parse_config(config, {})


def test_what_is_deployed_and_which_cores_it_takes() -> None:
    """Bugs: replicas take all cores, so that encoders never start; routers connect to encoders;
    ranks of the language model are reserved for a tower; arguments that do not parse again."""
    both: dict[str, Any] = {
        "engine": {"tensor_parallel": 2, "dtype": "float32", "num_blocks": 99},
        "pools": {"cpu": {}, "pictures": ENCODER | {"replicas": 2, "num_cpus": 2.0}},
    }
    config = parse_config(both, {}, check_files=False)
    resolved = pools(config, NodeCapacity(10, 0, True, False))
    assert resolved["cpu"].num_cpus == 6 and resolved["pictures"].engine == {"num_threads": 2}
    options = config.encoder_options(resolved["pictures"])
    assert options["dtype"] == "float32" and options["device"] == "cpu"
    assert not {"tensor_parallel", "num_blocks"} & options.keys()
    assert config.divisions(resolved["pictures"]) == (1, 1, 1)
    assert served_model(config, 0).pools == ("engine-cpu",)
    both["pools"]["cpu"] = {"num_cpus": 2.0}
    (app,) = serve_config(parse_config(both, {}, check_files=False))["applications"]
    names = [entry["name"] for entry in app["deployments"]]
    assert names == ["encoder-pictures", "engine-cpu", "router"]
    again = as_config(json.loads(json.dumps(app["args"])))
    assert again.pools["pictures"].role == "encoder"
    assert assemble(again)
    groups = rayservice(parse_config(both, {}, check_files=False))["spec"]["rayClusterConfig"]
    workers = {group["groupName"]: group["replicas"] for group in groups["workerGroupSpecs"]}
    assert workers == {"pictures": 2, "cpu": 1}
    gpu = {"pools": {"cpu": {}, "pictures": ENCODER | {"num_gpus": 0.5}}}
    config = parse_config(gpu, {}, check_files=False)
    assert config.encoder_options(config.pools["pictures"])["device"] == "cuda"
    none = NodeCapacity(10, 0, True, False)
    with pytest.raises(ConfigError, match="so that encoders run on the CPU"):
        check_gpus(config, pools(config, none), none)


def test_encoders_scale_by_calls_apart_from_engines() -> None:
    """Bugs: the policy of an application holds encoders where they are; encoders that scale make
    engines scale; calls count as requests of the language model."""
    alone = {"pools": {"cpu": {}, "pictures": ENCODER | {"max_replicas": 4}}}
    (app,) = serve_config(parse_config(alone, {}, check_files=False))["applications"]
    scaling = app["deployments"][0]["autoscaling_config"]
    assert scaling["target_ongoing_requests"] == 2 and scaling["downscale_delay_s"] == 120
    assert "autoscaling_policy" not in app

    def context(name: str, calls: float) -> Any:
        return SimpleNamespace(
            capacity_adjusted_min_replicas=0,
            capacity_adjusted_max_replicas=20,
            deployment_name=name,
            app_name="manta",
            current_num_replicas=2,
            target_num_replicas=2,
            current_time=1.0,
            total_queued_requests=0.0,
            total_num_requests=calls,
            aggregated_metrics={},
            policy_state={},
            config=SimpleNamespace(
                get_target_ongoing_requests=lambda: 2.0, get_upscaling_factor=lambda: 1.0
            ),
        )

    fields = {"prompt_rate": 1e4, "output_rate": 5e3, "start_seconds": 30.0}
    policy = PoolsPolicy({"cpu": fields}, {"busy": 0.9})
    contexts = {name: context(name, 9.0) for name in ("router", "engine-cpu", "encoder-pictures")}
    decisions, _ = policy(contexts)
    assert decisions["encoder-pictures"] == 5 and decisions["engine-cpu"] <= 2


def test_the_plan_counts_the_tower_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bugs: an encoder pool is planned as a whole engine, or refused for a GPU's plan."""
    save_model(tmp_path / "m", CASES["Qwen3-VL"])
    file = tmp_path / "manta.yaml"
    encoder = "pictures: {role: encoder, engine: {image_cache_tokens: 512}}"
    file.write_text(f"model: m\npools:\n  cpu: {{}}\n  {encoder}\n")
    plan.run(str(file), "cpu", None, 8.0)
    pool = capsys.readouterr().out.partition(
        "Pool     pictures (encoder: the tower alone, on a CPU)"
    )[2]
    lines = pool.splitlines()[1:6]
    assert [line.split()[0] for line in lines] == ["weights", "activations", "Python", "in", "rate"]
    assert "pictures/s a core (640 x 427)" in lines[4]
    assert "Pool     pictures: encoders are not in these costs" in pool
    assert "512 embeddings" in lines[1] and "0.7" in lines[3]
    file.write_text(f"model: m\npools:\n  gpu: {{}}\n  {encoder}\n")
    plan.run(str(file), "h200", None, None)
    assert "Pool     pictures (encoder: the tower alone, on a CPU)" in capsys.readouterr().out


def test_rates_are_those_that_were_measured() -> None:
    """Bug: a rate of other units or another tower's, by which a pool is made ten times too small.

    519 pictures of 270 embeddings took Qwen3-VL-8B's tower 1.83 s on an H200.
    """
    pools = {"gpu": {}, "pictures": ENCODER | {"num_gpus": 1}}
    config = parse_config({"model": str(QWEN), "pools": pools}, check_files=False)
    model = ModelConfig.from_file(QWEN / "config.json")
    (encoder,) = plan_encoders(config, model, Hardware.gpu("h200"))
    assert encoder.pictures_s == pytest.approx(519 / 1.83 * 270 / 260, rel=0.1)
    assert encoder.rate == f"about {encoder.pictures_s:.0f} pictures/s a GPU"
    (unknown,) = plan_encoders(config, model, Hardware("a CPU", "cpu", 0))
    assert (unknown.kind, unknown.rate) == ("cuda", "")


def test_doctor_has_a_line_of_each_encoder_pool(tmp_path: Path) -> None:
    """Bug: an encoder that does not fit is known once its actor ends."""
    save_model(tmp_path / "m", CASES["Qwen3-VL"])
    pools = {"cpu": {}, "pictures": {"role": "encoder"}}
    config = parse_config({"model": str(tmp_path / "m"), "pools": pools}, check_files=False)
    checks = list(model_checks(config, None, Hardware("a CPU", "cpu", 8 * GIB)))
    (check,) = [check for check in checks if check.name == "encoder pool"]
    assert (check.state, "pictures: 0." in check.text) == ("ok", True)
    assert "pictures/s a core" in check.text
    checks = list(model_checks(config, None, Hardware("a CPU", "cpu", GIB // 2)))
    assert [check for check in checks if check.state == "MISSING"]
