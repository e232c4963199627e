"""Ray Data's own processors against Manta: the Serve stage, HTTP, engines in its actors, and the
programs of docs/ray-data.md and examples/. Runs where `ray[data]` is installed."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from deployments.app import assemble
from deployments.cli import status
from deployments.config.load import parse_config
from tests.deployments.on_ray.job import Job, job
from tests.deployments.on_ray.live import ROOT, settled
from tests.deployments.on_ray.serve_cluster import Cluster, fake_engine, tiny_model
from tests.faults.agents import agent_model
from tests.test_docs import examples

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(120)]
pytest.importorskip("pyarrow")
pytest.importorskip("pandas")

# The line by which a program joins the cluster.
JOINS = re.compile(
    r'^ray\.init\(address="auto",.* runtime_env=\{"env_vars": loop\}\)\n', re.MULTILINE
)


@pytest.fixture(scope="module")
def cluster(shared_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    from ray import serve

    config = parse_config(
        {
            "model": str(tiny_model(tmp_path_factory.mktemp("models") / "tiny")),
            "pools": {"cpu": {"replicas": 1, "num_cpus": 0.5}},
            "router": {"replicas": 1, "batch_replicas": 1},
            # A queue that a batch of rows overflows.
            "engine": {"max_num_seqs": 16},
            "limits": {"drain_seconds": 2.0, "queue_tokens": 300},
            "batch": {"folder": str(tmp_path_factory.mktemp("batches"))},
        },
        {},
    )
    serve.run(assemble(config, fake_engine), name="manta", route_prefix="/")
    yield shared_cluster
    serve.delete("manta")


@pytest.fixture(scope="module", name="job")
def joined(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Yield a job that has joined the cluster by the line of the docs."""
    with job(cluster.address, tmp_path_factory.mktemp("job")) as started:
        endpoint, _ = examples("ray-data.md")
        line = JOINS.search(endpoint)
        assert line
        started.run(endpoint[: line.end()])
        yield started


@pytest.fixture
def no_core(cluster: Cluster) -> Iterator[None]:
    """Reserve all cores of the cluster, as replicas would, while the test runs."""
    from ray.util import placement_group, remove_placement_group

    groups = [placement_group([{"CPU": 1}])]
    while groups[-1].wait(1):
        groups.append(placement_group([{"CPU": 1}]))
    assert len(groups) > 1
    yield
    for group in groups:
        remove_placement_group(group)


@pytest.mark.parametrize(
    ("where", "shown"),
    [
        # It differs from the other by its prompts.
        pytest.param("docs", "'prompt': '99 and 99 are', 'text': '", marks=pytest.mark.nightly),
        ("examples", "100 answers, 0 errors"),
    ],
)
def test_programs_ask_an_endpoint(job: Job, no_core: None, where: str, shown: str) -> None:
    """A dataset that waits for ever for cores that the replicas hold, or that a full endpoint
    ends."""
    program = (ROOT / "examples" / "ray_data.py").read_text("utf-8")
    if where == "docs":
        program, _ = examples("ray-data.md")
    program, joined = JOINS.subn("", program)
    assert joined == 1 and shown in job.run(program)


@pytest.mark.nightly  # test_the_engine_processor looks at more than the page's program
def test_a_program_runs_engines_of_its_own(job: Job, tmp_path: Path) -> None:
    """An example that ends in a traceback."""
    _, engines = examples("ray-data.md")
    model = agent_model(tmp_path / "model")
    output = job.run(engines.replace('"default"', repr(str(model))))
    assert "'prompt': '99 and 99 are', 'text': '" in output


