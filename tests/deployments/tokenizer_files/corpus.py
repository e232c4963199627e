"""Texts of all scripts, with spaces, control characters, special tokens and joined pieces."""

import random
import sys
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache

_WORDS = (
    "The", "quick", "can't", "1234567", "dogs,", "I'LL", "say;", "they've", "HELLO_worldFooBar.",
    "def", "f(x):\n\treturn", "x**2", "#", "ok\r\n\r\n<div", 'class="a">&amp;</div>',
    "http://a.b/c?d=e&f=1", "naïve", "café", "Å", "A\u030a", "\u212b", "ﬁ", "ſ", "'ſ", "'S",
    "\u212a", "½", "Ⅷ", "٣٤٥", "১২৩", "日本語の文章です。中文的句子,没有空格!", "한국어",
    "문장", "ภาษาไทย", "हिन्दी",
    "العربية", "עברית", "Ελληνικά", "русский", "язык", "👩\u200d🔬", "🏳️\u200d🌈", "🦊",
)  # fmt: skip
_SPACES = (
    " ", "  ", "   ", " " * 17, "\t", "\n", "\n\n", " \n ", "\r\n", "\u00a0", "\u3000", "\u2028",
)  # fmt: skip
_ODD = (
    "\x00", "\x7f", "\u0085", "\u200b", "\u202e", "\ufeff", "\ufffd", "▁", "▁▁", "Ġ", "<0x0A>",
)  # fmt: skip


@lru_cache(maxsize=1)
def _scripts() -> list[list[str]]:
    """Return the assigned characters, grouped by the first word of their names: the script of
    letters."""
    scripts: dict[str, list[str]] = defaultdict(list)
    for point in range(sys.maxunicode + 1):
        char = chr(point)
        # Later versions of Unicode than the oldest library's are left out.
        if unicodedata.category(char) in ("Cn", "Co", "Cs") or not unicodedata.ucd_3_2_0.name(
            char, ""
        ):
            continue
        scripts[unicodedata.name(char, "?").split(" ")[0].split("-")[0]].append(char)
    return list(scripts.values())


def texts(count: int, special: Sequence[str] = (), *, seed: int = 20) -> Iterator[str]:
    """Yield so many texts. special: texts of special tokens that every third one has."""
    rng = random.Random(seed)
    scripts = _scripts()

    def stretch() -> str:
        kind = rng.randrange(6)
        if kind == 0:
            return rng.choice(_SPACES)
        if kind == 1:
            return rng.choice(_ODD)
        if kind in (2, 3):
            return rng.choice(("", " ")) + rng.choice(_WORDS)
        letters = rng.choice(scripts)
        words = ("".join(rng.choices(letters, k=rng.randint(1, 6))) for _ in range(3))
        return rng.choice(("", " ")).join(words)

    for number in range(count):
        parts = [stretch() for _ in range(rng.randint(1, 7))]
        if special and number % 3 == 0:
            parts.insert(rng.randint(0, len(parts)), rng.choice(special))
        yield "".join(parts)
