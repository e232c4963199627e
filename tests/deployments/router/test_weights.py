"""Weights and pauses of a whole fleet, whose fake engines say which weights made each token."""

import asyncio
from base64 import b64decode
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec
import pytest

from deployments.api.app import build_asgi
from deployments.api.options import ApiOptions
from deployments.router import dispatcher, weights
from deployments.router.dispatcher import Dispatcher
from deployments.router.inflight import InflightRequest
from deployments.router.models.model_settings import DispatchLimits
from deployments.router.models.models_backend import ModelsBackend
from deployments.router.training import RouterTraining
from deployments.router.weights_record import LocalWeightsStore
from deployments.transport.channel import ChannelLimits
from engine.errors import Overloaded, UpdateFailed
from engine.messages import EngineStats
from tests.deployments.api.asgi import Client, Reply
from tests.deployments.fake_backend import tiny_tokenizer
from tests.deployments.router.fleet import FAST, FIRST, PROMPT, VOCAB, Fleet, read, until

LONG = 400  # tokens, more than an update lasts


def run(body: Callable[[Fleet], Awaitable[None]], replicas: int = 2) -> None:
    async def main() -> None:
        async with Fleet(replicas, rows=8, tokenizer=tiny_tokenizer()) as fleet:
            await asyncio.wait_for(body(fleet), 30)

    asyncio.run(main())


def check(generation: InflightRequest, tokens: dict[int, list[int]]) -> set[str]:
    """Assert that each token was made by the reported version; return the versions."""
    told: set[str] = set()
    for index, ids in tokens.items():
        versions = generation.versions(index)
        assert sum(count for _, count in versions) == len(ids)
        position, place = len(PROMPT), 0
        for version, count in versions:
            shift = 0 if version == "0" else crc32(version.encode())
            for token in ids[place : place + count]:
                assert token == FIRST + (position + shift) % (VOCAB - FIRST)
                position += 1
            place += count
            told.add(version)
    return told


async def streams(fleet: Fleet, count: int, tokens: int) -> list[tuple[InflightRequest, Any]]:
    """Start requests that have tokens already; return them with the tasks that read them."""
    running = [fleet.generate(n=2, max_tokens=tokens, ignore_eos=True) for _ in range(count)]
    tasks = [(generation, asyncio.create_task(read(generation))) for generation in running]
    await until(lambda: all(generation.begun for generation in running))
    return tasks


def versions(fleet: Fleet) -> set[str]:
    return {stats.weights_version for stats in fleet.dispatcher.state().replicas.values()}


def test_every_token_tells_its_version(tmp_path: Path) -> None:
    """A stream goes on under new weights at one replica, or is told a version that is not its."""

    async def body(fleet: Fleet) -> None:
        running = await streams(fleet, 6, LONG)
        assert await fleet.dispatcher.weights.update(str(tmp_path), "one") == "one"
        await asyncio.sleep(0.1)
        assert await fleet.dispatcher.weights.update(str(tmp_path)) == "2"
        by_stream = [check(generation, await task) for generation, task in running]
        assert all({"0", "one", "2"} >= seen for seen in by_stream)
        assert any(len(seen) == 3 for seen in by_stream)
        assert versions(fleet) == {"2"}

    run(body, 3)


def test_a_folder_that_one_replica_refuses_changes_none(tmp_path: Path) -> None:
    """Replicas that can read the folder take it, and others keep the old weights."""

    async def body(fleet: Fleet) -> None:
        weights = fleet.dispatcher.weights
        with pytest.raises(UpdateFailed, match="no such folder"):
            await weights.update(str(tmp_path / "none"))
        await weights.update(str(tmp_path), "same")
        with pytest.raises(UpdateFailed, match="another weight_version"):
            await weights.update(str(tmp_path), "same")
        engine = fleet.engines["r1"].core

        class Refuses:
            def holds(self, folder: str) -> bool:
                return False

            def check(self, folder: str) -> None:
                raise UpdateFailed("a tensor is missing")

        engine._updates._loader = Refuses()  # type: ignore[assignment]
        with pytest.raises(UpdateFailed, match="a tensor is missing"):
            await weights.update(str(tmp_path), "other")
        await asyncio.sleep(0.1)
        assert versions(fleet) == {"same"}

    run(body)


def test_a_replica_that_joins_has_the_weights_first(tmp_path: Path) -> None:
    """A new replica serves with the weights of the model's folder, which nobody asks for."""

    async def body(fleet: Fleet) -> None:
        await fleet.dispatcher.weights.update(str(tmp_path), "one")
        await fleet.add_replica("r1")
        fleet.publish()
        await until(lambda: len(fleet.dispatcher.state().replicas) == 2)
        running = await streams(fleet, 4, 50)
        for generation, task in running:
            assert check(generation, await task) == {"one"}
        await until(lambda: versions(fleet) == {"one"})
        await fleet.dispatcher.weights.pause("keep")
        await fleet.add_replica("r2")
        fleet.publish()
        await until(lambda: fleet.engines["r2"].core.stats().paused)
        assert fleet.engines["r2"].core.stats().weights_version == "one"
        await fleet.dispatcher.weights.resume()
        await until(lambda: not fleet.engines["r2"].core.stats().paused)

    run(body, 1)


