"""Each kernel's time on a CUDA device, and its rate against the best of the device and libraries.

`python -m bench.kernels.table` runs what bench/kernels/cases.py lists and keeps the result.

Times are of CUDA graphs that walk over enough layers' worth of data to leave the L2 cache behind,
as a model's weights and keys do. What is smaller than 5 MB stays in it, as in a model's step, and
may be faster than a copy.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Calls = Sequence[Callable[[], object]]
BYTES, OPERATIONS = "TB/s", "TFLOP/s"  # what a kernel's work is counted in
_COLD = 300e6  # bytes a graph touches before it comes back to the same data
_MOST_COPIES = 64  # less than a 64th of that each is in the cache, as it is in a model's step
_BUSY = 200_000  # cycles: the device waits for none of what it is timed by


@dataclass(frozen=True, slots=True)
class KernelWork:
    """The calls that are timed: each does equal work on other data."""

    calls: Calls
    amount: float  # bytes, or operations, that one call cannot do without
    unit: str = BYTES
    target: float | None = None  # of `against`'s rate
    against: str = ""  # a library; "" = the device: a copy's bandwidth, or a large product's rate
    libraries: Mapping[str, Calls] = field(default_factory=dict)  # name -> the same by others


@dataclass(frozen=True, slots=True)
class Best:
    """The device's best rates, measured in the same run."""

    copy: float  # bytes/s, read plus written
    product: float  # bfloat16 operations/s

    def of(self, unit: str) -> float:
        return self.copy if unit == BYTES else self.product


Timer = Callable[[Calls], float]


def time_us(calls: Calls, repeats: int = 20) -> float:
    """Time one call in microseconds: a CUDA graph of all `calls`, replayed; the median of
    `repeats`."""
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
    """Return the distance of a result from another, as a share of the other's norm."""
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def copy_bandwidth() -> float:
    """Measure a large device-to-device copy in bytes a second, read plus written."""
    source = torch.randn(2**29, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    # Eagerly: in a graph a copy may go to the slower copy engine.
    return 2 * source.nbytes / min(_events_ms(lambda: target.copy_(source), 10)) * 1e3


def matmul_rate() -> float:
    """Measure a large bfloat16 matmul in operations a second."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / time_us([lambda: a @ b]) * 1e6


def copies_for(num_bytes: float) -> int:
    """Return how many calls' data leave the cache behind."""
    return max(1, min(_MOST_COPIES, int(_COLD // num_bytes) + 1))


def measure(case: str, work: KernelWork, best: Best, timer: Timer) -> dict[str, Any]:
    """Measure a case and return its row.

    A row has microseconds, the rate, of_best (the share of the device's best) and the libraries'
    microseconds. Its ratio is the share of the best, or of the library that it is compared with.
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
        except Exception as error:  # a library may not have this shape; ours stands without it
            row[f"{name}_failed"] = str(error)[:200]
            continue
        row[f"{name}_us"] = round(library_us, 2)
        peers[name] = work.amount / library_us * 1e6
    device = "copy" if unit == BYTES else "product"
    peers[device] = best.of(unit)
    against = work.against or device
    if against not in peers:  # it failed
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
    """Measure one case after the other. A failed case gives a row that says so."""
    for case, make in cases.items():
        try:
            yield measure(case, make(), best, timer)
        except Exception as error:
            yield {"case": case, "error": f"{type(error).__name__}: {error}"[:400]}
