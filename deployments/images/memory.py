"""ImageMemory: counts and limits the memory for images of the requests in flight in a router."""

import weakref
from collections.abc import Iterable

from engine.errors import Overloaded
from engine.images.image import Image


class ImageMemory:
    """The counter of the bytes reserved for images, with a limit.

    limit: maximum bytes; reservations beyond it are refused.
    held: bytes that are reserved at present.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0

    def take(self, size: int) -> "HeldBytes":
        """Reserve bytes for a request; return the reservation. Raises Overloaded without room."""
        lease = HeldBytes(self)
        lease.add(size)
        return lease


class HeldBytes:
    """A reservation of bytes in an ImageMemory, until `release`, which is idempotent.

    size: the reserved bytes.
    """

    def __init__(self, memory: ImageMemory) -> None:
        self._memory = memory
        self.size = 0

    def add(self, size: int) -> None:
        """Reserve more bytes. Raises Overloaded without room."""
        memory = self._memory
        # If nothing is reserved, a request of any size is accepted, as other limits bound its size.
        if memory.held and memory.held + size > memory.limit:
            raise Overloaded("the images of other requests fill the memory for images")
        memory.held += size
        self.size += size

    def release(self) -> None:
        self._memory.held -= self.size
        self.size = 0


class HeldImages(list[Image]):
    """A list of images whose bytes remain reserved as long as the list is referenced."""

    def __init__(self, images: Iterable[Image], held: HeldBytes) -> None:
        super().__init__(images)
        weakref.finalize(self, held.release).atexit = False
