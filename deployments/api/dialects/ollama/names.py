"""served_name, asked_name: a model's name as Ollama's clients write it."""

from typing import Any

from deployments.api.fields.ollama import Show
from deployments.backend import Backend

_LATEST = ":latest"  # the tag that Ollama's clients append to a name without one


def served_name(name: Any, backend: Backend) -> Any:
    """Return the name without the tag `:latest`, unless a model is served under the name with
    it."""
    if isinstance(name, str) and name.endswith(_LATEST) and name not in backend.models():
        return name.removesuffix(_LATEST)
    return name


def asked_name(body: Show, backend: Backend) -> str | None:
    """Return the model's name in the field `model`, or in `name` of older clients."""
    return served_name(body.name if body.model is None else body.model, backend)
