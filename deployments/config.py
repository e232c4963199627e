"""The configuration: one YAML file -> frozen models. Every knob has its unit, default and reason
here.

Reading it needs no torch, no Ray and no GPU, and it fails before any of them is touched: a
ConfigError lists all problems, each with file, line, key and, for a misspelt key, the nearest right
one.
"""

import difflib
import logging
import os
import re
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from deployments import yaml_lines
from engine.config import EngineConfig
from engine.errors import ConfigError

logger = logging.getLogger("manta.config")

_NAME = r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}$"
_OWNED_BY_TOP = ("model", "revision")  # fields of EngineConfig that are set at the top of the file
_OTHER_VARIABLES = ("MANTA_CACHE", "MANTA_CONFIG")
_MODEL_CONFIG = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=False)


@cache
def _engine_model() -> type[BaseModel]:
    """EngineConfig's fields as a pydantic model, so that its faults are reported like all
    others."""
    hints = typing.get_type_hints(EngineConfig)
    fields: dict[str, Any] = {}
    for field in msgspec.structs.fields(EngineConfig):
        if field.name not in _OWNED_BY_TOP:
            kind = hints[field.name]
            lists = typing.get_origin(kind) is tuple  # YAML has lists only
            fields[field.name] = (kind, Field(field.default, strict=False if lists else None))
    return create_model("EngineOptions", __config__=_MODEL_CONFIG, **fields)


def _engine_options(value: dict[str, Any]) -> dict[str, Any]:
    errors: list[Any] = []
    try:
        _engine_model().model_validate(value)
        EngineConfig(model="", **{**value, "graph_sizes": tuple(value.get("graph_sizes", ()))})
    except ValidationError as error:
        errors = list(error.errors())
    except ConfigError as error:
        loc = (error.param,) if error.param else ()
        errors = [{"loc": loc, "msg": error.message, "type": "engine"}]
    if errors:
        raise PydanticCustomError("nested", "engine options", {"errors": errors})
    return value


EngineOptions = Annotated[dict[str, Any], AfterValidator(_engine_options)]


class _Section(BaseModel):
    model_config = _MODEL_CONFIG


class PoolConfig(_Section):
    """Engine replicas of one kind: one Serve deployment."""

    replicas: int = Field(
        1, ge=0, le=4096, description="Engine replicas. 1: the least that serves."
    )
    num_cpus: float | None = Field(
        None,
        ge=0,
        le=1024,
        description="CPU cores that Ray reserves for a replica; its step uses as many threads. "
        "Default: 1 in a gpu pool (the step loop); in a cpu pool the machine's cores shared out "
        "among the replicas.",
    )
    num_gpus: float | None = Field(
        None,
        ge=0,
        le=64,
        description="GPUs of a replica. Default: 1 in a gpu pool, 0 in a cpu pool.",
    )
    resources: dict[str, float] = Field(
        default_factory=dict, description="Custom Ray resources of a replica, e.g. {pool_a: 0.001}."
    )
    labels: dict[str, str] = Field(
        default_factory=dict,
        description="Ray node labels that a replica's node must have, e.g. {pool: gpu}.",
    )
    engine: EngineOptions = Field(
        default_factory=dict,
        description="EngineConfig fields that differ from `engine` in this pool.",
    )


class RouterConfig(_Section):
    """The routers: HTTP, tokenising, the ledger of requests, the choice of a replica."""

    replicas: int = Field(
        2,
        ge=1,
        le=256,
        description="Router processes. Fixed, because a change reloads the HTTP edge, which cuts "
        "long streams; 2, so that one can fail.",
    )
    num_cpus: float = Field(
        0.0,
        ge=0,
        le=64,
        description="CPU cores that Ray reserves for each. 0: on a small machine the engines get "
        "them all, and a router that is idle needs none.",
    )
    wait_seconds: float = Field(
        30.0,
        ge=0,
        le=3600,
        description="How long a request waits when no replica is ready, then 503 no_replica. 30 "
        "s: a replaced replica of a small model is back by then, and clients' own limits are "
        "longer.",
    )
    losses: int = Field(
        1,
        ge=0,
        le=100,
        description="Replicas that a request may lose without one new token before it fails: it "
        "may be the cause.",
    )
    heartbeat_seconds: float = Field(
        1.0, gt=0, le=60, description="Between signs of life on a channel. Costs nothing at 1 s."
    )
    silence_seconds: float = Field(
        5.0,
        gt=0,
        le=600,
        description="A channel silent for so long is dead and its requests move. Five beats: a "
        "busy interpreter may miss one.",
    )

    @model_validator(mode="after")
    def _order(self) -> "RouterConfig":
        if self.silence_seconds < 2 * self.heartbeat_seconds:
            raise ValueError("silence_seconds must be at least twice heartbeat_seconds")
        return self


