"""GET /page: the page; GET /page/{name}: its scripts and styles.

Both need no key, because they are the same for everyone and show nothing of what is served. The
requests that the page makes need one.
"""

from deployments.api.context import ApiContext
from deployments.api.http.errors import ApiError, shown
from deployments.api.http.exchange import HttpExchange
from deployments.api.page.files import INDEX, page_files
from deployments.api.route import ANY, HTML, Operation, Route

PAGE = "/page"
FILES = f"{PAGE}/"


async def page(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer a file of the page. Raises ApiError 404 without such a file, or if the page is off."""
    if not context.options.page:
        message = "the page is off; http.page in the configuration turns it on"
        raise ApiError(404, "not_found", message)
    name = exchange.path[len(FILES) :] or INDEX
    file = page_files().get(name)
    if file is None:
        message = f"the page has no file {shown(name)}; it is at {PAGE}"
        raise ApiError(404, "not_found", message)
    same = exchange.headers.get(b"if-none-match") == [file.tag.encode()]
    body = b"" if same else file.content
    await exchange.answer(304 if same else 200, body, file.content_type, file.headers)


ROUTES = (
    Route(
        PAGE,
        page,
        get=Operation("A page to talk to it and look into it", (404,), kinds=(HTML,)),
        open=True,
    ),
    Route(
        f"{FILES}{{name}}",
        page,
        get=Operation("Its scripts and styles", (404,), kinds=(ANY,)),
        open=True,
    ),
)
