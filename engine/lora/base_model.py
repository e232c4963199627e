"""The base model that an adapter names. No torch here."""

import re

# What is appended to a model's name where its files lie: a hash of our cache, its quantisation.
_SUFFIX = re.compile(r"(?i)([-._](q\d\w*|iq\d\w*|int[48]|fp?(8|16|32)|bf16|gguf|[0-9a-f]{12}))+$")
_SNAPSHOT = re.compile(r"models--(?:[^/]+--)?([^/]+)/snapshots/[^/]+$")  # of the hub's cache


def model_name(path: str) -> str:
    """The name without where it lies: "meta-llama/Llama-3.1-8B", ".../Llama-3.1-8B.Q4_K_M.gguf" and
    the hub's cache of it are one."""
    path = path.replace("\\", "/").rstrip("/")
    snapshot = _SNAPSHOT.search(path)
    return _SUFFIX.sub("", snapshot[1] if snapshot else path.rsplit("/", 1)[-1])


def another_model(base: str, model: str) -> str:
    """Return what to say if an adapter was trained for another model than the one that it is used
    with.

    "" if the adapter's base_model_name_or_path is the model, or says nothing.
    """
    if not base or model_name(base).lower() == model_name(model).lower():
        return ""
    return f"it was trained for {base[:200]!r}, and this model is {model_name(model)!r}"
