"""A trained model served on a real Ray: pictures go in over HTTP, and its answers are right."""

import json
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from PIL import Image

from deployments.app import assemble
from deployments.config.load import parse_config
from tests.deployments.images.test_wire import part, text, user
from tests.deployments.on_ray.serve_cluster import Cluster
from tests.digit_reader import QUESTION, SIDE, TRAINED, digit_reader, digits
from tests.engine.images.files import saved

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(600)]

ASKED, WRONG = 100, 40  # chats with the right pictures, and with others
ENGINE = {"device": "cpu", "dtype": "float32", "num_blocks": 256, "max_num_seqs": 16}


class Reader:
    """The endpoint. files, words: held-out pictures, PNG and JPEG in turns, and their answers."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        pictures, words = digits()
        self.words = words[TRAINED:]
        self.files = [
            saved(picture, "JPEG", quality=90) if number % 2 else saved(picture, "PNG")
            for number, picture in enumerate(pictures[TRAINED:])
        ]

    def ask(self, *files: bytes) -> str:
        """Return the answer to a chat with the files in this order."""
        messages = [user(*map(part, files), text(QUESTION))]
        answer = self.cluster.post(
            "/digits/v1/chat/completions", model="digits", messages=messages, temperature=0
        )
        assert "choices" in answer, answer
        return str(answer["choices"][0]["message"]["content"])

    def right(
        self, asked: Sequence[Sequence[bytes]], answers: Sequence[str], streams: int
    ) -> float:
        """Return the share of chats that are answered so. streams: of them at a time."""
        with ThreadPoolExecutor(streams) as pool:
            replies = list(pool.map(lambda files: self.ask(*files), asked))
        return sum(map(str.__eq__, replies, answers)) / len(asked)


@pytest.fixture(scope="module")
def reader(shared_cluster: Cluster) -> Iterator[Reader]:
    from ray import serve

    fields: dict[str, Any] = {
        "model": str(digit_reader()),
        "served_name": "digits",
        "engine": ENGINE,
        "pools": {"cpu": {"replicas": 1, "num_cpus": 2}},
        "router": {"replicas": 1},
        "limits": {"drain_seconds": 2.0, "queue_seconds": 60.0},
    }
    serve.run(assemble(parse_config(fields, {})), name="digits", route_prefix="/digits")
    yield Reader(shared_cluster)
    serve.delete("digits")


def test_a_picture(reader: Reader) -> None:
    """Bug: pixels turned, in another order of patches or colours, or another request's."""
    asked = [(file,) for file in reader.files[:ASKED]]
    words = reader.words[:ASKED]
    assert reader.right(asked, words, 1) >= 0.95
    assert reader.right(asked, words, 16) >= 0.95
    blank = saved(Image.new("RGB", (SIDE, SIDE), "white"), "PNG")
    assert reader.right([(blank,)] * WRONG, words[:WRONG], 16) < 0.3
    assert reader.right(asked[1 : WRONG + 1], words[:WRONG], 16) < 0.3  # the next one's


def test_two_pictures(reader: Reader) -> None:
    """Bug: the second picture where the first should be, or both at the same positions."""
    files, words = reader.files, reader.words
    pairs = [
        (first, first + 1) for first in range(len(files) - 1) if words[first] != words[first + 1]
    ]
    asked = [(files[first], files[second]) for first, second in pairs[:ASKED]]
    answers = [f"{words[first]} {words[second]}" for first, second in pairs[:ASKED]]
    assert reader.right(asked, answers, 1) >= 0.95
    assert reader.right(asked, answers, 16) >= 0.95
    assert reader.right([pair[::-1] for pair in asked[:WRONG]], answers[:WRONG], 16) < 0.05


def test_what_is_told(reader: Reader) -> None:
    """Bug: an operator who cannot see what pictures cost, a client what the model takes."""

    def metric(name: str) -> float:
        text = reader.cluster.get("/digits/metrics")
        values = re.findall(rf"^\w*?{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, values))

    names = ("images_encoded_total", "image_tokens_encoded_total", "image_encode_seconds_total")
    reader.ask(reader.files[0])
    (listed,) = json.loads(reader.cluster.get("/digits/v1/models"))["data"]
    assert listed["input_modalities"] == ["text", "image", "video"]
    deadline = time.monotonic() + 30
    while not all(map(metric, (*names, "images_total"))):
        assert time.monotonic() < deadline, reader.cluster.get("/digits/metrics")[-3000:]
        time.sleep(0.5)
    encoded, tokens = metric(names[0]), metric(names[1])
    assert tokens == 4 * encoded
