"""EncodeStream: the CUDA stream on which a vision encoder encodes images while steps decode."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(slots=True, eq=False)
class Encoding:
    """A run of the vision encoder on the stream of encodes.

    start, end: events before the run, and after its embeddings are in the cache.
    awaited: an event at which the stream of steps begins to wait for the run; None = it does not.
    """

    start: torch.cuda.Event
    end: torch.cuda.Event
    awaited: torch.cuda.Event | None = None


class EncodeStream:
    """The stream of image encodes, and its synchronisation with the stream of steps.

    A step that gathers embeddings from the cache waits for the encode that wrote them. An encode
    waits for earlier gathers before it overwrites slots of the cache. The host never waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._gathered: torch.cuda.Event | None = None  # event after the newest gather
        self.launched: deque[Encoding] = deque()  # encodes that `take_seconds` has not counted

    @contextmanager
    def encoding(self) -> Iterator[Encoding]:
        """Launch the work of the `with` block on this stream; yield its Encoding."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._stream):
            start.record()
            encoding = Encoding(start, end)
            yield encoding
            end.record()
        self.launched.append(encoding)

    def await_gathers(self) -> None:
        """Make the rest of the encode wait for all gathers launched so far."""
        if self._gathered is not None:
            self._stream.wait_event(self._gathered)

    def await_encoding(self, encoding: Encoding) -> None:
        """Make all later steps wait for an encode, on the device."""
        encoding.awaited = torch.cuda.Event(enable_timing=True)
        encoding.awaited.record()
        torch.cuda.current_stream(self._device).wait_event(encoding.end)

    def gathered(self) -> None:
        """Record an event after a gather on the stream of steps, for `await_gathers`."""
        self._gathered = torch.cuda.Event()
        self._gathered.record()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Launch the `with` block's work on this stream, after earlier steps and before later ones.

        The device waits in both directions, so no step runs in parallel to this work.
        """
        steps = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(steps)
        with torch.cuda.stream(self._stream):
            yield
        steps.wait_stream(self._stream)

    def take_seconds(self) -> tuple[float, float]:
        """Return the seconds of the encodes that have ended since the last call.

        Returns (seconds that the encodes took, seconds for which steps waited for them).
        """
        took = waited = 0.0
        while self.launched and self.launched[0].end.query():
            encoding = self.launched.popleft()
            took += encoding.start.elapsed_time(encoding.end) / 1000
            awaited = encoding.awaited
            # steps waited only if the run ended after the wait began
            if awaited is not None and awaited.query():
                waited += max(0.0, awaited.elapsed_time(encoding.end) / 1000)
        return took, waited

    def forget(self) -> None:
        """Drop all encodes from the time measurement, after a failure."""
        self.launched.clear()
