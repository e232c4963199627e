"""merges, patch_and_merge: read sizes of patches and embeddings of Pixtral and Mistral 3."""

from engine.config_reader import Reader


def merges(config: Reader) -> bool:
    """Whether the model merges patches: Mistral 3 does, Pixtral inside of LLaVA does not."""
    return config.get("model_type") != "llava"


def patch_and_merge(config: Reader) -> tuple[int, int]:
    """Return the side of a patch in pixels, and the side of an embedding's square in patches.

    config: config.json with its outer keys.
    """
    patch = config.inner("vision_config").square("patch_size", 16)
    return patch, config.size("spatial_merge_size", 2) if merges(config) else 1
