"""Charts as SVG text for a self-contained page: no script, no font, no library.

Colours are the page's CSS variables (--s0 .. --s7, --grid, --ink), so one drawing serves the light
and the dark scheme. Charts are drawn for the width at which they are shown, so text keeps its size.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from typing import Literal

Format = Callable[[float], str]
Kind = Literal["line", "step", "area", "dots"]

_CHAR = 6.1  # mean width in pixels of a character in an 11 px label


@dataclass(frozen=True, slots=True)
class Series:
    """A line or area of a chart, with points in order of x.

    area: filled down to zero. step: holds each value until the next x.
    gap: points further apart than this are not connected.
    """

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    colour: int = 0
    kind: Kind = "line"
    dash: bool = False
    notes: Sequence[str] = ()  # one per point, shown at dots
    gap: float = math.inf


@dataclass(frozen=True, slots=True)
class Axis:
    label: str = ""
    log: bool = False
    low: float | None = None
    high: float | None = None
    form: Format = lambda value: number(value)


@dataclass(frozen=True, slots=True)
class ChartPanel:
    """A plot area of a timeline."""

    title: str
    series: Sequence[Series]
    y: Axis = field(default_factory=Axis)
    height: int = 96


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line. tag: the text at its top."""

    x: float
    tag: str
    text: str


@dataclass(frozen=True, slots=True)
class Band:
    start: float
    end: float
    text: str


def number(value: float) -> str:
    """Format a number with at most three significant digits: 0, 0.25, 12, 3.4k, 1.2M."""
    size = abs(value)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (limit if limit != 1e4 else 1e3):.3g}{unit}"
    if size >= 1000:
        return f"{value:.0f}"
    return f"{value:.3g}"


def duration(value: float) -> str:
    """Format a duration in seconds as 0, 850 µs, 12 ms, 1.5 s, 3 min."""
    size = abs(value)
    if size == 0:
        return "0"
    if size < 0.9995e-3:
        return f"{value * 1e6:.3g} µs"
    if size < 0.9995:
        return f"{value * 1e3:.3g} ms"
    if size < 999.5:
        return f"{value:.3g} s"
    return f"{value / 60:.3g} min"


def percent(value: float) -> str:
    """Format a share as 99.5%."""
    return f"{value * 100:.4g}%"


def line_chart(
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    *,
    name: str,
    limits: Sequence[Mark] = (),
) -> str:
    """Draw one plot. name: for screen readers. limits: vertical lines, such as an SLO's."""
    width, height = 340, 240
    body = _Plot(series, x, y, width, height, top=14, bottom=44 if x.label else 26).draw(limits)
    return _svg(width, height, name, body)


def timeline(
    panels: Sequence[ChartPanel],
    *,
    name: str,
    end: float,
    width: int,
    marks: Sequence[Mark] = (),
    bands: Sequence[Band] = (),
) -> str:
    """Draw panels below one another over the same seconds. Marks and bands cross all panels."""
    x = Axis("seconds", low=0.0, high=max(end, 1e-3))
    marks = sorted(marks, key=lambda mark: mark.x)
    parts, top = [], 30 if marks else 8
    plots = []
    for panel in panels:
        plot = _Plot(panel.series, x, panel.y, width, top + panel.height + 24, top + 22, 4)
        plots.append(plot)
        parts.append(f'<text class="panel" x="{plot.left}" y="{top + 10}">')
        parts.append(f"{escape(panel.title)}</text>")
        parts.append(_legend(panel.series, width - 8, top + 10, plot.left + _wide(panel.title)))
        top += panel.height + 34
    floor = top - 10
    first = plots[0]
    for band in bands:
        left, right = first.px(band.start), first.px(band.end)
        parts.append(
            f'<rect class="band" x="{left:.1f}" width="{max(1.5, right - left):.1f}" '
            f'y="{first.top}" height="{floor - first.top - 4}">'
            f"<title>{escape(band.text)}</title></rect>"
        )
    parts += [plot.draw((), ticks=plot is plots[-1]) for plot in plots]
    last = -1e9
    for mark in marks:
        at = first.px(mark.x)
        parts.append(
            f'<g class="mark"><line x1="{at:.1f}" x2="{at:.1f}" y1="20" y2="{floor - 4}"/>'
            f"<title>{escape(f'{mark.x:.1f} s: {mark.text}')}</title>"
        )
        if at - last > 8 + _CHAR * len(mark.tag):  # leave out tags that overlap the previous one
            parts.append(f'<text x="{at:.1f}" y="14">{escape(mark.tag)}</text>')
            last = at
        parts.append("</g>")
    return _svg(width, floor + 38, name, "".join(parts))


@dataclass(frozen=True, slots=True)
class Range:
    """A value with its interval. tone: a CSS class, good, bad or unsure."""

    label: str
    value: float
    low: float
    high: float
    text: str
    tone: str