def test_a_router_that_starts_keeps_the_weights(tmp_path: Path) -> None:
    """Another router brings the replicas back to the weights that it knows."""

    async def body(fleet: Fleet) -> None:
        await fleet.dispatcher.weights.update(str(tmp_path), "one")
        other = fleet.new_router()
        other.set_replicas(fleet.published())
        await until(lambda: len(other.state().replicas) == 2)
        await other.weights.update(str(tmp_path), "two")
        await until(lambda: fleet.dispatcher.weights.version == "two")
        await asyncio.sleep(0.5)
        assert versions(fleet) == {"two"} and other.weights.version == "two"
        other.close()

    run(body)


def test_a_record_whose_folder_is_gone_keeps_no_replica_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An application that is deployed again, without the folder of its last update, never serves.

    A folder that one node lacks while a replica has the weights is no reason to forget them.
    """
    shared, folder = LocalWeightsStore(), tmp_path / "sent"
    folder.mkdir()

    async def before() -> None:
        async with Fleet(1, weights_store=shared) as fleet:
            await fleet.dispatcher.weights.update(str(folder), "one")
            folder.rmdir()
            monkeypatch.setattr(weights, "LOST_SECONDS", 0.0)
            await fleet.add_replica("r1")
            fleet.publish()
            await until(lambda: "no such folder" in caplog.text)
            await asyncio.sleep(0.5)
            record = shared.get()
            assert record is not None and record.version == "one"
            assert "are lost" not in caplog.text

    async def after() -> None:
        caplog.clear()
        async with Fleet(0, weights_store=shared) as fleet:
            await fleet.dispatcher.weights.refresh()
            monkeypatch.setattr(weights, "LOST_SECONDS", 0.5)
            await fleet.add_replica("r0")
            fleet.publish()
            await until(lambda: bool(fleet.dispatcher.state().replicas))
            generation = fleet.generate(max_tokens=5, ignore_eos=True)
            reading = asyncio.create_task(read(generation))
            await until(lambda: "no such folder" in caplog.text)
            assert not generation.begun  # no token of other weights while these may come back
            assert check(generation, await reading) == {"0"}
            assert caplog.text.count("are lost") == caplog.text.count("no such folder") == 1
            assert str(folder) in caplog.text and "send the update again" in caplog.text
            folder.mkdir()
            assert await fleet.dispatcher.weights.update(str(folder), "one") == "one"

    asyncio.run(asyncio.wait_for(before(), 30))
    asyncio.run(asyncio.wait_for(after(), 30))


def test_a_lost_replica_stops_no_update(tmp_path: Path) -> None:
    """An update waits for a replica that has died, or its requests stay with old weights."""

    async def body(fleet: Fleet) -> None:
        running = await streams(fleet, 4, LONG)
        fleet.engines["r0"].die()
        await fleet.dispatcher.weights.update(str(tmp_path), "one")
        for generation, task in running:
            assert "one" in check(generation, await task)

    run(body)
    with pytest.raises(Overloaded, match="no replica is ready"):
        run(lambda fleet: fleet.dispatcher.weights.pause("keep"), 0)


def post(client: Client, path: str, body: Any = None, query: bytes = b"") -> Awaitable[Reply]:
    return client.request("POST", path, msgspec.json.encode(body or {}), query=query)


def test_over_http(tmp_path: Path) -> None:
    """A trainer of vLLM or SGLang finds another answer than it reads."""

    async def body(fleet: Fleet) -> None:
        front = ModelsBackend("router")
        front.set_dispatcher("m", fleet.dispatcher, 0)
        client = Client(build_asgi(front, ApiOptions(training=RouterTraining(front))))
        ask = {
            "token_ids": PROMPT,
            "sampling_params": {
                "max_tokens": 3,
                "n": 64,
                "logprobs": 1,
                "logprobs_mode": "processed_logprobs",
                "top_k": -1,
            },
        }
        wrong = {**ask, "sampling_params": {"logprobs_mode": "processed_logits"}}
        refused = (await post(client, "/inference/v1/generate", wrong)).json()["error"]
        assert "raw_logprobs or processed_logprobs" in refused["message"]
        assert (
            await post(client, "/update_weights_from_disk", {"model_path": str(tmp_path)})
        ).json()["weight_version"] == "1"
        reply = await post(client, "/inference/v1/generate", ask)
        answer = reply.json()
        assert [choice["index"] for choice in answer["choices"]] == [*range(64)]
        choice = answer["choices"][0]
        assert choice["weight_versions"] == [{"version": "1", "num_tokens": 3}]
        assert choice["finish_reason"] == "length" and len(choice["token_ids"]) == 3
        scored = choice["logprobs"]["content"]
        assert [entry["token"] for entry in scored] == [
            f"token_id:{token}" for token in choice["token_ids"]
        ]
        assert all(entry["logprob"] < 0 for entry in scored)
        assert choice["token_logprobs"] == [entry["logprob"] for entry in scored]
        theirs = {
            "input_ids": PROMPT,
            "sampling_params": {"max_new_tokens": 3, "temperature": 1.0, "sampling_seed": 5},
            "return_logprob": True,
            "rid": "mine",
        }
        answer = (await post(client, "/generate", theirs)).json()
        meta = answer["meta_info"]
        assert answer["output_ids"] == choice["token_ids"] and meta["weight_version"] == "1"
        assert [token for _, token, _ in meta["output_token_logprobs"]] == answer["output_ids"]
        assert (meta["id"], meta["finish_reason"]) == ("mine", {"type": "length", "length": 3})
        assert answer["text"] == tiny_tokenizer().decode(answer["output_ids"])
        long = {**ask, "sampling_params": {"max_tokens": LONG, "ignore_eos": True}}
        running = asyncio.create_task(post(client, "/inference/v1/generate", long))
        await until(lambda: fleet.dispatcher.requests and fleet.load() != {"r0": 0, "r1": 0})
        await asyncio.sleep(0.05)
        paused = await post(client, "/pause", query=b"mode=abort")
        assert paused.json() == {"status": "paused"}
        partial = (await running).json()["choices"][0]
        assert partial["finish_reason"] == "abort" and 0 < len(partial["token_ids"]) < LONG
        state = await client.request("GET", "/is_paused")
        assert state.json() == {"is_paused": True}
        waiting = asyncio.create_task(post(client, "/inference/v1/generate", ask))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        assert (await post(client, "/resume")).status == 200
        assert (await waiting).status == 200
        brief = {**ask, "sampling_params": {"max_tokens": 40, "ignore_eos": True}}
        running = asyncio.create_task(post(client, "/inference/v1/generate", brief))
        await until(lambda: fleet.load() != {"r0": 0, "r1": 0})
        older = await post(client, "/pause", query=b"wait_for_inflight_requests=true")
        assert older.status == 200
        assert (await running).json()["choices"][0]["finish_reason"] == "length"
        assert (await post(client, "/resume")).status == 200
        assert (await client.request("GET", "/get_world_size")).json() == {"world_size": 2}
        settings = (await client.request("GET", "/server_info")).json()["vllm_config"]
        assert settings["model_config"]["max_model_len"] == 4096
        assert settings["parallel_config"] == {
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "data_parallel_size": 2,
        }
        info = (await client.request("GET", "/weight_info")).json()
        assert info["weight_version"] == "1" and len(info["replicas"]) == 2
        for path, text in (
            ("/pause?mode=later", "mode is one of"),
            ("/pause?model=other", "no model is called"),
        ):
            place, _, query = path.partition("?")
            refused = await post(client, place, query=query.encode())
            assert refused.status in (400, 404) and text in refused.json()["error"]["message"]
        gone = await post(
            client, "/update_weights_from_disk", {"model_path": str(tmp_path / "none")}
        )
        assert gone.status == 400 and "no such folder" in gone.json()["error"]["message"]
        assert (await post(client, "/pause_generation", {"mode": "in_place"})).status == 200
        assert (await post(client, "/continue_generation")).status == 200
        assert (await post(client, "/abort_requests")).json() == {"status": "aborted"}
        assert (await client.request("GET", "/flush_cache")).status == 200

    run(body)


def test_rollouts_tell_the_experts_of_their_tokens() -> None:
    """A failover loses the experts of earlier tokens, or a dialect has another form of them."""

    def routes(ids: list[int]) -> list[int]:
        return [digit for token in ids[:-1] for digit in (token & 15, token >> 4 & 15) * 2]

    async def body(fleet: Fleet) -> None:
        client, prompt = front_of(fleet), [*PROMPT]
        sampling = {"max_tokens": 200, "ignore_eos": True, "n": 2}
        ask = {"token_ids": prompt, "sampling_params": sampling}
        plain = await post(client, "/inference/v1/generate", ask)
        assert plain.json()["choices"][0]["routed_experts"] is None
        for path, more in (
            ("/skyrl/v1/generate", {}),
            ("/inference/v1/generate", {"return_routed_experts": True}),
        ):
            waiting = asyncio.create_task(post(client, path, ask | more))
            await until(lambda: any(fleet.load().values()))
            if more:
                await asyncio.sleep(0.05)
                busy = next(name for name, load in fleet.load().items() if load)
                fleet.engines[busy].die()
            for choice in (await waiting).json()["choices"]:
                shown, ids = choice["routed_experts"], prompt + choice["token_ids"]
                assert shown["shape"] == [len(ids) - 1, 2, 2] and shown["dtype"] == "uint8"
                assert [*b64decode(shown["data"])] == routes(ids)
        body = {"prompt": prompt, "max_tokens": 5, "return_routed_experts": True, "model": "m"}
        body |= {"return_token_ids": True, "ignore_eos": True}
        (choice,) = (await post(client, "/v1/completions", body)).json()["choices"]
        ids = prompt + choice["token_ids"]
        assert [*b64decode(choice["routed_experts"]["data"])] == routes(ids)
        for wrong in ({"stream": True}, {"stop": "x"}):
            refused = await post(client, "/v1/completions", body | wrong)
            assert refused.status == 400
            assert refused.json()["error"]["param"] == "return_routed_experts"
        theirs = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 5, "ignore_eos": True}}
        reply = await post(client, "/generate", theirs | {"return_routed_experts": True})
        data = b64decode(reply.json()["meta_info"]["routed_experts"])
        ids = prompt + reply.json()["output_ids"]
        assert [*memoryview(data).cast("i")] == routes(ids)

    run(body)


def test_the_calls_of_slime(tmp_path: Path) -> None:
    """A step of slime with an external engine, call by call, finds no route or no key."""

    async def body(fleet: Fleet) -> None:
        client = front_of(fleet)

        async def get(path: str) -> Any:
            reply = await client.request("GET", path)
            assert reply.status == 200, path
            return reply.json()

        async def tell(path: str, **fields: Any) -> Any:
            reply = await post(client, path, fields)
            assert reply.status == 200, (path, reply.json())
            return reply.json()

        for path in ("/server_info", "/get_server_info"):
            info = await get(path)
            assert (info["tp_size"], info["pp_size"], info["dp_size"]) == (2, 1, 2)
            assert (info["nnodes"], info["node_rank"], info["ep_size"]) == (1, 0, 1)
            assert info["disaggregation_mode"] not in ("prefill", "decode")
        ranks = info["tp_size"] * info["pp_size"]  # as slime counts the GPUs of an engine
        group = {"master_address": "h", "master_port": 1, "rank_offset": 1, "group_name": "slime"}
        await tell("/init_weights_update_group", **group, world_size=1 + ranks, backend="nccl")
        assert [one.info[-1]["rank_offset"] for one in receivers(fleet).values()] == [1, 2]
        await tell("/destroy_weights_update_group", group_name="slime")
        await get("/health_generate")
        await get("/flush_cache")
        sampling = {"max_new_tokens": LONG, "ignore_eos": True, "no_stop_trim": True}
        ask = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
        running = [asyncio.create_task(tell("/generate", **ask)) for _ in range(3)]
        await until(lambda: sum(request.begun for request in fleet.dispatcher.requests) == 3)
        await until(lambda: sum(stats.running for stats in replica_stats(fleet)) == 3)
        loads = (await get("/v1/loads"))["loads"]
        assert sum(load["num_total_reqs"] for load in loads) == 3
        await tell("/abort_request", abort_all=True)
        for answer in await asyncio.gather(*running):
            assert answer["meta_info"]["finish_reason"]["type"] == "abort"
            scored = answer["meta_info"]["output_token_logprobs"]
            assert (
                0 < len(scored) < LONG and [token for _, token, _ in scored] == answer["output_ids"]
            )
        await until(lambda: sum(stats.running for stats in replica_stats(fleet)) == 0)
        assert not any(load["num_total_reqs"] for load in (await get("/v1/loads"))["loads"])
        await tell("/pause_generation")
        await tell("/flush_cache")
        update = {"model_path": str(tmp_path), "weight_version": "1"}
        assert (await tell("/update_weights_from_disk", **update))["success"]
        await tell("/continue_generation")
        assert (await get("/get_weight_version"))["weight_version"] == "1"
        await tell("/release_memory_occupation")
        await tell("/resume_memory_occupation", tags=["weights"])
        await tell("/resume_memory_occupation", tags=["kv_cache", "cuda_graph"])
        assert (await tell("/generate", **ask))["meta_info"]["weight_version"] == "1"
        for path in ("/model_info", "/get_model_info"):
            info = await get(path)
            assert (info["weight_version"], info["is_generation"]) == ("1", True)
        refused = await post(client, "/get_weights_by_name", {"name": "a"})
        assert refused.status == 400 and "/weight_info" in refused.json()["error"]["message"]
        nameless = await post(client, "/abort_request")
        assert nameless.status == 400 and nameless.json()["error"]["param"] == "rid"

    run(body)


def test_the_sizes_of_replicas_of_several_ranks() -> None:
    """slime takes a replica of several GPUs for one GPU, or waits for ranks that do not join."""

    async def body(fleet: Fleet) -> None:
        await fleet.add_replica("r2")
        sizes = {"tensor_parallel": 4, "pipeline_parallel": 2}
        fleet.dispatcher.set_replicas({"r2": fleet.published("r2")["r2"] | sizes})
        await until(lambda: list(fleet.dispatcher.state().replicas) == ["r2"])
        client = front_of(fleet)
        info = (await client.request("GET", "/server_info")).json()
        assert (info["tp_size"], info["pp_size"], info["dp_size"]) == (4, 2, 1)
        assert not info["enable_dp_attention"]
        assert info["vllm_config"]["parallel_config"] == {
            "tensor_parallel_size": 4,
            "pipeline_parallel_size": 2,
            "data_parallel_size": 1,
        }
        group = {"master_address": "h", "master_port": 1, "rank_offset": 1, "world_size": 9}
        refused = await post(client, "/init_weights_update_group", group)
        assert refused.status == 400 and refused.json()["error"]["param"] == "world_size"
        assert "/update_weights_from_disk" in refused.json()["error"]["message"]

    run(body)


def test_tensors_in_the_words_of_sglang() -> None:
    """Half an update is served, or a message of another form than SGLang's sends it."""

    async def body(fleet: Fleet) -> None:
        client = front_of(fleet)
        group = {"master_address": "h", "master_port": 1, "rank_offset": 1, "world_size": 3}

        async def tell(path: str, **fields: Any) -> Any:
            reply = await post(client, path, fields)
            assert reply.status == 200, (path, reply.json())
            return reply.json()

        async def send(*names: str, **fields: Any) -> Any:
            sizes = {"dtypes": ["torch.bfloat16"] * len(names), "shapes": [[2]] * len(names)}
            return await tell("/update_weights_from_distributed", names=names, **sizes, **fields)

        assert (await tell("/init_weights_update_group", **group, group_name="g"))["success"]
        ranks = [receiver.info[-1]["rank_offset"] for receiver in receivers(fleet).values()]
        assert ranks == [1, 2]
        small = await post(client, "/init_weights_update_group", group | {"world_size": 2})
        assert (small.status, small.json()["error"]["param"]) == (400, "world_size")

        # without a pause: the last tensor ends the update, also at a replica that joined late
        running = await streams(fleet, 4, LONG)
        answer = await send("a", weight_version="one", group_name="g", load_format=None)
        assert answer["success"] and "until all tensors" in answer["message"]
        info = receivers(fleet)["r0"].info[-1]
        assert (info["dtype_names"], info["group_name"], info["packed"]) == (
            ["bfloat16"],
            "g",
            False,
        )
        await fleet.add_replica("r2")
        fleet.publish()
        await until(lambda: len(fleet.dispatcher.state().replicas) == 3)
        assert versions(fleet) == {"0"}
        answer = await send("last", group_name="g", load_format="flattened_bucket")
        assert answer["weight_version"] == "one"
        assert receivers(fleet)["r0"].info[-1]["packed"] is True
        by_stream = [check(generation, await task) for generation, task in running]
        assert any(len(seen) == 2 for seen in by_stream)
        await until(lambda: versions(fleet) == {"one"})

        # during a pause: /continue_generation ends it, and no token is of the old weights
        ask = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 5, "ignore_eos": True}}
        await tell("/pause_generation")
        sent = {"serialized_named_tensors": ["gA=="], "load_format": "flattened_bucket"}
        for _ in range(2):
            await tell("/update_weights_from_tensor", **sent, weight_version="two")
        await send("last")
        waiting = asyncio.create_task(tell("/generate", **ask))
        await asyncio.sleep(0.05)
        assert versions(fleet) == {"one"} and not waiting.done()
        await tell("/continue_generation")
        assert (await waiting)["meta_info"]["weight_version"] == "two"

        # between a beginning and an end
        await tell("/begin_weight_update")
        again = await post(client, "/start_weight_update")
        assert again.status == 200, "the fake engines let another trainer in"
        await tell("/begin_weight_update")
        await tell("/update_weights_from_tensor", **sent, abort_all_requests=True)
        assert (await tell("/end_weight_update"))["success"]
        await until(lambda: len(versions(fleet)) == 1)
        assert "weight_version" not in await tell("/end_weight_update"), "nothing goes on"

        # what fails at one replica changes none, and the next update begins anew
        before = versions(fleet)
        theirs = receivers(fleet)["r1"]

        def dies(info: dict[str, Any]) -> str:
            raise UpdateFailed("the trainer is gone", code="transfer_failed")

        theirs.collect = dies
        gone = await post(client, "/update_weights_from_tensor", sent)
        error = gone.json()["error"]
        assert (gone.status, error["code"]) == (400, "transfer_failed")
        assert error["param"] == "serialized_named_tensors"
        del theirs.collect
        await tell("/continue_generation")
        assert versions(fleet) == before
        assert (await send("last", weight_version="three"))["weight_version"] == "three"
        for wrong, param in (
            (sent | {"load_format": "direct"}, "load_format"),
            ({"serialized_named_tensors": "gA=="}, "serialized_named_tensors"),
            ({}, "serialized_named_tensors"),
        ):
            refused = await post(client, "/update_weights_from_tensor", wrong)
            assert (refused.status, refused.json()["error"]["param"]) == (400, param), wrong
        assert (await tell("/destroy_weights_update_group", group_name="g"))["success"]
        assert receivers(fleet)["r0"].info[-1] == {"group_name": "g"}

    run(body)


