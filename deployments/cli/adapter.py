"""`manta adapter`: the adapters of a running server, over HTTP."""

import os
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

app = typer.Typer(name="adapter", help="List, add and remove adapters of a running server.")

_Name = Annotated[str, typer.Argument(help="What requests call it.")]
_Url = Annotated[str, typer.Option(help="Server to talk to.")]
_Key = Annotated[
    Path | None,
    typer.Option(help="File with a key of http.admin_keys_file; default: OPENAI_API_KEY."),
]
_HERE = "http://127.0.0.1:8000"
_ADD_SECONDS = 600.0  # for an adapter that the server has to fetch


@app.command("list")
def show(url: _Url = _HERE, key: _Key = None) -> None:
    """Name, rank, revision and folder of each. Without a revision: no request has named it yet."""
    for adapter in _ask(url, key, "GET", "/adapters")["data"]:
        _print(adapter)


@app.command()
def add(
    name: _Name,
    path: Annotated[
        str | None,
        typer.Argument(
            help="Folder in PEFT's format as the server sees it, or a URL. Default: where it was, "
            "read again."
        ),
    ] = None,
    url: _Url = _HERE,
    key: _Key = None,
) -> None:
    """Serve an adapter, or replace it: requests that run finish on the old weights."""
    # Whether a server is there and takes the key shows at once here; fetching an adapter may take
    # long.
    _ask(url, key, "GET", "/adapters")
    body = {"name": name}
    if path is not None:
        body["path"] = path if "://" in path else os.path.abspath(path)
    _print(_ask(url, key, "POST", "/adapters", body))


@app.command()
def remove(name: _Name, url: _Url = _HERE, key: _Key = None) -> None:
    """Serve an adapter no longer: requests that run finish. Its files stay."""
    _ask(url, key, "DELETE", f"/adapters/{quote(name, safe='')}")
    print(f"{name} is removed")


def _ask(
    url: str, key: Path | None, method: str, path: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    from deployments.cli.chat import ChatServer, read_key

    server = ChatServer(url, read_key(key))
    if body is None:
        return dict(server.ask(method, path))
    return dict(server.ask(method, path, body, _ADD_SECONDS))


def _print(adapter: dict[str, Any]) -> None:
    rank = f"rank {adapter['rank']}" if adapter["rank"] else adapter["kind"] or "not read"
    print(
        f"{adapter['id']:24} {rank:9} {adapter['revision'] or '-':33} {adapter['source']:7}"
        f"{adapter['path']}"
    )
