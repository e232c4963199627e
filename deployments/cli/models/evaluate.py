"""`manta eval`: measure perplexity, KL divergence from another model, and task accuracy."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import msgspec

from deployments.checkpoints.resolve import keeps_blocks, resolve_model
from deployments.cli.console import StatusLine, model_progress, out
from deployments.cli.target import engine_config, read_target
from engine.config.engine_config import EngineConfig
from engine.errors import ConfigError
from engine.evaluation.prompts import SHIPPED
from engine.evaluation.score import Agreement, Score, compare, score
from engine.evaluation.tasks import read_task


def run(
    spec: str,
    *,
    against: str | None,
    text: Path | None,
    tasks: list[Path],
    limit: int | None,
    device: str,
    dtype: str,
    quantization: str | None,
    max_kl: float | None,
    min_accuracy: float | None,
    as_json: bool,
    report_file: Path | None,
) -> int:
    """Evaluate a model, print the results, and return the exit code: 1 if a threshold is missed.

    spec: the model or configuration. For the other parameters see the options of `manta eval`.
    """
    if max_kl is not None and against is None:
        raise ConfigError("--max-kl needs --against: what the divergence is from")
    if min_accuracy is not None and not tasks:
        raise ConfigError("--min-accuracy needs --task: what is to be answered")
    asked = [read_task(path, limit) for path in tasks]
    try:
        words = (text or SHIPPED).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{text}: cannot be read: {error}") from None
    config = model_config(spec, device, dtype, quantization)
    exact: Score | None = None
    agreement: Agreement | None = None
    with StatusLine("Evaluating") as status:

        def progress(what: str) -> None:
            status.update(f"Evaluating: {what}")

        if against is None:
            ours, _ = score(config, words, asked, progress)
        else:
            other = model_config(against, device, "auto", None)
            ours, exact, agreement = compare(config, other, words, asked, progress)
    problems = _problems(ours, agreement, max_kl, min_accuracy)
    report = {
        "model": asdict(ours),
        "against": None if exact is None else asdict(exact),
        "agreement": None if agreement is None else asdict(agreement),
        "problems": problems,
    }
    if report_file is not None:
        write_report(report_file, json.dumps(report))
    if as_json:
        print(json.dumps(report))
    else:
        for line in _lines(ours, exact, agreement, problems):
            out.print(line, markup=False)
    return 1 if problems else 0


def write_report(file: Path, report: str) -> None:
    """Write a report to a file. Raises ConfigError if it cannot be written."""
    try:
        file.write_text(report + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {file}: cannot be written: {error.strerror}") from None


def model_config(spec: str, device: str, dtype: str, quantization: str | None) -> EngineConfig:
    """Return an engine's configuration with the folder of the model, after downloading it if
    needed.

    spec: model or configuration file.
    dtype: "auto": as in the configuration. quantization: None: as in the configuration.
    Raises ConfigError.
    """
    target = read_target(spec)
    chosen = None if dtype == "auto" else dtype
    config = engine_config(target, device=device, dtype=chosen, quantization=quantization)
    blocks = keeps_blocks(msgspec.structs.asdict(config))
    with model_progress() as progress:
        folder = resolve_model(target.model, target.revision, progress, blocks=blocks)
    return msgspec.structs.replace(config, model=str(folder))


def _problems(
    ours: Score, agreement: Agreement | None, max_kl: float | None, min_accuracy: float | None
) -> list[str]:
    results = []
    if max_kl is not None and agreement is not None and not agreement.kl <= max_kl:
        results.append(f"KL {agreement.kl:.2e} nats is above {max_kl:g}")
    for name, figures in ours.tasks.items():
        if min_accuracy is not None and figures["accuracy"] < min_accuracy:
            results.append(f"{name}: accuracy {figures['accuracy']:.3f} is below {min_accuracy:g}")
    return results


def _lines(
    ours: Score, exact: Score | None, agreement: Agreement | None, problems: list[str]
) -> Iterator[str]:
    sides = [ours] if exact is None else [ours, exact]
    yield f"{'':<24}" + "".join(f"{title:>12}" for title in ("model", "against")[: len(sides)])
    if ours.perplexity is not None:
        yield f"{'perplexity':<24}" + "".join(f"{side.perplexity:>12.4f}" for side in sides)
        yield f"{'  over tokens':<24}" + "".join(f"{side.tokens:>12,}" for side in sides)
    for name in ours.tasks:
        for figure in ours.tasks[name]:
            values = "".join(f"{side.tasks[name][figure]:>12.3f}" for side in sides)
            yield f"{name + ' ' + figure:<24}{values}"
    if agreement is not None:
        yield f"{'KL, nats a token':<24}{agreement.kl:>12.2e}"
        yield f"{'same most likely token':<24}{agreement.same_token:>12.2%}"
    for problem in problems:
        yield f"missed: {problem}"
