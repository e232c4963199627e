"""`manta adapter`: the adapters of a running server, over HTTP."""

import os
from typing import Annotated, Any
from urllib.parse import quote

import typer

from deployments.cli.running import HERE, AdminKey, Url, ask

app = typer.Typer(name="adapter", help="List, add and remove adapters of a running server.")

_Name = Annotated[str, typer.Argument(help="What requests call it.")]
_ADD_SECONDS = 600.0  # for an adapter that the server has to fetch


@app.command("list")
def show(url: Url = HERE, key: AdminKey = None) -> None:
    """Name, rank, revision and folder of each. Without a revision: no request has named it yet."""
    for adapter in ask(url, key, "GET", "/adapters")["data"]:
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
    url: Url = HERE,
    key: AdminKey = None,
) -> None:
    """Serve an adapter, or replace it: requests that run finish on the old weights."""
    # Whether a server is there and takes the key shows at once here; fetching an adapter may take
    # long.
    ask(url, key, "GET", "/adapters")
    body = {"name": name}
    if path is not None:
        body["path"] = path if "://" in path else os.path.abspath(path)
    _print(ask(url, key, "POST", "/adapters", body, _ADD_SECONDS))


@app.command()
def remove(name: _Name, url: Url = HERE, key: AdminKey = None) -> None:
    """Serve an adapter no longer: requests that run finish. Its files stay."""
    ask(url, key, "DELETE", f"/adapters/{quote(name, safe='')}")
    print(f"{name} is removed")


def _print(adapter: dict[str, Any]) -> None:
    rank = f"rank {adapter['rank']}" if adapter["rank"] else adapter["kind"] or "not read"
    print(
        f"{adapter['id']:24} {rank:9} {adapter['revision'] or '-':33} {adapter['source']:7}"
        f"{adapter['path']}"
    )
