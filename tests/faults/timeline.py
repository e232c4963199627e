"""Draws a run with kills as a self-contained SVG file."""

from loadtest.report.charts import Axis, ChartPanel, Mark, Series, duration, timeline
from loadtest.report.style import CSS
from tests.faults.load import Run

WIDTH = 1100


def picture(run: Run, title: str, happened: str = " killed") -> str:
    """Return an SVG of replicas, requests in flight and each stream's longest pause over time.

    A vertical line marks each kill. happened: the words after the target's name in its label.
    """
    done = sorted(run.requests, key=lambda one: one.gap_at_s)
    changes = sorted(
        [(request.at_s, 1) for request in run.requests]
        + [(request.end_s, -1) for request in run.requests]
    )
    xs, ys, now = [0.0], [0.0], 0
    for at, change in changes:
        now += change
        xs.append(at)
        ys.append(float(now))
    failed = [request for request in done if not request.ok]
    gaps = [
        Series("a stream", [o.gap_at_s for o in done], [o.gap_s for o in done], 0, "dots"),
        Series("2 s", [0.0, run.seconds], [2.0, 2.0], 7, dash=True),
    ]
    if failed:
        gaps.append(
            Series("failed", [o.end_s for o in failed], [o.gap_s for o in failed], 5, "dots")
        )
    panels = [
        ChartPanel("Longest pause of each stream", gaps, Axis(low=0.0, form=duration), 170),
        ChartPanel("Requests in flight", [Series("", xs, ys, 2, "step")], Axis(low=0.0), 90),
        ChartPanel(
            "Replicas that a router sees",
            [
                Series(
                    "", [t for t, _ in run.replicas], [float(n) for _, n in run.replicas], 1, "step"
                )
            ],
            Axis(low=0.0),
            70,
        ),
    ]
    marks = [
        Mark(kill.at_s, kill.target[0].upper(), f"{kill.target}{happened} at {kill.at_s:.1f} s")
        for kill in run.kills
    ]
    svg = timeline(panels, name=title, end=run.seconds, width=WIDTH, marks=marks)
    svg = svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)  # for files
    begin = svg.index(">") + 1
    looks = f"<style>{CSS}svg{{background:var(--card);font-family:sans-serif}}</style>"
    return f"{svg[:begin]}<title>{title}</title>{looks}{svg[begin:]}\n"
