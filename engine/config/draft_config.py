"""draft_config, check_vocabulary: read a draft model's files and check them against the target
model's.

No torch here.
"""

import json
from pathlib import Path

from engine.config.kv_groups import Full, kv_groups
from engine.config.model_config import ModelConfig
from engine.errors import ConfigError


def draft_config(folder: str | Path, model: ModelConfig) -> ModelConfig:
    """Return the configuration of a draft model, limited to the target model's context length.

    folder: the draft model's folder.
    model: the target model's configuration.
    Raises ConfigError if the draft model cannot draft for the target model.
    """
    config = ModelConfig.from_folder(folder)
    why = ""
    if config.vocab_size != model.vocab_size:
        why = f"its vocab_size {config.vocab_size} is not the model's {model.vocab_size}"
    elif not config.generates or config.whole_texts:
        why = "it generates no text"
    elif config.max_positions < model.max_positions:
        why = (
            f"it has {config.max_positions} positions, fewer than max_model_len "
            f"{model.max_positions}; lower max_model_len"
        )
    else:
        config = config.within(model.max_positions)
        groups = kv_groups(config)
        if config.recurrent or groups.kinds != (Full(),) or groups.borrowed:
            why = f"{config.architecture} does not keep the whole text in all of its layers alike"
    if why:
        raise ConfigError(f"speculation: draft model {folder}: {why}", param="speculation")
    return config


def check_vocabulary(folder: Path, target: Path) -> None:
    """Raise ConfigError if the tokenizers of a draft model and its target model have other tokens.

    A folder without tokenizer.json passes.

    folder, target: the folders of the draft model and of the target model.
    """
    files = [path / "tokenizer.json" for path in (folder, target)]
    if not all(file.is_file() for file in files):
        return
    own, other = map(_tokens, files)
    if own != other:
        raise ConfigError(
            f"speculation: draft model {folder}: its tokenizer has other tokens than the model's, "
            "so that its drafts would be of another text; take a draft model of the same family",
            param="speculation",
        )


def _tokens(path: Path) -> object:
    values = json.loads(path.read_text(encoding="utf-8"))
    added = [(token["id"], token["content"]) for token in values.get("added_tokens") or ()]
    return values.get("model", {}).get("vocab"), added
