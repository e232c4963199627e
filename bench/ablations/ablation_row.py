"""AblationRow: throughput with a technique on and off, and the ratio that its authors claim."""

from dataclasses import asdict, dataclass
from typing import Any

TECHNIQUES = {
    "paged-kv-under-load": "KV blocks, slots and static batches: ShareGPT at 200 requests/s",
    "paged-kv-and-admission": "KV by tokens and the exact future peak, against slots",
    "contiguous-kv": "KV blocks, against a region of its whole length for each request",
    "admission": "peak, sum, reserved and optimistic admission: lengths that differ widely",
    "fusion": "fused kernels, against one operation after the other",
    "continuous-batching": "continuous batching, against static batches",
    "detokenization": "text made beside the engine's loop, or in it",
    "int8-weights": "8-bit weights, against 16-bit weights",
    "ragged-prefill": "prompts as long as they are, against prompts padded to the longest",
    "paged-kv-capacity": "requests that fit into a given memory: blocks, slots, grouped heads",
    "multi-adapter-batches": "all adapters in one step, against one adapter a step",
}


@dataclass(frozen=True)
class AblationRow:
    """The throughput with a technique (ours) and without it (peer).

    case: begins with the technique's name. how: "simulated", or "measured" on this machine.
    claimed: the ratio that the technique's authors claim. For continuous-batching and
    ragged-prefill it is the upper bound that the lengths allow.
    """

    case: str
    ours: float
    peer: float
    unit: str
    ratio: float
    claimed: float | None
    how: str
    note: str = ""

    @classmethod
    def of(
        cls,
        case: str,
        ours: float,
        peer: float,
        unit: str,
        *,
        claimed: float | None,
        how: str,
        note: str = "",
    ) -> "AblationRow":
        return cls(
            f"{case} ({how})",
            float(f"{ours:.4g}"),
            float(f"{peer:.4g}"),
            unit,
            float(f"{ours / peer:.3g}"),
            claimed,
            how,
            note,
        )

    @property
    def technique(self) -> str:
        return self.case.split()[0]

    def line(self) -> dict[str, Any]:
        return asdict(self)


def table(rows: list[AblationRow]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| technique and workload | with | without | reached | claimed |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        claimed = "" if row.claimed is None else f"{row.claimed:g}"
        lines.append(
            f"| {row.case} | {row.ours:g} | {row.peer:g} {row.unit} | {row.ratio:g} | {claimed} |"
        )
    return "\n".join(lines)
