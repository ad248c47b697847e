"""How values show themselves in a notebook: small tables, everything escaped, no script and no colours of their own."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

_LEFT, _RIGHT = "text-align:left;vertical-align:top", "text-align:right;vertical-align:top"


def size(nbytes: int) -> str:
    """``nbytes`` for people, in powers of 1000: "31.9 MB"."""
    amount, units = float(nbytes), ["bytes", "kB", "MB", "GB", "TB"]
    while amount >= 999.95 and len(units) > 1:
        amount, units = amount / 1000, units[1:]
    return f"{nbytes:,} bytes" if units[0] == "bytes" else f"{amount:.1f} {units[0]}"


def share(part: int, whole: int) -> str:
    """``part`` of ``whole`` in per cent."""
    return f"{part / whole:.1%}" if whole else "-"


def caption(text: str) -> str:
    return f"<strong>{html.escape(text)}</strong>"


def paragraph(text: str) -> str:
    """``text`` with its line breaks."""
    return f'<div style="white-space:pre-wrap;max-width:60em">{html.escape(text)}</div>'


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """A table of names and values."""
    lines = (
        f'<tr><th style="{_LEFT}">{html.escape(name)}</th><td style="{_LEFT}">{html.escape(value)}</td></tr>'
        for name, value in rows
    )
    return f"<table>{''.join(lines)}</table>"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table under ``headings``; the first ``left`` columns hold words, the others numbers."""
    styles = [_LEFT if at < left else _RIGHT for at in range(len(headings))]
    head = "".join(f'<th style="{style}">{html.escape(text)}</th>' for text, style in zip(headings, styles, strict=True))
    body = "".join(
        "<tr>"
        + "".join(f'<td style="{style}">{html.escape(cell)}</td>' for cell, style in zip(row, styles, strict=True))
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
