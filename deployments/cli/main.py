"""The `manta` command. A command's module and its dependencies are imported only when it runs."""

import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from deployments.cli.adapter import app as adapter
from deployments.cli.models.endpoint_models import app as models
from deployments.cli.server_requests import Url, UrlArgument, server_url
from deployments.cli.serving.time_limit import leave
from engine.config.quant_formats import Convertible
from loadtest.cli import app as loadtest

cli = typer.Typer(
    name="manta",
    help="Serve language models on Ray: continuous batching, token-level routing.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _say_version(wanted: bool) -> None:
    if wanted:
        from deployments.packages import version

        print(f"manta {version()}")
        raise typer.Exit


@cli.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Say the version and end.", callback=_say_version, is_eager=True
        ),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


cli.add_typer(adapter, epilog="Example:  manta adapter add legal /models/adapters/legal")
cli.add_typer(models, epilog="Example:  manta models add llama /models/llama-8b")
cli.add_typer(loadtest, epilog="Example:  manta loadtest run chat.yaml --url http://host:8000")

_Spec = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG|MODEL",
        help="A .yaml configuration, or a model: 'default', a folder, a .gguf file, a hub name.",
    ),
]
_Host = Annotated[str | None, typer.Option(help="Address to listen on instead of the file's.")]
_Port = Annotated[int | None, typer.Option(min=1, max=65535, help="Port instead of the file's.")]
_Address = Annotated[
    str | None,
    typer.Option(
        help="Ray cluster to join: host:port, or 'local' for one of our own. "
        "Default: RAY_ADDRESS, else one running on this machine, else one of our own."
    ),
]


@cli.command(
    epilog="Examples:  manta serve default  |  manta serve llama.gguf --port 9000  |  "
    "manta serve manta.yaml --address auto"
)
def serve(spec: _Spec, host: _Host = None, port: _Port = None, address: _Address = None) -> None:
    """Deploy a model and serve it until Ctrl-C (a second Ctrl-C ends at once)."""
    from deployments.cli.serve import run

    raise typer.Exit(run(spec, host=host, port=port, address=address))


@cli.command(
    epilog='Examples:  manta chat  |  manta chat http://host:8000 --once "Why is the sky blue?"'
)
def chat(
    server: UrlArgument = None,
    url: Url = None,
    once: Annotated[str | None, typer.Option(help="Send this one message and end.")] = None,
    model: Annotated[str | None, typer.Option(help="Model name; default: the first.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 512,
    temperature: Annotated[
        float | None,
        typer.Option(min=0, max=2, help="Sampling temperature; default: the server's."),
    ] = None,
    key: Annotated[
        Path | None, typer.Option(help="File with the API key; default: OPENAI_API_KEY.")
    ] = None,
) -> None:
    """Chat with any OpenAI-compatible server, streamed."""
    from deployments.cli.chat import ChatOptions, run

    options = ChatOptions(model, system, max_tokens, temperature)
    raise typer.Exit(run(server_url(server, url), once, options, key))


@cli.command(
    epilog="Examples:  manta batch questions.jsonl answers.jsonl  |  "
    "manta batch questions.jsonl answers.jsonl --resume batch_..."
)
def batch(
    source: Annotated[Path, typer.Argument(help="Requests, one JSON object a line, as OpenAI's.")],
    output: Annotated[Path, typer.Argument(help="Answers; failures go into OUTPUT.errors.")],
    server: UrlArgument = None,
    url: Url = None,
    key: Annotated[
        Path | None, typer.Option(help="File with the API key; default: OPENAI_API_KEY.")
    ] = None,
    resume: Annotated[str | None, typer.Option(help="A batch that was begun before.")] = None,
) -> None:
    """Run a file of requests at the lowest priority, and wait for it with a progress bar."""
    from deployments.cli.batch import run

    raise typer.Exit(run(source, output, server_url(server, url), key, resume))


@cli.command(
    epilog="Examples:  manta key keys team-a  |  manta key keys team-b models=llama,legal-* "
    "requests=60 tokens=100000 budget=5000000/day priority=-8"
)
def key(
    file: Annotated[Path, typer.Argument(help="Keys file; it is made if it is not there.")],
    name: Annotated[str, typer.Argument(help="Name of the key in metrics and errors.")],
    fields: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FIELD=VALUE]...", help="Rights and limits of the key; see docs/http.md."
        ),
    ] = None,
) -> None:
    """Make an API key: its digest goes into the file, the key itself to the terminal, once."""
    from deployments.cli.key import run

    raise typer.Exit(run(file, name, fields or []))


