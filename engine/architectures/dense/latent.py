"""Dense decoders with multi-head latent attention (MLA)."""

from engine.architectures.dense.llama import LLAMA
from engine.architectures.dense.remote import MINICPM
from engine.architectures.latent import LATENT, ONE_KEY_HEAD, UNBIASED, latent_attention
from engine.architectures.record import Architecture

_TENSORS = {**LLAMA, **LATENT}

ARCHITECTURES = (
    Architecture(
        "MiniCPM3ForCausalLM",
        _TENSORS,
        models="MiniCPM 3",
        model_type="minicpm3",
        switches=MINICPM,
        defaults={"rope_interleave": False},
        computed=ONE_KEY_HEAD,
        only=UNBIASED,
        attention=latent_attention,
    ),
    Architecture(
        "YoutuForCausalLM",
        _TENSORS,
        models="Youtu-LLM",
        model_type="youtu",
        computed=ONE_KEY_HEAD,
        only=UNBIASED,
        attention=latent_attention,
    ),
)
