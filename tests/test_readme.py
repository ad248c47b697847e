"""The Python in the README and in docs/ runs as it stands, and links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kv_rag import methods

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SNIPPETS = [
    pytest.param(snippet, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, snippet in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), flags=re.M | re.S))
]


@pytest.mark.bundled
@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippet_runs_and_prints(
    snippet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(methods, "METHODS", dict(methods.METHODS))  # a snippet registers one of its own
    exec(compile(snippet, "snippet", "exec", dont_inherit=True), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_lead_to_files_that_are_there(page: Path) -> None:
    text = page.read_text("utf-8")
    linked = [page.parent / target for target in re.findall(r"\]\((?!https?://)([^)#]+)", text)]
    named = [ROOT / path for path in re.findall(r"(?:docs|examples|benchmarks|notebooks|tests)/[\w/]+\.\w+", text)]
    assert [str(path) for path in (*linked, *named) if not path.exists()] == []
