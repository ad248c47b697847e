"""The README's Python runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
SNIPPETS = re.findall(r"^```python\n(.*?)^```", README.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.bundled
@pytest.mark.parametrize("snippet", SNIPPETS, ids=[f"snippet-{number}" for number in range(len(SNIPPETS))])
def test_snippet_runs_and_prints(
    snippet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet, str(README), "exec"), {})
    assert capsys.readouterr().out.strip()
