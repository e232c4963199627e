"""The self-contained HTML page of a run: metrics, curves, and a timeline with the faults.

The page loads nothing and has no script; CSS and SVG are inline.
"""

from collections.abc import Sequence
from pathlib import Path

from loadtest.errors import ScenarioError
from loadtest.measure.records import ERROR_CLASSES, GroupSummary, Percentiles, Summary
from loadtest.report import page
from loadtest.report.charts import (
    Axis,
    Band,
    ChartPanel,
    Kind,
    Mark,
    Series,
    duration,
    line_chart,
    number,
    percent,
    timeline,
)
from loadtest.report.page import Cell, SummaryTile
from loadtest.report.series import (
    METRICS,
    TITLES,
    SavedRun,
    cdf,
    read_run,
    silences,
    timeline_of,
    values,
)

_FOOT = (
    "Latencies count from the moment at which the schedule wanted a request sent, not from when "
    "the client got round to it. TTFT: to the first token. TPOT: mean time a token after the "
    "first. ITL: gap between chunks over the tokens that came, once a token. End to end: to "
    "the last byte. Percentiles are of requests that succeeded; intervals are Wilson's at 95 %."
)


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Write the page of a run's folder, by default report.html in it. Raises ScenarioError."""
    path = out if out is not None else folder / "report.html"
    text = run_page(read_run(folder))
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise ScenarioError(f"cannot write {path}: {error.strerror}") from error
    return path


def run_page(run: SavedRun) -> str:
    """Return the HTML page of a run."""
    s = run.summary
    parts = [
        page.tiles(_tiles(s)),
        _timeline(run),
        latency_section([(run.name, run)]),
        _percentiles(s),
        _phases(s),
        _errors(run),
        _faults(run),
        _groups("Tenants", s.tenants, s.fairness_tenants),
        _groups("Adapters", s.adapters, s.fairness_adapters),
        _about(s),
    ]
    header = page.heading(run.name, subtitle(s), badges(s), s.reasons)
    return page.document(f"{run.name} – load test", header, "".join(parts), _FOOT)


def subtitle(s: Summary) -> str:
    facts = [s.run.model, s.run.url]
    for key in ("device", "gpu", "commit"):
        value = s.run.target.get(key) or s.run.versions.get(key)
        facts += [f"commit {value[:12]}" if key == "commit" else value] if value else []
    return " · ".join([*facts, f"{s.run.started_at[:19].replace('T', ' ')} UTC"])


def badges(s: Summary) -> list[Cell]:
    """Return badges of the most important facts: a client that was too slow, failures, wrong
    answers, faults.
    """
    rows = []
    if s.verdict == "client_bottleneck":
        rows.append(Cell("refused: the client was the bottleneck", "bad"))
    if s.failed:
        rows.append(Cell(f"{s.failed} failed", "bad"))
    if s.verified_different:
        rows.append(Cell(f"{s.verified_different} wrong answers", "bad"))
    if s.missing_tokens or s.doubled_tokens:
        rows.append(Cell(f"{s.missing_tokens} missing, {s.doubled_tokens} doubled tokens", "bad"))
    if not rows:
        rows.append(Cell("no failure", "good"))
    if s.faults:
        count = _struck(s)
        rows.append(Cell(f"{count} fault{'s' * (count > 1)} injected", "warn"))
    return rows


def _struck(s: Summary) -> int:
    return sum(mark.what.startswith(("kill ", "pause ", "delay ")) for mark in s.faults) or len(
        s.faults
    )


