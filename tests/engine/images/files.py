"""Image files for tests: every supported format, invalid files, and files with wrong headers."""

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image


def saved(picture: Image.Image, kind: str, **options: Any) -> bytes:
    """Return an image encoded as a file of format `kind`. options: arguments of Pillow's `save`."""
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def gradient(width: int = 40, height: int = 30) -> Image.Image:
    """Return an image in which no two pixels of a row or a column are equal."""
    rows, columns = np.mgrid[0:height, 0:width]
    channels = [rows * 255 // height, columns * 255 // width, (rows + columns) % 256]
    return Image.fromarray(np.stack(channels, -1).astype(np.uint8))


def png(width: int, height: int, rows: bytes = b"", depth: int = 8, colour: int = 2) -> bytes:
    """Return a PNG file with this header, whose pixels may not match it. rows: the pixels' bytes,
    not compressed."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        crc = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + crc

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def resized_header(data: bytes, width: int, height: int) -> bytes:
    """Return a file whose header has another size than its pixels.

    data: PNG, JPEG, GIF, BMP, or WebP without extensions. Sides are cut to what the format holds.
    """
    file = bytearray(data)
    if data.startswith(b"\x89PNG"):
        struct.pack_into(">II", file, 16, width, height)
        struct.pack_into(">I", file, 29, zlib.crc32(file[12:29]))
    elif data.startswith(b"\xff\xd8"):
        at = next(data.index(mark) for mark in (b"\xff\xc0", b"\xff\xc2") if mark in data)
        struct.pack_into(">HH", file, at + 5, height & 0xFFFF, width & 0xFFFF)
    elif data.startswith(b"GIF"):
        struct.pack_into("<HH", file, 6, width & 0xFFFF, height & 0xFFFF)
    elif data.startswith(b"BM"):
        struct.pack_into("<ii", file, 18, width, height)
    elif data[12:16] == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        sides = (width - 1 & 0x3FFF) | (height - 1 & 0x3FFF) << 14
        struct.pack_into("<I", file, 21, bits & ~0xFFFFFFF | sides)
    else:
        assert data[12:16] == b"VP8 "
        struct.pack_into("<HH", file, 26, width & 0x3FFF, height & 0x3FFF)
    assert file != data
    return bytes(file)


def lies() -> dict[str, bytes]:
    """Return name -> file with a wrong header: no pixels, a gigapixel, a row too many, others."""
    files = kinds()
    sizes = {"zero": (0, 0), "gigapixel": (2**16 - 1, 2**16 - 1), "a row more": (40, 31)}
    named = {
        f"{kind}, {name}": resized_header(files[kind], *size)
        for kind in ("png", "jpeg", "jpeg progressive", "gif", "bmp", "webp", "webp lossless")
        for name, size in sizes.items()
    }
    named["png, other magic"] = b"\xff\xd8\xff" + files["png"][3:]
    named["jpeg, other magic"] = b"\x89PNG\r\n\x1a\n" + files["jpeg"][8:]
    named["webp, other magic"] = b"GIF89a" + files["webp"][6:]
    named["bmp, magic alone"] = b"BM"
    return named


def bomb(side: int = 9000) -> bytes:
    """Return a small but valid PNG file of side x side pixels."""
    row = b"\0" + bytes(side * 3)
    packer = zlib.compressobj(9)
    packed = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    whole = png(side, side)
    at = whole.index(b"IDAT") - 4
    data = struct.pack(">I", len(packed)) + b"IDAT" + packed
    crc = struct.pack(">I", zlib.crc32(b"IDAT" + packed))
    return whole[:at] + data + crc + whole[whole.index(b"IEND") - 4 :]


def kinds() -> dict[str, bytes]:
    """Return name -> file, of every supported format."""
    picture = gradient()
    clear = picture.convert("RGBA")
    clear.putalpha(Image.linear_gradient("L").resize(picture.size))
    exif = Image.Exif()
    exif[0x0112] = 6
    frames = [picture, picture.rotate(90, expand=False)]
    deep = Image.fromarray(np.linspace(0, 65535, 1200).astype(np.uint16).reshape(30, 40))
    return {
        "png": saved(picture, "PNG"),
        "png rgba": saved(clear, "PNG"),
        "png palette": saved(picture.convert("P"), "PNG"),
        "png palette, transparent": saved(picture.convert("P"), "PNG", transparency=3),
        "png grey, transparent": saved(clear.convert("LA"), "PNG"),
        "png one bit": saved(picture.convert("1"), "PNG"),
        "png sixteen bits": saved(deep, "PNG"),
        "png animated": saved(frames[0], "PNG", save_all=True, append_images=frames[1:]),
        "png turned": saved(picture, "PNG", exif=exif),
        "jpeg": saved(picture, "JPEG"),
        "jpeg progressive": saved(picture, "JPEG", progressive=True),
        "jpeg grey": saved(picture.convert("L"), "JPEG"),
        "jpeg cmyk": saved(picture.convert("CMYK"), "JPEG"),
        "jpeg turned": saved(picture, "JPEG", exif=exif),
        "gif": saved(picture.convert("P"), "GIF"),
        "gif animated": saved(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "webp": saved(picture, "WEBP"),
        "webp lossless": saved(clear, "WEBP", lossless=True),
        "webp animated": saved(frames[0], "WEBP", save_all=True, append_images=frames[1:]),
        "bmp": saved(picture, "BMP"),
        "bmp one bit": saved(picture.convert("1"), "BMP"),
    }


def others() -> dict[str, bytes]:
    """Return name -> file, of formats that are refused."""
    picture = gradient()
    return {
        "svg": b"<svg xmlns='http://www.w3.org/2000/svg' width='1' height='1'/>",
        "heic": b"\0\0\0\x18ftypheic" + bytes(40),
        "avif": b"\0\0\0\x1cftypavif" + bytes(40),
        "pdf": b"%PDF-1.7\n" + bytes(40),
        "tiff": saved(picture, "TIFF"),
        "jpeg 2000": b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(40),
        "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n" + bytes(40),
        "ppm": saved(picture, "PPM"),
        "text": b"hello",
        "empty": b"",
    }
