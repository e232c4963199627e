"""Fixtures and hooks of all tests: the default model, shared Ray clusters, skips of GPU tests on
machines without a GPU, and settings of garbage collection and cores.
"""

import atexit
import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.deployments.on_ray.serve_cluster import Cluster
    from tests.deployments.replica.collector import Collector
    from tests.faults.ray_nodes import NodesCluster

# Tests start Ray's processes by fork and exec from a process with gRPC threads of earlier tests.
# gRPC's fork handlers serve children that continue to use gRPC; here they once hung, so that Ray
# never started.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


@pytest.fixture(scope="session")
def default_model() -> Path:
    """Return the folder of SmolLM2-135M-Instruct (bfloat16 safetensors), which is built once.

    MANTA_TEST_MODEL: the model's file or folder, for machines without a network.
    """
    from deployments.checkpoints.resolve import resolve_model

    spec = os.environ.get("MANTA_TEST_MODEL", "default")
    return resolve_model(spec, progress=lambda what, done, total: None)


# Session fixtures that end after the last test that uses them, in reverse order.
_SHARED = {
    name: contextlib.ExitStack()
    for name in ("shared_cluster", "shared_fleet", "shared_pair", "shared_nodes")
}


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator["Cluster"]:
    """Yield a Ray cluster with Serve behind Serve's own proxy, set up as `manta serve` does.

    The fixture is for tests that deploy their own applications and delete them. It is shared
    because starting it takes as long as many tests.
    """
    from deployments.app import cluster_environment
    from deployments.config.load import parse_config
    from tests.deployments.on_ray.serve_cluster import ray_and_serve

    config = parse_config({"model": "default", "http": {"proxy": "serve"}}, {})
    # The cluster's processes get these environment variables, its drivers do not.
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cluster_environment(config, "").items():
            patch.setenv(name, value)
        cluster = _SHARED["shared_cluster"].enter_context(ray_and_serve(6))
    yield cluster
    _SHARED["shared_cluster"].close()  # after Ctrl-C; otherwise the teardown hook has closed it


@pytest.fixture(scope="session")
def shared_fleet(
    shared_cluster: "Cluster", tmp_path_factory: pytest.TempPathFactory
) -> Iterator["Cluster"]:
    """Yield the shared cluster with the application `manta` at /: a router and two fake engines,
    whose tokens count up.

    The fixture is for tests that only send requests and do not change routers or engines.
    """
    from tests.deployments.on_ray.serve_cluster import fleet

    folder = tmp_path_factory.mktemp("fleet")
    yield _SHARED["shared_fleet"].enter_context(fleet(shared_cluster, folder))
    _SHARED["shared_fleet"].close()


@pytest.fixture(scope="session")
def shared_pair(
    shared_cluster: "Cluster", tmp_path_factory: pytest.TempPathFactory
) -> Iterator["Collector"]:
    """Yield the collector of traces of the application `pair` on the shared cluster.

    `pair` has two routers and two fake engines, and serves /. The fixture is for tests of single
    routers.
    """
    from tests.deployments.on_ray.serve_cluster import traced_pair

    folder = tmp_path_factory.mktemp("pair")
    yield _SHARED["shared_pair"].enter_context(traced_pair(shared_cluster, folder))
    _SHARED["shared_pair"].close()


@pytest.fixture(scope="session")
def shared_nodes() -> Iterator["NodesCluster"]:
    """Yield a Ray cluster with Serve, to which tests add nodes and from which they remove them."""
    from tests.faults.ray_nodes import ray_nodes

    yield _SHARED["shared_nodes"].enter_context(ray_nodes())
    _SHARED["shared_nodes"].close()


def _shares(item: pytest.Item) -> tuple[bool, ...]:
    names = getattr(item, "fixturenames", ())
    return tuple(name in names for name in _SHARED)


@pytest.hookimpl(wrapper=True, trylast=True)  # inside the hooks that capture output
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """End the shared fixtures with the last test that uses them.

    Later tests start a Ray of their own in this process, deploy at the same route, or read clocks.
    """
    try:
        return (yield)
    finally:
        needed = (False,) * len(_SHARED) if nextitem is None else _shares(nextitem)
        for stack, is_needed in reversed(list(zip(_SHARED.values(), needed, strict=True))):
            if not is_needed:
                stack.close()
        if nextitem is not None and nextitem.path != item.path:
            _freeze()  # quick, unless a test or a fixture has called gc.unfreeze


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_shares, reverse=True)  # tests of a shared fixture are adjacent; stable
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch  # takes two seconds, so only for runs with GPU tests

    devices = torch.cuda.device_count()
    for item in marked:
        if not devices:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        elif devices < 2 and item.get_closest_marker("two_gpus"):
            item.add_marker(pytest.mark.skip(reason="needs two CUDA devices"))


def pytest_collection_finish() -> None:
    _freeze()
    gc.enable()


def _freeze() -> None:
    """Exempt all existing objects from garbage collection, after collecting garbage once.

    These objects live as long as the process. Each engine that a test builds collects garbage, and
    scanning them took most of the time of a small test.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.enable()  # test collection may have failed before enabling it
    # Otherwise native bindings report leaks at exit. Before that, pytest collects garbage twice.
    atexit.register(gc.unfreeze)


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # during test collection, whose imports stay in memory anyway
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        _take_one_core(int(worker.removeprefix("gw")))
    try:
        from triton import knobs
    except ImportError:  # not Linux, so no Triton kernels are tested
        return
    if knobs.runtime.interpret:
        from tests import interpreter

        interpreter.guard()
        interpreter.shorten()


def _take_one_core(worker: int) -> None:
    """Restrict this process to one core, chosen by the worker's number.

    Engines use a thread for each core they may use. Two tests in parallel would each wait for
    threads that the other test keeps from running, and take ten times longer.
    """
    if hasattr(os, "sched_setaffinity"):  # Linux
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[worker % len(cores)]})
