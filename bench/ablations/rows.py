"""Row: one comparison, with the seed's claim beside it."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """ours with the feature, peer with it switched off; more is better.

    how: "simulated" or "measured" (on this machine, that is). claimed: the ratio that the
    system claims whose technique it is; of W12 and W15 what the lengths make possible.
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
    ) -> "Row":
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

    def line(self) -> dict[str, Any]:
        return asdict(self)


def table(rows: list[Row]) -> str:
    """Markdown."""
    lines = ["| workload | with | without | reached | claimed |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        claimed = "" if row.claimed is None else f"{row.claimed:g}"
        lines.append(
            f"| {row.case} | {row.ours:g} | {row.peer:g} {row.unit} | {row.ratio:g} | {claimed} |"
        )
    return "\n".join(lines)
