"""bench.embeddings: both sides make the same vectors of the same texts."""

from typing import Any

import pytest

from bench import embeddings

TINY: dict[str, Any] = {
    "model_type": "bert",
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 30522,
}


@pytest.mark.slow  # imports torch and transformers, and builds an engine
def test_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison of sides that compute different things: padding that is pooled, texts that are
    cut."""
    monkeypatch.setitem(embeddings.MODELS, "tiny", TINY)
    monkeypatch.setattr(embeddings, "CASES", {"short": (40, 64)})
    rows, lines = embeddings.compare("tiny", 2)
    assert [row["case"] for row in rows] == ["tiny/short"] and len(lines) == 4
    assert 0 < rows[0]["difference"] < 1e-5 and rows[0]["ratio"] > 0
