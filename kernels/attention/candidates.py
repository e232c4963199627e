"""The kernels of attention, one tuple per operation, in order of preference (`kernels.candidates`).

`Candidate.fits` takes the inputs (`kernels.attention.inputs`) and the step's AttentionMeta;
`Candidate.run` takes these and the output tensor, shaped like q. `Candidate.tokens` counts the
tokens of one request in the step.
"""

from collections.abc import Callable
from typing import Any

from kernels.attention.inputs import AttentionForm, AttentionInputs, LatentForm
from kernels.attention.shapes import head_parts
from kernels.candidates import Candidate, Capability, Fusion, Lazy, Operands
from kernels.kv.quantized import QuantizedKV
from kernels.metadata import AttentionMeta

_ANY = float("inf")
HOPPER = (9, 0)

# Sizes that the warp-specialised kernels support. Prefill: elements of a head -> keys of a tile.
PREFILL_KEYS = {128: 128, 256: 64}
PREFILL_GROUPS = (1, 2, 4, 8)
LATENT_SIZES = (512, 64)  # elements of a latent, and of its rotary part
LATENT_ROWS, LATENT_KEYS = 64, 64  # heads of a program, latents of a tile


def _whole_pages(block_size: int, keys: int) -> bool:
    """Whether a tile of `keys` keys consists of whole pages, or a page of whole tiles."""
    return block_size % 16 == 0 and (keys % block_size == 0 or block_size % keys == 0)


def takes_specialized_prefill(form: AttentionForm, capability: Capability) -> bool:
    """Whether `specialized_prefill` serves layers of this form on a GPU of this capability."""
    keys = PREFILL_KEYS.get(form.head_dim)
    if keys is None or capability != HOPPER or form.kv or form.element_size != 2:
        return False
    plain = not form.softcap and not form.slopes
    return plain and form.group in PREFILL_GROUPS and _whole_pages(form.block_size, keys)


def takes_specialized_decode(form: LatentForm, capability: Capability) -> bool:
    """Whether `specialized_decode` serves latents of this form on a GPU of this capability."""
    if capability != HOPPER or (form.rank, form.rope) != LATENT_SIZES or form.element_size != 2:
        return False
    heads = form.heads // head_parts(form.heads)
    return LATENT_ROWS // 2 < heads <= LATENT_ROWS and _whole_pages(form.block_size, LATENT_KEYS)


def _takes_codes(form: AttentionForm, capability: Capability) -> bool:
    return bool(form.kv)


def _takes_plain(form: AttentionForm, capability: Capability) -> bool:
    return not form.kv


def _takes_latents(form: LatentForm, capability: Capability) -> bool:
    return True


def _has_codes(inputs: AttentionInputs, meta: AttentionMeta) -> bool:
    return isinstance(inputs.k_cache, QuantizedKV)


def _always(inputs: Any, meta: AttentionMeta) -> bool:
    return True


def _one_token(form: Any) -> tuple[int, float]:
    return 1, 1


def _any_tokens(form: Any) -> tuple[int, float]:
    return 1, _ANY


def _kernel(
    path: str,
    takes: Callable[[AttentionForm, Capability], bool],
    tokens: Callable[[AttentionForm], tuple[int, float]],
    fits: Callable[..., bool] = _always,
) -> Candidate[AttentionForm]:
    """Return the candidate that runs a function of kernels.attention.

    path: "module:function". takes, tokens, fits: see Candidate.
    """
    operands: Operands = "codes of keys and values" if takes is _takes_codes else "keys and values"
    run = Lazy(f"kernels.attention.{path}")
    return Candidate(path.split(":")[1], operands, takes, tokens, fits, run)


# Attention kernels of requests with one token in the step; programs share a request's keys.
DECODE_ATTENTION: tuple[Candidate[AttentionForm], ...] = (
    _kernel("quantized_decode:quantized_decode", _takes_codes, _one_token, _has_codes),
    _kernel("decode:attention_decode", _takes_plain, _one_token),
)

# Attention kernels of all requests but decodes.
CHUNK_ATTENTION: tuple[Candidate[AttentionForm], ...] = (
    _kernel(
        "specialized_prefill:specialized_prefill", takes_specialized_prefill, _any_tokens,
        Lazy("kernels.attention.specialized_prefill:specialized_prefill_fits"),
    ),
    _kernel("quantized_prefill:quantized_prefill", _takes_codes, _any_tokens, _has_codes),
    _kernel("prefill:attention_prefill", _takes_plain, _any_tokens),
)  # fmt: skip

# Attention kernels of the deterministic mode, which sum over a request's keys in a fixed order.
FIXED_ATTENTION: tuple[Candidate[AttentionForm], ...] = (
    _kernel("quantized_prefill:quantized_prefill_fixed", _takes_codes, _any_tokens, _has_codes),
    _kernel("prefill:attention_prefill_fixed", _takes_plain, _any_tokens),
)

# `fits` takes LatentInputs and the step's meta. A kernel that fuses "up" runs on LatentInputs and
# returns values; a kernel that does not runs on AbsorbedInputs and returns weighted latents.
LATENT_CHUNKS: tuple[Candidate[LatentForm], ...] = (
    Candidate(
        "latent_expanded", "keys and values of latents", _takes_latents, _any_tokens,
        Lazy("kernels.attention.latent.expanded:worth_expanding"),
        Lazy("kernels.attention.latent.expanded:latent_expanded"), frozenset[Fusion](("up",)),
    ),
    Candidate(
        "latent_prefill", "latents", _takes_latents, _any_tokens,
        _always, Lazy("kernels.attention.latent.prefill:latent_prefill"),
    ),
)  # fmt: skip

# Latent attention kernels of requests with one token in the step, on AbsorbedInputs.
LATENT_DECODE: tuple[Candidate[LatentForm], ...] = (
    Candidate(
        "specialized_decode", "latents", takes_specialized_decode, _one_token,
        Lazy("kernels.attention.latent.specialized_decode:specialized_decode_fits"),
        Lazy("kernels.attention.latent.specialized_decode:specialized_decode"),
    ),
    Candidate(
        "latent_decode", "latents", _takes_latents, _one_token,
        _always, Lazy("kernels.attention.latent.decode:latent_decode"),
    ),
)  # fmt: skip
