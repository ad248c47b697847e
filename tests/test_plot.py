"""Pictures: what is drawn is what was measured. How they look is for eyes, in notebooks/choosing_a_mode.ipynb."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kv_rag import Document, Engine
from kv_rag.errors import InvalidSetting
from tests.conftest import text_of

plot = pytest.importorskip("kv_rag.plot", exc_type=ImportError)

RESULTS = [
    {"method": method, "keep": keep, "protocol": protocol, "bytes": 1000 * keep, "nll": 3 - keep, "share": keep,
     "seconds_to_first_token": 0.1}
    for protocol in ("seen", "unseen") for method in ("keydiff", "random") for keep in (0.5, 0.1)
]  # fmt: skip


@pytest.fixture
def engine(make_engine: Callable[..., Engine]) -> Engine:
    engine = make_engine()
    engine.ingest(Document("One $line$ of text.\n\n" + text_of(300, 1), "a$b$c"), keep=0.5)
    return engine


def drawn(figure: Any) -> str:
    return "".join(text.get_text() for text in figure.axes[0].texts)


def test_kept_tokens_draws_all_of_the_text_within_the_picture(engine: Engine) -> None:
    figure = plot.kept_tokens("a$b$c", engine)
    assert drawn(figure) == "".join("".join(engine.kept("a$b$c").texts).split())
    assert figure._repr_png_().startswith(b"\x89PNG")
    width, _ = figure.axes[0].get_xlim()[1], figure.axes[0].get_ylim()
    assert max(text.get_position()[0] for text in figure.axes[0].texts) < width


def test_kept_tokens_shades_by_share(engine: Engine) -> None:
    kept = engine.kept("a$b$c", question="What?")
    figure = plot.draw_kept(kept, (0, 3))
    shades = {tuple(patch.get_facecolor()) for patch in figure.axes[0].patches}
    assert shades == {tuple(plot._SHARE(plot._SCALE(share))) for share in kept.shares[:3]}


def test_kept_tokens_draws_a_part(engine: Engine) -> None:
    assert drawn(plot.kept_tokens("a$b$c", engine, characters=(4, 10))) == "$line$"
    for wrong in ((5, 5), (-1, 3), (5000, 5001)):
        with pytest.raises(InvalidSetting, match="characters"):
            plot.kept_tokens("a$b$c", engine, characters=wrong)


def test_frontier_draws_a_line_for_each_method_and_a_row_for_each_protocol(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    file.write_text(json.dumps({"results": RESULTS}))
    for results in (RESULTS, file, str(file)):
        figure = plot.frontier(results)
        assert len(figure.axes) == 4
        line = figure.axes[0].lines[0]
        assert (list(line.get_xdata()), list(line.get_ydata())) == ([100, 500], [0.1, 0.5])
        assert [text.get_text() for text in figure.legends[0].get_texts()] == ["keydiff", "random"]
    assert len(plot.frontier(RESULTS, protocol="seen", measure="nll").axes) == 2


def test_frontier_leaves_out_what_was_not_measured() -> None:
    without = [{key: value for key, value in row.items() if key != "seconds_to_first_token"} for row in RESULTS]
    assert len(plot.frontier([*without, {"method": "full", "share": None, "bytes": 1}]).axes) == 2


def test_frontier_draws_what_depends_on_no_protocol_beside_every_protocol() -> None:
    full = {"method": "full", "bytes": 1, "share": 1}
    common = [{**full, "method": "snapkv", "protocol": "per query"}, full]
    figure = plot.frontier([*RESULTS, *common])
    assert [len(axes.lines) for axes in figure.axes] == [4, 2, 4, 2]


@pytest.mark.parametrize(
    ("results", "options", "told"),
    [
        ("nowhere.json", {}, "cannot read results"),
        ([], {}, "nothing to draw"),
        ([{"share": 1}], {}, "needs a method"),
        ({"method": "a"}, {}, "list of mappings"),
        (RESULTS, {"measure": "f1"}, "measure must be"),
        (RESULTS, {"protocol": "guessed"}, "there are: seen, unseen"),
    ],
)
def test_frontier_says_what_is_wrong_with_results(results: Any, options: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidSetting, match=told):
        plot.frontier(results, **options)


def test_memory_draws_the_bytes_of_the_report(engine: Engine, make_engine: Callable[..., Engine]) -> None:
    figure = plot.memory(engine)
    [document] = engine.memory().documents
    widths = sorted(patch.get_width() for patch in figure.axes[0].patches)
    assert widths == sorted([*(state.bytes_on_disk for state in document.states), document.resident_bytes])
    with pytest.raises(InvalidSetting, match="no documents"):
        plot.memory(make_engine(folder="empty"))


def test_without_matplotlib_the_error_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "import kv_rag\n"
        "try:\n    import kv_rag.plot\n"
        "except kv_rag.KVRagError as error:\n    assert isinstance(error, ImportError); print(error)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'kv_rag[plot]'" in result.stdout, result.stderr
