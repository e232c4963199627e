"""ImageLimits: the operator's limits of the images in requests."""

from dataclasses import dataclass

from engine.images.picture_file import MAX_PIXELS


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """The limits of images at one router.

    per_request: number of images of one request.
    frames: number of frames of all clips of a request; each clip counts as an image, too.
    pixels: pixels of one image, by its header.
    file_bytes: bytes of one image's file.
    body_bytes: bytes of a request's body where a served model takes images.
    memory_bytes: bytes of bodies, files and pixels of the requests in flight that have images.
    hosts: hosts from which images are fetched, e.g. "images.example.com", "*.example.com" or
        "example.com:8443"; (): nothing is fetched.
    first_seconds, last_seconds: time until a download's headers, and until its last byte.
    """

    per_request: int = 16
    frames: int = 128
    pixels: int = MAX_PIXELS
    file_bytes: int = 20 * 2**20
    body_bytes: int = 32 * 2**20
    memory_bytes: int = 2**30
    hosts: tuple[str, ...] = ()
    first_seconds: float = 5.0
    last_seconds: float = 10.0
