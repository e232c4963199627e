"""Unsupported architectures that would match the record of a similar architecture.

For each, the error says which feature is missing. No torch here.
"""

from collections.abc import Mapping

_INDEXER = (
    "an indexer chooses the index_topk keys that each token attends to, which is not computed here;"
    " attention to all keys gives other text beyond that many tokens"
)
_NO_KEYS = "no layer keeps keys and values, which the cache counts tokens by"
# The name in config.json's "architectures" -> why it is refused.
REFUSED: Mapping[str, str] = {
    "DeepseekV32ForCausalLM": _INDEXER,
    "GlmMoeDsaForCausalLM": _INDEXER,
    "MistralLarge3ForCausalLM": "it is stored in Mistral's own layout (params.json), which is not "
    "read here",
    "MambaForCausalLM": _NO_KEYS,
    "FalconMambaForCausalLM": _NO_KEYS,
    "Mamba2ForCausalLM": _NO_KEYS,
    "Zamba2ForCausalLM": "its layers share weights, which adapters of each layer change; that "
    "is not computed here",
}
