"""Parses a scenario file and checks it before the first request. Messages have the file's name,
the line, the key, and the nearest valid name.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from loadtest.errors import ScenarioError, hint
from loadtest.scenario import arrivals, yaml_text
from loadtest.scenario.conversations import read_conversations
from loadtest.scenario.schema import (
    AdapterMix,
    Arrivals,
    Cancels,
    JsonSchema,
    Phase,
    Prefix,
    Scenario,
    Slo,
    SlowReaders,
    Target,
    Tenant,
    Trace,
    Workload,
    read_key,
)


def parse(
    text: str,
    name: str = "scenario",
    folder: Path = Path(),
    overrides: dict[str, Any] | None = None,
) -> Scenario:
    """Parse a scenario. Raises ScenarioError with every problem found.

    folder: base of relative paths in the scenario.
    overrides: values by dotted key, as {"target.url": "http://..."}, {"phases.0.arrivals.rate":
    20}.
    """
    data, lines = yaml_text.parse(text, name)
    if not isinstance(data, dict):
        raise ScenarioError(f"{name}: a scenario is a mapping with at least 'phases'")
    for key, value in (overrides or {}).items():
        _override(data, key.split("."), value, key)
    try:
        scenario = Scenario.model_validate(data)
    except ValidationError as error:
        problems = dict.fromkeys(_problems(error, lines, name))
        raise ScenarioError(*problems) from None
    scenario = _anchored(scenario, folder)
    _check_files(scenario, lines, name)
    return scenario


def _override(data: Any, steps: list[str], value: Any, key: str) -> None:
    step: Any = int(steps[0]) if isinstance(data, list) and steps[0].isdigit() else steps[0]
    if isinstance(data, list):
        if not isinstance(step, int) or step >= len(data):
            raise ScenarioError(f"{key}: there is no {step} in a list of {len(data)}")
    elif not isinstance(data, dict):
        raise ScenarioError(f"{key}: {step} would be inside a plain value")
    if len(steps) == 1:
        data[step] = value
        return
    if isinstance(data, dict) and data.get(step) is None:
        data[step] = {}
    _override(data[step], steps[1:], value, key)


def _problems(error: ValidationError, lines: dict[yaml_text.Path, int], name: str) -> Iterator[str]:
    for fault in error.errors():
        # Pydantic adds a union's chosen kind to the path, which is not in the file.
        path = tuple(
            step
            for step in fault["loc"]
            if step not in _KINDS and not str(step).startswith(("list[", "function-", "str"))
        )
        line = yaml_text.line_of(lines, path)
        where = f"{name}:{line}" if line else name
        key = ".".join(str(step) for step in path)
        message = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            message = f"unknown key{hint(str(path[-1]), _names_at(path[:-1], error))}"
        elif fault["type"].startswith("union_tag_not_found"):
            message = f"needs kind: one of {', '.join(sorted(_KINDS))}"
        elif fault["type"].startswith("union_tag"):
            tag = str((fault.get("ctx") or {}).get("tag", ""))
            message = f"no kind {tag!r}{hint(tag, sorted(_KINDS))}"
        yield f"{where}: {key}: {message}" if key else f"{where}: {message}"


# Models of arrivals by their `kind`.
_KINDS: dict[str, type[BaseModel]] = {
    get_args(kind.model_fields["kind"].annotation)[0]: kind
    for kind in get_args(get_args(Arrivals)[0])
}
_PLACES: dict[str, type[BaseModel]] = {
    "": Scenario,
    "target": Target,
    "work": Workload,
    "phases": Phase,
    "slo": Slo,
    "adapters": AdapterMix,
    "tenants": Tenant,
    "prefix": Prefix,
    "cancel": Cancels,
    "slow": SlowReaders,
    "json_schema": JsonSchema,
}


def _names_at(path: tuple[Any, ...], error: ValidationError) -> list[str]:
    """Return the keys that the mapping at `path` may have."""
    words = [step for step in path if isinstance(step, str)]
    place = words[-1] if words else ""
    if place == "arrivals":
        models = [
            _KINDS[step]
            for fault in error.errors()
            for step in fault["loc"]
            if step in _KINDS and tuple(s for s in fault["loc"] if s not in _KINDS)[:-1] == path
        ]
    else:
        models = [_PLACES[place]] if place in _PLACES else []
    return [field.alias or key for model in models for key, field in model.model_fields.items()]


def _anchored(scenario: Scenario, folder: Path) -> Scenario:
    """Return the scenario with its relative paths resolved against `folder`."""

    def move(model: Any) -> Any:
        if isinstance(model, Path):
            return folder / model.expanduser()
        if isinstance(model, list):
            return [move(item) for item in model]
        if isinstance(model, BaseModel):
            changed = {
                key: moved
                for key, value in model
                if (moved := move(value)) is not value and moved != value
            }
            return model.model_copy(update=changed) if changed else model
        return model

    moved: Scenario = move(scenario)
    return moved


def _check_files(scenario: Scenario, lines: dict[yaml_text.Path, int], name: str) -> None:
    for number, phase in enumerate(scenario.phases):
        if isinstance(phase.arrivals, Trace):
            path = ("phases", number, "arrivals", "file")
            if not phase.arrivals.file.is_file():
                line = yaml_text.line_of(lines, path)
                raise ScenarioError(f"{name}:{line}: {phase.arrivals.file}: no such trace file")
            arrivals.read_trace(phase.arrivals.file)
    works = [scenario.work, *(phase.work for phase in scenario.phases if phase.work)]
    for work in works:
        if work.dataset is not None:
            read_conversations(work.dataset)
    keys = [scenario.target.key_file, *(t.key_file for work in works for t in work.tenants)]
    for key in keys:
        if key is not None:
            read_key(key)
