"""Lengths of the ablations' workloads: (prompt tokens, output tokens) of each request."""

import random

from loadtest.scenario.lengths import parse_length

Sizes = list[tuple[int, int]]

# ShareGPT's lengths with the Llama-2 tokenizer, from OpenPPL's samples_1024: inverse CDFs in steps
# of 5 %.
_INPUT = [4, 7, 9, 11, 13, 15, 17, 20, 22, 25, 29, 35, 44, 55, 74, 101, 143, 207, 348, 596, 1007]
_OUTPUT = [5, 24, 41, 77, 98, 128, 159, 194, 223, 251, 277, 309, 343, 370, 400, 431, 486, 550, 666,
           806, 1068]  # fmt: skip


def sharegpt(count: int, seed: int = 0, scale: float = 1.0) -> Sizes:
    """Draw independent lengths with mean input 114 and mean output 322, times scale."""
    rng = random.Random(seed)
    prompt = parse_length({"cdf": _INPUT, "mean": 114 * scale})
    output = parse_length({"cdf": _OUTPUT, "mean": 322 * scale})
    return [(prompt.draw(rng), output.draw(rng)) for _ in range(count)]


def widely_different(count: int, seed: int = 0) -> Sizes:
    """Draw inputs of 32 to 64 tokens, and outputs of 16 to 64 for 70 % and 1,024 to 2,048 for
    the rest.
    """
    rng = random.Random(seed)
    output = parse_length({"mix": [[0.7, [16, 64]], [0.3, [1024, 2048]]]})
    return [(rng.randint(32, 64), output.draw(rng)) for _ in range(count)]


def batches(sizes: Sizes, size: int, *, fill_prompts: bool = True) -> list[Sizes]:
    """Return the requests' lengths in static batches of `size` requests, in order.

    Outputs are padded to the batch's longest output, and with fill_prompts prompts to its longest
    prompt, since a static batch computes the padding.
    """
    filled = []
    for at in range(0, len(sizes), size):
        group = sizes[at : at + size]
        prompts = [prompt for prompt, _ in group]
        if fill_prompts:
            prompts = [max(prompts)] * len(group)
        output = max(output for _, output in group)
        filled.append([(prompt, output) for prompt in prompts])
    return filled
