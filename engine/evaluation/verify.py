"""verify: compare a checkpoint in the engine with transformers, and different ways to run it.

 reference   transformers' greedy text of each prompt, and its trace of prompt and text
 text        the engine's greedy text: in a batch, alone, and from the prefix cache
 trace       the engine's trace of the same tokens; logits in chunks, in a batch, after a prefix

One model is in memory at a time; the reference's traces wait on disk.
"""

import gc
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.config.engine_config import EngineConfig
from engine.evaluation.divergence import Divergence
from engine.evaluation.driver import Output, run
from engine.evaluation.paged import Paged, load_model
from engine.evaluation.prompts import Prompt
from engine.evaluation.trace import Trace, distance, traced
from engine.evaluation.transformers_model import NoReference, Reference
from engine.factory import build
from engine.models.registry import Model
from engine.resolve import Resolved, resolve
from engine.sampling_params import SamplingParams

BLOCK = 16
FEW = 2  # number of prompts in checks that need a separate pass for each


@dataclass(frozen=True, slots=True)
class Bounds:
    """The maximum differences that rounding explains.

    logits: the difference of logits, relative to the largest logit; None = only kl is checked.
    kl: the Kullback-Leibler divergence in nats a token.
    layer: the `trace.distance` of a layer's output.
    tie: nats by which a token of a greedy text may be less likely than the most likely token.
    """

    logits: float | None
    kl: float
    layer: float
    tie: float

    @classmethod
    def of(cls, resolved: Resolved, max_kl: float | None) -> "Bounds":
        """Return the bounds for the model's dtype and weights.

        float32 results differ only by the order of additions, 16-bit results by the rounding of
        each activation, and quantised models by the rounding of weights.
        """
        if in_fewer_bits(resolved):
            return cls(None, 0.1 if max_kl is None else max_kl, 0.5, math.inf)
        if resolved.dtype != torch.float32:
            return cls(None, 0.01 if max_kl is None else max_kl, 0.1, math.inf)
        return cls(1e-4 if max_kl is None else None, 1e-6 if max_kl is None else max_kl, 1e-4, 1e-3)


def in_fewer_bits(resolved: Resolved) -> str:
    """Return the name of the weights' quantisation; "" for unquantised weights."""
    if resolved.model.quantized is not None:
        return resolved.model.quantized.name
    asked = resolved.config.quantization
    return "" if asked in ("auto", "none") else asked


@dataclass(slots=True)
class Difference:
    """The difference between two ways to compute the same logits.

    logits: the largest difference, relative to the largest logit.
    kl: the Kullback-Leibler divergence in nats a token.
    logprob: the largest difference of the texts' own log-probabilities, in nats.
    same_token: the share of positions with the same most likely token.
    """

    logits: float = 0.0
    kl: float = 0.0
    logprob: float = 0.0
    same_token: float = 1.0

    def beyond(self, bounds: Bounds) -> bool:
        beyond_logits = bounds.logits is not None and not self.logits <= bounds.logits
        return beyond_logits or not self.kl <= bounds.kl


@dataclass(slots=True)
class Texts:
    """The comparison of greedy texts with other texts.

    ties: number of texts whose first difference is between two tokens of about equal probability.
    different: one line for each text that differs for another reason.
    """

    texts: int = 0
    same: int = 0
    ties: int = 0
    different: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Report:
    """The results of a verification.

    reference: the name of the reference model; "" = none, for the reason in no_reference.
    layers: point of a trace -> its largest distance over all tokens.
    begins: the first layer beyond the bound, and which of its blocks are; "" if none.
    own: kind of step -> the difference of its logits from one step over the whole text.
    own_text: way to run the prompts -> the comparison of its greedy texts.
    problems: one line for each difference beyond the bounds.
    """

    model: str
    architecture: str
    dtype: str
    device: str
    quantization: str
    bounds: Bounds
    prompts: int = 0
    tokens: int = 0
    reference: str = ""
    no_reference: str = ""
    layers: dict[str, float] = field(default_factory=dict)
    begins: str = ""
    logits: Difference | None = None
    text: Texts | None = None
    own: dict[str, Difference] = field(default_factory=dict)
    own_text: dict[str, Texts] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        if self.problems:
            return "differs"
        return "agrees" if self.reference else "consistent"

    def as_dict(self) -> dict[str, Any]:
        report = asdict(self)
        report["bounds"]["tie"] = None if math.isinf(self.bounds.tie) else self.bounds.tie
        return {"verdict": self.verdict, **report}


