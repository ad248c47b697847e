"""Pictures: which tokens stayed, what a method costs and keeps, where the bytes are. Needs the extra ``plot``.

Every function returns a matplotlib figure that shows itself in a notebook; ``figure.savefig("name.png")`` writes it. No
window is opened and pyplot's state is not touched.
"""

from __future__ import annotations

import io
import json
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kv_rag.engine import Engine
from kv_rag.errors import InvalidSetting, MissingExtra
from kv_rag.html import size
from kv_rag.kept import KeptTokens

try:
    from matplotlib import colormaps
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle
    from matplotlib.ticker import FuncFormatter, MaxNLocator
except ImportError as error:
    raise MissingExtra("kv_rag.plot needs matplotlib; install it: pip install 'kv_rag[plot]'") from error

COLUMNS, CHARACTER, LINE = 100, 0.085, 0.21  # characters a line; inches a character is wide and a line is high
_MARKERS = "osD^vP*X<>ph"
_SHARE = LinearSegmentedColormap.from_list("kept", ["#ffffff", "#ffe1b3", "#ffab40", "#e65100"])
_SCALE = PowerNorm(0.6, 0, 1)  # budgets are small: most tokens are kept by few heads
_DISK, _FULL, _RESIDENT = "#6baed6", "#2171b5", "#fd8d3c"
# Figures of a result that ``frontier`` can put on its axes, and what they are called.
MEASURES = {
    "share": "share of the gap between no document and full cache",
    "nll": "nats per token of the right answer (less is better)",
}
COSTS = {"bytes": "bytes kept between questions", "seconds_to_first_token": "seconds to first token"}


class Picture(Figure):
    """A matplotlib figure that shows itself in a notebook without pyplot."""

    def _repr_png_(self) -> bytes:
        written = io.BytesIO()
        self.savefig(written, format="png", dpi=110, bbox_inches="tight")
        return written.getvalue()


def kept_tokens(
    document: str,
    engine: Engine,
    *,
    question: str | None = None,
    keep: float | None = None,
    method: str | None = None,
    characters: tuple[int, int] | None = None,
) -> Figure:
    """The text of ``document``, each token shaded by the share of heads that keep its pair.

    Args:
        document: id, beginning of an id, name or text of an ingested document.
        engine: whose store has it.
        question: the pairs that SnapKV picks for this question; None for those of the compressed state.
        keep: with a question, the fraction that SnapKV keeps, else picks among the stored states.
        method: picks among the stored states.
        characters: draw only the text from the first of these to the second, for long documents.

    """
    return draw_kept(engine.kept(document, question=question, keep=keep, method=method), characters)


def draw_kept(kept: KeptTokens, characters: tuple[int, int] | None = None) -> Figure:
    """As ``kept_tokens``, of what ``engine.kept`` gave."""
    begin, end = characters or (0, sum(map(len, kept.texts)))
    if begin < 0 or begin >= end:
        raise InvalidSetting(f"characters must be (from, to) with 0 <= from < to, got {characters!r}")
    cells, lines = _cells(kept, begin, end)
    if not cells:
        raise InvalidSetting(f"characters={characters!r} lies behind the end of the document's text")
    height = (lines + 0.5) * LINE
    title = textwrap.fill(f"{kept.document}: {kept.chosen}, {kept.keep:.0%} of pairs kept", COLUMNS)
    head = (title.count("\n") + 1) * LINE + 0.2
    foot = 0.75
    figure = Picture(figsize=(COLUMNS * CHARACTER + 0.4, height + head + foot))
    whole = figure.get_figheight()
    axes = figure.add_axes((0.2 / figure.get_figwidth(), foot / whole, 1 - 0.4 / figure.get_figwidth(), height / whole))
    axes.set(xlim=(0, COLUMNS), ylim=(lines + 0.25, -0.25))
    axes.axis("off")
    for row, column, text, share in cells:
        axes.add_patch(Rectangle((column, row + 0.04), len(text), 0.92, color=_SHARE(_SCALE(share)), linewidth=0))
        for at, character in enumerate(text):  # one by one: no font has every character at the same width
            if not character.isspace():
                axes.text(
                    column + at + 0.5, row + 0.5, character, ha="center", va="center", family="monospace", fontsize=9,
                    color="white" if share > 0.8 else "black", parse_math=False,
                )  # fmt: skip
    figure.text(0.2 / figure.get_figwidth(), 1 - 0.1 / whole, title, va="top", ha="left", fontsize=10, parse_math=False)
    bar = figure.add_axes((0.3, 0.4 / whole, 0.4, 0.13 / whole))
    figure.colorbar(ScalarMappable(_SCALE, _SHARE), cax=bar, orientation="horizontal", format=_per_cent())
    bar.set_title("share of (layer, head) places that keep the token's pair", fontsize=8, pad=3)
    bar.tick_params(labelsize=8)
    return figure