def test_the_updates_of_skyrl() -> None:
    """A call of SkyRL's does another's work, or a method of any name runs."""

    async def body(fleet: Fleet) -> None:
        client = front_of(fleet)
        start, finish = "skyrl_start_weight_update", "skyrl_finish_weight_update"
        for method in (start, "update_weights_nccl", "update_weights_ipc", finish):
            kwargs = {"update_info": INFO} if method.startswith("update") else {}
            reply = await post(client, "/collective_rpc", {"method": method, "kwargs": kwargs})
            assert reply.status == 200, method
        assert versions(fleet) == {"1"}
        for wrong, param in (
            ({"method": "exec"}, "method"),
            ({"method": "update_weights_nccl"}, "kwargs.update_info"),
            ({"method": finish}, None),
        ):
            refused = await post(client, "/collective_rpc", wrong)
            assert (refused.status, refused.json()["error"]["param"]) == (400, param)
        assert (await post(client, "/finish_session", query=b"session_id=a")).status == 200

    run(body)


def replica_stats(fleet: Fleet) -> list[EngineStats]:
    return [*fleet.dispatcher.state().replicas.values()]


def test_single_requests_end_with_what_they_have() -> None:
    """The tokens of a rollout are lost with its abort, or an unknown id counts as ended."""

    async def body(fleet: Fleet) -> None:
        front = ModelsBackend("router")
        front.set_dispatcher("m", fleet.dispatcher, 0)

        async def stop(request_id: str, owner: str | None, partial: bool = False) -> int:
            return front.stop(request_id, owner, partial)

        options = ApiOptions(training=RouterTraining(front), stop=stop)
        client = Client(build_asgi(front, options))
        sampling = {"max_tokens": LONG, "ignore_eos": True, "n": 2}
        ask = {"token_ids": PROMPT, "sampling_params": sampling}
        running = [
            asyncio.create_task(post(client, "/inference/v1/generate", {**ask, "request_id": id}))
            for id in ("first", "second")
        ]
        await until(lambda: sum(request.begun for request in fleet.dispatcher.requests) == 2)
        await asyncio.sleep(0.02)
        reply = await post(client, "/abort_requests", {"request_ids": ["first", "other"]})
        assert reply.json() == {"status": "aborted", "known_request_ids": 1}
        theirs = await post(client, "/abort_request", {"rid": "other"})
        assert theirs.json() == {"status": "ok"}
        first, second = [(await task).json()["choices"] for task in running]
        for choice in first:
            assert choice["finish_reason"] == "abort" and 0 < len(choice["token_ids"]) < LONG
            num_tokens = sum(part["num_tokens"] for part in choice["weight_versions"])
            assert num_tokens == len(choice["token_ids"])
        assert {choice["finish_reason"] for choice in second} == {"length"}
        assert fleet.dispatcher.held() == {"requests": 0, "waiting": 0, "choices": 0}

    run(body)