@cli.command(
    epilog="Examples:  manta plan default  |  manta plan manta.yaml --gpu h200  |  "
    "manta plan ./llama --gpu 48  |  manta plan manta.yaml --trace requests.jsonl --rates live.json"
)
def plan(
    spec: _Spec,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="h200, h100, a100, l4, ... or its memory in GiB, or 'cpu'. Default: this machine."
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="GPUs in one node. Default: as many as a replica has."),
    ] = None,
    memory: Annotated[
        float | None, typer.Option(min=0.1, help="Free memory of a node in GiB, with --gpu cpu.")
    ] = None,
    prices: Annotated[
        Path | None,
        typer.Option(help="Price list instead of the one that comes with it; the same form."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Recorded load (docs/loadtest.md), or requests.jsonl of a load test: print how it "
            "would be served, in virtual time."
        ),
    ] = None,
    rates: Annotated[
        Path | None,
        typer.Option(
            help="With --trace: GET /v1/live of a busy service, or seconds of steps by pool. "
            "Default: the data sheet of --gpu."
        ),
    ] = None,
) -> None:
    """Show a configuration's memory, replicas and cost, or how it would serve a trace.

    No weights are loaded.
    """
    from deployments.cli.plan import run

    raise typer.Exit(run(spec, gpu, gpus, memory, prices, trace=trace, rates=rates))


