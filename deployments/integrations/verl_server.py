"""RolloutServer: a rollout server for verl with an engine of Manta.

This module does not import verl; `verl.py` has the classes with verl's base classes and types.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deployments.checkpoints.resolve import resolve_model
from engine import AsyncEngine, EngineConfig, SamplingParams
from engine.errors import ConfigError, InvalidRequest
from engine.library.handle import RequestHandle

_SAMPLING = (
    *("temperature", "top_p", "min_p", "min_tokens", "seed", "stop_token_ids", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
HYBRID, STANDALONE = "hybrid", "standalone"  # values of verl's RolloutMode


@dataclass(slots=True)
class Rollout:
    """The answer to a prompt, with the fields of verl's TokenOutput."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: Any = None
    stop_reason: str | None = None
    extra_fields: dict[str, Any] = field(default_factory=dict)


def read_sampling(theirs: Mapping[str, Any], room: int, *, routed: bool = False) -> SamplingParams:
    """Convert verl's sampling_params `theirs` into Manta's SamplingParams.

    room: maximum number of tokens of the answer.
    routed: whether to return the experts chosen for each token.
    Raises InvalidRequest for unknown fields that are not None.
    """
    fields = {name: value for name, value in theirs.items() if value is not None}
    limits = [fields.pop(name, room) for name in ("max_tokens", "max_new_tokens")]
    values: dict[str, Any] = {"max_tokens": max(0, min(*limits, room))}
    values["top_k"] = max(0, fields.pop("top_k", 0))  # -1 means all tokens, as 0 here
    if fields.pop("logprobs", False) is not False:  # True, or vLLM's number of alternatives
        values["logprobs"] = 0
    values |= {name: fields.pop(name) for name in _SAMPLING if name in fields}
    if fields:
        names = ", ".join(sorted(fields))
        raise InvalidRequest(f"sampling_params: {names}: not supported in rollouts; leave it out")
    return SamplingParams(**values, return_routed_experts=routed)


