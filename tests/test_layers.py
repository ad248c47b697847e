"""Each module imports only from layers before its own."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import kv_rag

ROOT = Path(kv_rag.__file__).parent
LAYERS = [
    {"errors", "html", "hub"}, {"document"}, {"rotary", "selection", "scoring"}, {"state"}, {"observation"}, {"methods"},
    {"attention"}, {"bundled"}, {"model"}, {"store"}, {"prompt"}, {"snapkv", "compose", "likelihood"},
    {"answer", "ingest", "memory", "resident", "generation", "kept"},
    {"engine"}, {"threads", "lazy", "turns"}, {"plot"}, {"__init__"}, {"textfiles", "search"}, {"demo"}, {"evaluation"},
    {"cli"},
]  # fmt: skip
FILES = sorted(path for path in ROOT.rglob("*.py"))


def module_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def rank(module: str) -> int:
    return next(index for index, layer in enumerate(LAYERS) if module in layer)


def imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "kv_rag":
                found += [f"kv_rag.{a.name}" if (ROOT / f"{a.name}.py").exists() or (ROOT / a.name).is_dir()
                          else "kv_rag.__init__" for a in node.names]  # fmt: skip
            else:
                found.append(node.module)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_module_imports_only_from_layers_before_it(path: Path) -> None:
    own = module_of(path)
    for name in imports(path):
        if name.startswith("kv_rag."):
            other = name.split(".")[1]
            assert other == own or rank(other) < rank(own), f"{own} imports {other}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_knows_a_framework(path: Path) -> None:
    assert not any(name.split(".")[0] in ("llama_index", "langchain_core", "langchain") for name in imports(path))


def test_only_model_code_touches_transformers() -> None:
    users = {module_of(path) for path in FILES if any(n.split(".")[0] == "transformers" for n in imports(path))}
    # attention registers itself; generation uses logits processors and stopping criteria; the demo compares with it
    assert users <= {"model", "bundled", "attention", "generation", "demo", "cli"}
