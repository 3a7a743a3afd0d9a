"""The import order goes strictly downward, files stay short, and an import pulls in no framework."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAX_LINES = 400
FRAMEWORKS = (
    "triton",
    "fastapi",
    "uvicorn",
    "prometheus_client",
    "pydantic_settings",
    "langchain_core",
    "llama_index",
    "ray",
)

# Lowest first. A module may import what stands before it, or a neighbour on its own line.
LAYERS = (
    ("pdllm_store",),
    ("pdllm_rag.errors",),
    (
        "pdllm_rag.chunking",
        "pdllm_rag.front_matter",
        "pdllm_rag.history",
        "pdllm_rag.html_layout",
        "pdllm_rag.metadata",
        "pdllm_rag.readers",
        "pdllm_rag.sources",
        "pdllm_rag.clock",
        "pdllm_rag.placement",
        "pdllm_rag.numerics",
        "pdllm_rag.planning",
        "pdllm_rag.squeezing",
        "pdllm_rag.teams",
        "pdllm_rag.templates",
        "pdllm_rag.lexical_tables",
        "pdllm_rag.lexical_file",
    ),
    ("pdllm_rag.models",),
    ("pdllm_rag.attention",),
    ("pdllm_rag.context", "pdllm_rag.cheaper", "pdllm_rag.attends", "pdllm_rag.lanes", "pdllm_rag.staging"),
    ("pdllm_rag.pool", "pdllm_rag.uploads"),
    ("pdllm_rag.estimators", "pdllm_rag.combinations"),
    (
        "pdllm_rag.support",
        "pdllm_rag.sparsity",
        "pdllm_rag.encoder",
        "pdllm_rag.policies",
        "pdllm_rag.scoring",
        "pdllm_rag.first_stage",
    ),
    ("pdllm_rag.prefill", "pdllm_rag.ingest", "pdllm_rag.decoding"),
    ("pdllm_rag.training",),
    ("pdllm_rag.sketches", "pdllm_rag.foreign", "pdllm_rag.fusion", "pdllm_rag.drafts", "pdllm_rag.evidence"),
    ("pdllm_rag.stages",),
    ("pdllm_rag.retrieval", "pdllm_rag.mending", "pdllm_rag.transcript", "pdllm_rag.answer", "pdllm_rag.config"),
    ("pdllm_rag.events", "pdllm_rag.reading", "pdllm_rag.copies"),
    ("pdllm_rag.resolving", "pdllm_rag.given"),
    ("pdllm_rag.asking", "pdllm_rag.registry"),
    ("pdllm_rag.together",),
    ("pdllm_rag.engine",),
    ("pdllm_rag.evaluation", "pdllm_rag.bench", "pdllm_rag.components", "pdllm_rag.server", "pdllm_rag.distributed"),
    ("pdllm_rag.cli",),
    ("langchain_pdllm", "llama_index.llms.pdllm"),
    ("llama_index.retrievers.pdllm",),
    ("llama_index.vector_stores.pdllm",),
)
FOLDERS = {
    "pdllm_store": ROOT / "store",
    "pdllm_rag": ROOT,
    "langchain_pdllm": ROOT / "integrations",
    "llama_index": ROOT / "integrations",
}


def source_files() -> list[tuple[str, Path]]:
    found = []
    for package, folder in FOLDERS.items():
        for path in sorted((folder / package).rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return found


def layer_of(module: str) -> int | None:
    for height, names in enumerate(LAYERS):
        if any(module == name or module.startswith(f"{name}.") for name in names):
            return height
    return None


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def test_every_module_has_a_place_in_the_order() -> None:
    homeless = [module for module, _ in source_files() if layer_of(module) is None and module != "pdllm_rag"]
    assert not homeless


def test_modules_import_downward_only() -> None:
    wrong = [
        f"{module} imports {name}"
        for module, path in source_files()
        if module != "pdllm_rag"
        for name in imported(path)
        if (target := layer_of(name)) is not None and (own := layer_of(module)) is not None and target > own
    ]
    assert not wrong


def test_no_file_is_longer_than_400_lines() -> None:
    long = {
        str(path.relative_to(ROOT)): n
        for _, path in source_files()
        if (n := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert not long


@pytest.mark.parametrize("statement", ["import pdllm_rag", "from pdllm_rag import RagEngine"])
def test_an_import_pulls_in_no_framework(statement: str) -> None:
    code = f"{statement}; import sys; print([name for name in {FRAMEWORKS} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_the_store_needs_neither_transformers_nor_the_engine() -> None:
    code = "import pdllm_store, sys; print([m for m in ('transformers', 'pdllm_rag') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