class RolloutServer:
    """The server actor of one replica, with the methods that verl's trainer calls.

    config, model_config: verl's RolloutConfig and HFModelConfig.
    mode: the value of verl's RolloutMode. A "hybrid" server drops weights in a sleep, as the
        trainer sends them again; a "standalone" one never sleeps.
    visible_devices: CUDA_VISIBLE_DEVICES for the engine, the workers' GPUs; "": not set.
    """

    def __init__(self, config: Any, model_config: Any, mode: str, visible_devices: str) -> None:
        self._config, self._model = config, model_config
        self._mode = mode
        self._steps: int | None = None  # trainer step of the engine's weights; None: unknown
        self._refusing = False
        self._running: dict[str, RequestHandle] = {}
        if visible_devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices

    async def launch_server(self) -> None:
        """Start the engine. Raises ConfigError."""
        config = self._config
        for name in ("data_parallel_size", "pipeline_model_parallel_size"):
            if getattr(config, name, 1) != 1:
                raise ConfigError(f"rollout.{name}: not supported; set it to 1", param=name)
        if getattr(config, "quantization", None):
            raise ConfigError("rollout.quantization: not supported; leave it out", param="rollout")
        extra = dict((config.engine_kwargs or {}).get("manta") or {})
        fields = {
            "model": str(await asyncio.to_thread(resolve_model, self._model.local_path)),
            "quantization": "none",
            "dtype": config.dtype,
            "max_model_len": config.max_model_len or config.prompt_length + config.response_length,
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "memory_fraction": config.gpu_memory_utilization,
            "tensor_parallel": config.tensor_model_parallel_size,
            "prefix_caching": config.enable_prefix_caching,
            "cuda_graphs": not config.enforce_eager,
            "logprobs_mode": config.logprobs_mode or "raw_logprobs",
            "sleep_in_host_memory": config.free_cache_engine and self._mode != STANDALONE,
        }
        self._engine = await AsyncEngine.start(EngineConfig(**fields | extra))

    # -- rollouts

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: Any = None,
        priority: int = 0,
    ) -> Rollout:
        """Return the continuation of a prompt. Raises InvalidRequest, EngineDead.

        The stop_reason is "aborted" if the trainer has ended the request; verl then continues the
        tokens so far in another request.
        """
        if image_data or video_data or audio_data:
            raise InvalidRequest("image_data, video_data, audio_data: rollouts take texts only")
        if self._refusing:
            return Rollout([], stop_reason="aborted", extra_fields=self._extra())
        config = self._config
        room = config.prompt_length + config.response_length
        room = min(room, config.max_model_len or room) - len(prompt_ids)
        params = read_sampling(
            sampling_params,
            min(room, config.response_length),
            routed=config.enable_rollout_routing_replay,
        )
        handle = self._engine.start_request([*prompt_ids], params, priority=priority)
        self._running[request_id] = handle
        try:
            (choice,) = (await handle).outputs
        finally:
            self._running.pop(request_id, None)
        reasons = {"stop": "completed", "length": "completed", "abort": "aborted"}
        scores = choice.logprobs or []
        return Rollout(
            choice.token_ids,
            [item.logprob for item in scores] if params.logprobs is not None else None,
            choice.routed_experts,
            reasons.get(choice.finish_reason or ""),
            self._extra(),
        )

    def _extra(self) -> dict[str, Any]:
        return {"global_steps": self._steps}

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """End all running requests with the outputs so far; new requests wait for
        `resume_generation`.

        reject_request: whether new requests are aborted at once instead.
        """
        self._refusing = reject_request
        ids = [*self._running]
        await self._engine.pause("abort")
        return {"aborted_count": len(ids), "request_ids": ids}

    async def abort_request(self, request_id: str) -> dict[str, Any]:
        """End a running request with the output so far."""
        handle = self._running.get(request_id)
        if handle is not None:
            handle.stop()
        return {"aborted": handle is not None, "request_id": request_id}

    async def resume_generation(self) -> None:
        self._refusing = False
        await self._engine.resume()

    async def wait_for_requests_to_drain(self) -> None:
        while self._running:
            await asyncio.sleep(0.05)

    # -- weights and memory

    async def set_global_steps(self, global_steps: int) -> None:
        self._steps = global_steps

    async def start_weight_update(self) -> None:
        """Begin an update of the weights, and drop an unfinished one. Raises UpdateFailed."""
        await self._engine.init_weight_transfer({})
        await self._engine.start_weight_update()

    async def take_weights(self, update_info: dict[str, Any]) -> None:
        """Receive tensors of the update, which a worker shares. update_info: see `UpdateInfo`.

        Raises UpdateFailed.
        """
        await self._engine.update_weights(update_info)

    async def finish_weight_update(self, global_steps: int | None = None) -> None:
        """Replace all weights by the tensors of the update. Raises UpdateFailed.

        global_steps: the trainer step of the weights; None: unchanged.
        """
        await self._engine.finish_weight_update()
        self._steps = self._steps if global_steps is None else global_steps

    async def sleep(self) -> None:
        """Free the memory of weights and KV cache. No request may be running.

        Does nothing on a standalone server, or if verl's free_cache_engine is off.
        """
        if self._config.free_cache_engine and self._mode != STANDALONE:
            await self._engine.sleep(2 if self._mode == HYBRID else 1)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate memory that a sleep freed. tags: "weights", "kv_cache"; None: both.

        Does nothing where `sleep` does nothing.
        """
        if self._config.free_cache_engine and self._mode != STANDALONE:
            await self._engine.wake(tags or ())

    async def release_kv_cache(self) -> None:
        if self._config.free_cache_engine and self._mode != STANDALONE:
            await self._engine.sleep(1, ["kv_cache"])

    async def resume_kv_cache(self) -> None:
        await self.wake_up(["kv_cache"])

    async def clear_kv_cache(self) -> None:
        self._engine.reset_prefix_cache()

    async def start_profile(self, **options: Any) -> None:
        raise InvalidRequest("rollout.profiler: not supported; leave it out")

    async def stop_profile(self) -> None:
        """Do nothing, as no profile was started."""

    async def close(self) -> None:
        await self._engine.close()
