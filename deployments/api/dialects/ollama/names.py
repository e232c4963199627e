"""served_name, asked_name: a model's name as Ollama's clients write it."""

from typing import Any

from deployments.api.http.errors import wrong_type
from deployments.backend import Backend

_LATEST = ":latest"  # what Ollama's clients put behind a name that has no tag


def served_name(name: Any, backend: Backend) -> Any:
    """Return the name without the tag that says nothing, unless it is one that is served."""
    if isinstance(name, str) and name.endswith(_LATEST) and name not in backend.models():
        return name.removesuffix(_LATEST)
    return name


def asked_name(body: dict[str, Any], backend: Backend) -> Any:
    """The field `model`, or `name` of older clients. Raises ApiError 400."""
    for field in ("name", "model"):
        if body.get(field) is not None and not isinstance(body[field], str):
            raise wrong_type(field, "a string")
    asked = body.get("model")
    return served_name(body.get("name") if asked is None else asked, backend)
