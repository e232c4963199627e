"""load_config: reads a YAML file into a `MantaConfig`, whose keys models.py explains.

Loading needs no torch, no Ray and no GPU, and fails before any of them is used. A ConfigError lists
all problems, each with file, line, key and, for a misspelt key, the nearest known key.
"""

import difflib
import itertools
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from deployments.config import yaml_lines
from deployments.config.adapters import make_absolute
from deployments.config.endpoint import HttpConfig, LimitsConfig, RouterConfig
from deployments.config.engine_options import engine_model, flatten
from deployments.config.keys import read_api_keys
from deployments.config.models import PART, MantaConfig, ServedModelConfig
from deployments.config.pools import PoolConfig, PoolKind
from deployments.config.tls import check_certificate
from engine.errors import ConfigError

if TYPE_CHECKING:
    from engine.config.model_config import ModelConfig

__all__ = [
    "HttpConfig",
    "LimitsConfig",
    "MantaConfig",
    "PoolConfig",
    "PoolKind",
    "RouterConfig",
    "default_config",
    "environment_names",
    "load_config",
    "named_config",
    "parse_config",
    "parse_part",
]

logger = logging.getLogger("manta.config")

_OTHER_VARIABLES = ("MANTA_CACHE", "MANTA_CONFIG", "MANTA_EDGE")


