"""`manta verify`: compares a checkpoint's outputs with those of transformers, and with its own for
other compositions of steps."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from deployments.checkpoints.resolve import keeps_blocks, resolve_model
from deployments.cli.console import StatusLine, model_progress, out
from deployments.cli.target import engine_config, read_target
from engine.errors import ConfigError
from engine.evaluation.prompts import SHIPPED, read_prompts
from engine.evaluation.verify import Difference, Options, Report, Texts, verify
from engine.resolve import DTYPES, resolve
from engine.text.tokenizer import Tokenizer

NOT_COMPARED = 3  # the exit code if nothing differs but transformers cannot run the model
SOME = 4  # number of the built-in prompts that are used
Peer = Literal["float32", "bfloat16", "none"]


def run(
    spec: str,
    *,
    prompts: Path | None,
    max_tokens: int,
    device: str,
    dtype: str,
    quantization: str | None,
    reference: Peer,
    attention: str,
    max_kl: float | None,
    dump: Path | None,
    as_json: bool,
) -> int:
    """Verify a checkpoint, print the report, and return the exit code.

    The code is 0 if all outputs agree, 1 if some differ, 3 if they agree but transformers cannot
    run the model.
    """
    target = read_target(spec)
    config = engine_config(target, device=device, dtype=dtype, quantization=quantization)
    kept_blocks = keeps_blocks(msgspec.structs.asdict(config))
    with model_progress() as progress:
        folders = {
            blocks: resolve_model(target.model, target.revision, progress, blocks=blocks)
            for blocks in {False, kept_blocks}
        }
    folder = folders[kept_blocks]
    config = msgspec.structs.replace(config, model=str(folder))
    resolved = resolve(config)
    longest = resolved.max_model_len - max_tokens
    if longest < 1:
        raise ConfigError(
            f"--max-tokens {max_tokens}: the model has {longest + max_tokens} positions"
        )
    asked = read_prompts(prompts or SHIPPED, Tokenizer.load(folder), longest)
    if prompts is None:
        asked = asked[:SOME]
    options = Options(
        max_tokens=max_tokens,
        reference=None if reference == "none" else folders[False],
        reference_dtype=DTYPES["float32" if reference == "none" else reference],
        attention=attention,
        dump=dump,
        max_kl=max_kl,
    )
    with StatusLine("Verifying") as status:
        report = verify(config, asked, options, lambda phase: status.update(f"Verifying: {phase}"))
    if as_json:
        print(json.dumps(report.as_dict()))
    else:
        for line in lines(report, dump, tower=resolved.model.vision is not None):
            out.print(line, markup=False)
    if report.verdict == "differs":
        return 1
    return 0 if report.reference else NOT_COMPARED


def lines(report: Report, dump: Path | None = None, *, tower: bool = False) -> Iterator[str]:
    """Yield the lines of a report. dump: folder of the tensors. tower: whether the model has a
    vision encoder."""
    kind = report.quantization or report.dtype
    yield f"Model      {report.model}"
    yield f"           {report.architecture}, {kind} on {report.device}"
    yield f"Prompts    {report.prompts}, {report.tokens:,} tokens with the greedy text of each"
    if report.reference:
        yield f"Against    transformers: {report.reference}"
        yield from _against(report)
    else:
        yield f"Against    itself alone: {report.no_reference}"
    yield "Itself     the same text computed otherwise than in one step"
    for name, difference in report.own.items():
        yield f"  {name:<24}{_numbers(difference)}"
    yield "           greedy text otherwise than together"
    for name, texts in report.own_text.items():
        yield f"  {name:<26}{_texts(texts)}"
    if tower:
        yield "Images     not compared: the prompts are of text, so the tower is not run"
    if dump is not None:
        yield f"Tensors    {dump}/*.safetensors"
    yield f"Verdict    {_verdict(report)}"
    for problem in report.problems:
        yield f"  {problem}"


def _against(report: Report) -> Iterator[str]:
    yield f"  {'':<24}{'layer':>9} {'attention':>9} {'mlp':>9}"
    for name, value in report.layers.items():
        if name.endswith((".attention", ".mlp")):
            continue
        inside = [report.layers.get(f"{name}.{block}") for block in ("attention", "mlp")]
        cells = " ".join(
            f"{'' if difference is None else f'{difference:.1e}':>9}"
            for difference in (value, *inside)
        )
        mark = "  <- here" if report.begins.split(":")[0] == name else ""
        yield f"  {name:<24}{cells}{mark}"
    assert report.logits is not None and report.text is not None
    yield f"  {'logits':<24}{_numbers(report.logits)}"
    yield f"  {'most likely token':<26}the same behind {report.logits.same_token:.2%} of the tokens"
    yield f"  {'greedy text':<26}{_texts(report.text)}"


def _numbers(difference: Difference) -> str:
    return (
        f"{difference.logits:9.1e} of the largest, log-probabilities {difference.logprob:.1e}, "
        f"KL {difference.kl:.1e} nats"
    )


def _texts(texts: Texts) -> str:
    verdict = f"{texts.same} of {texts.texts} the same"
    if texts.ties:
        verdict += f", {texts.ties} apart where two tokens are about equally likely"
    if texts.different:
        verdict += f", {len(texts.different)} different"
    return verdict


def _verdict(report: Report) -> str:
    bounds: Any = report.bounds
    bound = f"KL up to {bounds.kl:g} nats"
    if bounds.logits is not None:
        bound = f"logits up to {bounds.logits:g} of the largest, {bound}"
    words = {
        "agrees": f"agrees with transformers ({bound})",
        "consistent": f"agrees with itself ({bound}); not compared with transformers",
        "differs": f"differs ({bound})",
    }
    return words[report.verdict]
