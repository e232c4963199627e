"""The building blocks of HTML pages. Only here is `escape` applied, to all text from outside."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from loadtest.report.style import CSS

Tone = Literal["", "good", "bad", "warn", "dim", "wrap"]

# Content security policy: injected markup could neither load nor run anything.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


@dataclass(frozen=True, slots=True)
class Cell:
    text: str
    tone: Tone = ""


@dataclass(frozen=True, slots=True)
class SummaryTile:
    what: str
    value: str
    more: str = ""
    tone: Tone = ""


def document(title: str, header: str, body: str, footer: str) -> str:
    """Return the whole page. header, body, footer: HTML from the functions below."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head>\n"
        f"<body><header>{header}</header>\n<main>{body}</main>\n<footer>{footer}</footer></body>"
        "</html>\n"
    )


def heading(title: str, sub: str, badges: Sequence[Cell], reasons: Sequence[str] = ()) -> str:
    marks = "".join(f'<span class="badge {b.tone}">{escape(b.text)}</span>' for b in badges)
    why = "".join(f"<p>{escape(reason)}</p>" for reason in reasons)
    why = f'<div class="reasons">{why}</div>' if why else ""
    return (
        f'<div class="head"><h1>{escape(title)}</h1>{marks}</div>'
        f'<p class="sub">{escape(sub)}</p>{why}'
    )


def tiles(items: Iterable[SummaryTile]) -> str:
    cells = "".join(
        f'<div class="tile {t.tone}"><span class="what">{escape(t.what)}</span>'
        f"<b>{escape(t.value)}</b><span>{escape(t.more)}</span></div>"
        for t in items
    )
    return f'<div class="tiles">{cells}</div>'


def section(title: str, body: str, note: str = "") -> str:
    subtitle = f'<p class="sub">{escape(note)}</p>' if note else ""
    return f"<section><h2>{escape(title)}</h2>{subtitle}{body}</section>\n"


def cards(charts: Iterable[tuple[str, str]]) -> str:
    """Return cards of (title, SVG) pairs, side by side where there is room."""
    cards = "".join(f'<div class="card"><h3>{escape(t)}</h3>{svg}</div>' for t, svg in charts)
    return f'<div class="grid">{cards}</div>'


def keys(labels: Sequence[str]) -> str:
    """Return the legend that several charts share, in the order of their colours."""
    rows = "".join(
        f'<span><i style="background:var(--s{i % 8})"></i>{escape(text)}</span>'
        for i, text in enumerate(labels)
    )
    return f'<p class="keys">{rows}</p>'


def wide_and_narrow(wide: str, narrow: str) -> str:
    """Return both drawings of one chart; CSS shows the one that fits the window's width."""
    return (
        f'<div class="card"><div class="wide">{wide}</div><div class="narrow">{narrow}</div></div>'
    )


def table(head: Sequence[Cell | str], rows: Iterable[Sequence[Cell | str]]) -> str:
    """Return an HTML table. The first column is the row's name."""
    parts = []
    for tag, row in [("th", head), *(("td", row) for row in rows)]:
        parts.append("<tr>")
        for item in row:
            cell = item if isinstance(item, Cell) else Cell(item)
            tone = f' class="{cell.tone}"' if cell.tone else ""
            parts.append(f"<{tag}{tone}>{escape(cell.text)}</{tag}>")
        parts.append("</tr>")
    return f'<div class="card scroll"><table>{"".join(parts)}</table></div>'


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    items = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in pairs if v)
    return f'<div class="card"><dl>{items}</dl></div>'


def folded(title: str, text: str) -> str:
    """Return a long text that unfolds with a click."""
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"
