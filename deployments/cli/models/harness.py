"""`manta eval --tasks`: runs tasks of lm-evaluation-harness with a new engine or a server."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from deployments.cli.chat import ChatServer
from deployments.cli.console import out
from deployments.cli.models.evaluate import model_config, write_report
from deployments.environment import api_key
from engine.config.engine_config import EngineConfig
from engine.errors import ConfigError, MantaError

_CONCURRENT = 32  # number of concurrent requests to a server
_RUNS_CODE = "runs what the model writes, on this machine; --run-code allows it"


def check_options(
    harness: bool,
    own: Mapping[str, Any],
    harness_only: Mapping[str, Any],
    against: str | None,
) -> None:
    """Check the combination of options of `manta eval`, and that lm-eval is installed if needed.

    harness: whether `--tasks` is given.
    own: {option: value} of the options that exclude `--tasks`; None or []: not set.
    harness_only: {option: value} of the options that need `--tasks`; None: not set.
    against: value of `--against`.
    Raises ConfigError.
    """
    url = against is not None and "://" in against
    if not harness:
        if url:
            raise ConfigError("--against takes a URL only with --tasks: names of tasks")
        for option, value in harness_only.items():
            if value is not None:
                raise ConfigError(f"{option} needs --tasks: names of tasks")
        return
    for option, value in own.items():
        if value not in (None, []):
            raise ConfigError(f"{option} is not for --tasks: run the command once with each")
    if against is not None and not url:
        raise ConfigError(
            f"--against {against}: with --tasks it is the URL of the server that answers; run the "
            "command once for each model"
        )
    if harness_only["--served-as"] is not None and against is None:
        raise ConfigError("--served-as needs --against: the URL of the server that answers")
    if find_spec("lm_eval") is None:
        raise ConfigError(
            "--tasks needs lm-evaluation-harness, which the extra `eval` brings: "
            "pip install 'manta-serve[eval]'"
        )


def run(
    spec: str,
    *,
    tasks: list[str],
    include: Path | None,
    few_shot: int | None,
    limit: int | None,
    server: str | None,
    served_as: str | None,
    chat_template: bool,
    run_code: bool,
    device: str,
    dtype: str,
    quantization: str | None,
    as_json: bool,
    report_file: Path | None,
) -> int:
    """Run tasks of lm-evaluation-harness, print its table of results, and return 0.

    spec: the model to evaluate or, with a server, a model with the same tokenizer.
    server: URL of the server that answers; None: an engine in this process.
    served_as: the model's name at the server.
    Raises ConfigError for unknown tasks and missing data.
    """
    if run_code:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"
    from lm_eval import simple_evaluate
    from lm_eval.utils import handle_non_serializable, make_table

    if include is not None and not include.is_dir():
        raise ConfigError(f"--include {include}: no such folder")
    manager = _task_manager(tasks, include)
    try:
        loaded = manager.load(tasks)["tasks"]  # before the model, as data may be missing
        for name, task in loaded.items():
            if getattr(task, "UNSAFE_CODE", False) and not run_code:
                raise ConfigError(f"--tasks: {name} {_RUNS_CODE}")
        config = model_config(spec, device, dtype, quantization)
        with contextlib.ExitStack() as stack:
            if server is None:
                model = stack.enter_context(_own_engine(config))
            else:
                model = _server_model(server, served_as, config.model)
            results = simple_evaluate(
                model=model,
                tasks=tasks,
                num_fewshot=few_shot,
                limit=limit,
                log_samples=False,
                task_manager=manager,
                apply_chat_template=chat_template,
                confirm_run_unsafe_code=run_code,
            )
    except MantaError:
        raise
    except (OSError, ValueError) as error:
        message = str(error)
        if "HF_ALLOW_CODE_EVAL" in message:
            message = f"a metric {_RUNS_CODE}"
        raise ConfigError(f"--tasks: {message}") from error
    report = json.dumps(results, default=handle_non_serializable)
    if report_file is not None:
        write_report(report_file, report)
    if as_json:
        print(report)
    else:
        out.print(make_table(results), markup=False)
        if results.get("groups"):
            out.print(make_table(results, "groups"), markup=False)
    return 0


def _task_manager(tasks: list[str], include: Path | None) -> Any:
    """Return lm-eval's TaskManager. Raises ConfigError if a task is unknown.

    include: folder of further tasks.
    """
    from lm_eval.tasks import TaskManager

    folder = None if include is None else str(include.absolute())
    if folder is not None:
        # First try without lm-eval's own task files, thousands of which take 15 seconds to read.
        alone = TaskManager(include_path=folder, include_defaults=False)
        if set(tasks) <= set(alone.all_subtasks):
            # `all_subtasks` is checked, as a group in the folder may contain tasks of lm-eval.
            return alone
    manager = TaskManager(include_path=folder)
    for name in tasks:
        if not manager.match_tasks([name]):
            where = "" if include is None else f", nor in {include}"
            raise ConfigError(
                f"--tasks: {name} is not among the library's{where}; --include names the folder "
                "of a task's YAML file"
            )
    return manager


@contextlib.contextmanager
def _own_engine(config: EngineConfig) -> Iterator[Any]:
    from engine.library.harness import HarnessModel
    from engine.library.llm import LLM

    fields = msgspec.structs.asdict(config)
    with LLM(fields.pop("model"), **fields) as llm:
        yield HarnessModel(llm)


def _server_model(url: str, served_as: str | None, folder: str) -> Any:
    """Return lm-eval's `local-completions` model for a server. Raises ServerError.

    folder: model folder with the tokenizer.
    """
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from engine.text.tokenizer import Tokenizer

    class ServerModel(LocalCompletionsAPI):  # type: ignore[misc]  # the library has no types
        """A `local-completions` model that scores a prompt without generating a token.

        lm-eval expects one generated token after the prompt, and drops the last log-probability of
        an answer. Without a generated token it would drop that of the prompt's last token.
        """

        def _create_payload(self, *args: Any, generate: bool = False, **options: Any) -> Any:
            payload = super()._create_payload(*args, generate=generate, **options)
            return payload if generate else {**payload, "max_tokens": 0}

        @staticmethod
        def parse_logprobs(outputs: Any, *args: Any, **options: Any) -> Any:
            for output in outputs if isinstance(outputs, list) else [outputs]:
                for choice in output["choices"]:
                    for name in ("token_logprobs", "top_logprobs"):
                        # lm-eval drops this additional entry instead of the prompt's last
                        # log-probability.
                        choice["logprobs"][name].append(None)
            return LocalCompletionsAPI.parse_logprobs(outputs, *args, **options)

    server = ChatServer(url, api_key())
    card = choose_card(server.ask("GET", "/models").get("data", []), served_as, url)
    tokenizer = Tokenizer.load(folder)
    return ServerModel(
        model=card["id"],
        base_url=f"{server.api}/completions",
        tokenizer=folder,
        tokenizer_backend="huggingface",
        add_bos_token=tokenizer.encode("a", add_special_tokens=True) != tokenizer.encode("a"),
        max_length=card.get("max_model_len") or 2048,
        num_concurrent=_CONCURRENT,
        timeout=3600,
    )


def choose_card(cards: list[dict[str, Any]], served_as: str | None, url: str) -> dict[str, Any]:
    """Return the entry of /v1/models for the model to test.

    cards: the entries of /v1/models. served_as: the model's name; None: the only base model.
    url: the server's URL, for the error.
    Raises ConfigError unless exactly one entry matches.
    """
    names = [card["id"] for card in cards]
    if served_as is not None:
        cards = [card for card in cards if card["id"] == served_as]
    else:
        cards = [card for card in cards if not card.get("parent")]
    if len(cards) != 1:
        raise ConfigError(f"--served-as: {url} has {', '.join(names) or 'no model'}; name one")
    return cards[0]
