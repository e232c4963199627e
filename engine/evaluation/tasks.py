"""Tasks from local files in lm-evaluation-harness's format: a YAML file and JSON lines.

No code of a task is run: templates are rendered in a sandbox, and `!function` is refused.
The keys that are read are task, output_type (multiple_choice, generate_until),
dataset_kwargs.data_files, test_split, doc_to_text, doc_to_target, doc_to_choice, target_delimiter,
generation_kwargs (until, max_gen_toks). Examples in the prompt (num_fewshot) and filters are
refused.
"""

import ast
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from engine.errors import ConfigError

_KEYS = {
    *("task", "output_type", "dataset_path", "dataset_kwargs", "test_split", "validation_split"),
    *("doc_to_text", "doc_to_target", "doc_to_choice", "target_delimiter", "generation_kwargs"),
    *("metric_list", "metadata", "tag", "group", "num_fewshot", "repeats"),
    *("should_decontaminate", "doc_to_decontamination_query", "dataset_name"),
}


@dataclass(frozen=True, slots=True)
class Question:
    """A question of a task.

    choices: the choices of a multiple_choice question, each with the delimiter before it.
    answer: the index of the correct choice.
    target: the correct text of a generate_until question.
    """

    context: str
    choices: tuple[str, ...] = ()
    answer: int = 0
    target: str = ""


@dataclass(frozen=True, slots=True)
class Task:
    """A task: its questions, and settings for generated answers.

    until: strings; a generated answer is cut before the first of them.
    max_tokens: the maximum number of tokens of a generated answer.
    """

    name: str
    generates: bool
    questions: tuple[Question, ...]
    until: tuple[str, ...] = ("\n\n",)
    max_tokens: int = 256


def read_task(path: Path, limit: int | None = None) -> Task:
    """Read a task from its YAML file. Raises ConfigError naming the file and key.

    limit: the maximum number of questions to read; None = all.
    """
    try:
        settings = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}", param="task") from None
    except YAMLError as error:
        raise ConfigError(f"{path}: {str(error)[:300]}", param="task") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: not a task, which is a mapping", param="task")
    if unknown := sorted(set(map(str, settings)) - _KEYS):
        raise ConfigError(f"{path}: {unknown[0]}: is not supported", param="task")
    if settings.get("num_fewshot"):
        raise ConfigError(f"{path}: num_fewshot: examples are not supported", param="task")
    kind = settings.get("output_type", "generate_until")
    if kind not in ("multiple_choice", "generate_until"):
        raise ConfigError(
            f"{path}: output_type: {kind!r} is not supported, only multiple_choice and "
            "generate_until",
            param="task",
        )
    reader = _Reader(path, settings)
    documents = reader.documents()[:limit]
    generates = kind == "generate_until"
    make = reader.generated if generates else reader.multiple_choice
    options = settings.get("generation_kwargs") or {}
    until = options.get("until", ["\n\n"])
    return Task(
        str(settings.get("task", path.stem)),
        generates,
        tuple(make(number, document) for number, document in enumerate(documents, 1)),
        tuple([until] if isinstance(until, str) else until),
        int(options.get("max_gen_toks", 256)),
    )


class _Reader:
    def __init__(self, path: Path, task: dict[str, Any]) -> None:
        self._path, self._task = path, task
        self._jinja = ImmutableSandboxedEnvironment(
            undefined=StrictUndefined, keep_trailing_newline=True
        )
        self._delimiter = str(task.get("target_delimiter", " "))

    def documents(self) -> list[dict[str, Any]]:
        files = (self._task.get("dataset_kwargs") or {}).get("data_files")
        if isinstance(files, dict):
            split = self._task.get("test_split") or self._task.get("validation_split") or "test"
            files = files.get(split)
        names = [files] if isinstance(files, str) else files
        if not isinstance(names, list) or not names:
            raise self._error("dataset_kwargs", "needs data_files: a .jsonl file of this machine")
        documents = []
        for name in names:
            file = self._path.parent / str(name)
            try:
                lines = file.read_text(encoding="utf-8").splitlines()
                documents += [json.loads(line) for line in lines if line.strip()]
            except (OSError, ValueError) as error:
                raise ConfigError(f"{file}: cannot be read: {error}", param="task") from None
        if not documents or not all(isinstance(document, dict) for document in documents):
            raise self._error("dataset_kwargs", f"{names[0]}: has no documents")
        return documents

    def multiple_choice(self, number: int, document: dict[str, Any]) -> Question:
        choices = self._choices(number, document)
        answer = self._value("doc_to_target", number, document)
        if isinstance(answer, str) and answer.strip() in choices:
            answer = choices.index(answer.strip())
        try:
            answer = int(answer)
        except (TypeError, ValueError):
            answer = -1
        if not 0 <= answer < len(choices):
            raise self._error("doc_to_target", f"document {number}: none of the choices")
        context = str(self._value("doc_to_text", number, document))
        return Question(context, tuple(self._delimiter + choice for choice in choices), answer)

    def generated(self, number: int, document: dict[str, Any]) -> Question:
        context = str(self._value("doc_to_text", number, document))
        return Question(context, target=str(self._value("doc_to_target", number, document)))

    def _choices(self, number: int, document: dict[str, Any]) -> list[str]:
        asked = self._task.get("doc_to_choice")
        if isinstance(asked, list):
            return [
                str(self._render(choice, "doc_to_choice", number, document)) for choice in asked
            ]
        choices = self._value("doc_to_choice", number, document)
        if isinstance(choices, str):
            try:
                choices = ast.literal_eval(choices)
            except (ValueError, SyntaxError):
                choices = None
        if not isinstance(choices, list) or len(choices) < 2:
            raise self._error("doc_to_choice", f"document {number}: not a list of choices")
        return [str(choice) for choice in choices]

    def _value(self, key: str, number: int, document: dict[str, Any]) -> Any:
        """Return the value of a task's key for a document: a field, a number, or a rendered
        template.
        """
        asked = self._task.get(key)
        if isinstance(asked, str) and asked in document:
            return document[asked]
        return self._render(asked, key, number, document)

    def _render(self, asked: Any, key: str, number: int, document: dict[str, Any]) -> Any:
        if isinstance(asked, int):
            return asked
        if not isinstance(asked, str):
            raise self._error(key, "must be the name of a field or a template")
        try:
            return self._jinja.from_string(asked).render(**document)
        except (TemplateError, TypeError, ValueError) as error:
            raise self._error(key, f"document {number}: {error}") from None

    def _error(self, key: str, message: str) -> ConfigError:
        return ConfigError(f"{self._path}: {key}: {message}", param="task")
