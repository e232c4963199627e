"""Options shared by the commands for a running server, and `ask`, which sends their requests."""

from pathlib import Path
from typing import Annotated, Any

import typer

HERE = "http://127.0.0.1:8000"
# Commands accept the server's URL both as an option and as an argument.
Url = Annotated[str | None, typer.Option(help=f"Server to talk to; default: {HERE}.")]
UrlArgument = Annotated[str | None, typer.Argument(metavar="URL", help="Instead of --url.")]
AdminKey = Annotated[
    Path | None,
    typer.Option(help="File with a key of http.admin_keys_file; default: OPENAI_API_KEY."),
]


def server_url(argument: str | None, option: str | None) -> str:
    """Return the server's URL from the argument, the option or the default. Raises ConfigError."""
    if argument is not None and option is not None and argument != option:
        from engine.errors import ConfigError

        raise ConfigError(f"the server is {argument} or --url {option}; name one", param="--url")
    return argument or option or HERE


def ask(
    url: str,
    key: Path | None,
    method: str,
    path: str,
    body: dict[str, Any] | None = None,
    seconds: float | None = None,
) -> dict[str, Any]:
    """Send a request to a server and return the JSON of its response.

    key: file with the API key.
    path: path after /v1.
    seconds: maximum wait for the response; None: a few seconds, enough for status requests.

    Raises ServerError and ConfigError.
    """
    from deployments.cli.chat import ChatServer, read_key

    server = ChatServer(url, read_key(key))
    if seconds is None:
        return dict(server.ask(method, path))
    return dict(server.ask(method, path, body, seconds))
