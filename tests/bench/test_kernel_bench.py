"""The command around the kernels' bench, with a timer that knows the time."""

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
from bench.kernels import measure
from bench.kernels import table as kernel_bench
from bench.kernels.measure import KernelWork
from kernels.dispatch import kernels_for

cuda = kernels_for("cuda")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs it with two cases, of which one fails."""

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
    monkeypatch.setattr(kernel_bench, "compile_all", lambda only: None)
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


def test_compiling_is_shared(command: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A case that no process compiles, or a search for products that disturbs the timed one."""
    told: list[Any] = []
    monkeypatch.setattr(cuda, "tune_linear", lambda *_: told.append("searched"))
    monkeypatch.setattr(measure, "compile_only", lambda cases: told.extend(cases))
    for share in range(2):
        assert command("--compile-share", str(share), "2") == 0
    cuda.tune_linear([], [], add=False)
    assert sorted(told) == ["decode/1", "norm/1", "norm/2"]


def test_compilers_that_hang_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that waits for ever because a kernel does not compile."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="no CUDA device"):
        kernel_bench.compile_all([""])
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\necho $$ >> {tmp_path}/pids\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setattr(kernel_bench, "COMPILE_S", 1.0)
    kernel_bench.compile_all([""])
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in pids)


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
    for one in asked:
        assert one["causal"] and one["max_seqlen_q"] == one["max_seqlen_k"] == 8192
    assert "cu_seqlens_k" in row and {"seqused_k", "block_table"} <= paged.keys()
