"""Image: a picture of a prompt, prepared for the model."""

import msgspec


class Image(msgspec.Struct, array_like=True, frozen=True):
    """A picture of a prompt, prepared for the model.

    digest: 16 bytes of SHA-256 over the processor's settings, the shape, and the file or the RGB
        pixels before any resize; the key in caches.
    start: index in token_ids of the first placeholder.
    length: number of tokens from the first to the last placeholder, which may include ordinary
        tokens such as row separators.
    size: the number of embeddings. The embeddings replace, in order, those tokens of this span that
        equal its first token: the model's placeholder for images or clips. Outside of spans such
        tokens are ordinary tokens.
    grid: (height, width) in embeddings for M-RoPE; (0, 0) with one-dimensional positions. A span of
        a clip has one such grid for each temporal patch, in order.
    shape: (tiles, height, width) of pixels; the tiles of a clip's span are its frames.
    pixels: 8-bit RGB, [tiles, height, width, 3], after the model's resize, before any
        normalisation.
    rows: the image's embeddings from an encoder pool, [size, width] contiguous; width is
        hidden_size * (1 + levels), see `ImageRows`. b"" = the engine computes them.
    rows_dtype: the dtype of `rows`: float32, bfloat16 or float16.
    time_step: the increment of the temporal M-RoPE position between grids of a clip; it may be a
        fraction.
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