def test_the_serve_stage(job: Job) -> None:
    """Methods that the stage does not find, a batch that overflows the queue and ends the job, one
    bad row that ends it, or rows whose key is lost."""
    output = job.run(
        """
        import ray
        from ray.data.llm import ServeDeploymentProcessorConfig, build_processor

        config = ServeDeploymentProcessorConfig(
            deployment_name="router",
            app_name="manta",
            batch_size=64,
            concurrency=1,
            should_continue_on_error=True,
        )

        def body(row):
            n = row["key"]
            if n % 2:
                kwargs = {"model": "tiny", "prompt": f"row {n}", "max_tokens": 4}
                kwargs["temperature"] = 9.0 if n == 7 else 1.0
                return {"method": "completions", "request_kwargs": kwargs}
            messages = [{"role": "user", "content": f"row {n}"}]
            return {
                "method": "chat",
                "request_kwargs": {"messages": messages, "max_tokens": 4},
            }

        def text(row):
            choice = row["choices"][0]
            answer = choice["text"] if "text" in choice else choice["message"]["content"]
            return {"key": row["key"], "text": answer}

        processor = build_processor(config, preprocess=body, postprocess=text)
        questions = ray.data.from_items([{"key": n} for n in range(64)])
        rows = processor(questions).take_all()
        assert sorted(row["key"] for row in rows) == [*range(64)]
        bad = [row["key"] for row in rows if row["__inference_error__"]]
        print("rows", len(rows), "bad", bad)
        by_key = {row["key"]: row["__inference_error__"] for row in rows}  # in any order
        assert "temperature" in by_key[7]
        """,
    )
    assert "rows 64 bad [7]" in output


def prompt_tokens() -> dict[str, int]:
    """Return the prompt tokens that the router of each deployment has accepted."""
    routers = status.poll("manta").routers
    assert len(routers) == 2
    tokens = {
        router["name"].rpartition("-")[0]: router["metrics"]["prompt_tokens"] for router in routers
    }
    assert tokens.keys() == {"router", "batch-router"}
    return tokens


def test_routers_of_batch_work(cluster: Cluster, job: Job) -> None:
    """Rows that the routers of HTTP answer all the same, or HTTP requests at the routers of batch
    work; a Python client that cannot choose them; metrics and a live view without them."""
    before = prompt_tokens()
    output = job.run(
        """
        import ray
        from deployments.client import Client
        from engine.errors import MantaError
        from ray.data.llm import ServeDeploymentProcessorConfig, build_processor

        config = ServeDeploymentProcessorConfig(
            deployment_name="batch-router", app_name="manta", batch_size=16, concurrency=1
        )
        processor = build_processor(
            config,
            preprocess=lambda row: {
                "method": "completions",
                "request_kwargs": {"prompt": f"row {row['id']}", "max_tokens": 4},
            },
            postprocess=lambda row: {"text": row["choices"][0]["text"]},
        )
        rows = processor(ray.data.range(32)).take_all()
        print("rows", len(rows), "with text", sum(bool(row["text"]) for row in rows))
        client = Client.connect(deployment="batch-router")
        assert client.generate("hello", max_tokens=4, priority=16).text
        try:
            Client.connect(deployment="rows")
        except MantaError as error:
            print(error.code)
        """,
    )
    assert "rows 32 with text 32" in output and "app_not_found" in output
    after = prompt_tokens()
    assert after["router"] == before["router"] and after["batch-router"] > before["batch-router"]
    for _ in range(8):
        cluster.post("/v1/completions", prompt="hello", max_tokens=2)
    later = prompt_tokens()
    assert later["batch-router"] == after["batch-router"] and later["router"] > after["router"]
    figures = cluster.get("/metrics")
    assert all(f'router="{name}-' in figures for name in after)
    names = [router["router"] for router in json.loads(cluster.get("/v1/live"))["routers"]]
    assert {name.rpartition("-")[0] for name in names} == after.keys() and len(names) == 2


