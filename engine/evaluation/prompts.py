"""Prompts on which a model is compared: from a file, or the built-in ones."""

import json
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ConfigError
from engine.text.tokenizer import Tokenizer

SHIPPED = Path(__file__).parent / "prompts.txt"


@dataclass(frozen=True, slots=True)
class Prompt:
    text: str
    ids: list[int]


def read_prompts(path: Path, tokenizer: Tokenizer, longest: int) -> list[Prompt]:
    """Read the prompts of a file and encode each.

    A text file has a prompt on each line that is not blank. A line of a .jsonl file has a "prompt",
    or "messages" for the chat template.
    longest: the maximum number of tokens of a prompt.
    Raises ConfigError naming the file and line, also for a longer prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}", param="prompts") from None
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        if path.suffix == ".jsonl":
            text, ids = _of_json(line, where, tokenizer)
        else:
            text, ids = line, tokenizer.encode(line, add_special_tokens=True)
        if not 1 <= len(ids) <= longest:
            raise ConfigError(
                f"{where}: has {len(ids)} tokens; it must be 1 to {longest}", param="prompts"
            )
        prompts.append(Prompt(text, ids))
    if not prompts:
        raise ConfigError(f"{path}: no prompt in it", param="prompts")
    return prompts


def _of_json(line: str, where: str, tokenizer: Tokenizer) -> tuple[str, list[int]]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}", param="prompts") from None
    if isinstance(entry, dict) and isinstance(entry.get("prompt"), str):
        text: str = entry["prompt"]
        return text, tokenizer.encode(text, add_special_tokens=True)
    if isinstance(entry, dict) and isinstance(entry.get("messages"), list):
        ids = tokenizer.encode_chat(entry["messages"])
        return tokenizer.decode(ids, skip_special_tokens=False), ids
    raise ConfigError(f'{where}: needs a "prompt" or "messages"', param="prompts")