class HttpConfig(_Section):
    """The HTTP edge."""

    host: str = Field(
        "127.0.0.1",
        min_length=1,
        max_length=255,
        description="Address to listen on. Loopback: nothing is open to the network until you "
        "say so; on a single machine the engines' channels then stay on loopback too.",
    )
    port: int = Field(
        8000, ge=1, le=65535, description="Port to listen on. 8000: Serve's own default."
    )
    proxy: Literal["auto", "haproxy", "serve"] = Field(
        "auto",
        description="What stands before the routers. haproxy costs about 12 us of CPU a streamed "
        "chunk, Serve's own proxy about 300. auto: haproxy where its binary is installed.",
    )
    max_stream_seconds: int = Field(
        3600,
        ge=1,
        le=7 * 86400,
        description="The longest stream that survives a change at the edge (haproxy's hard stop). "
        "1 h: longer than any answer, short enough that old processes go.",
    )
    api_keys_file: str | None = Field(
        None,
        description="File with one API key a line, readable by its owner only. Default none: no "
        "key is asked for, which suits loopback.",
    )
    strict: bool = Field(
        False,
        description="Refuse unknown request fields instead of naming them in x-ignored-fields. "
        "Off: clients send fields of other servers.",
    )


class LimitsConfig(_Section):
    """Bounds on what the service takes in."""

    in_flight: int = Field(
        4096,
        ge=1,
        le=1_000_000,
        description="Requests in flight a router, then 503 overloaded. 4096: haproxy's connection "
        "limit.",
    )
    waiting: int = Field(
        1024,
        ge=0,
        le=1_000_000,
        description="Requests a router that may wait while no replica is ready.",
    )
    body_bytes: int = Field(
        4 * 2**20,
        ge=1024,
        le=2**30,
        description="Bytes of a request body, checked while reading. 4 MiB: a million characters "
        "of prompt with room.",
    )
    drain_seconds: float = Field(
        60.0,
        ge=0,
        le=3600,
        description="How long a replica that is to stop lets its requests end before they move "
        "elsewhere.",
    )
    stall_seconds: float = Field(
        30.0,
        ge=1,
        le=3600,
        description="An engine with work and no step for so long is replaced. 30 s: the first "
        "steps may compile.",
    )


class MantaConfig(_Section):
    """One served model."""

    model: str = Field(
        "default",
        min_length=1,
        max_length=4096,
        description="A folder with config.json, a .gguf file, a hub name, or `default`: a small "
        "model out of a package.",
    )
    revision: str | None = Field(
        None, max_length=256, description="Hub revision. Default: the default branch."
    )
    served_name: str | None = Field(
        None,
        pattern=_NAME,
        description="The `model` that requests name. Default: the folder's, file's or hub model's "
        "name.",
    )
    app_name: str = Field(
        "manta",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$",
        description="Serve application name, which other Ray jobs find it by.",
    )
    route_prefix: str = Field(
        "/",
        pattern=r"^/([A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*)?$",
        description="Where its paths begin.",
    )
    engine: EngineOptions = Field(
        default_factory=dict, description="EngineConfig fields for all pools; see engine/config.py."
    )
    replicas: int = Field(
        1,
        ge=0,
        le=4096,
        description="Engine replicas, where there is one pool: gpu if a GPU is there, else cpu.",
    )
    pools: dict[Literal["gpu", "cpu"], PoolConfig] = Field(
        default_factory=dict, description="Engine replicas by kind, instead of `replicas`."
    )
    router: RouterConfig = Field(default_factory=RouterConfig)
    http: HttpConfig = Field(default_factory=HttpConfig)
    limits: LimitsConfig = Field(default_factory=LimitsConfig)

    @model_validator(mode="after")
    def _one_way(self) -> "MantaConfig":
        if self.pools and "replicas" in self.model_fields_set:
            raise ValueError("replicas and pools are both set; give the counts in pools")
        if self.pools and not any(pool.replicas for pool in self.pools.values()):
            raise ValueError("pools: all replicas are 0, so nothing would ever answer")
        if not self.pools and not self.replicas:
            raise ValueError("replicas is 0, so nothing would ever answer")
        return self

    def engine_options(self, pool: PoolConfig) -> dict[str, Any]:
        """EngineConfig's fields for a pool, model and revision included."""
        return {"model": self.model, "revision": self.revision, **self.engine, **pool.engine}

    def name(self) -> str:
        """What requests call the model."""
        if self.served_name is not None:
            return self.served_name
        if self.model == "default":
            return "SmolLM2-135M-Instruct"
        path = Path(self.model)
        return path.stem if path.suffix == ".gguf" else path.name


