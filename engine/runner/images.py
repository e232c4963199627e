"""StepImages: the image embeddings of running requests, and their use by a step's tokens.

A step with tokens before the end of their request's last image is launched without a CUDA graph.
After its images a request is computed like one without images, except that rotary embeddings use
the position index + delta (`RequestRows.deltas`), which graphs read.
"""

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import Batch, NewRow
from engine.config.vision import VisionConfig
from engine.images.image import Image
from engine.models.image_rows import Encoder, ImageRows
from engine.models.registry import Model
from engine.parallel.group import TensorParallelGroup
from engine.resolve import Resolved
from engine.runner.caches.cache_memory import CacheMemory
from engine.runner.encode_stream import EncodeStream, Encoding
from engine.runner.inputs import DeviceStep
from engine.runner.memory import image_cache_shape
from engine.runner.request_rows import RequestRows
from kernels.metadata import AttentionMeta, RotaryPlaces

# Minimum number of embeddings for which ranks divide images. Of fewer, one GPU encodes all in the
# same time as half of them.
_LEAST_SHARED = 256


def axis_of_frequency(section: Sequence[int], interleaved: bool) -> list[int]:
    """Return the M-RoPE axis (0 time, 1 row, 2 column) of each rotary frequency.

    section: the number of frequencies of each axis.
    interleaved: whether axes alternate, as long as they have frequencies.
    """
    if not interleaved:
        return [axis for axis, count in enumerate(section) for _ in range(count)]
    axes = [0] * sum(section)
    for axis in (1, 2):
        count = len(range(axis, 3 * section[axis], 3))
        axes[axis : 3 * section[axis] : 3] = [axis] * count
    return axes


def rotary_places(images: Sequence[Image]) -> tuple[NDArray[np.int32], int]:
    """Return M-RoPE's positions [3, end] of the tokens up to the last image's end, and the delta.

    The axes are time, row and column. Text has position p on all axes. An image of (h, w) that
    begins at p has (p, p + row, p + column), and the text after it goes on from the largest of its
    positions. Frame n of a video has time p + n * time_step, rounded down. A later token of index i
    has position i + delta.
    """
    end = max((image.start + image.length for image in images), default=0)
    places = np.empty((3, end), dtype=np.int32)
    at = index = 0
    for image in images:
        height, width = image.grid
        text = image.start - index
        places[:, index : image.start] = np.arange(at, at + text)
        at, index = at + text, image.start + image.length
        frames = (index - image.start) // (height * width)
        span = places[:, image.start : index].reshape(3, frames, height, width)
        # float32, as in the models' original code
        times = np.arange(frames, dtype=np.float32) * np.float32(image.time_step)
        span[0] = at + times.astype(np.int32)[:, None, None]
        span[1] = at + np.arange(height)[:, None]
        span[2] = at + np.arange(width)
        at += max(height, width, int(times[-1]) + 1)
    return places, at - end


@dataclass(frozen=True, slots=True)
class _Span:
    """The range of a request's tokens that one image takes.

    digest: the key of the image's embeddings.
    begin, end: the range of its tokens in the request, markers such as row separators included.
    tokens: [size] int64, the indices of its placeholder tokens in the request, ascending.
    """

    digest: bytes
    begin: int
    end: int
    tokens: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Shares:
    """The images of an encode that is divided among ranks, until the embeddings are gathered.

    rows: [most, width], this rank's embeddings, padded to the size of the largest share.
    slots: [size] int64, the destinations of all ranks' embeddings in the cache, rank by rank.
    places: [size] int64, the embeddings' indices in the gathered rows of all ranks.
    encoding: this rank's encode; None without a stream.
    """

    rows: Tensor
    slots: NDArray[np.int64]
    places: NDArray[np.int64]
    encoding: Encoding | None


def shares_of(images: Sequence[Image], ranks: int, least: int) -> list[list[Image]]:
    """Return the images that each rank encodes; a single list = each rank encodes all.

    least: the minimum number of embeddings that are divided among ranks.
    """
    if ranks == 1 or len(images) < 2 or sum(image.size for image in images) < least:
        return [[*images]]
    shares: list[list[Image]] = [[] for _ in range(ranks)]
    sizes = [0] * ranks
    for image in sorted(images, key=lambda image: -image.size):
        rank = sizes.index(min(sizes))
        shares[rank].append(image)
        sizes[rank] += image.size
    return shares


