"""ItemChat: the fields that the bodies of /v1/responses and /v1/messages share.

Both bodies are read into a chat, so Manta's own fields mean the same as in a chat's body.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta

from deployments.api.fields.common import UINT31
from deployments.api.fields.formats import STRUCTURED_OUTPUTS
from deployments.api.fields.generation import CacheSalt, Sampling, ThinkingBudget, of_schema

Count = Annotated[int, Meta(ge=1, le=UINT31)]


def not_supported(instead: Mapping[str, str]) -> Mapping[str, tuple[str, str]]:
    """Return the errors of fields that are refused. instead: what to do in the place of each."""
    return {
        name: (f"{name} is not supported; {advice}", "not_supported")
        for name, advice in instead.items()
    }


class ItemChat(Sampling, kw_only=True):
    """The fields that the bodies of Responses and Messages share."""

    cache_salt: CacheSalt | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: ThinkingBudget | None = None
    structured_outputs: Annotated[Any, of_schema(STRUCTURED_OUTPUTS.schema)] = None
