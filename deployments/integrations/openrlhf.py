"""RolloutActor: replaces OpenRLHF's rollout actor by one with an engine of Manta.

    python -m deployments.integrations.openrlhf ARGUMENTS of openrlhf.cli.train_ppo_ray

OpenRLHF places one actor on each GPU, which the trainer may share (colocated training), and calls
this actor like its own. OpenRLHF's package imports vLLM, which must be installed but is not used.
"""

import asyncio
import os
import runpy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import torch

from deployments.checkpoints.resolve import resolve_model
from engine import AsyncEngine, EngineConfig, SamplingParams
from engine.batch import TokenLogprobs
from engine.errors import ConfigError, InvalidRequest, UpdateFailed
from engine.weights.transfers.handles import plain_handle

_SAMPLING = (
    *("n", "temperature", "top_p", "min_p", "max_tokens", "min_tokens", "seed", "stop"),
    *("stop_token_ids", "ignore_eos", "skip_special_tokens", "logprobs"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
_REFUSED = ("allowed_token_ids", "bad_words", "logit_bias", "structured_outputs")


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log-probability, with the attribute that agents of OpenRLHF read."""

    logprob: float


@dataclass(frozen=True, slots=True)
class Choice:
    """A choice of a rollout, with the fields of vLLM's CompletionOutput that OpenRLHF reads.

    logprobs: for each of token_ids, {token id: log-probability} of the token and its alternatives.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    logprobs: list[dict[int, Logprob]] | None


@dataclass(frozen=True, slots=True)
class Rollout:
    """The answer of `RolloutActor.generate`: a prompt and its choices."""

    prompt_token_ids: list[int]
    outputs: list[Choice]


def read_sampling(theirs: Any) -> SamplingParams:
    """Convert vLLM's SamplingParams `theirs` into Manta's. Raises InvalidRequest."""
    for name in _REFUSED:
        if getattr(theirs, name, None):
            raise InvalidRequest(f"sampling_params.{name}: not supported in rollouts; leave it out")
    values = {name: getattr(theirs, name, None) for name in _SAMPLING}
    values["top_k"] = max(0, getattr(theirs, "top_k", 0) or 0)  # -1 and 0 mean all tokens
    for name in ("stop", "stop_token_ids"):
        value = values[name]
        values[name] = (value,) if isinstance(value, str) else tuple(value or ())
    return SamplingParams(**{name: value for name, value in values.items() if value is not None})


class RolloutActor:
    """The actor that replaces the one of OpenRLHF's `create_vllm_engines`, with the same methods.

    Each update call has one tensor. The last tensor comes with empty_cache set, and then all
    weights are replaced together.
    """

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self,
        model: str,
        *,
        tensor_parallel_size: int = 1,
        max_model_len: int | None = None,
        enable_prefix_caching: bool = True,
        enforce_eager: bool = False,
        dtype: Any = "bfloat16",
        gpu_memory_utilization: float | None = None,
        enable_sleep_mode: bool = False,
        logprobs_mode: Any = "raw_logprobs",
        full_determinism: bool = False,
        agent_func_path: str | None = None,
        remote_rm_url: str | None = None,
        limit_mm_per_prompt: Mapping[str, int] | None = None,
        **ignored: Any,
    ) -> None:
        """Start the engine on the GPU that Ray has given to this actor.

        ignored: further arguments of vLLM's engine, which are not used. One is the seed: as
            EngineConfig.seed it would make all samples of a prompt equal.
        Raises ConfigError.
        """
        if tensor_parallel_size != 1:
            raise ConfigError(
                "vllm.tensor_parallel_size: an actor of Manta has one GPU; set it to 1, and "
                "vllm.num_engines to the number of GPUs",
                param="tensor_parallel_size",
            )
        if limit_mm_per_prompt:
            raise ConfigError(
                "data.max_images_per_prompt: rollouts take no images; set it to 0",
                param="max_images_per_prompt",
            )
        if ray.is_initialized() and (gpus := ray.get_gpu_ids()):
            os.environ["CUDA_VISIBLE_DEVICES"] = str(gpus[0])
        memory: dict[str, Any] = {}
        if gpu_memory_utilization:
            memory["memory_fraction"] = gpu_memory_utilization
        config = EngineConfig(
            model=str(await asyncio.to_thread(resolve_model, model)),
            quantization="none",
            dtype=dtype,
            max_model_len=max_model_len,
            prefix_caching=enable_prefix_caching,
            cuda_graphs=not enforce_eager,
            sleep_in_host_memory=enable_sleep_mode,
            logprobs_mode=logprobs_mode,
            deterministic=full_determinism,
            **memory,
        )
        self._engine = await AsyncEngine.start(config)
        self._executor_fields = agent_func_path, remote_rm_url
        self._executor: Any = None
        self._running = 0
        self._updating = False

    # -- weights

    async def init_process_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
        use_ray: bool,
    ) -> None:
        """Join the trainer's process group. Raises UpdateFailed."""
        if use_ray:
            raise UpdateFailed("vllm.sync_with_ray: not supported; the trainer's NCCL group is")
        group: dict[str, Any] = {"master_address": master_address, "master_port": master_port}
        group |= {"rank_offset": rank_offset, "world_size": world_size}
        await self._engine.init_weight_transfer(group)

    async def update_weight(
        self, name: str, dtype: torch.dtype, shape: Sequence[int], empty_cache: bool = False
    ) -> None:
        """Receive a tensor that the trainer broadcasts.

        empty_cache: whether the tensor is the update's last.
        Raises UpdateFailed, which ends the update.
        """
        await self._take_tensor(_tensor(name, dtype, shape), last=empty_cache)

    async def update_weight_cuda_ipc(
        self,
        name: str,
        dtype: torch.dtype,
        shape: Sequence[int],
        ipc_handles: Mapping[str, Any],
        empty_cache: bool = False,
    ) -> None:
        """Receive a tensor that the trainer shares on this GPU. Raises UpdateFailed.

        ipc_handles: GPU's UUID -> the result of torch's `reduce_tensor`.
        """
        places = {uuid: plain_handle(handle) for uuid, handle in ipc_handles.items()}
        tensor = _tensor(name, dtype, shape) | {"cuda_handles": [places]}
        await self._take_tensor(tensor, last=empty_cache)

    async def _take_tensor(self, tensor: dict[str, Any], *, last: bool) -> None:
        if not self._updating:
            await self._engine.start_weight_update()
        # The update is marked as ended first, as the next call may raise.
        self._updating = False
        await self._engine.update_weights(tensor)
        if last:
            await self._engine.finish_weight_update()
        self._updating = not last

    async def reset_prefix_cache(self) -> None:
        self._engine.reset_prefix_cache()

    async def pause_generation(self) -> None:
        await self._engine.pause("keep")

    async def resume_generation(self) -> None:
        await self._engine.resume()

    async def sleep(self, level: int = 1) -> None:
        await self._engine.sleep(level)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        await self._engine.wake(tags or ())

    # -- rollouts

    async def generate(
        self, prompt_token_ids: list[int], sampling_params: Any, multi_modal_data: Any = None
    ) -> Rollout:
        """Return the continuation of a prompt.

        sampling_params: SamplingParams of vLLM.
        Raises InvalidRequest, EngineDead.
        """
        if multi_modal_data:
            raise InvalidRequest("multi_modal_data: rollouts take no images")
        params = read_sampling(sampling_params)
        self._running += 1
        try:
            output = await self._engine.start_request(list(prompt_token_ids), params)
        finally:
            self._running -= 1
        choices = [
            Choice(
                choice.index,
                choice.text,
                list(choice.token_ids),
                choice.finish_reason,
                None if choice.logprobs is None else [_by_id(item) for item in choice.logprobs],
            )
            for choice in output.outputs
        ]
        return Rollout(list(prompt_token_ids), choices)

    def get_num_unfinished_requests(self) -> int:
        """Return the number of running rollouts, by which OpenRLHF balances its actors."""
        return self._running

    async def generate_responses(
        self,
        prompt: str,
        label: str,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        num_samples: int = 1,
        images: Any = None,
    ) -> list[Any]:
        """Let OpenRLHF's agent executor generate num_samples samples of a prompt."""
        if self._executor is None:
            self._executor = _executor(*self._executor_fields)
        fields = prompt, label, sampling_params, max_length, hf_tokenizer, self, images
        samples = (self._executor.execute(*fields) for _ in range(num_samples))
        return await asyncio.gather(*samples)


