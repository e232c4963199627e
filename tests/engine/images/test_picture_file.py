import io
import random
import re
import struct

import numpy as np
import pytest
from PIL import Image

from engine.errors import InvalidRequest
from engine.images.picture_file import MAX_PIXELS, PictureFile
from tests.engine.images.files import bomb, gradient, kinds, lies, others, png, saved

KINDS = kinds()
# What would tell of the library: its names, addresses, classes.
LIBRARY = re.compile(r"0x[0-9a-f]{4}|PIL|Pillow|BytesIO|Error|decoder|libjpeg|zlib|<.*>", re.I)


def decoded(data: bytes) -> np.ndarray:
    picture = PictureFile.read(data).decode()
    assert picture.mode == "RGB"
    return np.asarray(picture)


def refusal(data: bytes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refused:
        PictureFile.read(data).decode()
    assert not LIBRARY.search(refused.value.message)
    return refused.value


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file(kind: str) -> None:
    """A mode that no conversion knew would be a 500, or another picture."""
    file = PictureFile.read(KINDS[kind])
    turned = "turned" in kind
    assert (file.width, file.height) == ((30, 40) if turned else (40, 30))
    assert file.frames == ("animated" in kind)
    assert decoded(KINDS[kind]).shape == (file.height, file.width, 3)


@pytest.mark.parametrize("kind", others())
def test_other_kinds_are_refused_by_their_first_bytes(kind: str) -> None:
    """Pillow would try Ghostscript for EPS, and has readers that are seldom tested."""
    error = refusal(others()[kind])
    assert "PNG, JPEG, WebP, GIF or BMP" in error.message and error.code == "invalid_image"


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [0, 10_000, 20_000])
def test_pixels_are_counted_in_the_header(side: int) -> None:
    """Pillow opens 10,000 x 10,000 with a warning only."""
    error = refusal(png(side, side))
    assert error.code == ("image_too_large" if side else "invalid_image")
    assert not side or str(MAX_PIXELS) in error.message


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_orientation_is_that_of_pillow(orientation: int, kind: str) -> None:
    """A wrong table would lay portraits on their side."""
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(gradient(), kind, exif=exif)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert upright is not None
    assert np.array_equal(decoded(data), np.asarray(upright.convert("RGB")))


def test_transparency_lies_over_white() -> None:
    """Dropped alpha shows what its author has hidden: often black."""
    clear = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    half = Image.new("RGBA", (4, 4), (0, 0, 0, 128))
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([9, 9, 9, 200, 0, 0])
    assert (decoded(saved(clear, "PNG")) == 255).all()
    assert (decoded(saved(half, "PNG")) == 127).all()
    assert (decoded(saved(palette, "PNG", transparency=1)) == 255).all()
    assert (decoded(saved(clear.convert("LA"), "PNG")) == 255).all()


def test_sixteen_bits_are_divided() -> None:
    """Pillow's conversion cuts at 255, so nearly all of a scan would be white."""
    values = np.array([[0, 4369, 8738], [32896, 65534, 65535]], np.uint16)
    shown = decoded(saved(Image.fromarray(values), "PNG"))
    assert shown[..., 0].tolist() == [[0, 17, 34], [128, 254, 255]]


@pytest.mark.parametrize(("colour", "channels"), [(0, 1), (2, 3), (4, 2), (6, 4)])
def test_sixteen_bits_a_colour_lose_the_low_byte(colour: int, channels: int) -> None:
    """A colour whose high bytes were read as two pixels, or as the low ones, is noise."""
    values = np.array([0, 4369, 8738, 32896, 65535], ">u2")
    pixels = np.repeat(values[:, None], channels, 1)
    if channels in (2, 4):
        pixels[:, -1] = 65535  # opaque
    row = b"\0" + pixels.tobytes()
    shown = decoded(png(5, 1, row, 16, colour))
    assert shown.tolist() == [[[value >> 8] * 3 for value in values.tolist()]]


LIES = lies()


