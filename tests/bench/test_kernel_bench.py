"""The command of the kernel bench, with a fake timer."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from bench.kernels import cases as bench_cases
from bench.kernels import measure, mixer_sweep, sweeping
from bench.kernels import table as kernel_bench
from bench.kernels.measure import KernelWork
from kernels.dispatch import kernels_for

cuda = kernels_for("cuda")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return a function that runs the command with three cases, of which one fails."""

    def fail() -> KernelWork:
        raise RuntimeError("out of memory")

    cases = {
        "decode/1": lambda: KernelWork([lambda: None], 2e8, target=0.9),
        "norm/1": fail,
        "norm/2": lambda: KernelWork([lambda: None], 4e8),
    }
    monkeypatch.setattr(bench_cases, "all_cases", lambda libraries: cases)
    monkeypatch.setattr(measure, "copy_bandwidth", lambda: 4e12)
    monkeypatch.setattr(measure, "matmul_rate", lambda: 8e14)
    monkeypatch.setattr(measure, "time_us", lambda calls: 100.0)

    def run(*arguments: str) -> int:
        monkeypatch.setattr("sys.argv", ["kernel_bench", *arguments])
        return kernel_bench.main()

    return run


def test_the_command(
    tmp_path: Path,
    command: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A result that is lost because one kernel failed, or whose run looks as if all was well."""
    monkeypatch.setattr(sweeping, "first_launches", lambda *_: {})
    assert command("--fa3", "--out", str(tmp_path)) == 1
    (table,) = tmp_path.glob("kernels-*.json")
    document = json.loads(table.read_text())
    assert [row["case"] for row in document["rows"]] == ["decode/1", "norm/1", "norm/2"]
    assert document["rows"][2]["ratio"] == 1.0 and "out of memory" in document["rows"][1]["error"]
    assert document["config"]["best"]["copy_bytes_s"] == 4e12
    raw = table.with_suffix(".jsonl").read_text().splitlines()
    assert [json.loads(line) for line in raw] == document["rows"]
    said = capsys.readouterr().out
    assert "without FlashAttention 3" in said
    assert "3 cases in" in said and "1 failed; targets missed: ['decode/1']" in said
    assert command("--only", "norm/2") == 0
    with pytest.raises(SystemExit):
        command("--only", "nothing")


def test_compiling_is_shared(
    command: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A case that no process compiles, or a search for products that disturbs the timed one."""
    calls: list[Any] = []
    monkeypatch.setattr(cuda, "tune_linear", lambda *_: calls.append("searched"))
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    assert command("--these", "2", "0") == 0
    cuda.tune_linear([], [], add=False)
    assert not calls and capsys.readouterr().out.split() == ["2", "0"]
    with pytest.raises(RuntimeError, match="out of memory"):
        command("--these", "1")


def test_each_launch_runs_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that faults or hangs and takes those behind it along; one that is timed although
    nobody knows whether it ends; a process that is left."""
    program = tmp_path / "python"
    program.write_text(
        f"#!/bin/sh\necho $$ >> {tmp_path}/pids\n"
        'while [ "$1" != --these ]; do shift; done; shift\n'
        "for launch; do case $launch in\n"
        "2) echo 'Traceback' >&2; echo 'no such tile' >&2; exit 1 ;;\n"
        "3) sleep 60 ;;\n"
        "5) exit 9 ;;\n"
        "esac; echo $launch; done\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="no CUDA device"):
        sweeping.first_launches("bench.kernels.any", [], 1, 60.0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(sweeping, "EACH_S", 1.0)
    assert sweeping.first_launches("bench.kernels.any", ["--only", "x"], 9, 60.0) == {
        2: "no such tile",
        3: "not done after 1 s",
        5: "exit status 9",
    }
    assert sweeping.first_launches("bench.kernels.any", [], 4, 0.5) == {
        2: "no such tile",
        3: sweeping.NO_TIME,
    }
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) >= 7 and not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_what_a_sweep_says_to_set() -> None:
    """A launch that is wrong, did not run or gains no more than two visits differ by; today's
    launch left out of the table because others are faster."""
    rows = [
        sweeping.Timed(10.0, "as it is"),
        sweeping.Timed(9.9, "SOLVE = 1", "SOLVE"),
        sweeping.Timed(5.0, "PASS = 1", "PASS", sweeping.differs(torch.ones(2), torch.ones(2) * 2)),
        sweeping.Timed(9.0, "PASS = 2", "PASS", sweeping.differs(torch.ones(2), torch.ones(2))),
        sweeping.Timed(8.0, "PASS = 3", "PASS"),
        sweeping.Timed(float("inf"), "PASS = 4", "PASS", "no time"),
    ]
    assert sweeping.to_set(rows) == "PASS = 3"
    *printed, last = sweeping.lines(rows, most=2)
    assert ["PASS = 1" in printed[0], "PASS = 3" in printed[1], "as it is" in printed[2]] == [
        True
    ] * 3
    assert len(printed) == 3 and "WRONG" in printed[0] and last == "set: PASS = 3"
    assert sweeping.to_set(rows[:2]) == "nothing"
    assert sweeping.to_set([rows[5]]) == "nothing ran"
    assert sweeping.to_set([rows[0]._replace(us=float("inf")), rows[1]]) == "SOLVE = 1"


def test_a_sweep_of_mixers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A launch that is timed although its first run failed, a constant that is not set back, or
    launches after one that broke the device, as if their times meant anything."""
    constants = ModuleType("kernels.constants")
    monkeypatch.setattr(constants, "SOLVE", 1, raising=False)

    def make() -> KernelWork:
        def call() -> torch.Tensor:
            if constants.SOLVE == 4:
                raise RuntimeError("CUDA error: an illegal memory access")
            return torch.ones(4)

        return KernelWork([call], 1.0)

    changes = [None, *((constants, "SOLVE", value) for value in (2, 3, 4, 5))]
    variants = [mixer_sweep.Variant("case", make, change) for change in changes]
    monkeypatch.setattr(mixer_sweep, "variants", lambda only: iter(variants))
    monkeypatch.setattr(mixer_sweep, "by_kernel", lambda work: "")
    monkeypatch.setattr(mixer_sweep, "time_us", lambda *_: 10.0 - constants.SOLVE)
    monkeypatch.setattr(mixer_sweep, "first_launches", lambda *_: {1: "no such tile"})
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr("sys.argv", ["mixer_sweep"])
    assert mixer_sweep.main() == 0
    _, said = capsys.readouterr().out.split("\ncase\n")
    *table, last = said.splitlines()
    assert "SOLVE = 3" in table[0] and "7.00 us" in table[0]
    assert "as it is" in table[1] and "9.00 us" in table[1]
    for line, remark in zip(table[2:], ("no such tile", "illegal", "not run after"), strict=True):
        assert "inf us" in line and remark in line
    assert last == "set: constants.SOLVE = 3" and constants.SOLVE == 1


def test_what_flash_attention_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another problem than ours: its rate would be that of fewer keys, or of other shapes."""
    asked: list[dict[str, Any]] = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: Any) -> None:
        asked.append({"q": q.shape, "k": k.shape, "v": v.shape, **how})

    name = "vllm.vllm_flash_attn.flash_attn_interface"
    for part in ("vllm", "vllm.vllm_flash_attn", name):
        monkeypatch.setitem(sys.modules, part, ModuleType(part))
    monkeypatch.setattr(sys.modules[name], "flash_attn_varlen_func", attend, raising=False)
    s = bench_cases.LLAMA._replace(device="meta")
    work = bench_cases.prefill(s, [8192], [8192], 0.7, kernel_bench.fa3())
    assert work.against == "fa3"
    for calls in work.libraries.values():
        calls[0]()
    row, paged = asked
    assert row["q"] == (8192, 32, 128) and row["k"] == row["v"] == (8192, 8, 128)
    assert paged["k"] == paged["v"] == (512, 16, 8, 128)
    for case in asked:
        assert case["causal"] and case["max_seqlen_q"] == case["max_seqlen_k"] == 8192
    assert "cu_seqlens_k" in row and {"seqused_k", "block_table"} <= paged.keys()