def ranges(rows: Sequence[Range], *, name: str, width: int) -> str:
    """Draw horizontal intervals around zero, for relative changes."""
    if not rows:
        return ""
    reach = max(0.01, *(abs(v) for r in rows for v in (r.low, r.high)))
    left, right, line = 8 + _CHAR * max(len(r.label) for r in rows), 66, 24
    span = width - left - right
    middle = left + span / 2

    def px(value: float) -> float:
        return middle + max(-1.0, min(1.0, value / reach)) * span / 2

    bottom = 10 + line * len(rows)
    parts = [f'<line class="zero" x1="{middle}" x2="{middle}" y1="4" y2="{bottom}"/>']
    for index, row in enumerate(rows):
        y = 20 + line * index
        parts.append(
            f'<text x="{left - 8:.0f}" y="{y + 4}" class="right">{escape(row.label)}</text>'
            f'<line class="range {row.tone}" y1="{y}" y2="{y}" '
            f'x1="{px(row.low):.1f}" x2="{px(row.high):.1f}"/>'
            f'<circle class="{row.tone}" cx="{px(row.value):.1f}" cy="{y}" r="4"/>'
            f'<text x="{width - right + 8}" y="{y + 4}">{escape(row.text)}</text>'
        )
    for value in (-reach, 0.0, reach):
        parts.append(
            f'<text class="tick middle" x="{px(value):.1f}" y="{bottom + 14}">'
            f"{value * 100:+.3g}%</text>"
        )
    return _svg(width, bottom + 22, name, "".join(parts))


def ticks_of(low: float, high: float, about: int = 5) -> list[float]:
    """Return round numbers (1, 2, 5 times a power of ten) within [low, high]."""
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return [low]
    raw = span / about
    base = 10 ** math.floor(math.log10(raw))
    step = min((m * base for m in (1, 2, 5, 10)), key=lambda s: abs(math.log(s / raw)))
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks_of(low: float, high: float) -> list[float]:
    """Return powers of ten as ticks of a logarithmic axis, with numbers between them where there
    is room.
    """
    if high / low > 300:
        steps: tuple[int, ...] = (1,)
    elif high / low > 12:
        steps = (1, 3)
    else:
        steps = (1, 2, 3, 5, 7)
    marks = [
        m * 10.0**e
        for e in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for m in steps
    ]
    return [t for t in marks if low * 0.999 <= t <= high * 1.001]


