"""Three tasks for lm-evaluation-harness, whose data are local files."""

import json
from pathlib import Path

from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from tests.engine.models.checkpoints import save_checkpoint
from tests.engine.text.small_tokenizers import byte_level

_CHOICE = """task: animals
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/animals.jsonl, train: FOLDER/animals.jsonl}}
test_split: test
fewshot_split: train
output_type: multiple_choice
doc_to_text: "Q: {{q}}\\nA:"
doc_to_choice: options
doc_to_target: key
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
_ANSWER = """task: words
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/animals.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: q
doc_to_target: "{{options[key]}}"
generation_kwargs: {until: ["a"], max_gen_toks: 12, do_sample: false}
filter_list:
  - name: letters
    filter:
      - {function: regex, regex_pattern: "([a-z]+)"}
      - {function: take_first}
metric_list: [{metric: exact_match}]
"""
_ROLLING = """task: texts
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/texts.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: text
metric_list: [{metric: word_perplexity}]
"""


def write_tasks(folder: Path) -> None:
    """Write the tasks `animals` (choices), `words` (answers) and `texts` (perplexity).

    Some texts are longer than a context of 96 tokens.
    """
    documents = [
        {"q": "who sat on the mat ", "options": ["the cat", "the log", "a dog"], "key": 0},
        {"q": "on what", "options": ["the cat", "the mat", "日本"], "key": 1},
        {"q": "the dog sat " * 20, "options": ["on the log", "naïve", "the"], "key": 0},
    ]
    texts = [{"text": "the cat sat on the mat"}, {"text": "the dog sat on the log; " * 12}]
    for name, rows in (("animals", documents), ("texts", texts)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines)
    for name, text in (("choice", _CHOICE), ("answer", _ANSWER), ("rolling", _ROLLING)):
        (folder / f"{name}.yaml").write_text(text.replace("FOLDER", str(folder)))


def write_model(folder: Path, *, bos: bool) -> None:
    """Write a tiny random model. bos: whether its tokenizer begins each text with a token."""
    tokenizer = byte_level()
    special = dict(tokenizer.special_tokens)
    if bos:
        special["bos_token"] = "<|end|>"
        tokenizer.backend.post_processor = TemplateProcessing(
            single="<|end|> $A", special_tokens=[("<|end|>", 0)]
        )
    size, end = tokenizer.backend.get_vocab_size(), tokenizer.eos_token_ids[0]
    ids = {"vocab_size": size, "eos_token_id": end, "bos_token_id": 0 if bos else None}
    save_checkpoint(folder, "qwen3", max_position_embeddings=1024, **ids)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend, **special).save_pretrained(folder)
