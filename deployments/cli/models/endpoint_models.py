"""`manta models`: list and change the models of a running server of several models, over HTTP."""

import time
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from deployments.cli.console import StatusLine
from deployments.cli.server_requests import AdminKey, Url, UrlArgument, ask, server_url

app = typer.Typer(name="models", help="List, add, change and remove models of a running server.")

_Name = Annotated[str, typer.Argument(help="Name of the model in requests.")]
# Maximum seconds for the server to accept a change, which does not include the start of replicas.
_CHANGE_SECONDS = 120.0
_POLL = 1.0
_KNOWN_SECONDS = 30.0  # seconds until all routers know a new model; they poll every second


@app.command("list")
def show(server: UrlArgument = None, url: Url = None, key: AdminKey = None) -> None:
    """Print name, status, context and aliases of each model."""
    for model in ask(server_url(server, url), key, "GET", "/models")["data"]:
        if model["parent"] is None:
            aliases = ", ".join(model.get("aliases", ()))
            length = f"{model['max_model_len']:,} tokens"
            print(
                f"{model['id']:24} {model.get('status', 'served'):9} {length:16} {aliases}".rstrip()
            )


@app.command()
def add(
    name: _Name,
    spec: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG|MODEL",
            help="A .yaml file with the keys of `models.NAME`, or a model as the server sees it: "
            "'default', a folder, a .gguf file, a hub name.",
        ),
    ],
    server: UrlArgument = None,
    wait: Annotated[bool, typer.Option(help="Wait until it is ready.")] = True,
    url: Url = None,
    key: AdminKey = None,
) -> None:
    """Serve a model, or change one. The other models go on as they are."""
    url = server_url(server, url)
    ask(url, key, "POST", "/models", {**_section(spec), "name": name}, _CHANGE_SECONDS)
    if not wait:
        print(f"{name} is starting")
        return
    from deployments.cli.chat import ServerError

    began = time.monotonic()
    with StatusLine(f"Starting {name}") as status:
        while True:
            outcome = _outcome(name, url, key, time.monotonic() - began)
            if outcome.get("status") == "ready":
                break
            if outcome.get("status") == "failed":
                raise ServerError(f"{name} does not start: {outcome['message']}")
            why = f": {outcome['message']}" if "message" in outcome else ""
            status.update(f"Starting {name}: {time.monotonic() - began:.0f} s{why}")
            time.sleep(_POLL)
    print(f"{name} is ready")


@app.command()
def remove(name: _Name, server: UrlArgument = None, url: Url = None, key: AdminKey = None) -> None:
    """Stop serving a model: its running requests may finish, and its files stay."""
    path = f"/models/{quote(name, safe='')}"
    ask(server_url(server, url), key, "DELETE", path, None, _CHANGE_SECONDS)
    print(f"{name} is removed")


def _outcome(name: str, url: str, key: Path | None, seconds: float) -> dict[str, Any]:
    """Return a router's report on a model that was just added: GET /v1/models/NAME.

    The answering router may not know the model yet, so 404 counts as "starting" at first.

    seconds: time since the model was added.

    Raises ServerError.
    """
    from deployments.cli.chat import ServerError

    try:
        return ask(url, key, "GET", f"/models/{quote(name, safe='')}")
    except ServerError as error:
        if error.status == 404 and seconds < _KNOWN_SECONDS:
            return {"status": "starting"}
        raise


def _section(spec: str) -> dict[str, Any]:
    """Return the keys of `models.NAME` from a .yaml file or a model's name. Raises ConfigError."""
    from deployments.config.yaml_lines import YamlProblem, parse
    from engine.errors import ConfigError

    path = Path(spec).expanduser()
    if path.suffix not in (".yaml", ".yml"):
        return {"model": str(path.absolute()) if path.exists() else spec}
    try:
        section = parse(path.read_text("utf-8-sig")).data
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{spec}: {getattr(error, 'strerror', None) or error}") from None
    except YamlProblem as problem:
        raise ConfigError(f"{spec}:{problem.line}: {problem.message}") from None
    if not isinstance(section, dict):
        raise ConfigError(f"{spec}: must be a mapping of keys, such as `model: default`")
    if "name" in section:
        raise ConfigError(f"{spec}: name: unknown key; the name is given on the command line")
    return section