@cli.command(
    epilog="Examples:  manta verify default  |  manta verify ./llama --prompts questions.txt  |  "
    "manta verify manta.yaml --dtype auto --json"
)
def verify(
    spec: _Spec,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Text file with a prompt a line, or .jsonl with a prompt or messages a line. "
            "Default: 4 that come with it."
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each greedy text.")] = 16,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Device to run on.")
    ] = "auto",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "auto"],
        typer.Option(help="float32 tells errors from rounding; auto is what is served."),
    ] = "float32",
    quantization: Annotated[
        str | None,
        typer.Option(help="Quantisation instead of the configuration's: int8, uint4-32, ..."),
    ] = None,
    reference: Annotated[
        Literal["float32", "bfloat16", "none"],
        typer.Option(help="Type that transformers computes in; none does not ask it."),
    ] = "float32",
    attention: Annotated[
        Literal["eager", "sdpa"], typer.Option(help="transformers' way to compute attention.")
    ] = "eager",
    max_kl: Annotated[
        float | None,
        typer.Option(min=0, help="Largest difference in nats per token. Default: by the type."),
    ] = None,
    dump: Annotated[
        Path | None, typer.Option(help="Folder for each prompt's tensors, ours and theirs.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare a checkpoint with transformers by layers, and with itself in chunks and batches.

    Exit 1: some outputs differ. 3: none differ, but transformers was not compared.
    """
    from deployments.cli.models.verify import run

    raise typer.Exit(
        run(
            spec,
            prompts=prompts,
            max_tokens=max_tokens,
            device=device,
            dtype=dtype,
            quantization=quantization,
            reference=reference,
            attention=attention,
            max_kl=max_kl,
            dump=dump,
            as_json=as_json,
        )
    )


@cli.command(
    epilog="Examples:  manta convert ./llama ./llama-manta  |  "
    "manta convert ./llama ./llama-int4 --quantization int4 --calibrate book.txt  |  "
    "manta convert ./llama-manta --check"
)
def convert(
    spec: _Spec,
    target: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="The folder to write; it must not exist.")
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        typer.Option(help="Device that the folder is for; it need not be in this machine."),
    ] = "auto",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Type of the weights; auto is what the engine takes."),
    ] = "auto",
    quantization: Annotated[
        Convertible,
        typer.Option(help="gguf keeps a .gguf file's blocks; int8 and others quantise weights."),
    ] = "auto",
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="A text like your requests; int4 is rounded to change it least."
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Read a converted folder and compare its digests.")
    ] = False,
) -> None:
    """Write a folder with the weights as the engine holds them, for starts without a transform."""
    from deployments.cli.models.convert import run

    raise typer.Exit(
        run(
            spec,
            target,
            device=device,
            dtype=dtype,
            quantization=quantization,
            check=check,
            calibrate=calibrate,
        )
    )


@cli.command(
    name="eval",
    epilog="Examples:  manta eval ./llama --text book.txt  |  "
    "manta eval manta.yaml --against ./llama --max-kl 0.01  |  "
    "manta eval ./llama --task quiz.yaml --min-accuracy 0.6  |  "
    "manta eval ./llama --tasks gsm8k_local --include ./tasks --few-shot 5",
)
def evaluate(
    spec: _Spec,
    against: Annotated[
        str | None,
        typer.Option(
            help="Reference model or configuration, taken as exact. With --tasks: URL of the "
            "server that answers; MODEL then gives the tokenizer."
        ),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Text for perplexity and KL. Default: the built-in prompts.")
    ] = None,
    task: Annotated[
        list[Path] | None, typer.Option(help="Task file of lm-evaluation-harness; may be repeated.")
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(help="Names of tasks for lm-evaluation-harness itself, with commas between."),
    ] = None,
    include: Annotated[
        Path | None,
        typer.Option(help="Folder of further tasks for --tasks. Its !function code is run."),
    ] = None,
    few_shot: Annotated[
        int | None, typer.Option(min=0, help="Examples before each question of --tasks.")
    ] = None,
    chat_template: Annotated[
        bool, typer.Option("--chat-template", help="Ask --tasks as chats, by MODEL's template.")
    ] = False,
    run_code: Annotated[
        bool,
        typer.Option("--run-code", help="Let --tasks run, on this machine, what the model writes."),
    ] = False,
    served_as: Annotated[
        str | None, typer.Option(help="MODEL's name at the server that --against names.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Questions of each task.")] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Device that both models run on.")
    ] = "auto",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Type that MODEL computes in."),
    ] = "auto",
    quantization: Annotated[
        str | None, typer.Option(help="Quantisation of MODEL instead of the configuration's.")
    ] = None,
    max_kl: Annotated[
        float | None, typer.Option(min=0, help="Exit 1 above so many nats a token.")
    ] = None,
    min_accuracy: Annotated[
        float | None, typer.Option(min=0, max=1, help="Exit 1 if a task's accuracy is below.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    report: Annotated[
        Path | None, typer.Option("--out", help="File that the JSON is written to.")
    ] = None,
) -> None:
    """Measure perplexity, KL divergence from another model, and tasks from local files."""
    from deployments.cli.models import harness
    from deployments.cli.models.evaluate import run

    harness.check_options(
        tasks is not None,
        {"--text": text, "--task": task, "--max-kl": max_kl, "--min-accuracy": min_accuracy},
        {
            "--include": include,
            "--few-shot": few_shot,
            "--chat-template": chat_template or None,
            "--run-code": run_code or None,
            "--served-as": served_as,
        },
        against,
    )
    if tasks is not None:
        raise typer.Exit(
            harness.run(
                spec,
                tasks=[name.strip() for name in tasks.split(",") if name.strip()],
                include=include,
                few_shot=few_shot,
                limit=limit,
                server=against,
                served_as=served_as,
                chat_template=chat_template,
                run_code=run_code,
                device=device,
                dtype=dtype,
                quantization=quantization,
                as_json=as_json,
                report_file=report,
            )
        )
    raise typer.Exit(
        run(
            spec,
            against=against,
            text=text,
            tasks=task or [],
            limit=limit,
            device=device,
            dtype=dtype,
            quantization=quantization,
            max_kl=max_kl,
            min_accuracy=min_accuracy,
            as_json=as_json,
            report_file=report,
        )
    )


@cli.command(
    epilog="Examples:  manta status  |  manta status --json | jq .pools  |  manta status -1"
)
def status(
    app: Annotated[
        str | None, typer.Argument(help="app_name of its file; all of the cluster if left out.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="Ray cluster to ask: host:port. Default: RAY_ADDRESS, else the one that runs on "
            "this machine."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON once.")] = False,
    once: Annotated[bool, typer.Option("--once", "-1", help="Print once instead of live.")] = False,
    every: Annotated[float, typer.Option(min=0.2, max=60, help="Seconds between looks.")] = 1.0,
) -> None:
    """Show pools, replicas, load, latency and reasons for scaling of running applications, live."""
    from deployments.cli.status import run

    raise typer.Exit(run(app, address, as_json=as_json, once=once, every=every))


@cli.command(
    epilog="Examples:  manta build manta.yaml > serve.yaml && serve deploy serve.yaml  |  "
    "manta build manta.yaml --kubernetes --image me/manta:1 | kubectl apply -f -"
)
def build(
    spec: _Spec,
    kubernetes: Annotated[
        bool, typer.Option("--kubernetes", help="Print a RayService for KubeRay.")
    ] = False,
    image: Annotated[
        str, typer.Option(help="Image of the pods, built from deploy/Dockerfile.")
    ] = "",
    memory: Annotated[
        list[str] | None,
        typer.Option(
            help="Memory of a group's pods (head, gpu, cpu or MODEL-POOL), as in cpu=48Gi."
        ),
    ] = None,
    cache_claim: Annotated[
        str, typer.Option(help="PersistentVolumeClaim of models and kernels, for all pods.")
    ] = "",
) -> None:
    """Print Serve's config file for `serve deploy`, or a manifest for KubeRay."""
    from deployments.cli.building.build import run

    raise typer.Exit(run(spec, kubernetes, image, memory, cache_claim))


@cli.command(epilog="Example:  manta doctor manta.yaml && manta serve manta.yaml")
def doctor(
    spec: Annotated[
        str | None,
        typer.Argument(metavar="[CONFIG|MODEL]", help="Configuration or model to check, too."),
    ] = None,
) -> None:
    """Check what this machine can run and what is missing; exit 1 if Manta cannot run."""
    from deployments.cli.doctor import run

    raise typer.Exit(run(spec))


@cli.command(epilog="Example:  manta version")
def version() -> None:
    """Print the versions of Manta and of the packages that it builds on."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    for name in ("manta-serve", "ray", "torch", "transformers", "triton"):
        with contextlib.suppress(PackageNotFoundError):
            print(f"{name} {installed(name)}")


def app() -> None:
    """Run the command line and end the process. An expected failure prints one line.

    Exit codes are 2 for a wrong command line or configuration, 1 for other failures, 130 for
    Ctrl-C.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # print "?" for a character that the terminal lacks
            stream.reconfigure(errors="replace")
    code = _run()
    with contextlib.suppress(BrokenPipeError):
        sys.stderr.flush()
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of stdout has gone, as in `manta doctor | head -1`. Python would fail again
        # when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    leave(code)


def _run() -> int:
    from engine.errors import ConfigError, MantaError

    try:
        cli(standalone_mode=True)
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else 1
    except ConfigError as error:
        return _fail(error.message, 2)
    except MantaError as error:
        return _fail(error.message, 1)
    except BrokenPipeError:
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _fail(message: str, code: int) -> int:
    lines = message.splitlines()
    for line in lines:
        print(f"error: {line}", file=sys.stderr)
    return code


if __name__ == "__main__":
    app()
