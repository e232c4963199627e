"""Compares an adapter's base model with the served model, by name. No torch here."""

import re

# Suffixes of model names on disk: the quantisation, or a hash of Manta's cache.
_SUFFIX = re.compile(r"(?i)([-._](q\d\w*|iq\d\w*|int[48]|fp?(8|16|32)|bf16|gguf|[0-9a-f]{12}))+$")
# a folder of the hub's cache
_SNAPSHOT = re.compile(r"models--(?:[^/]+--)?([^/]+)/snapshots/[^/]+$")


def model_name(path: str) -> str:
    """Return a model's name without its folder, quantisation and file ending.

    "meta-llama/Llama-3.1-8B", ".../Llama-3.1-8B.Q4_K_M.gguf" and the hub's cache have the same
    name.
    """
    path = path.replace("\\", "/").rstrip("/")
    snapshot = _SNAPSHOT.search(path)
    return _SUFFIX.sub("", snapshot[1] if snapshot else path.rsplit("/", 1)[-1])


def another_model(base: str, model: str) -> str:
    """Return a warning if an adapter was trained for another model, else "".

    base: the adapter's base_model_name_or_path; "" if it has none.
    model: the path of the served model.
    """
    if not base or model_name(base).lower() == model_name(model).lower():
        return ""
    return f"it was trained for {base[:200]!r}, and this model is {model_name(model)!r}"
