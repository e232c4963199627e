"""ImageLimits: the operator's limits of the images in requests."""

from dataclasses import dataclass

from engine.images.picture_file import MAX_PIXELS


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """The limits of images at one router.

    per_request: maximum number of images in a request.
    frames: maximum number of frames of all clips in a request; each clip also counts as one image.
    pixels: maximum pixels of one image, according to its header.
    file_bytes: maximum bytes of one image's file.
    body_bytes: maximum bytes of a request's body if a served model takes images.
    memory_bytes: maximum bytes of bodies, files and pixels of all requests in flight with images.
    hosts: hosts from which images are fetched, e.g. "images.example.com", "*.example.com" or
        "example.com:8443"; (): nothing is fetched.
    first_seconds, last_seconds: maximum time until a download's headers, and until its last byte.
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
