"""The command `loadtest chaos`: failures and overload against any OpenAI-compatible server."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from loadtest.cli_run import failing


def chaos(
    url: Annotated[str, typer.Option(help="Server under test.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Model; default: the first served.")] = None,
    key_file: Annotated[Path | None, typer.Option(help="File with an API key.")] = None,
    out: Annotated[Path, typer.Option(help="File for the figures.")] = Path("chaos.json"),
    case: Annotated[
        list[str] | None,
        typer.Option(help="Run only: overload, slow, poison, long, kill. Repeatable."),
    ] = None,
    users: Annotated[int, typer.Option(min=1, help="Clients that measure the capacity.")] = 8,
    seconds: Annotated[float, typer.Option(min=0.5, help="Seconds of each case.")] = 20.0,
    questions: Annotated[int, typer.Option(min=1, help="Different questions.")] = 16,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 64,
    long_tokens: Annotated[int, typer.Option(min=16, help="Tokens of a long prompt.")] = 2000,
    first_limit: Annotated[
        float, typer.Option(min=0.001, help="Seconds to a good answer's first token.")
    ] = 4.0,
    patience: Annotated[
        float, typer.Option(min=0.1, help="Seconds without a byte after which a stream is lost.")
    ] = 30.0,
    kill_pid: Annotated[
        list[int] | None, typer.Option(help="Process to kill in the case kill. Repeatable.")
    ] = None,
    kill: Annotated[
        list[str] | None,
        typer.Option(help="Shell command that harms the server in the case kill. Repeatable."),
    ] = None,
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="Allow a server that is not this machine.")
    ] = False,
) -> None:
    """Harm a server, and measure what its clients notice: overload, slow clients, poison, kills."""
    with failing():
        import asyncio

        from loadtest.suite.cases import CASES, SuiteOptions, check, run
        from loadtest.suite.figures import table, write

        options = SuiteOptions(
            url=url,
            model=model,
            key_file=key_file,
            cases=tuple(case or CASES),
            users=users,
            seconds=seconds,
            questions=questions,
            output_tokens=output_tokens,
            long_tokens=long_tokens,
            first_limit_s=first_limit,
            patience_s=patience,
            kill_pids=tuple(kill_pid or ()),
            kill_commands=tuple(kill or ()),
            allow_remote=allow_remote,
        )
        check(options)
        result = asyncio.run(run(options, lambda line: print(line, file=sys.stderr, flush=True)))
        write(result, out)
        print(table(result))
        print(f"figures: {out}")