def test_a_pause_with_its_mode_in_the_body() -> None:
    """A pause that is to keep requests aborts them, as only the query is read."""

    async def body(fleet: Fleet) -> None:
        client = front_of(fleet)
        running = await streams(fleet, 2, LONG)
        for path, wrong in (
            ("/pause", {"modus": "keep"}),
            ("/pause?wait=true", {}),
            ("/pause", {"mode": "later"}),
            ("/pause", {"mode": 1}),
            ("/sleep", {"mode": "keep"}),
        ):
            place, _, query = path.partition("?")
            assert (await post(client, place, wrong, query.encode())).status == 400, wrong
        assert not fleet.dispatcher.weights.paused
        answer = await post(client, "/pause", {"mode": "keep", "clear_cache": False})
        assert answer.status == 200 and fleet.dispatcher.weights.paused
        assert (await post(client, "/resume")).status == 200
        for _, task in running:
            assert all(len(ids) == LONG for ids in (await task).values())

    run(body)


def test_an_order_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: with requests that a pause keeps, /weight_info told for half a second of a fleet that is
    paused and of replicas that are not: their frame was held back, and no step followed it."""
    slow = ChannelLimits(heartbeat=10.0, timeout=50.0)
    monkeypatch.setattr("tests.deployments.router.fleet.FAST", slow)

    async def body(fleet: Fleet) -> None:
        client, second = front_of(fleet), fleet.new_router()
        second.set_replicas(fleet.published())
        await until(lambda: len(second.state().replicas) == 2)

        def states(router: Dispatcher) -> set[tuple[bool, bool]]:
            return {(stats.paused, stats.asleep) for stats in router.state().replicas.values()}

        running = await streams(fleet, 2, LONG)
        for path, query, wanted in (
            ("/pause", b"mode=keep", (True, False)),
            ("/sleep", b"level=1", (True, True)),
            ("/wake_up", b"", (True, False)),
            ("/resume", b"", (False, False)),
        ):
            assert (await post(client, path, query=query)).status == 200, path
            await until(lambda w=wanted: states(fleet.dispatcher) == states(second) == {w})
        for _, task in running:
            assert all(len(ids) == LONG for ids in (await task).values())
        second.close()

    run(body)


def asleep(fleet: Fleet) -> set[bool]:
    return {stats.asleep for stats in fleet.dispatcher.state().replicas.values()}


def test_a_fleet_sleeps_in_parts(tmp_path: Path) -> None:
    """A trainer's device is not free when it is told so, or a request wakes the fleet meanwhile."""

    async def body(fleet: Fleet) -> None:
        front = ModelsBackend("router")
        front.set_dispatcher("m", fleet.dispatcher, 0)
        client = Client(build_asgi(front, ApiOptions(training=RouterTraining(front))))

        async def sleeping() -> bool:
            state: bool = (await client.request("GET", "/is_sleeping")).json()["is_sleeping"]
            return state

        running = await streams(fleet, 2, LONG)
        assert (await post(client, "/sleep", query=b"level=2")).status == 200
        assert await sleeping()
        for _, task in running:
            assert all(len(ids) < LONG for ids in (await task).values()), "aborted"
        cores = [engine.core for engine in fleet.engines.values()]
        assert all(core.stats().weights_dropped for core in cores)
        waiting = await asyncio.gather(*[start(fleet) for _ in range(2)])
        await fleet.add_replica("r2")
        fleet.publish()
        await until(lambda: len(asleep(fleet)) == 1 and "r2" in fleet.dispatcher.state().replicas)
        assert fleet.engines["r2"].core.stats().paused, "a replica that joins sleeps too"
        wake = await post(client, "/wake_up", query=b"tags=weights")
        assert wake.status == 200 and asleep(fleet) == {True}
        await fleet.dispatcher.weights.update(str(tmp_path), "one")
        assert await sleeping() and asleep(fleet) == {True}
        assert (await post(client, "/wake_up", query=b"tags=kv_cache")).status == 200
        assert not await sleeping()
        for generation, task in waiting:
            assert check(generation, await task) == {"one"}
        await until(lambda: asleep(fleet) == {False})
        await post(client, "/pause", query=b"mode=keep")
        theirs = {"tags": ["kv_cache", "cuda_graph"]}
        assert (await post(client, "/release_memory_occupation", theirs)).status == 200
        assert await sleeping()
        assert (await post(client, "/resume_memory_occupation", theirs)).status == 200
        assert fleet.dispatcher.weights.paused, "the pause was there before the sleep"
        await post(client, "/resume")
        for query in (b"level=3", b"level=x", b"tags=cache", b"mode=later"):
            assert (await post(client, "/sleep", query=query)).status == 400
        assert (await post(client, "/wake_up", query=b"tags=cache")).status == 400
        assert not fleet.dispatcher.weights.paused and not await sleeping()

    async def start(fleet: Fleet) -> tuple[InflightRequest, Any]:
        generation = fleet.generate(n=1, max_tokens=5, ignore_eos=True)
        return generation, asyncio.create_task(read(generation))

    run(body)


