"""The order of encodes and steps on their two streams: fakes of streams and events, whose clocks
tell what is certain to have run before what."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from engine.batch import Batch
from engine.images.image import Image
from engine.runner.encode_stream import EncodeStream
from engine.runner.images import StepImages
from engine.runner.inputs import CpuInputs
from engine.runner.request_rows import RequestRows
from tests.batches import new_row, tower_config

PAD, WIDTH, PLACES, DEVICE = 97, 4, 8, torch.device("cpu")


class FakeStream:
    """A stream that never runs anything: its clock counts what was launched on each stream that
    surely runs before what is launched next."""

    current: "FakeStream"

    def __init__(self, *_: object) -> None:
        self.clock: Counter[int] = Counter()

    def wait_event(self, event: "FakeEvent") -> None:
        self.clock |= event.clock

    def wait_stream(self, other: "FakeStream") -> None:
        self.clock |= other.clock

    def launch(self) -> tuple[int, int]:
        """Launch something; return its place: the stream, and its number there."""
        self.clock[id(self)] += 1
        return id(self), self.clock[id(self)]

    def surely_after(self, place: tuple[int, int]) -> bool:
        """Whether what is launched next runs after what was launched at this place."""
        stream, number = place
        return self.clock[stream] >= number


class FakeEvent:
    def __init__(self, **_: object) -> None:
        self.clock: Counter[int] = Counter()

    def record(self) -> None:
        self.clock = FakeStream.current.clock.copy()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "FakeEvent") -> float:
        return float(sum(end.clock.values()) - sum(self.clock.values()))


class Cache:
    """A cache of embeddings that checks the order of reads and writes of each place."""

    dtype = torch.float32

    def __init__(self) -> None:
        self.values = torch.zeros(PLACES, WIDTH)
        self.written: dict[int, tuple[int, int]] = {}
        self.read: dict[int, list[tuple[int, int]]] = {}

    def __len__(self) -> int:
        return PLACES

    def index_copy_(self, _: int, places: torch.Tensor, rows: torch.Tensor) -> None:
        for place in places.tolist():
            for read in self.read.pop(place, ()):
                assert FakeStream.current.surely_after(read), "written over while a step reads it"
        at = FakeStream.current.launch()
        self.written |= dict.fromkeys(places.tolist(), at)
        self.values.index_copy_(0, places, rows)

    def index_select(self, _: int, places: torch.Tensor) -> torch.Tensor:
        for place in places.tolist():
            assert FakeStream.current.surely_after(self.written[place]), "read before it is written"
        at = FakeStream.current.launch()
        for place in places.tolist():
            self.read.setdefault(place, []).append(at)
        return self.values.index_select(0, places)


class Tower:
    def __init__(self) -> None:
        self.streams: list[FakeStream] = []

    def encode(self, pixels: list[torch.Tensor]) -> torch.Tensor:
        self.streams.append(FakeStream.current)
        sizes = [picture.shape[1] * picture.shape[2] for picture in pixels]
        values = [float(picture[0, 0, 0, 0]) for picture in pixels]
        rows = [torch.full((size, WIDTH), value) for size, value in zip(sizes, values, strict=True)]
        return torch.cat(rows)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> FakeStream:
    """Return the fake stream of steps, which is the current one."""
    FakeStream.current = FakeStream()

    @contextmanager
    def on(stream: FakeStream) -> Iterator[None]:
        before, FakeStream.current = FakeStream.current, stream
        yield
        FakeStream.current = before

    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream.current)
    return FakeStream.current


class Steps:
    """The steps of one row, whose request has an image with a token before and after."""

    def __init__(self) -> None:
        self.rows = RequestRows.allocate(2, 16, 4, DEVICE)
        self.tower, self.cache, self.stream = Tower(), Cache(), EncodeStream(DEVICE)
        stream: Any = self.stream
        self.images = StepImages(
            tower_config(PAD, WIDTH),
            self.rows,
            self.tower,
            self.cache,
            None,
            stream=stream,
        )
        self.inputs = CpuInputs(self.rows, 4)

    def step(self, image: Image) -> list[float]:
        """Launch a prompt; return the first number of each embedding that its tokens get."""
        new = new_row(0, [5, *[PAD] * image.size, 7])
        new.images = [image]
        self.images.set_row(new)
        batch = Batch(1, [0], [0], [image.size + 2], [True], new_rows=[new])
        step = self.inputs.assemble(batch)
        self.images.place(batch, step)
        assert step.images is not None
        return step.images.rows[:, 0].tolist()


def picture(number: int, size: int = 4) -> Image:
    pixels = np.full((1, 1, size, 3), number, np.uint8)
    digest = bytes([number]) * 16
    return Image(digest, 1, size, size, (1, size), pixels.shape[:3], pixels.tobytes())


def test_encodes_run_beside_steps_and_in_order_at_the_cache(steps: FakeStream) -> None:
    """Bugs: a step reads embeddings that are being written, an encode writes over embeddings that
    a step in flight reads, or the tower itself waits for a step."""
    runs = Steps()
    for number in range(1, 7):  # the cache has room for two pictures
        dropped = [bytes([number - 2]) * 16] if number > 2 else []
        before = steps.launch()  # a step that decodes
        runs.images.encode([picture(number)], dropped)
        encodes = runs.tower.streams[-1]
        assert encodes is not steps and not encodes.surely_after(before)
        assert runs.step(picture(number)) == [float(number)] * 4
        # the same step again reads the same, and waits for nothing new
        assert runs.step(picture(number)) == [float(number)] * 4
    assert len(runs.tower.streams) == 6


def test_a_step_waits_for_the_encodes_of_its_own_images(steps: FakeStream) -> None:
    """Bug: each step waits for the newest encode, which is for a later one."""
    runs = Steps()
    runs.images.encode([picture(1)])
    runs.images.encode([picture(2)])
    encodes = runs.tower.streams[-1]
    newest = id(encodes), encodes.clock[id(encodes)]
    assert runs.step(picture(1)) == [1.0] * 4
    assert not steps.surely_after(newest)
    assert runs.step(picture(2)) == [2.0] * 4
    assert steps.surely_after(newest)


def test_seconds_are_taken_once(steps: FakeStream) -> None:
    """Bug: the seconds of an encode are counted for each step that is done after it, or never."""
    runs = Steps()
    assert runs.images.timer() is None
    runs.images.encode([picture(1)])
    timer = runs.images.timer()
    assert timer is not None
    took, waited = timer()
    assert took > 0 and waited == 0
    assert runs.images.timer() is None
    runs.images.encode([picture(2)])
    runs.step(picture(2))
    timer = runs.images.timer()
    assert timer is not None and timer()[1] > 0


@pytest.mark.parametrize("lost", ["await_gathers", "await_encoding"])
def test_a_lost_wait_is_noticed(
    lost: str, steps: FakeStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: fakes under which any order is right."""
    monkeypatch.setattr(EncodeStream, lost, lambda *_: None)
    with pytest.raises(AssertionError, match="read"):
        test_encodes_run_beside_steps_and_in_order_at_the_cache(steps)
