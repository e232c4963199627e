"""mistral_settings: reads image settings of folders with only files in Mistral's format."""

from pathlib import Path

from engine.config_reader import Reader

PARAMS, TEKKEN = "params.json", "tekken.json"


def mistral_settings(folder: Path) -> Reader | None:
    """Return the settings of an image processor under transformers' names; None if there are none.

    Mistral's folders have the settings in params.json (vision_encoder) and in tekken.json (image,
    or multimodal in older files). Mean and deviation are transformers' defaults.

    Raises ConfigError naming file and key.
    """
    for name, keys in ((PARAMS, ("vision_encoder",)), (TEKKEN, ("image", "multimodal"))):
        if not (folder / name).is_file():
            continue
        file = Reader.from_file(folder / name)
        for key in keys:
            inner = file.inner(key)
            if inner.values:
                side = inner.size("max_image_size", inner.size_or_none("image_size"))
                return Reader({"size": {"longest_edge": side}}, inner.path)
    return None