class _Logits:
    """The running sums over texts from which a Difference is computed."""

    def __init__(self) -> None:
        self._divergence = Divergence()
        self._largest = 0.0

    def add_text(self, ids: Tensor, ours: Tensor, theirs: Tensor) -> None:
        """Add the logits of one text.

        ids: token ids [n].
        ours: logits of the token after each id [n, vocab_size].
        theirs: the logits to compare with, likewise.
        """
        ours, theirs = ours.float().cpu(), theirs.float().cpu()
        difference = float((ours - theirs).abs().max() / theirs.abs().max())
        self._largest = max(self._largest, difference if math.isfinite(difference) else math.inf)
        self._divergence.add_text(ids, theirs.log_softmax(-1), ours.log_softmax(-1))

    @property
    def difference(self) -> Difference:
        sums = self._divergence
        return Difference(self._largest, sums.kl, sums.largest, sums.same_token)


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a verification.

    max_tokens: tokens of each greedy text.
    reference: a folder of the same weights that transformers can read; None = no reference.
    dump: a folder where the traces are saved.
    """

    max_tokens: int = 16
    reference: Path | None = None
    reference_dtype: torch.dtype = torch.float32
    attention: str = "eager"
    dump: Path | None = None
    max_kl: float | None = None


def verify(
    config: EngineConfig,
    prompts: Sequence[Prompt],
    options: Options,
    progress: Callable[[str], None] = lambda phase: None,
) -> Report:
    """Compare a checkpoint with transformers and different ways to run it; return the report.

    progress: called with a description of the next step.
    Raises ConfigError for a model that cannot run.
    """
    longest = max(len(prompt.ids) for prompt in prompts) + options.max_tokens
    blocks = sum(_blocks(len(prompt.ids) + options.max_tokens) + 1 for prompt in prompts)
    config = msgspec.structs.replace(
        config,
        max_model_len=longest,
        block_size=BLOCK,
        allocation="list",
        num_blocks=max(64, 2 * blocks),
        max_loras=0,
    )
    resolved = resolve(config)
    report = Report(
        config.model,
        resolved.model.wrapper or resolved.model.architecture,
        str(resolved.dtype).removeprefix("torch."),
        str(resolved.device),
        in_fewer_bits(resolved),
        Bounds.of(resolved, options.max_kl),
        prompts=len(prompts),
    )
    with _folder(options.dump) as folder:
        progress("transformers loads it")
        texts = _ask_reference(report, resolved, prompts, options, folder, progress)
        gc.collect()
        progress("greedy text")
        ours = _texts(report, config, prompts, options.max_tokens, progress)
        gc.collect()
        sequences = [
            torch.tensor([*prompt.ids, *(texts[i] if texts else ours[i].token_ids)])
            for i, prompt in enumerate(prompts)
        ]
        report.tokens = sum(len(ids) for ids in sequences)
        progress("layer by layer")
        model = load_model(resolved)
        traces = folder if options.dump or texts else None
        _trace(report, model, sequences, traces, options, progress)
        if texts:
            report.text = _beside_reference(report.bounds, prompts, texts, ours, folder)
        progress("chunks, batches, prefixes")
        report.own = consistency(model, sequences, progress)
    _judge(report)
    return report


@contextmanager
def _folder(dump: Path | None) -> Iterator[Path]:
    if dump is not None:
        dump.mkdir(parents=True, exist_ok=True)
        yield dump
        return
    with tempfile.TemporaryDirectory(prefix="manta-verify-") as folder:
        yield Path(folder)


def _file(folder: Path, side: str, number: int) -> Path:
    return folder / f"{side}-{number:03}.safetensors"


def _ask_reference(
    report: Report,
    resolved: Resolved,
    prompts: Sequence[Prompt],
    options: Options,
    folder: Path,
    progress: Callable[[str], None],
) -> list[list[int]]:
    """Return the reference's greedy texts as token ids; return [] without a reference.

    The reference's traces are saved in `folder`, and its name, or why there is none, in `report`.
    """
    if options.reference is None:
        report.no_reference = "it was not asked for"
        return []
    try:
        reference = Reference(
            options.reference, resolved.model, options.reference_dtype, options.attention
        )
    except NoReference as reason:
        report.no_reference = str(reason)
        return []
    dtype = str(options.reference_dtype).removeprefix("torch.")
    report.reference = f"{reference.name}, {dtype}, {options.attention} attention"
    texts = []
    for number, prompt in enumerate(prompts):
        progress(f"transformers, {_of(number, prompts)}")
        texts.append(reference.greedy(prompt.ids, options.max_tokens))
        trace = reference.trace([*prompt.ids, *texts[-1]])
        save_file(
            {name: values.contiguous() for name, values in trace.items()},
            _file(folder, "reference", number),
        )
    return texts


def _texts(
    report: Report,
    config: EngineConfig,
    prompts: Sequence[Prompt],
    max_tokens: int,
    progress: Callable[[str], None],
) -> list[Output]:
    """Return the engine's greedy texts, and report texts that differ between ways to run them."""
    core, _ = build(config)
    ids = [prompt.ids for prompt in prompts]
    params = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        logprobs=2,
        logprobs_mode="raw_logprobs",
    )
    few = ids[:FEW]

    def report_progress(what: str, count: int) -> Callable[[int], None]:
        return lambda tokens: progress(
            f"greedy text{what}, {tokens} of {count * max_tokens} tokens"
        )

    together = run(core, ids, params, progress=report_progress("", len(ids)))
    core.reset_prefix_cache()
    for name in ("alone", "from the prefix cache"):
        progress(f"greedy text {name}")
        counting = report_progress(f" {name}", len(few))
        again = run(core, few, params, together=False, progress=counting)
        counts = report.own_text[name] = Texts(len(again))
        for number, (output, other) in enumerate(zip(together, again, strict=False)):
            position = _first_difference(output.token_ids, other.token_ids)
            if position is None:
                counts.same += 1
                continue
            theirs = output.logprobs[position]
            near = dict(zip(theirs.top_ids, theirs.top_logprobs, strict=True))
            token = other.token_ids[position]
            gap = max(near.values()) - near.get(token, -math.inf)
            _count(counts, report.bounds, number, position, gap)
    return together


