"""What commands about a running server share: whom they talk to, and how they ask."""

from pathlib import Path
from typing import Annotated, Any

import typer

HERE = "http://127.0.0.1:8000"
Url = Annotated[str, typer.Option(help="Server to talk to.")]
AdminKey = Annotated[
    Path | None,
    typer.Option(help="File with a key of http.admin_keys_file; default: OPENAI_API_KEY."),
]


def ask(
    url: str,
    key: Path | None,
    method: str,
    path: str,
    body: dict[str, Any] | None = None,
    seconds: float | None = None,
) -> dict[str, Any]:
    """The answer's JSON. seconds: to wait for it; None: as long as a look takes. Raises ServerError
    and ConfigError."""
    from deployments.cli.chat import ChatServer, read_key

    server = ChatServer(url, read_key(key))
    if seconds is None:
        return dict(server.ask(method, path))
    return dict(server.ask(method, path, body, seconds))
