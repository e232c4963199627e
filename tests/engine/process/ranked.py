"""Engines whose ranks are threads of the test, and requests that use all features."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from engine import SamplingParams
from engine.config.engine_config import EngineConfig
from engine.factory import build
from engine.messages import AddAdapter, EngineRequest
from engine.parallel.ranks import RankReport, Ranks, RankStart
from engine.process import rank as rank_process
from engine.scheduling.core import EngineCore
from engine.structured.grammar import Grammar
from tests.engine.lora.adapters import save_adapter, save_prompt
from tests.engine.models.checkpoints import save_checkpoint
from tests.engine.text import small_tokenizers
from tests.fakes import Output, collect

ROOT = Path(__file__).parents[3]
SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'


def run_ranks(code: str, count: int, *arguments: str) -> None:
    """Run a program in `count` processes, one for each rank, with the rank and the arguments.

    Asserts that all end with status 0 within three minutes.
    """
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), *arguments], cwd=ROOT, stderr=subprocess.PIPE
        )
        for rank in range(count)
    ]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=180)
            assert rank.returncode == 0, errors.decode()
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


class Threads(Ranks):
    """A group of ranks that are threads of this process."""

    def _start(self, start: RankStart, passed: Any) -> Any:
        # Like a rank's process, the thread owns duplicates of its ends of the pipes.
        fields = ("calls", "adapters", "reports")
        own = {name: os.dup(getattr(start, name)) for name in (*fields, "memory")}
        start = msgspec.structs.replace(start, **own)
        reports = rank_process.Connection(start.reports)

        def work() -> None:
            try:
                rank_process.run(start)
            except BaseException as error:
                reports.send(RankReport(str(error), param=getattr(error, "param", None)))
            reports.close()

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return SimpleNamespace(wait=lambda timeout=None: 0, kill=lambda: None, pid=0)


def save_with_bytes(folder: Path, model_type: str, **changes: Any) -> Any:
    """Save a checkpoint and a byte-level tokenizer, whose end tokens the checkpoint has; return
    transformers' model."""
    tokenizer = small_tokenizers.byte_level()
    theirs = save_checkpoint(
        folder,
        model_type,
        vocab_size=tokenizer.vocab_size + 6,
        max_position_embeddings=512,
        eos_token_id=list(tokenizer.eos_token_ids),
        **changes,
    )
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    return theirs


def model_and_adapters(folder: Path, **changes: Any) -> dict[str, Path]:
    """Save a model and an adapter of each kind; return their folders by name."""
    theirs = save_with_bytes(
        folder, "llama", num_attention_heads=4, num_key_value_heads=2, **changes
    )
    folders = {"model": folder, "lora": save_adapter(theirs, folder / "lora")}
    for kind in ("prompt_tuning", "prefix_tuning"):
        folders[kind] = save_prompt(theirs, folder / kind, kind, 5)
    return folders


def config_of(folder: Path, **changes: Any) -> EngineConfig:
    values = {"num_blocks": 10, "max_num_seqs": 6, "num_threads": 1, "max_num_batched_tokens": 24}
    values |= {"max_loras": 2, "max_lora_rank": 8, "max_virtual_tokens": 5, "dtype": "float32"}
    return EngineConfig(model=str(folder), device="cpu", **{**values, **changes})


def start(config: EngineConfig, kind: type[Ranks] = Threads) -> tuple[EngineCore, Ranks | None]:
    ranks = None
    if config.num_ranks > 1:
        ranks = kind(config, lambda error: pytest.fail(str(error)))
    return build(config, None, None, ranks)[0], ranks


def everything(model: dict[str, Path]) -> list[EngineRequest]:
    """Return requests that need more blocks than there are, with all features of requests."""
    asked: list[EngineRequest] = []

    def ask(adapter: str = "", **fields: Any) -> None:
        number = len(asked) + 1
        length = 8 if number <= 6 else 10 + 17 * (number % 5)
        prompt = [3 + (number % 3 + i * i) % 300 for i in range(length)]
        params = SamplingParams(**{"max_tokens": 16, "ignore_eos": True, **fields})
        asked.append(EngineRequest(number, prompt, len(prompt), params, number, adapter=adapter))

    for number in range(6):  # a block for each at the start, and three at the end
        ask(temperature=0.9 * (number % 2), max_tokens=32)
    for adapter in ("lora", "prompt_tuning", "prefix_tuning"):
        ask(adapter, temperature=0.0)
    for adapter in ("", "prefix_tuning"):
        ask(adapter, temperature=1.1, top_p=0.9, presence_penalty=0.5)
        ask(adapter, temperature=1.0, logprobs=2, prompt_logprobs=1)
    grammar = Grammar("json_schema", SCHEMA)
    ask(temperature=1.2, structured=grammar, ignore_eos=False)
    ask("lora", temperature=0.7, structured=grammar, ignore_eos=False)
    return asked


def serve(core: EngineCore, requests: list[EngineRequest]) -> dict[int, Output]:
    outputs: dict[int, Output] = {}
    for request in requests:
        core.add_request(msgspec.convert(msgspec.to_builtins(request), EngineRequest))
    while len(outputs) < len(requests) or any(not output.finish for output in outputs.values()):
        if core.has_work():
            collect(core.step(), outputs)
        else:
            time.sleep(0.001)  # an adapter or a grammar is on its way
    core.check_integrity()
    return outputs


def add_adapters(core: EngineCore, model: dict[str, Path]) -> None:
    for ticket, (name, folder) in enumerate(model.items()):
        if name != "model":
            core.add_adapter(AddAdapter(ticket, name, str(folder), "", True, ""))
    answers: list[Any] = []
    while len(answers) < len(model) - 1:
        answers += core.answers()
    assert all(answer.info for answer in answers), answers


def told(outputs: dict[int, Output]) -> dict[int, Any]:
    return {id: (output.tokens, output.finish) for id, output in sorted(outputs.items())}


def logprobs_of(output: Output) -> list[float]:
    deltas = output.deltas
    items = [item for delta in deltas for item in (delta.logprobs or [])]
    items += [item for delta in deltas for item in (delta.prompt_logprobs or [])]
    return [item.logprob for item in items if item is not None]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