def load_config(
    path: str | Path, environment: Mapping[str, str] | None = None, *, check_model: bool = True
) -> MantaConfig:
    """Read, validate and check a configuration file, the model's folder included.

    environment: variables MANTA_<KEY> override single values, e.g. MANTA_HTTP_PORT; default
    os.environ. A relative `model` or `api_keys_file` is looked for beside the file, then in the
    working directory. Raises ConfigError listing all problems.
    """
    path = Path(path).expanduser()
    try:
        with path.open("rb") as file:
            raw = file.read(yaml_lines.MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}", param=str(path)) from None
    try:
        parsed = yaml_lines.parse(raw.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text", param=str(path)) from None
    except yaml_lines.YamlProblem as problem:
        where = f"{path}:{problem.line}" if problem.line else str(path)
        raise ConfigError(f"{where}: {problem.message}", param=str(path)) from None
    return _build(parsed, str(path), path.parent, environment, check_model)


def parse_config(
    data: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    *,
    check_model: bool = True,
) -> MantaConfig:
    """The same for a mapping, e.g. a Serve config file's `args`; {} is all defaults."""
    parsed = yaml_lines.Lines(dict(data or {}))
    return _build(parsed, "configuration", Path.cwd(), environment, check_model)


def default_config() -> MantaConfig:
    """The file that the variable MANTA_CONFIG names, or all defaults. Raises ConfigError."""
    path = os.environ.get("MANTA_CONFIG")
    return load_config(path) if path else parse_config()


def read_api_keys(path: str | Path) -> tuple[str, ...]:
    """The keys in a file, one a line; # begins a comment line. Raises ConfigError: missing, empty,
    readable by others."""
    path = Path(path).expanduser()
    try:
        mode = path.stat().st_mode
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8 text'}",
            param="http.api_keys_file",
        ) from None
    if mode & 0o077:
        raise ConfigError(
            f"{path}: other users may read it; chmod 600 {path}", param="http.api_keys_file"
        )
    keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"{path}: no key in it", param="http.api_keys_file")
    return keys


def _build(
    parsed: yaml_lines.Lines,
    source: str,
    folder: Path,
    environment: Mapping[str, str] | None,
    check_model: bool,
) -> MantaConfig:
    data = {} if parsed.data is None else parsed.data
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: must be a mapping of keys, such as `model: default`")
    _apply_environment(data, os.environ if environment is None else environment)
    for path in (("model",), ("http", "api_keys_file")):
        _make_absolute(data, path, folder)
    try:
        config = MantaConfig.model_validate(data)
    except ValidationError as error:
        errors = sorted(_flatten(error.errors()), key=lambda item: parsed.line(item["loc"]))
        problems = [_describe(item, parsed, source) for item in errors]
        raise ConfigError("\n".join(problems)) from None
    try:
        if check_model:
            _check_model(config)
        if config.http.api_keys_file is not None:
            read_api_keys(config.http.api_keys_file)
    except ConfigError as error:
        key = tuple((error.param or "").split("."))
        line = parsed.line(key)
        where = f"{source}:{line}" if line else source
        raise ConfigError(f"{where}: {error.param}: {error.message}", param=error.param) from None
    return config