def _beside_reference(
    bounds: Bounds,
    prompts: Sequence[Prompt],
    texts: list[list[int]],
    ours: list[Output],
    folder: Path,
) -> Texts:
    counts = Texts(len(texts))
    for number, (prompt, text, output) in enumerate(zip(prompts, texts, ours, strict=True)):
        position = _first_difference(text, output.token_ids)
        if position is None:
            counts.same += 1
            continue
        logits = load_file(_file(folder, "reference", number))["logits"]
        row = logits[len(prompt.ids) + position - 1].log_softmax(-1)
        gap = float(row[text[position]] - row[output.token_ids[position]])
        _count(counts, bounds, number, position, gap)
    return counts


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    pairs = enumerate(zip(one, other, strict=True))
    return next((position for position, (a, b) in pairs if a != b), None)


def _count(found: Texts, bounds: Bounds, number: int, position: int, gap: float) -> None:
    if gap < min(bounds.tie, 1.0):
        found.ties += 1
        return
    found.different.append(
        f"prompt {number + 1}, token {position + 1}: its token is {gap:.2g} nats less likely"
    )


def _trace(
    report: Report,
    model: Model,
    sequences: Sequence[Tensor],
    folder: Path | None,
    options: Options,
    progress: Callable[[str], None],
) -> None:
    """Compute the engine's traces, and compare each with the reference's trace if that exists."""
    if folder is None:
        return
    logits = _Logits()
    paged = Paged(model, _blocks(max(map(len, sequences))), BLOCK)
    for number, ids in enumerate(sequences):
        progress(f"layer by layer, {_of(number, sequences)}")
        with traced(model) as trace:
            (computed,) = paged.run((ids, range(_blocks(len(ids))), 0))
        trace |= {"ids": ids, "logits": computed.float().cpu()}
        if options.dump is not None:
            tensors = {name: values.contiguous() for name, values in trace.items()}
            save_file(tensors, _file(folder, "ours", number))
        if report.reference:
            theirs = load_file(_file(folder, "reference", number))
            logits.add_text(ids, trace["logits"], theirs["logits"])
            _compare(report, trace, theirs)
    if report.reference:
        report.logits = logits.difference
        report.begins = _begins(report)


