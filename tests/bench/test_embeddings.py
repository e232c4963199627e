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
DECODER: dict[str, Any] = {**TINY, "model_type": "llama", "num_key_value_heads": 1}


@pytest.mark.slow  # imports torch and transformers, and builds an engine
@pytest.mark.parametrize("sizes", [TINY, DECODER], ids=["encoder", "decoder"])
def test_rows(sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison of sides that compute different things: padding that is pooled, texts that are
    cut, or found in the cache of the round before."""
    monkeypatch.setitem(embeddings.MODELS, "tiny", sizes)
    monkeypatch.setattr(embeddings, "CASES", {"short": (40, 8, 64)})
    rows, lines = embeddings.compare("tiny", 2)
    assert [row["case"] for row in rows] == ["tiny/float32/short/transformers"] and len(lines) == 4
    assert 0 < rows[0]["difference"] < 1e-5
    assert rows[0]["ratio"] > 0 and rows[0]["cpu_ratio"] > 0