def load_config(
    path: str | Path, environment: Mapping[str, str] | None = None, *, complete: bool = True
) -> MantaConfig:
    """Read, validate and check a configuration file and the model folders that it names.

    Relative paths of existing files and folders (models, keys, certificates, adapters) are looked
    for beside the file, then in the working directory. `usage.file` and `batch.folder`, which need
    not exist yet, are relative to the file's folder.

    environment: variables MANTA_<KEY>, such as MANTA_HTTP_PORT, that override single values; None:
        os.environ.
    complete: whether the model's folder must have a tokenizer and weights.

    Raises ConfigError that lists all problems.
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
    if parsed.data is None:
        # The file may have been cut short, or another file was meant.
        message = f"{path}: there is nothing in it; the least is `model: default`"
        raise ConfigError(message, param=str(path))
    arguments = str(path), path.parent, environment
    return _build(parsed, *arguments, check_files=True, complete=complete)


def parse_config(
    data: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    *,
    check_files: bool = True,
) -> MantaConfig:
    """Validate and check a configuration given as a mapping, such as `args` of a Serve config file.

    data: keys of the configuration; None or {}: all defaults.
    environment: see `load_config`.
    check_files: whether to check the files that the configuration names. False for a configuration
        that was checked when it was deployed: the files may have changed since, or be on another
        machine.

    Raises ConfigError.
    """
    parsed = yaml_lines.YamlDocument(dict(data or {}))
    return _build(parsed, "configuration", Path.cwd(), environment, check_files=check_files)


def parse_part(data: Mapping[str, Any]) -> MantaConfig:
    """Return a part of a configuration that was checked as a whole.

    Files are not checked, as they may have changed, nor is the consistency of the sections, as some
    may be missing. Raises ConfigError.
    """
    parsed = yaml_lines.YamlDocument(dict(data))
    return _build(parsed, "configuration", Path.cwd(), {}, check_files=False, whole=False)


def named_config() -> MantaConfig | None:
    """Return the configuration in the file that MANTA_CONFIG names; None if the variable is not
    set.

    Raises ConfigError.
    """
    path = os.environ.get("MANTA_CONFIG")
    return load_config(path) if path else None


def default_config() -> MantaConfig:
    """Return the configuration in the file that MANTA_CONFIG names, or all defaults without it.

    Raises ConfigError.
    """
    return named_config() or parse_config()


def _build(
    parsed: yaml_lines.YamlDocument,
    source: str,
    folder: Path,
    environment: Mapping[str, str] | None,
    *,
    check_files: bool,
    complete: bool = True,
    whole: bool = True,
) -> MantaConfig:
    """Return the configuration of a parsed document.

    source: name of the document, for error messages.
    folder: folder in which relative paths are looked for first, before the working directory.
    check_files, complete: as in `parse_config` and `load_config`.
    whole: whether to check the consistency of the sections, too.

    Raises ConfigError.
    """
    data = {} if parsed.data is None else parsed.data
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: must be a mapping of keys, such as `model: default`")
    _apply_environment(data, os.environ if environment is None else environment)
    several = data.get("models")
    several = several if isinstance(several, dict) else {}
    for path in (
        ("model",),
        *(("models", name, "model") for name in several),
        ("http", "api_keys_file"),
        ("http", "admin_keys_file"),
        ("http", "tls", "certificate"),
        ("http", "tls", "key"),
    ):
        _make_absolute(data, path, folder)
    for section in (data, *several.values()):
        _read_template(section, folder, source)
    _beside(data.get("usage"), "file", folder)
    _beside(data.get("batch"), "folder", folder)
    for section in (data, *several.values()):
        if isinstance(section, dict):
            make_absolute(section.get("adapters"), lambda value: _found(value, folder))
    try:
        config = MantaConfig.model_validate(data, context={PART: True} if not whole else None)
    except ValidationError as error:
        errors = sorted(flatten(error.errors()), key=lambda item: parsed.line(item["loc"]))
        problems = [_describe(item, parsed, source) for item in errors]
        raise ConfigError("\n".join(problems)) from None
    try:
        if check_files:
            _check_files(config, complete)
    except ConfigError as error:
        key = tuple((error.param or "").split("."))
        line = parsed.line(key)
        where = f"{source}:{line}" if line else source
        raise ConfigError(f"{where}: {error.param}: {error.message}", param=error.param) from None
    return config


def _check_files(config: MantaConfig, complete: bool) -> None:
    """Check the files of models, adapters, API keys and the certificate. Raises ConfigError.

    complete: see `load_config`.
    """
    for name, part in config.by_model().items():
        with _under(f"models.{name}." if config.models else ""):
            check_model_files(part, complete)
    for name in ("api_keys_file", "admin_keys_file"):
        if (file := getattr(config.http, name)) is not None:
            read_api_keys(file, f"http.{name}")
    if config.http.tls.certificate and config.http.tls.key:
        check_certificate(config.http.tls.certificate, config.http.tls.key)


@contextmanager
def _under(prefix: str) -> Iterator[None]:
    """A context manager that puts a prefix before the key (`param`) of a ConfigError raised
    inside."""
    try:
        yield
    except ConfigError as error:
        error.param = f"{prefix}{error.param}"
        raise


def check_model_files(config: MantaConfig, complete: bool = True) -> None:
    """Check one model's files without loading them, and its adapters' folders.

    complete: see `load_config`.

    Raises ConfigError, whose param is a key of the model.
    """
    _check_model(config, complete)
    config.adapters.check_folders()


def _check_model(config: MantaConfig, complete: bool) -> None:
    """Check the model's files without loading them. Raises ConfigError (param model).

    complete: as in `load_config`.
    """
    from deployments.checkpoints import resolve as models
    from engine.config.model_config import ModelConfig

    pools = config.engine_pools.values()
    options = [config.engine_options(pool) for pool in pools] or [config.engine]
    dummy = all(option.get("load_format") == "dummy" for option in options)
    if complete or not (Path(config.model) / "config.json").is_file():
        models.check_model(config.model, weights=not dummy)
    if Path(config.model).is_dir():
        try:
            model = ModelConfig.from_folder(config.model)
        except ConfigError as error:
            raise ConfigError(error.message, param="model") from None
        check_encoders(config, model)


def check_encoders(config: MantaConfig, model: "ModelConfig") -> None:
    """Check that the model has a vision encoder, if there is an encoder pool. Raises
    ConfigError."""
    for name in config.encoders if model.vision is None else ():
        raise ConfigError(
            "the model sees no images, so there is nothing to encode; leave the pool out, or take "
            "a model that sees images, with its processor's files (docs/images.md)",
            param=f"pools.{name}.role",
        )


def _make_absolute(data: dict[str, Any], path: tuple[str, ...], folder: Path) -> None:
    """Make a relative path of the configuration absolute if it exists, in place.

    The cluster's processes have another working directory.

    path: keys that lead to the value.
    folder: folder of the configuration file.
    """
    *parents, key = path
    for parent in parents:
        section = data.get(parent)
        if not isinstance(section, dict):
            return
        data = section
    value = data.get(key)
    if isinstance(value, str) and value:
        data[key] = _found(value, folder)


def _beside(section: Any, key: str, folder: Path) -> None:
    """Resolve a relative path of a section against the configuration file's folder, in place.

    The file or folder need not exist yet.

    key: key of the path in the section.
    """
    value = section.get(key) if isinstance(section, dict) else None
    if isinstance(value, str) and value and "\0" not in value:
        section[key] = str((folder / Path(value).expanduser()).absolute())


def _read_template(section: Any, folder: Path, source: str) -> None:
    """Replace the path of a section's chat template by the file's text, in place.

    Other nodes of the cluster do not have the file. Raises ConfigError.

    source: name of the configuration, for error messages.
    """
    value = section.get("chat_template") if isinstance(section, dict) else None
    if not isinstance(value, str):
        return
    # Imported here: jinja is seldom needed.
    from engine.text.chat_template import ChatTemplate

    if "{" not in value:
        path = Path(_found(value, folder))
        try:
            value = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{source}: chat_template: {path} cannot be read ({error}); give a file of jinja, "
                "or jinja itself",
                param="chat_template",
            ) from None
        section["chat_template"] = value
    try:
        ChatTemplate({"default": value}, {})
    except ConfigError as error:
        raise ConfigError(f"{source}: chat_template: {error}", param="chat_template") from None


def _found(value: str, folder: Path) -> str:
    """Return the absolute path of a file in the configuration's folder or the working directory.

    Returns the path unchanged if the file is in neither.
    """
    if "\0" not in value:
        for base in (folder, Path.cwd()):
            path = base / Path(value).expanduser()
            if path.exists():
                return str(path.resolve())
    return value


# -- messages


def _describe(error: dict[str, Any], parsed: yaml_lines.YamlDocument, source: str) -> str:
    """Return one of pydantic's errors as a line of text: file and line number, key, message."""
    loc = tuple(part for part in error["loc"] if part != "[key]")
    line = parsed.line(loc)
    where = f"{source}:{line}" if line else source
    key = ".".join(str(part) for part in loc)
    if error["type"] == "extra_forbidden" or "[key]" in error["loc"]:
        known = _known_keys(loc[:-1])
        elsewhere = _keys_elsewhere(loc)
        near = elsewhere.get(str(loc[-1])) or difflib.get_close_matches(str(loc[-1]), known, n=1)
        if not near:
            named = difflib.get_close_matches(str(loc[-1]), elsewhere, n=1, cutoff=0.75)
            near = elsewhere[named[0]] if named else []
        hint = f"did you mean {' or '.join(near)}?" if near else f"known keys: {', '.join(known)}"
        return f"{where}: {key}: unknown key; {hint}"
    message = error["msg"].removeprefix("Value error, ")
    message = message.replace("Input should be", "must be")
    shown = _lookup(parsed.data, loc)
    if error["type"] != "engine" and isinstance(shown, str | int | float):
        message += f", got {str(shown)[:64]!r}" if isinstance(shown, str) else f", got {shown}"
    return f"{where}: {key}: {message}" if key else f"{where}: {message}"