def _cells(kept: KeptTokens, begin: int, end: int) -> tuple[list[tuple[int, int, str, float]], int]:
    """Row, column, text and share of each stretch to draw, wrapped at words; and the number of rows."""
    text = "".join(kept.texts)
    shares = [share for part, share in zip(kept.texts, kept.shares, strict=True) for _ in part]
    cells: list[tuple[int, int, str, float]] = []
    row = column = 0
    at = begin
    while at < min(end, len(text)):
        if text[at] == "\n":
            row, column, at = row + 1, 0, at + 1
            continue
        word = at + 1
        while word < min(end, len(text)) and not text[word].isspace():
            word += 1
        if column and column + word - at > COLUMNS:
            row, column = row + 1, 0
            if text[at] in " \t":
                at += 1
                continue
        for position in range(at, word):
            if column == COLUMNS:  # a word longer than a line
                row, column = row + 1, 0
            cells.append((row, column, text[position], shares[position]))
            column += 1
        at = word
    return _joined(cells), row + 1


def _joined(cells: Sequence[tuple[int, int, str, float]]) -> list[tuple[int, int, str, float]]:
    """Neighbours of the same share as one: fewer rectangles, no hairlines between them."""
    joined: list[tuple[int, int, str, float]] = []
    for row, column, text, share in cells:
        if joined and joined[-1][0] == row and joined[-1][3] == share:
            before = joined.pop()
            joined.append((row, before[1], before[2] + text, share))
        else:
            joined.append((row, column, text, share))
    return joined


def frontier(
    results: Iterable[Mapping[str, Any]] | str | Path, *, measure: str = "share", protocol: str | None = None
) -> Figure:
    """What each method keeps of the answers for its bytes, and for its seconds to the first token.

    Args:
        results: of ``kv-rag bench quality``: mappings with ``method``, ``keep``, ``bytes`` and the ``measure``, where
            known ``protocol`` and ``seconds_to_first_token``; or the JSON file with them.
        measure: "share" or "nll".
        protocol: only results of this protocol; None for all, one row of panels each.

    """
    if measure not in MEASURES:
        raise InvalidSetting(f"measure must be one of {', '.join(MEASURES)}, got {measure!r}")
    rows = [row for row in _read(results) if row.get(measure) is not None]
    protocols = list(dict.fromkeys(str(row.get("protocol") or "") for row in rows if not _is_common(row))) or [""]
    if protocol is not None:
        if protocol not in protocols:
            raise InvalidSetting(f"no result of protocol {protocol!r}; there are: {', '.join(protocols) or 'no results'}")
        protocols = [protocol]
    costs = [cost for cost in COSTS if any(row.get(cost) is not None for row in rows)]
    if not costs:
        raise InvalidSetting(f"nothing to draw: no result has {measure!r} and one of {', '.join(COSTS)}")
    methods = list(dict.fromkeys(str(row["method"]) for row in rows))
    figure = Picture(figsize=(5 * len(costs) + 2.4, 4.2 * len(protocols)), layout="constrained")
    panels = figure.subplots(len(protocols), len(costs), squeeze=False)
    for panel_row, name in zip(panels, protocols, strict=True):
        chosen = [row for row in rows if _is_common(row) or str(row.get("protocol") or "") == name]
        for panel, cost in zip(panel_row, costs, strict=True):
            _frontier_panel(panel, chosen, cost, measure, methods)
        if len(protocols) > 1:
            panel_row[0].set_title(name.replace("_", " "), loc="left", fontsize=10)
    shown = {label: line for panel in panels.flat for line, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend(
        [shown[name] for name in methods if name in shown], [name for name in methods if name in shown],
        loc="outside right center", frameon=False, fontsize=9,
    )  # fmt: skip
    return figure


def _is_common(row: Mapping[str, Any]) -> bool:
    """Whether a result does not depend on how documents were compressed, and so belongs beside those of any protocol."""
    return row.get("protocol") == "per query" or row["method"] in ("full", "no document")


def _frontier_panel(
    panel: Axes, rows: list[Mapping[str, Any]], cost: str, measure: str, methods: Sequence[str]
) -> None:
    colours = colormaps["tab10" if len(methods) <= 10 else "tab20"]
    for at, method in enumerate(methods):
        points = [row for row in rows if row["method"] == method and row.get(cost) is not None]
        points.sort(key=lambda row: float(row.get("keep") or 0))
        if not points:
            continue
        panel.plot(
            [float(row[cost]) for row in points], [float(row[measure]) for row in points], label=method,
            color=colours(at % colours.N), marker=_MARKERS[at % len(_MARKERS)], markersize=6, linewidth=1.4,
            linestyle="-" if at < colours.N else "--",
        )  # fmt: skip
    panel.set(xlabel=COSTS[cost], ylabel=MEASURES[measure] if cost == "bytes" else "")
    if cost == "bytes":
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size(round(value)) if value >= 0 else ""))
        panel.xaxis.set_major_locator(MaxNLocator(5))
    if measure == "share":
        panel.yaxis.set_major_formatter(_per_cent())
    panel.yaxis.label.set_fontsize(8.5)
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)