def test_engines_that_cannot_sleep_go_on() -> None:
    """A refused sleep leaves the fleet paused, or has ended its requests."""

    async def body(fleet: Fleet) -> None:
        fleet.engines["r1"].core._sleep._memory = None
        running = await streams(fleet, 4, LONG)
        with pytest.raises(UpdateFailed, match="sleep_in_host_memory"):
            await fleet.dispatcher.weights.sleep(1, (), "abort")
        assert not fleet.dispatcher.weights.paused and asleep(fleet) == {False}
        for _, task in running:
            assert all(len(ids) == LONG for ids in (await task).values())
        await fleet.dispatcher.weights.sleep(0, (), "keep")
        assert fleet.dispatcher.weights.paused and asleep(fleet) == {False}
        await fleet.dispatcher.weights.wake(())
        assert not fleet.dispatcher.weights.paused

    run(body)


def test_a_long_wait_for_a_trainer_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests wait for a trainer that has forgotten its pause, and nothing says for what; or a
    line comes for each of them, or for those that a pause lets run."""
    monkeypatch.setattr(dispatcher, "PAUSED_SECONDS", 0.1)

    def lines() -> list[str]:
        return [text for text in caplog.messages if "a trainer has paused" in text]

    async def body(fleet: Fleet) -> None:
        weights = fleet.dispatcher.weights
        for order, ends, way in (
            (partial(weights.pause, "keep"), weights.resume, "POST /resume"),
            (partial(weights.sleep, 1, (), "keep"), partial(weights.wake, ()), "POST /wake_up"),
        ):
            caplog.clear()
            await order()
            await asyncio.sleep(0.25)
            assert not lines(), "nobody waits"
            tasks = [asyncio.create_task(read(fleet.generate(max_tokens=5))) for _ in range(3)]
            await until(lambda: bool(lines()))
            await asyncio.sleep(0.3)
            assert len(lines()) == 1 and f"{way} ends the pause" in lines()[0]
            assert "m: 3 requests" in lines()[0]
            await ends()
            await asyncio.gather(*tasks)
        caplog.clear()
        running = await streams(fleet, 2, LONG)
        pausing = asyncio.create_task(weights.pause("wait"))
        await asyncio.gather(*(task for _, task in running), pausing)
        assert not lines()
        await weights.resume()

    run(body)


def test_requests_without_weights_are_refused(tmp_path: Path) -> None:
    """Requests hang after a sleep of level 2 and a wake, those that a pause has kept too, and
    nothing tells why."""

    async def main() -> None:
        limits = DispatchLimits(wait_seconds=0.3, channel=FAST)
        async with Fleet(2, rows=8, limits=limits) as fleet:
            weights = fleet.dispatcher.weights
            running = [fleet.generate(n=2, max_tokens=LONG, ignore_eos=True) for _ in range(2)]
            tasks = [asyncio.create_task(read(generation)) for generation in running]
            await until(lambda: all(generation.begun for generation in running))
            await weights.pause("keep")
            await weights.sleep(2, (), "keep")
            await weights.wake(())
            await asyncio.sleep(0.5)
            assert not any(task.done() for task in tasks), "the trainer's step goes on"
            await weights.resume()
            for task in tasks:
                with pytest.raises(Overloaded, match="update_weights"):
                    await asyncio.wait_for(task, 10)
            await until(lambda: fleet.load() == {"r0": 0, "r1": 0})
            await weights.update(str(tmp_path), "zero")
            await weights.sleep(2, (), "abort")
            early = fleet.generate(n=1, max_tokens=5, ignore_eos=True)
            await asyncio.sleep(0.5)
            await weights.wake(())
            late = fleet.generate(n=1, max_tokens=5, ignore_eos=True)
            for generation in (early, late):
                with pytest.raises(Overloaded, match="update_weights") as failure:
                    await asyncio.wait_for(read(generation), 10)
                assert failure.value.code == "weights_dropped"
            info = await client_info(fleet)
            assert info["weights_dropped"] is True
            generation = fleet.generate(n=1, max_tokens=5, ignore_eos=True)
            await weights.update(str(tmp_path), "one")
            assert check(generation, await read(generation)) == {"one"}
            await until(lambda: not weights.dropped)

    async def client_info(fleet: Fleet) -> Any:
        return (await front_of(fleet).request("GET", "/weight_info")).json()

    asyncio.run(main())


def front_of(fleet: Fleet) -> Client:
    front = ModelsBackend("router")
    front.set_dispatcher("m", fleet.dispatcher, 0)
    return Client(build_asgi(front, ApiOptions(training=RouterTraining(front))))


def receivers(fleet: Fleet) -> dict[str, Any]:
    return {name: engine.core._transfers._receiver for name, engine in fleet.engines.items()}


INFO = {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[2]]}


def test_a_trainer_of_vllm_sends_weights_to_a_fleet() -> None:
    """Two replicas take one rank of the trainer's group, or half an update is served."""

    async def body(fleet: Fleet) -> None:
        client = front_of(fleet)
        size = (await client.request("GET", "/get_world_size")).json()["world_size"]
        info = {"master_address": "h", "master_port": 1, "rank_offset": 1, "world_size": size + 1}
        reply = await post(client, "/init_weight_transfer_engine", {"init_info": info})
        assert reply.json() == {"message": "Weight transfer initialized"}
        ranks = [receiver.info[0]["rank_offset"] for receiver in receivers(fleet).values()]
        assert ranks == [1, 2]
        running = await streams(fleet, 4, LONG)
        start = await post(client, "/start_weight_update", {"is_checkpoint_format": True})
        assert start.json() == {"message": "Weight update started"}
        await fleet.add_replica("r2")
        fleet.publish()
        await until(lambda: len(fleet.dispatcher.state().replicas) == 3)
        for _ in range(2):
            reply = await post(client, "/update_weights", {"update_info": INFO})
            assert reply.json() == {"message": "Weights updated"}
        assert versions(fleet) == {"0"}, "until the end"
        done = await post(client, "/finish_weight_update", {"weight_version": "one"})
        assert done.json() == {"message": "Weight update finished", "weight_version": "one"}
        by_stream = [check(generation, await task) for generation, task in running]
        assert any(len(seen) == 2 for seen in by_stream)
        await until(lambda: versions(fleet) == {"one"})
        first, second, joined = receivers(fleet).values()
        assert joined._folders == [] and fleet.engines["r2"].core._updates.folder in (
            first._folders + second._folders
        ), "a replica that joins takes the weights of another on its node"
        bare = await client.request("POST", "/start_weight_update", b"")
        assert bare.status == 200, "vLLM's client sends no body"
        assert (await client.request("POST", "/finish_weight_update", b"")).status == 200
        whole = await post(client, "/update_weights", {"update_info": INFO})
        assert whole.json() == {"message": "Weights updated", "weight_version": "3"}
        assert versions(fleet) == {"3"}
        newest = [
            receiver._folders[-1] for receiver in (first, second, joined) if receiver._folders
        ]
        assert fleet.engines["r2"].core._updates.folder in newest, "sent to it, or to its node"

    run(body)


