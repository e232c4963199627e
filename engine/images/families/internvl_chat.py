"""chat_settings: reads image processor settings from a config.json in InternVL's original
format."""

from collections.abc import Mapping

from engine.config_reader import Reader

CONTEXT = "<IMG_CONTEXT>"  # the image token
# ImageNet's values, which the publisher's code uses instead of the files' values.
_MEAN, _DEVIATION = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def is_chat(config: Reader) -> bool:
    """Whether a config.json has InternVL's original format."""
    return config.get("model_type") == "internvl_chat"


def chat_settings(config: Reader, special_tokens: Mapping[int, str]) -> Reader:
    """Return the settings of an image processor under transformers' names.

    special_tokens: id -> text of the tokenizer's special tokens. If the image token is not among
        them, the setting `image_token_id` is -1.
    Raises ConfigError naming a key.
    """
    side = config.inner("vision_config").square("image_size", 448)
    side = config.square("force_image_size", side)
    most = config.size("max_dynamic_patch", 12) if config.flag("dynamic_image_size", True) else 1
    values = {
        "size": {"height": side, "width": side},
        "min_patches": min(config.size("min_dynamic_patch", 1), most),
        "max_patches": most,
        "image_mean": _MEAN,
        "image_std": _DEVIATION,
    }
    if special_tokens:  # the folder may have no tokenizer, in `manta plan`
        ids = {text: token_id for token_id, text in special_tokens.items()}
        values["image_token_id"] = ids.get(CONTEXT, -1)
    return Reader(values, config.path)
