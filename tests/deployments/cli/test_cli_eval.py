"""`manta eval`: figures, thresholds, and tasks that are refused."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from deployments.cli.main import cli
from engine.errors import ConfigError
from engine.evaluation import score
from engine.evaluation.tasks import read_task
from tests.engine.models.checkpoints import save_checkpoint
from tests.engine.text.small_tokenizers import byte_level

CHOICE = """task: animals
dataset_path: json
dataset_kwargs: {data_files: {test: animals.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{q.strip()}}\\nAnswer:"
doc_to_choice: options
doc_to_target: "{{['a','b'].index(key)}}"
"""
ANSWER = """task: words
dataset_kwargs: {data_files: animals.jsonl}
output_type: generate_until
doc_to_text: q
doc_to_target: key
generation_kwargs: {until: ["\\n"], max_gen_toks: 3}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    documents = [
        {"q": " who sat ", "options": ["the cat", "the log"], "key": "a"},
        {"q": "on what", "options": ["the cat", "the mat"], "key": "b"},
    ]
    text = "".join(json.dumps(document) + "\n" for document in documents)
    (tmp_path / "animals.jsonl").write_text(text)
    (tmp_path / "choice.yaml").write_text(CHOICE)
    (tmp_path / "answer.yaml").write_text(ANSWER)
    return tmp_path


def evaluate(*args: str | Path) -> tuple[int, dict[str, object]]:
    threads = torch.get_num_threads()
    try:
        done = CliRunner().invoke(cli, ["eval", *map(str, args), "--device", "cpu", "--json"])
    finally:
        torch.set_num_threads(threads)
    if isinstance(done.exception, ConfigError):
        raise done.exception
    return done.exit_code, json.loads(done.stdout)


def test_other_tokens_are_refused_before_a_model_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the first model is evaluated for minutes, and then the second cannot be compared."""
    tokenizer = byte_level().backend
    for name in ("model", "other"):
        save_checkpoint(folder / name, "qwen3", vocab_size=tokenizer.get_vocab_size())
        tokenizer.save(str(folder / name / "tokenizer.json"))
    file = folder / "other" / "tokenizer.json"
    changed = json.loads(file.read_text())
    vocab = changed["model"]["vocab"]
    first_token, two = tokenizer.encode("the cat").tokens[:2]
    vocab[first_token], vocab[two] = vocab[two], vocab[first_token]
    file.write_text(json.dumps(changed))
    (folder / "text.txt").write_text("the cat")
    monkeypatch.setattr(score, "load_model", None)
    with pytest.raises(ConfigError, match="has other tokens"):
        evaluate(folder / "model", "--text", folder / "text.txt", "--against", folder / "other")


@pytest.mark.slow
def test_figures_and_thresholds(folder: Path) -> None:
    """A threshold that nothing can miss, a divergence of a model from itself."""
    tokenizer = byte_level()
    model = folder / "model"
    save_checkpoint(model, "qwen3", vocab_size=tokenizer.backend.get_vocab_size())
    tokenizer.backend.save(str(model / "tokenizer.json"))
    (folder / "text.txt").write_text("the cat sat on the mat and the dog sat on the log")
    tasks = ("--task", folder / "choice.yaml", "--task", folder / "answer.yaml")
    text = ("--text", folder / "text.txt", "--dtype", "float32")
    code, output = evaluate(model, *text, *tasks, "--min-accuracy", "1.0")
    figures = output["model"]
    assert isinstance(figures, dict) and figures["perplexity"] > 1 and figures["tokens"] > 10
    assert code == 1 and output["problems"]
    assert all(figures["tasks"][name]["questions"] == 2 for name in ("animals", "words"))
    code, output = evaluate(model, *text, "--against", model, "--max-kl", "1e-9")
    agreement = output["agreement"]
    assert code == 1 and isinstance(agreement, dict)  # the other's are of 16 bits
    assert 1e-9 < agreement["kl"] < 0.01 < 0.9 < agreement["same_token"]


def test_tasks_as_their_files_have_them(folder: Path) -> None:
    """A context without its delimiter, an answer by another number."""
    task = read_task(folder / "choice.yaml")
    first, second = task.questions
    assert first.context == "Question: who sat\nAnswer:" and first.choices[0] == " the cat"
    assert (first.answer, second.answer) == (0, 1)
    task = read_task(folder / "answer.yaml", limit=1)
    assert task.generates and task.until == ("\n",) and task.max_tokens == 3
    assert task.questions[0].target == "a" and len(task.questions) == 1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("doc_to_choice: options", "doc_to_choice: !function utils.choices", "utils|function"),
        ("multiple_choice", "loglikelihood", "output_type: 'loglikelihood' is not supported"),
        ("animals.jsonl", "plants.jsonl", r"plants\.jsonl: cannot be read"),
        ("{{q.strip()}}", "{{missing}}", "doc_to_text: document 1: 'missing' is undefined"),
        ("{{q.strip()}}", "{{q.__class__.__mro__}}", "doc_to_text: document 1"),
        ("test_split: test", "filter_list: []", "filter_list: is not supported"),
        ("{{['a','b'].index(key)}}", "7", "doc_to_target: document 1: none of the choices"),
    ],
)
def test_tasks_that_are_refused(folder: Path, old: str, new: str, message: str) -> None:
    """A task that is read as if it said something else, or runs code."""
    file = folder / "choice.yaml"
    file.write_text(CHOICE.replace(old, new))
    with pytest.raises(ConfigError, match=message):
        read_task(file)


def test_thresholds_without_what_they_are_of(tmp_path: Path) -> None:
    """A check in a script that can never fail."""
    for option in ("--max-kl", "--min-accuracy"):
        with pytest.raises(ConfigError, match=option):
            evaluate(tmp_path, option, "0.5")