def _check_model(config: MantaConfig) -> None:
    """What can be told of the model without loading it. Raises ConfigError (param model)."""
    from deployments import models
    from engine.model_config import ModelConfig

    options = [config.engine_options(pool) for pool in config.pools.values()] or [config.engine]
    dummy = all(option.get("load_format") == "dummy" for option in options)
    models.check_model(config.model, weights=not dummy)
    if Path(config.model).is_dir():
        try:
            ModelConfig.from_folder(config.model)
        except ConfigError as error:
            raise ConfigError(error.message, param="model") from None


def _make_absolute(data: dict[str, Any], path: tuple[str, ...], folder: Path) -> None:
    """A relative path that exists beside the file or here becomes absolute: the cluster has another
    directory."""
    *parents, key = path
    for parent in parents:
        section = data.get(parent)
        if not isinstance(section, dict):
            return
        data = section
    value = data.get(key)
    if not isinstance(value, str) or not value or "\0" in value:
        return
    for base in (folder, Path.cwd()):
        found = base / Path(value).expanduser()
        if found.exists():
            data[key] = str(found.resolve())
            return


# -- messages


def _flatten(errors: list[ErrorDetails]) -> Iterator[dict[str, Any]]:
    for error in errors:
        nested = error.get("ctx", {}).get("errors") if error["type"] == "nested" else None
        if nested is None:
            yield {**error}
            continue
        for inner in nested:
            yield {**inner, "loc": (*error["loc"], *inner["loc"])}


def _describe(error: dict[str, Any], parsed: yaml_lines.Lines, source: str) -> str:
    """One problem: where, which key, what."""
    loc = tuple(part for part in error["loc"] if part != "[key]")
    line = parsed.line(loc)
    where = f"{source}:{line}" if line else source
    key = ".".join(str(part) for part in loc)
    if error["type"] == "extra_forbidden" or "[key]" in error["loc"]:
        known = _known_keys(loc[:-1])
        near = difflib.get_close_matches(str(loc[-1]), known, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
        return f"{where}: {key}: unknown key; {hint}"
    message = error["msg"].removeprefix("Value error, ")
    message = message.replace("Input should be", "must be")
    shown = _lookup(parsed.data, loc)
    if error["type"] != "engine" and isinstance(shown, str | int | float):
        message += f", got {str(shown)[:64]!r}" if isinstance(shown, str) else f", got {shown}"
    return f"{where}: {key}: {message}" if key else f"{where}: {message}"


def _known_keys(path: tuple[str | int, ...]) -> list[str]:
    """The keys that a mapping at this path may have."""
    if path and path[-1] == "engine":
        return list(_engine_model().model_fields)
    if path == ("pools",):
        return ["gpu", "cpu"]
    if path and path[0] == "pools":
        return list(PoolConfig.model_fields)
    section: type[BaseModel] = MantaConfig
    for part in path:
        kind = section.model_fields[str(part)].annotation
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            return []
        section = kind
    return list(section.model_fields)


def _lookup(data: Any, path: tuple[str | int, ...]) -> Any:
    for part in path:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return None
    return data


# -- environment


def environment_names() -> dict[str, tuple[str, ...]]:
    """MANTA_<KEY> -> key path, for every single value of the configuration."""
    names: dict[str, tuple[str, ...]] = {}
    for key, field in MantaConfig.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            for inner in kind.model_fields:
                names[f"MANTA_{key}_{inner}".upper()] = (key, inner)
        elif key == "engine":
            for inner in _engine_model().model_fields:
                names[f"MANTA_{key}_{inner}".upper()] = (key, inner)
        elif key != "pools":
            names[f"MANTA_{key}".upper()] = (key,)
    return names


def _apply_environment(data: dict[str, Any], environment: Mapping[str, str]) -> None:
    names = environment_names()
    for variable, text in environment.items():
        if not re.match(r"MANTA_", variable) or variable in _OTHER_VARIABLES:
            continue
        path = names.get(variable)
        if path is None:
            near = difflib.get_close_matches(variable, [*names, *_OTHER_VARIABLES], n=1)
            logger.warning(
                "environment variable %s means nothing to Manta%s",
                variable,
                f"; did you mean {near[0]}?" if near else "",
            )
            continue
        try:
            value = yaml_lines.plain_value(text)
        except yaml_lines.YamlProblem as problem:
            raise ConfigError(f"environment variable {variable}: {problem.message}") from None
        *parents, key = path
        target = data
        for parent in parents:
            target = target.setdefault(parent, {})
            if not isinstance(target, dict):
                break
        else:
            target[key] = value