def _tiles(s: Summary) -> list[SummaryTile]:
    good = s.goodput
    limits = ", ".join(f"{k} < {duration(v)}" for k, v in good.slo.items())
    checked = s.verified_ok + s.verified_different
    wrong = bool(s.verified_different)
    parts = [
        SummaryTile(
            "Requests",
            number(s.requests),
            f"{s.failed} failed, {s.cancelled} cancelled by us",
            "bad" if s.failed else "",
        ),
        SummaryTile(
            "Served", f"{number(s.served_per_s)}/s", f"offered {number(s.offered_per_s)}/s"
        ),
        SummaryTile(
            "Output tokens",
            f"{number(s.output_tokens_per_s)}/s",
            f"{number(s.output_tokens)} in {duration(s.duration_s)}"
            + (
                f", {number(s.output_tokens_per_s_per_gpu)}/s a GPU"
                if s.output_tokens_per_s_per_gpu
                else ""
            ),
        ),
    ]
    for title, p in (("TTFT", s.ttft), ("TPOT", s.tpot), ("End to end", s.e2e)):
        if p.count:
            parts.append(SummaryTile(f"{title} p50", duration(p.p50), f"p99 {duration(p.p99)}"))
    if good.slo:
        interval = f"{percent(good.low)} to {percent(good.high)}"
        parts.append(SummaryTile("Goodput", percent(good.fraction), f"{interval}; {limits}"))
    if checked:
        parts.append(
            SummaryTile(
                "Answers as expected",
                percent(s.verified_ok / checked),
                f"{s.verified_different} of {checked} different",
                "bad" if wrong else "good",
            )
        )
    parts.append(
        SummaryTile(
            "Without service",
            duration(s.no_service_s),
            f"longest gap {duration(s.longest_gap_s)}",
            "bad" if s.no_service_s else "",
        )
    )
    if s.lost_tokens or s.migrations:
        migrations = "" if s.migrations is None else f"{s.migrations} migrations"
        parts.append(
            SummaryTile(
                "Tokens lost", number(s.lost_tokens), migrations, "bad" if s.lost_tokens else ""
            )
        )
    late = s.client.lateness
    share = f"busiest client {percent(round(s.client.cpu_share, 3))} of a core"
    parts.append(SummaryTile("Client late p99", duration(late.p99), share))
    return parts


def _timeline(run: SavedRun) -> str:
    if not run.records:
        return ""
    t = timeline_of(run.records)

    def of(label: str, rates: list[float], colour: int, kind: Kind = "area") -> Series:
        # repeat the last rate until the last bin's end
        return Series(label, t.edges, [*rates, rates[-1]], colour, kind)

    panels = [
        ChartPanel(
            "Requests a second",
            [
                of("offered", t.offered, 7),
                of("served", t.served, 0, "step"),
            ],
        ),
        ChartPanel("Tokens a second", [of("", t.tokens, 2)]),
        ChartPanel("In flight", [of("", t.in_flight, 3, "step")]),
    ]
    if t.ttft:
        gap = 10 * (t.edges[1] - t.edges[0])  # longer gaps had no successful request
        lines = [Series(f"p{q}", *t.ttft[q], 0 if q == 50 else 1, gap=gap) for q in t.ttft]
        panels.append(ChartPanel("Time to first token", lines, Axis(form=duration)))
    if t.errors:
        lines = [
            of(name, rates, (5, 4, 3, 6, 1)[i % 5])
            for i, (name, rates) in enumerate(t.errors.items())
        ]
        panels.append(ChartPanel("Errors a second", lines))
    if t.replicas:
        panels.append(ChartPanel("Replicas that answered", [of("", t.replicas, 6, "step")]))
    marks = [Mark(m.t, str(i), m.what) for i, m in enumerate(run.summary.faults, 1)]
    after = run.summary.no_service_after_s
    bands = [
        Band(start, end, f"no service for {duration(end - start)} from {start:.1f} s")
        for start, end in silences(run.records, after)
    ]
    end = max([t.end, *(m.x for m in marks)])
    name = "Load, tokens, requests in flight and errors over time"
    drawn = [
        timeline(panels, name=name, end=end, width=width, marks=marks, bands=bands)
        for width in (1320, 400)
    ]
    notes = []
    if marks:
        notes.append("Dashed lines: faults, numbered as in the table below.")
    if bands:
        notes.append(f"Red: over {duration(after)} without a token while requests waited.")
    return page.section("Timeline", page.wide_and_narrow(*drawn), " ".join(notes))


