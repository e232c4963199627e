"""Clients in another Ray job: typed with Manta installed, plain dicts without, a driver each."""

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deployments.on_ray.job import Job, job
from tests.deployments.on_ray.serve_cluster import Cluster

pytestmark = [pytest.mark.serve, pytest.mark.slow]


@pytest.fixture(scope="module", name="job")
def joined(shared_fleet: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Yield a job that has joined the cluster; its programs find Manta as this process does."""
    with job(shared_fleet.address, Path.cwd()) as started:
        started.run(joins(shared_fleet))
        yield started


def joins(cluster: Cluster) -> str:
    """Return the line of a program that joins the cluster."""
    return f"import ray\nray.init({cluster.address!r}, log_to_driver=False)\n"


def test_the_typed_client(job):
    """An API that works only inside the process that deployed it."""
    out = job.run(
        """
        import ray

        import pickle
        from deployments.client import Client
        from engine.errors import InvalidRequest, MantaError, Overloaded

        client = Client.connect()
        assert client.model == "tiny", client.model
        answer = client.chat([{"role": "user", "content": "the answer"}], max_tokens=12)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == 12 and answer.usage.prompt_tokens > 5
        pieces = list(
            client.stream([{"role": "user", "content": "the answer"}], max_tokens=12)
        )
        assert len(pieces) > 2 and pieces[-1].finish_reason == "length"
        assert "".join(piece.text for piece in pieces) == answer.text
        two = client.generate([40, 41, 42], max_tokens=5, n=2, logprobs=1)
        assert [choice.index for choice in two.choices] == [0, 1]
        assert len(two.choices[0].logprobs["tokens"]) == 5
        assert two.choices[0].token_ids is None and two.prompt_token_ids is None
        wanted = {
            "max_tokens": 5,
            "return_token_ids": True,
            "logprobs_mode": "processed_logprobs",
            "prompt_logprobs": 0,
        }
        for prompt, scores in (
            ([40, 41, 42], {"logprobs": 0}),
            ([{"role": "user", "content": "hi"}], {"logprobs": True}),
        ):
            rollouts = client.generate(prompt, n=64, **wanted, **scores)
            assert len(rollouts.choices) == 64
            for choice in rollouts.choices:
                assert len(choice.token_ids) == len(choice.token_logprobs) == 5
                assert all(value < 0 for value in choice.token_logprobs)
                assert choice.weight_versions == (("0", 5),)
            assert len(rollouts.prompt_logprobs) == len(rollouts.prompt_token_ids)
            # Fake engines score no prompts.
            assert set(rollouts.prompt_logprobs) == {None}
        assert client.generate("the words", max_tokens=3).raw["object"] == "text_completion"
        assert len(client.tokenize("the words").ids) > 1 and client.adapters() == ()
        assert client.detokenize([40, 41, 42]).startswith(client.detokenize([40]))
        assert client.generate("the words", max_tokens=3, user="me").text  # known, without effect

        for prompt, fields, param in (
            ("x", {"temperature": 9}, "temperature"),
            ("x", {"max_tokens": "5"}, "max_tokens"),
            ([], {}, "prompt"),
            (3, {}, "prompt"),
            ([{"role": "wizard", "content": ""}], {}, "messages[0].role"),
            ("x" * 20000, {}, None),
            ("x", {"model": "other"}, "model"),
        ):
            for call in (client.generate, lambda *a, **k: list(client.stream(*a, **k))):
                try:
                    call(prompt, **fields)
                except InvalidRequest as error:
                    assert param is None or error.param == param, (error, error.param)
                else:
                    raise AssertionError((prompt, fields))
        try:
            Client.connect("absent")
        except MantaError as error:
            assert error.code == "app_not_found"
        else:
            raise AssertionError

        for piece in client.stream("the answer", max_tokens=200):
            break  # left early: the request is stopped
        import time
        from ray import serve

        handle = serve.get_app_handle("manta")
        for _ in range(100):
            state = handle.state.remote().result()
            if not state["in_flight"]:
                break
            time.sleep(0.05)
        assert not state["in_flight"]

        print("fine")
        """
    )
    assert out.endswith("fine\n")


def test_clients_in_tasks_and_actors(job):
    """A client that works in drivers only: a handle in a task or an actor of the cluster runs, by
    the environment there, on an event loop that is not there or, after asyncio.run, gone."""
    out = job.run(
        """
        import ray

        import asyncio
        from deployments.client import AsyncClient, Client

        def ask(client):
            text = client.generate("the words", max_tokens=3).text
            pieces = [piece.text for piece in client.stream("the words", max_tokens=3)]
            assert "".join(pieces) == text, pieces
            return text

        async def ask_async(client):
            text = (await client.generate("the words", max_tokens=3)).text
            pieces = [piece.text async for piece in client.stream("the words", max_tokens=3)]
            assert "".join(pieces) == text, pieces
            return text

        async def connect_and_ask():
            return await ask_async(await AsyncClient.connect())

        @ray.remote(num_cpus=0)
        class Both:  # in one process, after one another
            def given(self, client):
                return ask(client)
            def connected(self):
                return ask(Client.connect())
            def loop_of_its_own(self):
                return asyncio.run(connect_and_ask())
            def loop_of_its_own_given(self, client):
                return asyncio.run(ask_async(client))

        @ray.remote(num_cpus=0)
        class Async:
            async def given(self, client):
                return await ask_async(client)
            async def connected(self):
                return await connect_and_ask()
            async def in_a_thread(self):
                return await asyncio.to_thread(lambda: ask(Client.connect()))

        client, other = Client.connect(), asyncio.run(AsyncClient.connect())
        both, loop = Both.remote(), Async.remote()
        answers = [
            ray.remote(num_cpus=0)(ask).remote(client),
            *(both.given.remote(client) for _ in range(2)),
            *(both.connected.remote() for _ in range(2)),
            *(both.loop_of_its_own.remote() for _ in range(2)),
            *(both.loop_of_its_own_given.remote(other) for _ in range(2)),
            loop.given.remote(other),
            loop.connected.remote(),
            loop.in_a_thread.remote(),
        ]
        assert set(ray.get(answers)) == {ask(client)}
        print("fine")
        """
    )
    assert out.endswith("fine\n")


def test_the_async_client(job):
    """A client that blocks the event loop, or calls that only work one at a time."""
    out = job.run(
        """
        import ray

        import asyncio
        from deployments.client import AsyncClient
        from engine.errors import InvalidRequest

        async def main():
            client = await AsyncClient.connect()
            answers = await asyncio.gather(
                *(client.chat([{"role": "user", "content": "hi"}], max_tokens=9) for _ in range(8))
            )
            assert len({answer.text for answer in answers}) == 1
            pieces = [piece async for piece in client.stream("the answer", max_tokens=9)]
            assert pieces[-1].finish_reason == "length"
            try:
                await client.generate("x", n=129)
            except InvalidRequest as error:
                assert error.param == "n"
            else:
                raise AssertionError
            async for piece in client.stream("the answer", max_tokens=200):
                break
            task = asyncio.create_task(client.generate("the answer", max_tokens=200))
            await asyncio.sleep(0.3)
            task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                pass
            from ray import serve

            handle = serve.get_app_handle("manta")
            for _ in range(100):
                state = await handle.state.remote()
                if not state["in_flight"]:
                    break
                await asyncio.sleep(0.05)
            assert not state["in_flight"], state
            print("fine")

        asyncio.run(main())
        """
    )
    assert out.endswith("fine\n")


def test_plain_dicts_without_manta(shared_fleet, tmp_path):
    """Handle calls whose arguments or results need our package on the caller's side."""
    program = joins(shared_fleet) + textwrap.dedent(
        """
        import sys

        class Absent:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in ("deployments", "engine", "kernels"):
                    raise ModuleNotFoundError(name)

        sys.meta_path.insert(0, Absent())
        from ray import serve

        handle = serve.get_app_handle("manta")
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
        answer = handle.generate.remote(body).result()
        assert answer["object"] == "chat.completion" and "error" not in answer
        pieces = list(handle.options(method_name="stream", stream=True).remote(body))
        text = "".join(c["delta"].get("content") or "" for p in pieces for c in p["choices"])
        assert text == answer["choices"][0]["message"]["content"]
        del body["model"]
        assert handle.generate.remote(body).result()["model"] == "tiny"
        for wrong in ({**body, "temperature": 9}, {**body, "model": "x"}, {}, {"prompt": 1}):
            answer = handle.generate.remote(wrong).result()
            assert answer["status"] in (400, 404) and answer["error"]["code"], answer
            (piece,) = handle.options(method_name="stream", stream=True).remote(wrong)
            assert piece["error"] == answer["error"]

        # As docs/python.md has it, for tasks.
        own_loop = {"env_vars": {"RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "1"}}

        @ray.remote(num_cpus=0, runtime_env=own_loop)
        def task():
            handle = serve.get_app_handle("manta")
            assert list(handle.options(method_name="stream", stream=True).remote(body))
            return handle.generate.remote(body).result()["choices"]

        @ray.remote(num_cpus=0)
        class Actor:
            async def ask(self):
                return (await serve.get_app_handle("manta").generate.remote(body))["choices"]

        assert ray.get(task.remote()) == ray.get(Actor.remote().ask.remote())
        print("fine")
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, timeout=90
    )
    assert done.returncode == 0, done.stderr[-3000:]
    out = done.stdout
    assert out.endswith("fine\n")
