"""The records of model architectures, with everything that depends on the architecture.

`find.py` finds the record of a config.json. `engine.config.model_config` uses the record's
switches, `engine.models.registry` its class, and `engine.layers` the names of checkpoint tensors.
`gguf` has the names in GGUF files. No other module depends on a model's architecture. No torch
here.
"""

from engine.architectures import encoders
from engine.architectures.dense import (
    cohere,
    deci,
    gemma,
    gemma4,
    glm,
    gpt,
    latent,
    llama,
    olmo,
    phi,
    remote,
)
from engine.architectures.gguf import GGUFS, Gguf, Metadata
from engine.architectures.mixtures import dbrx, deepseek, families, laguna, llama4, longcat, mimo
from engine.architectures.record import (
    Architecture,
    CheckpointTensor,
    HeadLayer,
    Read,
    Rows,
    Wrapper,
    always,
)
from engine.architectures.recurrent import (
    falcon_h1,
    jamba,
    kimi,
    lfm2,
    mamba2,
    nemotron_h,
    olmo_hybrid,
    qwen_next,
)
from engine.architectures.wrappers import TEXT_TYPES, WRAPPERS

__all__ = [
    "ARCHITECTURES",
    "GGUFS",
    "TEXT_TYPES",
    "WRAPPERS",
    "Architecture",
    "Gguf",
    "HeadLayer",
    "Metadata",
    "Read",
    "Rows",
    "CheckpointTensor",
    "Wrapper",
    "always",
]

_MODULES = (
    llama,
    gemma,
    phi,
    glm,
    olmo,
    cohere,
    remote,
    deci,
    gpt,
    families,
    llama4,
    dbrx,
    deepseek,
    laguna,
    longcat,
    mimo,
    qwen_next,
    lfm2,
    mamba2,
    falcon_h1,
    nemotron_h,
    olmo_hybrid,
    jamba,
    kimi,
    latent,
    gemma4,
    encoders,
)

ARCHITECTURES: dict[str, Architecture] = {
    record.name: record for module in _MODULES for record in module.ARCHITECTURES
}
# Records of folders that are converted from GGUF files, for architectures whose matrices have
# another layout there than in the original checkpoint.
ARCHITECTURES |= {
    gguf.architecture: gguf.applied(ARCHITECTURES[gguf.record]) for gguf in GGUFS if gguf.pieces
}