def latency_section(runs: Sequence[tuple[str, SavedRun]]) -> str:
    """Return CDF charts of all metrics; several runs are drawn in the same charts."""
    charts = []
    for metric in METRICS:
        series = []
        limit = runs[0][1].summary.goodput.slo.get(metric)
        for index, (name, run) in enumerate(runs):
            sample = values(run.records, metric)
            sample = sample[sample > 0]
            if len(sample):
                series.append(Series(name, *cdf(sample), index))
                if len(runs) == 1:
                    series.append(_dots(run.summary, metric, index))
        if series:
            limits = [Mark(limit, "SLO", f"SLO {duration(limit)}")] if limit else []
            y = Axis(low=0.0, high=1.0, form=percent)
            low = min(s.xs[0] for s in series if s.kind == "line")
            x = Axis(log=True, low=low, form=duration)
            svg = line_chart(series, x, y, name=f"{TITLES[metric]}, CDF", limits=limits)
            charts.append((TITLES[metric], svg))
    if not charts:
        return ""
    legend = page.keys([name for name, _ in runs]) if len(runs) > 1 else ""
    note = "Share of requests (of tokens, for inter-token latency) that took at most so long."
    return page.section("Latency", legend + page.cards(charts), note)


def _dots(s: Summary, metric: str, colour: int) -> Series:
    p: Percentiles = getattr(s, metric)
    points = [(p.p50, 0.5, "p50"), (p.p90, 0.9, "p90"), (p.p99, 0.99, "p99")]
    points = [point for point in points if point[0] > 0]
    return Series(
        "percentile",
        [v for v, _, _ in points],
        [q for _, q, _ in points],
        colour,
        "dots",
        notes=[f"{name} {duration(v)}" for v, _, name in points],
    )


def _percentiles(s: Summary) -> str:
    head = ["", "count", "mean", "p50", "p90", "p95", "p99", "p99.9", "max"]
    rows: list[Sequence[str]] = []
    named = [*((TITLES[m], getattr(s, m)) for m in METRICS)]
    named += [("Gap between chunks", s.itl_chunk), ("Server's queue", s.queue)]
    for title, p in named:
        if p.count:
            points = (p.mean, p.p50, p.p90, p.p95, p.p99, p.p999, p.max)
            rows.append([title, str(p.count), *map(duration, points)])
    return f"<p></p>{page.table(head, rows)}" if rows else ""


def _phases(s: Summary) -> str:
    if len(s.phases) < 2:
        return ""
    points = [
        (name, g.requests / max(1e-9, g.end_s - g.start_s), g) for name, g in s.phases.items()
    ]
    return page.section(
        "Phases", load_curve([(n, rate, g.tokens_per_s, g.ttft, g.tpot) for n, rate, g in points])
    ) + _group_table("phase", s.phases)


def load_curve(
    points: Sequence[tuple[str, float, float, Percentiles, Percentiles]],
    unit: str = "requests/s",
) -> str:
    """Return charts of throughput and latency against load.

    points: (label, load, tokens/s, ttft, tpot) of each load.
    """
    charts = []
    points = sorted(points, key=lambda point: point[1])
    for title, latencies in (
        ("Time to first token against load", [(p[1], p[3]) for p in points]),
        ("Time per output token against load", [(p[1], p[4]) for p in points]),
    ):
        series = []
        for q, colour in (("p50", 0), ("p99", 1)):
            known = [(load, latency) for load, latency in latencies if latency.count]
            xs, ys = [load for load, _ in known], [getattr(latency, q) for _, latency in known]
            series += [Series(q, xs, ys, colour), Series(q, xs, ys, colour, "dots")]
        if series[0].xs:
            x, y = Axis(unit, low=0.0), Axis(log=True, form=duration)
            charts.append((title, line_chart(series, x, y, name=title)))
    xs, ys = [p[1] for p in points], [p[2] for p in points]
    series = [Series("tokens/s", xs, ys, 2), Series("tokens/s", xs, ys, 2, "dots")]
    title = "Output tokens a second against load"
    x = Axis(unit, low=0.0)
    charts.append((title, line_chart(series, x, Axis(low=0.0), name=title)))
    return page.keys(["p50", "p99"]) + page.cards(charts)


