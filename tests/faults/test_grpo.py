"""A GRPO loop over replicas that are killed: tests.faults.grpo with a tiny model."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.deployments.on_ray.serve_cluster import Cluster, tiny_model
from tests.faults.grpo import compared, fleet, run

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(280)]


def test_rollouts_are_the_same_under_kills(shared_cluster: Cluster, tmp_path: Path) -> None:
    """A rollout that moves has other tokens, or those of other weights, so that training runs
    differ; or the loop ends with the replica."""
    folder = tiny_model(tmp_path / "tiny")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    settings = {"length": 60, "rate": 5e-3}
    with fleet(shared_cluster, folder, dtype="float32") as broken:
        quiet = run(broken, folder, tmp_path / "work", 4, 0.0, **settings)
        killed = run(broken, folder, tmp_path / "work", 4, 1.0, **settings)
    figures = compared(quiet, killed)
    assert figures["same"] and figures["kills"], figures
    assert figures["reward_second_half"] > figures["reward_first_half"], figures
