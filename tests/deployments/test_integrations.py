"""Integrations of trainers, by their recorded calls and, where it is installed, the package."""

import ast
import asyncio
import importlib.util
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from deployments.integrations.openrlhf import RolloutActor, read_sampling
from engine import WeightSender
from engine.errors import ConfigError, InvalidRequest, UpdateFailed
from engine.text.token_ids import missing_ids
from tests.deployments.on_ray.serve_cluster import Cluster, free_port, tiny_model

PROMPT = [5, 6, 7, 8]
HANDLE = (print, (torch.Tensor, torch.Size([1]), (1,), 0, torch.UntypedStorage, torch.float32))
# The actor of OpenRLHF 0.11.2: its methods with their arguments, as its trainer calls them.
ACTOR = {
    "init_process_group": "master_address master_port rank_offset world_size group_name backend "
    "use_ray",
    "update_weight": "name dtype shape empty_cache",
    "update_weight_cuda_ipc": "name dtype shape ipc_handles empty_cache",
    "reset_prefix_cache": "",
    "pause_generation": "",
    "resume_generation": "",
    "sleep": "level",
    "wake_up": "tags",
    "generate": "prompt_token_ids sampling_params multi_modal_data",
    "get_num_unfinished_requests": "",
    "generate_responses": "prompt label sampling_params max_length hf_tokenizer num_samples images",
}


def test_methods_of_openrlhf() -> None:
    """OpenRLHF's trainer calls a method that the actor has not, or by another argument."""
    mine = {
        name: " ".join([*inspect.signature(method).parameters][1:])
        for name, method in vars(RolloutActor).items()
        if inspect.isfunction(method) and not name.startswith("_")
    }
    assert mine == ACTOR
    package = importlib.util.find_spec("openrlhf")
    if package is None or package.submodule_search_locations is None:
        return
    (folder,) = package.submodule_search_locations
    tree = ast.parse((Path(folder) / "trainer/ray/vllm_engine.py").read_text("utf-8"))
    (actor,) = (
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "RolloutRayActor"
    )
    theirs = {
        node.name: " ".join(argument.arg for argument in node.args.args[1:])
        for node in actor.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name[0] != "_"
    }
    assert theirs == ACTOR


def params(**fields: Any) -> Any:
    """Return vLLM's SamplingParams, as OpenRLHF's generator of samples makes them."""
    arguments = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_tokens": None,
        "min_tokens": 1,
        "skip_special_tokens": False,
        "logprobs": 1,
    }
    return SimpleNamespace(**arguments | {"n": 1, "stop": [], "bad_words": [], **fields})


def test_what_openrlhf_asks_for_is_refused() -> None:
    """A field of vLLM's vanishes, and rollouts are others than those that were asked for."""
    read = read_sampling(params(stop="a", top_k=5))
    assert (read.top_k, read.stop, read.logprobs, read.max_tokens) == (5, ("a",), 1, None)
    with pytest.raises(InvalidRequest, match="bad_words: not supported"):
        read_sampling(params(bad_words=["x"]))
    actor = RolloutActor.__new__(RolloutActor)
    for field, message in (
        ({"tensor_parallel_size": 2}, "vllm.num_engines"),
        ({"limit_mm_per_prompt": {"image": 1}}, "max_images_per_prompt"),
    ):
        with pytest.raises(ConfigError, match=message):
            asyncio.run(actor.__init__("none", **field))  # type: ignore[misc]


