"""Sequence classifiers: the numbers of transformers' head, from encoders and decoders."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForSequenceClassification

from engine.config.model_config import ModelConfig
from engine.errors import ConfigError
from engine.pooled_checkpoint import read_pooling
from tests.engine.library.test_pooling import PROMPTS, pool, vectors
from tests.engine.models.test_encoders import CASES, SIZES, save_encoder
from tests.parity.cases import randomise
from tests.parity.engine_driver import engine

DECODER = {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
KINDS: dict[str, dict[str, Any]] = {
    **CASES,
    "modernbert": {
        **CASES["modernbert"],
        "classifier_pooling": "mean",
        "classifier_bias": True,
        "norm_bias": True,
    },
    "qwen3": DECODER,
    "llama": {**DECODER, "tie_word_embeddings": False},
}


def save_classifier(folder: Path, model_type: str, labels: int = 3, **changes: Any) -> Any:
    torch.manual_seed(0)
    values = {**SIZES, **KINDS[model_type], "num_labels": labels, **changes}
    config = AutoConfig.for_model(model_type, **values)
    model = AutoModelForSequenceClassification.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    randomise(model)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("model_type", KINDS)
def test_numbers_equal_transformers(model_type: str, tmp_path: Path) -> None:
    """A head without its activation, norm or bias, or over another token's hidden state."""
    theirs = save_classifier(tmp_path, model_type)
    core = engine(tmp_path, max_model_len=64, max_num_batched_tokens=80)
    model = ModelConfig.from_folder(tmp_path)
    assert model.classifies and not model.generates
    for ours, prompt in zip(vectors(core, PROMPTS), PROMPTS, strict=True):
        with torch.inference_mode():
            want = theirs(torch.tensor([prompt])).logits[0].numpy()
        assert ours.shape == (3,)
        assert np.abs(ours - want).max() < 1e-5 * max(1.0, np.abs(want).max())


def test_scores(tmp_path: Path) -> None:
    """A softmax where labels do not exclude each other; a sigmoid over what is a score already."""
    logits = np.array([1.0, -2.0, 0.5], np.float32)
    softmax = torch.softmax(torch.tensor(logits), 0).numpy()
    sigmoid = torch.sigmoid(torch.tensor(logits)).numpy()
    for kind, want in (
        (None, softmax),
        ("single_label_classification", softmax),
        ("multi_label_classification", sigmoid),
        ("regression", logits),
    ):
        save_classifier(tmp_path, "roberta", problem_type=kind)
        pooling = read_pooling(tmp_path)
        assert pooling is not None and pooling.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
        assert np.allclose(pooling.probabilities(logits), want, atol=1e-6)
    first = logits[:1]
    for written, score in (("Sigmoid", sigmoid[0]), ("Identity", 1.0)):
        function = f"torch.nn.modules.linear.{written}"
        save_classifier(tmp_path, "roberta", 1, sentence_transformers={"activation_fn": function})
        pooling = read_pooling(tmp_path)
        assert pooling is not None and pooling.relevance(first) == pytest.approx(score)
    assert pooling.pairs


def save_separator(folder: Path, separator: int = 7) -> int:
    """Write a tokenizer.json in which this id is the separator; return the id."""
    words = {f"<{i}>" if i != separator else "<sep>": i for i in range(SIZES["vocab_size"])}
    tokenizer = Tokenizer(WordLevel(words, "<0>"))
    tokenizer.add_special_tokens(["<sep>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"sep_token": "<sep>"}')
    return separator


def test_a_text_of_an_embedder_is_one(tmp_path: Path) -> None:
    """Bug: a separator that a text is made of turns its rest into another text's, and the vector is
    not the one that it was indexed under."""
    theirs = save_encoder(tmp_path, "bert")
    separator = save_separator(tmp_path)
    pool(tmp_path, "mean")
    prompts = [[1, 5, separator, 4, 9, separator], [separator, 8]]
    core = engine(tmp_path, max_model_len=64, max_num_batched_tokens=80)
    for ours, prompt in zip(vectors(core, prompts), prompts, strict=True):
        with torch.inference_mode():
            want = theirs(torch.tensor([prompt])).last_hidden_state[0].mean(0).numpy()
        assert np.abs(ours - want).max() < 1e-5


def test_the_second_text_of_a_pair(tmp_path: Path) -> None:
    """Bug: a BERT takes both texts for one; or for a pair what stands in the same step."""
    theirs = save_classifier(tmp_path, "bert", 1, type_vocab_size=2)
    separator = save_separator(tmp_path)
    assert read_pooling(tmp_path).pairs  # type: ignore[union-attr]
    prompts = [[1, 5, 9, 7, 4, 4, 7], [1, 2, 3], [9, 7, 8, 3, 7], [7]]
    core = engine(tmp_path, max_model_len=64, max_num_batched_tokens=80)
    for ours, prompt in zip(vectors(core, prompts), prompts, strict=True):
        first = prompt.index(separator) if separator in prompt else len(prompt)
        kinds = [int(place > first) for place in range(len(prompt))]
        with torch.inference_mode():
            want = theirs(torch.tensor([prompt]), token_type_ids=torch.tensor([kinds])).logits
            alone = theirs(torch.tensor([prompt])).logits
        assert np.abs(ours - want[0].numpy()).max() < 1e-5
        assert (max(kinds) == 1) == (abs(float(want - alone)) > 1e-3)


def test_what_is_refused(tmp_path: Path) -> None:
    """By file, key and tensor. A BERT without a separator cannot tell two texts apart."""
    save_classifier(tmp_path, "bert")
    assert not read_pooling(tmp_path).pairs  # type: ignore[union-attr]
    save_classifier(tmp_path, "modernbert", classifier_activation="silu")
    with pytest.raises(ConfigError, match="classifier_activation: 'silu' is not supported"):
        read_pooling(tmp_path)
    save_classifier(tmp_path, "roberta")
    config = json.loads((tmp_path / "config.json").read_text())
    config["id2label"] = {"0": "a", "1": "b"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"classifier.out_proj.weight must be \[2, 32\]"):
        engine(tmp_path, max_model_len=64)
