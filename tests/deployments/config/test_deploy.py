"""cluster.yaml and deploy/: what a cloud would refuse after an hour, refused here."""

import configparser
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import ray.autoscaler._private as ray_autoscaler
import yaml  # Ray's own, with anchors, which our configuration refuses

from deployments.app import as_config, cluster_environment
from deployments.cli.building.kubernetes import memory_of, rayservice
from deployments.config.load import load_config, parse_config
from deployments.haproxy.settings import EdgeSettings
from engine.errors import ConfigError

ROOT = Path(__file__).parents[3]
AWS, GCP = ROOT / "cluster.yaml", ROOT / "deploy" / "gcp.yaml"


def read(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(path.read_text("utf-8"))
    return loaded


def prepared(path: Path) -> dict[str, Any]:
    """Return a cluster file's content after the checks of `ray up`."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    config: dict[str, Any] = prepare_config(read(path))
    validate_config(config)
    return config


def needed(folder: str) -> dict[str, str]:
    """Return the environment variables that every process of a cluster needs.

    HAProxy's ports are left out, as they only matter if several clusters share a machine.
    """
    wanted = cluster_environment(parse_config({"http": {"proxy": "haproxy"}}), folder)
    assert EdgeSettings.decode(wanted.pop("MANTA_EDGE")) == EdgeSettings(
        host="127.0.0.1", prefix="/"
    )
    return {name: value for name, value in wanted.items() if not name.endswith("_PORT")}


# -- ray up


@pytest.mark.parametrize("path", [AWS, GCP], ids=["aws", "gcp"])
def test_cluster_files_pass_rays_schema(path: Path) -> None:
    """`ray up` finds a misspelt key only after it has asked the cloud for an hour of your time."""
    from ray._private.label_utils import validate_node_label_syntax

    kinds = prepared(path)["available_node_types"]
    for kind in kinds.values():
        assert not validate_node_label_syntax(kind["labels"])
    parted = {"gpu-4"} if path == AWS else set()
    assert {kind["labels"]["pool"] for kind in kinds.values()} == {"head", "gpu", "cpu"} | parted
    assert kinds["head"]["resources"]["CPU"] == 0, "engines on the head starve the routers"
    assert kinds["cpu"]["min_workers"] == 1
    assert all(kind["max_workers"] for name, kind in kinds.items() if name != "head")


@pytest.mark.parametrize("path", [AWS, GCP], ids=["aws", "gcp"])
def test_cluster_files_are_closed_and_survive_their_head(path: Path) -> None:
    """A dashboard for everyone; a cluster that forgets what it served; a token on one node only."""
    config = prepared(path)
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    head, worker = config["head_start_ray_commands"][-1], config["worker_start_ray_commands"][-1]
    for command in (head, worker):
        assert command.startswith(". ~/manta/deploy/environment.sh;")
    assert "--dashboard-host=127.0.0.1" in head and "0.0.0.0" not in head
    assert "RAY_gcs_storage=rocksdb RAY_gcs_storage_path=$HOME/gcs" in head
    assert f"drain_on_notice.py {config['provider']['type']}" in worker
    assert any("RAY_AUTH_MODE=token" in command for command in config["setup_commands"])


@pytest.mark.parametrize("path", [AWS, GCP], ids=["aws", "gcp"])
def test_the_head_has_its_clouds_client(path: Path) -> None:
    """google-api-python-client was installed nowhere: `ray start` reported success, the autoscaler
    failed in its log, and no worker ever started."""
    cloud = read(path)["provider"]["type"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    packages = {
        re.split(r"[\[><=;]", requirement)[0]
        for requirement in project["optional-dependencies"][cloud]
    }
    config = prepared(path)
    assert f"cd ~/manta && make install EXTRAS={cloud}" in config["setup_commands"]
    (checked,) = re.findall(r"python -c 'import ([^']*)' &&", config["head_start_ray_commands"][-1])
    # What Ray's provider and its first step import, against what is checked and installed.
    imports: set[str] = set()
    for module in (Path(ray_autoscaler.__file__).parent / cloud).glob("*.py"):
        imports |= set(re.findall(r"(?m)^\s*(?:from|import) (\w+)", module.read_text("utf-8")))
    wanted = {
        "boto3": "boto3",
        "googleapiclient": "google-api-python-client",
        "google_auth_httplib2": "google-auth-httplib2",
    }
    needed = {name for name in wanted if name in imports}
    assert needed == {name.strip().split(".")[0] for name in checked.split(",")}
    assert packages == {wanted[name] for name in needed}


def test_systemd_gets_what_it_needs_to_end_and_restart_a_server() -> None:
    """systemd's default signals every process, Ray's too, and nothing drains; its own limit of
    files is 1,024, and a wrong configuration would be started again for ever."""
    unit = configparser.RawConfigParser(strict=False)
    unit.read(ROOT / "deploy" / "manta.service", "utf-8")
    service = unit["Service"]
    assert re.fullmatch(r"/\S+/manta serve /\S+\.yaml", service["ExecStart"])
    assert (service["KillMode"], service["KillSignal"]) == ("mixed", "SIGTERM")
    assert (service["Restart"], service["RestartPreventExitStatus"]) == ("on-failure", "2")
    drains = parse_config({}, {}).limits.drain_seconds
    assert int(service["TimeoutStopSec"]) >= drains + 50
    assert int(service["LimitNOFILE"]) >= 65536


def test_every_process_gets_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's processes read it at their start; a name left out is a slow or a cut stream, or an
    edge that slow clients can fill."""
    monkeypatch.delenv("RAY_SERVE_HAPROXY_BINARY_PATH", raising=False)
    show = "import os, json; print(json.dumps(dict(os.environ)))"
    script = f". {ROOT}/deploy/environment.sh; {sys.executable} -c '{show}'"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY")}
    clean["PATH"] = f"{Path(sys.executable).parent}:{clean['PATH']}"
    done = subprocess.run(["sh", "-c", script], env=clean, capture_output=True, text=True)
    by_k = {k: v for k, v in json.loads(done.stdout).items() if k.startswith("RAY")}
    assert by_k.pop("RAY_AUTH_MODE") == "token"
    assert by_k.pop("RAY_gcs_rpc_server_reconnect_timeout_s") == "600"
    folder = Path(by_k["RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"]).parent
    try:
        assert folder.stat().st_mode & 0o777 == 0o700 and len(str(folder)) <= 26
        launcher = Path(by_k["RAY_SERVE_HAPROXY_BINARY_PATH"])
        assert os.access(launcher, os.X_OK) and launcher.parent == folder
        assert by_k == needed(str(folder))
    finally:
        shutil.rmtree(folder)
    (head,) = read(ROOT / "deploy" / "rayservice.yaml")["spec"]["rayClusterConfig"][
        "headGroupSpec"
    ]["template"]["spec"]["containers"]
    pod = {name: value for name, value in by_k.items() if not value.startswith(str(folder))}
    pod["RAY_SERVE_HAPROXY_BINARY_PATH"] = "/usr/local/bin/manta-haproxy"  # of deploy/Dockerfile
    assert {
        variable["name"]: variable["value"] for variable in head["env"] if "value" in variable
    } == pod


SUBNETS = [
    {
        "SubnetId": f"subnet-{zone}",
        "VpcId": "vpc-1",
        "State": "available",
        "MapPublicIpOnLaunch": True,
        "AvailabilityZone": f"us-west-2{zone}",
    }
    for zone in "ab"
]
GROUP = {
    "GroupId": "sg-1",
    "GroupName": "manta",
    "VpcId": "vpc-1",
    "IpPermissions": [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": "sg-1"}]}],
}


def test_aws_bootstrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Ray makes of the file at AWS, and AWS's own check of what it is then asked for: a wrong
    key of a node, a group that Ray opens to everyone, a role that is not there."""
    boto3 = pytest.importorskip("boto3")
    from botocore.exceptions import ParamValidationError
    from botocore.stub import Stubber
    from ray.autoscaler._private.aws import config as aws

    resource = boto3.resource(
        "ec2", "us-west-2", aws_access_key_id="id", aws_secret_access_key="key"
    )
    monkeypatch.setenv("HOME", str(tmp_path))  # a key pair is written there
    monkeypatch.setattr(aws, "_resource", lambda *_, **__: resource)
    monkeypatch.setattr(aws, "_client", lambda *_, **__: resource.meta.client)
    config = prepared(AWS)
    with Stubber(resource.meta.client) as stub:
        stub.add_response("describe_key_pairs", {"KeyPairs": []})
        stub.add_response("create_key_pair", {"KeyName": "k", "KeyMaterial": "secret"})
        stub.add_response("describe_subnets", {"Subnets": SUBNETS})
        stub.add_response("describe_subnets", {"Subnets": SUBNETS[1:]})  # the VPC of the first
        stub.add_response("describe_security_groups", {"SecurityGroups": [GROUP]})
        # Nothing else: no role is made, and no rule is added to a group that has its own.
        done = aws.bootstrap_aws(config)
        stub.assert_no_pending_responses()
        for kind in done["available_node_types"].values():
            node = dict(kind["node_config"])
            assert node["SecurityGroupIds"] == ["sg-1"] and node["SubnetIds"]
            node["SubnetId"] = node.pop("SubnetIds")[0]
            stub.add_response("run_instances", {"Instances": [{"InstanceId": "i-1"}]})
            resource.meta.client.run_instances(MinCount=1, MaxCount=1, **node)  # checks its keys
            stub.add_response("run_instances", {"Instances": []})
            with pytest.raises(ParamValidationError, match="Unknown parameter"):
                resource.meta.client.run_instances(MinCount=1, MaxCount=1, **node, InstanceTyp="x")
    kinds = done["available_node_types"]
    assert "IamInstanceProfile" in kinds["head"]["node_config"]
    assert not [
        n for n, k in kinds.items() if n != "head" and "IamInstanceProfile" in k["node_config"]
    ]
    spot = kinds["gpu-spot"]
    assert spot["node_config"]["InstanceMarketOptions"]["MarketType"] == "spot"
    assert spot["priority"] > kinds["gpu"]["priority"]
    assert spot["resources"] == kinds["gpu"]["resources"]


def test_gcp_nodes_are_in_the_closed_network() -> None:
    """A node type without an interface of its own: Ray takes the first network that it finds,
    `default`, which has SSH open to everyone."""
    config = prepared(GCP)
    script = (ROOT / "deploy" / "gcp.sh").read_text()
    assert subprocess.run(["sh", "-n"], input=script, text=True).returncode == 0
    assert "0.0.0.0/0" not in script and "NAME=manta" in script and "/manta" in GCP.read_text()
    region = config["provider"]["region"]
    for kind in config["available_node_types"].values():
        (interface,) = kind["node_config"]["networkInterfaces"]
        assert interface["subnetwork"] == f"regions/{region}/subnetworks/manta"
    assert f"REGION=${{1:-{region}}}" in script


def test_the_default_group_would_be_open() -> None:
    """The reason for deploy/aws.sh. When Ray no longer opens SSH to everyone, it can go."""
    pytest.importorskip("boto3")
    from ray.autoscaler._private.aws.config import _create_default_inbound_rules

    rules = _create_default_inbound_rules({"sg-1"})
    assert [rule["FromPort"] for rule in rules if rule.get("IpRanges")] == [22]
    script = (ROOT / "deploy" / "aws.sh").read_text()
    assert subprocess.run(["sh", "-n"], input=script, text=True).returncode == 0
    assert "0.0.0.0/0" not in script and "GroupName: manta" in AWS.read_text()
    assert "Name: manta-head" in AWS.read_text() and "NAME=manta" in script


# -- KubeRay


def test_rayservice_is_what_kuberay_and_serve_take() -> None:
    """A field in the wrong place is dropped by Kubernetes without a word."""
    from ray.serve.schema import ServeDeploySchema

    service = read(ROOT / "deploy" / "rayservice.yaml")
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    spec = service["spec"]
    assert set(spec) == {"serveConfigV2", "rayClusterConfig"}
    cluster = spec["rayClusterConfig"]
    assert set(cluster) == {
        "rayVersion",
        "enableInTreeAutoscaling",
        "autoscalerOptions",
        "authOptions",
        "gcsFaultToleranceOptions",
        "headGroupSpec",
        "workerGroupSpecs",
    }
    assert cluster["authOptions"] == {"mode": "token"} and cluster["enableInTreeAutoscaling"]
    pinned = (ROOT / "constraints.txt").read_text()
    assert f"\nray=={cluster['rayVersion']}\n" in pinned
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        assert set(group) <= {
            "groupName",
            "labels",
            "replicas",
            "minReplicas",
            "maxReplicas",
            "rayStartParams",
            "template",
        }
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        (container,) = group["template"]["spec"]["containers"]
        assert {"name", "image", "env", "resources"} <= set(container)
    assert [group["labels"]["pool"] for group in groups] == ["head", "gpu", "cpu"]
    for group in groups[1:]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        grace = group["template"]["spec"]["terminationGracePeriodSeconds"]
        assert grace > 80 > load_config(ROOT / "deploy" / "manta.yaml", {}).limits.drain_seconds

    serve_schema = yaml.safe_load(spec["serveConfigV2"])
    ServeDeploySchema.model_validate(serve_schema)
    (mine,) = serve_schema["applications"]
    built = rayservice(load_config(ROOT / "deploy" / "manta.yaml", {}))
    theirs = built["spec"].pop("serveConfigV2")
    hint = "run: manta build deploy/manta.yaml --kubernetes, and put it into deploy/rayservice.yaml"
    assert serve_schema == json.loads(json.dumps(theirs)), hint
    assert {**service, "spec": {"rayClusterConfig": cluster}} == built, hint
    ports = [
        port["containerPort"] for port in groups[0]["template"]["spec"]["containers"][0]["ports"]
    ]
    assert serve_schema["http_options"]["port"] in ports
    # What a group can hold is what its pool may have.
    limits = {
        deployment["name"]: deployment["autoscaling_config"] for deployment in mine["deployments"]
    }
    for group in groups[1:]:
        pool = limits[f"engine-{group['groupName']}"]
        assert (group["minReplicas"], group["maxReplicas"]) == (
            pool["min_replicas"],
            pool["max_replicas"],
        )


def pods(service: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = service["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"] for group in groups]


def test_pods_are_what_kubernetes_takes() -> None:
    """A misspelt field of a pod: Kubernetes drops it, or refuses the manifest after an hour."""
    import kubernetes_validate

    config = parse_config(
        {
            "model": "org/name",
            "pools": {
                "gpu": {"num_gpus": 0.5, "max_replicas": 3, "min_replicas": 0},
                "cpu": {
                    "replicas": 2,
                    "num_cpus": 6,
                    "resources": {"pool_a": 0.001},
                    "engine": {"pipeline_parallel": 2, "pipeline_nodes": 2},
                },
            },
            "limits": {"drain_seconds": 200},
            "http": {"connections": 64},
        },
        {},
    )
    built = rayservice(config, "me/manta:1", {"cpu": "8Gi"})
    for template in (*pods(read(ROOT / "deploy" / "rayservice.yaml")), *pods(built)):
        whole = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "a"}}
        kubernetes_validate.validate({**whole, "template": template}, "1.34", strict=True)
        assert template["spec"]["securityContext"]["runAsNonRoot"]
        (container,) = template["spec"]["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
    with pytest.raises(kubernetes_validate.ValidationError):
        pod = {"spec": {"container": []}}
        kubernetes_validate.validate({**whole, "template": pod}, "1.34", strict=True)
    gpu, cpu = built["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert (gpu["groupName"], gpu["minReplicas"], gpu["maxReplicas"]) == ("gpu", 0, 3)
    assert (cpu["minReplicas"], cpu["maxReplicas"], cpu["labels"]) == (4, 4, {"pool": "cpu"})
    assert json.loads(json.loads(cpu["rayStartParams"]["resources"])) == {"pool_a": 0.001}
    spec = cpu["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] > 200
    (container,) = spec["containers"]
    assert container["resources"]["requests"] == {"cpu": "7", "memory": "8Gi"}
    assert container["image"] == "me/manta:1"
    (edge,) = [
        variable["value"] for variable in container["env"] if variable["name"] == "MANTA_EDGE"
    ]
    assert EdgeSettings.decode(edge) == EdgeSettings(connections=64, prefix="/")
    gpus = gpu["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert gpus == "1"
    with pytest.raises(ConfigError, match="num_cpus"):
        rayservice(parse_config({"model": "org/name", "pools": {"cpu": {}}}, {}))
    with pytest.raises(ConfigError, match=r"--memory all=1Gi: .*; groups: head, gpu, cpu"):
        rayservice(config, memory=memory_of(["all=1Gi"]))
    with pytest.raises(ConfigError, match="--memory cpu: "):
        memory_of(["cpu"])


def test_pods_keep_models_and_reach_gated_ones() -> None:
    """Each new pod fetched its model again, and a gated one was out of reach: pods had neither a
    volume nor a token of the hub."""
    import kubernetes_validate

    config = parse_config({"model": "org/name", "pools": {"cpu": {"num_cpus": 2}}}, {})
    for claim, volume in (
        ("", {"name": "cache", "emptyDir": {}}),
        ("models", {"name": "cache", "persistentVolumeClaim": {"claimName": "models"}}),
    ):
        for template in pods(rayservice(config, cache_claim=claim)):
            whole = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "a"}}
            kubernetes_validate.validate({**whole, "template": template}, "1.34", strict=True)
            assert volume in template["spec"]["volumes"]
            (container,) = template["spec"]["containers"]
            assert {"name": "cache", "mountPath": "/cache"} in container["volumeMounts"]
            (token,) = [variable for variable in container["env"] if variable["name"] == "HF_TOKEN"]
            secret = token["valueFrom"]["secretKeyRef"]
            assert secret == {"name": "manta-hub", "key": "token", "optional": True}
    with pytest.raises(ConfigError, match="--cache-claim My_Claim: "):
        rayservice(config, cache_claim="My_Claim")


def test_several_models_have_groups_of_their_own() -> None:
    """Pods of one model that the other's replicas take; two groups of one name, or of one that
    Kubernetes refuses; a model whose pods are as large as the machine that built the file."""
    import kubernetes_validate
    from ray.serve.schema import ServeDeploySchema

    gpu = {"gpu": {"min_replicas": 0, "max_replicas": 3}}
    config = parse_config(
        {
            "models": {
                "llama": {"model": "org/a", "pools": gpu},
                "Qwen/Qwen3-4B": {"model": "org/b", "pools": {"cpu": {"num_cpus": 6}}},
                "mine": {"model": "org/c", "pools": {"gpu": {"labels": {"team": "x"}}}},
            }
        },
        {},
    )
    built = rayservice(config, "me/manta:1", {"llama-gpu": "99Gi", "cpu": "8Gi"})
    groups = built["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    names = [group["groupName"] for group in groups]
    assert names == ["llama-gpu", "qwen-qwen3-4b-c55853-cpu", "mine-gpu"]
    assert all(re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name) for name in names)
    assert [(group["minReplicas"], group["maxReplicas"]) for group in groups] == [
        (0, 3),
        (1, 1),
        (1, 1),
    ]
    requests = [
        group["template"]["spec"]["containers"][0]["resources"]["requests"] for group in groups
    ]
    assert [request["memory"] for request in requests] == ["99Gi", "8Gi", "32Gi"]
    for template in pods(built):
        whole = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "a"}}
        kubernetes_validate.validate({**whole, "template": template}, "1.34", strict=True)
    schema = built["spec"]["serveConfigV2"]
    ServeDeploySchema.model_validate(schema)
    routers, *models = schema["applications"]
    assert routers["name"] == "manta" and len(models) == 3
    for group, model in zip(groups, models, strict=True):
        (pool,) = model["args"]["config"]["pools"].values()
        assert pool["labels"] == group["labels"], "a replica goes to its own pods"
    assert groups[2]["labels"] == {"team": "x"}
    with pytest.raises(ConfigError, match=r"models\.a\.pools must be there"):
        rayservice(parse_config({"models": {"a": {"model": "org/a"}}}, {}))
    with pytest.raises(ConfigError, match=r"models\.a\.pools\.cpu\.num_cpus must be there"):
        request = {"model": "org/a", "pools": {"cpu": {}}}
        rayservice(parse_config({"models": {"a": request}}, {}))
    with pytest.raises(ConfigError, match="pods with GPUs of their own"):
        naps = {"engine": {"sleep_in_host_memory": True}, "pools": {"gpu": {"num_gpus": 0.5}}}
        rayservice(parse_config({"models": {"a": {"model": "org/a", **naps}}}, {}))
    with pytest.raises(ConfigError, match="groups: head, gpu, cpu, llama-gpu, "):
        rayservice(config, memory={"lama-gpu": "1Gi"})


# -- containers


def test_the_image_has_what_it_runs_and_its_user_has_no_rights() -> None:
    """A folder that the build does not copy; a base or a package of the day; a root in there."""
    lines = (ROOT / "deploy" / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line.strip() and line[0] != "#"]
    text = "\n".join(rest for _, rest in steps)
    stages: dict[str, list[tuple[str, str]]] = {}
    parents: dict[str, str] = {}
    for word, rest in steps:
        if word == "FROM":
            parent, _, name = rest.split()
            parents[name], stages[name] = parent, []
        elif stages:
            stages[name].append((word, rest))
    (base,) = [rest.split("=", 1)[1] for word, rest in steps if rest.startswith("BASE=")]
    assert re.fullmatch(r"python:3\.12\.\d+-slim-\w+", base) and parents["base"] == "${BASE}"
    copied = [rest.split() for word, rest in stages["base"] if word == "COPY"]
    sources = {name for names in copied for name in names[:-1]}
    assert sources >= {*PACKAGES, "pyproject.toml", "constraints.txt", "README.md", "LICENSE"}
    assert all((ROOT / name).exists() for name in sources)
    assert text.count("pip install") == text.count("-c /manta/constraints.txt /manta") == 2
    for target in ("cpu", "cuda"):
        items = dict(stages[target])
        assert items["USER"] == "1000:1000" and "/health" in items["HEALTHCHECK"]
        assert (items["ENTRYPOINT"], items["CMD"]) == ('["manta"]', '["serve", "default"]')
        assert "useradd" not in parents[target] and parents[parents[target]] == "base"
    kubernetes = pods(read(ROOT / "deploy" / "rayservice.yaml"))[0]["spec"]["containers"][0]
    assert {mount["mountPath"] for mount in kubernetes["volumeMounts"]} == WRITTEN
    for name in ("MANTA_CACHE", "HF_HOME", "TRITON_CACHE_DIR"):
        assert f"{name}=/cache/" in text


WRITTEN = {"/tmp", "/home/ray", "/cache"}  # all that a server writes to
PACKAGES = ("deployments", "engine", "kernels", "loadtest")


def test_compose_starts_what_the_file_builds() -> None:
    """A key of a service that compose does not know; a port for everyone; a root folder that is
    written to."""
    text = read(ROOT / "deploy" / "compose.yaml")
    assert set(text) == {"name", "x-manta", "services", "volumes"}
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    for service in text["services"].values():
        # All of them are keys of a service in the Compose Specification.
        assert set(service) <= {
            *("command", "ports", "volumes", "read_only", "tmpfs", "shm_size", "init", "user"),
            *("cap_drop", "security_opt", "stop_grace_period", "restart", "image", "build"),
            *("profiles", "deploy"),
        }
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        mounts = [mount.split(":")[0] for mount in service["tmpfs"]]
        mounts += [mount.split(":")[1] for mount in service["volumes"]]
        assert set(mounts) == WRITTEN and all("exec" in mount for mount in service["tmpfs"])
        assert f"AS {service['build']['target']}\n" in dockerfile
        assert (ROOT / "deploy" / service["build"]["context"]).resolve() == ROOT
        assert (ROOT / service["build"]["dockerfile"]).exists()
        seconds = int(service["stop_grace_period"].removesuffix("s"))
        assert seconds > parse_config({}, {}).limits.drain_seconds
    (device,) = text["services"]["manta-cuda"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}


def test_what_is_built_is_what_serve_takes(tmp_path: Path) -> None:
    """`manta build` for a file that `serve deploy` then refuses."""
    from ray.serve.schema import ServeDeploySchema

    path = tmp_path / "manta.yaml"
    path.write_text("model: default\nreplicas: 2\nlog: {level: debug, format: json}\n")
    command = [sys.executable, "-m", "deployments.cli.main", "build", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    built = yaml.safe_load(done.stdout)
    ServeDeploySchema.model_validate(built)
    assert as_config(built["applications"][0]["args"]).log.format == "json"


# -- the notice


@pytest.fixture(scope="module")
def notice() -> ModuleType:
    spec = importlib.util.spec_from_file_location("notice", ROOT / "deploy" / "drain_on_notice.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Metadata(BaseHTTPRequestHandler):
    """A cloud's metadata service, which asks for tokens as that of AWS does. answers: path ->
    text."""

    answers: dict[str, str]

    def log_message(self, *args: object) -> None:
        """Log nothing."""

    def do_PUT(self) -> None:
        self._reply(200, "token-1")

    def do_GET(self) -> None:
        google = self.headers.get("Metadata-Flavor") == "Google"
        allowed = google or self.headers.get("X-aws-ec2-metadata-token") == "token-1"
        text = self.answers.get(self.path)
        self._reply(401 if not allowed else 404 if text is None else 200, text or "")

    def _reply(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def metadata() -> Iterator[tuple[str, dict[str, str]]]:
    answers: dict[str, str] = {}
    handler = type("Handler", (Metadata,), {"answers": answers})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", answers
    server.shutdown()
    server.server_close()


def test_notices_are_understood(notice: ModuleType, metadata: tuple[str, dict[str, str]]) -> None:
    """A machine that is taken away with its requests, because a notice has another form."""
    base, answers = metadata
    assert notice.aws_notice(base) is None and notice.gcp_notice(base) is None
    end = datetime.now(UTC) + timedelta(seconds=118)
    fields = {"action": "terminate", "time": end.strftime("%Y-%m-%dT%H:%M:%SZ")}
    answers["/latest/meta-data/spot/instance-action"] = json.dumps(fields)
    answers["/computeMetadata/v1/instance/preempted"] = "FALSE"
    assert 110 < notice.aws_notice(base) <= 118
    assert notice.gcp_notice(base) is None
    answers["/computeMetadata/v1/instance/preempted"] = "TRUE"
    assert notice.gcp_notice(base) == 30
    assert notice.aws_notice("http://127.0.0.1:1") is None  # not such a machine


def test_ray_is_told_until_it_has_understood(notice: ModuleType, tmp_path: Path) -> None:
    """The notice comes while the head restarts, and is never repeated."""
    collected: list[int] = []
    slept: list[float] = []
    answers = iter([None, None, 100, 99, 98])

    def drain(seconds: int) -> bool:
        collected.append(seconds)
        return len(collected) == 3

    notice.watch(lambda: next(answers), drain, slept.append)
    assert collected == [100, 99, 98] and slept == [5.0, 5.0, 1.0, 1.0]


def test_the_command_is_one_that_ray_has(
    notice: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ray drain-node` is hidden and may change: then this fails, and not a node's end."""
    from click.testing import CliRunner
    from ray.scripts.scripts import cli

    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> Any:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(notice.subprocess, "run", run)
    assert notice.drain(118)
    (command,) = commands
    assert command[0].endswith("/ray") and "--deadline-remaining-seconds=113" in command
    result = CliRunner().invoke(cli, [*command[1:], "--help"])
    assert result.exit_code == 0, result.output
    for argument in command[2:]:
        assert argument.split("=")[0] in result.output
    assert "DRAIN_NODE_REASON_PREEMPTION" in result.output