class _Plot:
    """The mapping of one plot's values to pixels, and its drawing."""

    def __init__(
        self,
        series: Sequence[Series],
        x: Axis,
        y: Axis,
        width: int,
        height: int,
        top: int,
        bottom: int,
    ) -> None:
        self.series = [s for s in series if len(s.xs)]
        self.x, self.y = x, y
        self.left, self.right = 52, width - 14
        self.top, self.bottom = top, height - bottom
        self.x_low, self.x_high = _range(x, [v for s in self.series for v in s.xs])
        self.y_low, self.y_high = _range(y, [v for s in self.series for v in s.ys], zero=True)

    def px(self, value: float) -> float:
        share = _share(value, self.x_low, self.x_high, self.x.log)
        return self.left + share * (self.right - self.left)

    def py(self, value: float) -> float:
        share = _share(value, self.y_low, self.y_high, self.y.log)
        return self.bottom - share * (self.bottom - self.top)

    def draw(self, limits: Sequence[Mark], ticks: bool = True) -> str:
        parts = [self._grid(ticks)]
        for mark in limits:
            if self.x_low <= mark.x <= self.x_high:
                at = self.px(mark.x)
                parts.append(
                    f'<g class="mark"><line x1="{at:.1f}" x2="{at:.1f}" y1="{self.top}" '
                    f'y2="{self.bottom}"/><text x="{at:.1f}" y="{self.top - 3}">'
                    f"{escape(mark.tag)}</text><title>{escape(mark.text)}</title></g>"
                )
        parts += [self._draw(series) for series in self.series]
        return "".join(parts)

    def _grid(self, ticks: bool) -> str:
        parts = []
        about = max(2, round((self.bottom - self.top) / 45))
        levels = (
            log_ticks_of(self.y_low, self.y_high)
            if self.y.log
            else ticks_of(self.y_low, self.y_high, about)
        )
        for value in levels:
            at = self.py(value)
            parts.append(
                f'<line class="grid" x1="{self.left}" x2="{self.right}" '
                f'y1="{at:.1f}" y2="{at:.1f}"/>'
                f'<text class="tick right" x="{self.left - 7}" y="{at + 3.5:.1f}">'
                f"{escape(self.y.form(value))}</text>"
            )
        across = (
            log_ticks_of(self.x_low, self.x_high)
            if self.x.log
            else ticks_of(self.x_low, self.x_high, max(3, (self.right - self.left) // 90))
        )
        last = -1e9
        for value in across:
            at = self.px(value)
            parts.append(
                f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" '
                f'y1="{self.top}" y2="{self.bottom}"/>'
            )
            text = self.x.form(value)
            if ticks and at - last > _CHAR * len(text) + 6:
                parts.append(
                    f'<text class="tick middle" x="{at:.1f}" y="{self.bottom + 16}">'
                    f"{escape(text)}</text>"
                )
                last = at
        if ticks:
            parts.append(
                f'<text class="axis middle" x="{(self.left + self.right) / 2:.0f}" '
                f'y="{self.bottom + 34}">{escape(self.x.label)}</text>'
            )
        return "".join(parts)

    def _draw(self, series: Series) -> str:
        points = [(self.px(x), self.py(y)) for x, y in zip(series.xs, series.ys, strict=True)]
        style = f'style="--c:var(--s{series.colour % 8})"'
        if series.kind == "dots":
            return self._dots(series, points, style)
        if series.kind in ("step", "area"):
            points = [
                p
                for (x, y), (following, _) in zip(points, [*points[1:], points[-1]], strict=True)
                for p in ((x, y), (following, y))
            ]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        if series.kind == "line" and series.gap < math.inf:
            far = [b - a > series.gap for a, b in pairwise(series.xs)]
            path = "".join(
                f"{'M' if apart else 'L'}{x:.1f} {y:.1f}{'h0' if apart else ''}"
                for apart, (x, y) in zip([True, *far], points, strict=True)
            )
        classes = "line dash" if series.dash else "line"
        text = f"<title>{escape(series.label)}</title>"
        if series.kind == "area":
            zero = self.py(max(0.0, self.y_low))
            closed = f"{path}L{points[-1][0]:.1f} {zero:.1f}L{points[0][0]:.1f} {zero:.1f}Z"
            return f'<path class="area" {style} d="{closed}">{text}</path>'
        return f'<path class="{classes}" {style} d="{path}">{text}</path>'

    def _dots(self, series: Series, points: list[tuple[float, float]], style: str) -> str:
        parts = []
        for index, (x, y) in enumerate(points):
            note = series.notes[index] if index < len(series.notes) else ""
            label = f"{series.label}: {self.y.form(series.ys[index])} at "
            label += self.x.form(series.xs[index])
            parts.append(
                f'<circle {style} class="dot" cx="{x:.1f}" cy="{y:.1f}" r="4">'
                f"<title>{escape(label)}</title></circle>"
            )
            if note:
                end = x + 8 + _CHAR * len(note) > self.right
                parts.append(
                    f'<text class="note{" right" if end else ""}" x="{x + (-8 if end else 8):.1f}" '
                    f'y="{y + (-7 if end else 13):.1f}">{escape(note)}</text>'
                )
        return "".join(parts)


def _share(value: float, low: float, high: float, log: bool) -> float:
    if log:
        value, low, high = (math.log10(max(v, 1e-12)) for v in (value, low, high))
    return max(-0.02, min(1.02, (value - low) / (high - low)))


def _range(axis: Axis, values: Sequence[float], zero: bool = False) -> tuple[float, float]:
    """Return the two ends of an axis, which are never equal. zero: the axis includes 0."""
    if axis.log:
        values = [v for v in values if v > 0] or [1e-3, 1.0]
        low = axis.low if axis.low is not None else min(values) / 1.05
        high = axis.high if axis.high is not None else max(values) * 1.05
        return (low, high) if high / low > 1.5 else (low / 1.5, high * 1.5)
    least = min(values, default=0.0)
    low = axis.low if axis.low is not None else (min(0.0, least) if zero else least)
    most = max(values, default=1.0)
    high = axis.high if axis.high is not None else low + (most - low) * 1.08
    return low, high if high > low else low + 1.0


def _wide(title: str) -> float:
    return _CHAR * 1.15 * len(title) + 12


def _legend(series: Sequence[Series], right: float, y: float, left: float) -> str:
    """Draw labels from the right end on. Labels without room appear only in tooltips."""
    parts, at = [], right
    for labelled in reversed([s for s in series if s.label]):
        length = _CHAR * len(labelled.label)
        if at - length - 18 < left:
            break
        parts.append(
            f'<text class="key right" x="{at:.0f}" y="{y}">{escape(labelled.label)}</text>'
            f'<rect x="{at - length - 15:.0f}" y="{y - 7}" width="10" height="7" rx="2" '
            f'fill="var(--s{labelled.colour % 8})"/>'
        )
        at -= length + 26
    return "".join(parts)


def _svg(width: int, height: int, name: str, body: str) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{escape(name)}">{body}</svg>'
    )