def _tensor(name: str, dtype: torch.dtype, shape: Sequence[int]) -> dict[str, Any]:
    """Return the description of one tensor in the form of vLLM's update_info."""
    kind = str(dtype).removeprefix("torch.")
    return {"names": [name], "dtype_names": [kind], "shapes": [list(shape)]}


def _by_id(item: TokenLogprobs) -> dict[int, Logprob]:
    top = zip(item.top_ids, item.top_logprobs, strict=True)
    return {token: Logprob(value) for token, value in (*top, (item.token_id, item.logprob))}


def _executor(agent_func_path: str | None, remote_rm_url: str | None) -> Any:
    """Return OpenRLHF's executor: for a user's agent, or for single turns with a reward model.

    agent_func_path: file of the agent; None: single turns. remote_rm_url: URL of the reward model.
    """
    if agent_func_path:
        from openrlhf.trainer.ray.vllm_engine import _load_agent_executor

        return _load_agent_executor(agent_func_path)
    from openrlhf.utils.agent import SingleTurnAgentExecutor

    return SingleTurnAgentExecutor(remote_rm_url)


def install() -> None:
    """Replace OpenRLHF's vLLM actor by `RolloutActor` in this process."""
    from openrlhf.trainer.ray import vllm_engine

    vllm_engine.RolloutRayActor = ray.remote(RolloutActor)


if __name__ == "__main__":
    from deployments.integrations import openrlhf  # by name: workers cannot import __main__

    openrlhf.install()
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")
