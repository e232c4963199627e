"""Image: a picture of a prompt, prepared for the model."""

import msgspec


class Image(msgspec.Struct, array_like=True, frozen=True):
    """A picture of a prompt, prepared for the model.

    digest: 16 bytes of SHA-256 over the processor's settings, the shape, and the file or the RGB
        pixels before any resize; its name in caches.
    start: index in token_ids of its first placeholder.
    length: tokens from its first to its last placeholder. Ordinary tokens (ends of rows) may lie
        between.
    size: the number of its embeddings. They stand, in order, at those positions of this span whose
        token is the span's first token: the model's image token, or that of clips. Outside of
        spans these tokens are ordinary tokens.
    grid: (height, width) in embeddings for rotary positions of three axes; (0, 0) with plain
        positions. A span of a clip has one such grid for each temporal patch, in order.
    shape: (tiles, height, width) of pixels; the tiles of a clip's span are its frames.
    pixels: 8-bit RGB, [tiles, height, width, 3], after the model's resize, before any
        normalisation.
    rows: the image's embeddings where an encoder pool has computed them, [size, width] without
        gaps; width is hidden_size * (1 + levels), see `ImageRows`. b"": the engine computes them.
    rows_dtype: the type of their numbers: float32, bfloat16 or float16.
    time_step: by how much M-RoPE's temporal position grows from one grid of a clip to the next; it
        may be a fraction.
    """

    digest: bytes
    start: int
    length: int
    size: int
    grid: tuple[int, int]
    shape: tuple[int, int, int]
    pixels: bytes
    rows: bytes = b""
    rows_dtype: str = "float32"
    time_step: float = 0.0
