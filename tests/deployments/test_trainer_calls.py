"""A trainer's calls by a client, against the routes that they stand for."""

import asyncio
import inspect
from pathlib import Path
from typing import Any

import pytest

from deployments.api.app import build_asgi
from deployments.api.options import ApiOptions
from deployments.client import AsyncClient, Client, _result
from deployments.route_call import RouteCall
from deployments.router.models.models_backend import ModelsBackend
from deployments.router.serve import handle_call
from deployments.router.training import RouterTraining
from deployments.trainer_calls import AsyncTrainerCalls, TrainerCalls
from engine import UpdateFailed
from engine.errors import InvalidRequest
from tests.deployments.router.fleet import Fleet

INFO = {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[2]]}


def test_every_call_reaches_its_route(tmp_path: Path) -> None:
    """A method asks for a route that is not there, or loses a field on the way. A failed update is
    an error of requests alone, which the loop that catches UpdateFailed does not catch, or tensors
    in shared memory are taken for a folder's name."""

    async def body(fleet: Fleet) -> None:
        front = ModelsBackend("router")
        front.set_dispatcher("m", fleet.dispatcher, 0)
        app = build_asgi(front, ApiOptions(training=RouterTraining(front)))

        class Trainer(AsyncClient):
            async def _carry_out(self, call: RouteCall[Any]) -> Any:
                answer = await handle_call.control(app, *call.arguments(self.model))
                return _result(call, answer)

        trainer = Trainer("manta", "m")
        for query in ("mode=keep", {"mode": "keep", "clear_cache": "false"}):
            for empty in ("", b"", "{}", b"{}", {}):
                answer = await handle_call.control(app, "/pause", query, empty)
                assert answer == {"status": "paused"}
        resumed = await handle_call.control(app, "/resume", {"model": "m"}, "")
        assert resumed == {"status": "resumed"}
        assert await trainer.world_size() == 2
        assert await trainer.update_weights(str(tmp_path), "one") == "one"
        await trainer.init_weight_transfer({})
        await trainer.start_weight_update()
        assert await trainer.take_weights(INFO) == ""
        assert await trainer.finish_weight_update("two") == "two"
        assert await trainer.take_weights(INFO, "three") == "three"
        assert await trainer.update_weights(INFO, "four") == "four"
        await trainer.pause()
        state = await trainer.weights()
        assert (state.version, state.paused, state.asleep) == ("four", True, False)
        await trainer.resume()
        await trainer.sleep(2, ["kv_cache", "weights"], mode="keep")
        state = await trainer.weights()
        assert state.asleep and all(replica.asleep for replica in state.replicas.values())
        assert state.weights_dropped
        assert all(replica.weights_dropped for replica in state.replicas.values())
        await trainer.wake(["weights"])
        assert (await trainer.weights()).asleep
        await trainer.wake(["kv_cache"])
        assert not (await trainer.weights()).paused
        await trainer.abort_requests()
        await trainer.reset_prefix_cache()
        for wrong in (
            trainer.pause("later"),
            trainer.sleep(tags=["cache"]),
            Trainer("manta", "other").resume(),
        ):
            with pytest.raises(InvalidRequest) as refused:
                await wrong
            assert not isinstance(refused.value, UpdateFailed)
        for wrong in (
            trainer.update_weights(str(tmp_path / "none")),
            trainer.take_weights(INFO, "four"),
            trainer.update_weights([("a", 1)]),  # type: ignore[arg-type]
            trainer.finish_weight_update(),
        ):
            with pytest.raises(UpdateFailed) as failed:
                await wrong
            assert isinstance(failed.value, InvalidRequest), "what callers caught before"
        assert (await trainer.weights()).version == "four"

    async def main() -> None:
        async with Fleet(2) as fleet:
            await asyncio.wait_for(body(fleet), 30)

    asyncio.run(main())


def test_both_clients_have_the_same_calls() -> None:
    """A call that only one of the two clients has, or with other fields."""
    assert issubclass(Client, TrainerCalls) and issubclass(AsyncClient, AsyncTrainerCalls)
    first, second = (
        {
            name: [str(parameter) for parameter in inspect.signature(call).parameters.values()]
            for name, call in vars(calls).items()
            if inspect.isfunction(call)
        }
        for calls in (TrainerCalls, AsyncTrainerCalls)
    )
    assert first == second and len(first) == 14
