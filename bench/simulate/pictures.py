"""Line charts as SVG text, without a library."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_COLOURS = ("#0b6bcb", "#d1495b", "#8a8f98", "#2e9e6b", "#b07d00", "#7a4fbf")
_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 62, 14, 30, 34


@dataclass(frozen=True, slots=True)
class Line:
    label: str
    points: Sequence[tuple[float, float]]
    steps: bool = False  # constant until the next point
    colour: int = -1  # index in the palette; -1: the line's index in the panel


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart with one pair of axes. log: whether the horizontal axis is logarithmic."""

    title: str
    x: str
    lines: Sequence[Line]
    log: bool = False
    height: int = 200


def svg(title: str, panels: Sequence[Panel]) -> str:
    """Return an SVG with the panels below each other."""
    total = 34 + sum(panel.height for panel in panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {total}" '
        'font-family="system-ui, sans-serif" font-size="11">',
        f'<rect width="{_WIDTH}" height="{total}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="20" font-size="14" font-weight="600">{title}</text>',
    ]
    top = 28
    for panel in panels:
        parts += _panel(panel, top)
        top += panel.height
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel, top: int) -> list[str]:
    points = [point for line in panel.lines for point in line.points]
    low_x, high_x = min(x for x, _ in points), max(x for x, _ in points)
    high_y = _ceiling(max(y for _, y in points))
    begin, end = top + _TOP, top + panel.height - _BOTTOM

    def place_x(x: float) -> float:
        share = (
            math.log(x / low_x) / math.log(high_x / low_x)
            if panel.log
            else (x - low_x) / ((high_x - low_x) or 1)
        )
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def place_y(y: float) -> float:
        return end - y / high_y * (end - begin)

    out = [f'<text x="{_LEFT}" y="{top + 14}" font-weight="600">{panel.title}</text>']
    for share in (0.0, 0.5, 1.0):
        y = place_y(share * high_y)
        out.append(
            f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#e3e5e8"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{share * high_y:g}</text>'
        )
    for x in _ticks(low_x, high_x, panel.log):
        out.append(f'<text x="{place_x(x):.1f}" y="{end + 14}" text-anchor="middle">{x:g}</text>')
    out.append(
        f'<text x="{_WIDTH - _RIGHT}" y="{end + 28}" text-anchor="end" fill="#555">{panel.x}</text>'
    )
    at = _LEFT + 8.0 * len(panel.title)
    for number, line in enumerate(panel.lines):
        colour = _COLOURS[(number if line.colour < 0 else line.colour) % len(_COLOURS)]
        path, last = [], None
        for x, y in line.points:
            spot = f"{place_x(x):.1f},{place_y(min(y, high_y)):.1f}"
            if line.steps and last is not None:
                path.append(f"{place_x(x):.1f},{last}")
            last = spot.split(",")[1]
            path.append(spot)
        out.append(
            f'<polyline fill="none" stroke="{colour}" stroke-width="1.6" '
            f'points="{" ".join(path)}"/>'
            f'<rect x="{at:.0f}" y="{top + 6}" width="10" height="10" fill="{colour}"/>'
            f'<text x="{at + 14:.0f}" y="{top + 15}">{line.label}</text>'
        )
        at += 30 + 6.2 * len(line.label)
    return out


def _ceiling(value: float) -> float:
    if value <= 0:
        return 1.0
    unit = 10 ** math.floor(math.log10(value))
    return next(step * unit for step in (1, 2, 2.5, 5, 10) if step * unit >= value * 0.999)


def _ticks(low: float, high: float, log: bool) -> list[float]:
    if log:
        first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
        return [10.0**power for power in range(first, last + 1)]
    unit = _ceiling((high - low) / 6)
    return [unit * n for n in range(math.ceil(low / unit), math.floor(high / unit) + 1)]
