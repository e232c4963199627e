"""score: measure a model's perplexity on a text, and its accuracy on tasks.

The text's log-probabilities can also be compared with another model's.
"""

import gc
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.config.engine_config import EngineConfig
from engine.errors import ConfigError
from engine.evaluation.divergence import Divergence
from engine.evaluation.driver import run
from engine.evaluation.paged import Paged, load_model
from engine.evaluation.tasks import Task
from engine.factory import build
from engine.models.registry import Model
from engine.resolve import resolve
from engine.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer
from kernels.kv.format import KVFormat

BLOCK = 16
PIECE = 512  # tokens of a piece of a text, which is computed in one context


@dataclass(slots=True)
class Score:
    """The scores of one model.

    perplexity: the text's perplexity; each piece of PIECE tokens is a separate context.
    tasks: name -> accuracy and number of questions; for "acc_norm" log-probabilities are divided by
        the number of bytes of the choice.
    """

    model: str
    perplexity: float | None = None
    tokens: int = 0
    tasks: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(slots=True)
class Agreement:
    """The agreement of a model with another model on one text.

    kl: the mean of sum(p * log(p / q)) in nats a token, where p is the other model's distribution
        and q this model's.
    same_token: the share of positions at which both models have the same most likely token.
    """

    kl: float
    same_token: float


def score(
    config: EngineConfig,
    text: str,
    tasks: Sequence[Task],
    progress: Callable[[str], None] = lambda what: None,
    *,
    keep: Path | None = None,
    beside: Path | None = None,
) -> tuple[Score, Agreement | None]:
    """Return a model's scores on a text and on tasks, and its agreement with another model.

    The agreement is None without `beside` or without a text.

    keep: a folder in which to save the text's log-probabilities.
    beside: a folder with another model's saved log-probabilities of the same tokens.
    Raises ConfigError if the other model's tokens differ.
    """
    tokenizer = Tokenizer.load(config.model)
    result = Score(config.model)
    resolved = resolve(config)
    model, form = load_model(resolved), resolved.kv
    pieces = _pieces(tokenizer, text, model.config.max_positions) if text else []
    sums, other = Divergence(), Divergence()
    for number, ids in enumerate(pieces):
        progress(f"text, {number + 1} of {len(pieces)}")
        logprobs = _logprobs(model, ids, form)
        sums.add_text(ids, logprobs, logprobs)
        if keep is not None:
            save_file({"ids": ids, "logprobs": logprobs}, _file(keep, number))
        if beside is not None:
            other.add_text(ids, _beside(_file(beside, number), config, ids, logprobs), logprobs)
    if pieces:
        result.perplexity, result.tokens = sums.perplexities[0], sums.tokens
    for task in tasks:
        if not task.generates:
            progress(task.name)
            result.tasks[task.name] = _choose(model, tokenizer, task, form)
    del model
    gc.collect()
    if generated := [task for task in tasks if task.generates]:
        result.tasks |= _generate(config, tokenizer, generated, progress)
    if beside is None or not pieces:
        return result, None
    return result, Agreement(other.kl, other.same_token)


def compare(
    config: EngineConfig,
    against: EngineConfig,
    text: str,
    tasks: Sequence[Task],
    progress: Callable[[str], None] = lambda what: None,
) -> tuple[Score, Score, Agreement | None]:
    """Return the scores of both models, `config` first, and the agreement of the two on the text.

    Raises ConfigError, before either model is loaded, if the models' tokenizers encode the text
    differently.
    """
    if text and _tokens(config, text) != _tokens(against, text):
        raise _other_tokens(config)
    with tempfile.TemporaryDirectory(prefix="manta-eval-") as temporary:
        folder = Path(temporary)
        exact, _ = score(against, text, tasks, progress, keep=folder)
        gc.collect()
        ours, agreement = score(config, text, tasks, progress, beside=folder)
    return ours, exact, agreement


def _beside(file: Path, config: EngineConfig, ids: Tensor, logprobs: Tensor) -> Tensor:
    """Load the other model's log-probabilities of the same piece of text from `file`.

    ids, logprobs: the piece's token ids, and its log-probabilities by the model of `config`.
    Raises ConfigError if the other model's tokens differ.
    """
    exact = load_file(file) if file.exists() else {"ids": ids.new_empty(0)}
    if not torch.equal(exact["ids"], ids) or exact["logprobs"].shape != logprobs.shape:
        raise _other_tokens(config)
    return exact["logprobs"]


def _other_tokens(config: EngineConfig) -> ConfigError:
    return ConfigError(
        f"{config.model}: has other tokens than the model that it is compared with",
        param="against",
    )


def _tokens(config: EngineConfig, text: str) -> list[int]:
    return Tokenizer.load(config.model).encode(text, add_special_tokens=True)


def _file(folder: Path, number: int) -> Path:
    return folder / f"{number:05}.safetensors"


def _pieces(tokenizer: Tokenizer, text: str, longest: int) -> list[Tensor]:
    ids = torch.tensor(tokenizer.encode(text, add_special_tokens=True))
    return [piece.clone() for piece in ids.split(min(PIECE, longest)) if len(piece) > 1]


@torch.inference_mode()
def _logprobs(model: Model, ids: Tensor, form: KVFormat) -> Tensor:
    """Return the log-probabilities after each of the ids [n], float32 [n, vocab_size] on the
    CPU."""
    blocks = range(-(-len(ids) // BLOCK))
    (logits,) = Paged(model, len(blocks), BLOCK, form).run((ids, blocks, 0))
    return logits.float().log_softmax(-1).cpu()


def _choose(model: Model, tokenizer: Tokenizer, task: Task, form: KVFormat) -> dict[str, float]:
    right = normed = 0
    for question in task.questions:
        sums = []
        for choice in question.choices:
            # Spaces at the context's end belong to the choice, as tokens begin with spaces.
            before = tokenizer.encode(question.context.rstrip(), add_special_tokens=True)
            whole = question.context + choice
            ids = torch.tensor(tokenizer.encode(whole, add_special_tokens=True))
            first = min(max(1, len(before)), len(ids) - 1)
            rows = _logprobs(model, ids, form)[first - 1 : -1]
            sums.append(float(rows.gather(1, ids[first:, None]).sum()))
        lengths = [max(1, len(choice.encode())) for choice in question.choices]
        by_length = [value / length for value, length in zip(sums, lengths, strict=True)]
        right += sums.index(max(sums)) == question.answer
        normed += by_length.index(max(by_length)) == question.answer
    count = len(task.questions)
    return {"accuracy": right / count, "acc_norm": normed / count, "questions": count}


def _generate(
    config: EngineConfig,
    tokenizer: Tokenizer,
    tasks: Sequence[Task],
    progress: Callable[[str], None],
) -> dict[str, dict[str, float]]:
    core, _ = build(msgspec.structs.replace(config, max_loras=0))
    results = {}
    for task in tasks:
        progress(task.name)
        prompts = [
            tokenizer.encode(question.context, add_special_tokens=True)
            for question in task.questions
        ]
        params = SamplingParams(temperature=0.0, max_tokens=task.max_tokens)
        right = 0
        outputs = run(core, prompts, params)
        for question, prompt, output in zip(task.questions, prompts, outputs, strict=True):
            if output.error:
                raise ConfigError(f"{task.name}: {output.error}", param="task")
            answer = tokenizer.decode(output.token_ids, prompt=prompt)
            for stop in task.until:
                answer = answer.split(stop)[0]
            right += answer.strip() == question.target.strip()
        count = len(task.questions)
        results[task.name] = {"accuracy": right / count, "questions": float(count)}
    return results
