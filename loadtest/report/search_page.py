"""The HTML page of a search or a sweep: throughput against latency, and each load's verdict."""

from loadtest.report import load_curve, page
from loadtest.report.charts import duration, number, percent
from loadtest.report.page import Cell, SummaryTile, Tone
from loadtest.search import Search, Trial

_FOOT = (
    "A limit is kept where the 95 % Wilson interval of the requests that kept it lies above the "
    "percentile asked for, broken where it lies below; failures keep no limit. An unclear load was "
    "repeated, and then its share decided. Knee: the load with the highest served rate over mean "
    "end-to-end time."
)


def search_page(search: Search) -> str:
    """Return the HTML page of a search with every trial in order of load."""
    s = search
    limits = ", ".join(limit.text for limit in s.slo)
    tiles = []
    if s.slo:
        best = "none" if s.best is None else number(s.best)
        tiles.append(SummaryTile("Keeps the SLO up to", best, s.unit, "good" if s.best else "bad"))
        over = "none tried" if s.first_broken is None else number(s.first_broken)
        tiles.append(SummaryTile("Breaks it from", over, s.unit))
    if s.knee is not None:
        tiles.append(SummaryTile("Knee", number(s.knee), f"{s.unit}, most served for its latency"))
    most = max(s.trials, key=lambda t: t.tokens_per_s, default=None)
    if most is not None:
        at = f"at {number(most.load)} {s.unit}"
        tiles.append(SummaryTile("Most output tokens", f"{number(most.tokens_per_s)}/s", at))
    points = [(number(t.load), t.load, t.tokens_per_s, t.ttft, t.tpot) for t in s.trials]
    body = page.tiles(tiles)
    if points:
        body += page.section("Throughput and latency", load_curve(points, s.unit))
        body += page.section("Loads", _table(search))
    mark = Cell(s.ended or "not finished", "good" if s.ended == "found" else "warn")
    sub = " · ".join(filter(None, [limits, f"{sum(t.repeats for t in s.trials)} runs"]))
    return page.document(f"{s.name} – search", page.heading(s.name, sub, [mark]), body, _FOOT)


def _table(search: Search) -> str:
    head = [search.unit, "served/s", "tokens/s", "TTFT p50", "TTFT p99", "TPOT p99", "e2e p99"]
    head += [limit.text for limit in search.slo]
    return page.table([*head, "runs", ""], [_row(search, trial) for trial in search.trials])


def _row(search: Search, t: Trial) -> list[Cell | str]:
    row: list[Cell | str] = [number(t.load), number(t.served_per_s), number(t.tokens_per_s)]
    for p, value in ((t.ttft, t.ttft.p50), (t.ttft, t.ttft.p99), (t.tpot, t.tpot.p99)):
        row.append(duration(value) if p.count else "–")
    row.append(duration(t.e2e.p99))
    for limit in search.slo:
        count = t.counts[limit.text]
        share = count.good / max(1, count.total)
        tone: Tone = "good" if share >= limit.share else "bad"
        row.append(Cell(f"{percent(round(share, 5))} of {count.total}", tone))
    row.append(str(t.repeats))
    word: str = "saturated" if t.saturated else t.state
    if not search.slo:
        word = "saturated" if t.saturated else ""
    row.append(Cell(word, "dim" if word == "unclear" else "good" if t.kept else "bad"))
    return row
