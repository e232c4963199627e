"""Ray Data's own processors against Manta: the Serve stage, HTTP, and engines in its actors. Runs
where `ray[data]` is installed."""

import pytest

from deployments.app import assemble
from deployments.config.load import parse_config
from tests.deployments.on_ray.serve_cluster import Cluster, fake_engine, tiny_model
from tests.deployments.on_ray.test_client import driver

pytestmark = [pytest.mark.serve, pytest.mark.slow]
pytest.importorskip("pyarrow")
pytest.importorskip("pandas")


@pytest.fixture(scope="module")
def cluster(shared_cluster: Cluster, tmp_path_factory):
    from ray import serve

    config = parse_config(
        {
            "model": str(tiny_model(tmp_path_factory.mktemp("models") / "tiny")),
            "pools": {"cpu": {"replicas": 1, "num_cpus": 0.5}},
            "router": {"replicas": 1},
            # A queue that a batch of rows overflows.
            "engine": {"max_num_seqs": 2},
            "limits": {"drain_seconds": 2.0, "queue_tokens": 300},
        },
        {},
    )
    serve.run(assemble(config, fake_engine), name="manta", route_prefix="/")
    yield shared_cluster
    serve.delete("manta")


def test_the_serve_stage(cluster, tmp_path):
    """Methods that the stage does not find, a batch that overflows the queue and ends the job, one
    bad row that ends it."""
    out = driver(
        cluster,
        """
        from ray.data.llm import ServeDeploymentProcessorConfig, build_processor

        config = ServeDeploymentProcessorConfig(
            deployment_name="router",
            app_name="manta",
            batch_size=32,
            concurrency=1,
            should_continue_on_error=True,
        )

        def body(row):
            n = row["id"]
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
            return {"id": row["id"], "text": answer}

        processor = build_processor(config, preprocess=body, postprocess=text)
        rows = processor(ray.data.range(64)).take_all()
        bad = [row["id"] for row in rows if row["__inference_error__"]]
        print("rows", len(rows), "bad", bad)
        assert "temperature" in rows[7]["__inference_error__"]
        """,
        tmp_path,
        RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP="1",
    )
    assert "rows 64 bad [7]" in out


def test_http(cluster, tmp_path):
    """Door two: rows as bodies, with retries of what is refused."""
    out = driver(
        cluster,
        f"""
        from ray.data.llm import HttpRequestProcessorConfig, build_processor

        config = HttpRequestProcessorConfig(
            url="http://127.0.0.1:{cluster.port}/v1/completions",
            concurrency=2, batch_size=8, max_retries=8,
        )
        processor = build_processor(
            config,
            preprocess=lambda row: {{
                "payload": {{"prompt": f"row {{row['id']}}", "max_tokens": 4, "priority": 16}}
            }},
            postprocess=lambda row: {{"text": row["http_response"]["choices"][0]["text"]}},
        )
        print("rows", len(processor(ray.data.range(16)).take_all()))
        """,
        tmp_path,
    )
    assert "rows 16" in out


def test_the_engine_processor(shared_cluster: Cluster, tmp_path):
    """Rows in another order than their answers, a bad row that ends the job, and
    a job that goes on and computes all rows again."""
    folder = tiny_model(tmp_path / "tiny")
    out = driver(
        shared_cluster,
        f"""
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
        tmp_path,
    )
    assert "rows 40 bad [9]" in out
