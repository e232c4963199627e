"""The HTML page of a comparison: changes with their intervals, and both runs' curves."""

from loadtest.report import badges, latency_section, page, subtitle
from loadtest.report.charts import Range, ranges
from loadtest.report.compare import Comparison, tidy
from loadtest.report.page import Cell, Tone

_TONES: dict[str, Tone] = {"better": "good", "worse": "bad", "no difference shown": "dim"}
_FOOT = (
    "A change is called better or worse where its 95 % interval leaves out zero. p: Mann-Whitney's "
    "two-sided test of the whole distribution, on the values of requests."
)


def comparison_page(found: Comparison) -> str:
    """Return the HTML page that compares A with B; A has the first colour, B the second."""
    rows = tidy(found.rows)
    cells: list[list[Cell | str]] = [
        [name, a, b, change, span, p, Cell(verdict, _TONES[verdict])]
        for name, a, b, change, span, p, verdict in rows
    ]
    head = ["", found.a.name, found.b.name, "change", "95 % interval", "p", ""]
    spans = [
        Range(
            *(row.metric, row.change, row.low, row.high, f"{row.change * 100:+.1f}%"),
            _TONES[row.verdict] if row.shown else "unsure",
        )
        for row in found.rows
        if row.relative
    ]
    drawn = [ranges(spans, name="Changes with their intervals", width=w) for w in (1300, 380)]
    worse = sum(row.verdict == "worse" for row in found.rows)
    better = sum(row.verdict == "better" for row in found.rows)
    marks = [
        Cell(f"{better} better", "good" if better else "dim"),
        Cell(f"{worse} worse", "bad" if worse else "dim"),
    ]
    runs = [(side.name, side.runs[0]) for side in (found.a, found.b)]
    about = [
        (name, f"{subtitle(run.summary)} – {', '.join(b.text for b in badges(run.summary))}")
        for name, run in runs
    ]
    body = (
        page.section("Change from A to B", page.wide_and_narrow(*drawn))
        + page.section("Figures", page.table(head, cells), found.method)
        + latency_section(runs)
        + page.section("The runs", page.facts(about))
    )
    title = f"{found.a.name} → {found.b.name}"
    counts = (f"{len(s.runs)} run{'s' * (len(s.runs) > 1)}" for s in (found.a, found.b))
    sub = " against ".join(counts)
    header = page.heading(title, sub, marks, found.warnings)
    return page.document(f"{title} – comparison", header, body, _FOOT)
