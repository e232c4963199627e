"""Prefix hashes: a KV block is identified by a keyed hash of all tokens up to its end.

 root      = blake2b(model, adapter, salt)
 hashes[0] = blake2b(root + tokens[0 : block_size])
 hashes[i] = blake2b(hashes[i - 1] + tokens[i * block_size : (i + 1) * block_size])

If images overlap a block, the digest of each and its offset from the block's start follow the
tokens. So a block is found only with the same images at the same places.

A hash has 128 bits, over little-endian int32 bytes. Without the key a client cannot search for a
collision. The engine stores its blocks by these hashes. Two requests share blocks only if model,
adapter and salt are equal. Routers choose a replica by shorter hashes, which these functions also
compute. Those are never compared with the engine's (`deployments.routing.prefix_index`).
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import blake2b
from struct import Struct

from engine.images.image import Image

DIGEST_SIZE = 16
_KEYED = blake2b(digest_size=DIGEST_SIZE, key=b"manta prefix hash 1")  # copied, never updated


def root_hash(model_key: str, adapter: str, cache_salt: str) -> bytes:
    """Return the root of the hash chain of one (model, adapter, salt).

    Each part is hashed with its length, so that parts cannot be confused.
    """
    state = _KEYED.copy()
    for part in (model_key, adapter, cache_salt):
        data = part.encode()
        state.update(len(data).to_bytes(8, "little") + data)
    return state.digest()


def extend_hashes(
    hashes: list[bytes],
    root: bytes,
    token_ids: Sequence[int],
    block_size: int,
    num_blocks: int,
    images: Sequence[Image] = (),
) -> None:
    """Append hashes of a request's blocks until there are num_blocks; their tokens must be known.

    Existing hashes are kept, so that each block is hashed once. Token ids are below 2**31.

    images: the images of the prompt, in its order; their pixels are not needed.
    """
    first = len(hashes)
    if num_blocks <= first:
        return
    assert num_blocks * block_size <= len(token_ids), "hashing tokens that are not known yet"
    pack = _packer(block_size)
    previous = hashes[-1] if hashes else root
    for at in range(first * block_size, num_blocks * block_size, block_size):
        state = _KEYED.copy()
        state.update(previous + pack(*token_ids[at : at + block_size]))
        if images:
            state.update(_images_of_block(images, at, at + block_size))
        previous = state.digest()
        hashes.append(previous)


def _images_of_block(images: Sequence[Image], start: int, stop: int) -> bytes:
    """Return the digests and offsets of the images that overlap tokens [start, stop)."""
    named, index = b"", bisect_right(images, start, key=_end)
    while index < len(images) and images[index].start < stop:
        image = images[index]
        named += image.digest + (image.start - start).to_bytes(4, "little", signed=True)
        index += 1
    return named


def _end(image: Image) -> int:
    return image.start + image.length


@cache
def _packer(count: int) -> Callable[..., bytes]:
    return Struct(f"<{count}i").pack