class StepImages:
    """The device's cache of image embeddings, and the images of each batch row.

    The scheduler decides which images to encode and which to drop.
    """

    def __init__(
        self,
        vision: VisionConfig,
        rows: RequestRows,
        encoder: Encoder | None,
        cache: Tensor,
        cos_sin: Tensor | None,
        *,
        apart: bool = False,
        mutual: Collection[int] | None = None,
        stream: EncodeStream | None = None,
        group: TensorParallelGroup | None = None,
    ) -> None:
        """Set up an empty cache of embeddings.

        encoder: the vision encoder; None on a pipeline stage other than the first.
        cache: [embeddings, hidden_size * (1 + DeepStack levels)], memory for embeddings; [0, ...]
            without an encoder.
        cos_sin: the rotary table of all layers, if the model uses M-RoPE; else None.
        apart: whether each image is encoded in a separate batch, for deterministic embeddings.
        mutual: the KV groups in which an image's tokens attend to each other in both directions, in
            a model with such attention; None = all.
        stream: the stream of encodes, on CUDA; None = steps and encodes run in launch order.
        group: the ranks that divide several images among themselves; None = this rank encodes all.
        """
        self._vision = vision
        self._rows = rows
        self._encoder = encoder
        self._cache = cache
        self._cos_sin = cos_sin
        self._apart = apart
        everywhere = range(rows.num_groups)
        self._mutual = () if not vision.bidirectional else everywhere if mutual is None else mutual
        self._device = rows.tokens.device
        self._stream = stream
        self._group = group or TensorParallelGroup()
        self._least = _LEAST_SHARED if stream is not None else 0
        self._shares: _Shares | None = None  # the newest divided encode, until it is gathered
        # digest -> indices of its embeddings in the cache
        self._slots: dict[bytes, NDArray[np.int64]] = {}
        # digest -> the image's encode, until a step waits for it
        self._encodings: dict[bytes, Encoding] = {}
        self._seconds = 0.0  # seconds of encodes without a stream that `timer` has not returned
        self._free = np.arange(len(cache))
        count = rows.pad_row + 1
        # rows whose requests still have image tokens to compute
        self._open: set[int] = set()
        self._ends = np.zeros(count, dtype=np.int64)  # end position of each row's last image
        self._deltas = np.zeros(count, dtype=np.int32)
        self._spans: list[list[_Span]] = [[] for _ in range(count)]
        self._places: list[NDArray[np.int32]] = [np.empty((3, 0), np.int32)] * count
        if cos_sin is not None:
            assert vision.mrope_section is not None
            axes = axis_of_frequency(vision.mrope_section, vision.interleaved)
            self._axes = torch.tensor(axes * 2, device=self._device)

    @classmethod
    def of(
        cls, resolved: Resolved, model: Model, rows: RequestRows, memory: CacheMemory | None = None
    ) -> "StepImages":
        """Return the empty cache of image embeddings for an engine's model.

        memory: the allocator of the cache.
        """
        vision = resolved.model.vision
        assert vision is not None
        shape = image_cache_shape(resolved, model)
        cache = (memory or CacheMemory()).zeros(shape, model.dtype, model.device)
        table = model.rotary_table if resolved.model.places_of_axes else None
        apart = resolved.config.deterministic
        mutual = None
        if vision.windows_alone:
            groups = enumerate(model.kv.groups)
            mutual = [number for number, group in groups if group.attention.window]
        cuda = model.device.type == "cuda" and model.tower is not None
        stream = EncodeStream(model.device) if cuda else None
        return cls(
            vision,
            rows,
            model.tower,
            cache,
            table,
            apart=apart,
            mutual=mutual,
            stream=stream,
            group=model.group,
        )

    @property
    def held(self) -> Collection[bytes]:
        """The digests of the images whose embeddings are on the device."""
        return self._slots.keys()

    @property
    def num_bytes(self) -> int:
        return self._cache.nbytes

    def set_row(self, new: NewRow) -> None:
        """Record the images of the request that a batch row now has.

        Raises ValueError if an image has another number of image tokens than embeddings.
        """
        row, spans = new.row, []
        if not new.images and not self._ends[row]:
            return
        ids = np.asarray(new.token_ids)
        for image in new.images:
            span = ids[image.start : image.start + image.length]
            tokens = image.start + np.flatnonzero(span == span[0])
            if len(tokens) != image.size:
                raise ValueError(
                    f"an image of {image.size} embeddings has {len(tokens)} image tokens at "
                    f"{image.start}"
                )
            spans.append(_Span(image.digest, image.start, image.start + image.length, tokens))
        self._spans[row] = spans
        self._ends[row] = max((image.start + image.length for image in new.images), default=0)
        (self._open.add if spans else self._open.discard)(row)
        if self._rows.deltas is None:
            return
        self._places[row], delta = rotary_places(new.images)
        if delta != self._deltas[row]:
            self._deltas[row] = delta
            # an indexed assignment would wait for the device
            self._rows.deltas[row : row + 1].fill_(delta)

    def clear(self) -> None:
        """Free all slots of the embedding cache, and forget the encodes in flight."""
        self._slots.clear()
        self._encodings.clear()
        self._shares = None
        if self._stream is not None:
            self._stream.forget()
        self._free = np.arange(len(self._cache))

    def encode(self, images: Sequence[Image], dropped: Sequence[bytes] = ()) -> None:
        """Free the embeddings of dropped images, and launch the encodes of new ones.

        dropped: digests of the dropped images.
        """
        if self._encoder is None:
            return
        self._gather_shares()  # gathered first, as slots of the last encode may be freed
        for digest in dropped:
            if digest in self._slots:
                self._free = np.concatenate((self._free, self._slots.pop(digest)))
                self._encodings.pop(digest, None)
        missing = {image.digest: image for image in images if image.digest not in self._slots}
        if not missing:
            return
        began = time.perf_counter()
        for image in [image for image in missing.values() if image.rows]:
            self._keep([missing.pop(image.digest)], partial(self._received, image))
        shares = shares_of([*missing.values()], self._group.size, self._least)
        if len(shares) > 1:
            self._keep_share(self._encoder, shares)
        else:
            for group in self._together(shares[0]):
                self._keep(group, partial(self._encoded, self._encoder, group))
        if self._stream is None:
            self._seconds += time.perf_counter() - began

    def timer(self) -> Callable[[], tuple[float, float]] | None:
        """Return a function that returns (seconds of encodes, seconds of waits) once a step is
        done.

        None if all encodes are already reported.
        """
        if self._stream is not None:
            return self._stream.take_seconds if self._stream.launched else None
        seconds, self._seconds = self._seconds, 0.0
        return (lambda: (seconds, seconds)) if seconds else None

    def _encoded(self, encoder: Encoder, images: Sequence[Image]) -> Tensor:
        """Return the vision encoder's embeddings of images, [sum of sizes, width]."""
        return encoder.encode([self._pixels(image) for image in images])

    def _received(self, image: Image) -> Tensor:
        """Copy the embeddings that came with an image to the device, [size, width]."""
        numbers = self._on_device(np.frombuffer(image.rows, np.uint8))
        return numbers.view(getattr(torch, image.rows_dtype)).view(image.size, -1)

    def _keep(self, images: Sequence[Image], make: Callable[[], Tensor]) -> None:
        """Write the embeddings of images into free slots of the cache.

        make: launches the work that computes or copies the embeddings, and returns them in order.
        """
        with nullcontext() if self._stream is None else self._stream.encoding() as encoding:
            rows = make()
            size = sum(image.size for image in images)
            if size > len(self._free) or size != len(rows):
                raise ValueError(
                    f"{size} embeddings of images, {len(self._free)} free places and {len(rows)} "
                    "rows of the tower"
                )
            claimed, self._free = np.split(self._free, [size])
            slots = self._on_device(claimed)
            if self._stream is not None:
                self._stream.await_gathers()
            self._cache.index_copy_(0, slots, rows.to(self._cache.dtype))
        for image in images:
            self._slots[image.digest], claimed = np.split(claimed, [image.size])
            if encoding is not None:
                self._encodings[image.digest] = encoding

    def _together(self, images: Sequence[Image]) -> list[Sequence[Image]]:
        """Divide the images into groups, one for each run of the vision encoder."""
        return [[image] for image in images] if self._apart else [images] if images else []

    def _keep_share(self, encoder: Encoder, shares: Sequence[Sequence[Image]]) -> None:
        """Encode this rank's share of images; `_gather_shares` exchanges the shares later.

        Ranks communicate on the stream of steps, so that all collective calls have the same order.
        """
        own = shares[self._group.rank]
        sizes = [sum(image.size for image in share) for share in shares]
        size, most = sum(sizes), max(sizes)
        if size > len(self._free):
            raise ValueError(f"{size} embeddings of images, {len(self._free)} free places")
        with nullcontext() if self._stream is None else self._stream.encoding() as encoding:
            rows = self._cache.new_zeros(most, self._cache.shape[1])
            parts = [self._encoded(encoder, images) for images in self._together(own)]
            if parts:
                rows[: sizes[self._group.rank]] = torch.cat(parts).to(rows.dtype)
        claimed, self._free = np.split(self._free, [size])
        places = [most * rank + np.arange(count) for rank, count in enumerate(sizes)]
        self._shares = _Shares(rows, claimed, np.concatenate(places), encoding)
        for image in [image for share in shares for image in share]:
            self._slots[image.digest], claimed = np.split(claimed, [image.size])
        if self._stream is None:
            self._gather_shares()

    def _gather_shares(self) -> None:
        """All-gather a divided encode's embeddings into the cache, if there is such an encode."""
        shares, self._shares = self._shares, None
        if shares is None:
            return
        if self._stream is not None and shares.encoding is not None:
            self._stream.await_encoding(shares.encoding)
            shares.rows.record_stream(torch.cuda.current_stream(self._device))
        gathered = self._group.gather(shares.rows).flatten(0, 1)
        rows = gathered.index_select(0, self._on_device(shares.places))
        self._cache.index_copy_(0, self._on_device(shares.slots), rows)
        if self._stream is not None:
            self._stream.gathered()

    def _pixels(self, image: Image) -> Tensor:
        """Return the image's pixels on the device, uint8 [tiles, height, width, 3]."""
        pixels = np.frombuffer(image.pixels, np.uint8).reshape(*image.shape, 3)
        return self._on_device(pixels)

    def _on_device(self, values: NDArray[Any]) -> Tensor:
        """Start an asynchronous copy of the values to the device, and return its result."""
        pinned = self._device.type == "cuda"
        dtype = torch.from_numpy(np.empty(0, values.dtype)).dtype
        tensor = torch.empty(values.shape, dtype=dtype, pin_memory=pinned)
        tensor.numpy()[...] = values
        return tensor.to(self._device, non_blocking=True)

    def within(self, batch: Batch) -> bool:
        """Whether the step has tokens before the end of their request's last image."""
        if not self._open:
            return False
        entries = zip(batch.rows, batch.starts, strict=True)
        return any(row in self._open and start < self._ends[row] for row, start in entries)

    def place(self, batch: Batch, step: DeviceStep) -> None:
        """Set the image embeddings and rotary positions of a step's tokens, if `within`."""
        if not self.within(batch):
            return
        self._gather_shares()
        firsts = np.cumsum([0, *batch.lengths])
        tokens, slots = [], []
        for entry, (row, start) in enumerate(zip(batch.rows, batch.starts, strict=True)):
            end, first = start + batch.lengths[entry], firsts[entry]
            for span in self._spans[row] if self._encoder is not None else ():
                begin, stop = np.searchsorted(span.tokens, (start, end))
                if begin < stop:
                    tokens.append(span.tokens[begin:stop] + (first - start))
                    slots.append(self._slots[span.digest][begin:stop])
                    self._await(span.digest)
            if end >= self._ends[row]:
                self._open.discard(row)
        if tokens:
            rows = self._cache.index_select(0, self._on_device(np.concatenate(slots)))
            if self._stream is not None:
                self._stream.gathered()
            step.images = ImageRows(self._on_device(np.concatenate(tokens)), rows)
        if self._cos_sin is not None:
            self._rotate(batch, step, firsts)
        if self._mutual:
            self._see_each_other(batch, step, firsts)

    def _await(self, digest: bytes) -> None:
        """Make the step wait for the encode of an image, unless an earlier step has waited."""
        encoding = self._encodings.pop(digest, None)
        if encoding is not None and encoding.awaited is None and self._stream is not None:
            self._stream.await_encoding(encoding)

    def warm_up(self, tokens: int) -> None:
        """Encode the maximum number of embeddings of a step, and drop them.

        tokens: the maximum number of tokens in a step.
        """
        if self._encoder is None:
            return
        shape = self._encoder.shape_of(self._vision.step_size(tokens, len(self._cache)))
        with nullcontext() if self._stream is None else self._stream.apart():
            pixels = torch.zeros(*shape, 3, dtype=torch.uint8, device=self._device)
            self._encoder.encode([pixels])

    def add_warm_up_inputs(self, step: DeviceStep) -> None:
        """Add image inputs to a warm-up step, so that their kernels are compiled."""
        tokens = torch.arange(len(step.token_ids), device=self._device)
        if len(self._cache):
            rows = self._cache.index_select(0, tokens % len(self._cache))
            step.images = ImageRows(tokens, rows)
        places = step.metas[0].positions
        if self._cos_sin is not None:
            table = self._cos_sin.index_select(0, places)
            _turn(step.metas, table)
        for group in self._mutual:
            step.metas[group].last_keys = places

    def _rotate(self, batch: Batch, step: DeviceStep, firsts: NDArray[np.int64]) -> None:
        """Set a rotary table for this step, with a row for each token.

        firsts: the index of each entry's first token.
        """
        assert self._cos_sin is not None
        rows, starts = np.asarray(batch.rows), np.asarray(batch.starts)
        places = np.arange(firsts[-1]) + np.repeat(
            starts + self._deltas[rows] - firsts[:-1], batch.lengths
        )
        places = np.tile(places, (3, 1))
        for entry in np.flatnonzero(starts < self._ends[rows]):
            own = self._places[rows[entry]][:, starts[entry] :][:, : batch.lengths[entry]]
            places[:, firsts[entry] : firsts[entry] + own.shape[1]] = own
        index = self._on_device(places).index_select(0, self._axes).T
        table = self._cos_sin.gather(0, index)
        _turn(step.metas, table)
        if step.own is not None:
            own_tokens, metas = step.own
            assert own_tokens is not None
            _turn(metas, table.index_select(0, own_tokens))

    def _see_each_other(self, batch: Batch, step: DeviceStep, firsts: NDArray[np.int64]) -> None:
        """Make tokens of an image attend to each other in both directions; no chunk splits an
        image."""
        starts = np.asarray(batch.starts)
        last = np.arange(firsts[-1]) + np.repeat(starts - firsts[:-1], batch.lengths)
        for entry, row in enumerate(batch.rows):
            own = last[firsts[entry] : firsts[entry + 1]]
            for span in self._spans[row]:
                begin, end = np.searchsorted(own, (span.begin, span.end))
                own[begin:end] = span.end - 1
        last_keys = self._on_device(last.astype(np.int32))
        for group in self._mutual:
            step.metas[group].last_keys = last_keys
        if step.own is not None:
            own_tokens, metas = step.own
            assert own_tokens is not None
            if metas:
                own_keys = last_keys.index_select(0, own_tokens)
                for group in self._mutual:
                    metas[group].last_keys = own_keys


def _turn(metas: Sequence[AttentionMeta], table: Tensor) -> None:
    rows = torch.arange(len(table), dtype=torch.int32, device=table.device)
    for meta in metas:
        meta.rotary = RotaryPlaces(rows, table)
