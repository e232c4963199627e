"""The measurement of a kernel's time on a CUDA device, relative to the device's best rate and to
libraries.

`python -m bench.kernels.table` runs the cases of bench/kernels/cases.py and saves the results.
Times are of CUDA graphs over so much data that none of it stays in the L2 cache, as with a model's
weights and keys. Data below 5 MB stays in the cache, as in a model's step; such a kernel may exceed
the rate of a copy.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Calls = Sequence[Callable[[], object]]
BYTES, OPERATIONS = "TB/s", "TFLOP/s"  # units of a kernel's work
_COLD = 300e6  # bytes that a graph reads or writes before it reuses data
_MOST_COPIES = 64  # maximum copies; so small data stays in the cache, as in a model's step
_BUSY = 200_000  # clock cycles for which the device sleeps while the measured graphs are launched


@dataclass(frozen=True, slots=True)
class KernelWork:
    """A kernel's calls to time; each computes the same on different data."""

    calls: Calls
    amount: float  # minimum bytes or operations of one call
    unit: str = BYTES
    target: float | None = None  # target share of the rate of `against`
    against: str = ""  # a library; "": the device's copy bandwidth or large-matmul rate
    # name of a library -> calls that compute the same with it
    libraries: Mapping[str, Calls] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Best:
    """The device's best rates, measured in the same run."""

    copy: float  # bytes/s, read plus written
    product: float  # bfloat16 operations/s

    def of(self, unit: str) -> float:
        return self.copy if unit == BYTES else self.product


Timer = Callable[[Calls], float]


def time_us(calls: Calls, repeats: int = 20) -> float:
    """Return the mean microseconds per call in a CUDA graph of all calls.

    It is the median over `repeats` replays.
    """
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    return sorted(_events_ms(graph.replay, repeats))[repeats // 2] * 1e3 / len(calls)


def _events_ms(call: Callable[[], object], repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_BUSY)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return times


def apart(found: Tensor, wanted: Tensor) -> float:
    """Return the distance between two results, relative to the norm of the expected result."""
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def copy_bandwidth() -> float:
    """Measure a large device-to-device copy in bytes per second, read plus written."""
    source = torch.randn(2**29, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    # Do not use a graph, which may copy by the slower copy engine.
    return 2 * source.nbytes / min(_events_ms(lambda: target.copy_(source), 10)) * 1e3


def matmul_rate() -> float:
    """Measure a large bfloat16 matmul in operations per second."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / time_us([lambda: a @ b]) * 1e6


def copies_for(num_bytes: float) -> int:
    """Return the number of copies of data of this size that exceed the L2 cache."""
    return max(1, min(_MOST_COPIES, int(_COLD // num_bytes) + 1))


def measure(case: str, work: KernelWork, best: Best, timer: Timer) -> dict[str, Any]:
    """Measure a case and return its row.

    The row has microseconds, the rate, of_best (share of the device's best) and the libraries'
    microseconds. ratio is relative to the device's best or the library in `against`.
    """
    us = timer(work.calls)
    rate, unit = work.amount / us * 1e6, work.unit
    row: dict[str, Any] = {
        "case": case,
        "us": round(us, 2),
        "ours": round(rate / 1e12, 3),
        "unit": unit,
        "of_best": round(rate / best.of(unit), 3),
    }
    peers: dict[str, float] = {}
    for name, calls in work.libraries.items():
        try:
            library_us = timer(calls)
        except Exception as error:  # a library may not support this shape: leave it out
            row[f"{name}_failed"] = str(error)[:200]
            continue
        row[f"{name}_us"] = round(library_us, 2)
        peers[name] = work.amount / library_us * 1e6
    device = "copy" if unit == BYTES else "product"
    peers[device] = best.of(unit)
    against = work.against or device
    if against not in peers:  # the library failed
        against = next(iter(peers))
    row |= {"against": against, "peer": round(peers[against] / 1e12, 3)}
    row["ratio"] = round(rate / peers[against], 3)
    if work.target is not None:
        row |= {"target": work.target, "reached": row["ratio"] >= work.target}
    return row


def told(row: Mapping[str, Any]) -> str:
    """Format a row as a line of text."""
    if "error" in row:
        return f"{row['case']:<34} failed: {row['error']}"
    line = f"{row['case']:<34} {row['us']:9.2f} us {row['ours']:8.3f} {row['unit']:<7}"
    line += f" {row['of_best']:5.0%} of the best"
    if row["against"] not in ("copy", "product"):
        line += f", {row['ratio']:.2f} of {row['against']}"
    if "target" in row:
        line += f"  (target {row['target']:.0%}: {'reached' if row['reached'] else 'missed'})"
    return line


def rows(
    cases: Mapping[str, Callable[[], KernelWork]], best: Best, timer: Timer
) -> Iterator[dict[str, Any]]:
    """Yield the rows of all cases. A failed case yields a row with its error."""
    for case, make in cases.items():
        try:
            yield measure(case, make(), best, timer)
        except Exception as error:
            yield {"case": case, "error": f"{type(error).__name__}: {error}"[:400]}