def _compare(report: Report, ours: Trace, theirs: Trace) -> None:
    """Update `report.layers` by the distances at points that both traces have."""
    for name, values in ours.items():
        if name in theirs and name not in ("ids", "logits"):
            there = report.layers.get(name, 0.0)
            report.layers[name] = max(there, distance(values, theirs[name]))


def _begins(report: Report) -> str:
    """Return the first layer beyond the bound, and its blocks beyond the bound; "" = none.

    Some of transformers' blocks add the residual themselves. Such a block is judged only by its
    layer.
    """
    bound = report.bounds.layer
    for name, off in report.layers.items():
        if not off <= bound and not name.endswith(("attention", "mlp")):
            inside = [
                block
                for block in ("attention", "mlp")
                if not report.layers.get(f"{name}.{block}", 0.0) <= bound
            ]
            return f"{name}: {', '.join(inside)}" if inside else name
    return ""


def consistency(
    model: Model, sequences: Sequence[Tensor], progress: Callable[[str], None] = lambda phase: None
) -> dict[str, Difference]:
    """Compare each kind of step with one step over each whole sequence; return kind -> difference.

    Only the few longest sequences are computed, [n] token ids each.
    """
    sequences = sorted(sequences, key=len)[-FEW:]
    blocks = _blocks(max(map(len, sequences))) + 1
    # Block tables have random blocks; `others` are blocks of no sequence.
    order = torch.randperm(blocks * len(sequences), generator=torch.Generator().manual_seed(0))
    tables = order.view(len(sequences), blocks).tolist()
    others = list(range(blocks * len(sequences), blocks * len(sequences) + blocks))
    paged = Paged(model, blocks * (len(sequences) + 1), BLOCK)
    entries = list(zip(sequences, tables, strict=True))
    whole = [paged.run((ids, table, 0))[0] for ids, table in entries]
    sums_of = {name: _Logits() for name in ("batch", "chunks", "decode", "prefix")}
    for (ids, _), logits, want in zip(
        entries, paged.run(*((ids, table, 0) for ids, table in entries)), whole, strict=True
    ):
        sums_of["batch"].add_text(ids, logits, want)
    for number, ((ids, table), want) in enumerate(zip(entries, whole, strict=True)):
        progress(f"chunks, batches, prefixes, {_of(number, entries)}")
        count = len(ids)
        cuts = sorted({0, count // 5, count // 3, count // 2, max(0, count - 2), count})
        parts = [paged.run((ids[:end], table, start))[0] for start, end in pairwise(cuts)]
        sums_of["chunks"].add_text(ids, torch.cat(parts), want)
        # The first tokens are computed again, as recurrent states include the whole text by now,
        # and the step must continue from the state after these tokens.
        paged.run((ids[: count - 1], table, 0))
        last = paged.run((ids, table, count - 1), (ids, others, 0))[0]
        sums_of["decode"].add_text(ids[-1:], last, want[-1:])
        prefix = (count - 1) // BLOCK
        if prefix:
            paged.run((ids[: prefix * BLOCK], table, 0))
            shared = [*table[:prefix], *others[: blocks - prefix]]
            (suffix_logprobs,) = paged.run((ids, shared, prefix * BLOCK))
            sums_of["prefix"].add_text(
                ids[prefix * BLOCK :], suffix_logprobs, want[prefix * BLOCK :]
            )
    return {name: sums.difference for name, sums in sums_of.items()}


def _judge(report: Report) -> None:
    bounds, problems = report.bounds, report.problems
    if report.logits is not None and report.logits.beyond(bounds):
        where = f", beginning at {report.begins}" if report.begins else ""
        problems.append(f"logits differ from transformers' ({_words(report.logits)}){where}")
    if report.text is not None and not math.isinf(bounds.tie):
        problems += [f"other text than transformers': {line}" for line in report.text.different]
    for name, difference in report.own.items():
        if difference.beyond(bounds):
            problems.append(
                f"logits in {name} differ from those in one step ({_words(difference)})"
            )
    for name, texts in report.own_text.items():
        if not math.isinf(bounds.tie):
            problems += [f"another text {name}: {line}" for line in texts.different]


def _words(difference: Difference) -> str:
    return f"relative {difference.logits:.1e}, KL {difference.kl:.1e} nats"


def _of(number: int, of: Sequence[Any]) -> str:
    return f"prompt {number + 1} of {len(of)}"


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK)
