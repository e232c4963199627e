"""The slopes of ALiBi (Press et al. 2022), the penalty on scores per token of distance."""

import math


def slopes(heads: int) -> tuple[float, ...]:
    """Return BLOOM's ALiBi slopes: 2^(-8 h / n) for heads h = 1 .. n.

    n is the largest power of two up to the number of heads. Further heads have slopes in between.
    """
    whole = 1 << int(math.log2(heads))
    first = [2 ** (-8 * (h + 1) / whole) for h in range(whole)]
    interpolated = [2 ** (-4 * (2 * h + 1) / whole) for h in range(heads - whole)]
    return tuple(first + interpolated)


def mpt_slopes(heads: int, largest: float) -> tuple[float, ...]:
    """Return the ALiBi slopes of MPT.

    If heads is no power of two, these are the first of the next power's slopes, of which every
    second one is moved to the front.

    largest: alibi_bias_max; the smallest slope is 2^-largest.
    """
    whole = 1 << math.ceil(math.log2(heads))
    all_slopes = [2 ** (-largest * (h + 1) / whole) for h in range(whole)]
    if whole == heads:
        return tuple(all_slopes)
    return tuple((all_slopes[1::2] + all_slopes[::2])[:heads])