def _read(results: Iterable[Mapping[str, Any]] | str | Path) -> list[Mapping[str, Any]]:
    """Results as they are, or from a JSON file that holds a list or an object with the list under "results"."""
    content: Any = results
    if isinstance(results, (str, Path)):
        try:
            content = json.loads(Path(results).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise InvalidSetting(f"cannot read results from {str(results)!r}: {error}") from error
        if isinstance(content, Mapping):
            content = content.get("results")
    if not isinstance(content, Iterable) or isinstance(content, (str, bytes, Mapping)):
        raise InvalidSetting('results must be a list of mappings, or a JSON file with one (or with {"results": [...]})')
    rows = list(content)
    wrong = next((row for row in rows if not isinstance(row, Mapping) or "method" not in row), None)
    if wrong is not None:
        raise InvalidSetting(f"a result needs a method, got {wrong!r}")
    return rows


def memory(engine: Engine) -> Figure:
    """Bytes of every document: compressed and full states on disk, and what is held in memory now."""
    report = engine.memory()
    if not report.documents:
        raise InvalidSetting("the store holds no documents: nothing to draw; ingest some first")
    names = [textwrap.shorten(document.name or document.id[:12], 34, placeholder=" …") for document in report.documents]
    figure = Picture(figsize=(8, 0.55 * len(names) + 1.7), layout="constrained")
    axes = figure.subplots()
    for at, document in enumerate(report.documents):
        left = 0
        for state in document.states:
            full = state.compression == "full"
            axes.barh(at - 0.19, state.bytes_on_disk, 0.34, left=left, color=_FULL if full else _DISK, edgecolor="white")
            left += state.bytes_on_disk
        axes.barh(at + 0.19, document.resident_bytes, 0.34, color=_RESIDENT)
    axes.set_yticks(range(len(names)), [name.replace("$", r"\$") for name in names])
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size(round(value))))
    axes.set_title(f"{size(report.bytes_on_disk)} on disk, {size(report.resident_bytes)} resident", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    labels = [(_DISK, "compressed states on disk"), (_FULL, "full state on disk"), (_RESIDENT, "resident now")]
    handles = [Rectangle((0, 0), 1, 1, color=colour) for colour, _ in labels]
    figure.legend(handles, [label for _, label in labels], loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def _per_cent() -> FuncFormatter:
    return FuncFormatter(lambda value, _: "" if math.isnan(value) else f"{value:.0%}")