def _known_keys(path: tuple[str | int, ...]) -> list[str]:
    """Return the keys that the mapping at a key path of the configuration may have."""
    if path and path[-1] == "engine":
        return list(engine_model().model_fields)
    section: type[BaseModel] = MantaConfig
    if len(path) > 1 and path[0] == "models":
        section, path = ServedModelConfig, path[2:]
    if path == ("pools",):
        return ["gpu", "cpu", "any other name with a role"]
    if path and path[0] == "pools":
        return list(PoolConfig.model_fields)
    for part in path:
        kind = section.model_fields[str(part)].annotation
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            return []
        section = kind
    return list(section.model_fields)


def _keys_elsewhere(loc: tuple[str | int, ...]) -> dict[str, list[str]]:
    """Return {known key: up to two dotted paths at which it may stand}, for a wrong key at `loc`.

    Paths inside other models are left out. The paths nearest to `loc` come first.
    """
    own = tuple(map(str, loc[:2])) if loc[0] == "models" and len(loc) > 2 else ()
    roots: list[tuple[tuple[str, ...], type[BaseModel]]] = [((), MantaConfig)]
    if own:
        roots.append((own, ServedModelConfig))
    names: dict[str, list[str]] = {}

    def note_keys(path: tuple[str, ...], keys: Iterable[str]) -> None:
        for key in keys:
            names.setdefault(key, []).append(".".join((*path, key)))

    def walk(path: tuple[str, ...], section: type[BaseModel]) -> None:
        note_keys(path, section.model_fields)
        for key, field in section.model_fields.items():
            kind = field.annotation
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                walk((*path, key), kind)
        if "engine" in section.model_fields:
            note_keys((*path, "engine"), engine_model().model_fields)

    for path, section in reversed(roots):
        walk(path, section)
        pools = (*path, "pools")
        inside = str(loc[len(pools)]) if loc[: len(pools)] == pools else ""
        for kind in ("cpu", "gpu"):
            if inside == kind:
                walk((*pools, kind), PoolConfig)
            else:
                note_keys((*pools, kind), PoolConfig.model_fields.keys() - {"engine", "replicas"})

    def shared(place: str) -> int:
        same = (a == str(b) for a, b in zip(place.split("."), loc, strict=False))
        return len(list(itertools.takewhile(bool, same)))

    return {key: sorted(places, key=shared, reverse=True)[:2] for key, places in names.items()}


def _lookup(data: Any, path: tuple[str | int, ...]) -> Any:
    for part in path:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return None
    return data


# -- environment


def environment_names() -> dict[str, tuple[str, ...]]:
    """Return {environment variable MANTA_<KEY>: path of the key}, for keys with a single value."""
    names: dict[str, tuple[str, ...]] = {}
    for key, field in MantaConfig.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            for inner in kind.model_fields:
                names[f"MANTA_{key}_{inner}".upper()] = (key, inner)
        elif key == "engine":
            for inner in engine_model().model_fields:
                names[f"MANTA_{key}_{inner}".upper()] = (key, inner)
        elif key not in ("pools", "models"):
            names[f"MANTA_{key}".upper()] = (key,)
    return names


def _apply_environment(data: dict[str, Any], environment: Mapping[str, str]) -> None:
    names = environment_names()
    for variable, text in environment.items():
        if not variable.startswith("MANTA_") or variable in _OTHER_VARIABLES:
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
