"""The options and requests that commands to a running server share."""

from pathlib import Path
from typing import Annotated, Any

import typer

HERE = "http://127.0.0.1:8000"
# Commands take the server's URL in either way.
Url = Annotated[str | None, typer.Option(help=f"Server to talk to; default: {HERE}.")]
UrlArgument = Annotated[str | None, typer.Argument(metavar="URL", help="The same as --url.")]
AdminKey = Annotated[
    Path | None,
    typer.Option(help="File with a key of http.admin_keys_file; default: OPENAI_API_KEY."),
]


def server_url(argument: str | None, option: str | None) -> str:
    """Return the URL that was given in either way, or the default. Raises ConfigError."""
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
    """Return the JSON of the answer. Raises ServerError and ConfigError.

    seconds: how long to wait for the answer; None: as long as a question of status may take.
    """
    from deployments.cli.chat import ChatServer, read_key

    server = ChatServer(url, read_key(key))
    if seconds is None:
        return dict(server.ask(method, path))
    return dict(server.ask(method, path, body, seconds))
