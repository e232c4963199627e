"""`python -m tests.engine.process.poisoned_process`: an engine process whose device fails.

On CUDA a kernel writes to an unmapped address, after which every call of that context fails. On the
CPU the step raises, and the runner reports that the device has failed.
"""

import itertools
import os
from typing import Any

import torch
import triton
import triton.language as tl

from engine.process import main as process

AT = 12  # steps


@triton.jit
def write(pointer, offset):  # type: ignore[no-untyped-def]
    tl.store(pointer + tl.load(offset), 1.0)


def poison(core: Any, device: str) -> None:
    runner = core._runner
    launch, steps = runner.launch, itertools.count(1)
    if device == "cpu":
        runner.recover = lambda: False
    else:
        here = torch.zeros(1, device=device)
        offset = torch.zeros(1, dtype=torch.int64, device=device)
        write[(1,)](here, offset)  # where it may: this compiles it
        offset.fill_(2**40)  # 4 TiB beyond
        torch.cuda.synchronize()

    def launch_and_spoil(batch: Any) -> Any:
        pending = launch(batch)
        if next(steps) == AT:
            if device == "cpu":
                raise RuntimeError("the device is lost")
            write[(1,)](here, offset)
        return pending

    runner.launch = launch_and_spoil


def build(start: process.EngineStart, *given: Any) -> Any:
    core, ready = model(start, *given)
    poison(core, start.config.device)
    return core, ready


model = process.CORES["model"]

if __name__ == "__main__":
    process.CORES["model"] = build
    os._exit(process.main())
