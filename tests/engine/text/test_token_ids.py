"""Which ids a tokenizer has, from its file alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from engine.text.token_ids import missing_ids

ADDED = [{"id": 5, "content": "<s>"}, {"id": 2, "content": "</s>"}]


@pytest.mark.parametrize(
    ("model", "missing"),
    [
        ({"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 3}, "merges": [["a", "b"]]}, [4, 6, 7]),
        ({"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.5]]}, [3, 4, 6, 7]),
    ],
    ids=["BPE", "unigram"],
)
def test_missing_ids(model: dict[str, Any], missing: list[int], tmp_path: Path) -> None:
    """Added tokens that are not in the vocabulary, holes between these, rows behind them."""
    assert missing_ids(tmp_path, 8) == []
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({"version": "1.0", "added_tokens": ADDED, "model": model}))
    assert missing_ids(tmp_path, 8) == missing
    assert missing_ids(tmp_path, 3) == [token for token in missing if token < 3]
    file.write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        missing_ids(tmp_path, 8)