def test_batches_run_at_routers_of_batch_work(cluster: Cluster) -> None:
    """Requests of a batch in the interpreter of a router of HTTP, or a batch that nobody runs."""
    url = "/v1/completions"
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
    line = {"method": "POST", "url": url, "body": body}
    source = "".join(json.dumps({"custom_id": f"c{n}", **line}) + "\n" for n in range(8)).encode()
    before = prompt_tokens()
    base = f"http://127.0.0.1:{cluster.port}/v1"
    with openai.OpenAI(base_url=base, api_key="none", max_retries=0, timeout=30) as client:
        file = client.files.create(file=("a.jsonl", source), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")
        settled(lambda: client.batches.retrieve(batch.id).status == "completed", 60)
        counts = client.batches.retrieve(batch.id).request_counts
    assert counts and (counts.completed, counts.failed) == (8, 0)
    after = prompt_tokens()
    assert after["router"] == before["router"] and after["batch-router"] > before["batch-router"]


def test_http(cluster: Cluster, job: Job, no_core: None) -> None:
    """Door two: rows as bodies, with retries of what is refused. A bad row ends the job, the rows
    beside it are taken for bad, or actors wait for ever for cores that the replicas hold."""
    output = job.run(
        f"""
        import ray
        from ray.data.llm import HttpRequestProcessorConfig, build_processor

        config = HttpRequestProcessorConfig(
            url="http://127.0.0.1:{cluster.port}/v1/completions",
            concurrency=2, batch_size=8, max_retries=8, http_request_stage={{"num_cpus": 0}},
        )
        processor = build_processor(
            config,
            preprocess=lambda row: {{
                "id": row["id"],
                "payload": {{
                    "prompt": f"row {{row['id']}}",
                    "max_tokens": 4,
                    "priority": 16,
                    "temperature": 9.0 if row["id"] == 7 else 1.0,
                }},
            }},
            postprocess=lambda row: {{
                "id": row["id"], "failed": bool(row["http_response"].get("error")),
            }},
            preprocess_map_kwargs={{"num_cpus": 0}},
            postprocess_map_kwargs={{"num_cpus": 0}},
        )
        rows = processor(ray.data.from_items([{{"id": n}} for n in range(16)])).take_all()
        print("rows", len(rows), "bad", [row["id"] for row in rows if row["failed"]])
        """,
    )
    assert "rows 16 bad [7]" in output


def test_the_engine_processor(job: Job, tmp_path: Path) -> None:
    """Rows in another order than their answers, a bad row that ends the job, and
    a job that goes on and computes all rows again."""
    folder = tiny_model(tmp_path / "tiny")
    output = job.run(
        f"""
        import ray
        from ray.data.llm import build_processor
        from deployments.ray_data import MantaEngineProcessorConfig

        config = MantaEngineProcessorConfig(
            model_source={str(folder)!r},
            engine_kwargs={{"load_format": "dummy", "device": "cpu", "num_threads": 1}},
            batch_size=8,
            num_cpus=0.5,
            should_continue_on_error=True,
        )

        def body(row):
            params = {{"max_tokens": 2 + row["id"] % 5, "temperature": 0.7, "logprobs": 0}}
            params |= {{"ignore_eos": True, "logprobs_mode": "processed_logprobs"}}
            if row["id"] == 9:
                params["temperature"] = 9.0
            return {{"prompt": "the answer " * (1 + row["id"] % 3), "sampling_params": params}}

        def answer(row):
            return {{
                "id": row["id"],
                "count": row["num_generated_tokens"],
                "scored": len(row["token_logprobs"]),
            }}

        processor = build_processor(config, preprocess=body, postprocess=answer)
        out = {str(tmp_path / "out")!r}
        processor(ray.data.range(16)).write_parquet(out)  # as much as a stopped job has written
        done = {{row["id"] for row in ray.data.read_parquet(out).iter_rows()}}
        rest = ray.data.range(40).filter(lambda row: row["id"] not in done)
        processor(rest).write_parquet(out)
        rows = sorted(ray.data.read_parquet(out).take_all(), key=lambda row: row["id"])
        bad = [row["id"] for row in rows if row["__inference_error__"]]
        good = [row for row in rows if row["id"] not in bad]
        assert all(row["count"] == row["scored"] == 2 + row["id"] % 5 for row in good)
        print("rows", len(rows), "bad", bad)
        """,
    )
    assert "rows 40 bad [9]" in output
