"""What other requests notice while adapters are loaded: nothing that the step loop does."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.lora.tiers.store import AdapterStore
from engine.messages import AddAdapter, RemoveAdapter
from tests.engine.lora.adapters import save_adapter
from tests.engine.lora.test_logits import engine, submit
from tests.engine.models.checkpoints import save_checkpoint

ADAPTERS = 32


def wait_for(store: AdapterStore, name: str) -> bool:
    """Ask for an adapter as a waiting request does in every step; return whether it is loaded."""
    return store._names.get(name) is not None and store.ask(store.find(name))


def test_other_streams_do_not_pay(tmp_path: Path) -> None:
    """Adapters are added, read and copied to their slots while four streams decode. None of it is
    done by the step loop's thread, and what that has to do for it, by the CPU's time of the thread,
    which other processes do not change, is a small part of its steps. (A loop that reads by itself
    takes several times as long. How long steps take beside it `bench.versus.lora --sides loads`
    measures; a busy machine cannot.)"""
    theirs = save_checkpoint(tmp_path / "base", "llama", num_hidden_layers=4, hidden_size=64)
    folders = [save_adapter(theirs, tmp_path / str(seed), seed, r=64) for seed in range(4)]
    core = engine(tmp_path / "base", num_blocks=256, lora_host_bytes=1 << 24)
    store, loader = core._adapters, core._adapters._loader
    threads: set[int] = set()
    spent = 0.0

    def watched(work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            threads.add(threading.get_ident())
            return work(*args)

        return call

    def timed(work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal spent
            began = time.thread_time()
            try:
                return work(*args)
            finally:
                spent += time.thread_time() - began

        return call

    loader.read, loader.upload = watched(loader.read), watched(loader.upload)  # type: ignore[method-assign]
    store.poll = timed(store.poll)  # type: ignore[method-assign]
    began, steps = time.thread_time(), 0
    for turn in range(ADAPTERS):
        name = f"a{turn}"
        timed(store.add)(AddAdapter(1, name, str(folders[turn % 4])))
        while not timed(wait_for)(store, name):
            while len(core.scheduler.requests) < 4:
                fields = {"prompt_logprobs": None, "logprobs": None, "max_tokens": 90}
                submit(core, steps, [3 + steps % 90], "", **fields)
                steps += 1
            core.step()
        timed(store.remove)(RemoveAdapter(1, name))
    total = time.thread_time() - began
    assert store.loads == ADAPTERS
    assert threads and threading.get_ident() not in threads
    assert spent < 0.1 * total, f"{spent / total:.0%}"
