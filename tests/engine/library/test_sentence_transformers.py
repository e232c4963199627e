"""What sentence-transformers writes and computes, against LLM.embed of the same folder."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

from engine import LLM
from tests.engine.models.test_encoders import CASES, SIZES
from tests.parity.cases import randomise

theirs = pytest.importorskip("sentence_transformers", reason="pip install sentence-transformers")

pytestmark = pytest.mark.slow
SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
WORDS = [*SPECIAL, "the", "cat", "sat", "on", "a", "mat", "and", "saw", "sea", "query", ":", "."]
TEXTS = ["the cat sat on the mat", "the sea .", "a cat saw a cat and a sea", "mat", "on " * 60]
DECODER = {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}


def save(folder: Path, model_type: str) -> None:
    """Write a tiny random model with a tokenizer that puts [CLS] and [SEP] around a text."""
    torch.manual_seed(0)
    values = {**SIZES, **CASES.get(model_type, DECODER), "vocab_size": len(WORDS)}
    values |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = AutoModel.from_config(AutoConfig.for_model(model_type, **values), dtype=torch.float32)
    randomise(model)
    model.eval().save_pretrained(folder)
    backend = tokenizers.Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", **names).save_pretrained(
        folder
    )


@pytest.mark.parametrize(
    ("model_type", "mode", "dense", "normal"),
    [
        ("bert", "mean", False, True),
        ("nomic_bert", "mean", False, True),
        ("modernbert", "cls", True, True),
        ("qwen3", "lasttoken", False, False),
    ],
)
def test_vectors_prompts_and_dimensions(
    tmp_path: Path, model_type: str, mode: str, dense: bool, normal: bool
) -> None:
    """Bug: files as the library writes them today are read otherwise than it does: a Dense that is
    left out, a prompt that is not put before the text, a cut that is not of length 1."""
    save(tmp_path / "network", model_type)
    modules = pytest.importorskip("sentence_transformers.models")
    network = modules.Transformer(str(tmp_path / "network"), max_seq_length=48)
    parts: list[Any] = [network, modules.Pooling(SIZES["hidden_size"], pooling_mode=mode)]
    if dense:
        parts.append(modules.Dense(SIZES["hidden_size"], 12, activation_function=torch.nn.Tanh()))
    if normal:
        parts.append(modules.Normalize())
    model = theirs.SentenceTransformer(
        modules=parts, prompts={"query": "query : ", "document": ""}, device="cpu"
    )
    folder = tmp_path / "saved"
    model.save(str(folder))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "is_matryoshka": True}))
    options: dict[str, Any] = {"max_model_len": 64, "device": "cpu", "dtype": "float32"}
    with LLM(str(folder), **options) as llm:
        for name in ("", "query"):
            wanted = model.encode(TEXTS, prompt_name=name or None)
            vectors = llm.embed(TEXTS, prompt_name=name, truncate=True)
            assert np.abs(np.array(vectors) - wanted).max() < 1e-5
        assert not np.allclose(vectors, llm.embed(TEXTS, truncate=True))
        wanted = model.encode(TEXTS, truncate_dim=8, normalize_embeddings=normal)
        cut = llm.embed(TEXTS, dimensions=8, truncate=True)
        assert np.array(cut).shape == (len(TEXTS), 8)
        assert np.abs(np.array(cut) - wanted).max() < 1e-5