@pytest.mark.parametrize("name", LIES)
def test_lies_of_every_kind(name: str) -> None:
    """A decoder that believes a header makes room for 16 GB, or shows what was in memory."""
    Image.core.set_blocks_max(4)  # as routers do
    saved(Image.new("RGB", (40, 31), "white"), "PNG")  # leaves a block that is not black
    try:
        shown = decoded(LIES[name])
    except InvalidRequest as error:
        assert not LIBRARY.search(error.message)
        huge = "gigapixel" in name or name == "webp lossless, zero"  # whose sides are at least 1
        assert (error.code == "image_too_large") == huge, error.message
    else:
        assert name.endswith("a row more") or name == "gif, zero"  # its frame has a size
        if name.startswith(("png", "gif")):
            assert not shown[30:].any()
    finally:
        Image.core.set_blocks_max(0)


def test_cmyk_of_adobe_is_not_inverted() -> None:
    """Adobe's files keep ink inverted; read plainly, red would be cyan."""
    red = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    pixel = decoded(saved(red, "JPEG"))[4, 4].tolist()
    assert pixel[0] > 240 and max(pixel[1:]) < 15


def test_the_first_frame_counts() -> None:
    """A later frame, or a mixture, is another picture."""
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    for kind in ("GIF", "PNG", "WEBP"):
        options = {"lossless": True} if kind == "WEBP" else {}
        data = saved(frames[0], kind, save_all=True, append_images=frames[1:], **options)
        assert decoded(data)[4, 4].tolist() == [255, 0, 0]


@pytest.mark.parametrize("kind", ["png", "jpeg", "gif", "webp lossless", "bmp"])
def test_a_file_that_is_cut_short_is_refused(kind: str) -> None:
    """A half picture would be answered as if its lower half were grey."""
    data = KINDS[kind]
    for end in (20, len(data) // 2):
        assert refusal(data[:end]).code in ("invalid_image", "image_too_large")


def test_headers_that_lie() -> None:
    """Room is made by the header, so it must agree with what is decoded."""
    assert refusal(png(3000, 3000, bytes(1000))).code == "invalid_image"
    gif = bytearray(KINDS["gif"])
    gif[6:10] = struct.pack("<HH", 1, 1)  # the canvas is smaller than its frame
    assert PictureFile.read(bytes(gif)).pixels == 40 * 30  # counted before it is decoded
    webp = bytearray(KINDS["webp lossless"])
    assert webp[12:16] == b"VP8L"
    webp[21:25] = b"\xff\xff\xff\x0f"  # 16384 x 16384
    assert refusal(bytes(webp)).code == "image_too_large"
    bmp = bytearray(KINDS["bmp"])
    bmp[18:26] = struct.pack("<ii", 5000, -5000)
    refusal(bytes(bmp))


def mutated(seed: int) -> bytes:
    """Return a file with a few bytes changed, cut out or put in."""
    chance = random.Random(seed)
    data = bytearray(chance.choice(list(KINDS.values())))
    for _ in range(chance.randint(1, 6)):
        at = chance.randrange(min(len(data), chance.choice((32, 128, len(data)))))
        match chance.randrange(4):
            case 0:
                data[at] = chance.randrange(256)
            case 1:
                data[at : at + chance.randint(1, 64)] = b""
            case 2:
                data[at:at] = chance.randbytes(chance.randint(1, 64))
            case _:
                data[at : at + 4] = chance.choice(
                    (b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\0\0")
                )
        if len(data) < 8:
            break
    return bytes(data)


def check_mutations(seeds: range) -> None:
    """Check that each file is read, or refused in our words."""
    refused = 0
    for seed in seeds:
        try:
            file = PictureFile.read(mutated(seed), 1_000_000)
            picture = file.decode()
            assert picture.mode == "RGB" and picture.size == (file.width, file.height)
        except InvalidRequest as error:
            refused += 1
            assert not LIBRARY.search(error.message), seed
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
    assert 0.2 < refused / len(seeds) < 1


def test_mutated_files() -> None:
    """An exception that nobody expects is a 500, and its text tells of the process."""
    check_mutations(range(1000))


@pytest.mark.slow
def test_many_mutated_files() -> None:
    """The mutations of the test above, in numbers that reach rare branches of the decoders."""
    check_mutations(range(1000, 40_000))


def test_a_bomb_decodes_within_its_pixels() -> None:
    """A limit on pixels alone keeps memory bounded: what the header allows is decoded."""
    data = bomb(2000)
    assert len(data) < 30_000 and decoded(data).shape == (2000, 2000, 3)
    with pytest.raises(InvalidRequest, match="2000 x 2000, more than 1000000 pixels"):
        PictureFile.read(data, 1_000_000)
