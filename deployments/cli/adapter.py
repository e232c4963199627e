"""`manta adapter`: the adapters of a running server, over HTTP."""

import os
from typing import Annotated, Any
from urllib.parse import quote, urlencode

import typer

from deployments.cli.server_requests import AdminKey, Url, UrlArgument, ask, server_url

app = typer.Typer(name="adapter", help="List, add and remove adapters of a running server.")

_Name = Annotated[str, typer.Argument(help="Name of the adapter in requests.")]
_Model = Annotated[
    str | None, typer.Option(help="Base model of the adapter; needed where several are served.")
]
_ADD_SECONDS = 600.0  # maximum seconds for the server to download an adapter


@app.command("list")
def show(
    server: UrlArgument = None, model: _Model = None, url: Url = None, key: AdminKey = None
) -> None:
    """Print the name, rank, revision and folder of each adapter.

    The model comes first if there are adapters of several models. An adapter that no request has
    named yet has no revision.
    """
    url = server_url(server, url)
    adapters = ask(url, key, "GET", f"/adapters{_query(model)}")["data"]
    several = len({adapter["model"] for adapter in adapters}) > 1
    for adapter in adapters:
        _print(adapter, f"{adapter['model']}:" if several else "")


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
    model: _Model = None,
    url: Url = None,
    key: AdminKey = None,
) -> None:
    """Serve an adapter, or replace it: running requests finish on the old weights."""
    # A first, quick request checks that the server runs and accepts the key, because downloading an
    # adapter may take long. The second argument is the adapter's URL, not the server's.
    server = server_url(None, url)
    ask(server, key, "GET", "/adapters")
    body = {"name": name}
    if path is not None:
        body["path"] = path if "://" in path else os.path.abspath(path)
    if model is not None:
        body["model"] = model
    _print(ask(server, key, "POST", "/adapters", body, _ADD_SECONDS))


@app.command()
def remove(
    name: _Name,
    server: UrlArgument = None,
    model: _Model = None,
    url: Url = None,
    key: AdminKey = None,
) -> None:
    """Stop serving an adapter: running requests finish, and its files stay."""
    ask(server_url(server, url), key, "DELETE", f"/adapters/{quote(name, safe='')}{_query(model)}")
    print(f"{name} is removed")


def _query(model: str | None) -> str:
    return "" if model is None else "?" + urlencode({"model": model})


def _print(adapter: dict[str, Any], before: str = "") -> None:
    rank = f"rank {adapter['rank']}" if adapter["rank"] else adapter["kind"] or "not read"
    name, revision = before + adapter["id"], adapter["revision"] or "-"
    print(f"{name:24} {rank:9} {revision:33} {adapter['source']:7}{adapter['path']}")
