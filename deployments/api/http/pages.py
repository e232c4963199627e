"""page_of: a page of a list, in the form of OpenAI's lists."""

from collections.abc import Mapping, Sequence

from deployments.api.http.errors import invalid, shown
from deployments.api.http.json_body import JsonObject


def page_of(
    items: Sequence[JsonObject], query: Mapping[str, str], usual: int, most: int, kind: str = ""
) -> JsonObject:
    """Return the page of a list that `after` and `limit` of a query ask for.

    items: objects with an id, in the order of the list
    usual, most: the limit where the query has none, and the greatest limit
    kind: the word for an item in errors, with a space; "": none

    Raises ApiError 400.
    """
    limit, after = query.get("limit", str(usual)), query.get("after")
    if not limit.isdecimal() or not 1 <= int(limit) <= most:
        raise invalid(f"limit must be 1 to {most}", "limit")
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise invalid(f"there is no {kind}{shown(after)}", "after")
        items = items[ids.index(after) + 1 :]
    page = items[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > len(page),
    }
