"""Results as a table, as JSON, CSV and pictures."""

from __future__ import annotations

import csv
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.filesize import decimal
from rich.table import Table

from kv_rag.evaluation.quality import Row


def machine(model: str) -> dict[str, str]:
    """Where figures were measured."""
    return {
        "model": model, "machine": platform.machine(), "python": platform.python_version(), "torch": torch.__version__,
        "transformers": version("transformers"), "threads": str(torch.get_num_threads()),
    }  # fmt: skip


def table(rows: Sequence[Row]) -> Table:
    """One line for each method, keep and protocol."""
    shown = Table(box=box.SIMPLE_HEAD)
    for heading in ("method", "keep", "protocol"):
        shown.add_column(heading)
    for heading in ("NLL", "of the gap", "predicted", "agrees", "F1", "bytes", "ingest", "first token"):
        shown.add_column(heading, justify="right")
    for row in rows:
        shown.add_row(
            row.method, f"{row.keep:g}", row.protocol, f"{row.nll:.3f}", f"{row.share:.1%}", f"{row.predicted:.1%}",
            _share(row.agreement), _share(row.f1), decimal(round(row.bytes)),
            "-" if row.ingest is None else f"{row.ingest:.2f} x", f"{row.seconds_to_first_token:.2f} s",
        )  # fmt: skip
    return shown


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def write(rows: Sequence[Row], folder: Path, about: dict[str, str]) -> list[Path]:
    """``results.json`` (with ``about``), ``results.csv`` and, where matplotlib is installed, two pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    results = [asdict(row) for row in rows]
    written = [folder / "results.json", folder / "results.csv"]
    written[0].write_text(json.dumps({"about": about, "results": results}, indent=1), encoding="utf-8")
    with written[1].open("w", newline="", encoding="utf-8") as out:
        lines = csv.DictWriter(out, [field.name for field in fields(Row)])
        lines.writeheader()
        lines.writerows(results)
    return written + _pictures(results, folder)


def _pictures(results: list[dict[str, Any]], folder: Path) -> list[Path]:
    try:
        from kv_rag import plot
    except ImportError:
        return []
    path = folder / "frontier.png"
    plot.frontier(results).savefig(path, bbox_inches="tight", dpi=110)
    return [path]