def test_orders_without_a_body() -> None:
    """A client that names no content type, as there is no content, gets 415."""

    async def body(fleet: Fleet) -> None:
        client = front_of(fleet)
        for path in ("/abort_requests", "/start_weight_update", "/finish_weight_update"):
            for text, status in ((b"{}", 415), (b"", 200)):
                reply = await client.request("POST", path, text, headers=[(b"host", b"manta")])
                assert reply.status == status, path

    run(body)


def test_a_transfer_that_fails_at_one_replica_changes_none() -> None:
    """Replicas that have all tensors take them, and others keep the old weights."""

    async def body(fleet: Fleet) -> None:
        client = front_of(fleet)
        theirs = receivers(fleet)["r1"]

        def dies(info: dict[str, Any]) -> str:
            raise UpdateFailed("the trainer is gone", code="transfer_failed")

        theirs.update = dies
        for started in (False, True):
            if started:
                await post(client, "/start_weight_update")
            gone = await post(client, "/update_weights", {"update_info": INFO})
            error = gone.json()["error"]
            assert (gone.status, error["code"]) == (400, "transfer_failed")
            assert error["message"] == "r1: the trainer is gone"
            ended = await post(client, "/finish_weight_update")
            assert ended.status == 400 and "no update" in ended.json()["error"]["message"]
        assert versions(fleet) == {"0"}
        wrong = {"rank_offset": 1, "world_size": 9, "master_address": "h", "master_port": 1}
        reply = await post(client, "/init_weight_transfer_engine", {"init_info": wrong})
        assert reply.status == 400 and "there are 2 replicas" in reply.json()["error"]["message"]
        for path in ("/init_weight_transfer_engine", "/update_weights"):
            assert (await post(client, path)).status in (400, 422)
        del theirs.update
        reply = await post(client, "/update_weights", {"update_info": INFO, "weight_version": "x"})
        assert reply.json()["weight_version"] == "x" and versions(fleet) == {"x"}
        same = await post(client, "/update_weights", {"update_info": INFO, "weight_version": "x"})
        assert same.status == 400 and "another weight_version" in same.json()["error"]["message"]

    run(body)