@pytest.mark.slow
def test_a_step_of_openrlhf(tmp_path: Path) -> None:
    """Tensors that come one by one are in place before the last, or a sleep loses them."""
    folder = tiny_model(tmp_path / "tiny")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()
    model.save_pretrained(folder)
    never = missing_ids(folder, model.config.vocab_size)

    def first() -> int:
        with torch.no_grad():
            logits = model(torch.tensor([PROMPT])).logits[0, -1]
        logits[never] = -torch.inf
        return int(logits.argmax())

    async def main() -> None:
        actor = RolloutActor.__new__(RolloutActor)
        await actor.__init__(  # type: ignore[misc]
            str(folder),
            dtype="float32",
            seed=3,
            max_model_len=64,
            enable_sleep_mode=True,
            logprobs_mode="processed_logprobs",
            worker_extension_cls="openrlhf.trainer.ray.vllm_worker_wrap.WorkerWrap",
            num_gpus=1,
        )
        greedy = params(temperature=0.0, max_tokens=1)

        async def says() -> list[int]:
            return (await actor.generate(PROMPT, greedy)).outputs[0].token_ids

        assert await says() == [first()]
        await actor.sleep(level=1)
        await actor.wake_up(tags=["weights"])
        port = free_port()
        sender = WeightSender("127.0.0.1", port, 1, "cpu", packed=False)
        group = ("127.0.0.1", port, 1, 2, "openrlhf")
        with pytest.raises(UpdateFailed, match="sync_with_ray"):
            await actor.init_process_group(*group, backend="nccl", use_ray=True)
        await actor.init_process_group(*group, backend="nccl", use_ray=False)
        for parameter in model.parameters():
            parameter.data = torch.randn_like(parameter)
        tensors = [*model.named_parameters()]
        for number, (name, parameter) in enumerate(tensors, 1):
            taking = asyncio.create_task(
                actor.update_weight(
                    name,
                    dtype=parameter.dtype,
                    shape=parameter.shape,
                    empty_cache=number == len(tensors),
                )
            )
            await asyncio.to_thread(sender.send, [(name, parameter)])
            await taking
            count = (await actor._engine.stats()).weight_updates
            assert count == (number == len(tensors))
        with pytest.raises(UpdateFailed, match="runs on the CPU"):
            await actor.update_weight_cuda_ipc("a", torch.float32, [1], ipc_handles={"GPU": HANDLE})
        await actor.reset_prefix_cache()
        await actor.wake_up()
        assert await says() == [first()]
        await actor.pause_generation()
        rollouts = [
            asyncio.create_task(actor.generate(PROMPT, params(max_tokens=9))) for _ in range(4)
        ]
        await asyncio.sleep(0.1)
        assert actor.get_num_unfinished_requests() == 4
        await actor.resume_generation()
        choices = [rollout.outputs[0] for rollout in await asyncio.gather(*rollouts)]
        assert len({tuple(choice.token_ids) for choice in choices}) > 1, "samples of a prompt"
        for choice in choices:
            scores = [
                item[token].logprob
                for item, token in zip(choice.logprobs or (), choice.token_ids, strict=True)
            ]
            assert scores and all(score <= 0 for score in scores)

        class Executor:
            async def execute(self, prompt: Any, label: Any, asked: Any, *more: Any) -> Any:
                engine = more[2]
                return await engine.generate(PROMPT, asked)

        actor._executor = Executor()
        samples = await actor.generate_responses("p", "l", params(max_tokens=2), 64, None, 3)
        assert [len(sample.outputs[0].token_ids) for sample in samples] == [2] * 3
        await actor._engine.close()

    asyncio.run(asyncio.wait_for(main(), 120))


@pytest.mark.serve
@pytest.mark.slow
def test_openrlhf_in_a_placement_group(shared_cluster: Cluster, tmp_path: Path) -> None:
    """The actor does not start where OpenRLHF places it, or its engine does not sleep there."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    folder = tiny_model(tmp_path / "tiny")
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    group = placement_group([{"CPU": 0.4}])
    ray.get(group.ready(), timeout=60)
    options = {
        "num_cpus": 0.2,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=0, placement_group_capture_child_tasks=True
        ),
    }
    fields = {"dtype": "float32", "max_model_len": 64, "enable_sleep_mode": True}
    actor = ray.remote(RolloutActor).options(**options).remote(str(folder), **fields)
    try:
        ray.get(actor.sleep.remote(), timeout=120)
        ray.get(actor.wake_up.remote(tags=["weights"]), timeout=60)
        ray.get(actor.wake_up.remote(), timeout=60)
        rollout = ray.get(actor.generate.remote(PROMPT, params(max_tokens=3)), timeout=60)
        assert len(rollout.outputs[0].token_ids) == 3
        assert ray.get(actor.get_num_unfinished_requests.remote(), timeout=60) == 0
    finally:
        ray.kill(actor)
        remove_placement_group(group)
