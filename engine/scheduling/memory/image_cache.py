"""ImageCache: the images whose embeddings the runner has, and those that a step encodes and drops.

The runner encodes an image as a whole and keeps its embeddings by the image's digest. A step
computes image tokens from embeddings that an earlier step or this one has encoded. So a chunk ends
before an image that this step cannot encode:

 prompt           text | image A | text | image B | text
 step n           ------------------------|            encodes A; B exceeds what a step may encode
 step n + 1                               |-----------  encodes B

Where a device can encode in parallel to steps, a step with decodes encodes images for the next
step. Its chunk ends before the images, and the next step has their tokens, so that no stream waits
for the vision encoder:

 step n           decodes | text                       encodes A beside, for step n + 1
 step n + 1       decodes | image A | text             encodes B beside

A step always encodes the first image that it needs, whatever the image's size, and further images
up to its token budget. To make room, embeddings are dropped that this step does not use: first
those that no request still needs, then others, each time the least recently used. A request whose
embeddings are dropped before it has computed all of their tokens gets them encoded again. As
requests are scheduled in the order of service, the first one always proceeds.

Pixels are kept once for each digest, until the last request with the image ends: a request that is
preempted computes its prompt again. Embeddings that came with a request, from an encoder pool, are
used once, by the first step that needs them, instead of the pixels. Later steps encode the pixels.
So does the first step if the received embeddings exceed the runner's capacity.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator
from typing import Any

from msgspec.structs import replace

from engine.batch import Batch
from engine.images.image import Image
from engine.scheduling.memory.image_plan import ImagePlan
from engine.scheduling.request import Request


class ImageCache:
    """The account of the runner's embeddings, and the pixels of all requests.

    num_tokens: the number of embeddings in the runner after the step that is being scheduled.
    used: digests of the images whose embeddings that step uses or encodes.
    dropped: digests of embeddings that this step drops. If `used` and `dropped` are empty, `build`
        need not be called for the step.
    encoded, encoded_tokens, encode_seconds: number of encoded images since the start, of their
        embeddings, and the seconds that this took.
    hits: number of images since the start whose embeddings the runner already had.
    received: number of images since the start whose embeddings came with a request.
    """

    def __init__(self, plan: ImagePlan) -> None:
        self._plan = plan
        self.num_tokens = 0
        self.encoded = self.encoded_tokens = self.hits = self.received = 0
        self.encode_seconds = 0.0
        # digest -> number of embeddings, least recently used first
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self._pixels: dict[bytes, bytes] = {}
        # digest -> image with received embeddings that no step has used
        self._came: dict[bytes, Image] = {}
        self._came_tokens = 0  # number of embeddings of the images in _came
        # digest -> number of requests that have the image
        self._holders: Counter[bytes] = Counter()
        # digest -> number of requests that will use its embeddings
        self._needed: Counter[bytes] = Counter()
        # digest -> id of the request for which it was encoded ahead, until the request uses it
        self._claims: dict[bytes, int] = {}
        # Of the step that is being scheduled:
        self.used: set[bytes] = set()
        self._used_tokens = 0
        self._step_tokens = 0  # number of embeddings that it encodes
        self._images: list[Image] = []  # images that it encodes for tokens of the same step
        # digest -> image that it encodes for later steps, and the request that needs it
        self._ahead: dict[bytes, tuple[Image, Request]] = {}
        self.dropped: list[bytes] = []

    # ---- requests ------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Move the pixels and embeddings of a new request's images into this cache."""
        for image in request.images:
            self._pixels.setdefault(image.digest, image.pixels)
            self._take_rows(image)
            self._holders[image.digest] += 1
            self._needed[image.digest] += 1
        request.images = [replace(image, pixels=b"", rows=b"") for image in request.images]

    def _take_rows(self, image: Image) -> None:
        """Store an image's received embeddings, if they are new and there is room for them."""
        if not image.rows or image.digest in self._sizes or image.digest in self._came:
            return
        if self._came_tokens + image.size <= self._plan.cache_tokens:
            self._came[image.digest] = replace(image, pixels=b"")
            self._came_tokens += image.size

    def _give_rows(self, digest: bytes) -> Image | None:
        """Remove and return an image with received embeddings; None if there is none."""
        image = self._came.pop(digest, None)
        if image is not None:
            self._came_tokens -= image.size
        return image

    def computed(self, request: Request) -> None:
        """Release the embeddings of images all of whose tokens the request has computed."""
        images, index = request.images, request.next_image
        while index < len(images) and _end(images[index]) <= request.num_computed:
            self._release(self._needed, images[index].digest)
            index += 1
        request.next_image = index

    def restart(self, request: Request) -> None:
        """Count all images of a request as needed again, as it computes its prompt again."""
        for image in request.images[: request.next_image]:
            self._needed[image.digest] += 1
        request.next_image = 0

    def end_request(self, request: Request) -> None:
        """Release the images of a request that has ended."""
        for image in request.images[request.next_image :]:
            self._release(self._needed, image.digest)
        for image in request.images:
            if self._release(self._holders, image.digest):
                del self._pixels[image.digest]
                self._give_rows(image.digest)
        request.next_image = len(request.images)

    @staticmethod
    def _release(counts: Counter[bytes], digest: bytes) -> bool:
        """Decrement an image's count of requests; return whether it reached zero.

        The entry of an image without requests is deleted.
        """
        counts[digest] -= 1
        if counts[digest]:
            return False
        del counts[digest]
        return True

    # ---- the step that is being scheduled ------------------------------------------------------

    def reach(self, request: Request, length: int, step_tokens: int) -> int:
        """Return how many of the request's next `length` tokens this step can compute.

        This changes nothing: call `use` to add the chunk.

        step_tokens: the maximum number of embeddings that a step encodes, unless its first image is
            larger.
        """
        start = request.num_computed
        planned: set[bytes] = set()
        used, encoded = self._used_tokens, self._step_tokens
        for image in self._between(request, start, start + length):
            if image.digest in self.used or image.digest in planned:
                continue
            planned.add(image.digest)
            used += image.size
            fits = used <= self._plan.cache_tokens
            if image.digest not in self._sizes and image.digest not in self._came:
                fits &= not encoded or encoded + image.size <= step_tokens
                encoded += image.size
            if not fits:
                return max(0, image.start - start)
        return length

    def whole(self, request: Request, length: int) -> int:
        """Return the length of a chunk that cuts no image, if images must not be cut.

        A chunk of `length` tokens that ends inside an image is cut before the image, or if it
        begins in the image, prolonged to the image's end.
        """
        start = request.num_computed
        stop = start + length
        if not self._plan.bidirectional:
            return length
        for image in self._between(request, start, stop):
            if stop < _end(image):
                return (image.start if start < image.start else _end(image)) - start
        return length

    def use(self, request: Request, length: int) -> None:
        """Add a chunk to the step, which encodes the chunk's images that the runner does not have.

        length: number of tokens of the chunk, at most the result of `reach`.
        """
        start = request.num_computed
        missing = []
        for image in self._between(request, start, start + length):
            is_new = image.digest not in self.used
            if is_new:
                self.used.add(image.digest)
                self._used_tokens += image.size
            if is_new and image.digest not in self._sizes:
                missing.append(image)
                continue
            claimed = self._claims.get(image.digest) == request.id
            if claimed:
                del self._claims[image.digest]
            self.hits += start <= image.start and not claimed
            if image.digest in self._sizes:
                self._sizes.move_to_end(image.digest)
        for image in missing:
            self._images.append(self._encoded(image))

    def hand_out(self, request: Request, length: int, most: int, step_tokens: int) -> int:
        """Let this step encode images ahead, whose tokens a later step computes.

        Returns how many of the request's next `length` tokens lie before such images.

        most: the maximum number of tokens that this step and the next compute of the request.
        step_tokens: see `reach`.
        """
        start = request.num_computed
        for image in self._between(request, start, start + self.reach(request, most, step_tokens)):
            if image.digest not in self.used:
                self.used.add(image.digest)
                self._used_tokens += image.size
            if image.digest not in self._sizes:
                self._ahead[image.digest] = self._encoded(image), request
                self._claims[image.digest] = request.id
        for image in self._between(request, start, start + length):
            if image.digest in self._ahead or image.digest not in self._sizes:
                return max(0, image.start - start)
        return length

    def _encoded(self, image: Image) -> Image:
        """Make room for an image's embeddings, which this step encodes or has received.

        Returns the image with its received embeddings, if there are any, else with its pixels.
        """
        self._make_room(image.size)
        self._sizes[image.digest] = image.size
        self.num_tokens += image.size
        came = self._give_rows(image.digest)
        if came is not None:
            return came
        self._step_tokens += image.size
        return replace(image, pixels=self._pixels[image.digest])

    def _between(self, request: Request, start: int, stop: int) -> Iterator[Image]:
        """Yield the request's images with tokens in [start, stop), from `next_image` on."""
        for index in range(request.next_image, len(request.images)):
            image = request.images[index]
            if max(image.start, start) >= stop:
                return
            if _end(image) > start:
                yield image

    def _make_room(self, size: int) -> None:
        """Drop embeddings that this step does not use until `size` more fit."""
        if self.num_tokens + size <= self._plan.cache_tokens:
            return
        unused = [digest for digest in self._sizes if digest not in self.used]
        unused.sort(key=self._needed.__contains__)
        for digest in unused:
            self._drop(digest)
            if self.num_tokens + size <= self._plan.cache_tokens:
                return
        raise AssertionError("the images of a step exceed the cache")

    def _drop(self, digest: bytes) -> None:
        self._forget(digest)
        self.dropped.append(digest)

    def _forget(self, digest: bytes) -> None:
        self.num_tokens -= self._sizes.pop(digest)
        self._claims.pop(digest, None)

    def build(self, batch: Batch) -> list[Request]:
        """Set the batch's images to encode and to drop, and reset the state of the step.

        Returns the requests for which the step encodes ahead.
        """
        batch.images, self._images = self._images, []
        batch.ahead_images = [image for image, _ in self._ahead.values()]
        requests = [request for _, request in self._ahead.values()]
        batch.dropped_images, self.dropped = self.dropped, []
        both = [*batch.images, *batch.ahead_images]
        received = sum(bool(image.rows) for image in both)
        self.received += received
        self.encoded += len(both) - received
        self.encoded_tokens += self._step_tokens
        self._begin()
        return requests

    def cancel(self) -> None:
        """Undo what was planned for the step, as no request can run in it."""
        for digest in self._ahead:
            self._forget(digest)
        self._begin()

    def _begin(self) -> None:
        self._ahead.clear()
        self.used.clear()
        self._used_tokens = self._step_tokens = 0

    # ---- dropping embeddings -------------------------------------------------------------------

    def discard(self, request: Request) -> None:
        """Drop the embeddings of a request's images, because they may be wrong."""
        for image in request.images:
            if image.digest in self._sizes:
                self._drop(image.digest)

    def clear(self) -> None:
        """Drop all embeddings, also received ones. Call this only between steps."""
        for digest in list(self._came):
            self._give_rows(digest)
        for digest in list(self._sizes):
            self._drop(digest)

    def stats(self) -> dict[str, Any]:
        """Return the fields of `EngineStats` about images."""
        return {
            "images_encoded": self.encoded,
            "image_tokens_encoded": self.encoded_tokens,
            "image_encode_seconds": self.encode_seconds,
            "image_cache_hits": self.hits,
            "images_received": self.received,
            "image_cache_tokens": self.num_tokens,
            "image_cache_size": self._plan.cache_tokens,
        }

    def check_integrity(self, requests: Collection[Request]) -> None:
        """Assert the invariants. Call this only between steps.

        requests: all requests that have not ended.
        """
        assert not (self.used or self._images or self._step_tokens or self._used_tokens)
        assert not self._ahead and self._claims.keys() <= self._sizes.keys()
        assert self.num_tokens == sum(self._sizes.values()) <= self._plan.cache_tokens
        held = Counter(image.digest for r in requests for image in r.images)
        needed = Counter(image.digest for r in requests for image in r.images[r.next_image :])
        assert held == self._holders and needed == self._needed, "an image is lost"
        assert self._pixels.keys() == held.keys(), "pixels are lost or kept for nobody"
        assert self._came.keys() <= held.keys(), "embeddings are kept for nobody"
        assert self._came_tokens == sum(image.size for image in self._came.values())


def _end(image: Image) -> int:
    return image.start + image.length
