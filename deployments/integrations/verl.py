"""Replica, ServerAdapter: verl's rollout classes with engines of Manta, one engine per verl
replica.

    VERL_USE_EXTERNAL_MODULES=deployments.integrations.verl python -m verl.trainer.main_ppo \\
        actor_rollout_ref.rollout.name=manta ...

verl imports this module in all of its processes. Workers send weights over CUDA IPC to the engine
on their own GPU, or over shared memory without a GPU; no pickle is sent or read.
"""

import asyncio
from collections.abc import AsyncIterable, Iterable
from typing import Any

import ray
import torch
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

from deployments.environment import worker_rank
from deployments.integrations.bucket import Bucket
from deployments.integrations.verl_server import RolloutServer
from engine.errors import ConfigError, UpdateFailed

NAME = "manta"


class Server(RolloutServer):
    """The server actor of a replica: a RolloutServer that returns verl's type TokenOutput."""

    async def generate(self, *fields: Any, **named: Any) -> TokenOutput:
        """Return the continuation of a prompt; see `RolloutServer.generate`."""
        rollout = await super().generate(*fields, **named)
        return TokenOutput(**{name: getattr(rollout, name) for name in rollout.__slots__})


class Replica(RolloutReplica):  # type: ignore[misc]  # verl has no types
    """A verl replica with one engine, on the node and the GPUs of the replica's workers."""

    _server_handle: Any

    async def launch_servers(self) -> None:
        """Start the replica's server on the node of its workers. Raises ConfigError."""
        if self.nnodes != 1:
            raise ConfigError(
                "rollout.tensor_model_parallel_size: an engine is on one node; set it to at most "
                f"{self.gpus_per_node}, the GPUs of a node",
                param="tensor_model_parallel_size",
            )

        def place(_: Any) -> tuple[str, list[str]]:
            context = ray.get_runtime_context()
            return context.get_node_id(), context.get_accelerator_ids().get("GPU", [])

        asked = (worker.__ray_call__.remote(place) for worker in self.workers)
        places = await asyncio.gather(*asked)
        kind = "reward_" if self.is_reward_model else "teacher_" if self.is_teacher_model else ""
        name = f"{NAME}_server_{kind}{self.replica_rank}_0{self.name_suffix}"
        on_node = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        server = ray.remote(Server).options(
            name=name,
            scheduling_strategy=on_node(node_id=places[0][0], soft=False),
            runtime_env={"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}},
            max_concurrency=self.max_concurrency,
        )
        visible = ",".join(gpu for _, gpus in places for gpu in gpus)
        mode = self.rollout_mode.value
        self._server_handle = server.remote(self.config, self.model_config, mode, visible)
        self.servers = [self._server_handle]
        await self._server_handle.launch_server.remote()
        # verl identifies replicas by this address; there is no HTTP server.
        self._server_address = name

    async def sleep(self) -> None:
        """Free the memory of the engine, after its running requests have ended."""
        await self._server_handle.wait_for_requests_to_drain.remote()
        await super().sleep()

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """End all running requests with the outputs so far; return their number and ids."""
        answer: dict[str, Any] = await self._server_handle.abort_all_requests.remote(reject_request)
        return answer


class ServerAdapter(BaseRollout):  # type: ignore[misc]  # verl has no types
    """A trainer worker's interface to its replica; only the first worker of each replica calls the
    server.

    replica_rank: index of the replica; -1: the index that follows from this worker's rank.
    """

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        size, rank = self.config.tensor_model_parallel_size, worker_rank()
        self.replica_rank = rank // size if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % size == 0
        self._server: Any = None

    def _handle(self) -> Any:
        if self._server is None:
            # The server is looked up here, because it starts after the workers.
            self._server = ray.get_actor(f"{NAME}_server_{self.replica_rank}_0")
        return self._server

    async def resume(self, tags: list[str]) -> None:
        """Allocate memory that a sleep freed. tags: "weights", "kv_cache"."""
        if self.is_leader_rank:
            await self._handle().wake_up.remote(tags)

    async def release(self) -> None:
        """Free the memory of the engine."""
        if self.is_leader_rank:
            await self._handle().sleep.remote()

    @torch.no_grad()
    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]] | AsyncIterable[tuple[str, torch.Tensor]],
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        **options: Any,
    ) -> None:
        """Replace the engine's weights. Raises UpdateFailed, after which the old weights remain.

        weights: (checkpoint name, tensor) of all tensors. Each rank must iterate over them, because
            the iteration may gather shards from all ranks.
        global_steps: the trainer step of the weights; None: unchanged.
        wire_format: "named_tensors"; other formats raise UpdateFailed.
        """
        if wire_format != "named_tensors":
            raise UpdateFailed(
                f"checkpoint_engine: {wire_format} is not supported; choose one of full tensors"
            )
        if options.get("peft_config") is not None:
            raise UpdateFailed("model.lora_rank: adapters are not sent; set it to 0, or merge them")
        megabytes = self.config.checkpoint_engine.update_weights_bucket_megabytes
        bucket = Bucket(megabytes << 20)
        server = self._handle() if self.is_leader_rank else None
        if server is not None:
            await server.start_weight_update.remote()
        try:
            async for name, tensor in _each(weights):
                if server is None:
                    continue
                if not bucket.has_room(tensor):
                    await server.take_weights.remote(bucket.message())
                bucket.put(name, tensor.detach())
            if server is not None:
                await server.take_weights.remote(bucket.message())
                await server.finish_weight_update.remote(global_steps)
        finally:
            bucket.close()


async def _each(
    weights: Iterable[tuple[str, torch.Tensor]] | AsyncIterable[tuple[str, torch.Tensor]],
) -> Any:
    if isinstance(weights, AsyncIterable):
        async for pair in weights:
            yield pair
    else:
        for pair in weights:
            yield pair


def install() -> None:
    """Register "manta" as a rollout name of verl, in this process."""
    RolloutReplicaRegistry.register(NAME, lambda: Replica)
    _ROLLOUT_REGISTRY[(NAME, "async")] = f"{__name__}.{ServerAdapter.__name__}"


install()