def _errors(run: SavedRun) -> str:
    s = run.summary
    if not s.errors:
        return ""
    rows: list[Sequence[Cell | str]] = []
    for name, count in sorted(s.errors.items(), key=lambda item: -item[1]):
        mine = [r for r in run.records if r.error_class == name]
        codes = sorted({r.error_code or str(r.status) for r in mine if r.error_code or r.status})
        first = next((r for r in mine if r.error_message), None)
        rows.append(
            [
                Cell(name),
                Cell(str(count), "bad"),
                percent(round(count / max(1, s.requests), 5)),
                f"{min((r.end_s for r in mine), default=0):.2f} s",
                ", ".join(codes[:3]),
                Cell(ERROR_CLASSES.get(name, ""), "wrap"),
                Cell((first.error_message or "")[:300] if first else "", "wrap"),
            ]
        )
    wide = [Cell("meaning", "wrap"), Cell("first message", "wrap")]
    head: list[Cell | str] = ["class", "count", "share", "first at", "code", *wide]
    return page.section("Errors", page.table(head, rows))


def _faults(run: SavedRun) -> str:
    s = run.summary
    if not s.faults:
        return ""
    stretches = silences(run.records, s.no_service_after_s)
    rows: list[Sequence[Cell | str]] = []
    for index, mark in enumerate(s.faults, 1):
        until = s.faults[index].t if index < len(s.faults) else float("inf")
        failed = sum(r.failed and mark.t <= r.end_s < until for r in run.records)
        gap = sum(end - start for start, end in stretches if mark.t <= end and start < until)
        rows.append(
            [
                str(index),
                f"{mark.t:.2f} s",
                Cell(mark.what, "wrap"),
                Cell(str(failed), "bad" if failed else "dim"),
                Cell(duration(gap), "bad" if gap else "dim"),
            ]
        )
    head: list[Cell | str] = [
        "",
        "at",
        Cell("what", "wrap"),
        "failed until the next",
        "without service",
    ]
    return page.section("Faults", page.table(head, rows))


def _groups(title: str, groups: dict[str, GroupSummary], fairness: float | None) -> str:
    if not groups or (len(groups) == 1 and "" in groups):
        return ""
    note = "" if fairness is None else f"Jain's fairness index {fairness:.3f} (1: all alike)."
    return page.section(title, _group_table(title[:-1].lower(), groups), note)


def _group_table(what: str, groups: dict[str, GroupSummary]) -> str:
    head = [what, "requests", "failed", "tokens/s", "TTFT p50", "TTFT p99", "TPOT p50", "e2e p99"]
    rows: list[Sequence[Cell | str]] = []
    ranked = list(groups.items())
    if what != "phase":
        ranked.sort(key=lambda item: -item[1].requests)
    for name, g in ranked[:50]:
        times = (
            duration(v) if p.count else "–"
            for p, v in ((g.ttft, g.ttft.p50), (g.ttft, g.ttft.p99), (g.tpot, g.tpot.p50))
        )
        rows.append(
            [
                name or "(none)",
                str(g.requests),
                Cell(str(g.failed), "bad" if g.failed else "dim"),
                number(g.tokens_per_s),
                *times,
                duration(g.e2e.p99),
            ]
        )
    more = f"<p>… and {len(ranked) - 50} more</p>" if len(ranked) > 50 else ""
    return page.table(head, rows) + more


def _about(s: Summary) -> str:
    run = s.run
    pairs = [
        ("Started", run.started_at),
        ("Server", run.url),
        ("Model", run.model),
        ("GPUs", "" if run.gpus is None else str(run.gpus)),
        *run.target.items(),
        ("Client", f"{run.client_host}, {run.procs} processes"),
        ("Seed", str(run.seed)),
        ("Warm-up", f"{s.warmup_requests} requests, in no figure"),
        ("Not sent", str(s.unsent) if s.unsent else ""),
        ("Versions", ", ".join(f"{k} {v}" for k, v in run.versions.items())),
        ("Ends", ", ".join(f"{k} {v}" for k, v in s.finish_reasons.items())),
        ("Schema", s.schema),
    ]
    return page.section(
        "What was run", page.facts(pairs) + page.folded("The scenario", run.scenario)
    )
