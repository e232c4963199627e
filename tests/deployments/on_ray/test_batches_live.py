"""Batches on a real Ray: the router that works on one is killed, and another goes on; people who
chat beside it do not wait for it."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from deployments.replica.deployment import ReplicaSettings
from engine.config.engine_config import EngineConfig
from tests.deployments.on_ray.live import settled
from tests.deployments.on_ray.serve_cluster import Cluster, tiny_model
from tests.faults.cluster import NAME, Broken, deployed

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(120)]

LINES = 48
ROWS = 4  # of the replica: fewer than requests of batches at once
STEP = 0.02  # seconds
TOKENS = 30  # of an answer of the batch


def narrow(settings: ReplicaSettings) -> EngineConfig:
    model = f"fake:vocab_size=250,max_model_len=4096,step_seconds={STEP}"
    return EngineConfig(model=model, max_num_seqs=ROWS)


@pytest.fixture(scope="module")
def broken(shared_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broken]:
    folder = tmp_path_factory.mktemp("batches")
    model = tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    batch = {"folder": str(folder), "in_flight": 16}
    with deployed(shared_cluster, model, narrow, replicas=1, batch=batch) as server:
        server.folder = folder  # type: ignore[attr-defined]
        yield server


def lock_holder(path: Path) -> int | None:
    inode = path.stat().st_ino
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        if fields[1] == "FLOCK" and int(fields[5].rsplit(":", 1)[1]) == inode:
            return int(fields[4])
    return None


def test_a_batch_outlives_its_router_and_stands_behind_people(broken: Broken) -> None:
    """A line that is lost with a router, or answered twice; a chat that waits for the batch."""
    folder: Path = broken.folder  # type: ignore[attr-defined]
    body = {"model": NAME, "messages": [{"role": "user", "content": "hi"}], "max_tokens": TOKENS}
    url = "/v1/chat/completions"
    source = b"".join(
        json.dumps({"custom_id": f"c{i}", "method": "POST", "url": url, "body": body}).encode()
        + b"\n"
        for i in range(LINES)
    )
    base = f"http://127.0.0.1:{broken.port}{broken.prefix}/v1"
    with openai.OpenAI(base_url=base, api_key="none", max_retries=8, timeout=30) as client:
        file = client.files.create(file=("a.jsonl", source), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")

        def done() -> int:
            counts = client.batches.retrieve(batch.id).request_counts
            return counts.completed if counts else 0

        settled(lambda: done() >= 4, 30)
        fields: Any = {**body, "messages": [{"role": "user", "content": "me"}], "max_tokens": 8}
        waits = []
        for _ in range(5):
            began = time.monotonic()
            stream = client.chat.completions.create(**fields, stream=True)
            next(iter(stream))
            waits.append(time.monotonic() - began)
            assert sum(bool(chunk.choices) for chunk in stream) > 3
        before = done()
        assert before < LINES - ROWS, "the batch was over before the chats"
        # All that waits of the batch is two more rounds of the rows; a row is one answer away.
        assert sorted(waits)[-2] < 2 * TOKENS * STEP, waits

        holder = lock_holder(folder / "worker.lock")
        assert holder is not None
        os.kill(holder, signal.SIGKILL)
        other = settled(
            lambda: (new := lock_holder(folder / "worker.lock")) not in (None, holder) and new, 30
        )
        assert other != holder
        batch = settled(
            lambda: (
                (batch_now := client.batches.retrieve(batch.id)).status == "completed" and batch_now
            ),
            60,
        )
        assert batch.output_file_id and not batch.error_file_id
        assert batch.request_counts and batch.request_counts.completed == LINES
        answers = [
            json.loads(raw) for raw in client.files.content(batch.output_file_id).iter_lines()
        ]
    assert sorted(batch_now["custom_id"] for batch_now in answers) == sorted(
        f"c{i}" for i in range(LINES)
    )
    for batch_now in answers:
        assert batch_now["response"]["body"]["usage"]["completion_tokens"] == TOKENS
